"""Costs of ops and messages, the simulator's only input besides the Program.

Letters follow the zero-bubble paper (2401.10241): F is the forward, B the input-gradient half of the backward, W its
weight-gradient half. A full backward takes ``full``, by default B + W. `penstock.simulate.cost_file` reads costs from a
file.

If every number is whole, all times of the simulation are whole and exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from penstock.base.counts import plural
from penstock.base.errors import ConfigError
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement

Blocks = Literal["none", "sender", "receiver", "both"]
PairOutput = Literal["end", "early"]
Cost = float | int | Sequence[float | int]
Table = npt.NDArray[Any]

_MAX = 2**62
"""Largest number of seconds or bytes: sums must fit 64 bits."""


@dataclass(frozen=True)
class Link:
    """Speed of messages between two ranks."""

    latency: float | int = 0  # seconds a message takes whatever its size
    bandwidth: float = math.inf  # bytes per second

    def __post_init__(self) -> None:
        _number("latency", self.latency)
        if not isinstance(self.bandwidth, int | float) or not self.bandwidth > 0:
            raise ConfigError(f"bandwidth must be above 0 bytes per second, got {self.bandwidth!r}")


@dataclass(frozen=True)
class Communication:
    """Costs of communication between ranks."""

    # Bytes of one activation and of its gradient: one number, or one for each boundary between stages s and
    # s + 1.
    message_bytes: int | Sequence[int] = 0
    # Links within a node and between nodes.
    same_node: Link = field(default_factory=Link)
    other_node: Link = field(default_factory=Link)
    # Number of ranks n on a node: ranks 0..n-1 share one, n..2n-1 the next. None: all ranks share one.
    ranks_per_node: int | None = None
    # Ranks that cannot compute while a message travels. "none": messages overlap with computation.
    # "sender": the sender, from the end of the op. "receiver": the receiver, from when it reaches the op
    # and the message has been sent. "both": each for that long. Several messages of one op follow each
    # other.
    blocks: Blocks = "none"
    # Link over each boundary between stages s and s + 1, in place of those within and between nodes. None: these.
    boundaries: Sequence[Link] | None = None

    def __post_init__(self) -> None:
        sizes = self.message_bytes if isinstance(self.message_bytes, Sequence) else [self.message_bytes]
        for size in sizes:
            _number("message_bytes", size)
        if self.ranks_per_node is not None and not (_whole(self.ranks_per_node) and self.ranks_per_node >= 1):
            raise ConfigError(
                f"ranks_per_node must be a whole number of at least 1, got {self.ranks_per_node!r}"
            )
        if self.blocks not in get_args(Blocks):
            raise ConfigError(f"blocks must be one of {', '.join(get_args(Blocks))}, got {self.blocks!r}")

    def transfer(self, stages: int) -> Table:
        """Return seconds a message takes over each boundary within and between nodes, shape (stages - 1, 2)."""
        sizes = np.asarray(self.message_bytes)
        if sizes.ndim == 1 and len(sizes) != stages - 1:
            raise ConfigError(
                f"message_bytes gives {len(sizes)} numbers for {plural(stages, 'stage')}; give one, or one for each of "
                f"the {stages - 1} boundaries between stages"
            )
        if self.boundaries is not None:
            if len(self.boundaries) != stages - 1:
                raise ConfigError(
                    f"boundaries gives {plural(len(self.boundaries), 'link')} for {plural(stages, 'stage')}; give one for "
                    f"each of the {stages - 1} boundaries between stages"
                )
            each = np.broadcast_to(sizes, (stages - 1,)).tolist()
            column = np.array([_travel(*pair) for pair in zip(self.boundaries, each, strict=True)])
            return np.stack((column, column), axis=1)
        links = (self.same_node, self.other_node)
        return np.stack([np.broadcast_to(_travel(link, sizes), (stages - 1,)) for link in links], axis=1)

    def node(self, ranks: int) -> npt.NDArray[np.int32]:
        """Return the node of every rank, int32, shape (ranks,)."""
        return np.arange(ranks, dtype=np.int32) // np.int32(self.ranks_per_node or ranks)


def _travel(link: Link, size: Any) -> Any:
    """Return the seconds of messages over a link; whole ones if their size does not count."""
    return link.latency if math.isinf(link.bandwidth) else link.latency + size / link.bandwidth


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs of every op and message of a schedule; usually made by `of`."""

    seconds: Table  # shape (stages, kinds of op), integers or floats
    # Seconds of a fused pair by the stage of its forward, shape (stages,). None: the sum of its halves.
    pair: Table | None = None
    # "end": a pair starts when both halves can, and both outputs are sent at its end. "early": the forward
    # starts when its activation has arrived, and its output is sent after its own time. The backward ends,
    # and its output is sent, once the pair's time has passed and its own time since the gradient arrived.
    pair_output: PairOutput = "end"
    communication: Communication = field(default_factory=Communication)
    # Seconds in which replicas gather a stage's weights, and in which they sum its gradients, shape (stages,), if they
    # shard them. None: a simulation leaves these out.
    gather: Table | None = None
    reduce: Table | None = None

    def __post_init__(self) -> None:
        if self.seconds.ndim != 2 or self.seconds.shape[1] != len(Kind):
            raise ConfigError(
                f"the table of costs has shape {self.seconds.shape}; it needs (stages, {len(Kind)}), a column a kind"
            )
        if self.seconds.dtype.kind not in "iuf" or not ((self.seconds >= 0) & (self.seconds <= _MAX)).all():
            for kind in Kind:
                for stage, cost in enumerate(self.seconds[:, kind]):
                    _number(f"{kind.name} of stage {stage}", cost)
        for name in ("pair", "gather", "reduce"):
            table = getattr(self, name)
            if table is not None:
                _covers(name, len(table), self.stages)
                for stage, cost in enumerate(table):
                    _number(f"{name} of stage {stage}", cost)
        if self.pair_output not in get_args(PairOutput):
            raise ConfigError(f"pair_output must be end or early, got {self.pair_output!r}")
        if self.pair_output == "early" and self.communication.blocks != "none":
            raise ConfigError(
                "pair_output early needs messages that block no rank: the pair is still computing when they travel"
            )

    @property
    def stages(self) -> int:
        return len(self.seconds)

    @staticmethod
    def of(
        placement: Placement,
        forward: Cost,
        input_gradient: Cost,
        weight_gradient: Cost,
        *,
        full: Cost | None = None,
        recompute: Cost | None = None,
        pair: Cost | None = None,
        pair_output: PairOutput = "end",
        communication: Communication | None = None,
        gather: Cost | None = None,
        reduce: Cost | None = None,
    ) -> Costs:
        """Return the costs of a schedule's stages.

        Each cost is one number or a list. A number is the seconds a rank spends on one microbatch; each of its v =
        stages / ranks stages takes 1/v of it. A list has the seconds of every stage. By default `full` is B + W,
        `recompute` is F, and `pair`, in a list by the stage of its forward, the sum of its halves. `gather` and
        `reduce`, of weights and gradients that replicas shard, are not of a microbatch, but of one gather and one
        reduction of all stages of the rank.
        """
        # Ranks share a stage's microbatches, but each of its holders moves all of its weights.
        held = sum(map(len, placement.holders))
        f = _column("F", forward, placement)
        b = _column("B", input_gradient, placement)
        w = _column("W", weight_gradient, placement)
        table = {
            Kind.F: f,
            Kind.B: b + w if full is None else _column("full", full, placement),
            Kind.I: b,
            Kind.W: w,
            Kind.R: f if recompute is None else _column("R", recompute, placement),
        }
        return Costs(
            np.stack([table[kind] for kind in Kind], axis=1),
            None if pair is None else _column("pair", pair, placement),
            pair_output,
            communication or Communication(),
            None if gather is None else _column("gather", gather, placement, held),
            None if reduce is None else _column("reduce", reduce, placement, held),
        )

    def with_late(self, placement: Placement, late: Mapping[int, float]) -> Costs:
        """Return the costs when all ops of some ranks take longer, by a share of their time each, such as 0.1.

        Raises:
            ConfigError: if a rank or a share is out of range, or ranks have copies of a stage, which have one cost here.
        """
        shares = np.zeros(placement.stages)
        for rank, share in late.items():
            if not 0 <= rank < placement.ranks:
                raise ConfigError(f"late: ranks are 0 to {placement.ranks - 1}, got {rank}")
            _number(f"late: the share of rank {rank}", share)
            stages = list(placement.stages_of[rank])
            if any(len(placement.holders[stage]) > 1 for stage in stages):
                raise ConfigError(
                    f"late: rank {rank} shares its stages with another one, and a stage has one cost; simulate a schedule "
                    "whose ranks have no copies of stages"
                )
            shares[stages] = share
        pair = None if self.pair is None else self.pair * (1 + shares)
        return replace(self, seconds=self.seconds * (1 + shares)[:, None], pair=pair)

    def cover(self, stages: int) -> None:
        """Raise `ConfigError` unless the costs cover exactly the stages of a schedule."""
        _covers("the costs", self.stages, stages)

    def require_sums(self, stages: int, ranks: int, microbatches: int) -> None:
        """Raise `ConfigError` unless the costs cover the stages, and all of a step's times fit 64 bits."""
        self.cover(stages)
        messages = 2 * self.communication.transfer(stages).max(axis=1, initial=0).astype(float).sum()
        # A stage is gathered for each of its ops at most.
        shards = sum(5 * t.astype(float).sum() for t in (self.gather, self.reduce) if t is not None)
        if microbatches * (self.seconds.astype(float).sum() + messages + shards) > _MAX:
            raise ConfigError(
                f"the ops and messages of {microbatches} microbatches on {ranks} ranks take more than {_MAX:,} seconds "
                "together; give smaller costs"
            )


def _column(name: str, cost: Cost, placement: Placement, shared: int | None = None) -> Table:
    """Return seconds of every stage; whole numbers stay whole where possible.

    Args:
        shared: number of stages, on all ranks, that share one number of every rank (default: each stage once).
    """
    stages = placement.stages
    shared = shared or stages
    if isinstance(cost, Sequence):
        for stage, seconds in enumerate(cost):
            _number(f"{name} of stage {stage}", seconds)
        _covers(name, len(cost), stages)
        return np.array(cost, np.int64 if all(_whole(seconds) for seconds in cost) else np.float64)
    _number(name, cost)
    total = cost * placement.ranks
    if _whole(cost) and total % shared == 0:
        return np.full(stages, total // shared, np.int64)
    return np.full(stages, total / shared, np.float64)


def _covers(name: str, count: int, stages: int) -> None:
    if count != stages:
        raise ConfigError(
            f"{name} must cover stages 0..{stages - 1} of the schedule: "
            + (
                f"stage {count} has no cost"
                if count < stages
                else f"there are costs of {plural(count, 'stage')}"
            )
        )


def _whole(number: object) -> bool:
    return isinstance(number, int | np.integer)


def _number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be a finite number of at least 0, got {value}")
    if value > _MAX:
        raise ConfigError(f"{name} must be at most {_MAX:,}, got {'more' if value > 1e300 else f'{value:g}'}")
