"""Models in the forms in which they are published train as they are, with the bits of plain PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import penstock
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.commands import python
from tests.support.groups import run_cases
from tests.support.published_models import FORMS, MICROBATCHES, STEPS, differences, piped, plainly, sgd

ROOT = Path(__file__).parents[3]
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
IN_PROCESSES = ("1f1b", "interleaved", "zb-h1", "dualpipe")


def exact(layout: str) -> bool:
    """Whether a layout runs the microbatches of each stage in the batch's order."""
    return layout != "dualpipe"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMS)
def test_threads_train_it_as_plain_pytorch_does(name: str, layout: str):
    assert differences(piped(name, **LAYOUTS[layout]), plainly(name), exact(layout)) == []


def in_process(rank: int, name: str, layout: str) -> list[str]:
    """Train a form in this process and its peers; return what differs, or the error."""
    try:
        return differences(piped(name, timeout=300, **LAYOUTS[layout]), plainly(name), exact(layout))
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


@pytest.fixture(scope="module")
def found_by_processes(processes: LocalProcesses) -> dict[tuple[str, str], list[list[str]]]:
    cases = [(name, layout) for name in FORMS for layout in IN_PROCESSES]
    return dict(zip(cases, run_cases(processes, 2, in_process, cases), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", IN_PROCESSES)
@pytest.mark.parametrize("name", FORMS)
def test_processes_train_it_as_plain_pytorch_does(found_by_processes, name: str, layout: str):
    assert found_by_processes[name, layout] == [[], []]


@pytest.mark.slow
def test_torchrun_trains_them_as_plain_pytorch_does():
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    code = ROOT / "tests" / "support" / "published_under_torchrun.py"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(code)]
    told = python(command, ROOT, environment)
    assert told.returncode == 0, told.stderr
    lines = sorted(line for line in told.stdout.splitlines() if line.startswith("rank"))
    assert lines == sorted(f"rank {rank}, {name}: []" for rank in range(2) for name in FORMS)


def target_by_name(output: Tensor, target: Tensor) -> Tensor:
    return FORMS["dit"].loss_fn(output, target)


def test_a_batch_may_be_a_mapping_with_the_labels_of_a_diffusion_transformer():
    form = FORMS["dit"]
    losses = []
    for whole in (False, True):
        with penstock.Pipeline(form.model(), target_by_name, ranks=2, microbatches=MICROBATCHES) as pipe:
            batch = form.batch(0)
            mapping = {"target": batch.target, **batch.named, "x": batch.x}
            result = pipe.step(mapping) if whole else pipe.step(batch.x, batch.target, **batch.named)
            losses += [result.losses, pipe.evaluate(mapping).losses]
    assert all(torch.equal(found, plainly("dit").losses[0]) for found in losses)


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
        for part in form.batch(step).parts():
            loss = form.loss_fn(expected(part.x, **part.named), part.target)
            (loss / MICROBATCHES).backward()
            wanted.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    found = []
    with penstock.Pipeline(net, form.loss_fn, ranks=2, microbatches=MICROBATCHES) as pipe:
        optimizer = sgd(pipe.parameters())
        for step, mode in enumerate(modes):
            net.train(mode)
            batch = form.batch(step)
            pipe.evaluate(batch.x, batch.target, **batch.named)
            assert all(module.training == mode for module in net.modules())
            found += pipe.step(batch.x, batch.target, **batch.named).losses
            optimizer.step()
            optimizer.zero_grad()
        state = pipe.full_state_dict()
    assert torch.equal(torch.stack(found), torch.stack(wanted))
    assert all(torch.equal(state[key], value) for key, value in expected.state_dict().items())
