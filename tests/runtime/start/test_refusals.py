"""A refusal under torchrun is shown with its place once, and in a line by the other ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import penstock
from torch import nn

layers = [nn.Linear(2, 2) for _ in range(2)]
try:
    penstock.Pipeline(layers, nn.functional.mse_loss, microbatches=0)
except penstock.ConfigError:  # caught ones are not shown
    pass
penstock.Pipeline(layers, nn.functional.mse_loss, microbatches=0 if sys.argv[1] == "refusal" else 1 / 0)
"""


def errors_of(rank: int, what: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, what],
        env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "4"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    return ended.stderr.splitlines()


@pytest.mark.slow
def test_a_refusal_has_one_traceback_with_its_text_last_and_other_ranks_have_a_line():
    first, (other,) = errors_of(0, "refusal"), errors_of(3, "refusal")
    assert first[0].startswith("Traceback")
    text = re.sub(r"^[\w.]+: ", "", first[-1])
    assert "microbatches must be" in text
    assert other == f"rank 3: ConfigError: {text}"


@pytest.mark.slow
def test_errors_of_the_program_keep_their_traceback_on_every_rank():
    assert [errors_of(rank, "bug")[-1] for rank in (0, 1)] == ["ZeroDivisionError: division by zero"] * 2
