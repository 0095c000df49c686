"""Everything that may be a layer, and helpful errors for the rest."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.base.errors import ScheduleError, SplitError, StageError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import build_schedule
from penstock.stage.layers import FunctionLayer, as_layers
from penstock.stage.module import StageModule
from tests.support import plain
from tests.support.groups import outcome

WIDTH = plain.WIDTH


def linears(count: int = 3) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def test_a_module_list_is_a_list_of_layers():
    net, other = nn.ModuleList(linears()), nn.Sequential(*linears())
    x, y = plain.batch(0, 8)
    with Pipeline(net, F.mse_loss, microbatches=4, ranks=3) as pipe:
        assert list(pipe.state_dict()) == list(other.state_dict())
        losses = pipe.step(x, y).losses
    assert torch.equal(losses, plain.step(other, F.mse_loss, x, y, 4)[0])


FUNCTIONS = {
    "of torch._C": F.gelu,
    "of Python": F.relu,
    "in place": partial(F.relu, inplace=True),
    "method": torch.Tensor.tanh,
    "lambda": lambda x: x.flatten(1) * 2,
}


def trained(rank: int, name: str, ranks: int) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    first, second, third = linears()
    function = FUNCTIONS[name]
    with Pipeline(
        [first, function, second, ("named", function), third],
        F.mse_loss,
        microbatches=4,
        ranks=ranks,
        schedule="zb-h1",
    ) as pipe:
        losses = pipe.step(*plain.batch(0, 8)).losses
        return [losses, *(p.grad for _, p in sorted(pipe.named_parameters()))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_the_value_is_a_layer(name):
    class Function(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return FUNCTIONS[name](x)

    first, second, third = linears()
    other = nn.Sequential(first, Function(), second, Function(), third)
    wanted = [plain.step(other, F.mse_loss, *plain.batch(0, 8), 4)[0]]
    wanted += [p.grad for _, p in sorted(other.named_parameters())]
    for ranks in (1, 3):
        assert all(map(torch.equal, trained(0, name, ranks), wanted))


@pytest.mark.slow
def test_a_function_is_a_layer_in_processes_too(processes: LocalProcesses):
    first, last = processes.run(2, trained, "lambda", 2)
    wanted = trained(0, "lambda", 1)
    assert all(map(torch.equal, [first[0], *first[1:], *last[1:]], wanted))


def test_a_function_takes_the_named_values_that_it_lists():
    def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * mask[:, None]

    x, y = plain.batch(0, 8)
    mask = torch.arange(8.0)
    with Pipeline([*linears(1), masked], F.mse_loss, microbatches=4, ranks=2) as pipe:
        losses = pipe.step(x, y, mask=mask).losses
    (inner,) = linears(1)
    parts = zip(x.chunk(4), y.chunk(4), mask.chunk(4), strict=True)
    assert torch.equal(losses, torch.stack([F.mse_loss(inner(a) * m[:, None], b) for a, b, m in parts]))


def test_builders_are_what_needs_no_argument():
    model = [nn.Identity, partial(nn.Linear, 2, 2), lambda: nn.Linear(2, 2), nn.ReLU]
    assert [type(layer.build()) for layer in as_layers(model)] == [nn.Identity, nn.Linear, nn.Linear, nn.ReLU]
    assert isinstance(as_layers([torch.relu])[0].build(), FunctionLayer)


class Hidden:
    def __init__(self) -> None:
        (self.inner,) = linears(1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


HIDDEN = Hidden()


# with and without a split backward
@pytest.mark.parametrize(
    ("hidden", "family"),
    [
        (linears(1)[0].forward, "1f1b"),
        (lambda x: HIDDEN.inner(x), "zb-h1"),
        (HIDDEN, "1f1b"),
    ],
)
def test_a_function_that_hides_weights_is_refused_in_the_first_step(hidden, family):
    with (
        Pipeline([*linears(1), hidden], F.mse_loss, microbatches=2, ranks=2, schedule=family) as pipe,
        pytest.raises(StageError, match="layer '1' is a function that uses a weight"),
    ):
        pipe.step(*plain.batch(0, 4))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ([nn.Linear], "layer '0' is the class Linear, which needs arguments"),
        (
            [nn.Linear(2, 2), nn.LazyLinear(2)],
            r"layer '1' \(LazyLinear\).*without a shape yet: weight.*run one batch",
        ),
        (nn.Sequential(nn.Sequential(nn.LazyConv1d(2, 1))), "layer '0'.*0.weight.*run one batch"),
        ([nn.LazyBatchNorm1d()], "running_mean.*run one batch"),
        ([("a+b", nn.Linear(2, 2))], r"layer name 'a\+b' must not contain '\+'; give the layer another name"),
    ],
)
def test_what_is_no_layer_yet_is_refused(model, message):
    with pytest.raises(SplitError, match=message):
        as_layers(model)


def test_a_lazy_layer_that_has_seen_a_batch_is_like_any_other():
    net = nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, WIDTH))
    x, y = plain.batch(0, 4)
    net(x)
    with Pipeline(net, F.mse_loss, microbatches=2, ranks=2) as pipe:
        pipe.step(x, y)


def test_a_builder_that_returns_a_tensor_is_told_from_a_function():
    with pytest.raises(SplitError, match=r"returned a Tensor.*a function that is itself the layer needs one"):
        StageModule(as_layers([lambda x=1.0: torch.tensor(x)]))


def lazy_on_the_last(rank: int) -> str:
    model = [lambda: nn.Linear(2, 2), lambda: nn.LazyLinear(2)]
    return outcome(Pipeline, model, F.mse_loss, microbatches=2, ranks=2, timeout=300)


@pytest.mark.slow
def test_a_builder_that_is_refused_on_one_rank_is_refused_on_all(processes: LocalProcesses):
    for text in processes.run(2, lazy_on_the_last):
        assert "layer '1' (LazyLinear) has parameters without a shape yet" in text


def test_a_model_of_hugging_face_gets_the_hint_that_helps():
    kind = type("LlamaForCausalLM", (nn.Module,), {"__module__": "transformers.models.llama"})
    with pytest.raises(SplitError, match=r"Pipeline\(penstock\.from_transformers\(model\)"):
        as_layers(kind())


def test_virtual_stages_beside_a_schedule_that_says_otherwise_are_refused():
    one, two = build_schedule("1f1b", 2, 4), build_schedule("interleaved-1f1b", 2, 4, 2)
    with pytest.raises(
        ScheduleError, match=r"4 stages on 2 ranks.*virtual_stages=3; leave virtual_stages out"
    ):
        Pipeline(linears(4), F.mse_loss, microbatches=4, schedule=two, virtual_stages=3)
    with pytest.raises(ScheduleError, match="virtual_stages=2"):
        Pipeline(linears(4), F.mse_loss, microbatches=4, schedule=one, virtual_stages=2)
    for virtual_stages in (1, 2):
        Pipeline(linears(4), F.mse_loss, microbatches=4, schedule=two, virtual_stages=virtual_stages).close()
    both = build_schedule("dualpipe", 2, 4)
    Pipeline(linears(2), F.mse_loss, microbatches=4, schedule=both, virtual_stages=2).close()


class Residual(nn.Sequential):
    """Adds its input to the output of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def hooked() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 4))
    net.register_forward_hook(lambda *_: None)
    return net


def scaled() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 4))
    net.scale = nn.Parameter(torch.ones(()))
    return net


def replaced() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 4))
    net.forward = lambda x: x
    return net


@pytest.mark.parametrize(
    ("make", "own"),
    [
        (lambda: Residual(nn.Linear(4, 4)), "a forward"),
        (hooked, "hooks"),
        (scaled, "parameter scale"),
        (replaced, "a forward"),
    ],
)
def test_a_container_that_does_more_than_hold_its_layers_is_refused(make, own: str):
    with pytest.raises(SplitError, match=rf"also has {own}, which would be lost"):
        as_layers(make())
    assert len(as_layers(list(make()))) == 1


@pytest.mark.parametrize("change", ["replace", "append", "delete"])
def test_a_container_that_changes_after_the_pipeline_was_built_is_refused(change: str):
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with Pipeline(net, nn.functional.mse_loss, microbatches=2, ranks=2) as pipe:
        pipe.step(x, y)
        if change == "replace":
            net[1] = nn.Linear(4, 4)
        elif change == "append":
            net.append(nn.Linear(4, 4))
        else:
            del net[2]
        with pytest.raises(SplitError, match=r"layer '[123]' of the model was added, replaced or removed"):
            pipe.step(x, y)
