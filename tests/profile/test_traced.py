from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.base.errors import ProfileError, SplitError
from penstock.profile.closed_form import Workload, block_cost
from penstock.profile.model_profile import Profile, read_profile
from penstock.profile.model_shape import ModelShape
from penstock.profile.traced import trace_layers
from penstock.stage.compute.runner import LossInputs
from penstock.stage.compute.stage import Stage
from penstock.stage.module import StageModule
from penstock.stage.named import give
from penstock.stage.values import Message
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

CONFIG = ModelConfig(vocabulary=96, width=32, layers=2, heads=4, kv_heads=2, hidden=64)
TOKENS = torch.zeros(2, 16, dtype=torch.int64)


def held_by_a_stage(n: int, x: Tensor) -> int:
    module = StageModule(layers(CONFIG)[n : n + 1])
    message = Message((x,), None, (x.is_floating_point(),))
    last = n == CONFIG.layers + 1
    stage = Stage(0, module, next_token_loss if last else None)
    stage.begin(0)
    if last:
        stage.forward_with_loss(0, (message,), LossInputs(TOKENS))
    else:
        stage.forward(0, (message,))
    return stage.held_bytes


@pytest.fixture(scope="module")
def traced() -> Profile:
    return trace_layers(layers(CONFIG), TOKENS, target=TOKENS, loss_fn=next_token_loss)


def test_saved_bytes_are_those_that_a_stage_holds(traced: Profile):
    costs = [traced.kinds[kind].at(2) for *_, kind in traced.layers]
    hidden = torch.randn(2, 16, 32)
    assert [cost.saved_bytes for cost in costs[:2]] == [
        held_by_a_stage(0, TOKENS), held_by_a_stage(1, hidden),
    ]  # fmt: skip
    # The target is not the stage's to keep: it belongs to the batch.
    assert costs[-1].saved_bytes == held_by_a_stage(3, hidden)


def test_flops_are_those_of_the_closed_form(traced: Profile):
    shape = ModelShape(name="m", layers=2, hidden=32, heads=4, kv_heads=2, head_size=8, ffn=64, vocabulary=96)
    expected = block_cost(shape, Workload(microbatch=2, sequence=16))
    cost = traced.kinds[traced.layers[1][2]].at(2)
    assert cost.model_flops == expected.model_flops
    assert cost.parameters == expected.parameters
    products = [
        next(w.amount for w in works if w.unit == "matmul") for works in (cost.input_grad, cost.weight_grad)
    ]
    assert products == [sum(w.amount for w in expected.weight_grad)] * 2


def test_equal_layers_are_one_kind_and_sizes_interpolate(traced: Profile, tmp_path: Path):
    """And a profile is read as it was saved."""
    profile = trace_layers(layers(CONFIG), TOKENS, microbatches=(1, 4), name="small")
    assert [kind for *_, kind in profile.layers] == [0, 1, 1, 2]
    assert [role for _, role, _ in profile.layers] == ["embedding", "block", "block", "head"]
    assert profile.blocks == 2
    assert profile.sequence == 16
    block = profile.kinds[1]
    assert block.at(2).output_bytes == 2 * 16 * 32 * 4
    direct = traced.kinds[1].at(2).saved_bytes
    assert block.at(2).saved_bytes == pytest.approx(direct, rel=0.02)
    profile.save(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


def test_tracing_leaves_the_model_as_it_is():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    profile = trace_layers(model, torch.zeros(2, 3, 8, 8), target=torch.zeros(2, dtype=torch.int64),
                           loss_fn=nn.functional.cross_entropy)  # fmt: skip
    assert profile.parameters == sum(p.numel() for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 5)


class Giver(nn.Module):
    gives = ("scale",)

    def forward(self, x: Tensor) -> Tensor:
        give("scale", x.mean(dim=1, keepdim=True))
        return x


class Taker(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, mask: Tensor | None = None) -> Tensor:
        return x * scale if mask is None else x * scale * mask


def test_named_values_reach_the_layers_that_take_them():
    model = nn.Sequential(nn.Linear(4, 4), Giver(), nn.Linear(4, 4), Taker())
    profile = trace_layers(model, torch.zeros(2, 4), named={"mask": torch.ones(2, 1)})
    assert len(profile.layers) == 4


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.detach().sum())


def test_a_layer_that_cannot_be_traced_is_named():
    with pytest.raises(ProfileError, match=r"layer '1' cannot be profiled: .*DataDependent"):
        trace_layers(nn.Sequential(nn.Linear(3, 3), Reads()), torch.zeros(2, 3))
    with pytest.raises(ProfileError, match="must be a microbatch of tensors"):
        trace_layers(nn.Sequential(nn.Linear(3, 3)), "text")
    with pytest.raises(SplitError, match="cannot cut"):
        trace_layers(nn.Linear(3, 3), torch.zeros(2, 3))


class _MakesTensors(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(1)


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return _MakesTensors.apply(x, self.weight.abs())


def test_a_backward_may_make_tensors_where_it_likes():
    profile = trace_layers(nn.Sequential(nn.Linear(4, 4), OwnFunction()), torch.zeros(2, 4))
    assert profile.parameters == 21


def test_autocast_is_that_of_a_pipeline():
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4))
    x, y = torch.randn(2, 8), torch.randn(2, 4)
    plain = trace_layers(model, x, target=y, loss_fn=nn.functional.mse_loss)
    half = trace_layers(model, x, target=y, loss_fn=nn.functional.mse_loss, autocast=torch.bfloat16)
    assert [(p.dtype, p.autocast) for p in (plain, half)] == [("fp32", False), ("bf16", True)]
    outputs = [p.kinds[0].points[0][1].output_bytes for p in (plain, half)]
    assert outputs == [2 * 32 * 4, 2 * 32 * 2]
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        kept = model[0](x)
    assert half.kinds[0].points[0][1].saved_bytes == sum(saved.values()), kept
    with pytest.raises(
        ProfileError, match=r"autocast must be torch\.bfloat16, torch\.float16 or None, got 'bf16'"
    ):
        trace_layers(model, x, autocast="bf16")


class Experts(nn.Module):
    """Rows go to experts in order, whatever their values: 6 experts with matrices of 16 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 16, 32, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.linspace(1, x.shape[0], 6).to(torch.int32)
        return nn.functional.grouped_mm(x, self.weight, offs=ends)


def test_products_of_experts_are_counted():
    """Every row is multiplied by one expert's matrix, and twice as often in the backward."""
    x = torch.randn(24, 16, dtype=torch.bfloat16)
    rows = trace_layers(nn.Sequential(nn.Linear(16, 16, dtype=torch.bfloat16), Experts()), x)
    cost = rows.kinds[1].points[0][1]
    product = 2 * 24 * 16 * 32
    assert cost.model_flops == product
    for works in (cost.forward, cost.input_grad, cost.weight_grad):
        assert sum(work.amount for work in works if work.unit == "matmul") == product


def test_a_wrong_shape_is_one_error_and_nothing_is_logged(caplog: pytest.LogCaptureFixture):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    try:
        with pytest.raises(ProfileError, match="layer '0' cannot be profiled"):
            trace_layers(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)), torch.randn(4, 5))
    finally:
        log.removeHandler(caplog.handler)
    assert caplog.records == []
    assert not log.filters


@pytest.mark.slow
def test_experts_of_fp32_count_the_products_of_the_chosen_ones():
    """Each token passes two of the eight experts, with three matrices each."""
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2,
        num_local_experts=8, num_experts_per_tok=2, vocab_size=64,
    )  # fmt: skip
    rows, tokens = 2, 16
    ids = torch.zeros((rows, tokens), dtype=torch.int64)
    profile = penstock.profile_layers(
        penstock.from_transformers(config), ids, target=ids, loss_fn=penstock.causal_lm_loss, measure=False
    )
    block = profile.kinds[1].points[0][1]
    attention, router, experts = 4 * 32 * 32, 32 * 8, 2 * 3 * 32 * 64
    products = 2 * rows * tokens * (attention + router + experts)
    assert block.model_flops - block.attention_flops == products


class _CountsBackwards(torch.autograd.Function):
    count = 0

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        _CountsBackwards.count += 1
        return grad * 2


class Counted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(16, width)
        self.down = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(_CountsBackwards.apply(self.up(x)))


def test_layers_with_the_same_operations_run_one_backward():
    """Two widths, and each backward as a whole and as its first half."""
    _CountsBackwards.count = 0
    model = nn.Sequential(nn.Linear(4, 16), *(Counted(width) for width in (8, 8, 24, 8, 24, 8)))
    profile = trace_layers(model, torch.zeros(2, 4), microbatches=[2])
    assert _CountsBackwards.count == 2 * 2
    assert [kind for *_, kind in profile.layers] == [0, 1, 1, 2, 1, 2, 1]
    alone = trace_layers(nn.Sequential(nn.Linear(4, 16), Counted(24)), torch.zeros(2, 4), microbatches=[2])
    of_both = [at.kinds[kind].points[0][1].weight_grad for at, kind in ((profile, 2), (alone, 1))]
    assert of_both[0] == of_both[1]


def test_gradients_of_weights_do_not_wait_for_each_other():
    """A gradient is added to the sum of the step as soon as it is complete."""
    width, rows = 64, 2
    model = nn.Sequential(nn.Sequential(*(nn.Linear(width, width) for _ in range(8))))
    cost = trace_layers(model, torch.zeros(rows, width), microbatches=[rows]).kinds[0].points[0][1]
    assert 4 * width**2 <= cost.transient_bytes < 2 * 4 * width**2
