"""Costs of layers in closed form: those of Korthikanti et al. (2205.05198), and what torch itself saves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.parallel.context.attention import Division, Finish, SequencePart, dividing
from penstock.parallel.dtensor import local
from penstock.parallel.mesh import MeshShape, make_mesh
from penstock.parallel.tensor.matrices import tensor_parallel
from penstock.profile.closed_form import (
    Workload,
    block_cost,
    embedding_cost,
    head_cost,
    largest_tp,
    require_divisible,
)
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_shape import ModelShape
from penstock.profile.read_shape import read_shape
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.compute.causal_lm_loss import causal_lm_loss
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers

GPT = ModelShape(
    name="gpt", layers=4, hidden=512, heads=8, kv_heads=8, head_size=64, ffn=2048, vocabulary=1000, gated=False,
    positions=128, norm_weights=4, final_norm_weights=2, qkv_bias=True, output_bias=True, ffn_bias=True, dropout=True,
)  # fmt: skip
LLAMA = ModelShape(
    name="llama", layers=4, hidden=512, heads=8, kv_heads=4, head_size=64, ffn=1536, vocabulary=1000
)
COSTS = (embedding_cost, block_cost, head_cost)


def amount(works: tuple[DeviceWork, ...], *units: str) -> float:
    return sum(work.amount for work in works if work.unit in units)


def flops(works: tuple[DeviceWork, ...]) -> float:
    return amount(works, "matmul", "attention")


@pytest.mark.parametrize(("microbatch", "tp"), [(1, 1), (3, 2), (1, 8)])
def test_saved_bytes_of_a_gpt_block_are_those_of_the_paper(microbatch: int, tp: int):
    s, b, h, a = 128, microbatch, GPT.hidden, GPT.heads
    unit = s * b * h
    plain = Workload(microbatch=b, sequence=s, tp=tp, attention="unfused")
    divided = replace(plain, sequence_parallel=True)
    scores = 5 * a * s / h / tp
    assert block_cost(GPT, plain).saved_bytes == pytest.approx(unit * (10 + 24 / tp + scores), rel=1e-12)
    assert block_cost(GPT, plain).selective_bytes == pytest.approx(unit * (10 + 24 / tp), rel=1e-12)
    if tp > 1:
        assert block_cost(GPT, divided).saved_bytes == pytest.approx(unit * (34 / tp + scores), rel=1e-12)
        assert block_cost(GPT, divided).selective_bytes == pytest.approx(unit * 34 / tp, rel=1e-12)
        assert block_cost(GPT, divided).input_bytes == 2 * unit / tp
    assert block_cost(GPT, plain).input_bytes == 2 * unit
    # Fused attention saves a number in 32 bits for each query of a head instead of the scores.
    fused = block_cost(GPT, replace(plain, attention="fused"))
    assert fused.saved_bytes == pytest.approx(unit * (10 + 24 / tp) + 4 * s * b * a / tp, rel=1e-12)


@pytest.mark.parametrize("attention", ["fused", "unfused"])
@pytest.mark.parametrize("tp", [1, 4])
def test_flops_of_a_gpt_block_are_those_of_the_paper(tp: int, attention: str):
    s, b, h = 128, 3, GPT.hidden
    expected = 24 * b * s * h * h * (1 + s / (6 * h))
    cost = block_cost(GPT, Workload(microbatch=b, sequence=s, tp=tp, attention=attention))
    assert cost.model_flops == pytest.approx(expected, rel=1e-12)
    assert flops(cost.forward) == pytest.approx(expected / tp, rel=1e-12)
    assert cost.attention_flops == 4 * b * s * s * h
    # The backward takes twice as many; fused attention computes its scores again.
    again = 0.5 * cost.attention_flops / tp if attention == "fused" else 0.0
    assert flops(cost.input_grad) + flops(cost.weight_grad) == pytest.approx(2 * expected / tp + again)


def test_the_head_multiplies_by_the_vocabulary():
    cost = head_cost(GPT, Workload(microbatch=2, sequence=128))
    assert cost.model_flops == 2 * 2 * 128 * GPT.hidden * GPT.vocabulary
    assert flops(cost.forward) == flops(cost.input_grad) == flops(cost.weight_grad) == cost.model_flops
    assert cost.transient_bytes == 2 * 2 * 128 * GPT.vocabulary


@pytest.mark.parametrize("shape", [GPT, LLAMA, replace(GPT, tied=True)], ids=["gpt", "llama", "tied"])
def test_parameters_of_the_layers_are_those_of_the_model(shape: ModelShape):
    first, block, last = (cost(shape, Workload(microbatch=1, sequence=8)).parameters for cost in COSTS)
    tied = shape.hidden * shape.vocabulary * shape.tied
    assert first + shape.layers * block + last == shape.parameters + tied
    # Tensor parallelism divides everything but norms, positions, and the biases that are added to sums over its ranks.
    load = Workload(microbatch=1, sequence=8, tp=2)
    h = shape.hidden
    whole = (shape.norm_weights + 2 * shape.ffn_bias) * h
    assert block_cost(shape, load).parameters == (block - whole) / 2 + whole
    assert embedding_cost(shape, load).parameters == h * (shape.vocabulary / 2 + shape.positions)
    assert head_cost(shape, load).parameters == h * (shape.vocabulary / 2 + shape.final_norm_weights)


def test_without_tensor_parallelism_nothing_is_exchanged():
    for shape in (GPT, LLAMA):
        for cost in COSTS:
            one = cost(shape, Workload(microbatch=2, sequence=64))
            works = one.forward + one.input_grad + one.weight_grad + one.selective
            assert {work.unit for work in works} <= {"matmul", "attention", "memory"}


def test_a_block_has_two_collectives_each_way():
    value = 2 * 64 * LLAMA.hidden * 2
    reduced = block_cost(LLAMA, Workload(microbatch=2, sequence=64, tp=2))
    each = DeviceWork("all_reduce", value)
    assert [work for work in reduced.forward if work.unit == "all_reduce"] == [each] * 2
    cost = block_cost(LLAMA, Workload(microbatch=2, sequence=64, tp=2, sequence_parallel=True))
    for works in (cost.forward, cost.input_grad):
        units = [work.unit for work in works if work.unit in ("all_gather", "reduce_scatter")]
        assert units == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
        assert amount(works, "all_reduce") == 0
    assert cost.output_bytes == value / 2


LOADS = st.builds(
    Workload,
    microbatch=st.integers(1, 16),
    sequence=st.sampled_from([16, 64, 256]),
    tp=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
    dtype=st.sampled_from(["bf16", "fp32", "fp8"]),
    attention=st.sampled_from(["fused", "unfused"]),
)
SHAPES = st.sampled_from([GPT, LLAMA, replace(LLAMA, gated=False), replace(GPT, dropout=False)])
KINDS = st.sampled_from(COSTS)
WORKS = ("forward", "input_grad", "weight_grad", "selective")
BYTES = ("saved_bytes", "selective_bytes", "waiting_bytes", "input_bytes", "output_bytes", "transient_bytes")


def numbers(cost: LayerCost) -> list[float]:
    """Amounts and bytes that belong to one microbatch."""
    amounts = [work.amount for name in WORKS for work in getattr(cost, name)]
    return amounts + [getattr(cost, name) for name in (*BYTES, "model_flops", "attention_flops")]


@settings(max_examples=40)
@given(SHAPES, KINDS, LOADS)
def test_costs_are_proportional_to_the_microbatch(shape: ModelShape, kind: object, load: Workload):
    one, two = (kind(shape, replace(load, microbatch=n * load.microbatch)) for n in (1, 2))
    assert numbers(two) == pytest.approx([2 * number for number in numbers(one)])
    assert one.parameters == two.parameters


@given(SHAPES, KINDS, LOADS)
def test_tensor_parallelism_divides_products_and_never_adds_bytes(
    shape: ModelShape, kind: object, load: Workload
):
    whole, half = (kind(shape, replace(load, tp=n * load.tp)) for n in (1, 2))
    for name in WORKS:
        assert flops(getattr(half, name)) == pytest.approx(flops(getattr(whole, name)) / 2)
    assert half.model_flops == pytest.approx(whole.model_flops)
    for name in BYTES:
        assert getattr(whole, name) / 2 - 1e-6 <= getattr(half, name) <= getattr(whole, name) + 1e-6
    assert whole.parameters / 2 <= half.parameters <= whole.parameters


@given(SHAPES, LOADS)
def test_recompute_keeps_less(shape: ModelShape, load: Workload):
    cost = block_cost(shape, load)
    assert cost.input_bytes < cost.selective_bytes <= cost.saved_bytes
    assert bool(cost.selective) == (load.attention == "unfused")
    assert min(numbers(cost)) >= 0


def test_a_degree_that_does_not_divide_is_refused_with_one_that_does():
    assert largest_tp(LLAMA, 7) == 4
    require_divisible(LLAMA, 4)
    with pytest.raises(
        ConfigError, match=r"tp=8 does not divide the model's 4 key and value heads.* such as 4"
    ):
        require_divisible(LLAMA, 8)


def saved_by_torch(module: torch.nn.Module, value: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Bytes of distinct storages that autograd saves, parameters excluded, and the output."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(value)
    storages = [tensor.untyped_storage() for tensor in kept]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in own}
    return sum(sizes.values()), output


BUILT_IN = ModelConfig(vocabulary=512, width=128, layers=1, heads=4, kv_heads=2, hidden=352)
OF_BUILT_IN = ModelShape(
    name="built-in", layers=1, hidden=128, heads=4, kv_heads=2, head_size=32, ffn=352, vocabulary=512
)


@pytest.mark.parametrize(("samples", "sequence"), [(1, 64), (3, 128)])
def test_torch_saves_the_closed_form_and_what_unfused_kernels_add(samples: int, sequence: int):
    """In 32 bits: norms save their normalised input and its scale besides, and the gate its activation."""
    shape = OF_BUILT_IN
    first, block, _ = (layer.build() for layer in layers(BUILT_IN))
    load, tokens = Workload(microbatch=samples, sequence=sequence, dtype="fp32"), samples * sequence
    saved, value = saved_by_torch(first, torch.randint(0, 512, (samples, sequence)))
    assert saved == embedding_cost(shape, load).saved_bytes
    saved, value = saved_by_torch(block, value.detach().requires_grad_())
    rotary = 2 * 4 * sequence * shape.head_size / 2  # tables that all microbatches share
    added = 4 * tokens * (2 * (shape.hidden + 1) + shape.ffn)
    assert saved - rotary == block_cost(shape, load).saved_bytes + added


class OneOf:
    """Exchange of equal parts, so that one process is enough."""

    def __init__(self, parts: int) -> None:
        self.parts, self.masks, self.microbatches = parts, {}, 1

    def start_gather(self, part: torch.Tensor) -> Finish:
        return lambda: torch.stack([part] * self.parts)

    def start_sum(self, whole: torch.Tensor) -> tuple[torch.Tensor, Finish]:
        total = self.parts * whole[0]
        return total, lambda: total


@pytest.mark.parametrize(("samples", "sequence", "cp"), [(1, 64, 2), (2, 128, 4)])
def test_with_divided_samples_torch_saves_the_closed_form(samples: int, sequence: int, cp: int):
    """Besides what kernels add without cp, as above, the CPU's attention saves the mask of each of two chunks in 32 bits."""
    shape, own = OF_BUILT_IN, sequence // cp
    _, block, _ = (layer.build() for layer in layers(BUILT_IN))
    value = torch.randn(samples, own, shape.hidden, requires_grad=True)
    with dividing(Division(SequencePart(0, cp), OneOf(cp))):
        saved, _ = saved_by_torch(block, value)
    rotary = 2 * 4 * own * shape.head_size / 2
    masks = 4 * (own // 2) ** 2 * (1 + 2 * cp)
    added = 4 * samples * own * (2 * (shape.hidden + 1) + shape.ffn)
    load = Workload(microbatch=samples, sequence=sequence, dtype="fp32", cp=cp)
    assert saved - rotary - masks == block_cost(shape, load).saved_bytes + added


BIASED = {"attention_bias": True, "mlp_bias": True}
CUT: dict[str, dict[str, object]] = {
    "gpt2": {}, "gpt_neox": {}, "llama": BIASED, "qwen2": {}, "qwen3": {}, "gemma3_text": {},
}  # fmt: skip


def held_by_a_rank(rank: int, folder: str) -> list[int]:
    from tests.support import hf_models

    found = []
    for family, changes in CUT.items():
        net = hf_models.model(family, vocab_size=64, **changes)
        if rank == 0:
            net.config.save_pretrained(Path(folder, family))
        tensor_parallel(net, make_mesh(tp=2).axis("tp"), family)
        found.append(sum(local(p).numel() for p in net.parameters()))
    return found


MIXTURE = {"width": 32, "layers": 2, "heads": 4, "hidden": 48, "experts": 4, "experts_per_token": 2}


def held_with_experts(rank: int) -> int:
    built, shape = layers(ModelConfig(**MIXTURE)), MeshShape(pp=1, dp=1, tp=2, ep=2)
    with Pipeline(built, causal_lm_loss, microbatches=1, mesh=shape) as pipe:
        return sum(local(p).numel() for p in pipe.parameters())


@pytest.mark.slow
def test_a_rank_holds_as_many_parameters_as_divided_experts_and_matrices_leave_it(
    processes: LocalProcesses, tmp_path: Path
):
    path = tmp_path / "run.toml"
    path.write_text("[model]\n" + "\n".join(f"{key} = {value}" for key, value in MIXTURE.items()))
    shape = read_shape(path)
    load = Workload(microbatch=1, sequence=8, tp=2, ep=2)
    first, block, last = (cost(shape, load).parameters for cost in COSTS)
    assert processes.run(2, held_with_experts) == [first + shape.layers * block + last] * 2


@pytest.mark.slow
def test_a_rank_holds_as_many_parameters_as_tensor_parallelism_leaves_it(
    processes: LocalProcesses, tmp_path: Path
):
    told = processes.run(2, held_by_a_rank, str(tmp_path))
    assert told[0] == told[1]
    for family, held in zip(CUT, told[0], strict=True):
        shape = read_shape(tmp_path / family)
        first, block, last = (
            cost(shape, Workload(microbatch=1, sequence=8, tp=2)).parameters for cost in COSTS
        )
        assert first + shape.layers * block + last == held, family
