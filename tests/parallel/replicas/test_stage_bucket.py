"""One bucket of values that come and go, of a replica that is alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.base.errors import PenstockError
from penstock.parallel.replicas.bucket import BucketEntry
from penstock.parallel.replicas.buckets import FrozenParameters
from penstock.parallel.replicas.divided_gradient import DividedGradient
from penstock.parallel.replicas.layout import BucketPlan
from penstock.parallel.replicas.stage_bucket import StageBucket


class Done:
    def wait(self) -> None: ...


class Alone:
    """A replica without others: each sum is its own, and it has all values."""

    rank, size = 0, 1

    def reduce_scatter(self, flat: torch.Tensor) -> Done:
        return Done()

    all_gather = reduce_scatter


def bucket_of(values: list[torch.Tensor], comes_and_goes: bool = True) -> StageBucket:
    entries = [BucketEntry(f"p{n}", nn.Parameter(value.clone()), n) for n, value in enumerate(values)]
    starts = [sum(value.numel() for value in values[:n]) for n in range(len(values))]
    elements = sum(value.numel() for value in values)
    plan = BucketPlan(
        members=tuple(range(len(values))),
        starts=tuple(starts),
        elements=elements,
        dtype=values[0].dtype,
        device=values[0].device,
    )
    with torch.no_grad():
        return StageBucket(plan, entries, Alone(), 0, comes_and_goes)


def reduce(bucket: StageBucket, *gradients: float | None) -> None:
    for entry, value in zip(bucket.entries, gradients, strict=True):
        if value is not None:
            entry.parameter.grad = torch.full_like(entry.parameter, value)
    with torch.no_grad():
        bucket.reduce()
    assert all(entry.parameter.grad is None for entry in bucket.entries)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_of_several_reductions_round_16_bits_once(dtype):
    bucket = bucket_of([torch.zeros(2, dtype=dtype)])
    step = torch.finfo(dtype).eps / 2  # one of these is lost beside 1, two are not
    for value in (1.0, step, step):
        reduce(bucket, value)
    bucket.finish()
    total = torch.finfo(dtype).eps + 1.0 if dtype.itemsize == 2 else 1.0
    assert bucket.total.tolist() == [total, total]
    assert bucket.total.dtype == dtype


def test_gradients_of_one_step_are_summed_where_they_are_and_dropped_after_it():
    bucket = bucket_of([torch.zeros(1), torch.zeros(2)])
    reduce(bucket, 1.0, 2.0)
    reduce(bucket, 4.0, None)
    bucket.finish()
    assert bucket.total.tolist() == [5.0, 2.0, 2.0]
    assert [entry.seen for entry in bucket.entries] == [2, 1]
    bucket.drop()
    assert bucket.total is None
    reduce(bucket, None, 8.0)
    bucket.finish()
    assert bucket.total.tolist() == [0.0, 8.0, 8.0]


def test_values_are_not_numbers_while_they_are_away():
    given = [torch.tensor([1.0]), torch.tensor([[2.0, 3.0]])]
    bucket = bucket_of(given)
    parameters = [entry.parameter for entry in bucket.entries]
    full = bucket.bytes
    bucket.reshard()
    assert [p.shape for p in parameters] == [value.shape for value in given]
    assert all(p.isnan().all() for p in parameters)
    assert bucket.bytes == full - 12  # the part stays, which is a replica's own
    bucket.unshard()
    bucket.wait()
    assert [p.tolist() for p in parameters] == [value.tolist() for value in given]
    with torch.no_grad():
        parameters[0].fill_(5.0)
    bucket.written()
    assert bucket.part.tolist() == [5.0, 2.0, 3.0]


def test_what_was_written_into_values_or_given_in_their_place_is_there_when_they_come_back():
    bucket = bucket_of([torch.tensor([1.0]), torch.tensor([[2.0, 3.0]])])
    one, other = (entry.parameter for entry in bucket.entries)
    bucket.reshard()
    bucket.unshard()
    one.data.mul_(4.0)  # as a layer writes that keeps its weight in bounds
    other.data = other.data + 1.0
    bucket.reshard()
    assert bucket.part.tolist() == [4.0, 3.0, 4.0]
    bucket.unshard()
    bucket.part.fill_(7.0)  # an optimizer's update, which is newer than the values
    bucket.reshard(keep=False)
    assert bucket.part.tolist() == [7.0, 7.0, 7.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_write_while_values_are_away_is_refused_by_name_and_dropped(dtype):
    bucket = bucket_of([torch.ones(1, dtype=dtype), torch.ones(2, 2, dtype=dtype)])
    one, other = (entry.parameter for entry in bucket.entries)
    bucket.reshard()
    for write in (
        lambda: one.fill_(5.0),
        lambda: one.data.fill_(5.0),
        lambda: other[0, 0].fill_(5.0),
        lambda: setattr(other, "data", torch.zeros(2, 2, dtype=dtype)),
    ):
        with torch.no_grad():
            write()
        with pytest.raises(
            PenstockError, match=r"parameter p[01] .*written while its values were not in memory"
        ):
            bucket.written()
        bucket.written()
        assert all(bool(p.isnan().all()) for p in (one, other))
    bucket.unshard()
    assert [p.abs().sum().item() for p in (one, other)] == [1.0, 4.0]


def test_values_given_another_dtype_are_refused_with_both():
    bucket = bucket_of([torch.ones(2)], comes_and_goes=False)
    bucket.entries[0].parameter.data = torch.ones(2, dtype=torch.float64)
    with pytest.raises(PenstockError, match=r"parameter p0 was torch.float32 .* made torch.float64"):
        bucket.written()


def test_values_that_stay_are_left_alone():
    bucket = bucket_of([torch.ones(3)], comes_and_goes=False)
    bucket.reshard()
    assert bucket.full
    parameter = bucket.entries[0].parameter
    assert parameter.tolist() == [1.0, 1.0, 1.0]
    assert bucket.bytes == 12
    parameter.grad = DividedGradient(parameter, "p0")  # a mark without memory
    assert bucket.bytes == 12


def test_a_parameter_may_begin_to_train_only_while_updates_are_not_divided():
    frozen, trained = (nn.Parameter(torch.zeros(1), requires_grad=flag) for flag in (False, True))
    parameters = FrozenParameters([("a", trained), ("b", frozen)])
    assert parameters.record() == [("a", trained)]
    assert parameters.change() == 0
    trained.requires_grad_(False)
    alone = parameters.change()
    assert alone != 0
    parameters.require_same(Alone(), [alone, alone], sharded=True)
    frozen.requires_grad_(True)
    both = parameters.change()
    assert both not in (0, alone)
    parameters.require_same(Alone(), [both, both], sharded=False)
    with pytest.raises(PenstockError, match="parameter 'b' began to require a gradient after ZeRO"):
        parameters.require_same(Alone(), [both, both], sharded=True)
    assert [parameters.is_repeated(change) for change in (alone, both, both, 0, 0)] == [
        False, False, True, False, False,
    ]  # fmt: skip


def test_a_gradient_moves_with_its_place_and_one_of_the_users_does_not():
    parameter = nn.Parameter(torch.zeros(2, 2))
    entry = BucketEntry("p", parameter, 0)
    entry.place(0, torch.zeros(8), 0)
    assert parameter.grad is None
    entry.view.fill_(3.0)
    entry.set_grad()
    moved = torch.zeros(8)
    entry.place(1, moved, 4)
    assert moved.tolist() == [0.0] * 4 + [3.0] * 4
    assert parameter.grad is entry.gradient
    assert parameter.grad.data_ptr() == moved[4:].data_ptr()
    own = parameter.grad = torch.ones(2, 2)
    again = torch.zeros(4)
    entry.place(0, again, 0)
    assert parameter.grad is own
    assert again.tolist() == [0.0] * 4
    parameter.grad = None
    entry.place(0, torch.zeros(4), 0)
    assert parameter.grad is None
