"""Forwards drawn at random: the layers give the model's own numbers, or the model is refused."""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import penstock
from tests.support import own_models

BEFORE = [
    "x = self.embedding(idx)",
    "x = self.embed(idx)",
    "x, table = self.embedding(idx), self.table[: idx.shape[1]]",
    "b, t = idx.shape\nx = self.embedding(idx) + torch.arange(t, dtype=torch.float32)[None, :, None] / b",
    "x = F.embedding(idx, self.embedding.weight)\nif self.training:\n    x = x * 1.5",
]
EXTRA = [
    "first = x",
    "outputs = []",
    "count = 0",
    "state = {'sum': x * 0, 'n': 1}",
    "total = torch.zeros(())",
    "half = x[:, :4]",
]
LOOPS = [
    "for block in self.blocks:",
    "for i, block in enumerate(self.blocks):",
    "for block, gate in zip(self.blocks, self.gates):",
    "for i in range(len(self.blocks)):",
    "for i, (block, gate) in enumerate(zip(self.blocks, self.gates), 1):",
    "for block in reversed(self.blocks):",
    "for block in list(self.blocks)[1:]:",
]
BODY = [
    "x = block(x)",
    "x = x + 0.5 * block(self.norm(x))",
    "y = block(x)\nx = torch.where(y.mean() > 0, y, -y)",
    "if x.mean() > 0.1:\n    x = block(x) * 2\nelse:\n    x = block(-x)",
    "if x.std() > 50:\n    continue\nx = block(x)",
    "for _ in range(2):\n    x = block(x) / 2",
    "x = self.shared(block(x))",
]
BODY_OF_EXTRA = {
    "first": ["x = x + 0.1 * first"],
    "outputs": ["outputs.append(x)", "outputs = outputs + [x.mean()]"],
    "count": ["count += 1\nx = x * (1 + count / 100)"],
    "state": ["state = {'sum': state['sum'] + x, 'n': state['n'] + 1}"],
    "total": ["total = total + x.square().mean()"],
    "half": ["x = x + half.mean()", "half = half * 0.9"],
}
AFTER_OF_EXTRA = {
    "first": ["x = x - first"],
    "outputs": ["x = x + sum(o.mean() for o in outputs) * 0.1"],
    "count": ["x = x / count"],
    "state": ["x = x + state['sum'] / state['n']"],
    "total": ["x = x * (1 + total)"],
    "half": ["x = torch.cat([half, x[:, 4:]], 1)"],
}
AFTER = [
    "x = self.norm(x)\nreturn self.head(x)",
    "return self.head(self.norm(x))",
    "logits = self.head(self.norm(x))\nif self.scale != 1:\n    logits = logits * self.scale\nreturn logits",
    "return self.norm(x) @ self.embedding.weight.T",
    "rows = idx.shape[0]\nreturn self.finish(x).reshape(rows, -1)",
]
HEADER = """import torch
from torch import nn
from torch.nn import functional as F

from tests.support.own_models import SEQUENCE, WIDTH, Parts


class Drawn(Parts):
    def __init__(self):
        super().__init__()
        self.gates = nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(4)])
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.rand(SEQUENCE, WIDTH))
        self.scale = 0.5

    def embed(self, idx):
        return self.embedding(idx) * self.scale

    def finish(self, x):
        return self.head(self.norm(x))

    def forward(self, idx):
"""

_numbers = itertools.count()


def source(before: str, extra: Sequence[str], loop: str, body: Sequence[str], after: Sequence[str]) -> str:
    """Return the text of a module with the class ``Drawn``."""
    lines = [*before.split("\n"), *extra, loop]
    if "range" in loop:
        lines.append("    block = self.blocks[i]")
    inner = [*body, "x = x * gate"] if "gate" in loop else list(body)
    lines += [f"    {line}" for part in inner for line in part.split("\n")]
    lines += [line for part in after for line in part.split("\n")]
    return HEADER + "".join(f"        {line}\n" for line in lines)


def written(text: str, folder: Path) -> type[nn.Module]:
    """Write a module and load it; return its class ``Drawn``."""
    path = folder / f"drawn_{next(_numbers)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind: type[nn.Module] = module.Drawn
    return kind


@st.composite
def sources(draw: st.DrawFn) -> str:
    extra = draw(st.lists(st.sampled_from(EXTRA), max_size=3, unique=True))
    names = [line.split(" ")[0] for line in extra]
    body = [draw(st.sampled_from(BODY))]
    body += [draw(st.sampled_from(BODY_OF_EXTRA[name])) for name in names if draw(st.booleans())]
    after = [
        draw(st.sampled_from(AFTER_OF_EXTRA[name]))
        for name in names
        if name != "count" and draw(st.booleans())
    ]
    after.append(draw(st.sampled_from(AFTER)))
    body = draw(st.permutations(body))
    return source(draw(st.sampled_from(BEFORE)), extra, draw(st.sampled_from(LOOPS)), body, after)


def compare(text: str, folder: Path) -> None:
    net = own_models.made(written(text, folder))
    expected = copy.deepcopy(net)
    x, y = own_models.batch()
    penstock.split(net, x)
    losses = []
    for part in x.chunk(2):
        loss = expected(part).square().mean()
        (loss / 2).backward()
        losses.append(loss.detach())
    # What is drawn may be of all rows of a microbatch, such as x.mean(); the layers were compared above.
    options = {"microbatches": 2, "execution": penstock.ExecutionOptions(check_split=False)}
    with penstock.Pipeline(net, lambda output, _: output.square().mean(), ranks=3, **options) as pipe:
        assert torch.equal(pipe.step(x, y).losses, torch.stack(losses))
        for name, p in pipe.named_parameters():
            gradient = expected.get_parameter(name).grad
            if gradient is None or p.grad is None:  # unused, or its gradient is zero throughout
                assert all(g is None or not g.any() for g in (gradient, p.grad)), name
            else:
                torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)
        assert list(pipe.full_state_dict()) == list(expected.state_dict())


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=sources())
def test_drawn_forwards_give_the_models_numbers(text: str, tmp_path: Path):
    compare(text, tmp_path)


@pytest.mark.exhaustive
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=sources())
def test_many_drawn_forwards_give_the_models_numbers(text: str, tmp_path: Path):
    compare(text, tmp_path)
