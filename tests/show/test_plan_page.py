"""The page of a plan in a real browser: it shows the plan, escapes every name, and requests nothing from the network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By

from penstock.base.errors import ConfigError
from penstock.plan.cluster import Cluster, read_cluster
from penstock.plan.explore.branch_and_bound import search
from penstock.plan.explore.search_result import SearchResult, SimulatedLayout
from penstock.plan.prediction import Prediction, predict
from penstock.plan.profile.model_profile import Profile, of_shape
from penstock.plan.profile.model_shape import ModelShape
from penstock.plan.run_layout import Layout
from penstock.schedule.families import build_schedule
from penstock.schedule.text import write_csv
from penstock.show import plan_page
from penstock.show.palette import MEMORY_PARTS
from penstock.show.plan_figures import frontier
from penstock.show.plan_page import write_plan
from tests.support.browser import Browser, browser

ODD = "<img src=x onerror=alert(1)>&'\"{{ 7 * 7 }}"


def small_model(name: str = "small") -> Profile:
    return of_shape(
        ModelShape(
            name=name, layers=8, hidden=512, heads=8, kv_heads=8, head_size=64, ffn=2048, vocabulary=1024
        )
    )


CLUSTER = read_cluster("h100*4")


def searched(profile: Profile, cluster: Cluster = CLUSTER, **more: object) -> SearchResult:
    return search(profile, cluster, sequence=256, batch=32, **more)


def page_of(
    folder: Path, result: Prediction | SearchResult, profile: Profile, cluster: Cluster = CLUSTER
) -> Path:
    return write_plan(folder / "plan.html", profile, cluster, result, sequence=256, batch=32)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as chromium:
        yield chromium


@pytest.mark.slow
def test_a_search_is_shown_whole(chromium: Browser, tmp_path: Path):
    profile = small_model()
    result = searched(profile)
    chromium.open(page_of(tmp_path, result, profile))
    headings = [heading.text for heading in chromium.driver.find_elements(By.TAG_NAME, "h2")]
    assert headings == [
        "Layout", "The best layouts", "Time over memory", "Timeline of a step", "Where every rank's time goes",
        "Memory of every rank's devices", "Why not another", "What would change it", "Assumptions",
    ]  # fmt: skip
    assert chromium.driver.find_element(By.TAG_NAME, "h1").text == "small on h100"
    best = result.best
    assert best.trace is not None
    ends = chromium.run("return Array.from(penstock.find('measured').data.end)")
    assert len(ends) == len(best.trace)
    frame = chromium.frame("memory-parts")
    assert frame.x1 == pytest.approx(1.04 * 80)
    dots = chromium.run(
        "const plot = penstock.find('frontier-figure');"
        "return plot.renderers.map((renderer) => renderer.data_source.data).find((data) => data.layout).layout.length"
    )
    assert dots == len(result.outcomes) >= len(result.plans)
    rows = chromium.driver.find_elements(By.CSS_SELECTOR, "table")[1].find_elements(
        By.CSS_SELECTOR, "tbody tr"
    )
    assert len(rows) == len(result.plans)
    assert chromium.requests() == [(tmp_path / "plan.html").as_uri()]
    assert chromium.complaints() == []


@pytest.mark.slow
def test_the_bars_are_the_memory_and_the_line_its_limit(chromium: Browser, tmp_path: Path):
    profile = small_model()
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, memory=5e8))
    plan = predict(profile, cluster, "pp=2,microbatch=8,schedule=gpipe", sequence=256, batch=32)
    chromium.open(page_of(tmp_path, plan, profile, cluster))
    frame, screen = chromium.frame("memory-parts"), chromium.screenshot()
    for rank, memory in enumerate(plan.memory):
        left = 0.0
        for name, (colour, _) in MEMORY_PARTS.items():
            size = getattr(memory, name) / 1e9
            if frame.x(left + size) - frame.x(left) > 6:
                shown = tuple(screen[round(frame.y(rank)), round(frame.x(left + size / 2))])
                assert shown == tuple(int(colour[n : n + 2], 16) for n in (1, 3, 5)), name
            left += size
    assert "This layout does not fit" in chromium.driver.find_element(By.CLASS_NAME, "say").text
    assert "frontier" not in chromium.run("return document.getElementById('penstock-figures').textContent")
    assert chromium.complaints() == []


@pytest.mark.slow
def test_hovering_a_layout_tells_it(chromium: Browser, tmp_path: Path):
    profile = small_model()
    result = searched(profile)
    chromium.open(page_of(tmp_path, result, profile))
    frame = chromium.frame("frontier")
    best = result.best
    chromium.move(frame.x(best.peak_bytes / 1e9), frame.y(best.step_seconds))
    chromium.wait_until_still()
    assert f"pp={best.layout.pp}, dp={best.layout.dp}" in chromium.tooltip()


@pytest.mark.slow
def test_odd_names_remain_text(chromium: Browser, tmp_path: Path):
    order = tmp_path / "<b>odd&.csv"
    write_csv(build_schedule("1f1b", 4, 32), order)
    profile, cluster = small_model(ODD), replace(CLUSTER, name="</script><script>window.owned = 1</script>")
    result = searched(profile, cluster, schedules=[str(order)], fixed={"pp": 4, "microbatch": 1})
    chromium.open(page_of(tmp_path, result, profile, cluster))
    assert chromium.driver.find_element(By.TAG_NAME, "h1").text == f"{ODD} on {cluster.name}"
    assert chromium.run("return window.owned ?? null") is None
    assert chromium.driver.find_elements(By.CSS_SELECTOR, "img[src=x], td b") == []
    assert order.name in chromium.driver.find_element(By.TAG_NAME, "body").text
    frame = chromium.frame("frontier")
    chromium.move(frame.x(result.best.peak_bytes / 1e9), frame.y(result.best.step_seconds))
    chromium.wait_until_still()
    assert order.name in chromium.tooltip()
    assert chromium.complaints() == []


@pytest.mark.slow
def test_dark_mode_changes_the_figures(chromium: Browser, tmp_path: Path):
    profile = small_model()
    chromium.open(page_of(tmp_path, searched(profile), profile))
    text = {}
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        chromium.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        chromium.wait_until_still()
        text[scheme] = [
            chromium.run(f"return penstock.find('{name}-figure').left[0].major_label_text_color")
            for name in ("frontier", "memory-parts", "measured", "bars")
        ]
    chromium.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert text == {"light": ["#1c2329"] * 4, "dark": ["#e6eaee"] * 4}


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
