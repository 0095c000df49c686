"""`penstock verify`: zeros for a correct model, exit code 1 for a wrong one, 2 for bad input."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import penstock
from penstock.base.errors import ConfigError
from penstock.cli import group
from penstock.verify import VerifyTarget


def run(*args: str):
    return CliRunner().invoke(group, ["verify", *args], catch_exceptions=True)


@pytest.mark.slow
def test_it_prints_zeros_in_threads_and_processes():
    result = run("-p", "2", "-m", "3", "--schedule", "1f1b", "--json")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [row["transport"] for row in rows] == ["threads", "processes"]
    assert all(row["loss"] == row["weights"] == row["gradients"] == 0.0 and row["good"] for row in rows)


def test_an_own_schedule_is_verified_with_what_its_order_allows():
    own = "tests.support.own_schedules:"
    words = ("-p", "2", "-m", "4", "--transport", "threads", "--json")
    result = run(
        *words,
        "--schedule",
        own + "waiting",
        "--schedule",
        own + "reversed_backward",
        "--schedule",
        own + "folded",
    )
    assert result.exit_code == 0, result.output
    exact, rounded, folded = (json.loads(line) for line in result.output.splitlines())
    assert exact["allowed"] == folded["allowed"] == [0, 0, 0]
    assert exact["gradients"] == folded["gradients"] == 0
    assert rounded["good"]
    assert min(rounded["allowed"]) > 0


class Counting(torch.nn.Module):
    """A model that never computes the same twice, which no pipeline can reproduce."""

    seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.seen += 1
        return x * (1 + Counting.seen / 1000)


def odd() -> VerifyTarget:
    def batch(step: int, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(microbatches, 4), torch.zeros(microbatches, 4)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Counting(), torch.nn.Linear(4, 4))
    return VerifyTarget(model, torch.nn.functional.mse_loss, batch)


class Penalised(torch.nn.Linear):
    """A layer with an auxiliary loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        penstock.add_loss(output.square().mean())
        return output


def penalised() -> VerifyTarget:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Penalised(4, 4), torch.nn.Linear(4, 4))
    return VerifyTarget(model, torch.nn.functional.mse_loss, odd().batch)


def test_auxiliary_losses_are_part_of_the_loss():
    model = f"{__name__}:penalised"
    result = run(
        "-p", "2", "-m", "2", "--schedule", "1f1b", "--transport", "threads", "--model", model, "--json"
    )
    assert result.exit_code == 0, result.output
    row = json.loads(result.output)
    assert row["loss"] == row["weights"] == row["gradients"] == 0.0


def test_a_difference_ends_with_exit_code_1():
    model = f"{__name__}:odd"
    result = run("-p", "2", "-m", "2", "--schedule", "gpipe", "--transport", "threads", "--model", model)
    assert result.exit_code == 1, result.output
    assert "1 row(s) differ by more than allowed" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "no.such:thing"], "MODULE:FUNCTION"),
        (["--model", "json:JSONDecoder"], "returned a JSONDecoder"),
        (["--schedule", "1f1c"], "did you mean '1f1b'"),
    ],
)
def test_what_cannot_be_used_is_refused(args, message):
    result = run("-p", "2", "-m", "2", "--transport", "threads", *args)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
