from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.show.comparison import pair_of, write_comparison
from penstock.show.run import read_run
from tests.support.measured import kept_run, measured

EVIL = "<img src=x onerror=alert(1)>"


def test_the_page_has_both_steps_curves_differences_and_names_as_text(tmp_path: Path):
    runs = read_run(kept_run(tmp_path, "first")), read_run(kept_run(tmp_path, EVIL))
    text = write_comparison(tmp_path / "c.html", pair_of(*runs, None)).read_text("utf-8")
    assert EVIL not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    (data,) = re.findall(r'<script type="application/json" id="penstock-data">(.*?)</script>', text, re.S)
    (step,) = json.loads(data)["steps"]
    assert step["blocks"]["start"] == step["planned"]["start"]
    assert len(step["memory"]["measured"]) == len(step["memory"]["planned"]) == 2
    (figures,) = re.findall(
        r'<script type="application/json" id="penstock-figures">(.*?)</script>', text, re.S
    )
    assert set(json.loads(figures)) == {"time", "overview", "curve-0", "curve-1", "curve-2"}
    assert "<p>None.</p>" in text


def test_single_files_are_compared_without_configs_and_what_cannot_be_written_is_told(tmp_path: Path):
    measured().save(tmp_path / "a.npz")
    run = read_run(tmp_path / "a.npz")
    text = write_comparison(tmp_path / "c.html", pair_of(run, run, None)).read_text()
    assert "Differences of the configs" not in text
    with pytest.raises(ConfigError, match="cannot write the page"):
        write_comparison(tmp_path / "no" / "c.html", pair_of(run, run, None))
