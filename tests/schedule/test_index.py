from __future__ import annotations

from penstock.schedule.index import index, links, rank_column
from penstock.schedule.placement import Placement
from tests.support.schedules import written

SCHEDULE = written(Placement.loop(2), 2, "0F0 0F1 0B0 0I1 0W1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1")


def test_every_op_is_found_by_stage_and_microbatch():
    where = index(SCHEDULE)
    assert where.forward.tolist() == [[0, 1], [5, 6]]
    assert where.backward.tolist() == [[2, 3], [7, 8]]
    assert where.weight is not None
    assert where.weight.tolist() == [[-1, 4], [-1, -1]]


def test_every_op_takes_what_the_next_stage_towards_it_hands_over():
    source, target = links(SCHEDULE, index(SCHEDULE))
    assert source.tolist() == [-1, -1, 7, 8, -1, 0, 1, -1, -1]
    assert target.tolist() == [5, 6, -1, -1, -1, -1, -1, 2, 3]


def test_rows_know_their_rank():
    assert rank_column(SCHEDULE).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_a_schedule_without_weight_halves_has_no_table_of_them():
    assert index(written(Placement.loop(1), 1, "0F0 0B0")).weight is None
