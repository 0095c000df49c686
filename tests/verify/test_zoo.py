"""Models drawn at random: a pipeline's recording agrees with plain PyTorch's, whatever the model and the schedule."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import penstock
from tests.support.lanes import exhaustive, slow
from tests.zoo.case import Case
from tests.zoo.not_yet import drawn
from tests.zoo.piped import piped
from tests.zoo.plain import Plain

# A hook on a tensor changes its gradient before or after the recording sees it, which a stage's boundary decides.
CASES = [case for case in drawn(0, 330, "threads") if "tensor_hook" not in case.kinds]


@pytest.mark.parametrize(
    "case", [*CASES[:4], *slow(*CASES[4:16]), *exhaustive(*CASES[16:])], ids=lambda case: f"seed {case.seed}"
)
def test_a_clean_run_raises_no_alarm(case: Case, tmp_path: Path):
    run = piped(0, case, tmp_path / "run")
    if run.raised is not None:
        return  # tests.zoo.test_zoo says whether it may be refused
    with warnings.catch_warnings(), torch.random.fork_rng(()):
        warnings.simplefilter("ignore")
        plain = Plain(case)
        roots = dict(zip(plain.names, plain.given, strict=True))
        with penstock.record(tmp_path / "plain", roots, steps=case.steps):
            for number in range(case.steps):
                plain.begin(number)
                plain.accumulate(number)
                plain.end(number)
                plain.base = 0 if (number + 1) % case.accumulate == 0 else plain.base + case.microbatches
    found = penstock.compare(tmp_path / "plain", tmp_path / "run")
    assert found.good, str(found)
    assert found.same > 0
