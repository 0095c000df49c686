"""Seconds of operations from the rates of a device, and layers' costs summed over the stages of a layout."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.plan.cluster import Device, LinkSpeed, read_cluster
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import (
    Links,
    StageCosts,
    collective_seconds,
    layer_times,
    seconds_of,
    stage_costs,
)
from penstock.profile.closed_form import Workload, block_cost, embedding_cost, head_cost
from penstock.profile.layer_cost import DeviceWork
from penstock.profile.model_profile import of_shape
from penstock.schedule.placement import Placement
from tests.support.planning import SEQUENCE, SMALL, round_cluster, timed_profile

H100 = read_cluster("h100*8x4")


def staged(layout: Layout, placement: Placement) -> StageCosts:
    return stage_costs(layer_times(of_shape(SMALL), H100, layout, SEQUENCE), layout, placement)


def test_the_ends_of_the_model_are_in_the_first_and_the_last_stage():
    costs = staged(Layout(pp=4, microbatch=2), Placement.loop(4, 1))
    load = Workload(microbatch=2, sequence=SEQUENCE)
    first, block, last = (cost(SMALL, load) for cost in (embedding_cost, block_cost, head_cost))
    assert (costs.counts, costs.starts) == ((4, 4, 4, 4), (0, 5, 9, 13, 18))
    saved = [4 * block.saved_bytes] * 4 + np.array([first.saved_bytes, 0, 0, last.saved_bytes])
    assert costs.saved.tolist() == pytest.approx(saved.tolist())
    assert costs.messages.tolist() == [block.output_bytes] * 3 + [0]
    assert costs.logits.tolist() == costs.transient.tolist() == [0, 0, 0, last.transient_bytes]
    assert costs.parameters.sum() == SMALL.parameters
    assert costs.repeated_flops.tolist() == [0] * 4
    assert costs.again.tolist() == [0] * 4


@pytest.mark.parametrize("schedule_stages", [1, 2, 4])
@pytest.mark.parametrize("recompute", ["none", "selective", "full", 2])
@pytest.mark.parametrize("split", ["even", "cost"])
def test_every_layer_is_in_one_stage(schedule_stages: int, recompute: str | int, split: str):
    layout = Layout(pp=4, recompute=recompute, split=split, attention="unfused")
    whole = staged(Layout(recompute=recompute, attention="unfused"), Placement.loop(1, 1))
    costs = staged(layout, Placement.loop(4, schedule_stages))
    assert sum(costs.counts) == 16
    assert min(costs.counts) >= 1
    for name in ("forward", "input_grad", "weight_grad", "waiting", "parameters", "model_flops"):
        assert getattr(costs, name).sum() == pytest.approx(getattr(whole, name).sum())
    if recompute != 2:
        assert costs.again.sum() == pytest.approx(whole.again.sum())
        assert costs.saved.sum() == pytest.approx(whole.saved.sum())


def test_recompute_keeps_the_inputs_of_blocks_and_repeats_their_forward():
    one = Placement.loop(1, 1)
    block = block_cost(SMALL, Workload(microbatch=1, sequence=SEQUENCE, attention="unfused"))
    plain, selective, full, second = (
        staged(Layout(recompute=recompute, attention="unfused"), one)
        for recompute in ("none", "selective", "full", 2)
    )
    difference = block.saved_bytes - block.input_bytes
    assert plain.saved[0] - full.saved[0] == pytest.approx(16 * difference)
    assert plain.saved[0] - second.saved[0] == pytest.approx(8 * difference)
    assert plain.saved[0] - selective.saved[0] == pytest.approx(
        16 * (block.saved_bytes - block.selective_bytes)
    )
    # The recomputed block is back in memory during its backward, unless the logits are larger.
    assert full.transient[0] == second.transient[0] == max(difference, full.logits[0])
    assert full.repeated_flops[0] == 16 * block.model_flops
    assert second.repeated_flops[0] == 8 * block.model_flops
    assert selective.repeated_flops[0] == 16 * block.attention_flops
    assert 0 == plain.again[0] < selective.again[0] < full.again[0] == pytest.approx(2 * second.again[0])
    assert full.again[0] < full.forward[0]  # embedding and head do not run again


def test_the_first_and_last_stages_have_fewer_blocks_if_the_split_is_by_cost():
    vocabulary = of_shape(replace(SMALL, name="wide", vocabulary=20_000))
    layout = Layout(pp=4, split="cost")
    placement = Placement.loop(4, 1)
    times = layer_times(vocabulary, round_cluster(), layout, SEQUENCE)
    costs = stage_costs(times, layout, placement)
    even = stage_costs(times, Layout(pp=4), placement)
    work = costs.forward + costs.input_grad + costs.weight_grad
    assert costs.counts[3] < costs.counts[1]
    assert work.max() < (even.forward + even.input_grad + even.weight_grad).max()


@settings(max_examples=20)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_counts_are_taken_as_given(counts: list[int]):
    layout = Layout(pp=len(counts), split=tuple(counts))
    times = layer_times(timed_profile(sum(counts)), round_cluster(), layout, SEQUENCE)
    costs = stage_costs(times, layout, Placement.loop(len(counts), 1))
    assert costs.counts == tuple(counts)
    assert costs.forward.tolist() == counts
    assert [stop - start for start, stop in pairwise(costs.starts)] == counts
    assert costs.saved.tolist() == [100 * n for n in counts]


def test_what_does_not_fit_the_model_is_refused():
    with pytest.raises(ConfigError, match="tp=3 does not divide the model's 8 heads"):
        staged(Layout(tp=3), Placement.loop(1, 1))
    with pytest.raises(ConfigError, match=r"samples of 33 tokens over tp=2; take a multiple of 2"):
        layer_times(of_shape(SMALL), H100, Layout(tp=2, sequence_parallel=True), 33)


DEVICE = Device(
    memory=1e9, matmul={"bf16": 100.0, "fp8": 200.0}, memory_bandwidth=10.0, matmul_width=3.0, attention={"bf16": 50.0},
    score_bandwidth=5.0, launch=0.5,
)  # fmt: skip
LINK = LinkSpeed(2.0, 10.0)


def taken(*works: DeviceWork, dtype: str = "bf16", group: int = 1, device: Device = DEVICE) -> float:
    return seconds_of(works, device, dtype, Links(group, LINK))


def test_each_kind_of_work_has_its_rate():
    assert taken(DeviceWork("seconds", 7.0)) == 7.0
    assert taken(DeviceWork("matmul", 100.0, width=1.0)) == 0.5 + 4.0
    assert taken(DeviceWork("matmul", 100.0, width=3.0, calls=2)) == 2 * 0.5 + 2.0
    assert taken(DeviceWork("matmul", 100.0, width=3.0), dtype="fp8") == 0.5 + 1.0
    assert taken(DeviceWork("attention", 100.0, width=1.0)) == 0.5 + 2.0
    assert taken(DeviceWork("memory", 20.0)) == 0.5 + 2.0
    assert taken(DeviceWork("scores", 20.0)) == 0.5 + 4.0
    assert taken(DeviceWork("memory", 20.0), DeviceWork("seconds", 1.0)) == 3.5
    assert taken() == 0


def test_rates_that_are_not_given_are_those_of_the_same_unit():
    plain = Device(memory=1e9, matmul={"bf16": 100.0, "fp8": 200.0}, memory_bandwidth=10.0)
    assert taken(DeviceWork("scores", 20.0), device=plain) == 2.0
    assert taken(DeviceWork("attention", 100.0), device=plain) == 1.0
    assert taken(DeviceWork("matmul", 100.0, width=1e-9), device=plain) == 1.0
    assert plain.peak_rate("fp8") == 200.0
    # Attention has no kernel in fp8.
    assert taken(DeviceWork("attention", 100.0), dtype="fp8") == 0.5 + 2.0


def test_a_dtype_without_a_rate_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"no matmul rate for fp32; it has bf16, fp8. Choose one of these"):
        taken(DeviceWork("matmul", 1.0), dtype="fp32")


@pytest.mark.parametrize("group", [2, 4, 8])
def test_a_ring_sends_a_share_to_its_neighbour_in_every_round(group: int):
    once = (group - 1) * (1.0 + 80.0 / group / 10.0)
    assert collective_seconds("all_gather", 80.0, group, LINK) == pytest.approx(once)
    assert collective_seconds("reduce_scatter", 80.0, group, LINK) == pytest.approx(once)
    assert collective_seconds("all_reduce", 80.0, group, LINK) == pytest.approx(2 * once)
    # Two collectives of half the bytes have the latency twice.
    both = taken(DeviceWork("all_gather", 80.0, calls=2), group=group)
    assert both == pytest.approx(once + (group - 1) * 1.0)


def test_one_rank_and_infinite_links_take_no_time():
    assert collective_seconds("all_reduce", 80.0, 1, LINK) == 0
    assert collective_seconds("all_reduce", 80.0, 8, LinkSpeed()) == 0
    assert LinkSpeed().bandwidth == math.inf
