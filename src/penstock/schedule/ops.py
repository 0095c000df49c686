"""Ops, the units of work of a pipeline, and their text form.

The notation comes from ``torch.distributed.pipelining`` (``_Action`` in its ``schedules.py``, torch 2.13):
stage, kind, microbatch, as in ``3F0``; a fused pair of a forward and a backward is
``(0F7;7B3)OVERLAP_F_B``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from penstock.base.errors import ScheduleError


class Kind(IntEnum):
    """Computation of an op."""

    F = 0
    """Forward."""
    B = 1
    """Full backward, input gradient and weight gradient in one."""
    I = 2  # noqa: E741 - the field's letter for the input-gradient half
    """Backward of the inputs only."""
    W = 3
    """Backward of the weights only, after ``I`` of the same stage and microbatch."""
    R = 4
    """Recompute, the forward again, to rebuild what the backward needs."""


@dataclass(frozen=True, slots=True, order=True)
class Op:
    """One computation of a stage for a microbatch; `kind` says which."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward that run as one op and may overlap each other's communication."""

    forward: Op
    backward: Op

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


_OP = re.compile(r"([0-9]+)([FBIWR])([0-9]+)")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def parse_op(text: str) -> Op | Pair:
    """Parse an op such as ``3F0`` or a pair such as ``(0F7;7B3)OVERLAP_F_B``."""
    text = text.strip()
    if pair := _PAIR.fullmatch(text):
        halves = [parse_op(half) for half in pair.groups()]
        match halves:
            case [Op(kind=Kind.F) as forward, Op(kind=Kind.B | Kind.I) as backward]:
                return Pair(forward, backward)
        raise ScheduleError(f"{text!r}: a pair is a forward (F) and then a backward (B or I)")
    if single := _OP.fullmatch(text):
        stage, kind, microbatch = single.groups()
        if len(stage) > 9 or len(microbatch) > 9:
            raise ScheduleError(f"{text[:40]!r}: stage and microbatch have at most nine digits")
        return Op(int(stage), Kind[kind], int(microbatch))
    raise ScheduleError(
        f"{text[:60]!r} is not an op; an op is stage, one of F B I W R, microbatch, as in 3F0, "
        "or a pair as in (0F7;7B3)OVERLAP_F_B"
    )
