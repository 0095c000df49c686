from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from penstock.runtime.pipeline import Pipeline
from penstock.schedule.families import FAMILIES
from penstock.show.analysis import advise
from penstock.show.planned import plan
from penstock.show.what_if.alternatives import Alternatives, ChangeLines
from penstock.train.config.file import load
from penstock.train.config.resolve import resolve
from tests.support.lanes import exhaustive
from tests.support.simulated import built, timed


def alternatives(trace) -> Alternatives:
    return Alternatives(trace, plan(trace))


def slow(layers: list[int], key: str = "split"):
    """1f1b on four ranks, whose third stage takes twice as long as the others."""
    program = built("1f1b", 4, 8)
    trace = timed(program, [2, 2, 4, 2], [2, 2, 4, 2], [2, 2, 4, 2])
    names = [[f"layer {n}" for n in range(count)] for count in layers]
    return replace(trace, info={**trace.info, key: names if key == "split" else layers})


def test_a_layer_or_a_block_is_moved_off_a_slow_stage():
    up, down = alternatives(slow([2, 2, 4, 2])).moved()
    assert up.words == "stage 2 takes 2.00 times the median; with one of its 4 layers moved to stage 1"
    assert down.words.endswith("moved to stage 3")
    better = timed(built("1f1b", 4, 8), [2, 2, 3, 3], [2, 2, 3, 3], [2, 2, 3, 3])
    assert down.makespan == better.end.max()
    assert down.lines == ChangeLines("", "split=[(0, 2), (2, 4), (4, 7), (7, 10)]")
    _, down = alternatives(slow([2, 2, 4, 2], "blocks")).moved()
    assert down.words.endswith("with one of its 4 blocks moved to stage 3")
    assert down.lines == ChangeLines("--set 'schedule.split=[2,2,3,3]'", "split=[2, 2, 3, 3]")


def test_no_layer_moves_to_where_it_needs_more_memory_than_any_rank_has_now():
    """Stage 0 of gpipe holds as much as any other, so a second layer there would need twice that."""
    trace = timed(built("gpipe", 2, 4), [1, 2], [1, 2], [1, 2])
    assert list(alternatives(replace(trace, info={**trace.info, "split": [["a"], ["b", "c"]]})).moved()) == []


def test_a_slow_stage_is_named_even_if_nothing_can_be_moved_off_it():
    assert list(alternatives(slow([1, 1, 1, 1])).moved()) == []
    trace = slow([1, 1, 1, 1])
    assert advise(trace, plan(trace)).sentence.startswith("Stage 2 takes 2.00 times the median. ")


def test_without_names_of_layers_even_stages_are_simulated():
    trace = timed(built("1f1b", 4, 8), [2, 2, 4, 2], [2, 2, 4, 2], [2, 2, 4, 2])
    (change,) = alternatives(trace).moved()
    assert change.words == "stage 2 takes 2.00 times the median; with equal stages"
    assert change.lines.of("") == ['Pipeline(..., split={"measured": (x, y)})']


def test_no_schedule_with_more_stages_than_blocks_is_proposed():
    trace = timed(built("1f1b", 4, 8), 4, 4, 4)
    few = replace(trace, info={**trace.info, "blocks": [2, 1, 1, 1]})
    assert {change.virtual_stages for change in alternatives(few).reordered()} == {1}
    assert 2 in {change.virtual_stages for change in alternatives(trace).reordered()}


@pytest.mark.parametrize(
    ("name", "v", "uneven"),
    [
        ("1f1b", 1, True),
        *exhaustive(("gpipe", 1, False), ("interleaved-1f1b", 2, True), ("zb-v", None, False)),
    ],
)
def test_the_lines_make_the_change_that_was_simulated(name: str, v: int | None, uneven: bool):
    """Every line builds a pipeline, or a config, with the schedule and the stages of its change."""
    ranks, microbatches = 2, 4
    program = built(name, ranks, microbatches, v)
    stages = program.schedule.stages
    blocks = [10 - 2 * (stages - 1), *[2] * (stages - 1)] if uneven else [8 // stages] * stages
    slowest = [1.0] * (stages - 1) + [3.0]
    trace = timed(program, slowest, slowest, slowest)
    trace = replace(trace, info={**trace.info, "blocks": blocks})
    made = alternatives(trace)
    present = {"schedule": name, "virtual_stages": stages // ranks, "split": blocks}
    changes = [*made.moved(), *made.reordered()]
    assert changes
    for change in changes:
        keywords = eval(f"dict({change.lines.pipeline})")  # our own text, as a person pastes it
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(sum(blocks))])
        options = {**present, **keywords, "ranks": ranks, "microbatches": microbatches}
        with Pipeline(model, nn.functional.mse_loss, **options) as pipe:
            assert pipe.schedule.name == change.schedule
            assert pipe.schedule.stages == change.virtual_stages * ranks
        pairs = [
            f"schedule.name={name}",
            f"parallel.virtual_stages={stages // ranks}",
            f"schedule.split={blocks}",
        ]
        pairs += ["parallel.pp=2", f"schedule.microbatches={microbatches}", "train.batch=8"]
        option, *rest = change.lines.train.replace("'", "").split()
        assert option == "--set"
        config = resolve(load(None, [*pairs, *rest]), None)
        family = FAMILIES[config.schedule.name]
        assert family.build(ranks, microbatches, config.parallel.virtual_stages).name == change.schedule
        assert config.parallel.virtual_stages == change.virtual_stages
        if change.split is not None:
            assert list(change.split) == list(config.schedule.split) == list(keywords["split"])
        elif change.virtual_stages * ranks != stages:
            assert config.schedule.split == keywords["split"] == "even"
