"""Checksums of tensors: equal for equal bits, wherever they are in memory; another for any single element that differs."""

from __future__ import annotations

import pytest
import torch

from penstock.parallel.checksums import checksums

KINDS = [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64, torch.complex64]


@pytest.mark.parametrize(
    ("count", "dtype"),
    [*((count, torch.float32) for count in (1, 7, 63, 65, 511, 2000)), *((513, dtype) for dtype in KINDS)],
    ids=str,
)
def test_any_element_counts_and_its_place_in_memory_does_not(count, dtype):
    generator = torch.Generator().manual_seed(count)
    tensor = (
        torch.randn(count, generator=generator).gt(0) if dtype is torch.bool else torch.randn(count).to(dtype)
    )
    (number,) = checksums([tensor])
    for n in {0, count // 2, count - 1}:
        other = tensor.clone()
        other.view(torch.uint8)[n * tensor.element_size()] ^= 1
        assert checksums([other]) != [number]
    moved = torch.zeros(count + 3, dtype=dtype)[3:].copy_(tensor)
    assert checksums([moved, tensor]) == [number, number]


def test_parts_that_changed_places_views_and_shapes_count():
    tensor = torch.randn(32, 64)
    swapped = torch.cat([tensor[16:], tensor[:16]])
    assert checksums([tensor]) != checksums([swapped])
    assert checksums([tensor.t()]) == checksums([tensor.t().contiguous()])
    assert checksums([tensor.view(64, 32)]) != checksums([tensor])
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    assert checksums([conjugate]) == checksums([conjugate.resolve_conj()])
    assert len(checksums([torch.empty(0), torch.tensor(1.0)])) == 2
