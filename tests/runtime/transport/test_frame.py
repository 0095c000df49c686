"""What a message says of a value: names in it are looked up, and nothing is imported for them."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from enum import Enum

import pytest
import torch

from penstock.base.errors import TransportError
from penstock.runtime.transport.frame import MessageLayout, Strided, layout_of
from penstock.stage.structures import dumps
from penstock.stage.values import Message, pack


class Colour(Enum):
    RED = 1


def message(value: object) -> Message:
    return pack(value)[0]


def test_a_layout_arrives_as_it_was_sent():
    value = {"a": defaultdict(list, {"x": torch.ones(2)}), Colour.RED: (torch.zeros(1), 3, "text")}
    layout = layout_of(message(value))
    assert MessageLayout.from_bytes(layout.to_bytes()) == layout


@pytest.mark.parametrize(
    ("size", "strides", "sent"),
    [
        ((2, 3), (9, 1), (12,)),  # half of the memory is gaps
        ((2, 3), (10, 1), (2, 3)),
        ((3, 2), (1, 3), (6,)),  # transposed
        ((4, 3), (0, 1), (3,)),  # expanded
    ],
)
def test_the_memory_of_a_tensor_is_sent_unless_most_of_it_is_gaps(size, strides, sent):
    tensor = torch.arange(16.0).as_strided(size, strides)
    layout = Strided.of(tensor)
    assert (layout.shape, layout.strides, layout.sent_shape) == (size, strides, sent)
    travels = layout.sent_tensor(tensor)
    assert travels.shape == sent
    restored = layout.restore(travels.clone())
    assert torch.equal(restored, tensor)
    assert restored.stride() == strides


def test_contiguous_and_empty_tensors_have_no_layout():
    for tensor in (torch.ones(2, 3), torch.ones(3, 0).t(), torch.ones(())):
        assert Strided.of(tensor) is None
    assert Strided.of(torch.ones(2, dtype=torch.complex64).conj()).conj


@pytest.mark.parametrize(
    "value", [defaultdict(list, x=torch.ones(1)), {Colour.RED: torch.ones(1)}], ids=["factory", "enum"]
)
def test_a_module_that_is_not_loaded_is_not_imported(value: object):
    layout = layout_of(message(value))
    text = dumps(layout.structure)
    for own in ("builtins", __name__):
        text = text.replace(own, "this")
    assert '"this' in text.replace("\\", "")
    said = json.dumps({"leaves": [["float32", [1], False]], "plain": [], "structure": text}).encode()
    sys.modules.pop("this", None)
    with pytest.raises(TransportError, match="the module 'this' in it, which is not loaded here"):
        MessageLayout.from_bytes(said)
    assert "this" not in sys.modules


def test_a_dtype_is_a_dtype():
    said = json.dumps({"leaves": [["load", [1], False]], "plain": [], "structure": None}).encode()
    with pytest.raises(TransportError, match="dtype 'load'"):
        MessageLayout.from_bytes(said)
