"""Two ranks that share every matrix compute the same as one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.base.errors import BatchError, ConfigError
from penstock.parallel.data.reducer import GroupReducer
from penstock.parallel.mesh import make_mesh
from penstock.parallel.tensor import PLANS, plan_of, tensor_parallel
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


def cut_built_in(rank: int, sequence: bool):
    net = built_in()
    tensor_parallel(named(net), make_mesh(tp=2).axis("tp"), sequence=sequence)
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in net.parameters())
    x, y = tokens()
    between = net[1](net[0](x))
    kinds = {type(net[0](x)), type(between)}
    logits = net[3](net[2](between))
    kinds.add(type(logits))
    loss = next_token_loss(logits, y)
    loss.backward()
    first = gradients(net)
    next_token_loss(net(x), y).backward()
    return held, kinds, tuple(between.shape), logits.detach(), loss.detach(), first, gradients(net)


def test_the_built_in_model_cut_in_two_computes_the_same(processes: LocalProcesses):
    whole, divided = run_cases(processes, 2, cut_built_in, [(False,), (True,)])
    net = built_in()
    x, y = tokens()
    logits = net(x)
    loss = next_token_loss(logits, y)
    loss.backward()
    expected = gradients(net)
    next_token_loss(net(x), y).backward()
    count = sum(p.numel() for p in net.parameters())
    norms = sum(p.numel() for p in net.parameters() if p.ndim == 1)
    assert {shape for _, _, shape, *_ in whole} == {(4, 6, 16)}
    assert {shape for _, _, shape, *_ in divided} == {(4, 3, 16)}
    for held, kinds, _, cut_logits, cut_loss, first, second in whole + divided:
        assert held == (count - norms) // 2 + norms
        assert kinds == {torch.Tensor}
        assert torch.allclose(cut_logits, logits, rtol=0, atol=1e-5)
        assert cut_loss == pytest.approx(loss.item(), rel=1e-6)
        assert_close(first, expected)
        assert_close(second, gradients(net))
    for one, other in (whole, divided):
        assert torch.equal(one[3], other[3])


def with_experts(rank: int):
    net = built_in(EXPERTS)
    tensor_parallel(named(net), make_mesh(tp=2).axis("tp"))
    x, y = tokens()
    next_token_loss(net(x), y).backward()
    return gradients(net), {name for name, p in net.named_parameters() if not isinstance(p, DTensor)}


def test_experts_are_whole_on_every_rank_and_have_the_gradients_of_one_process(processes: LocalProcesses):
    net = built_in(EXPERTS)
    x, y = tokens()
    next_token_loss(net(x), y).backward()
    whole = {name for name, p in net.named_parameters() if p.ndim == 1 or "feed_forward." in name}
    for found, not_sharded in processes.run(2, with_experts):
        assert_close(found, gradients(net))
        assert not_sharded == whole


def test_families_without_a_table_entry_are_among_those_tested():
    assert {"starcoder2", "exaone4"} <= HF.keys() - PLANS.keys()


def hugging_face(family: str, **changes: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=32,
        num_hidden_layers=2,
        bos_token_id=1,
        eos_token_id=2,
        **(HF.get(family, HF["llama"]) | changes),
    )
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def cut_hugging_face(rank: int, families: list[str]):
    mesh, found = make_mesh(tp=2).axis("tp"), []
    for family in families:
        net = hugging_face(family)
        tensor_parallel(net, mesh, family)
        x, y = tokens()
        loss = next_token_loss(net(input_ids=x, use_cache=False).logits, y)
        loss.backward()
        cut = sum(isinstance(p, DTensor) for p in net.parameters())
        found.append((loss.detach(), cut, gradients(net)))
    return found


@pytest.mark.slow
def test_hugging_face_models_cut_in_two_compute_the_same(processes: LocalProcesses):
    pytest.importorskip("transformers")
    for results in processes.run(2, cut_hugging_face, list(HF), timeout=600):
        for family, (loss, cut, found) in zip(HF, results, strict=True):
            net = hugging_face(family)
            x, y = tokens()
            expected = next_token_loss(net(input_ids=x, use_cache=False).logits, y)
            expected.backward()
            assert loss == pytest.approx(expected.item(), rel=1e-6), family
            assert cut >= 14 - (family == "gpt_neox") * 4 - (family == "gemma"), family
            assert_close(found, gradients(net))


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
    net = built_in()
    x, y = tokens()
    next_token_loss(net(x), y).backward()
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


def stage_backward(rank: int, sequence: bool):
    module = StageModule(layers(CONFIG))
    tensor_parallel(module.named_layers(), make_mesh(tp=2).axis("tp"), sequence=sequence)
    stage = Stage(0, module, next_token_loss)
    x, y = tokens()
    for m in range(2):
        rows = slice(2 * m, 2 * m + 2)
        stage.forward_with_loss(m, (Message((x[rows],)),), LossInputs(y[rows], LossWeight(divisor=2)), True)
    held = stage.held_bytes
    for m in range(2):
        stage.backward_input(m, None)
    for m in range(2):
        stage.backward_weight(m)
    return held, {name: whole(p.grad).clone() for name, p in module.whole_model_parameters()}


def test_a_stage_whose_matrices_are_cut_can_split_its_backward(processes: LocalProcesses):
    net = built_in()
    x, y = tokens()
    next_token_loss(net(x), y).backward()
    expected = {
        f"{name}.{inner}": p.grad for name, layer in named(net) for inner, p in layer.named_parameters()
    }
    for results in run_cases(processes, 2, stage_backward, [(False,), (True,)]):
        for held, found in results:
            assert_close(found, expected)
            assert held > 0


def refusals(rank: int) -> list[str]:
    mesh = make_mesh(tp=2).axis("tp")
    found = []
    for change in ({"kv_heads": 1}, {"hidden": 25}, {"vocabulary": 33}):
        config = ModelConfig(
            **{"vocabulary": 32, "layers": 1, "width": 16, "heads": 4, "kv_heads": 2, "hidden": 24} | change
        )
        net = [(layer.name, layer.build()) for layer in layers(config)]
        with pytest.raises(ConfigError) as caught:
            tensor_parallel(net, mesh)
        assert not any(isinstance(p, DTensor) for _, m in net for p in m.parameters())
        found.append(str(caught.value))
    for family in ("gpt2", "gpt_neox"):
        net = hugging_face(family, num_attention_heads=1)
        with pytest.raises(ConfigError) as caught:
            tensor_parallel(net, mesh, family)
        assert not any(isinstance(p, DTensor) for p in net.parameters())
        found.append(str(caught.value))
    net = hugging_face("apertus")
    with pytest.raises(
        ConfigError, match=r"mlp.act_fn has parameters that the plan of transformers .* does not name"
    ):
        tensor_parallel(net, mesh, "apertus")
    assert not any(isinstance(p, DTensor) for p in net.parameters())
    net = built_in()
    tensor_parallel(named(net), mesh, sequence=True)
    with pytest.raises(BatchError) as short:
        net(tokens(sequence=5)[0])
    return [*found, str(short.value)]


@pytest.mark.slow
def test_what_does_not_divide_is_refused_on_every_rank(processes: LocalProcesses):
    for said in processes.run(2, refusals):
        heads, width, words, gpt2, gpt_neox, sequence = said
        assert "blocks.0.attention.key has 1 heads of width 4, which do not divide over tp = 2" in heads
        assert "blocks.0.feed_forward.gate has 25 outputs" in width
        assert "embedding has 33 words of vocabulary" in words
        assert "transformer.h.0.attn.c_attn has 1 heads of width 16" in gpt2
        assert "gpt_neox.layers.0.attention.query_key_value has 1 heads of width 16" in gpt_neox
        assert "a sequence of 5 does not divide over tp = 2" in sequence


def test_families_without_a_plan_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        plan_of("lama")
    with pytest.raises(ConfigError, match="uses colwise_gather_output, rowwise_split_input;"):
        plan_of("glm")
    with pytest.raises(ConfigError, match="built-in model, not for 'llama'"):
        plan_of("llama", sequence=True)
