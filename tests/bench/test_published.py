"""Predictions beside published measurements: the targets, and the page that a command writes."""

from __future__ import annotations

from functools import cache

import pytest
from bench.comparison import Comparison, Row
from bench.fit import RATED, errors, fit, fitted_runs, preset_rates, with_rates
from bench.published_runs import Run, runs
from bench.trust_page import PAGE, TABLES, section_text, summary_lines

from bench import published
from penstock.plan.cluster import ERROR_BEYOND, read_cluster
from penstock.plan.prediction import predict
from penstock.plan.run_layout import Layout

pytestmark = pytest.mark.slow


@cache
def section(name: str) -> Comparison:
    return published.SECTIONS[name](False)


def summary(comparison: Comparison, group: str):
    return next(s for s in comparison.summaries if s.group == group)


def test_steps_on_a100s_reach_their_targets():
    assert summary(section("a100"), "SC21").mean <= 0.03
    assert summary(section("a100"), "Korthikanti").mean <= 0.03
    assert summary(section("a100"), "vTrain").mean <= 0.09
    assert summary(section("a100"), "vTrain").median <= 0.04


def test_steps_on_newer_devices_reach_their_targets():
    for group in ("NeMo, pp > 1", "Llama 3, pp > 1"):
        assert summary(section("h100"), group).largest <= 0.07
    for found in section("b200").summaries:
        assert found.largest <= (0.08 if "context parallelism" in found.group else 0.05)
    assert summary(section("h100"), "NeMo (context parallelism)").largest <= 0.06


def test_published_steps_are_near_the_reach_of_a_preset_and_inside_the_interval_beyond():
    """The longest samples of the steps within reach have at least half of its tokens, and some have its tp."""
    for name in ("a100-80gb", "h100", "b200"):
        cluster = read_cluster(name)
        assert cluster.reach is not None
        rows = [run for run in runs() if run.gpu == name and run.seconds]
        far = [run for run in rows if cluster.beyond(run.layout.tp, run.sequence)]
        near = [run for run in rows if run not in far]
        assert max(run.layout.tp for run in near) == cluster.reach["tp"]
        assert max(run.sequence for run in near) >= cluster.reach["sequence"] / 2
        assert len(far) == {"a100-80gb": 5, "h100": 1, "b200": 0}[name]
        for run in far:
            wide = with_rates(cluster, {}, run.gpus)
            plan = predict(run.profile, wide, run.layout, sequence=run.sequence, batch=run.batch)
            assert plan.high == pytest.approx(plan.step_seconds * (1 + ERROR_BEYOND))
            assert plan.low <= run.seconds <= plan.high
            assert any("no published step is near" in sentence for sentence in plan.assumptions)


def test_intervals_of_mixtures_are_those_that_published_rows_show():
    """Each preset's error holds for all of its rows, whatever they leave open, and is that of the largest."""
    for name in ("h100", "b200"):
        error = read_cluster(name).expert_error
        assert error is not None
        rows = [row for row in section("experts").rows if name in row.group]
        ratios = [max(row.predicted / row.measured, row.measured / row.predicted) for row in rows]
        assert error - 0.01 <= max(ratios) - 1 <= error


def test_bytes_reach_their_targets():
    assert summary(section("memory"), "Korthikanti, weights").largest <= 0.01
    assert summary(section("memory"), "Korthikanti, activations").largest <= 0.01
    assert summary(section("memory"), "Zero Bubble, peak").mean <= 0.05
    assert summary(section("memory"), "Vocabulary, peak").largest <= 0.05


def test_steps_of_mixtures_reach_their_targets():
    """No rate is fitted to any of them."""
    errors = [abs(row.error) for row in section("experts").rows if not row.remark]
    assert len(errors) == 15
    assert sum(errors) / len(errors) <= 0.15
    assert max(errors) <= 0.25


def test_steps_from_stage_times_reach_their_target():
    assert summary(section("stages"), "plain 1F1B").largest <= 0.015


@pytest.mark.parametrize("name", ["a100", "memory", "h100", "b200", "sharded", "experts", "stages"])
def test_the_pages_have_what_the_command_prints(name: str):
    assert section_text(section(name)) in TABLES.read_text()
    assert "\n".join(summary_lines(section(name))) in PAGE.read_text()


def test_the_pages_have_every_section():
    titles = [line[3:] for line in TABLES.read_text().splitlines() if line.startswith("## ")]
    rows = [line.split(" | ")[0] for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    assert [f"| {title}" for title in titles] == list(dict.fromkeys(rows))
    assert len(titles) == len(published.SECTIONS)


@pytest.mark.exhaustive
def test_a_preset_holds_rates_that_a_fit_cannot_improve_much():
    cluster, measured = read_cluster("b200"), fitted_runs("b200")
    held = preset_rates(cluster, RATED["b200"])
    again = fit(measured, cluster, RATED["b200"])
    assert again.keys() == held.keys()
    best, now = (abs(errors(measured, cluster, rates)).mean() for rates in (again, held))
    assert now <= best + 0.002


def test_a_row_is_the_prediction_of_its_layout_alone():
    run = next(run for run in runs() if run.group == "SC21")
    assert (run.layout.attention, run.layout.overlap) == (None, None)
    layout = Layout.parse("pp=1,dp=32,tp=1,microbatch=16,schedule=1f1b,recompute=full")
    step = predict(run.profile, read_cluster("a100-80gb*8x4"), layout, sequence=2048, batch=512).step_seconds
    (row,) = [row for row in published.a100(True).rows if row.group == "SC21"]
    assert row.predicted == pytest.approx(step)
    assert row.measured == run.seconds == 3.528


def test_runs_that_are_not_fitted_say_why():
    def reasons(which) -> set[str | None]:
        return {run.reason_not_fitted for run in runs() if which(run)}

    def is_across_nodes(run: Run) -> bool:
        return run.group == "vTrain" and run.layout.tp > 8

    assert reasons(is_across_nodes) == {"tensor parallelism across nodes"}
    assert reasons(lambda run: run.model == "LLAMA2-13B") == {"outlier: virtual stages not published"}
    assert reasons(lambda run: run.group == "Korthikanti") == {None}


def test_summaries_keep_remarks_apart():
    rows = (
        Row(group="a", model="m", layout="l", unit="s", predicted=1.1, measured=1.0),
        Row(group="a", model="m", layout="l", unit="s", predicted=0.8, measured=1.0),
        Row(group="a", model="m", layout="l", unit="s", predicted=3.0, measured=1.0, remark="outlier"),
        Row(group="b", model="m", layout="l", unit="s", predicted=1.0, measured=1.0, note="said"),
    )
    found = Comparison("x", "X", "", rows).summaries
    assert [(s.group, s.rows) for s in found] == [("a", 2), ("a (outlier)", 1), ("b", 1)]
    assert found[0].mean == pytest.approx(0.15)
    assert str(found[2]) == "b: 1 row, mean 0.00%, median 0.00%, largest 0.00%"
