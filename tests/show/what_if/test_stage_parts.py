from __future__ import annotations

import numpy as np
import pytest

from penstock.show.what_if.stage_parts import StageParts, recut, saved_sizes
from tests.support.measured import measured
from tests.support.simulated import built, timed
from tests.support.traces import trace_of


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_another_cut_of_the_model_costs_as_much_in_all(stages):
    seconds = np.array([[1.0, 2.0, 1.0, 1.0, 1.0], [3.0, 6.0, 3.0, 3.0, 3.0]])
    cut = recut(seconds, stages)
    assert cut.shape == (stages, 5)
    assert np.allclose(cut.sum(axis=0), seconds.sum(axis=0))
    if stages == 4:
        assert cut[:, 0].tolist() == [0.5, 0.5, 1.5, 1.5]


def test_blocks_move_and_the_embedding_and_the_head_stay():
    """Blocks cost 1; the embedding 0.5 on the first stage, and the head 2 on the last."""
    parts = StageParts((2, 2, 2), blocks=True)
    table = np.array([[2.5], [2.0], [4.0]])
    assert parts.recost(table, parts.moved(2, 1)).ravel().tolist() == [2.5, 3.0, 3.0]
    assert parts.recost(table, parts.evenly(6)).ravel().tolist() == [1.5, 1.0, 1.0, 1.0, 1.0, 3.0]
    assert parts.evenly(7) is None


def test_layers_of_unknown_kind_share_their_stages_cost():
    parts = StageParts((1, 4), blocks=False)
    assert parts.recost(np.array([[1.0], [8.0]]), parts.moved(1, 0)).ravel().tolist() == [3.0, 6.0]
    assert parts.moved(1, 0).setting == [(0, 2), (2, 5)]


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"blocks": [1, 2], "split": [["a", "b"], ["c"]]}, StageParts((1, 2), True)),
        ({"blocks": [1, 0], "split": [["a", "b"], ["c"]]}, StageParts((2, 1), False)),
        ({"blocks": "12", "split": [["a"], []]}, None),
        ({"blocks": [1.5, True], "split": "ab"}, None),
        ({"blocks": [1, 2, 3]}, None),
    ],
)
def test_parts_are_read_from_what_a_file_says(info, expected):
    assert StageParts.of(measured(**info), 2) == expected


def test_sizes_are_what_forwards_keep():
    assert saved_sizes(measured(), 2).tolist() == [2**20] * 2
    assert saved_sizes(trace_of("0F0@0-1 0B0@1-2"), 1).tolist() == [1]
    assert saved_sizes(timed(built("gpipe", 2, 2), 1, 1, 1), 2).tolist() == [1, 1]
