"""A mixture of experts computes what a loop over its experts does, in every schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.huggingface.router_loss import NAME
from penstock.runtime.pipeline import Pipeline
from penstock.stage.module import StageModule
from penstock.stage.split_backward.deferring import defer_weight_grads
from penstock.stage.split_backward.weight_grad import WeightGradQueue
from penstock.train.config.sections import ModelConfig
from penstock.train.evaluate import evaluate
from penstock.train.model.experts import Experts, Mixture, Router
from penstock.train.model.llama import layers, next_token_loss
from penstock.verify import VerifyTarget
from penstock.verify.training import verify
from tests.support.lanes import exhaustive
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, run, same, stopped_at

CONFIG = ModelConfig(
    vocabulary=32, width=16, layers=4, heads=4, kv_heads=2, experts=4, expert_hidden=24, shared_hidden=8,
    auxiliary_loss=0.5,
)  # fmt: skip


def filled(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return module


def by_loop(experts: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(experts.num_experts):
        token, place = torch.where(index == expert)
        gate, up = (x[token] @ experts.gate_up_proj[expert].T).chunk(2, -1)
        made = (F.silu(gate) * up) @ experts.down_proj[expert].T
        out = out.index_add(0, token, made * weights[token, place, None])
    return out


@pytest.mark.parametrize(("tokens", "chosen"), [(13, 2), (1, 1), (0, 2)])
def test_experts_equal_a_loop_over_them_also_without_tokens(tokens: int, chosen: int):
    generator = torch.Generator().manual_seed(1)
    experts = filled(Experts(6, 16, 8))
    index = torch.rand(tokens, 5, generator=generator).topk(chosen).indices  # the last expert has no tokens
    found = []
    for compute in (experts, lambda *given: by_loop(experts, *given)):
        experts.zero_grad()
        x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()
        weights = torch.rand(tokens, chosen, generator=torch.Generator().manual_seed(4)).requires_grad_()
        out = compute(x, index, weights)
        out.square().sum().backward()
        found.append((out, x.grad, weights.grad, experts.gate_up_proj.grad, experts.down_proj.grad))
    torch.testing.assert_close(found[0], found[1])
    assert not found[0][3][5].any()
    assert not found[0][4][5].any()


def test_a_part_of_the_stacks_is_a_part_of_the_experts():
    experts, x, index = filled(Experts(6, 16, 8)), torch.randn(7, 16), torch.randint(2, (7, 1)) + 3
    expected = experts(x, index, torch.ones(7, 1))
    experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj[3:5])
    experts.down_proj = torch.nn.Parameter(experts.down_proj[3:5])
    assert torch.equal(experts(x, index - 3, torch.ones(7, 1)), expected)


def test_a_mixture_equals_that_of_mixtral_and_its_auxiliary_loss():
    from transformers import MixtralConfig
    from transformers.models.mixtral import modeling_mixtral

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
    theirs = filled(modeling_mixtral.MixtralSparseMoeBlock(MixtralConfig(**sizes)))
    ours = Mixture(replace(CONFIG, shared_hidden=0))
    ours.load_state_dict({name.replace("gate.", "router."): p for name, p in theirs.named_parameters()})
    found = []
    for module in (ours, theirs):
        x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(5)).requires_grad_()
        out = module(x)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        named = sorted(module.named_parameters(), key=lambda named: named[0][-9:])
        found.append([x.grad, *(p.grad for _, p in named)])
    torch.testing.assert_close(found[0], found[1])

    model = StageModule(layers(CONFIG))
    logits: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda *seen: logits.append(seen[2][0].detach()))
    x = torch.randint(32, (2, 6))
    with Pipeline(layers(CONFIG), next_token_loss, microbatches=1, ranks=2) as pipe:
        part = pipe.evaluate(x, x).parts[NAME]
    model(x)
    assert len(logits) == 4
    expected = modeling_mixtral.load_balancing_loss_func(tuple(logits), 4, 2).item()
    assert part.item() == pytest.approx(0.5 * expected, rel=1e-6)


def test_sigmoid_scores_are_those_of_each_expert_divided_by_the_sum_of_the_chosen():
    router = filled(Router(replace(CONFIG, router="sigmoid")))
    x = torch.randn(5, 16)
    logits, index, weights = router(x)
    scores = 1 / (1 + torch.exp(-(x @ router.weight.T)))
    best = scores.sort(descending=True)
    assert torch.equal(index, best.indices[:, :2])
    torch.testing.assert_close(weights, best.values[:, :2] / best.values[:, :2].sum(1, keepdim=True))
    torch.testing.assert_close(logits.softmax(-1), scores / scores.sum(1, keepdim=True))
    with torch.no_grad():
        router.weight.fill_(-100.0)
    assert router(torch.ones(1, 16))[2].tolist() == [[0.0, 0.0]]


def test_w_computes_the_gradients_of_the_experts_and_i_does_not():
    mixture, x = filled(Mixture(CONFIG)), torch.randn(2, 5, 16)
    mixture(x).square().sum().backward()
    expected = {name: p.grad for name, p in mixture.named_parameters()}
    mixture.zero_grad()
    queue = WeightGradQueue()
    with defer_weight_grads(queue, list(mixture.parameters())):
        out = mixture(x.requires_grad_())
    out.square().sum().backward()
    assert not queue.excluded
    assert all(p.grad is None for p in mixture.parameters())
    queue.accumulate({})
    assert all(torch.equal(p.grad, expected[name]) for name, p in mixture.named_parameters())


def target() -> VerifyTarget:
    """A decoder with experts, for `verify`."""
    return VerifyTarget(layers(CONFIG), next_token_loss, _batch)


def _batch(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(32, (2 * microbatches, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


# One that keeps the backward whole, one that splits it; the others order the same ops in other ways.
@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("1f1b", 1), ("zb-v", 2), *exhaustive(("gpipe", 1), ("interleaved-1f1b", 2), ("zb-h1", 1))],
)
def test_every_kind_of_schedule_equals_plain_pytorch_bit_for_bit(schedule: str, virtual: int):
    (row,) = verify(f"{__name__}:target", [(schedule, virtual)], [2], [4], transports=["threads"], steps=2)
    assert row.schedule == schedule
    assert row.same > 1000
    assert (row.rounded, row.different) == (0, 0), row


@pytest.mark.slow
def test_a_run_goes_on_at_another_layout_and_is_evaluated(tmp_path: Path):
    model = {"experts": 4, "shared_hidden": 8, "auxiliary_loss": 0.01}
    text, folders = text_folder(tmp_path), [tmp_path / "runs" / name for name in ("straight", "again")]
    for folder in folders:
        run(config_of(tmp_path, text, folder.name, 4, model=model))
    stopped_at(tmp_path, folders[1], 2)
    run(config_of(tmp_path, text, "again", 4, str(folders[1]), model=model, parallel={"pp": 4}))
    same(*reversed(folders))
    one, other = (evaluate(folders[0], [], [f"parallel.pp={ranks}"]) for ranks in (1, 2))
    assert one == other
