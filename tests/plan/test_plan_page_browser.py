"""The page of a plan in a real browser: it shows the plan, escapes every name, and requests nothing from the network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.plan.cluster import Cluster
from penstock.plan.explore.branch_and_bound import search
from penstock.plan.explore.search_result import SearchResult
from penstock.plan.plan_page import write_plan
from penstock.plan.prediction import predict
from penstock.plan.run_layout import Layout
from penstock.profile.model_profile import Profile
from penstock.schedule.families import build_schedule
from penstock.schedule.text import write_csv
from penstock.show.palette import MEMORY_PARTS
from tests.support.plan_pages import CLUSTER, page_of, small_model

if TYPE_CHECKING:
    from tests.support.browser import Browser

pytestmark = pytest.mark.slow

ODD = "<img src=x onerror=alert(1)>&'\"{{ 7 * 7 }}"


def searched(profile: Profile, cluster: Cluster = CLUSTER, **more: object) -> SearchResult:
    return search(profile, cluster, sequence=256, batch=32, **more)


def texts(chromium: Browser, selector: str) -> list[str]:
    return chromium.run(f"return [...document.querySelectorAll('{selector}')].map((each) => each.innerText)")


def test_a_search_is_shown_whole(chromium: Browser, tmp_path: Path):
    profile = small_model()
    result = searched(profile)
    chromium.open(page_of(tmp_path, result, profile))
    assert texts(chromium, "h2") == [
        "Layout", "The best layouts", "Time over memory", "Timeline of a step", "Where every rank's time goes",
        "Memory of every rank's devices", "Why not another", "What would change it", "Assumptions",
    ]  # fmt: skip
    assert texts(chromium, "h1") == ["small on h100"]
    best = result.best
    assert best.trace is not None
    ends = chromium.run("return Array.from(penstock.find('measured').data.end)")
    assert len(ends) == len(best.trace)
    frame = chromium.frame("memory-parts")
    assert frame.x1 == pytest.approx(1.04 * 76)  # of 80 GB, 4 GB are reserved
    dots = chromium.run(
        "const plot = penstock.find('frontier-figure');"
        "return plot.renderers.map((renderer) => renderer.data_source.data).find((data) => data.layout).layout.length"
    )
    assert dots == len(result.outcomes) >= len(result.plans)
    rows = chromium.run("return document.querySelectorAll('table')[1].querySelectorAll('tbody tr').length")
    assert rows == len(result.plans)
    names = ("frontier", "memory-parts", "measured", "bars")
    chromium.scheme("dark")
    colours = [
        chromium.run(f"return penstock.find('{n}-figure').left[0].major_label_text_color") for n in names
    ]
    chromium.scheme("")
    assert colours == ["#e6eaee"] * 4
    assert chromium.requests() == [(tmp_path / "plan.html").as_uri()]
    assert chromium.complaints() == []


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
    assert any("This layout does not fit" in text for text in texts(chromium, ".say"))
    assert "frontier" not in chromium.run("return document.getElementById('penstock-figures').textContent")
    assert chromium.complaints() == []


def test_odd_names_remain_text(chromium: Browser, tmp_path: Path):
    order = tmp_path / "<b>odd&.csv"
    write_csv(build_schedule("1f1b", 4, 32), order)
    profile, cluster = small_model(ODD), replace(CLUSTER, name="</script><script>window.owned = 1</script>")
    result = searched(profile, cluster, schedules=[str(order)], fixed={"pp": 4, "microbatch": 1})
    chromium.open(page_of(tmp_path, result, profile, cluster))
    assert texts(chromium, "h1") == [f"{ODD} on {cluster.name}"]
    assert chromium.run("return window.owned ?? null") is None
    assert texts(chromium, "img[src=x], td b") == []
    assert order.name in texts(chromium, "body")[0]
    frame = chromium.frame("frontier")
    chromium.move(frame.x(result.best.peak_bytes / 1e9), frame.y(result.best.step_seconds))
    chromium.wait_until_still()
    assert order.name in chromium.tooltip()
    assert chromium.complaints() == []


def test_the_timeline_zooms_to_parts_in_which_blocks_are_labelled(chromium: Browser, tmp_path: Path):
    """256 microbatches have no room for labels; in a part of the step they have."""
    profile = small_model()
    plan = predict(profile, CLUSTER, Layout(pp=4, microbatch=1), sequence=256, batch=256)
    chromium.open(write_plan(tmp_path / "plan.html", profile, CLUSTER, plan, sequence=256, batch=256))
    assert texts(chromium, "h1 ~ p, .say p")[1].startswith("pp=4,dp=1,")
    whole = chromium.frame("measured")

    def labels(part: str) -> int:
        chromium.run(
            "const part = document.getElementById('part'); part.value = arguments[0];"
            "part.dispatchEvent(new Event('change'))",
            part,
        )
        chromium.wait_until_still()
        return len(chromium.run("return penstock.find('measured-labels').data.text"))

    few = labels("")
    places = []
    for part in ("0", "0.5", "1"):
        assert labels(part) > max(few, 50)
        places.append(chromium.frame("measured"))
    begin, middle, end = places
    assert begin.x0 == 0
    assert end.x1 == pytest.approx(whole.x1)
    assert begin.x1 < middle.x0 < middle.x1 < end.x0
    labels("")
    assert chromium.frame("measured").x1 == pytest.approx(whole.x1)
