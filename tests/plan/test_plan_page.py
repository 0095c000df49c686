"""The page of a plan without a browser: what it says of long steps and single devices, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.plan import plan_page
from penstock.plan.cluster import read_cluster
from penstock.plan.explore.search_result import SimulatedLayout
from penstock.plan.plan_page import frontier, write_plan
from penstock.plan.prediction import predict
from penstock.plan.run_layout import Layout
from tests.support.plan_pages import CLUSTER, page_of, small_model


def test_a_long_step_shows_its_first_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_page, "MAX_EVENTS", 20)
    profile = small_model()
    plan = predict(profile, CLUSTER, "pp=4,schedule=zb-h1", sequence=256, batch=32)
    assert plan.trace is not None
    text = page_of(tmp_path, plan, profile).read_text("utf-8")
    assert f"The step has {len(plan.trace):,} events; the first of them are drawn." in text


def test_one_device_has_a_page_without_numbers_that_are_none(tmp_path: Path):
    profile, cluster = small_model(), read_cluster("h100*1")
    plan = predict(profile, cluster, "", sequence=256, batch=32)
    text = page_of(tmp_path, plan, profile, cluster).read_text("utf-8")
    own = text[: text.index("<script>")] + text[text.index("<body>") :]
    assert not any(f">{word}<" in own for word in ("nan", "inf", "None"))


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path):
    profile = small_model()
    plan = predict(profile, CLUSTER, "pp=4", sequence=256, batch=32)
    with pytest.raises(ConfigError, match="cannot write the page"):
        write_plan(tmp_path / "no" / "p.html", profile, CLUSTER, plan, sequence=256, batch=32)


def test_the_frontier_has_no_layout_that_another_beats():
    points = [(3.0, 1.0), (1.0, 4.0), (2.0, 5.0), (2.0, 2.0), (4.0, 1.0)]
    layouts = [SimulatedLayout(Layout(microbatch=n + 1), time, size) for n, (size, time) in enumerate(points)]
    assert [layout.layout.microbatch for layout in frontier(layouts)] == [2, 4, 1]
