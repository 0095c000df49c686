"""Latency and bandwidth of the links between neighbouring ranks by size of message, and of a reduction over all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

from penstock.measure.device_rates import fit_line, wait_for
from penstock.measure.links import Edges, round_trips
from penstock.runtime.transport.processes import ProcessChannel
from penstock.runtime.workers.world import World

SIZES = (4, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the messages."""

# Most rounds, and the relative difference of two rounds at which no other one follows.
_ROUNDS, _AGREE = 6, 0.05
_TRIP_BYTES = 1 << 24  # bytes that the trips of one size send together, in at most 20 trips
_REDUCED = 1 << 24  # bytes of the tensor that all ranks reduce

Pair = tuple[int, int]


def measure_links(
    world: World, machines: Sequence[str], device: torch.device, timeout: float
) -> dict[str, Any]:
    """Return the sections ``[node]`` and ``[network]`` of a cluster's file; every rank calls it, and gets the same.

    All ranks send to a neighbour at the same time, as in a run. Values in GPU memory travel through the process group,
    values in main memory through the transports of a run. Rounds are repeated until latency and bandwidth agree with the
    round before.
    """
    neighbours = dict.fromkeys((r for r in (world.rank - 1, world.rank + 1) if 0 <= r < world.size), (1, 1))
    rounds: dict[Pair, list[dict[int, float]]] = {}
    before: dict[str, dict[str, float]] = {}
    with Edges(world, neighbours, timeout) as channel:
        for number in range(_ROUNDS):
            channel.open(number + 1)
            mine = _round(world, channel if device.type == "cpu" else None, device)
            for pairs in world.gather(mine):
                for pair, times in pairs.items():
                    rounds.setdefault(pair, []).append(times)
            links = _sections(rounds, machines)
            if before and all(_agree(links[name], before[name]) for name in links):
                break
            before = links
    nodes = len(set(machines))
    if nodes > 1:
        latency = links["network"]["latency"]
        share = _reduction(world, device, latency) / (world.size / nodes)
        links["network"]["reduce_bandwidth"] = share
    return links


def _round(
    world: World, channel: ProcessChannel | None, device: torch.device
) -> dict[Pair, dict[int, float]]:
    """Measure this rank's link to the next rank and to the previous one, and return those it measured."""
    measured: dict[Pair, dict[int, float]] = {}
    # Pairs that begin at an even rank, then pairs that begin at an odd one: no rank is in two at once.
    for parity in (0, 1):
        first = world.rank % 2 == parity
        peer = world.rank + 1 if first else world.rank - 1
        if 0 <= peer < world.size:
            for size in SIZES:
                payload = torch.zeros(size, dtype=torch.uint8, device=device)
                trips = max(3, min(20, _TRIP_BYTES // size))
                if channel is None:
                    times = device_round_trips(peer, payload, trips, first)
                else:
                    times = round_trips(channel, peer, payload, 1, trips, first)
                if first:
                    measured.setdefault((world.rank, peer), {})[size] = statistics.median(times)
            if channel is not None:
                channel.finish()
        # No rank begins with its other neighbour before all have finished with this one.
        world.gather(None)
    return measured


def device_round_trips(peer: int, payload: torch.Tensor, trips: int, first: bool) -> list[float]:
    """Return seconds of round trips with a short answer through the process group of the tensor's device."""
    answer = torch.zeros(1, device=payload.device)
    times = []
    for trip in range(trips + 1):
        wait_for(payload.device)
        began = time.perf_counter()
        if first:
            dist.send(payload, peer)
            dist.recv(answer, peer)
        else:
            dist.recv(payload, peer)
            dist.send(answer, peer)
        wait_for(payload.device)
        if trip:  # the first opens the connection
            times.append(time.perf_counter() - began)
    return times


def _sections(
    rounds: dict[Pair, list[dict[int, float]]], machines: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return latency and bandwidth of the median link within and between nodes."""
    links: dict[str, list[tuple[float, float]]] = {}
    for (a, b), measured in rounds.items():
        # A round trip has the latency twice, and the size once.
        points = [(size, statistics.median(times[size] for times in measured)) for size in SIZES]
        twice, per_byte = fit_line(points)
        where = "node" if machines[a] == machines[b] else "network"
        links.setdefault(where, []).append((twice / 2, 1 / max(per_byte, 1e-15)))
    medians = {}
    for where, each in sorted(links.items()):
        latency, bandwidth = map(statistics.median, zip(*each, strict=True))
        medians[where] = {"latency": latency, "bandwidth": bandwidth}
    return medians


def _agree(now: dict[str, float], before: dict[str, float]) -> bool:
    return all(abs(value - before[key]) <= _AGREE * value for key, value in now.items())


def _reduction(world: World, device: torch.device, latency: float) -> float:
    """Return the bytes per second at which a ring over all ranks would take as long as a measured reduction."""
    tensor = torch.zeros(_REDUCED // 4, device=device)
    times = []
    for _ in range(6):
        world.gather(None)
        began = time.perf_counter()
        dist.all_reduce(tensor)
        wait_for(device)
        times.append(time.perf_counter() - began)
    took: float = max(world.gather(statistics.median(times[1:])))
    # A ring reduces in size - 1 steps and hands the sums around in as many; each moves 1/size of the tensor.
    steps = 2 * (world.size - 1)
    return steps * _REDUCED / world.size / max(took - steps * latency / 2, 0.1 * took)
