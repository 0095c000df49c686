"""Participants of a rank's steps beside its ops: gradients that are reduced, weights that are gathered, and checks.

An executor has one tuple of participants, and calls those that do something in a phase of a step:

1. `Participant.begin`, in their order.
2. While the ops run, where the Program says: `unshard`, `before`, `before_gradients`, `reshard`, `reduce`,
   `complete` and `settle`.
3. `finish`, once the ops are done, and then `agree`, both in the opposite order.
4. `end`; or after an error in any of these phases `abandon`, in the opposite order.

So the first ones are around the others, as nested contexts are. `Executor` explains the order that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from penstock.base.encoding import sendable
from penstock.base.errors import CallOrderError
from penstock.schedule.ops import Op
from penstock.stage.compute.stage import Stage

CollectiveKind = Literal["unshard", "reduce"]

Collective = tuple[CollectiveKind, int]
"""A gather of a stage's weights or a reduction of its gradients, where the Program says it: its kind, and the stage."""


@sendable
class Refusal(NamedTuple):
    """Reason why all ranks refuse a step; of two, the smaller tuple is closer to the cause.

    Attributes:
        kind: one of the kinds in `penstock.runtime.consensus`.
        depth: number of stages between this one and the last; of ignored targets, the index that is ignored.
        microbatch: number of the microbatch; -1 for a weight.
    """

    kind: int
    depth: int
    microbatch: int


@sendable
@dataclass
class Losses:
    """The losses of a step.

    Attributes:
        total: loss by microbatch id, a 0-d tensor; or logarithms of probabilities, of shape (rows, tokens).
        weights: weight of each loss by microbatch id; the weights sum to 1, unless losses are summed.
    """

    total: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    rows_in: tuple[int, ...] = ()
    rows_out: tuple[int, ...] = ()

    def update(self, other: Losses) -> None:
        """Add the losses of another rank."""
        self.total.update(other.total)
        self.parts.update(other.parts)
        self.weights.update(other.weights)
        self.rows_in = self.rows_in or other.rows_in
        self.rows_out = self.rows_out or other.rows_out


@dataclass(kw_only=True)
class Step:
    """A step of one rank, as its participants see it.

    Attributes:
        number: number of the step; every rank gives it the same.
        trained: training steps done before it.
        trains: whether it computes gradients.
        reduces: whether gradients are reduced over replicas, and not left to be reduced together with a later step's.
        microbatches: number of a replica's microbatches.
        collectives: gathers of weights and reductions of gradients that the Program has, in their order.
        op: function that tells the present op.
        flags: what this rank tells the others at the end of the step. A participant may set bits of it.
    """

    number: int
    trained: int
    trains: bool
    reduces: bool
    microbatches: int
    collectives: Sequence[Collective]
    op: Callable[[], Op]
    flags: int = 0


@dataclass
class Outcome:
    """Outcome of a step: what this rank knows when its ops are done, and what all know once they have agreed.

    Attributes:
        refusal: reason to refuse the step; None if there is none.
        flags: flags of the ranks so far, or-ed.
    """

    losses: Losses
    refusal: Refusal | None
    flags: int


class StepFailure(NamedTuple):
    """An error that ends a step on this rank.

    Attributes:
        error: as it was raised.
        report: the error for the user, which also says where it was.
        ran: False if the step was refused before its first op.
        told: whether it says that other ranks do not come, so that nothing is to be had from them.
    """

    error: BaseException
    report: BaseException
    ran: bool
    told: bool


class Participant:
    """A part in the steps of one rank; its methods do nothing unless they are overridden.

    Attributes:
        recorded: buckets whose collectives belong to a trace of the step.
    """

    @property
    def recorded(self) -> Sequence[Any]:
        return ()

    def begin(self, step: Step) -> None:
        """Begin a step, before its first op. After an error, the others begin nevertheless, and are abandoned then."""

    def unshard(self, stage: int) -> None:
        """Start to gather a stage's weights."""

    def before(self, stage: int) -> None:
        """Have a stage's weights ready for a backward, or a recomputation, that comes next."""

    def before_gradients(self, stage: int) -> None:
        """Have the sums of a stage's gradients ready, to which the op that comes next adds: a backward, or a half of one."""

    def reshard(self, stage: int) -> None:
        """Drop a stage's weights."""

    def last_backward(self, stage: Stage, backward: Callable[[], None]) -> Callable[[], None]:
        """Return what runs in place of a stage's last backward in a step; called once, when ops are compiled."""
        return backward

    def reduce(self, stage: int) -> None:
        """Start to reduce the gradients of a stage whose weights come and go; it may have several such moments in a step.

        Buckets do not wait for it: the hook of a bucket's last gradient starts its reduction.
        """

    def complete(self, stage: int) -> None:
        """Take note that this rank's gradients of a stage are complete."""

    def settle(self) -> None:
        """Wait for reductions that began an op ago, and give their memory back."""

    def finish(self) -> None:
        """End the step's work on gradients, after its last op."""

    def sharded_grads(self, stage: int) -> list[Tensor]:
        """Return gradients of a stage's parameters that are not in ``.grad``."""
        return []

    def agree(self, outcome: Outcome) -> None:
        """Exchange what ranks know of the step's outcome."""

    def end(self, step: Step, outcome: Outcome) -> None:
        """End a step that all ranks have agreed on, even if they refuse it."""

    def abandon(self, failure: StepFailure) -> None:
        """End a step that failed on this rank, and tell those who wait for it. May be called before `begin`."""


def require_same_number(numbers: Iterable[object]) -> None:
    """Raise CallOrderError unless all processes give the same number of microbatches to a step."""
    if len(found := sorted(set(map(str, numbers)))) > 1:
        raise CallOrderError(
            f"the processes give other numbers of microbatches to one step: {', '.join(found)}; every process must give the "
            "same. No weight was changed; zero the gradients before the next step"
        )


def overrides(participants: Sequence[Participant], method: str) -> list[Any]:
    """Return the participants' bound methods of one name, without those that do nothing."""
    does_nothing = getattr(Participant, method)
    return [getattr(each, method) for each in participants if getattr(type(each), method) is not does_nothing]
