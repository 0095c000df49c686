"""Models with adapters: closed forms beside peft's own modules, and what frozen weights cost."""

from __future__ import annotations

from dataclasses import replace

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from penstock.base.errors import ConfigError
from penstock.plan.cluster import read_cluster
from penstock.plan.prediction import predict
from penstock.profile.closed_form import Workload, block_cost, head_cost
from penstock.profile.model_profile import Profile, of_shape, with_lora
from penstock.profile.model_shape import ModelShape

RANK, SEQUENCE = 4, 16
SHAPE = ModelShape(
    name="small", layers=3, hidden=64, heads=4, kv_heads=2, head_size=16, ffn=96, vocabulary=128,
)  # fmt: skip
LOAD = Workload(microbatch=2, sequence=SEQUENCE, dtype="fp32")


@pytest.fixture(scope="module")
def traced() -> Profile:
    """peft's adapters beside all matrices of a small Llama."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    lora = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(LlamaForCausalLM(config), lora)
    tokens = torch.zeros((2, SEQUENCE), dtype=torch.int64)
    return penstock.profile_layers(model, tokens, target=tokens, measure=False)


def test_trained_and_frozen_parameters_are_those_of_pefts_model(traced: Profile):
    table, closed = traced.table(LOAD), with_lora(of_shape(SHAPE), RANK).table(LOAD)
    for name in ("parameters", "frozen_parameters", "frozen_bytes"):
        found, counted = ([getattr(t.costs[kind], name) for kind in t.kinds] for t in (table, closed))
        # A trace may have the final norm as a layer of its own.
        assert sum(found) == sum(counted)
        assert found[1] == counted[1]
    assert traced.parameters == sum(p for p in (SHAPE.parameters, 3 * closed.costs[1].parameters))


def test_a_frozen_matrix_has_no_gradient_of_its_weight(traced: Profile):
    """The second half of the backward has the adapters' products alone; the first block's input has no gradient at all."""
    kinds = traced.table(LOAD)
    block = kinds.costs[kinds.kinds[kinds.roles.index("block") + 1]]
    closed = with_lora(of_shape(SHAPE), RANK).table(LOAD).costs[1]
    tokens = LOAD.tokens
    products = sum(2 * tokens * RANK * (rows + columns) for rows, columns in SHAPE.block_matrices)
    for cost in (block, closed):
        assert sum(work.amount for work in cost.weight_grad if work.unit == "matmul") == products
    plain = block_cost(SHAPE, LOAD)
    assert closed.model_flops == plain.model_flops + products
    matrices = 2 * tokens * sum(rows * columns for rows, columns in SHAPE.block_matrices)
    assert closed.frozen_flops == block.frozen_flops == plain.model_flops - plain.attention_flops == matrices
    assert closed.saved_bytes == plain.saved_bytes + len(SHAPE.block_matrices) * RANK * tokens * 4


def test_matrices_of_a_block_are_all_its_parameters_but_norms():
    assert (
        sum(rows * columns for rows, columns in SHAPE.block_matrices)
        == SHAPE.block_parameters - 2 * SHAPE.hidden
    )


def test_a_base_of_four_bits_has_an_eighth_of_the_bytes_and_scales():
    (cost,) = {with_lora(of_shape(SHAPE), RANK, 4).table(replace(LOAD, dtype="bf16")).costs[1]}
    matrices = SHAPE.block_parameters - 2 * SHAPE.hidden
    assert cost.frozen_bytes == pytest.approx(matrices * (4 + 1 / 8 + 1 / 512) / 8 + 4 * 2 * SHAPE.hidden)


def test_only_adapters_have_gradients_and_optimizer_state():
    cluster = read_cluster("h100*2")
    profile = with_lora(of_shape(SHAPE), RANK)
    plan = predict(profile, cluster, "pp=2,split=1+2", sequence=SEQUENCE, batch=8)
    trained = sum(RANK * (rows + columns) for rows, columns in SHAPE.block_matrices)
    frozen = [
        SHAPE.embedding_parameters + SHAPE.block_parameters,
        SHAPE.head_parameters + 2 * SHAPE.block_parameters,
    ]
    for rank, blocks in enumerate((1, 2)):
        memory = plan.memory[rank]
        assert memory.weights == 2 * (blocks * trained + frozen[rank])
        assert (memory.gradients, memory.optimizer) == (4 * blocks * trained, 12 * blocks * trained)
    assert any("Adapters of rank 4" in sentence for sentence in plan.assumptions)
    last = profile.table(LOAD).costs[2]
    assert (last.weight_grad, last.forward) == ((), head_cost(SHAPE, LOAD).forward)


def test_what_has_no_adapters_in_closed_form_is_refused(traced: Profile):
    with pytest.raises(ConfigError, match="has no closed form"):
        with_lora(traced, RANK)
    with pytest.raises(ConfigError, match="tp=2 does not divide the adapters of small; take tp=1"):
        predict(with_lora(of_shape(SHAPE), RANK), read_cluster("h100*2"), "tp=2", sequence=SEQUENCE, batch=8)
    with pytest.raises(ConfigError, match="has experts, so adapters are not costed; profile it with them"):
        replace(SHAPE, experts=4, experts_per_token=2, expert_ffn=32, adapter_rank=RANK)
    with pytest.raises(ConfigError, match="base_bits of the model must be 16, or 4 with adapters"):
        replace(SHAPE, base_bits=4)
