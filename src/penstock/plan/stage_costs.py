"""Costs of the stages of a layout: the layers' costs on a cluster's devices, summed over each stage's layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.base.counts import plural
from penstock.base.errors import ConfigError
from penstock.plan.cluster import Cluster, Device, LinkSpeed
from penstock.plan.rank_devices import stage_groups
from penstock.plan.run_layout import Layout
from penstock.profile.closed_form import Workload
from penstock.profile.layer_cost import DeviceWork
from penstock.profile.model_profile import LayerTable, Profile
from penstock.schedule.placement import Placement
from penstock.stage.partition import by_counts, even

Table = npt.NDArray[np.float64]
Size = TypeVar("Size", float, Table)
_NO_LINK = LinkSpeed()


@dataclass(frozen=True, eq=False, kw_only=True)
class _Columns:
    """Seconds, bytes and counts of every layer, shape (layers,), or of every stage, shape (stages,)."""

    # Seconds of F, I, W, of a backward that is not split, and of the part of the forward that is recomputed before either.
    forward: Table
    input_grad: Table
    weight_grad: Table
    backward: Table
    again: Table
    # Bytes that a microbatch holds from its forward to its backward; of a layer, without recompute.
    saved: Table
    waiting: Table  # bytes that are left after I, and wait for W
    # Bytes that are only in use during a backward; of a stage, the largest of a layer, the recomputed layer included.
    transient: Table
    parameters: Table
    expert_parameters: Table  # part of `parameters`
    matrix_parameters: Table  # part of `parameters`, which Muon updates
    frozen_bytes: Table  # bytes of weights that are not trained
    # FLOPs of the forward, and of gradients of frozen weights, over all devices of tp and cp.
    model_flops: Table
    frozen_flops: Table

    @property
    def counts_of_parameters(self) -> Table:
        """Numbers of parameters, of experts' and of matrices that Muon updates, shape (3, layers) or (3, stages)."""
        return np.stack((self.parameters, self.expert_parameters, self.matrix_parameters))


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerTimes(_Columns):
    """Columns of the layers of a model under one layout's microbatch, tensor degree and recompute."""

    table: LayerTable
    # Model FLOPs that recomputing a layer repeats, over all devices of tp and cp, shape (layers,).
    repeats: Table
    kept: Table  # bytes that a layer keeps for the backward with recompute, shape (layers,)
    outputs: Table  # bytes of the value that a layer hands on, shape (layers,)
    recomputes: npt.NDArray[np.bool_]  # of layers that full recompute repeats, shape (layers,)
    # Times on the devices of each group, and the groups' numbers of devices. The columns above are the least of any group.
    of_groups: tuple[LayerTimes, ...] = ()
    sizes: tuple[int, ...] = ()

    @cached_property
    def seconds(self) -> Table:
        """Columns that depend on the device, of each group, shape (columns, groups, layers)."""
        return np.array([[getattr(each, name) for each in self.of_groups] for name in _SECONDS])


_SECONDS = ("forward", "input_grad", "weight_grad", "backward", "again")
"""Columns of `LayerTimes` that depend on the device."""


def require_inputs(profile: object, cluster: object) -> None:
    """Raise `ConfigError` unless a profile and a cluster are what `read_model` and `read_cluster` return."""
    for name, value, kind, read in (
        ("profile", profile, Profile, "read_model"),
        ("cluster", cluster, Cluster, "read_cluster"),
    ):
        if not isinstance(value, kind):
            raise ConfigError(
                f"{name} must be a {kind.__name__}, got {value!r}; read it with penstock.plan.{read}"
            )


def workload(profile: Profile, cluster: Cluster, layout: Layout, sequence: int) -> Workload:
    return Workload(
        microbatch=layout.microbatch,
        sequence=sequence,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        dtype=dtype_of(profile, cluster, layout),
        attention="unfused" if attention_of(profile, cluster, layout) == "unfused" else "fused",
        ep=layout.ep,
        imbalance=layout.imbalance,
        cp=layout.cp,
        modules=layout.modules,
        chunked_loss=layout.chunked_loss,
    )


def dtype_of(profile: Profile, cluster: Cluster, layout: Layout) -> str:
    """Return the dtype of a layout's matrix products."""
    return profile.dtype if profile.shape is None else layout.dtype or cluster.dtype


def attention_of(profile: Profile, cluster: Cluster, layout: Layout) -> str:
    """Return a layout's kind of attention kernel."""
    if layout.attention is not None:
        return layout.attention
    unfused = cluster.unfused_dropout and profile.shape is not None and profile.shape.dropout
    return "unfused" if unfused else "fused"


def layer_times(profile: Profile, cluster: Cluster, layout: Layout, sequence: int) -> LayerTimes:
    """Return the seconds and bytes of every layer."""
    load = workload(profile, cluster, layout, sequence)
    if profile.shape is None and layout.dtype not in (None, profile.dtype):
        raise ConfigError(
            f"the profile of {profile.name} is in {profile.dtype}, so a layout's dtype must be that, got {layout.dtype}; "
            f"profile the layers in {layout.dtype}"
        )
    for group in cluster.groups:
        if profile.shape is None and load.dtype not in group.device.matmul:
            raise ConfigError(
                f"the profile of {profile.name} is in {load.dtype}, and {group.name} has rates for "
                f"{', '.join(group.device.matmul)}; profile the layers as they will run there, such as with "
                f"autocast=torch.bfloat16, or add {load.dtype} to device.matmul of the cluster's file"
            )
    if layout.sequence_parallel and sequence % layout.tp:
        raise ConfigError(
            f"sequence_parallel divides samples of {sequence} tokens over tp={layout.tp}; take a multiple of {layout.tp}"
        )
    if layout.sequence_parallel and profile.shape is not None and profile.shape.experts:
        raise ConfigError(
            f"sequence_parallel is planned for models without experts, and {profile.name} has some; leave it off"
        )
    if layout.cp > 1:
        _require_divided(profile, layout, sequence)
    table = profile.table(load)
    every = tuple(_times_on(group, table, layout, load.dtype) for group in cluster.groups)
    times = replace(every[0], of_groups=every, sizes=cluster.sizes)
    least: dict[str, Any] = dict(zip(_SECONDS, times.seconds.min(axis=1), strict=True))
    return replace(times, **least)


def _times_on(cluster: Cluster, table: LayerTable, layout: Layout, dtype: str) -> LayerTimes:
    """Return the seconds and bytes of every layer on alike devices."""
    links = Links.of(cluster, layout)
    kinds = table.kinds

    def seconds(works: str) -> Table:
        each = [seconds_of(getattr(cost, works), cluster.device, dtype, links) for cost in table.costs]
        return cluster.slowdown * _spread(each, kinds)

    def column(name: str) -> Table:
        return _spread([float(getattr(cost, name)) for cost in table.costs], kinds)

    def other(works: str, default: Table) -> Table:
        """Return the seconds of works that a profile may leave out."""
        given = _spread([float(bool(getattr(cost, works))) for cost in table.costs], kinds)
        return np.where(given > 0, seconds(works), default)

    forward, input_grad, weight_grad = seconds("forward"), seconds("input_grad"), seconds("weight_grad")
    selective = layout.recomputes_parts
    return LayerTimes(
        table=table,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        backward=other("backward", input_grad + weight_grad),
        again=seconds("selective") if selective else other("again", forward),
        repeats=column("selective_flops") if selective else column("model_flops"),
        saved=column("saved_bytes"),
        kept=column("selective_bytes") if selective else column("input_bytes"),
        waiting=column("waiting_bytes"),
        transient=column("transient_bytes"),
        parameters=column("parameters"),
        expert_parameters=column("expert_parameters"),
        matrix_parameters=column("matrix_parameters"),
        frozen_bytes=column("frozen_bytes"),
        outputs=column("output_bytes"),
        model_flops=column("model_flops"),
        frozen_flops=column("frozen_flops"),
        recomputes=np.array([cost.recomputes for cost in table.costs])[list(kinds)],
    )


def _require_divided(profile: Profile, layout: Layout, sequence: int) -> None:
    """Raise `ConfigError` unless the tokens of a sample can be divided over `cp` devices."""
    if profile.shape is None:
        raise ConfigError(
            f"the layers of {profile.name} were profiled with whole samples, so cp must be 1, got {layout.cp}; plan a model "
            "of given sizes with cp"
        )
    if sequence % (2 * layout.cp):
        raise ConfigError(
            f"cp={layout.cp} divides samples of {sequence} tokens into 2 x cp chunks; take a multiple of {2 * layout.cp} "
            "tokens"
        )


@dataclass(frozen=True)
class Links:
    """Groups of a layout's devices that work on one layer, and their links.

    Attributes:
        tp, cp: number of devices that divide matrices, and tokens of samples.
        tensor, context: slowest link of a ring of these.
        exchange: of the devices that divide experts, as `Cluster.exchange` returns it.
    """

    tp: int = 1
    tensor: LinkSpeed = _NO_LINK
    cp: int = 1
    context: LinkSpeed = _NO_LINK
    exchange: LinkSpeed = _NO_LINK

    @classmethod
    def of(cls, cluster: Cluster, layout: Layout) -> Links:
        tp, cp = layout.tp, layout.cp
        ring = cluster.ring(cp, tp, within=cp * tp <= cluster.ranks_per_node)
        return cls(tp, cluster.link(tp), cp, ring, cluster.exchange(layout.ep))


def seconds_of(works: Iterable[DeviceWork], device: Device, dtype: str, links: Links) -> float:
    """Return the seconds of operations that follow each other."""
    return sum(_seconds(work, device, dtype, links) for work in works)


_OF_CONTEXT = {"context_gather": "all_gather", "context_scatter": "reduce_scatter"}


def _seconds(work: DeviceWork, device: Device, dtype: str, links: Links) -> float:
    if work.unit == "seconds":
        return work.amount
    if work.unit == "all_to_all":
        return work.calls * links.exchange.latency + work.amount / links.exchange.bandwidth
    if work.unit in ("all_reduce", "all_gather", "reduce_scatter"):
        return work.calls * collective_seconds(work.unit, work.amount / work.calls, links.tp, links.tensor)
    if work.unit in _OF_CONTEXT:
        return collective_seconds(_OF_CONTEXT[work.unit], work.amount, links.cp, links.context)
    launch = work.calls * device.launch
    if work.unit in ("memory", "scores"):
        bandwidth = device.score_bandwidth if work.unit == "scores" else None
        return launch + work.amount / (bandwidth or device.memory_bandwidth)
    if work.unit == "attention":
        return launch + work.amount / device.attention_rate(dtype)
    return launch + work.amount / device.matmul_rate(dtype, work.width)


def collective_seconds(unit: str, size: Size, group: int, link: LinkSpeed) -> Size:
    """Return the seconds of a ring collective: "all_reduce", "all_gather" or "reduce_scatter".

    `size` is the bytes of the whole tensor on each rank (before a reduce-scatter, after an all-gather), `link` the
    slowest of the ring.
    """
    if group <= 1:
        return 0.0 * size
    # A ring's all-reduce is a reduce-scatter and then an all-gather.
    rounds = 2 if unit == "all_reduce" else 1
    return rounds * (group - 1) * (link.latency / 2 + size / group / link.bandwidth)


def _spread(values: Sequence[float], kinds: Sequence[int]) -> Table:
    """Return the value of every layer from the value of its kind."""
    return np.array([values[kind] for kind in kinds], np.float64)


@dataclass(frozen=True, eq=False, kw_only=True)
class StageCosts(_Columns):
    """Columns of the stages of a layout."""

    counts: tuple[int, ...]  # number of blocks of every stage
    starts: tuple[int, ...]  # first layer of every stage, and the number of layers
    segments: Table  # number of segments into which recompute divides the forward, shape (stages,)
    logits: Table  # part of `transient` that is the loss's, shape (stages,)
    # Bytes of a layer in the first half of its backward beyond those that then wait of it, the largest of a stage.
    halved: Table
    messages: Table  # bytes of the value that each stage hands on, shape (stages,); 0 for the last
    repeated_flops: Table  # FLOPs of what is recomputed, over all devices of tp and cp, shape (stages,)
    ranks: tuple[int, ...]  # pipeline rank of every stage, the first of those with copies of it

    @property
    def work(self) -> Table:
        """Least seconds of a microbatch on every stage, whether or not its backward is split."""
        return self.forward + np.minimum(self.backward, self.input_grad + self.weight_grad) + self.again


def stage_costs(
    times: LayerTimes, layout: Layout, placement: Placement, most: Sequence[int] | None = None
) -> StageCosts:
    """Sum the layers' costs over the stages of a layout; with ``split="cost"``, a rank has at most so many blocks."""
    counts = split_counts(times, layout, placement, most)
    starts = _starts(times, counts)
    of_layer = np.repeat(_stage_groups(times, layout, placement), np.diff(starts))
    seconds = times.seconds[:, of_layer, np.arange(len(of_layer))]
    again = np.zeros(len(times.forward), np.bool_)
    if layout.recomputes_all:
        again[:] = times.recomputes
    elif isinstance(layout.recompute, int):
        for start, stop in pairwise(starts):
            again[start + layout.recompute - 1 : stop : layout.recompute] = True
        again &= times.recomputes
    saved = np.where(again, times.kept, times.saved)
    # What is recomputed of a layer is back in memory during its backward.
    back = np.where(again, times.saved - times.kept, 0.0)

    transient = np.maximum(back, times.transient)
    columns = dict(zip(_SECONDS, seconds, strict=True))
    columns |= {
        "again": np.where(again, columns["again"], 0.0),
        "segments": _segment_starts(again, starts, layout),
        "saved": saved,
        "waiting": times.waiting,
        "parameters": times.parameters,
        "expert_parameters": times.expert_parameters,
        "matrix_parameters": times.matrix_parameters,
        "frozen_bytes": times.frozen_bytes,
        "model_flops": times.model_flops,
        "frozen_flops": times.frozen_flops,
        "repeated_flops": np.where(again, times.repeats, 0.0),
    }
    table = np.add.reduceat(np.stack(list(columns.values())), starts[:-1], axis=1)
    sums = dict(zip(columns, table, strict=True))
    if len(counts) == 1:
        # The one stage has both the embedding and the head, and so a tied weight once.
        sums["parameters"][0] -= times.table.tied
    halved = np.maximum(saved + transient - times.waiting, 0.0)
    largest = np.maximum.reduceat(np.stack((transient, times.transient, halved)), starts[:-1], axis=1)
    return StageCosts(
        counts=counts,
        starts=starts,
        **sums,
        transient=largest[0],
        logits=largest[1],
        halved=largest[2],
        messages=np.append(times.outputs[np.array(starts[1:-1], np.intp) - 1], 0.0),
        ranks=tuple(ranks[0] for ranks in placement.holders),
    )


def _stage_groups(times: LayerTimes, layout: Layout, placement: Placement) -> npt.NDArray[np.intp]:
    """Return the group of every stage."""
    return stage_groups(times.sizes, layout.replicas * layout.tp, placement)


def _segment_starts(again: npt.NDArray[np.bool_], starts: Sequence[int], layout: Layout) -> Table:
    """Return 1 for the layers that begin a segment of their stage: recomputed layers, and kept ones after them."""
    begins = np.zeros(len(again))
    begins[list(starts[:-1])] = 1.0
    if not layout.recomputes_parts:
        begins[again] = 1.0
        begins[1:][again[:-1]] = 1.0
    return begins


def split_counts(
    times: LayerTimes, layout: Layout, placement: Placement, most: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the number of blocks of every stage.

    Args:
        most: with ``split="cost"``, number of blocks that each rank may have at most (default: any number). It holds unless
            all ranks together may have fewer blocks than there are.
    """
    roles, stages = times.table.roles, placement.stages
    blocks = roles.count("block")
    if isinstance(layout.split, str) and blocks < stages:
        raise ConfigError(
            f"the model's {blocks} blocks cannot be split into {plural(stages, 'stage')} (pp x v); "
            f"take at most {plural(blocks, 'stage')}"
        )
    if isinstance(layout.split, tuple):
        if len(layout.split) != stages:
            raise ConfigError(
                f"split gives the blocks of {plural(len(layout.split), 'stage')}, "
                f"but the layout has {plural(stages, 'stage')} (pp x v)"
            )
        ranges = by_counts(layout.split, blocks, embedding=roles[0] != "block", head=roles[-1] != "block")
        return tuple(stop - start for start, stop in ranges)
    counts = even_counts(blocks, stages)
    return _balanced(times, layout, placement, counts, most) if layout.split == "cost" else counts


def even_counts(blocks: int, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of every stage of an even split."""
    return tuple(stop - start for start, stop in even(blocks, stages))


@lru_cache(maxsize=1024)
def work_shares(placement: Placement) -> Table:
    """Return each rank's share of the work of every stage, shape (ranks, stages); copies of a stage share it equally."""
    shares = np.zeros((placement.ranks, placement.stages))
    for stage, ranks in enumerate(placement.holders):
        shares[list(ranks), stage] = 1 / len(ranks)
    return shares


def rank_parameters(costs: StageCosts, placement: Placement) -> Table:
    """Return the numbers of parameters of every rank, of experts' and of matrices that Muon updates, shape (3, ranks)."""
    return costs.counts_of_parameters @ _holds(placement).T


@lru_cache(maxsize=1024)
def _holds(placement: Placement) -> Table:
    """Return 1 where a rank has a stage, and 0 elsewhere, shape (ranks, stages)."""
    return (work_shares(placement) > 0).astype(np.float64)


def _balanced(
    times: LayerTimes,
    layout: Layout,
    placement: Placement,
    even_split: tuple[int, ...],
    most: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Move blocks from the busiest rank to the one that is done first with one more, as long as that shortens its work.

    No other numbers of equal blocks have a busiest rank with less work: with fewer blocks on this one, another rank has more
    than here, and each would then be busy for as long. First, ranks with more blocks than they may have give these away.
    """
    repeats = layout.recomputes_all
    roles = times.table.roles
    first, last = roles.index("block"), len(roles) - 1 - roles[::-1].index("block")
    of_stage = _stage_groups(times, layout, placement)
    blocks, fixed = np.zeros(len(times.sizes)), np.zeros((len(times.sizes), placement.stages))
    for group, each in enumerate(times.of_groups):
        work = each.forward + each.backward + (each.again * each.recomputes if repeats else 0.0)
        blocks[group] = work[first : last + 1].mean()
        fixed[group, 0] += work[:first].sum()
        fixed[group, -1] += work[last + 1 :].sum()
    # Seconds of a block, and of the layers beside the blocks, on the devices of each stage.
    block, beside = blocks[of_stage], fixed[of_stage, np.arange(placement.stages)]
    shares = work_shares(placement)
    of_rank = placement.stages_of
    step = np.array([block[mine[0]] for mine in of_rank])
    counts = list(even_split)
    least = np.ones(placement.stages)
    if placement.stages > 1:
        # An embedding and a head may be stages of their own.
        least[0], least[-1] = first == 0, last == len(roles) - 1
    load = shares @ (beside + np.array(counts) * block)
    room = np.full(placement.ranks, np.inf)
    if most is not None:
        room = np.array(most, np.float64) - [sum(counts[s] for s in mine) for mine in of_rank]
    for _ in range(2 * sum(counts)):
        over = room.min() < 0
        busiest = int(room.argmin() if over else load.argmax())
        # Loads alone decide between devices of one speed, as their sums with a block would round.
        idlest = int(np.where(room > 0, load + (step - step.min()), np.inf).argmin())
        movable = [s for s in of_rank[busiest] if counts[s] > least[s]]
        gains = load[busiest] - load[idlest] > step[idlest] * (1 + 1e-9)
        if not movable or room[idlest] <= 0 or not (over or gains):
            break
        # From the stage with most blocks of the busiest rank, the last among equals, to the one with fewest.
        source = max(movable, key=lambda s: (beside[s] + counts[s] * block[s], s))
        target = min(of_rank[idlest], key=lambda s: (counts[s], s))
        counts[source] -= 1
        counts[target] += 1
        load += block[target] * shares[:, target] - block[source] * shares[:, source]
        room[busiest] += 1
        room[idlest] -= 1
    return tuple(counts)


def _starts(times: LayerTimes, counts: Sequence[int]) -> tuple[int, ...]:
    roles = times.table.roles
    start = roles.index("block")
    starts = [0]
    for count in counts[:-1]:
        start += count
        starts.append(start)
    return (*starts, len(roles))
