"""One case of the zoo: everything that is drawn."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import tests.zoo.forwards  # noqa: F401 - fills FORWARDS
import tests.zoo.kinds  # noqa: F401 - fills KINDS
from penstock.base.errors import ScheduleError
from penstock.schedule.families import FAMILIES, build_schedule
from tests.zoo.forward import FORWARDS, Forward, fits
from tests.zoo.habits import HABITS, LOSSES
from tests.zoo.kind import KINDS, WIDTH, Kind

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adagrad")
FORMS = ("list", "sequential", "named", "builders")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything that is drawn.

    Attributes:
        seed: of the weights and the batches.
        kinds: names of kinds, in the order of the model.
        schedule, ranks, virtual_stages: of a pipeline.
        microbatches: of a pipeline.
        rows: of a microbatch, before `uneven` changes it.
        uneven: "even"; "odd", one row less in the last ones; "microbatches", cut by hand; "empty", with one of no row.
        transport: "threads" or "processes".
        dp: pipelines side by side.
        recompute: as `penstock.Pipeline` takes it.
        autocast: whether in bfloat16.
        optimizer: one of `OPTIMIZERS`.
        wrapped: whether by `penstock.PipelineOptimizer`, with a torch optimizer for each rank.
        clip: the largest norm of the gradients; 0 for none.
        accumulate: steps an update.
        reduction: "mean", "sum" or "count".
        loss: a key of `LOSSES`.
        habit: a key of `HABITS`.
        form: how the model is given, one of `FORMS`, unless it has a forward of its own.
        steps: how many.
        forward: a key of `FORWARDS`; empty for a list of layers.
        shard: what replicas divide, as `penstock.ParallelOptions` takes it.
    """

    seed: int
    kinds: tuple[str, ...]
    schedule: str = "1f1b"
    ranks: int = 2
    virtual_stages: int = 1
    microbatches: int = 4
    rows: int = 2
    uneven: str = "even"
    transport: str = "threads"
    dp: int = 1
    recompute: str | int = "none"
    autocast: bool = False
    optimizer: str = "sgd"
    wrapped: bool = False
    clip: float = 0.0
    accumulate: int = 1
    reduction: str = "mean"
    loss: str = "mse"
    habit: str = "none"
    form: str = "list"
    steps: int = 3
    forward: str = ""
    shard: str = "none"

    @property
    def entries(self) -> list[Kind]:
        return [KINDS[name] for name in self.kinds]

    @property
    def own(self) -> Forward | None:
        """The model's own forward; None for a list of layers."""
        return FORWARDS[self.forward] if self.forward else None

    @property
    def copies(self) -> bool:
        """Whether a stage's microbatches are divided among several copies of it."""
        return self.dp > 1 or not FAMILIES[self.schedule].in_order

    @property
    def in_order(self) -> bool:
        """Whether every gradient is summed as plain PyTorch sums it."""
        bounded = any(entry.bounded for entry in (*self.entries, *([self.own] if self.own else ())))
        return not self.copies and not bounded

    @property
    def may_be_sharded(self) -> bool:
        """Whether there are replicas, and no other copies of a stage."""
        return self.dp > 1 and FAMILIES[self.schedule].in_order

    def reduces(self, number: int) -> bool:
        """Whether replicas add up their gradients in a step; a wrapped optimizer lets them do it before an update only."""
        return self.dp == 1 or not self.wrapped or (number + 1) % self.accumulate == 0

    @property
    def processes(self) -> int:
        return self.ranks * self.dp

    @property
    def free(self) -> bool:
        """Whether the schedule lets one choose the virtual stages."""
        return FAMILIES[self.schedule].chooses_virtual_stages

    @property
    def stages(self) -> int:
        virtual = self.virtual_stages if self.free else None
        return build_schedule(self.schedule, self.ranks, self.microbatches, virtual).stages

    def text(self) -> str:
        """As JSON, without what is as it is by default."""
        given = asdict(self)
        return json.dumps({f.name: given[f.name] for f in fields(self) if given[f.name] != f.default})


def read(text: str) -> Case:
    """A case from what `Case.text` wrote."""
    found = json.loads(text)
    return Case(**{**found, "kinds": tuple(found["kinds"])})


def draw(
    seed: int,
    names: tuple[str, ...] | None = None,
    transport: str | None = None,
    forwards: tuple[str, ...] | None = None,
    sharded: bool = False,
) -> Case:
    """The case of a seed; its first kind goes through the list as the seeds do.

    Args:
        seed: any number of at least 0.
        names: the kinds to draw from; all by default.
        transport: instead of the drawn one; in threads there are no replicas.
        forwards: those to draw from; by default all, and none in three of four cases.
        sharded: whether replicas divide weights, gradients or the optimizer; by default in half of the cases that can be.
    """
    chance = random.Random(f"zoo {seed}")
    names = tuple(KINDS) if names is None else names
    if sharded:
        names = tuple(name for name in names if KINDS[name].copies)
    first = names[seed % len(names)]
    rest = chance.sample([name for name in names if name != first], min(chance.randint(2, 7), len(names) - 1))
    kinds = [first, *rest]
    chance.shuffle(kinds)
    entries = [KINDS[name] for name in kinds]
    needs = max(k.rows for k in entries)
    uneven = chance.choices(["even", "odd", "microbatches", "empty"], [6, 2, 2, 1])[0]
    if uneven == "empty" and needs > 1:
        uneven = "even"
    least = needs + (uneven == "odd")
    rows = max(least, chance.choice([2, 2, 3, WIDTH]))
    habit = chance.choices(list(HABITS), [habit.weight for habit in HABITS.values()])[0]
    limits = [o for o in (HABITS[habit].optimizers, *(k.optimizers for k in entries)) if o is not None]
    allowed = [name for name in OPTIMIZERS if all(name in limit for limit in limits)]
    tied = any(k.bounded for k in entries)
    case = Case(
        seed=seed,
        kinds=tuple(kinds),
        **draw_schedule(chance, all(k.copies for k in entries), sharded),
        rows=rows,
        uneven=uneven,
        transport=chance.choice(["threads", "processes"]),
        recompute=chance.choices(["none", "full", 2], [4, 1, 1])[0],
        autocast=all(k.autocast for k in entries) and habit != "double" and chance.random() < 0.4,
        optimizer=chance.choice(allowed),
        wrapped=chance.random() < 0.4,
        clip=chance.choice([0.0, 0.5]) if all(k.clip for k in entries) else 0.0,
        accumulate=chance.choices([1, 2], [4, 1])[0] if habit != "double" else 1,
        reduction=chance.choices(["mean", "sum", "count"], [4, 1, 1])[0],
        loss=chance.choices(list(LOSSES), [loss.weight for loss in LOSSES.values()])[0],
        habit=habit,
        form=chance.choice([form for form in FORMS if form != "builders" or not tied]),
        steps=chance.choice([3, 3, 4]),
    )
    if forwards if forwards is not None else fits(first) and chance.random() < 0.25:
        case = with_forward(case, first, chance, forwards or tuple(FORWARDS))
    if transport != "threads" and case.may_be_sharded and (sharded or chance.random() < 0.5):
        shard = chance.choice(["optimizer", "gradients", "weights", "weights"])
        # The norm of parts is that of the whole but for its last bit.
        case = replace(case, shard=shard, wrapped=True, clip=0.0, accumulate=1)
    if transport == "threads":
        return replace(case, transport="threads", dp=1)
    return replace(case, transport="processes") if transport or case.dp > 1 else case


def with_forward(case: Case, first: str, chance: random.Random, forwards: tuple[str, ...]) -> Case:
    """The case with a forward of its own around those of its kinds that can stand in any."""
    kinds = tuple(name for name in case.kinds if fits(name)) or ("linear",)
    name = chance.choice(forwards)
    case = replace(case, kinds=kinds, form="list", forward=name)
    if FORWARDS[name].loss != "given":
        case = replace(case, loss="mse")
    if (
        name != "loop"
    ):  # modules that do not run in the order in which the model has them: the norm's terms neither
        case = replace(case, clip=0.0)
    if case.habit == "none" and FORWARDS[name].group == "modes":
        case = replace(case, habit=chance.choice(["evaluate", "eval_mode", "module_mode"]))
    return case


def draw_schedule(chance: random.Random, copies: bool, sharded: bool) -> dict[str, Any]:
    """Schedule, ranks, virtual stages, microbatches and replicas that go together, with or without copies of a stage."""
    while True:
        family = FAMILIES[chance.choice(list(FAMILIES))]
        ranks = chance.choice([1, 2, 2, 3, 4])
        virtual = family.virtual_stages
        if family.chooses_virtual_stages:
            virtual = chance.choice([family.virtual_stages, family.least_virtual_stages])
        case = Case(
            seed=0,
            kinds=(),
            schedule=family.name,
            ranks=ranks,
            virtual_stages=virtual,
            microbatches=chance.randint(2, 6),
            dp=chance.choices([1, 2], [3, 1])[0],
        )
        try:
            fits = case.processes <= 4 and case.stages <= 8
        except ScheduleError:
            continue
        if fits and (copies or not case.copies) and (case.may_be_sharded or not sharded):
            names = ("schedule", "ranks", "virtual_stages", "microbatches", "dp")
            return {name: getattr(case, name) for name in names}
