from __future__ import annotations

import json
import re
import sys
from base64 import b64decode, b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.show import report
from penstock.show.analysis import StepAnalysis
from penstock.show.report import write
from penstock.show.units import unit_of
from penstock.trace.events import Trace
from tests.support.measured import measured
from tests.support.simulated import built, timed
from tests.support.traces import trace_of

EVIL = '</script><script>document.title="owned"</script>&amp;<img src=x onerror=alert(1)>'


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


def steps_of(traces: dict[str, Trace]) -> list[StepAnalysis]:
    return [StepAnalysis(label, trace) for label, trace in traces.items()]


def page(path: Path, traces, **told) -> Reader:
    return Reader(write(path / "r.html", steps_of(traces), **{"title": "a run", **told}).read_text("utf-8"))


def column(packed: dict[str, str]) -> list[float]:
    return np.frombuffer(b64decode(packed["data"]), f"<{packed['type']}").tolist()


def test_all_text_from_outside_is_text_in_the_page(tmp_path: Path):
    split = [[EVIL], [EVIL, "b"]]
    trace = measured(schedule=EVIL, split=split)
    plain = page(tmp_path, {"step": measured(split=[["a"], ["a", "b"]])})
    reader = page(tmp_path, {EVIL: trace, "two": trace}, title=EVIL, settings=EVIL, problems=[EVIL])
    tags = [tag for tag, _ in reader.elements]
    assert "img" not in tags
    assert tags.count("script") == [tag for tag, _ in plain.elements].count("script")
    # Title, heading, selector, counts, problems, settings, two layers, the table of all steps.
    assert reader.text.count(EVIL.replace("&amp;", "&amp;")) == 9


def test_the_policy_runs_the_pages_own_scripts_alone(tmp_path: Path):
    path = write(tmp_path / "r.html", steps_of({EVIL: measured()}), title=EVIL)
    text = path.read_text("utf-8")
    elements = [(tag, given) for tag, given in Reader(text).elements if tag not in ("html", "head")]
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
    assert nonce not in write(path, steps_of({"a": measured()}), title="again").read_text("utf-8")


def test_the_page_refers_to_nothing_outside(tmp_path: Path):
    reader = page(tmp_path, {"step 1": measured()})
    for tag, attributes in reader.elements:
        for name in ("src", "href", "action", "data"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    style = Path(report.__file__).with_name("templates").joinpath("page.css").read_text()
    style = re.sub(r"/\*.*?\*/", "", style, flags=re.S)
    assert "url(" not in style
    assert "@import" not in style


def test_the_columns_are_those_of_the_trace(tmp_path: Path):
    trace = timed(built("dualpipe-v", 4, 12), 4, 5, 4)
    data = json.loads(page(tmp_path, {"a": trace}).scripts["penstock-data"])
    (step,) = data["steps"]
    assert data["unit"] == ""
    for name in ("start", "end", "rank", "stage", "microbatch", "kind", "held"):
        assert column(step["blocks"][name]) == getattr(trace, name).tolist()
    half = np.array(column(step["blocks"]["half"]))
    assert (np.flatnonzero(half == 1) + 1).tolist() == np.flatnonzero(half == 2).tolist()
    assert (half == 1).sum() == trace.paired.sum() > 0
    assert step["planned"] is None


def test_bars_fill_the_step_of_every_rank(tmp_path: Path):
    trace = measured("zb-h1", 4, 8)
    data = json.loads(page(tmp_path, {"a": trace}).scripts["penstock-data"])
    bars = data["steps"][0]["bars"]
    assert data["unit"] == "ms"
    for rank in range(4):
        mine = [n for n, r in enumerate(bars["rank"]) if r == rank]
        assert sum(bars["share"][n] for n in mine) == pytest.approx(1)
        assert bars["left"][mine[0]] == 0
        assert bars["right"][mine[-1]] == pytest.approx(trace.end.max() * 1000)


def test_measured_is_shown_over_planned_with_the_difference_named(tmp_path: Path):
    trace = measured("1f1b", 2, 4)
    end = trace.end.copy()
    end[trace.rank_slices()[0].stop - 1] += 0.075
    reader = page(tmp_path, {"a": replace(trace, end=end)})
    assert "The step took 50.0% longer than planned" in reader.text
    step = json.loads(reader.scripts["penstock-data"])["steps"][0]
    assert column(step["planned"]["end"]) == pytest.approx((trace.end * 1000).tolist())
    assert len(step["memory"]["measured"]) == len(step["memory"]["planned"]) == 2


def test_of_many_ranks_the_memory_of_some_is_drawn_and_of_the_one_that_holds_most(tmp_path: Path):
    trace = timed(built("gpipe", 40, 3), 1, 1, 1)
    most = trace.rank_slices()[22]
    held = trace.held.copy()
    held[most] *= 2
    reader = page(tmp_path, {"a": replace(trace, held=held)})
    memory = json.loads(reader.scripts["penstock-data"])["steps"][0]["memory"]
    assert len(memory["ranks"]) == len(memory["measured"]) == 12
    assert {0, 22, 39} <= set(memory["ranks"])
    assert max(column(memory["measured"][memory["ranks"].index(22)]["y"])) == 6
    assert "Of more than 12 ranks, the memory of the one that holds most" in reader.text


def test_the_limit_is_drawn_where_it_is_known(tmp_path: Path):
    step = json.loads(page(tmp_path, {"a": measured(limit=5 * 2**20)}).scripts["penstock-data"])["steps"][0]
    assert step["memory"]["limit"] == 5 * 2**20
    step = json.loads(page(tmp_path, {"a": measured(limit="much")}).scripts["penstock-data"])["steps"][0]
    assert step["memory"]["limit"] is None


def test_values_of_any_kind_are_shown_or_left_out(tmp_path: Path):
    """Values from files may be NaN, of another type, or text that is not Unicode."""
    trace = measured(limit=float("nan"), clock_error="soon", split=[["\udcff"], [1, None]])
    reader = page(
        tmp_path, {"a": trace}, title="\udcff", metrics=[{"kind": "train", "step": 1, "loss": 10**400}]
    )
    assert json.loads(reader.scripts["penstock-data"])["steps"][0]["memory"]["limit"] is None
    assert "curve-0" not in json.loads(reader.scripts["penstock-figures"])
    assert "clocks" not in reader.text
    assert "1, None" in reader.text


def test_a_trace_that_is_no_whole_step_is_shown_without_a_plan(tmp_path: Path):
    reader = page(tmp_path, {"a": trace_of("", "1F0@1.0-2.0 1B0@2.0-4.0")})
    assert "There is no plan to compare with: the step is incomplete: rank 0 has no events." in reader.text


def test_metrics_become_curves_and_what_is_no_number_is_left_out(tmp_path: Path):
    rows = [
        {"kind": "train", "step": 1, "loss": 4.0, "lr": "fast"},
        {"kind": "train", "step": 2, "loss": float("nan")},
        {"kind": "train", "step": 3, "loss": 3.0},
        {"kind": "held_out", "step": 3, "held_out_bits": 2.0},
        {"kind": "final"},
    ]
    reader = page(tmp_path, {"a": measured()}, metrics=rows)
    figures = json.loads(reader.scripts["penstock-figures"])
    assert [name for name in figures if name.startswith("curve-")] == ["curve-0", "curve-1"]
    curves = json.dumps(figures)
    assert "[4.0, 3.0]" in curves
    assert "held-out bits" in curves
    assert "learning rate" not in curves
    assert "curve-0" not in json.loads(page(tmp_path, {"a": measured()}).scripts["penstock-figures"])


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
    with pytest.raises(ConfigError, match=r"cannot write the report .*r\.html"):
        write(tmp_path / "no" / "r.html", steps_of({"a": measured()}), title="")
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[report\]'"):
        write(tmp_path / "r.html", steps_of({"a": measured()}), title="")
    assert list(tmp_path.iterdir()) == []
