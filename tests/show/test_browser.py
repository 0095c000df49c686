"""The report page in a real browser: it shows the trace, and requests nothing from the network."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.show.analysis import StepAnalysis
from penstock.show.blocks import lighter
from penstock.show.comparison import pair_of, write_comparison
from penstock.show.figures import rank_colours
from penstock.show.palette import CAUSES, KINDS
from penstock.show.report import write
from penstock.show.report_page import Fact, RunFacts
from penstock.show.run import read_run, write_report
from penstock.trace.bubbles import bubbles, idle_spans
from penstock.trace.events import Activity, Trace
from penstock.trace.folder import save_step
from tests.support.measured import kept_run, measured
from tests.support.simulated import built, timed
from tests.support.traces import trace_of

if TYPE_CHECKING:
    from tests.support.browser import Browser, Frame

pytestmark = pytest.mark.slow


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[n : n + 2], 16) for n in (1, 3, 5))


COLOURS = {rgb(shade): kind for kind, c in KINDS.items() for shade in (c.full, c.light) if kind not in (5, 6)}


def expected(trace: Trace, row: int) -> tuple[int, ...]:
    colour = KINDS[Activity(int(trace.kind[row]))]
    return rgb(colour.light if lighter(trace)[row] else colour.full)


def assert_drawn(chromium: Browser, figure: str, trace: Trace, each: float = 1.0) -> None:
    """Check the colour in the middle of every block, and the number of blocks along every row."""
    frame = chromium.frame(figure)
    screen = chromium.screenshot()
    height = abs(frame.y(1) - frame.y(0))
    for rank, rows in enumerate(trace.rank_slices()):
        # Above the text: a third of a row over its middle.
        y = round(frame.y(rank) - height * 0.36)
        for row in range(rows.start, rows.stop):
            x = frame.x((trace.start[row] + trace.end[row]) / 2 * each)
            assert tuple(screen[y, round(x)]) == expected(trace, row), (rank, row)
        pixels = screen[y, round(frame.left) : round(frame.left + frame.width)]
        line = [COLOURS.get(tuple(pixel)) for pixel in pixels]
        runs = [(kind, len(list(group))) for kind, group in groupby(line)]
        blocks = [kind for kind, length in runs if kind is not None and length >= 3]
        assert blocks == trace.kind[rows].tolist()


def heading(chromium: Browser) -> str:
    return chromium.run("return document.querySelector('h1').innerText")


def test_a_measured_run_is_drawn_as_it_was(chromium: Browser, tmp_path: Path):
    run = read_run(kept_run(tmp_path, "<b>bold"))
    chromium.open(write_report(run, tmp_path / "r.html"))
    assert heading(chromium) == "<b>bold"
    assert_drawn(chromium, "measured", run.traces[10], 1000.0)
    assert_drawn(chromium, "planned", run.traces[10], 1000.0)
    chromium.choose("step 1")
    frame = chromium.frame("measured")
    assert frame.x1 == pytest.approx(600 * 1.005)
    assert_drawn(chromium, "measured", run.traces[1], 1000.0)
    shown = "[...document.querySelectorAll('.cards b')].find((card) => card.offsetParent)"
    assert chromium.run(f"return {shown}.innerText") == "600 ms"
    assert chromium.requests() == [(tmp_path / "r.html").as_uri()]
    assert chromium.complaints() == []


def test_simulations_stand_in_one_page(chromium: Browser, tmp_path: Path):
    families = {"interleaved-1f1b": 2, "zb-v": None, "gpipe": None}
    traces = {name: timed(built(name, 4, 4, v), 4, 5, 3) for name, v in families.items()}
    chromium.open(write(tmp_path / "r.html", [StepAnalysis(*item) for item in traces.items()], title="three"))
    for name, trace in traces.items():
        chromium.choose(name)
        assert_drawn(chromium, "measured", trace)
    assert chromium.run("return penstock.find('planned-figure')") is None
    assert chromium.requests() == [(tmp_path / "r.html").as_uri()]
    assert chromium.complaints() == []


def test_pairs_share_a_block_and_messages_have_a_strip(chromium: Browser, tmp_path: Path):
    line = "0F0@0-2 0F1&@2-5 0B0@2-5 SEND@4-6 0B1@6-8 REDUCE@7-9 OPTIMIZER@9-10"
    trace = trace_of(line, info={"source": "simulated"})
    chromium.open(write(tmp_path / "r.html", [StepAnalysis("a", trace)], title="strips"))
    frame, screen = chromium.frame("measured"), chromium.screenshot()

    def at(x: float, y: float) -> tuple[int, ...]:
        return tuple(screen[round(frame.y(y)), round(frame.x(x))])

    assert at(2.2, -0.3) == rgb(KINDS[Activity.F].full)
    assert at(2.2, 0.15) == rgb(KINDS[Activity.B].full)
    assert at(5.5, 0.34) == rgb(KINDS[Activity.SEND].full)
    assert at(5.5, 0.0) != rgb(KINDS[Activity.SEND].full)
    assert at(8.5, 0.34) == rgb(KINDS[Activity.REDUCE].full)
    assert at(9.2, 0.0) == rgb(KINDS[Activity.OPTIMIZER].full)


def test_hovering_a_block_tells_its_times(chromium: Browser, tmp_path: Path):
    trace = measured("1f1b", 2, 3)
    shifted = replace(trace, start=trace.start + 0.000_012_3 * (trace.rank == 1))
    chromium.open(write(tmp_path / "r.html", [StepAnalysis("a", shifted)], title="hover"))
    frame = chromium.frame("measured")
    row = trace.rank_slices()[1].start + 3  # 1B1
    chromium.move(frame.x((trace.start[row] + trace.end[row]) * 500), frame.y(1) - 8)
    chromium.wait_until_still()
    start, end = (float(t) * 1000 for t in (shifted.start[row], shifted.end[row]))
    assert chromium.tooltip().split("\n") == [
        "backward stage 1 microbatch 1",
        "rank 1",
        f"{start:.9g} ms to {end:.9g} ms",
        f"takes {end - start:.9g} ms",
        "then 0 B held (0 B)",
    ]


def test_an_idle_stretch_has_its_causes_colour_and_tells_it(chromium: Browser, tmp_path: Path):
    step = StepAnalysis("a", timed(built("1f1b", 2, 3), 1, 1, 1))
    chromium.open(write(tmp_path / "r.html", [step], title="idle"))
    frame, screen = chromium.frame("measured"), chromium.screenshot()
    # Rank 0 waits from 2 to 4 for its first backward: a strip on white.
    x, y = round(frame.x(3)), round(frame.y(0))
    assert tuple(screen[y, x]) == rgb(CAUSES["warm_up"].colour)
    assert tuple(screen[round(frame.y(-0.3)), x]) == (255, 255, 255)
    chromium.move(x, y)
    chromium.wait_until_still()
    assert chromium.tooltip().split("\n") == ["rank 0 idle: warm-up", "for 2"]


def irregular(family: str, ranks: int, microbatches: int) -> Trace:
    """Return a trace with stages of unequal length, measured with ops of random length."""
    random = np.random.default_rng(3)
    program = built(family, ranks, microbatches)
    lengths = (random.uniform(1, 3, program.schedule.stages).tolist() for _ in range(3))
    trace = timed(program, *lengths, latency=0.5)
    waits = [random.exponential(0.4, rows.stop - rows.start) for rows in trace.rank_slices()]
    late = np.concatenate([np.cumsum(wait) for wait in waits])
    return replace(trace, start=trace.start + late, end=trace.end + late)


def test_idle_pixels_add_up_to_the_table(chromium: Browser, tmp_path: Path):
    """The pixels of every cause along a rank's row are as long as the table says, to two pixels for each of its spans."""
    trace = irregular("1f1b", 3, 5)
    split, spans = bubbles(trace), idle_spans(trace)
    assert (split.idle["imbalance"] > 0).any()
    chromium.open(write(tmp_path / "r.html", [StepAnalysis("a", trace)], title="pixels"))
    frame, screen = chromium.frame("measured"), chromium.screenshot()
    pixel = (frame.x1 - frame.x0) / frame.width
    for rank in range(3):
        line = screen[round(frame.y(rank) + 0.05 * abs(frame.y(1) - frame.y(0)))]
        line = line[round(frame.left) : round(frame.left + frame.width)]
        for number, (name, cause) in enumerate(CAUSES.items()):
            drawn = int((line == np.array(rgb(cause.colour))).all(axis=1).sum())
            pieces = int(((spans.rank == rank) & (spans.cause == number)).sum())
            assert abs(drawn - split.idle[name][rank] / pixel) <= 2 * pieces, (rank, name)


def lines_of(chromium: Browser, source: str) -> list[list[float]]:
    return chromium.run(f"return penstock.find('{source}').data.ys.map((line) => Array.from(line))")


def rises_and_falls(line: list[float]) -> bool:
    top = line.index(max(line))
    return line[:top] == sorted(line[:top]) and line[top:] == sorted(line[top:], reverse=True)


def test_memory_has_no_combs_and_all_its_steps_when_zoomed(chromium: Browser, tmp_path: Path):
    """Between the end of a backward and the next forward, a rank of 1f1b holds one activation less for no time."""
    trace = timed(built("1f1b", 2, 150), 1, 1, 1, latency=0.1)
    chromium.open(write(tmp_path / "r.html", [StepAnalysis("a", trace)], title="combs"))
    lines = lines_of(chromium, "memory")
    assert [max(line) for line in lines] == [2, 1]
    assert all(map(rises_and_falls, lines))
    assert lines_of(chromium, "memory-band") == []
    frame = chromium.frame("memory")
    chromium.wheel(int(frame.left + frame.width / 2), int(frame.top + 20), 7)
    chromium.wait_until_still()
    assert not rises_and_falls(lines_of(chromium, "memory")[1])


def test_very_many_changes_of_memory_become_a_band(chromium: Browser, tmp_path: Path):
    """Rank 1 holds an activation for 3 of every 15 ticks, and nothing for the others."""
    trace = timed(built("1f1b", 2, 150), [5, 1], [5, 1], [5, 1])
    chromium.open(write(tmp_path / "r.html", [StepAnalysis("a", trace)], title="band"))
    (band,) = lines_of(chromium, "memory-band")
    line = lines_of(chromium, "memory")[1]
    assert chromium.run("return penstock.find('memory-band').data.rank") == [1]
    assert (min(band), max(band)) == (0, 1)
    assert max(line) == 1
    frame = chromium.frame("memory")
    chromium.wheel(int(frame.left + frame.width / 2), int(frame.top + 20), 12)
    chromium.wait_until_still()
    assert lines_of(chromium, "memory-band") == []
    assert {0, 1} == set(lines_of(chromium, "memory")[1])


def test_a_narrow_page_scrolls_only_inside_tables(chromium: Browser, tmp_path: Path):
    name = "a-run-with-a-rather-long-name-that-does-not-break-anywhere-by-itself"
    steps = [*read_run(kept_run(tmp_path, name)).steps.values(), StepAnalysis(name, measured("zb-h1", 3, 12))]
    facts = RunFacts(9.0, None, (Fact("command", name * 5),))
    path = write(tmp_path / "r.html", steps, title=name, facts=facts)
    size = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    chromium.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        chromium.open(path)
        over, plots, boxes = chromium.run(
            "const wide = [...document.querySelectorAll('.wide')];"
            "return [document.documentElement.scrollWidth - document.documentElement.clientWidth,"
            " penstock.find('measured-figure').inner_width,"
            " wide.some((box) => box.scrollWidth > box.clientWidth)]"
        )
        assert over == 0
        assert plots > 250
        assert boxes
    finally:
        chromium.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_click_on_a_bar_of_all_steps_shows_its_step(chromium: Browser, tmp_path: Path):
    chromium.open(write_report(read_run(kept_run(tmp_path)), tmp_path / "r.html"))
    frame = chromium.frame("overview")
    assert chromium.run("return penstock.find('chosen').data.step") == [1]
    chromium.move(round(frame.x(0)), round(frame.y(60)), click=True)
    chromium.wait_until_still()
    assert chromium.run("return document.getElementById('step').value") == "0"
    assert chromium.frame("measured").x1 == pytest.approx(600 * 1.005)


def test_two_runs_are_on_one_scale(chromium: Browser, tmp_path: Path):
    first, second = measured("gpipe", 2, 4), measured("zb-h1", 3, 4)
    paths = []
    for name, trace in (("a", first), ("<b>", second)):
        save_step(tmp_path / name, 1, trace)
        paths.append(read_run(tmp_path / name))
    chromium.open(write_comparison(tmp_path / "c.html", pair_of(*paths, None)))
    assert_drawn(chromium, "measured", replace(first, ranks=2), 1000.0)
    assert_drawn(chromium, "planned", second, 1000.0)
    one, other = chromium.frame("measured"), chromium.frame("planned")
    assert (one.x0, one.x1, one.y0, one.y1) == (other.x0, other.x1, other.y0, other.y1)
    assert heading(chromium) == "a and <b>"
    assert chromium.requests() == [(tmp_path / "c.html").as_uri()]
    assert chromium.complaints() == []


def zoomed(before: Frame, after: Frame, x: float) -> bool:
    """Return whether less is shown, with the same moment under the pointer."""
    there = before.x0 + (x - before.left) / before.width * (before.x1 - before.x0)
    return after.x1 - after.x0 < 0.95 * (before.x1 - before.x0) and abs(after.x(there) - x) < 5


def test_zooming_shows_less_with_more_text_and_all_charts_together(chromium: Browser, tmp_path: Path):
    trace = timed(built("1f1b", 4, 150), 1, 1, 1)
    chromium.open(write(tmp_path / "r.html", [StepAnalysis("a", trace)], title="zoom"))
    before = chromium.frame("measured")
    x, y = int(before.left + before.width / 3), int(before.top + before.height / 2)
    texts = "return penstock.find('measured-labels').data.text"
    assert chromium.run(texts) == []
    chromium.wheel(x, y, 6)
    chromium.wait_until_still()
    after = chromium.frame("measured")
    assert zoomed(before, after, x)
    memory = chromium.frame("memory")
    assert (memory.x0, memory.x1) == (after.x0, after.x1)
    seen = (trace.end > after.x0) & (trace.start < after.x1)
    labels = chromium.run(texts)
    ops = [f"{'FB'[k]}{m}" for k, m in zip(trace.kind[seen], trace.microbatch[seen], strict=True)]
    assert 0 < len(labels) <= len(ops)
    assert set(labels) <= {*ops, *(op[1:] for op in ops)}
    assert chromium.complaints() == []


def test_dark_mode_changes_the_page_and_the_figures(chromium: Browser, tmp_path: Path):
    chromium.open(write(tmp_path / "r.html", [StepAnalysis("a", measured())], title="dark"))
    corner, text, memory = {}, {}, {}
    for scheme in ("light", "dark"):
        chromium.scheme(scheme)
        corner[scheme] = int(chromium.screenshot()[2, 2].mean())
        text[scheme] = chromium.run("return penstock.find('measured-figure').left[0].major_label_text_color")
        memory[scheme] = chromium.run("return penstock.find('memory').data.colour")
    chromium.scheme("")
    assert corner["light"] > 240 > 60 > corner["dark"]
    assert text == {"light": "#1c2329", "dark": "#e6eaee"}
    assert memory == rank_colours(2)


SMUGGLED = """
<img src="file:///etc/hostname" onerror="window.owned = 'attribute'">
<b id="styled" style="position: fixed">styled</b>
<style>#styled { color: rgb(1, 2, 3) !important; }</style>
<iframe srcdoc="<script>parent.owned = 'frame'</script>"></iframe>
"""


def test_what_is_smuggled_into_the_page_does_nothing(chromium: Browser, tmp_path: Path):
    path = write(tmp_path / "r.html", [StepAnalysis("a", measured())], title="policy")
    text = path.read_text("utf-8")
    inline = "<script>window.owned = 'script'</script>"
    (tmp_path / "s.html").write_text(text.replace("</header>", f"</header>{inline}{SMUGGLED}"), "utf-8")
    chromium.open(tmp_path / "s.html")
    assert chromium.run("return window.owned ?? null") is None
    # Later, for the browser lets a test's own words do what the page must not.
    chromium.run(
        "setTimeout(() => {"
        " try { window.made = new Function('return 1')(); } catch (error) { window.made = error.name; } })"
    )
    chromium.wait("return window.made !== undefined")
    assert chromium.run("return window.made") == "EvalError"
    style = chromium.run(
        "const style = getComputedStyle(document.getElementById('styled'));"
        "return [style.position, style.color]"
    )
    assert style[0] == "static"
    assert style[1] != "rgb(1, 2, 3)"
    refused = [said for said in chromium.complaints() if "Content Security Policy" in said]
    assert len(refused) >= 5
    assert any("/etc/hostname" in said for said in refused)
