"""Edges between the ranks of a pipeline in processes: their sizes, and their communicators for values on a device."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

import torch
from torch import distributed as dist

from penstock.base.errors import ConfigError
from penstock.runtime.transport.process_group import Bulk
from penstock.runtime.workers.collectives import Collectives
from penstock.runtime.workers.groups import Groups
from penstock.schedule.program import Program

RESULT_SLOTS = 2
"""Messages at the end of a step that an edge has room for: the losses, and the outcome."""


def edge_sizes(
    program: Program, holders: Sequence[Sequence[int]], ranks: int
) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (slots, capacity) of every edge, with those that collect the losses or sum gradients at a step's end.

    Args:
        holders: ranks that hold the same parameters, by group.
        ranks: number of ranks of the pipeline.
    """
    collector = program.schedule.placement.holders[-1][0]
    others = [r for r in range(ranks) if r != collector]
    result_edges = [(collector, r) for r in others] + [(r, collector) for r in others]
    sizes: dict[tuple[int, int], tuple[int, int]] = dict.fromkeys(result_edges, (RESULT_SLOTS, RESULT_SLOTS))
    more = [(key, edge.slots, edge.capacity) for key, edge in program.edges.items()]
    for group in holders:
        more += [((a, b), 1, 1) for a in group for b in group if a != b]
    for key, slots, capacity in more:
        before = sizes.get(key, (0, 0))
        sizes[key] = (before[0] + slots, before[1] + capacity)
    return sizes


def open_bulk(
    groups: Groups,
    edges: Iterable[tuple[int, int]],
    rank: int,
    pipelines: Sequence[Sequence[int]],
    device: torch.device,
    backend: str,
) -> dict[tuple[int, int], Bulk]:
    """Open the communicators for values on a device, one for each directed edge of a rank; every process calls it.

    Args:
        edges: (source, target) ranks within a pipeline.
        rank: this process's rank in its pipeline.
        pipelines: ranks in ``torch.distributed`` of the processes of each pipeline.
    """
    bulk = {}
    for edge in sorted(edges):  # every rank makes all of them, in this order
        group = groups.make([[line[end] for end in edge] for line in pipelines], backend)
        if group is not None:
            peer = edge[0] if rank == edge[1] else edge[1]
            bulk[edge] = Bulk(group, dist.get_group_rank(group, peer), device)
            bulk[edge].greet(rank == edge[0], groups.longest, peer)
    return bulk


def require_own_gpu(device: torch.device, collectives: Collectives, pipeline: int, rank: int) -> None:
    """Raise ConfigError on every process if two of a pipeline compute on one GPU, which NCCL does not connect.

    Args:
        pipeline: number of this process's pipeline.
        rank: rank of this process in it.
    """
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    owners: dict[tuple[int, str, str], list[int]] = {}
    for key, other in collectives.gather(((pipeline, socket.gethostname(), gpu), rank), None, "compare GPUs"):
        owners.setdefault(key, []).append(other)
    for (_, name, _), ranks in owners.items():
        if len(ranks) > 1:
            raise ConfigError(
                f"ranks {', '.join(map(str, ranks))} of a pipeline compute on one GPU of host {name}, and NCCL connects "
                "processes that have a GPU each; start as many processes on a host as it has GPUs, with LOCAL_RANK set "
                "as torchrun does, or run the ranks as threads of one process, which may share a GPU"
            )
