"""Bytes of a rank: what a split backward leaves, and weights that stages share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.plan.cluster import read_cluster
from penstock.plan.prediction import Prediction, predict
from penstock.plan.profile.closed_form import Workload
from penstock.plan.profile.model_profile import of_shape
from penstock.plan.profile.model_shape import ModelShape

SHAPE = ModelShape(
    name="gpt",
    layers=16,
    hidden=1024,
    heads=16,
    kv_heads=16,
    head_size=64,
    ffn=4096,
    vocabulary=50000,
    gated=False,
    tied=True,
    dropout=True,
    positions=1024,
)
"""A GPT whose halves of a backward are known: 34 h + 5 a s bytes a token before the first, 32 h after it (2401.10241)."""


def predicted(layout: str, shape: ModelShape = SHAPE, batch: int = 32) -> Prediction:
    return predict(of_shape(shape), read_cluster("a100-80gb*8x8"), layout, sequence=1024, batch=batch)


def block_bytes() -> tuple[float, float]:
    cost = of_shape(SHAPE).table(Workload(microbatch=1, sequence=1024, attention="unfused")).costs[1]
    return cost.saved_bytes, cost.waiting_bytes


def test_a_block_keeps_the_published_bytes():
    h, a, s = 1024, 16, 1024
    assert block_bytes() == (s * (34 * h + 5 * a * s), s * 32 * h)


@pytest.mark.parametrize("rank", [1, 2])
def test_the_first_half_of_a_split_backward_drops_the_scores(rank: int):
    saved, waiting = block_bytes()
    memory = predicted("pp=4,schedule=zb-h1").memory[rank]
    # ZB-H1 holds p activations; on rank r, r of them wait for W.
    assert memory.activations == pytest.approx(4 * ((4 - rank) * saved + rank * waiting))


def test_a_split_backward_takes_no_less_than_a_full_one():
    for rank in range(4):
        split = predicted("pp=4,schedule=zb-h1").memory[rank].activations
        assert split >= predicted("pp=4,schedule=1f1b").memory[rank].activations


def test_one_stage_has_a_tied_weight_once():
    tied, free = (predicted("pp=1", shape).memory[0] for shape in (SHAPE, replace(SHAPE, tied=False)))
    table = 50000 * 1024
    assert tied.weights == 2 * SHAPE.parameters
    assert free.weights - tied.weights == 2 * table
    assert free.gradients - tied.gradients == 4 * table


def test_two_stages_have_a_copy_of_a_tied_weight_each():
    tied, free = (predicted("pp=2", shape).memory for shape in (SHAPE, replace(SHAPE, tied=False)))
    assert [rank.weights for rank in tied] == [rank.weights for rank in free]


def test_tensor_parallelism_over_two_nodes_uses_all_links_of_a_node():
    cluster = read_cluster("a100-80gb*8x2")
    within, between = cluster.link(8), cluster.link(16)
    assert within == cluster.node
    assert between.latency == cluster.network.latency
    assert between.bandwidth == min(8 * cluster.network.bandwidth, cluster.node.bandwidth)
