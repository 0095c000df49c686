"""Sums over tensors: equal bits have one digest, parts add up to the whole, and differences are not missed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.recordings.fingerprint import (
    GROUPS,
    divided,
    fingerprint,
    fingerprints_of_range,
    groups_of,
    joined,
)
from penstock.recordings.likeness import distance, same_bits

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 30).to(dtype)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_parts_of_any_place_add_up_to_the_whole(shape, dtype, data):
    value = tensor(shape, dtype)
    parts = [(value, (0,) * len(shape))]
    for _ in range(data.draw(st.integers(0, 3))):
        part, start = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, part.shape[dim]))
        second = tuple(s + at * (n == dim) for n, s in enumerate(start))
        parts += [(part.narrow(dim, 0, at), start), (part.narrow(dim, at, part.shape[dim] - at), second)]
    whole = fingerprint(value)
    sums = joined([fingerprint(part, shape, start) for part, start in parts if part.numel()])
    assert sums is not None
    assert (sums.digest, sums.shape, sums.dtype) == (whole.digest, whole.shape, whole.dtype)
    assert sums.projections == pytest.approx(whole.projections, rel=1e-4, abs=1e-3)
    assert sums.norm == pytest.approx(whole.norm, rel=1e-5)


def test_parts_that_are_missing_make_no_whole():
    value = tensor((4, 6), torch.float32)
    assert joined([fingerprint(value[:2], value.shape, (0, 0))]) is None
    first = fingerprint(value[:2], value.shape, (0, 0))
    assert joined([first, first, fingerprint(value[2:], value.shape, (2, 0))]) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_one_changed_bit_or_two_exchanged_numbers_change_the_digest(dtype: torch.dtype):
    value = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = fingerprint(value)
    assert fingerprint(value.clone()).digest == before.digest
    exchanged = value.clone()
    exchanged[[2, 3]] = exchanged[[3, 2]]
    assert fingerprint(exchanged).digest != before.digest
    for row, column in ((0, 0), (3, 4), (6, 2)):
        changed = value.clone()
        changed[row, column] *= 1 + 2 * torch.finfo(dtype).eps
        assert fingerprint(changed).digest != before.digest


@pytest.mark.parametrize(
    "change",
    [
        lambda value: -value.double(),
        lambda value: 2 * value.double(),
        lambda value: torch.view_as_complex(value.unflatten(1, (-1, 2))).conj(),
        lambda value: value * torch.tensor([1.0, -1.0]).repeat(value.shape[1] // 2),
    ],
    ids=["negated", "doubled", "conjugated", "every second sign"],
)
def test_tensors_with_other_signs_or_exponents_have_other_bits(
    change: Callable[[torch.Tensor], torch.Tensor],
):
    value = tensor((64, 48), torch.float32)
    changed = change(value)
    before = torch.view_as_complex(value.unflatten(1, (-1, 2))) if changed.is_complex() else value
    before = before.to(changed.dtype)
    assert same_bits(fingerprint(before), fingerprint(before.clone()))
    assert not same_bits(fingerprint(before), fingerprint(changed))


def test_autocast_does_not_round_the_sums():
    value = tensor((64, 48), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = fingerprint(value)
    assert found == fingerprint(value)


def test_projections_tell_the_norm_of_a_difference():
    value = tensor((64, 48), torch.float32)
    for seed in range(20):
        other = value + 0.01 * tensor((64, 48), torch.float32, seed + 1)
        expected = ((other - value).norm() / value.norm()).item()
        assert distance(fingerprint(other), fingerprint(value)) == pytest.approx(expected, rel=0.9)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_other_forms_of_tensors():
    assert fingerprint(torch.tensor(3.0)).norm == 3.0
    assert fingerprint(torch.zeros(0, 4)).whole
    spoiled = fingerprint(torch.tensor([1.0, float("nan"), float("inf")]))
    assert (spoiled.nonfinite, spoiled.norm) == (2, 0.0)
    value = tensor((6, 4), torch.float32)
    assert fingerprint(value.t().contiguous().t()) == fingerprint(value)
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1, 3]]), torch.ones(3, 4), (6, 4))
    assert fingerprint(sparse) == fingerprint(sparse.to_dense())
    halves = divided(fingerprint(value), 2.0)
    assert distance(halves, fingerprint(value / 2)) < 1e-7


def test_groups_cover_a_dimension():
    for length in (1, 5, GROUPS, 100):
        groups = groups_of(length)
        assert [n for group in groups for n in group] == list(range(length))
        assert len(groups) == min(length, GROUPS)


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (2, 3, 4), (2, 1, 3, 2)], ids=str)
def test_ranges_of_elements_add_up_to_the_whole(shape: tuple[int, ...]):
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    flat, whole = value.reshape(-1), fingerprint(value)
    for first in range(flat.numel() + 1):
        for last in range(first, flat.numel() + 1):
            edges = sorted({0, first, last, flat.numel()})
            parts = [
                part
                for begin, end in pairwise(edges)
                for part in fingerprints_of_range(flat[begin:end], shape, begin)
            ]
            found = joined(parts)
            assert found is not None
            assert found.digest == whole.digest
            assert found.projections == pytest.approx(whole.projections, abs=1e-12)


def test_ranges_of_a_part_made_of_boxes_add_up_to_the_whole():
    value = torch.randn(4, 12, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = fingerprint(value)
    sums = []
    # Of each of three matrices side by side, two processes have two columns each.
    for rank in range(2):
        places = [4 * matrix + 2 * rank for matrix in range(3)]
        part = torch.cat([value[:, at : at + 2] for at in places], 1)
        boxes = [((0, 2 * n, 0), (4, 2, 2), (0, at, 0)) for n, at in enumerate(places)]
        flat = part.flatten()
        for begin, end in pairwise([0, 5, 17, flat.numel()]):
            sums += fingerprints_of_range(flat[begin:end], part.shape, begin, value.shape, boxes)
    found = joined(sums)
    assert found is not None
    assert found.digest == whole.digest
    assert found.projections == pytest.approx(whole.projections, abs=1e-12)
