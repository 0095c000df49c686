"""Losses that shift their targets, and what stands for them where the targets were shifted before."""

from __future__ import annotations

from penstock.stage.compute.shifted_loss import shifts, without_shift


class Loss:
    """A loss that counts its own targets."""

    def __init__(self, without: Loss | None) -> None:
        self.without_shift = without

    def count(self, target: int) -> int:
        return target


def plain(target: int) -> int:
    return target


@shifts(plain)
def shifting(target: int) -> int:
    return target - 1


def test_a_loss_that_does_not_shift_has_no_other():
    assert without_shift(plain, "mean") is None
    assert without_shift(Loss(None), "mean") is None


def test_the_reduction_that_shifts_goes_with_the_loss():
    assert without_shift(shifting, shifting) == (plain, plain)
    assert without_shift(shifting, "mean") == (plain, "mean")
    assert without_shift(shifting, plain) == (plain, plain)


def test_a_loss_that_counts_its_own_targets_counts_those_of_the_other():
    other = Loss(None)
    loss = Loss(other)
    assert without_shift(loss, loss.count) == (other, other.count)
    assert without_shift(loss, Loss(None).count)[1] not in (loss.count, other.count)
    assert without_shift(loss, shifting) == (other, plain)
