"""Two ranks that share every matrix compute the same as one process."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.base.errors import BatchError, ConfigError
from penstock.parallel.dtensor import boxes_in_whole
from penstock.parallel.mesh import make_mesh
from penstock.parallel.replicas.reducer import GroupReducer
from penstock.parallel.tensor.matrices import (
    PLANS,
    _by_columns_and_rows,
    plan_of,
    shard_columns,
    shard_rows,
    shard_side_by_side,
    tensor_parallel,
)
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.compute.runner import LossInputs, LossWeight
from penstock.stage.compute.stage import Stage
from penstock.stage.module import StageModule
from penstock.stage.values import Message
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive
from tests.support.replicas import buckets_of, step

CONFIG = ModelConfig(vocabulary=32, layers=2, width=16, heads=4, kv_heads=2, hidden=24)
SIZES = {"hidden_size": 16, "num_attention_heads": 4}
GROUPED = {**SIZES, "intermediate_size": 32, "num_key_value_heads": 2}
HF = {
    "llama": GROUPED, "qwen3": {**GROUPED, "head_dim": 4}, "gemma": {**GROUPED, "head_dim": 4, "pad_token_id": 0},
    "starcoder2": GROUPED, "exaone4": {**GROUPED, "head_dim": 4}, "gpt_neox": {**SIZES, "intermediate_size": 32},
    "gpt2": {**SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip
EXPERTS = replace(CONFIG, experts=4, shared_hidden=8)


def built_in(config: ModelConfig = CONFIG) -> nn.Sequential:
    return nn.Sequential(*[layer.build() for layer in layers(config)])


def tokens(rows: int = 4, sequence: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 32, (rows, sequence + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def named(net: nn.Sequential) -> list[tuple[str, nn.Module]]:
    return [(layer.name, module) for layer, module in zip(layers(CONFIG), net, strict=True)]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p.grad).clone() for name, p in net.named_parameters()}


def assert_close(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        bound = 1e-5 * float(value.abs().max())
        assert float((found[name] - value).abs().max()) <= bound, name


def plain(net: nn.Module) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, loss and gradients of one process."""
    x, y = tokens()
    logits = net(x)
    loss = next_token_loss(logits, y)
    loss.backward()
    return logits.detach(), loss.detach(), gradients(net)


def cut_built_in(rank: int, sequence: bool) -> torch.Tensor:
    net, uncut = built_in(), built_in()
    tensor_parallel(named(net), make_mesh(tp=2).axis("tp"), sequence=sequence)
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in net.parameters())
    count = sum(p.numel() for p in uncut.parameters())
    norms = sum(p.numel() for p in uncut.parameters() if p.ndim == 1)
    assert held == (count - norms) // 2 + norms
    x, y = tokens()
    between = net[1](net[0](x))
    logits = net[3](net[2](between))
    assert {type(net[0](x)), type(between), type(logits)} == {torch.Tensor}
    assert tuple(between.shape) == ((4, 3, 16) if sequence else (4, 6, 16))
    loss = next_token_loss(logits, y)
    loss.backward()
    expected_logits, expected_loss, expected = plain(uncut)
    assert torch.allclose(logits, expected_logits, rtol=0, atol=1e-5)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    assert_close(gradients(net), expected)
    next_token_loss(net(x), y).backward()  # gradients add up
    assert_close(gradients(net), plain(uncut)[2])
    return logits.detach()


def test_the_built_in_model_cut_in_two_computes_the_same(processes: LocalProcesses):
    for one, other in run_cases(processes, 2, cut_built_in, [(False,), (True,)]):
        assert torch.equal(one, other)


def with_experts(rank: int) -> None:
    net, uncut = built_in(EXPERTS), built_in(EXPERTS)
    tensor_parallel(named(net), make_mesh(tp=2).axis("tp"))
    x, y = tokens()
    next_token_loss(net(x), y).backward()
    assert_close(gradients(net), plain(uncut)[2])
    not_sharded = {name for name, p in net.named_parameters() if not isinstance(p, DTensor)}
    assert not_sharded == {n for n, p in uncut.named_parameters() if p.ndim == 1 or "feed_forward." in n}


def test_experts_are_whole_on_every_rank_and_have_the_gradients_of_one_process(processes: LocalProcesses):
    processes.run(2, with_experts)


def test_families_without_a_table_entry_are_among_those_tested():
    assert {"starcoder2", "exaone4"} <= HF.keys() - PLANS.keys()


def test_matrices_of_inputs_by_outputs_are_cut_by_their_place_in_the_block():
    plan = PLANS["gpt2"]
    cuts = {
        name: _by_columns_and_rows(plan, f"transformer.h.0.{name}")
        for name in ("mlp.c_fc", "attn.c_proj", "mlp.c_proj", "ln_1")
    }
    assert cuts == {
        "mlp.c_fc": shard_columns,
        "attn.c_proj": shard_rows,
        "mlp.c_proj": shard_rows,
        "ln_1": None,
    }
    # Of query, key and value in one matrix each rank has its heads' part.
    heads = _by_columns_and_rows(plan, "transformer.h.0.attn.c_attn")
    assert (heads.func, heads.keywords) == (shard_side_by_side, {"parts": 3})
    assert _by_columns_and_rows(replace(plan, qkv="apart"), "transformer.h.0.attn.c_attn") is shard_columns


def hugging_face(family: str, **changes: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(family, **sizes, **(HF.get(family, HF["llama"]) | changes))
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def cut_hugging_face(rank: int) -> None:
    mesh, (x, y) = make_mesh(tp=2).axis("tp"), tokens()
    for family in HF:
        net, uncut = hugging_face(family), hugging_face(family)
        tensor_parallel(net, mesh, family)
        losses = [next_token_loss(each(input_ids=x, use_cache=False).logits, y) for each in (net, uncut)]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6), family
        cut = sum(isinstance(p, DTensor) for p in net.parameters())
        assert cut >= 14 - (family == "gpt_neox") * 4 - (family == "gemma"), family
        assert_close(gradients(net), gradients(uncut))
        for parameter in filter(lambda p: isinstance(p, DTensor), net.parameters()):
            part, full = parameter.to_local(), parameter.full_tensor()
            boxes = boxes_in_whole(parameter)
            assert sum(math.prod(size) for _, size, _ in boxes) == part.numel()
            for start, size, place in boxes:
                assert torch.equal(part[box(start, size)], full[box(place, size)]), family


def box(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))


@pytest.mark.slow
def test_hugging_face_models_cut_in_two_compute_the_same(processes: LocalProcesses):
    pytest.importorskip("transformers")
    processes.run(2, cut_hugging_face, timeout=600)


def train_dp_and_tp(rank: int, sequence: bool):
    mesh = make_mesh(dp=2, tp=2)
    net = built_in()
    tensor_parallel(named(net), mesh.axis("tp"), sequence=sequence)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    buckets = buckets_of(net, GroupReducer(mesh.group("dp"), 300.0), bucket_bytes=2000)
    x, y = tokens()
    rows = slice(2 * mesh.coordinate("dp"), 2 * mesh.coordinate("dp") + 2)
    losses = []
    for n in range(8):
        with buckets.accumulating():
            (next_token_loss(net(x[rows][:1]), y[rows][:1]) / 4).backward()
        with step(buckets, n):
            loss = next_token_loss(net(x[rows][1:]), y[rows][1:])
            (loss / 4).backward()
        losses.append(loss.item())
        if n == 0:
            first = gradients(net)
        optimizer.step()
        optimizer.zero_grad(set_to_none=n % 2 == 0)
    return first, {name: whole(p.detach()).clone() for name, p in net.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [True, *exhaustive(False)])
def test_buckets_reduce_what_is_cut_and_replicas_stay_bit_identical(processes: LocalProcesses, sequence):
    results = processes.run(4, train_dp_and_tp, sequence, timeout=600)
    net, (x, y) = built_in(), tokens()
    plain(net)
    for first, weights in results:
        assert_close(first, gradients(net))
        for name, value in weights.items():
            assert torch.equal(value, results[0][1][name]), name
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(8):
        optimizer.zero_grad()
        next_token_loss(net(x), y).backward()
        optimizer.step()
    for name, p in net.named_parameters():
        assert torch.allclose(results[0][1][name], p, rtol=0, atol=2e-3), name


def stage_backward(rank: int, sequence: bool) -> None:
    module = StageModule(layers(CONFIG))
    tensor_parallel(module.named_layers(), make_mesh(tp=2).axis("tp"), sequence=sequence)
    stage = Stage(0, module, next_token_loss)
    x, y = tokens()
    for m in range(2):
        rows = slice(2 * m, 2 * m + 2)
        stage.forward_with_loss(m, (Message((x[rows],)),), LossInputs(y[rows], LossWeight(divisor=2)), True)
    assert stage.held_bytes > 0
    for m in range(2):
        stage.backward_input(m, None)
    for m in range(2):
        stage.backward_weight(m)
    net = built_in()
    plain(net)
    expected = {
        f"{name}.{inner}": p.grad for name, layer in named(net) for inner, p in layer.named_parameters()
    }
    assert_close({name: whole(p.grad) for name, p in module.whole_model_parameters()}, expected)


def test_a_stage_whose_matrices_are_cut_can_split_its_backward(processes: LocalProcesses):
    run_cases(processes, 2, stage_backward, [(False,), (True,)])


def refusals(rank: int) -> None:
    mesh = make_mesh(tp=2).axis("tp")
    nets: list[tuple[list[tuple[str, nn.Module]] | nn.Module, tuple[str, ...], str]] = []
    for change, says in (
        ({"kv_heads": 1}, "blocks.0.attention.key has 1 heads of width 4, which do not divide over tp = 2"),
        ({"hidden": 25}, "blocks.0.feed_forward.gate has 25 outputs"),
        ({"vocabulary": 33}, "embedding has 33 words of vocabulary"),
    ):
        config = replace(CONFIG, layers=1, **change)
        nets.append(([(layer.name, layer.build()) for layer in layers(config)], (), says))
    for family, changes, says in (
        ("gpt2", {"num_attention_heads": 1}, "transformer.h.0.attn.c_attn has 1 heads of width 16"),
        (
            "gpt_neox",
            {"num_attention_heads": 1},
            "layers.0.attention.query_key_value has 1 heads of width 16",
        ),
        ("apertus", {}, r"mlp.act_fn has parameters that the plan of transformers .* does not name"),
    ):
        nets.append((hugging_face(family, **changes), (family,), says))
    for net, named_family, says in nets:
        with pytest.raises(ConfigError, match=says):
            tensor_parallel(net, mesh, *named_family)
        modules = [net] if isinstance(net, nn.Module) else [module for _, module in net]
        assert not any(isinstance(p, DTensor) for module in modules for p in module.parameters())
    net = built_in()
    tensor_parallel(named(net), mesh, sequence=True)
    with pytest.raises(BatchError, match="a sequence of 5 does not divide over tp = 2"):
        net(tokens(sequence=5)[0])


@pytest.mark.slow
def test_what_does_not_divide_is_refused_on_every_rank(processes: LocalProcesses):
    processes.run(2, refusals)


def test_families_without_a_plan_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        plan_of("lama")
    with pytest.raises(ConfigError, match="uses colwise_gather_output, rowwise_split_input;"):
        plan_of("glm")
    with pytest.raises(ConfigError, match="built-in model, not for 'llama'"):
        plan_of("llama", sequence=True)
