"""Models with forwards of their own, as layers: the numbers of the model itself, or a refusal that says why."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.base.errors import ConfigError, PenstockError, SplitError
from penstock.forward.loss_piece import loss_in
from tests.support import own_models, unsplittable

MICROBATCHES = 2


def size(output: object, target: object = None) -> Tensor:
    """A loss of any output."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()


def plain(net: nn.Module, loss_fn: Callable[[object, object], Tensor] | None, rows: int) -> Tensor:
    """Losses of the microbatches; their gradients accumulate in the model."""
    losses = []
    x, y = own_models.batch(rows)
    for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        loss = loss_in(net(a, b)) if loss_fn is None else loss_fn(net(a), b)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def assert_same_gradients(
    net: nn.Module, gradients: dict[str, Tensor | None], summed: tuple[str, ...] = ()
) -> None:
    expected = {name: p.grad for name, p in net.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        seen = gradients[name]
        if gradient is None or seen is None:
            assert gradient is seen is None, name
        elif name.startswith(summed or "/"):
            assert torch.allclose(seen, gradient, rtol=1e-5, atol=1e-7), name
        else:
            assert torch.equal(seen, gradient), name


CASES = [(make, False) for make in own_models.WITH_OUTPUT] + [(make, True) for make in own_models.WITH_LOSS]


@pytest.mark.parametrize(("make", "with_loss"), CASES, ids=lambda v: getattr(v, "__name__", None))
def test_the_layers_give_losses_gradients_and_names_of_the_model(make, with_loss):
    net = own_models.made(make)
    expected = copy.deepcopy(net)
    x, y = own_models.batch()
    assert len(penstock.split(net, *((x, y) if with_loss else (x,)))) > 4
    loss_fn = None if with_loss else size
    losses = plain(expected, loss_fn, len(x))
    with penstock.Pipeline(net, loss_fn, ranks=3, microbatches=MICROBATCHES) as pipe:
        result = pipe.step(x, y)
        gradients = {name: p.grad for name, p in pipe.named_parameters()}
        state = pipe.full_state_dict()
    assert torch.equal(result.losses, losses)
    assert_same_gradients(expected, gradients, own_models.SUMMED.get(make.__name__, ()))
    assert list(state) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value), name
    assert pipe.unsplit() is net


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "zb-v", "interleaved-1f1b"])
def test_any_schedule_runs_them(schedule: str):
    net = own_models.made(own_models.Masked)
    expected = copy.deepcopy(net)
    x, _ = own_models.batch()
    mask = torch.ones_like(x)
    mask[:, 5:] = 0
    for a, m in zip(x.chunk(2), mask.chunk(2), strict=True):
        (size(expected(a, m)) / 2).backward()
    virtual = 2 if schedule == "interleaved-1f1b" else 1
    with penstock.Pipeline(
        net, size, ranks=2, microbatches=2, schedule=schedule, virtual_stages=virtual, recompute="full"
    ) as pipe:
        pipe.step(x, x, mask=mask)
        assert_same_gradients(expected, {n: p.grad for n, p in pipe.named_parameters()})


def test_copies_of_stages_and_of_a_tied_head_stay_equal():
    net = own_models.made(own_models.NanoGPT)
    expected = copy.deepcopy(net)
    x, y = own_models.batch(8)
    (loss_in(expected(x, y))).backward()
    with penstock.Pipeline(net, ranks=2, microbatches=4, schedule="dualpipe") as pipe:
        pipe.step(x, y)
        for name, p in pipe.named_parameters():
            assert torch.allclose(p.grad, expected.get_parameter(name).grad, rtol=1e-4, atol=1e-6), name
    assert pipe.unsplit().lm_head.weight is net.transformer.wte.weight


def test_random_numbers_do_not_depend_on_the_split():
    x, y = own_models.batch()
    losses = []
    for ranks in (1, 3):
        net = own_models.made(own_models.Random)
        with penstock.Pipeline(net, size, ranks=ranks, microbatches=2) as pipe:
            losses.append(pipe.step(x, y).losses)
            training = pipe.evaluate(x, y).loss
            assert torch.equal(training, torch.stack([size(net.eval()(a)) for a in x.chunk(2)]).mean())
    assert torch.equal(*losses)


def test_the_table_says_what_was_taken_for_what():
    net = own_models.made(own_models.NanoGPT)
    lines = str(penstock.split(net, loss=True)).splitlines()
    assert lines[0] == "NanoGPT: 6 layers"
    assert re.fullmatch(
        r"  embedding transformer\.wte\+transformer\.wpe\+transformer\.drop: NanoGPT\.forward lines \d+-\d+ -> x",
        lines[1],
    )
    assert re.fullmatch(r"  block     transformer\.h\.0: NanoGPT\.forward line \d+ -> x", lines[2])
    assert re.fullmatch(
        r"  head      transformer\.ln_f\+lm_head: NanoGPT\.forward lines \d+-\d+ -> logits", lines[6]
    )
    assert re.fullmatch(r"  loss_fn: NanoGPT\.forward lines \d+-\d+", lines[7])


def test_the_output_is_what_the_loss_is_computed_from():
    net = own_models.made(own_models.NanoGPT)
    x, y = own_models.batch()
    with penstock.Pipeline(net, ranks=2, microbatches=2) as pipe:
        outputs = pipe.evaluate(x, outputs=True).outputs
        loss = pipe.evaluate(x, y).loss
    net.eval()
    for output, tokens, targets in zip(outputs, x.chunk(2), y.chunk(2), strict=True):
        assert torch.equal(output, net(tokens, targets)[0])
    assert torch.allclose(loss, net(x, y)[1])


@pytest.mark.parametrize(
    ("kind", "reason"), unsplittable.REFUSED.items(), ids=lambda v: getattr(v, "__name__", None)
)
def test_what_cannot_be_known_is_refused(kind, reason):
    with pytest.raises(SplitError, match=reason):
        penstock.split(kind())


@pytest.mark.parametrize(
    "pre",
    [
        lambda net: net.embedding.forward,
        lambda net: functools.partial(net.embedding),
        lambda net: unsplittable.Holder(net.embedding),
    ],
    ids=["method", "partial", "object"],
)
def test_a_module_within_an_attribute_is_refused(pre):
    net = unsplittable.Before()
    net.pre = pre(net)
    with pytest.raises(SplitError, match=r"self\.pre, which holds a Embedding"):
        penstock.split(net)


@pytest.mark.parametrize(
    ("kind", "reason"), unsplittable.REFUSED_WITH_LOSS.items(), ids=lambda v: getattr(v, "__name__", None)
)
def test_losses_that_need_the_model_are_refused(kind, reason):
    with pytest.raises(SplitError, match=reason):
        penstock.Pipeline(kind(), ranks=2, microbatches=2)


@pytest.mark.parametrize(
    ("kind", "reason"), unsplittable.REFUSED_WHEN_RUN.items(), ids=lambda v: getattr(v, "__name__", None)
)
def test_variables_that_cannot_travel_are_refused_by_name(kind, reason):
    x, _ = own_models.batch()
    with pytest.raises(PenstockError, match=reason):
        penstock.split(kind(), x)


def test_a_sample_shows_values_that_pass_through_attributes_of_blocks():
    net = own_models.made(own_models.WithUnused)
    first = net.blocks[0]
    net.blocks[2] = unsplittable.Sly([first])
    x, _ = own_models.batch()
    with pytest.raises(SplitError, match="a different gradient") as refusal:
        penstock.split(net, x)
    first = "The first tensor that differs from the model's: blocks.0.inner.weight, gradient as the optimizer sees it"
    assert first in str(refusal.value)


def test_a_refused_split_names_the_first_tensor_that_differs():
    net = own_models.made(own_models.WithUnused)
    first = net.blocks[0]
    # Each layer runs on a copy of its own, where the other block has never left a value.
    first.register_forward_hook(lambda module, args, output: setattr(module, "seen", output.mean()))
    net.blocks[2] = unsplittable.Peeking([first])
    x, _ = own_models.batch()
    with pytest.raises(
        SplitError, match=r"a different result.* from the model's: blocks\.2, output, differs"
    ):
        penstock.split(net, x)


def test_sparse_gradients_are_compared_with_the_samples():
    net = own_models.made(own_models.WithUnused)
    net.embedding.sparse = True
    assert len(penstock.split(net, own_models.batch()[0])) == 6


def test_autocast_adds_two_gradients_of_a_weight_in_its_own_precision():
    net = own_models.made(own_models.OneBlockInThreePlaces)
    net.blocks = net.blocks[1:]
    x, y = own_models.batch(32)
    with penstock.Pipeline(net, size, ranks=2, microbatches=2, autocast=torch.bfloat16) as pipe:
        assert pipe.step(x, y).loss > 0


def test_a_target_by_its_name_is_the_target():
    x, y = own_models.batch()
    assert penstock.split(own_models.NanoGPT(), x, targets=y).loss_fn is not None
    assert penstock.split(own_models.NanoGPT(), x).loss_fn is None


def test_samples_that_say_nothing_are_refused():
    x, y = own_models.batch()
    for sample, named in (((x, y), {"loss": False}), ((x, y, y), {}), ((), {"mask": y})):
        with pytest.raises(ConfigError, match="sample"):
            penstock.split(own_models.NanoGPT(), *sample, **named)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_models_within_wrappers_are_named():
    with pytest.raises(SplitError, match=r"model\.module"):
        penstock.split(nn.DataParallel(own_models.NanoGPT()))
    with pytest.raises(SplitError, match="ExecutionOptions"):
        penstock.split(torch.compile(own_models.NanoGPT(), backend="eager"))


def test_a_class_without_source_is_refused():
    names: dict[str, type[nn.Module]] = {}
    text = "from torch import nn\nclass Typed(nn.Module):\n    def forward(self, x):\n        return x\n"
    exec(compile(text, "<nowhere>", "exec"), names)
    with pytest.raises(SplitError, match="put the class into a file"):
        penstock.split(names["Typed"]())


def test_a_file_that_was_edited_since_it_was_loaded_is_refused(tmp_path, monkeypatch):
    text = "from tests.support.own_models import Parts\n\n\nclass Edited(Parts):\n    def forward(self, x):\n"
    body = "        x = self.embedding(x) * 2\n        for block in self.blocks:\n"
    body += "            x = block(x)\n        return x\n"
    path = tmp_path / "edited_model.py"
    path.write_text(text + body)
    monkeypatch.syspath_prepend(str(tmp_path))
    import edited_model

    net = edited_model.Edited()
    assert len(penstock.split(net)) == 5
    path.write_text(text + body.replace("* 2", "* 3"))
    import linecache

    linecache.checkcache(str(path))
    with pytest.raises(SplitError, match="differs from the code that runs"):
        penstock.split(net)


SEEN: dict[str, torch.Tensor] = {}


class Global(own_models.Block):
    """A block that leaves a value in a global variable, or adds it."""

    def __init__(self, leaves: bool) -> None:
        super().__init__()
        self.leaves = leaves

    def forward(self, x):
        x = super().forward(x)
        if self.leaves:
            SEEN["value"] = x.detach().mean(-1, keepdim=True)
            return x
        return x + SEEN.get("value", 0.0)


@pytest.mark.parametrize("rows", [4, 1])
def test_values_that_pass_through_globals_are_refused(rows: int):
    net = own_models.made(own_models.WithUnused)
    net.blocks[0], net.blocks[2] = Global(True), Global(False)
    with pytest.raises(SplitError, match=r"global variables.* from the model's: blocks\.2, output"):
        penstock.split(net, own_models.batch(rows)[0])


def test_values_that_pass_through_globals_are_refused_in_the_first_step():
    net = own_models.made(own_models.WithUnused)
    net.blocks[0], net.blocks[3] = Global(True), Global(False)
    x, y = own_models.batch()
    with (
        penstock.Pipeline(net, size, ranks=2, microbatches=1) as pipe,
        pytest.raises(SplitError, match="global variables"),
    ):
        pipe.step(x, y)
    with penstock.Pipeline(
        net, size, ranks=1, microbatches=2
    ) as pipe:  # one stage runs a microbatch at a time
        pipe.step(x, y)


def test_a_refusal_holds_where_the_forward_fails_when_it_runs_again():
    calls = []

    def fails_later(module, args):
        calls.append(1)
        # The model's forward and the layers' with two microbatches have called it three times; then it fails.
        if len(calls) > 3:
            raise RuntimeError("once is enough")

    net = own_models.made(own_models.WithUnused)
    first = net.blocks[0]
    first.register_forward_pre_hook(fails_later)
    first.register_forward_hook(lambda module, args, output: setattr(module, "seen", output.mean()))
    net.blocks[2] = unsplittable.Peeking([first])
    with pytest.raises(SplitError, match="a different result") as refusal:
        penstock.split(net, own_models.batch()[0])
    assert "The first tensor that differs" not in str(refusal.value)
    assert len(calls) > 3
