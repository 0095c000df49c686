"""Models in the forms in which they are published train as they are, with the bits of plain PyTorch."""

from __future__ import annotations

import pytest
import torch

import penstock
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive, slow
from tests.support.published_models import (
    FORMS,
    MICROBATCHES,
    STEPS,
    differences,
    parts_of,
    piped,
    plainly,
    sgd,
)

LAYOUTS = {
    "1f1b": {"schedule": "1f1b", "ranks": 2},
    "1f1b, 4 ranks": {"schedule": "1f1b", "ranks": 4},
    "gpipe": {"schedule": "gpipe", "ranks": 2},
    "interleaved": {"schedule": "interleaved-1f1b", "ranks": 2, "virtual_stages": 2},
    "zb-h1": {"schedule": "zb-h1", "ranks": 2},
    "zb-v": {"schedule": "zb-v", "ranks": 2},
    "dualpipe": {"schedule": "dualpipe", "ranks": 2},
    "recompute": {"schedule": "1f1b", "ranks": 2, "recompute": "full"},
}


def exact(layout: str) -> bool:
    """Whether a layout runs the microbatches of each stage in the batch's order."""
    return layout != "dualpipe"


# Every form and every layout once.
ONCE = [*zip(FORMS, LAYOUTS, strict=False), ("unet", "dualpipe"), ("dit", "recompute"), ("resnet", "zb-v")]
REST = [(name, layout) for name in FORMS for layout in LAYOUTS if (name, layout) not in ONCE]


@pytest.mark.parametrize(("name", "layout"), [*slow(*ONCE), *exhaustive(*REST)])
def test_threads_train_it_as_plain_pytorch_does(name: str, layout: str):
    assert differences(piped(name, **LAYOUTS[layout]), plainly(name), exact(layout)) == []


def in_process(rank: int, name: str, layout: str) -> list[str]:
    return differences(piped(name, timeout=300, **LAYOUTS[layout]), plainly(name), exact(layout))


@pytest.mark.parametrize(
    "layouts",
    [
        *slow(["1f1b", "zb-h1"] * 3),
        *exhaustive(["dualpipe", "interleaved"] * 3, ["interleaved", "dualpipe"] * 3),
    ],
)
def test_processes_train_it_as_plain_pytorch_does(processes: LocalProcesses, layouts: list[str]):
    cases = list(zip(FORMS, layouts, strict=True))
    assert run_cases(processes, 2, in_process, cases) == [[[], []]] * len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "unet, no time", "dit"])
def test_the_mode_of_the_model_is_that_of_its_stages(name: str):
    form = FORMS[name]
    net, expected = form.model(), form.model()
    modes = [True, False, True, False][:STEPS]
    optimizer = sgd(expected.parameters())
    wanted = []
    for step, mode in enumerate(modes):
        expected.train(mode)
        for x, target, named in parts_of(form.batch(step)):
            loss = form.loss_fn(expected(x, **named), target)
            (loss / MICROBATCHES).backward()
            wanted.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    found = []
    with penstock.Pipeline(net, form.loss_fn, ranks=2, microbatches=MICROBATCHES) as pipe:
        optimizer = sgd(pipe.parameters())
        for step, mode in enumerate(modes):
            net.train(mode)
            x, target, named = form.batch(step)
            pipe.evaluate(x, target, **named)
            assert all(module.training == mode for module in net.modules())
            found += pipe.step(x, target, **named).losses
            optimizer.step()
            optimizer.zero_grad()
        state = pipe.full_state_dict()
    assert torch.equal(torch.stack(found), torch.stack(wanted))
    assert all(torch.equal(state[key], value) for key, value in expected.state_dict().items())
