from __future__ import annotations

import json
import re
import sys
from base64 import b64decode, b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.show import report
from penstock.show.analysis import StepAnalysis
from penstock.show.page_data import step_data
from penstock.show.palette import CAUSES, KINDS
from penstock.show.report import write
from penstock.show.report_page import Fact, RunFacts
from penstock.show.units import unit_of
from penstock.trace.events import Activity, Trace
from tests.support.measured import measured
from tests.support.simulated import built, timed
from tests.support.traces import trace_of

EVIL = '</script><script>document.title="owned"</script>&amp;<img src=x onerror=alert(1)>'

STYLE = Path(report.__file__).with_name("templates").joinpath("page.css").read_text()


class Reader(HTMLParser):
    """A page as a browser parses it: its elements, and the text that is shown."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.shown: list[str] = []
        self.inside = ""
        self.scripts: dict[str | None, str] = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.key = dict(attrs).get("id")
            self.scripts[self.key] = ""

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[self.key] += data
        elif self.inside != "style":
            self.shown.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.shown).split())


def page(folder: Path, traces: dict[str, Trace], drawn: bool = False, **told) -> Reader:
    """Return the page, without figures unless they are to be drawn, which is slow."""
    steps = [StepAnalysis(label, trace) for label, trace in traces.items()]
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr("penstock.show.figures.figures", lambda *arguments, **named: {})
        return Reader(write(folder / "r.html", steps, **{"title": "a run", **told}).read_text("utf-8"))


def data_of(trace: Trace) -> dict[str, Any]:
    """Return what the page's script reads of a step."""
    return step_data(StepAnalysis("a", trace), unit_of([trace]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """The whole page of one measured step."""
    return page(tmp_path_factory.mktemp("plain"), {"step 1": measured(split=[["a"], ["a", "b"]])}, drawn=True)


def column(packed: dict[str, str]) -> list[float]:
    return np.frombuffer(b64decode(packed["data"]), f"<{packed['type']}").tolist()


def test_all_text_from_outside_is_text_in_the_page(plain: Reader, tmp_path: Path):
    trace = measured(schedule=EVIL, split=[[EVIL], [EVIL, "b"]])
    reader = page(tmp_path, {EVIL: trace, "two": trace}, title=EVIL, settings=EVIL, problems=[EVIL])
    tags = [tag for tag, _ in reader.elements]
    assert "img" not in tags
    assert tags.count("script") == [tag for tag, _ in plain.elements].count("script")
    # Title, heading, selector, counts, problems, settings, two layers, the table of all steps.
    assert reader.text.count(EVIL.replace("&amp;", "&amp;")) == 9


def test_the_policy_runs_the_pages_own_scripts_alone_and_nothing_is_outside(plain: Reader, tmp_path: Path):
    reader = page(tmp_path, {EVIL: measured()}, drawn=True, title=EVIL)
    text = (tmp_path / "r.html").read_text("utf-8")
    elements = [(tag, given) for tag, given in reader.elements if tag not in ("html", "head")]
    assert elements[0] == ("meta", {"charset": "utf-8"})
    assert elements[1] == ("meta", {"name": "generator", "content": "Penstock"})
    (tag, given) = elements[2]
    assert (tag, given["http-equiv"]) == ("meta", "Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in str(given["content"]).split("; "))
    (nonce,) = (given["nonce"] for tag, given in elements if tag == "style")
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.S)
    digests = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 4
    assert rules == {
        "default-src": "'none'",
        "script-src": " ".join(f"'sha256-{digest}'" for digest in digests),
        "style-src": f"'nonce-{nonce}'",
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not [given for _, given in elements if any(name == "style" or name[:2] == "on" for name in given)]
    assert nonce not in [given.get("nonce") for _, given in plain.elements]
    for tag, attributes in elements:
        for name in ("src", "href", "action", "data"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    style = re.sub(r"/\*.*?\*/", "", STYLE, flags=re.S)
    assert "url(" not in style
    assert "@import" not in style


def test_the_columns_are_those_of_the_trace(tmp_path: Path):
    trace = timed(built("dualpipe-v", 4, 12), 4, 5, 4)
    data = json.loads(page(tmp_path, {"a": trace}, drawn=True).scripts["penstock-data"])
    (step,) = data["steps"]
    assert data["unit"] == ""
    for name in ("start", "end", "rank", "stage", "microbatch", "kind", "held"):
        assert column(step["blocks"][name]) == getattr(trace, name).tolist()
    half = np.array(column(step["blocks"]["half"]))
    assert (np.flatnonzero(half == 1) + 1).tolist() == np.flatnonzero(half == 2).tolist()
    assert (half == 1).sum() == trace.paired.sum() > 0
    assert step["planned"] is None


def test_bars_fill_the_step_of_every_rank():
    trace = measured("zb-h1", 4, 8)
    bars = data_of(trace)["bars"]
    for rank in range(4):
        mine = [n for n, r in enumerate(bars["rank"]) if r == rank]
        assert sum(bars["share"][n] for n in mine) == pytest.approx(1)
        assert bars["left"][mine[0]] == 0
        assert bars["right"][mine[-1]] == pytest.approx(trace.end.max() * 1000)


def test_the_idle_spans_of_a_page_are_its_table(tmp_path: Path):
    """Sums of the drawn spans by rank and cause, as the table writes them."""
    trace = timed(built("1f1b", 3, 5), [2, 3, 1], [2, 3, 1], [2, 2, 1], latency=0.25)
    reader = page(tmp_path, {"a": trace})
    gaps = json.loads(reader.scripts["penstock-data"])["steps"][0]["gaps"]
    rank, cause, start, end = (np.array(column(gaps[name])) for name in ("rank", "cause", "start", "end"))
    names = list(CAUSES)
    assert "imbalance" in {names[int(number) - 1] for number in cause}
    step = StepAnalysis("a", trace)
    for number, name in enumerate(names):
        for r in range(3):
            drawn = (end - start)[(rank == r) & (cause == number + 1)].sum()
            assert drawn == pytest.approx(step.bubbles.idle[name][r])
            if drawn:
                assert f"{drawn / float(step.bubbles.makespan):.1%}" in reader.text


def test_ranks_that_left_no_events_are_not_drawn_as_idle(tmp_path: Path):
    reader = page(tmp_path, {"a": trace_of("", "1F0@1.0-2.0 1B0@2.5-4.0")})
    step = json.loads(reader.scripts["penstock-data"])["steps"][0]
    assert set(column(step["gaps"]["rank"])) == {1}
    assert set(step["bars"]["rank"]) == {1}
    assert "There is no plan to compare with: the step is incomplete: rank 0 has no events." in reader.text


def test_the_memory_chart_has_a_key_for_every_rank_its_limit_and_the_plan(tmp_path: Path):
    trace = measured("1f1b", 4, 8, limit=2**30)
    end = trace.end.copy()
    end[trace.rank_slices()[0].stop - 1] += 0.165
    reader = page(tmp_path, {"a": replace(trace, end=end)})
    keys = [given["data-rank"] for _, given in reader.elements if "data-rank" in given]
    assert keys == ["0", "1", "2", "3"]
    assert "rank 3 dashed: planned" in reader.text
    assert "limit" in reader.text
    assert "The step took 50.0% longer than planned" in reader.text
    step = json.loads(reader.scripts["penstock-data"])["steps"][0]
    assert column(step["planned"]["end"]) == pytest.approx((trace.end * 1000).tolist())
    assert len(step["memory"]["measured"]) == len(step["memory"]["planned"]) == 4
    assert step["memory"]["limit"] == 2**30
    assert data_of(measured(limit="much"))["memory"]["limit"] is None


def test_of_many_ranks_the_memory_of_some_is_drawn_and_of_the_one_that_holds_most(tmp_path: Path):
    trace = timed(built("gpipe", 40, 3), 1, 1, 1)
    held = trace.held.copy()
    held[trace.rank_slices()[22]] *= 2
    reader = page(tmp_path, {"a": replace(trace, held=held)})
    memory = json.loads(reader.scripts["penstock-data"])["steps"][0]["memory"]
    assert len(memory["ranks"]) == len(memory["measured"]) == 12
    assert {0, 22, 39} <= set(memory["ranks"])
    assert max(column(memory["measured"][memory["ranks"].index(22)]["y"])) == 6
    assert "Of more than 12 ranks, the memory of the one that holds most" in reader.text


def test_every_colour_has_a_key(tmp_path: Path):
    first = "0F0@0-2 0R0@2-4 0I0@4-6 0W0@6-8 SEND@6-9 RECV@9-9.5 REDUCE@7-10 OPTIMIZER@11-12"
    trace = trace_of(first, "0GATHER@0-1 1F0@2-3 1B0@3-5")
    reader = page(tmp_path, {"a": replace(trace, info={"source": "measured", "limit": 5})})
    shown = {given["data-colour"] for _, given in reader.elements if "data-colour" in given}
    present = {Activity(int(kind)) for kind in trace.kind}
    assert len(present) == len(Activity)
    assert {shade for kind in present for shade in (KINDS[kind].full, KINDS[kind].light)} <= shown
    assert {CAUSES[cause].colour for cause in StepAnalysis("a", trace).bubbles.causes} <= shown
    for style in KINDS.values():
        assert f"{style.letter} {style.meaning}" in reader.text


def test_merged_backwards_are_explained_where_they_were_measured(plain: Reader, tmp_path: Path):
    note = "an I whose W follows at once is a whole backward"
    assert note in page(tmp_path, {"a": measured("zb-h1", 2, 6)}).text
    assert note not in plain.text
    assert note not in page(tmp_path, {"a": timed(built("zb-h1", 2, 6), 1, 1, 1)}).text


def test_several_steps_are_shown_together(plain: Reader, tmp_path: Path):
    several = page(tmp_path, {"step 1": measured(scale=0.02), "step 9": measured()})
    assert "overview" in json.loads(several.scripts["penstock-figures"])
    assert "All steps" in several.text
    assert "step 1 240 ms 25.0%" in several.text
    assert "overview" not in json.loads(plain.scripts["penstock-figures"])


def test_what_if_has_the_lines_to_paste_and_nothing_that_is_slower(tmp_path: Path):
    text = page(tmp_path, {"a": measured("1f1b", 4, 8, blocks=[4] * 4)}).text
    table = text[text.index("What if") :]
    assert "penstock train --set schedule.name=zb-v" in table
    assert 'Pipeline(..., schedule="zb-v"' in table
    assert (
        "One other change within the same memory was simulated; it does not make the step shorter." in table
    )
    changes = re.findall(r" ([+-]\d+\.\d)% ", table)
    assert changes[0] == "+0.0"
    assert all(change.startswith("-") for change in changes[1:])


def test_without_a_change_that_is_worth_it_there_is_no_what_if(tmp_path: Path):
    text = page(tmp_path, {"a": measured("1f1b", 2, 8, blocks=[4, 4])}).text
    assert "makes the step 2% shorter." in text
    assert "What if" not in text


def test_a_step_that_holds_nothing_has_no_memory_chart(tmp_path: Path):
    trace = measured()
    reader = page(tmp_path, {"a": replace(trace, held=np.zeros_like(trace.held))})
    assert json.loads(reader.scripts["penstock-data"])["steps"][0]["memory"] is None
    assert '"name":"memory-figure"' not in reader.scripts["penstock-figures"]
    assert "held for backwards" not in reader.text


def test_values_of_any_kind_are_shown_or_left_out(tmp_path: Path):
    """Values from files may be NaN, of another type, or text that is not Unicode."""
    trace = measured(limit=float("nan"), clock_error="soon", split=[["\udcff"], [1, None]])
    metrics = [{"kind": "train", "step": 1, "loss": 10**400}]
    reader = page(tmp_path, {"a": trace}, title="\udcff", metrics=metrics)
    assert json.loads(reader.scripts["penstock-data"])["steps"][0]["memory"]["limit"] is None
    assert "curve-0" not in json.loads(reader.scripts["penstock-figures"])
    assert "clocks" not in reader.text
    assert "1, None" in reader.text


def test_metrics_become_curves_without_what_is_no_number_and_facts_are_escaped(plain: Reader, tmp_path: Path):
    rows = [
        {"kind": "train", "step": 1, "loss": 4.0, "lr": "fast"},
        {"kind": "train", "step": 2, "loss": float("nan")},
        {"kind": "train", "step": 3, "loss": 3.0},
        {"kind": "held_out", "step": 1, "held_out_bits": 2.5},
        {"kind": "held_out", "step": 3, "held_out_bits": 2.0},
        {"kind": "train", "step": 3, "grad_norm": 1.0},
        {"kind": "final"},
    ]
    facts = RunFacts(1234.5, 0.421, (Fact("command", EVIL), Fact("host", "node-7")))
    reader = page(tmp_path, {"a": measured()}, metrics=rows, facts=facts)
    assert "1,234 tokens a second, all ranks 42.1% MFU" in reader.text
    assert f"command {EVIL} host node-7" in reader.text
    assert "img" not in [tag for tag, _ in reader.elements]
    places = json.loads(reader.scripts["penstock-figures"])
    assert [name for name in places if name.startswith("curve-")] == ["curve-0", "curve-1"]
    curves = json.dumps(places)
    assert "[4.0, 3.0]" in curves
    assert "held-out bits" in curves
    assert "learning rate" not in curves
    assert "gradient norm" not in curves  # one point
    assert "curve-0" not in json.loads(plain.scripts["penstock-figures"])
    assert "MFU" not in plain.text


def test_of_too_many_traces_the_first_and_the_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "MAX_EVENTS", 50)
    reader = page(tmp_path, {f"step {n}": measured() for n in range(1, 12)})
    labels = [step["label"] for step in json.loads(reader.scripts["penstock-data"])["steps"]]
    assert labels == ["step 1", "step 4", "step 8", "step 11"]
    assert "The page has no room for all 11 traces with 132 events; it shows 4 of them" in reader.text


@pytest.mark.parametrize(("scale", "name"), [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")])
def test_the_unit_suits_the_length_of_a_step(scale, name):
    assert unit_of([measured(scale=scale)]).name == name
    assert unit_of([timed(built("1f1b", 2, 2), 1, 1, 1)]).name == ""


def test_what_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="at least one trace"):
        write(tmp_path / "r.html", [], title="")
    with pytest.raises(ConfigError, match=r"cannot write .*r\.html"):
        page(tmp_path / "no", {"a": measured()})
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock-torch\[report\]'"):
        page(tmp_path, {"a": measured()}, drawn=True)
    assert list(tmp_path.iterdir()) == []
