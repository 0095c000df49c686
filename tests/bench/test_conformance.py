"""Orders of other projects: rules that stand in for a package, and what is said of an order that is not as it was meant."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from bench.conformance.__main__ import FROM, reasons_of
from bench.conformance.from_deepspeed import by_clock, by_phase
from bench.conformance.from_megatron import our_order, our_stages
from bench.conformance.from_torchgpipe import cycles, slots
from bench.conformance.judge import Outcome, judge
from bench.conformance.orders import Cells, computing, order_of

from penstock.schedule.families import build_schedule


def family(name: str, p: int, m: int, v: int = 1, **options: object) -> Cells:
    schedule = build_schedule(name, p, m, v, **options)
    return [schedule.text(rank).split() for rank in range(p)]


def test_deepspeeds_rule_is_1f1b():
    for p, m in ((1, 3), (2, 1), (4, 2), (4, 8), (5, 9)):
        assert computing(by_clock(p, m)) == family("1f1b", p, m)
    assert by_clock(2, 2) == [["0F0", "", "0F1", "0B0", "", "0B1"], ["", "1F0", "1B0", "1F1", "1B1", ""]]


def test_deepspeeds_rule_on_a_v_has_every_pass_once_in_order():
    for p, m in ((1, 2), (3, 6), (4, 9)):
        for rank, line in enumerate(by_phase(p, m)):
            for stage in (rank, 2 * p - 1 - rank):
                for kind in "FB":
                    done = [op for op in line if op.startswith(f"{stage}{kind}")]
                    assert done == [f"{stage}{kind}{j}" for j in range(m)]


def test_megatrons_rule_is_the_interleaved_family_with_a_group_size():
    for p, m, v, group in ((2, 5, 2, 3), (4, 8, 2, 4), (3, 8, 3, 4), (4, 12, 2, 6)):
        assert our_order(p, m, v, group) == family("interleaved-1f1b", p, m, v, group_size=group)
    assert our_order(4, 3, 1, 4) == family("1f1b", 4, 3)


def test_torchgpipes_rule_is_gpipe_with_its_backwards_turned():
    forwards, backwards = slots(2, cycles(3, 2))
    assert forwards == ["0F0", "0F1", "0F2", "", "", "0B2", "0B1", "0B0"]
    assert backwards == ["", "1F0", "1F1", "1F2", "1B2", "1B1", "1B0", ""]


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Et|tL", ["Et", "tL"]),
        ("E,t*3|(tt|)*2,m*2|L", ["Ettt", "tt", "tt", "mm", "L"]),
        ("E|(t*2|,t|)*2L", ["E", "tt", "t", "tt", "t", "L"]),
        ("Et|t||tL", ["Et", "t", "", "tL"]),
    ],
)
def test_a_layout_string_says_the_layers_of_every_stage(layout: str, stages: list[str]):
    assert our_stages(layout) == stages


def test_an_order_that_is_not_as_it_was_meant_is_told(tmp_path: Path):
    path, cells = tmp_path / "theirs.csv", by_clock(2, 2)
    order = order_of(2, 2, 1, cells)
    assert judge(order, path) == Outcome("bits")
    assert judge(order_of(2, 4, 1, slots(2, cycles(4, 2))), path) == Outcome("rounding")
    late = [["0F0", "0F1", "0B1", "0B0"], order.ops[1]]
    assert judge(order._replace(ops=late, rules=late), path).why == "other ops were read than are meant"
    assert judge(order._replace(rules=late), path).why == "our own rules make another order than the package"
    assert judge(order._replace(microbatches=3), path).why == "proved, but not valid"
    crossed = [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]]
    word, why = judge(order_of(2, 2, 1, crossed), path)
    assert word == "refused"
    assert why.startswith("deadlocks: rank 0 is blocked at 0B0")
    uneven = judge(order._replace(layers=[2, 0]), path)
    assert uneven.word == "refused"
    outcomes = [("a", uneven), ("b", uneven), ("c", Outcome("WRONG", "why")), ("d", Outcome("bits"))]
    assert list(reasons_of(outcomes)) == ["c: WRONG: why", f"a: {uneven.why} (2 of this kind)"]


@pytest.mark.slow
def test_one_order_of_every_project_is_equal_or_rightly_refused(tmp_path: Path):
    judged = {
        project.name: [judge(order, tmp_path / "theirs.csv").word for order in project.orders]
        for project in chain.from_iterable(found.projects(quick=True) for found in FROM)
    }
    refused = {name for name, words in judged.items() if "refused" in words}
    assert refused <= {"torch Schedule1F1B, its visualizer", "Megatron-core table, counts it refuses"}
    assert {word for words in judged.values() for word in words} <= {"bits", "rounding", "refused"}
    assert len(judged) == 17
