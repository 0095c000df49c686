"""`penstock verify`: zeros for a correct model, exit code 1 for a wrong one, 2 for bad input."""

from __future__ import annotations

import json
import re

import pytest
import torch
from click.testing import CliRunner

import penstock
from penstock.base.errors import ConfigError
from penstock.cli import group
from penstock.verify import VerifyTarget
from penstock.verify.training import Layout
from tests.support.lanes import exhaustive
from tests.support.mixtures import EXPERTS, LoopedExperts, loss_of, mixture
from tests.support.mixtures import batch as tokens


def run(*args: str):
    return CliRunner().invoke(group, ["verify", *args], catch_exceptions=True)


@pytest.mark.slow
def test_every_tensor_has_the_same_bits_in_threads_and_processes():
    result = run("-p", "2", "-m", "3", "--schedule", "1f1b", "--json")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [row["transport"] for row in rows] == ["threads", "processes"]
    assert all(
        (row["rounded"], row["different"], row["first"], row["good"]) == (0, 0, "", True) for row in rows
    )
    assert {row["same"] for row in rows} == {rows[0]["same"]}
    assert rows[0]["same"] > 2000


@pytest.mark.slow
def test_an_own_schedule_is_verified_with_what_its_order_allows():
    own = "tests.support.own_schedules:"
    words = ("-p", "2", "-m", "4", "--transport", "threads", "--json")
    names = ("waiting", "reversed_backward", "folded")
    result = run(*words, *(word for name in names for word in ("--schedule", own + name)))
    assert result.exit_code == 0, result.output
    exact, rounded, folded = (json.loads(line) for line in result.output.splitlines())
    assert exact["rounded"] == folded["rounded"] == 0
    assert rounded["good"]
    assert rounded["rounded"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        # Each axis once, with the options that reach other parts of a recording; for ep see
        # `test_models_with_experts_are_judged_at_ep_2`.
        "--cp 2 --schedule zb-h1",
        "--dp 2 --shard weights --tp 2 -p 1",
        *exhaustive(
            "--ep 2 --recompute full --autocast bf16", "--dp 2 --shard optimizer", "--tp 2 --dp 2 -p 1"
        ),
        *exhaustive("--ep 2 --schedule zb-v", "--dp 2 --shard gradients"),
        *exhaustive("--dp 2 --cp 2 -p 1", "--dp 2 --autocast bf16", "--tp 2", "--cp 2 --recompute full"),
    ],
)
def test_axes_and_options_have_plain_numbers_to_the_order_of_sums(words: str):
    options = words.split()
    ranks = () if "-p" in options else ("-p", "2")
    schedule = () if "--schedule" in options else ("--schedule", "1f1b")
    result = run(*ranks, "-m", "2", *schedule, *options, "--json")
    assert result.exit_code == 0, result.output
    (row,) = [json.loads(line) for line in result.output.splitlines()]
    assert (row["transport"], row["different"], row["good"]) == ("processes", 0, True)
    assert row["rounded"] > 100


def mixtral() -> VerifyTarget:
    """A mixture of transformers with the product of groups, which torch does not have in float64."""
    from tests.huggingface.test_mixtures import model

    def batch(step: int, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, 64, (microbatches, 8), generator=torch.Generator().manual_seed(step))
        return ids, ids

    return VerifyTarget(penstock.from_transformers(model("mixtral")), penstock.causal_lm_loss, batch)


class Doubling(LoopedExperts):
    """Experts that compute something else on a share of them than on all."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        out = super().forward(hidden_states, top_k_index, top_k_weights)
        return out if self.num_experts == EXPERTS else 2 * out


def mixture_of(experts: int = EXPERTS, kind: type[LoopedExperts] = LoopedExperts) -> VerifyTarget:
    net = mixture(2, experts=experts)
    net[1].experts.__class__ = kind

    def some(step: int, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens(microbatches)

    return VerifyTarget(net, loss_of, some)


def doubling() -> VerifyTarget:
    return mixture_of(kind=Doubling)


def three() -> VerifyTarget:
    return mixture_of(3)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "code"), [("mixtral", 0), ("doubling", 1)])
def test_models_with_experts_are_judged_at_ep_2(model, code):
    result = run("-p", "1", "-m", "1", "--schedule", "gpipe", "--ep", "2", "--model", f"{__name__}:{model}")
    assert result.exit_code == code, result.output


@pytest.mark.slow
def test_models_whose_experts_do_not_divide_are_refused():
    result = run("-p", "1", "-m", "1", "--schedule", "gpipe", "--ep", "2", "--model", f"{__name__}:three")
    assert isinstance(result.exception, ConfigError)
    assert "has 3 experts, which do not divide over ep = 2" in str(result.exception)


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
    words = ("--schedule", "1f1b", "--transport", "threads", "--model", f"{__name__}:penalised", "--json")
    result = run("-p", "2", "-m", "2", *words)
    assert result.exit_code == 0, result.output
    row = json.loads(result.output)
    assert (row["rounded"], row["different"]) == (0, 0)


def test_a_difference_ends_with_exit_code_1():
    model = f"{__name__}:odd"
    result = run("-p", "2", "-m", "2", "--schedule", "gpipe", "--transport", "threads", "--model", model)
    assert result.exit_code == 1, result.output
    assert "1 row(s) differ by more than allowed" in result.output
    assert "gpipe in threads: step 0, microbatch 0: 1, output, is " in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "no.such:thing"], "MODULE:FUNCTION"),
        (["--model", "json:JSONDecoder"], "returned a JSONDecoder"),
        (["--schedule", "1f1c"], "did you mean '1f1b'"),
        (["--ep", "2"], "ep 2 divides a run over processes, .* take the transport processes"),
        (
            ["--dp", "2", "--cp", "2"],
            "dp 2, cp 2 divides a run over processes, .* take the transport processes",
        ),
        (["--shard", "weights"], "shard 'weights' divides what replicas have, and there is one; take dp 2"),
    ],
)
def test_what_cannot_be_used_is_refused(args, message):
    result = run("-p", "2", "-m", "2", "--transport", "threads", *args)
    assert isinstance(result.exception, ConfigError)
    assert re.search(message, str(result.exception))


@pytest.mark.parametrize("option", ["shard", "recompute", "autocast"])
def test_an_option_of_a_layout_that_does_not_exist_is_refused(option: str):
    with pytest.raises(ConfigError, match=f"{option} must be one of none, .*, got 'fp16'"):
        Layout(**{"dp": 2, option: "fp16"})
