"""The report page's first advice, taken and measured, for ten runs.

Each run is traced; its advice names a change and promises a gain. The change is made, and both steps are measured in
turn. Two ranks compute on two cores, or four sleep.

    python -m bench.advice [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from bench import sleep
from bench.compare import Figures, alternate, main
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.show.analysis import MIN_GAIN, Advice, advise
from penstock.show.planned import plan
from penstock.trace.bubbles import makespan
from penstock.trace.events import Trace
from penstock.train.config.sections import ModelConfig
from penstock.train.model import llama

BLOCKS, WIDTH, SEQUENCE, ROWS = 8, 256, 128, 2
WARM, TRACED = 3, 5


@dataclass(frozen=True)
class Setting:
    """One run.

    Attributes:
        name: schedule family.
        microbatches: microbatches of a step.
        virtual: stages per rank, or None for the family's.
        split: blocks of every stage, or None for an even split.
        sleeping: whether four ranks sleep; two ranks compute otherwise.
    """

    name: str
    microbatches: int
    virtual: int | None = None
    split: tuple[int, ...] | None = None
    sleeping: bool = False

    def __str__(self) -> str:
        split = "" if self.split is None else f" split {'+'.join(map(str, self.split))}"
        return f"{self.name} m={self.microbatches}{split}{' sleeping' if self.sleeping else ''}"


SETTINGS = (
    Setting("gpipe", 4),
    Setting("1f1b", 2),
    Setting("1f1b", 4),
    Setting("1f1b", 8),
    Setting("interleaved-1f1b", 4, 2),
    Setting("1f1b", 8, None, (5, 3)),
    Setting("gpipe", 6, None, (3, 5)),
    Setting("1f1b", 8, None, None, True),
    Setting("gpipe", 12, None, None, True),
    Setting("interleaved-1f1b", 8, 2, None, True),
)


def pipeline(setting: Setting) -> Pipeline:
    """Return the pipeline of a setting, ranks in threads."""
    options = {"microbatches": setting.microbatches, "schedule": setting.name}
    if setting.virtual is not None:
        options["virtual_stages"] = setting.virtual
    if setting.sleeping:
        stages = 4 * (setting.virtual or sleep.virtual_of(setting.name))
        model = nn.Sequential(*[sleep.Sleeper(stages // 4) for _ in range(stages)])
        execution = ExecutionOptions(check_finite=False)  # their gradients are whatever is in memory
        return Pipeline(model, sleep.loss, ranks=4, execution=execution, **options)
    config = ModelConfig(width=WIDTH, layers=BLOCKS, heads=4, kv_heads=2, hidden=704)
    split = "even" if setting.split is None else list(setting.split)
    return Pipeline(llama.layers(config), llama.next_token_loss, ranks=2, split=split, **options)


def step_of(setting: Setting, pipe: Pipeline) -> Callable[[], float]:
    """Return a function that runs a step and returns the seconds from its first op to its last."""
    if setting.sleeping:
        inputs = sleep.batch(setting.microbatches, 1024)
    else:
        tokens = torch.randint(256, (ROWS * setting.microbatches, SEQUENCE + 1))
        inputs = tokens[:, :-1], tokens[:, 1:]

    def step() -> float:
        pipe.step(*inputs)
        trace = pipe.trace()
        assert trace is not None
        return float(makespan(trace))

    return step


def usual_step(step: Callable[[], float], pipe: Pipeline) -> Trace:
    """Return the trace of the step with the median time."""
    for _ in range(WARM):
        step()
    found = []
    for _ in range(TRACED):
        found.append((step(), pipe.trace()))
    return sorted(found, key=lambda pair: pair[0])[TRACED // 2][1]


def taken(setting: Setting, advice: Advice) -> tuple[Setting, float] | None:
    """Return the setting with the first advice taken, and the promised gain; None if there is no advice."""
    now = advice.changes[0]
    gains = [(1 - change.makespan / now.makespan, change) for change in advice.changes[1:]]
    named = [
        (gain, change)
        for gain, change in gains
        if gain >= MIN_GAIN and change.words in advice.sentence.lower()
    ]
    if not named:
        named = [
            (gain, change) for gain, change in gains if gain >= MIN_GAIN and f"{gain:.0%}" in advice.sentence
        ]
    if not named:
        return None
    gain, change = max(named, key=lambda pair: pair[0])
    if change.split is not None:
        return Setting(
            setting.name, setting.microbatches, setting.virtual, change.split, setting.sleeping
        ), gain
    virtual = round(change.virtual_stages)
    return Setting(change.schedule, setting.microbatches, virtual, None, setting.sleeping), gain


def measure(options: argparse.Namespace) -> Figures:
    """Take the advice of every run, and compare the gain with the promise."""
    torch.set_num_threads(1)
    settings: Sequence[Setting] = SETTINGS[2:9:6] if options.quick else SETTINGS
    yield f"{'run':28} {'advice':28} {'promised':>9} {'measured':>9}"
    rows = []
    for setting in settings:
        with ExitStack() as stack:
            pipe = stack.enter_context(pipeline(setting))
            step = step_of(setting, pipe)
            trace = usual_step(step, pipe)
            advice = advise(trace, plan(trace))
            choice = taken(setting, advice)
            if choice is None:
                rows.append({"run": str(setting), "advice": None})
                yield f"{setting!s:28} {'none':28}"
                continue
            other, promised = choice
            changed = step_of(other, stack.enter_context(pipeline(other)))
            for _ in range(WARM):
                changed()
            times = alternate({"now": step, "then": changed}, max(3, options.rounds))
            measured = 1 - statistics.median(times["then"]) / statistics.median(times["now"])
        rows.append({"run": str(setting), "advice": str(other), "promised": promised, "measured": measured})
        yield f"{setting!s:28} {other!s:28} {promised:9.1%} {measured:9.1%}"
    given = [row for row in rows if row["advice"]]
    off = [abs(row["promised"] - row["measured"]) for row in given]
    wrong = sum(row["measured"] <= 0 for row in given)
    yield f"largest difference {max(off, default=0):.1%}; of the wrong sign {wrong} of {len(given)}"
    return {"runs": rows, "largest_difference": max(off, default=0.0), "wrong_sign": wrong}


if __name__ == "__main__":
    main(measure, __doc__, rounds=15)
