"""A model that is changed after its split is refused in the next step: its layers would not follow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import penstock
from penstock.base.errors import SplitError
from tests.support import own_models
from tests.support.changing_models import Decided

CHANGES = {
    own_models.Switch: [
        ("net.head = nn.Linear(WIDTH, VOCABULARY)", "head"),
        ("net.blocks.append(Block())", r"blocks\.4"),
        ("net.blocks[1] = Block()", r"blocks\.1"),
        ("net.checkpoint = True", "checkpoint"),
        ("net.register_forward_pre_hook(lambda module, inputs: None)", "a hook"),
    ],
    Decided: [
        ("net.flag = False", "flag"),
        ("net.wide = False", "wide"),
        ("net.cfg.deep = False", r"cfg\.deep"),
        ("net.cfg.inner.blocks = 3", r"cfg\.inner\.blocks"),
        ("net.opts['norm'] = False", r"opts\['norm'\]"),
        ("net.ways[0] = 0", r"ways\[0\]"),
        ("del net.opts['norm']", r"opts\['norm'\]"),
        ("net.finish = net.head", "finish"),
        ("net.forward = net.embedding", "forward"),
    ],
}


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize(
    ("make", "change", "name"), [(make, *row) for make, rows in CHANGES.items() for row in rows]
)
def test_a_change_is_refused_by_name(make, change: str, name: str):
    net = own_models.made(make)
    x, y = own_models.batch()
    with penstock.Pipeline(net, mean_square, ranks=2, microbatches=2) as pipe:
        pipe.step(x, y)
        exec(change, vars(own_models), {"net": net})
        for run in (pipe.step, pipe.evaluate):
            with pytest.raises(SplitError, match=f"^{name} of the model"):
                run(x, y)


def test_a_method_of_the_class_that_is_replaced_is_refused(monkeypatch: pytest.MonkeyPatch):
    net = own_models.made(Decided)
    x, y = own_models.batch()
    with penstock.Pipeline(net, mean_square, ranks=2, microbatches=2) as pipe:
        with monkeypatch.context() as patch:
            patch.setattr(Decided, "finish", lambda self, x: self.head(x) * 2)
            with pytest.raises(SplitError, match=r"^finish of the model"):
                pipe.step(x, y)
        pipe.step(x, y)


def test_values_may_change():
    net = own_models.made(own_models.Masked)
    x, y = own_models.batch()
    with penstock.Pipeline(net, mean_square, ranks=2, microbatches=2) as pipe:
        before = pipe.step(x, y).loss
        with torch.no_grad():
            net.slope.mul_(2)
            net.head.weight.mul_(2)
        assert not torch.equal(pipe.step(x, y).loss, before)
        net.eval()
        net.train()
        pipe.step(x, y)
