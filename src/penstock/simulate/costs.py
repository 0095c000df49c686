"""What ops and messages cost: the only thing the simulator knows besides the Program.

Letters as in the zero-bubble paper (2401.10241): F forward, B the input-gradient half of the backward, W its weight-gradient
half; a full backward takes ``full``, B + W unless told otherwise. `penstock.simulate.cost_file` reads costs from a file.

If every number is whole, so are all the times of the simulation, and they are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement

Blocks = Literal["none", "sender", "receiver", "both"]
PairOutput = Literal["end", "early"]
Cost = float | int | Sequence[float | int]
Table = npt.NDArray[Any]

_MOST = 2**62
"""Seconds or bytes: what 64 bits hold."""


@dataclass(frozen=True)
class Link:
    """How messages travel between two ranks.

    Attributes:
        latency: seconds a message takes whatever its size.
        bandwidth: bytes a second.
    """

    latency: float | int = 0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        _number("latency", self.latency)
        if not isinstance(self.bandwidth, int | float) or not self.bandwidth > 0:
            raise ConfigError(f"bandwidth must be above 0 bytes a second, not {self.bandwidth!r}")


@dataclass(frozen=True)
class Communication:
    """How ranks communicate.

    Attributes:
        message_bytes: bytes of one activation, and of its gradient: one number, or one for each boundary between
            stage s and s + 1.
        same_node, other_node: the links within a node and between nodes.
        ranks_per_node: ranks 0..n-1 share a node, n..2n-1 the next; None: all ranks share one.
        blocks: which ranks a message keeps from computing for as long as it travels. "none": it overlaps with
            computation. "sender": its sender, from the end of the op. "receiver": its receiver, from when it comes to the op
            and the message has been sent. "both": each for that long. Several messages of one op follow each other.
    """

    message_bytes: int | Sequence[int] = 0
    same_node: Link = field(default_factory=Link)
    other_node: Link = field(default_factory=Link)
    ranks_per_node: int | None = None
    blocks: Blocks = "none"

    def __post_init__(self) -> None:
        sizes = self.message_bytes if isinstance(self.message_bytes, Sequence) else [self.message_bytes]
        for size in sizes:
            _number("message_bytes", size)
        if self.ranks_per_node is not None and not (_whole(self.ranks_per_node) and self.ranks_per_node >= 1):
            raise ConfigError(
                f"ranks_per_node must be a whole number of at least 1, not {self.ranks_per_node!r}"
            )
        if self.blocks not in get_args(Blocks):
            raise ConfigError(f"blocks must be one of {', '.join(get_args(Blocks))}, not {self.blocks!r}")

    def transfer(self, stages: int) -> Table:
        """Seconds a message takes over each boundary, shape (stages - 1, 2): within a node, and between nodes."""
        sizes = np.asarray(self.message_bytes)
        if sizes.ndim == 1 and len(sizes) != stages - 1:
            raise ConfigError(
                f"message_bytes gives {len(sizes)} numbers for {stages} stages; give one, or one for each of "
                f"the {stages - 1} boundaries between stages"
            )
        links = (self.same_node, self.other_node)
        columns = [
            np.broadcast_to(
                link.latency if math.isinf(link.bandwidth) else link.latency + sizes / link.bandwidth,
                (stages - 1,),
            )
            for link in links
        ]
        return np.stack(columns, axis=1)

    def node(self, ranks: int) -> npt.NDArray[np.int32]:
        """The node of every rank, int32, shape (ranks,)."""
        return np.arange(ranks, dtype=np.int32) // np.int32(self.ranks_per_node or ranks)


@dataclass(frozen=True, eq=False)
class Costs:
    """What every op and every message of a schedule costs; `of` makes them.

    Attributes:
        seconds: seconds of an op, shape (stages, kinds of op), integers or floats.
        pair: seconds of a fused pair, one for each stage that its forward may be of, shape (stages,); None: the sum of
            its halves.
        pair_output: "end": a pair starts when both halves can, and both outputs leave at its end. "early": the forward
            starts when its activation is there and its output leaves when its own time has passed; the backward ends, and
            its output leaves, when the pair's time has passed and its own since the gradient came.
        communication: what messages cost.
    """

    seconds: Table
    pair: Table | None = None
    pair_output: PairOutput = "end"
    communication: Communication = field(default_factory=Communication)

    def __post_init__(self) -> None:
        if self.seconds.ndim != 2 or self.seconds.shape[1] != len(Kind):
            raise ConfigError(
                f"the table of costs has shape {self.seconds.shape}; it needs (stages, {len(Kind)}), a column a kind"
            )
        for kind in Kind:
            for stage, cost in enumerate(self.seconds[:, kind]):
                _number(f"{kind.name} of stage {stage}", cost)
        if self.pair is not None:
            _covers("pair", len(self.pair), self.stages)
            for stage, cost in enumerate(self.pair):
                _number(f"pair of stage {stage}", cost)
        if self.pair_output not in get_args(PairOutput):
            raise ConfigError(f"pair_output must be end or early, not {self.pair_output!r}")
        if self.pair_output == "early" and self.communication.blocks != "none":
            raise ConfigError(
                "pair_output early needs messages that block nobody: the pair is still computing when they travel"
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
    ) -> Costs:
        """Costs of a schedule's stages.

        A cost is one number, the seconds a rank spends on one microbatch, of which each of its v = stages / ranks stages
        takes 1/v; or a list of the seconds of every stage.

        Args:
            placement: says how many stages and ranks there are.
            forward, input_gradient, weight_gradient: F, B and W.
            full: a full backward; B + W if not given.
            recompute: R; F if not given.
            pair: a fused pair of a forward and a backward, by the forward's stage if a list; the sum of its halves if not
                given.
            pair_output, communication: as in `Costs`.

        Raises:
            ConfigError: a cost is negative or not a number, or a list does not cover the stages.
        """
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
        )

    def cover(self, stages: int) -> None:
        """Make sure that the costs are those of a schedule with that many stages.

        Raises:
            ConfigError: a stage has no cost, or there are costs of stages that are not there.
        """
        _covers("the costs", self.stages, stages)


def _column(name: str, given: Cost, placement: Placement) -> Table:
    """Seconds of every stage; whole numbers stay whole where they can."""
    stages = placement.stages
    if isinstance(given, Sequence):
        for stage, cost in enumerate(given):
            _number(f"{name} of stage {stage}", cost)
        _covers(name, len(given), stages)
        return np.array(given, np.int64 if all(_whole(cost) for cost in given) else np.float64)
    _number(name, given)
    total = given * placement.ranks
    if _whole(given) and total % stages == 0:
        return np.full(stages, total // stages, np.int64)
    return np.full(stages, total / stages, np.float64)


def _covers(name: str, given: int, stages: int) -> None:
    if given != stages:
        raise ConfigError(
            f"{name} must cover stages 0..{stages - 1} of the schedule: "
            + (f"stage {given} has no cost" if given < stages else f"there are costs of {given} stages")
        )


def _whole(number: object) -> bool:
    return isinstance(number, int | np.integer)


def _number(name: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int | float | np.integer | np.floating):
        raise ConfigError(f"{name} must be a number, not {given!r}")
    if not 0 <= given < math.inf:
        raise ConfigError(f"{name} must be a finite number of at least 0, not {given}")
    if given > _MOST:
        raise ConfigError(
            f"{name} must be at most {_MOST:,}, not {'more' if given > 1e300 else f'{given:g}'}"
        )
