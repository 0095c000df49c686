"""Samples whose tokens are divided: what is cut, and the losses of the parts together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from penstock.base.errors import BatchError
from penstock.parallel.context.attention import SequencePart
from penstock.parallel.context.tokens import TokenDivision, cut_tokens, tokens_of
from penstock.parallel.participant import Losses
from penstock.parallel.sample_parts import SampleParts
from penstock.stage.compute.shifted_loss import next_targets


def test_the_length_of_samples_is_that_of_the_first_tensor_with_tokens():
    assert tokens_of({"rows": torch.zeros(3), "tokens": torch.zeros(3, 8)}, torch.zeros(3, 9, 2)) == 8
    assert tokens_of(5, torch.zeros(3, 9, 2)) == 9
    with pytest.raises(BatchError, match=r"the batch has no tensor of shape \(batch, tokens, ...\)"):
        tokens_of(torch.zeros(3), 5)


def test_tensors_of_tokens_are_cut_and_others_stay():
    tokens = torch.arange(16).view(2, 8)
    value = {"tokens": tokens, "mask": torch.ones(2, 1, 8), "rows": torch.arange(2), "name": "x"}
    cut = cut_tokens(value, SequencePart(1, 2), 8, "the input")
    assert cut["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert all(cut[name] is value[name] for name in ("mask", "rows", "name"))
    with pytest.raises(BatchError, match=r"the input has a tensor of shape \(2, 6\), and the samples have 8"):
        cut_tokens(torch.zeros(2, 6), SequencePart(0, 2), 8, "the input")


def test_the_last_token_has_no_next_one():
    targets, rows = torch.arange(6).view(2, 3), torch.arange(2)
    moved = next_targets([targets, rows], -100)
    assert moved[0].tolist() == [[1, 2, -100], [4, 5, -100]]
    assert moved[1] is rows


def losses_of(totals: list[float], weights: list[float]) -> Losses:
    """Two parts of the samples of two replicas, with one microbatch each."""
    made = Losses()
    for n, (total, weight) in enumerate(zip(totals, weights, strict=True)):
        made.total[n], made.weights[n] = torch.tensor(total), weight
        made.parts[n] = {"loss": torch.tensor(2 * total)}
    return made


@pytest.mark.parametrize(
    ("sums", "weights", "joined", "weight"),
    [
        (False, [1.0, 3.0, 0.5, 0.0], [3.5, 16.0], [4.0, 0.5]),
        (False, [0.0, 0.0, 0.25, 0.25], [3.0, 24.0], [0.0, 0.5]),
        (True, [1.0, 3.0, 1.0, 1.0], [6.0, 48.0], [1.0, 1.0]),
    ],
)
def test_losses_of_parts_are_weighed_by_what_counts_in_them(sums, weights, joined, weight):
    losses = SampleParts((TokenDivision(2),)).join(losses_of([2.0, 4.0, 16.0, 32.0], weights), 1, 4, sums)
    assert [losses.total[n].item() for n in (0, 1)] == joined
    assert [losses.parts[n]["loss"].item() for n in (0, 1)] == [2 * each for each in joined]
    assert [losses.weights[n] for n in (0, 1)] == weight


def test_a_part_without_targets_may_have_a_loss_that_is_not_a_number():
    losses = SampleParts((TokenDivision(2),)).join(losses_of([2.0, float("nan")], [1.0, 0.0]), 1, 2, False)
    assert losses.total[0].item() == 2.0


class Halves:
    """The division of samples' rows between two processes: the even ones, and the odd ones."""

    parts = 2

    def cut(self, values: Mapping[str, Any], index: int) -> dict[str, Any]:
        return {what: value[index::2] for what, value in values.items()}

    def join(self, parts: torch.Tensor) -> torch.Tensor:
        return parts.movedim(0, 1).flatten(0, 1)


def test_axes_that_divide_samples_compose():
    parts, whole = SampleParts((Halves(), TokenDivision(2)), replica=7), torch.arange(32.0).view(4, 8)
    cut = [parts.cut({"the input x": whole}, index)["the input x"] for index in range(4)]
    assert (parts.count, parts.index) == (4, 3)
    assert cut[2].tolist() == whole[1::2, [0, 1, 6, 7]].tolist()
    losses = Losses(total=dict(enumerate(cut)), weights=dict.fromkeys(range(4), 0.25))
    joined = parts.join(losses, 1, 4, False)
    assert torch.equal(joined.total[0], whole)
    assert joined.weights == {0: 1.0}
