"""The head with a loss by chunks: what its own function saves, and what a plan counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.plan.cluster import read_cluster
from penstock.plan.prediction import predict
from penstock.plan.run_layout import Layout
from penstock.profile.closed_form import Workload, head_cost
from penstock.profile.model_profile import of_shape
from penstock.profile.model_shape import ModelShape
from penstock.stage.compute.linear_cross_entropy import CHUNKS
from penstock.stage.compute.logit_chunks import Chunks, Work

SHAPE = ModelShape(
    name="small", layers=2, hidden=64, heads=4, kv_heads=2, head_size=16, ffn=96, vocabulary=512
)  # fmt: skip
LOAD = Workload(microbatch=2, sequence=64)
CHUNKED = replace(LOAD, chunked_loss=True)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_saved_bytes_are_the_gradients_that_the_forward_leaves(dtype: torch.dtype, name: str):
    hidden = torch.randn(LOAD.tokens, SHAPE.hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(SHAPE.vocabulary, SHAPE.hidden, dtype=dtype, requires_grad=True)
    target = torch.zeros(LOAD.tokens, dtype=torch.int64)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    counts = torch.ones(LOAD.tokens, dtype=torch.bool)
    work = Work(target, counts, (), True, None, CHUNKS, 0.0, 0.0)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        Chunks.apply(hidden, weight, None, work)
    load = replace(CHUNKED, dtype=name)
    # Besides them, the norm keeps its input.
    assert head_cost(SHAPE, load).saved_bytes == sum(saved) + LOAD.tokens * SHAPE.hidden * load.element


def test_the_forward_has_all_three_products_and_the_backward_none():
    chunked, plain = head_cost(SHAPE, CHUNKED), head_cost(SHAPE, LOAD)

    def flops(*works: str) -> float:
        return sum(w.amount for name in works for w in getattr(chunked, name) if w.unit == "matmul")

    assert flops("forward") == 3 * plain.model_flops == 3 * 2 * LOAD.tokens * SHAPE.hidden * SHAPE.vocabulary
    assert flops("input_grad", "weight_grad") == 0
    assert (chunked.parameters, chunked.model_flops) == (plain.parameters, plain.model_flops)


def test_long_samples_need_less_memory_with_chunks():
    profile, cluster = of_shape(replace(SHAPE, vocabulary=32_000)), read_cluster("h100*2")
    whole, chunked = (
        predict(profile, cluster, f"pp=2,chunked_loss={value}", sequence=1024, batch=8)
        for value in ("false", "true")
    )
    assert chunked.memory[1].total < whole.memory[1].total
    assert chunked.memory[0] == whole.memory[0]
    assert Layout.parse(str(chunked.layout)) == chunked.layout
