"""Peak bytes of every rank, by part: what a split backward leaves, and weights that stages share, as well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.cluster import read_cluster
from penstock.plan.op_costs import merged_backwards
from penstock.plan.prediction import Prediction, predict
from penstock.plan.rank_memory import MARGIN, held_activations
from penstock.plan.states.on_devices import BUCKET_BYTES
from penstock.profile.closed_form import Workload
from penstock.profile.model_profile import of_shape
from penstock.profile.model_shape import ModelShape
from penstock.schedule.families import FAMILIES
from penstock.schedule.memory import peak
from tests.support.lanes import exhaustive
from tests.support.planning import SEQUENCE, SMALL, round_cluster, timed_profile

FIRST = ["1f1b", "zb-v", "dualpipe"]


def predicted(layout: str, batch: int = 8, blocks: int = 16) -> Prediction:
    return predict(timed_profile(blocks), round_cluster(), layout, sequence=SEQUENCE, batch=batch)


def test_parts_of_one_rank():
    (rank,) = predicted("").memory
    assert (rank.weights, rank.gradients, rank.optimizer) == (160 * 4, 160 * 4, 160 * 8)
    assert (rank.activations, rank.peak_op) == (1600, "0F0")
    assert (rank.recompute, rank.logits, rank.messages, rank.buckets) == (0, 0, 0, 0)
    assert rank.margin == pytest.approx(MARGIN * 1600)
    assert rank.total == 160 * 16 + 1600 + rank.margin
    assert rank.as_dict()["total"] == sum(
        v for k, v in rank.as_dict().items() if k not in ("total", "peak_op")
    )


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("batch", [2, 8])
def test_1f1b_holds_the_microbatches_that_the_checker_proves(pp: int, batch: int):
    prediction = predicted(f"pp={pp}", batch)
    chunks = peak(prediction.program.schedule)
    assert chunks.tolist() == [min(batch, pp - rank) for rank in range(pp)]
    assert [rank.activations for rank in prediction.memory] == [100 * 16 / pp * n for n in chunks]
    assert [rank.messages for rank in prediction.memory] == [20, *[40] * (pp - 2), 20]


def test_a_rank_with_all_stages_holds_the_state_of_all():
    (one,), ranks = predicted("").memory, predicted("pp=4,v=2,schedule=round-trip").memory
    for rank in ranks:
        assert (rank.weights, rank.gradients, rank.optimizer) == (one.weights, one.gradients, one.optimizer)


# whole backwards, split ones on a V, pairs; the other families differ in their order alone
@pytest.mark.parametrize("schedule", [*FIRST, *exhaustive(*sorted(FAMILIES.keys() - FIRST))])
def test_activations_are_the_checkers_peak(schedule: str):
    prediction = predicted(f"pp=4,schedule={schedule}")
    plan, costs = prediction.program.schedule, prediction.costs
    splits = any(op.kind.name == "W" for rank in range(4) for op in plan.ops(rank) if hasattr(op, "kind"))
    expected = peak(plan, costs.saved.astype(int), costs.waiting.astype(int) if splits else 0, freed_at="B")
    assert [rank.activations for rank in prediction.memory] == expected.tolist()


def test_a_whole_backward_of_the_first_stage_leaves_nothing_to_wait():
    prediction = predicted("pp=2,schedule=zb-h1", batch=4)
    plan, costs = prediction.program.schedule, prediction.costs
    assert merged_backwards(plan).sum() == 4  # each I of rank 0 is followed by its W
    heavy = replace(costs, waiting=3 * costs.saved)
    column = held_activations(plan, heavy)
    saved = costs.saved.astype(int)
    assert column[plan.rows(0)].max() == 2 * saved[0]
    assert column[plan.rows(1)].max() == peak(plan, saved, 3 * saved, freed_at="B")[1] > saved[1]


def test_full_recompute_keeps_inputs_and_one_block():
    prediction = predicted("pp=4,recompute=full")
    first = prediction.memory[0]
    # Four blocks of four microbatches keep 10 bytes each; in a backward one has its other 90 again.
    assert (first.activations, first.recompute) == (160, 90)
    assert first.peak_op.startswith("0B")


def test_zero_divides_the_optimizers_state_alone():
    plain, zero = (predicted(f"pp=2,dp=4,shard={shard}").memory[0] for shard in ("none", "optimizer"))
    assert zero.optimizer == plain.optimizer / 4
    assert (zero.weights, zero.gradients) == (plain.weights, plain.gradients)
    assert zero.activations == plain.activations
    assert plain.buckets == min(2 * BUCKET_BYTES, plain.gradients)
    alone, of_one = predicted("pp=2,shard=optimizer"), predicted("pp=2")
    assert (alone.memory, alone.parts) == (of_one.memory, of_one.parts)


def test_the_last_rank_holds_the_gradient_of_the_logits():
    prediction = predict(
        of_shape(SMALL), round_cluster(), "pp=4,microbatch=2", sequence=SEQUENCE, batch=8
    )  # fmt: skip
    assert [rank.logits for rank in prediction.memory] == [0, 0, 0, 4 * 2 * SEQUENCE * SMALL.vocabulary]


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from(["none", "full", 2]))
def test_more_samples_or_less_recompute_never_need_less(pp: int, microbatch: int, recompute: str | int):
    profile, cluster = of_shape(SMALL), round_cluster()

    def bytes_of(microbatch: int, recompute: str | int) -> float:
        layout = {"pp": pp, "microbatch": microbatch, "recompute": recompute}
        return predict(profile, cluster, layout, sequence=SEQUENCE, batch=8 * microbatch).peak_bytes

    here = bytes_of(microbatch, recompute)
    assert bytes_of(microbatch + 1, recompute) > here
    assert bytes_of(microbatch, "none") >= here
    assert 0 < bytes_of(microbatch, "full") <= here * (1 + 1e-9)


GPT = ModelShape(
    name="gpt", layers=16, hidden=1024, heads=16, kv_heads=16, head_size=64, ffn=4096, vocabulary=50000, gated=False,
    tied=True, dropout=True, positions=1024,
)  # fmt: skip
"""A GPT whose halves of a backward are known: 34 h + 5 a s bytes a token before the first, 32 h after it (2401.10241)."""


def of_gpt(layout: str, shape: ModelShape = GPT, batch: int = 32) -> Prediction:
    return predict(of_shape(shape), read_cluster("a100-80gb*8x8"), layout, sequence=1024, batch=batch)


def block_bytes() -> tuple[float, float]:
    cost = of_shape(GPT).table(Workload(microbatch=1, sequence=1024, attention="unfused")).costs[1]
    return cost.saved_bytes, cost.waiting_bytes


def test_a_block_keeps_the_published_bytes():
    h, a, s = 1024, 16, 1024
    assert block_bytes() == (s * (34 * h + 5 * a * s), s * 32 * h)


@pytest.mark.parametrize("rank", [1, 2])
def test_the_first_half_of_a_split_backward_drops_the_scores(rank: int):
    saved, waiting = block_bytes()
    memory = of_gpt("pp=4,schedule=zb-h1").memory[rank]
    # ZB-H1 holds p activations; on rank r, r of them wait for W.
    assert memory.activations == pytest.approx(4 * ((4 - rank) * saved + rank * waiting))


def test_one_stage_has_a_tied_weight_once():
    tied, free = (of_gpt("pp=1", shape).memory[0] for shape in (GPT, replace(GPT, tied=False)))
    table = 50000 * 1024
    assert tied.weights == 2 * GPT.parameters
    assert free.weights - tied.weights == 2 * table
    assert free.gradients - tied.gradients == 4 * table


def test_two_stages_have_a_copy_of_a_tied_weight_each():
    tied, free = (of_gpt("pp=2", shape).memory for shape in (GPT, replace(GPT, tied=False)))
    assert [rank.weights for rank in tied] == [rank.weights for rank in free]


@pytest.mark.parametrize(("dtype", "state"), [("bf16", 12), ("fp32", 8)])
def test_muon_has_a_moment_less_of_the_matrices_of_blocks(dtype: str, state: int):
    """Embedding, head, norms and experts are AdamW's."""
    sizes: dict[str, Any] = {"experts": 4, "experts_per_token": 2, "expert_ffn": 32}
    device = replace(round_cluster().device, memory=1e12, matmul={"bf16": 1e12, "fp32": 1e12})
    cluster = replace(round_cluster(), device=device)
    for shape in (SMALL, replace(SMALL, **sizes), replace(SMALL, **sizes, shared_ffn=16)):
        profile, values = of_shape(shape), f"pp=2,dtype={dtype},split=7+9"
        adamw, muon = (
            predict(profile, cluster, f"{values},optimizer={name}", sequence=32, batch=8)
            for name in ("adamw", "muon")
        )
        norms = shape.norm_weights * shape.hidden
        matrices = shape.block_parameters - shape.expert_parameters - norms
        for rank, blocks in enumerate((7, 9)):
            one, other = adamw.memory[rank], muon.memory[rank]
            assert one.optimizer == state * one.weights / (2 if dtype == "bf16" else 4)
            assert one.optimizer - other.optimizer == 4 * blocks * matrices
            assert (one.weights, one.gradients) == (other.weights, other.gradients)
    shared = predict(profile, cluster, f"{values},optimizer=muon,dp=2,shard=optimizer", sequence=32, batch=8)
    assert 2 * shared.memory[0].optimizer == pytest.approx(muon.memory[0].optimizer)
