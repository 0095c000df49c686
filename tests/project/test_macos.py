"""What works without Linux: ranks as threads train."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.github import ROOT

PROGRAM = """
from tests.support.macos import become_macos

become_macos()
import torch
import penstock
from penstock.base import host
from penstock.doctor.machine import machine_facts
from penstock.runtime.health.peers import supported

torch.manual_seed(0)
layers = [torch.nn.Linear(4, 4) for _ in range(4)]
plain = torch.nn.Sequential(*layers)
x, y = torch.randn(8, 4), torch.randn(8, 4)
loss_fn = torch.nn.functional.mse_loss
for part_x, part_y in zip(x.chunk(4), y.chunk(4), strict=True):
    (loss_fn(plain(part_x), part_y) / 4).backward()
expected = [p.grad.clone() for p in plain.parameters()]
plain.zero_grad()
with penstock.Pipeline(layers, loss_fn, ranks=2, microbatches=4) as pipe:
    pipe.step(x, y)
    assert all(torch.equal(p.grad, g) for p, g in zip(plain.parameters(), expected, strict=True))
assert not supported() and host.memory() is None
assert host.cores() >= 1 and host.machine() and machine_facts(0)["cores"] >= 1
"""


@pytest.mark.slow
def test_ranks_as_threads_train():
    words = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
