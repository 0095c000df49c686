"""What is a block of forwards in the forms of known libraries and papers; the zoo compares their numbers with PyTorch's."""

from __future__ import annotations

import pytest
from torch import nn

import penstock
from penstock.base.errors import SplitError
from tests.zoo.case import FORWARDS
from tests.zoo.kind import WIDTH

PARTS = [f"parts.{n}" for n in range(4)]
BIG = [f"layers.{n}" for n in range(5)]

BLOCKS: dict[str, list[str]] = {
    "loop": PARTS,
    "method_between": ["parts.0", "stem", "parts.1", "parts.2", "parts.3"],
    "method_named_as_the_module": PARTS,
    "attributes_of_the_block": [f"{part}.inner" for part in PARTS],
    "call_of_its_own": PARTS,
    "call_of_its_own_in_a_sequential": PARTS,
    "forward_of_the_parent": PARTS,
    "stem_is_a_sequential": [*(f"stem.{n}" for n in range(5)), *PARTS],
    "ends_have_sequentials": [*(f"stem.{b}" for b in BIG), *PARTS, *(f"head.{b}" for b in BIG)],
    "middle_has_a_sequential": [f"mid.{b}" for b in BIG],
    "middle_is_a_sequential": [*PARTS, *(f"mid.{n}" for n in range(5)), *(f"ups.{n}" for n in range(4))],
    "levels_of_modules": [
        *(f"downs.{n}" for n in range(4)),
        "mid1",
        "mid2",
        *(f"ups.{n}" for n in range(4)),
    ],
    "features_and_head": PARTS,
    "features_in_a_loop": PARTS,
    "same_method_twice": [*PARTS, "code:5", "code:6", "code:7", "code:8"],
    "encoder_and_decoder": [*PARTS, "cross.0", "cross.1", "cross.2"],
    "several_sequentials": ["layer1.0", "layer1.1", "layer2.0", "layer2.1"],
    "alias_of_the_blocks": PARTS,
    "alias_of_the_backbone": [f"backbone.model.{part}" for part in PARTS],
    "backbone_returns_its_sequential": [f"backbone.{part}" for part in PARTS],
    "backbone_with_methods": [f"backbone.{part}" for part in PARTS],
    "nested_loops": ["stages.0", "stages.1"],
    "stages_with_forwards": [
        "parts.0.parts.0",
        "parts.0.parts.1",
        "parts.0.down",
        "parts.1.parts.0",
        "parts.1.parts.1",
    ],
    "sequential_of_stages": ["parts.0.0", "parts.0.1", "parts.1", "parts.2.0", "parts.2.1"],
    "blocks_with_loops": PARTS,
    "two_towers": [*(f"left.{part}" for part in PARTS), "right.stem", *(f"right.{p}" for p in PARTS[:3])],
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_what_has_the_depth(name: str):
    layers = penstock.split(FORWARDS[name].build([nn.Linear(WIDTH, WIDTH) for _ in PARTS]))
    assert [layer.name.partition("+")[0] for layer in layers if layer.role == "block"] == BLOCKS[name]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "lambda_in_an_attribute",
            r"self\.pre, which holds a LambdaInAnAttribute that layers on other ranks",
        ),
        ("method_of_the_parent", r"MethodOfTheParent\.forward: it calls super\(\)"),
        ("method_that_calls_its_parent", r"MethodThatCallsItsParent\.pre: it calls super\(\)"),
        ("default_list_written", r"Writes\.forward: it writes into seen, or hands it on: .*`seen=None`"),
    ],
)
def test_what_cannot_be_divided_is_refused(name: str, reason: str):
    with pytest.raises(SplitError, match=reason):
        penstock.split(FORWARDS[name].build([nn.Linear(WIDTH, WIDTH) for _ in PARTS]))
