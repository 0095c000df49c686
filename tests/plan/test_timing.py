"""Seconds of operations from the rates of a device."""

from __future__ import annotations

import math

import pytest

from penstock.base.errors import ConfigError
from penstock.plan.cluster import Device, LinkSpeed
from penstock.plan.profile.layer_cost import DeviceWork
from penstock.plan.stage_costs import Links, collective_seconds, seconds_of

DEVICE = Device(
    memory=1e9,
    matmul={"bf16": 100.0, "fp8": 200.0},
    memory_bandwidth=10.0,
    matmul_width=3.0,
    attention={"bf16": 50.0},
    score_bandwidth=5.0,
    launch=0.5,
)
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
