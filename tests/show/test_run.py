from __future__ import annotations

from pathlib import Path

import pytest

from penstock.base.errors import ConfigError, DataError
from penstock.show.run import read_run, write_report
from tests.support.measured import kept_run, measured


def test_a_run_is_its_traces_metrics_and_config(tmp_path: Path):
    run = read_run(kept_run(tmp_path))
    assert (run.title, list(run.traces), run.problems) == ("my-run", [1, 10], ())
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert "<b>markup</b>" in run.settings
    assert (run.choose(None), run.choose(1)) == (10, 1)
    with pytest.raises(ConfigError, match="my-run has no trace of step 7; traced steps: 1, 10"):
        run.choose(7)


@pytest.mark.slow
def test_the_page_has_all_steps_or_the_one_asked_for(tmp_path: Path):
    run = read_run(kept_run(tmp_path))
    every = write_report(run, tmp_path / "a.html").read_text()
    assert '<option value="0">step 1</option><option value="1" selected>step 10</option>' in every
    assert "<option" not in write_report(run, tmp_path / "b.html", 10).read_text()


def test_broken_metrics_and_config_are_named_and_the_rest_is_shown(tmp_path: Path):
    path = kept_run(tmp_path)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4, "lo')
    (path / "config.toml").write_bytes(b"\xff\xfe")
    run = read_run(path)
    assert len(run.metrics) == 3
    first, second = run.problems
    assert f"{path / 'metrics.jsonl'}: line 4 is not a JSON object and is left out" in first
    assert f"cannot read {path / 'config.toml'}: 'utf-8'" in second


def test_a_single_file_is_a_run_of_one_step_and_what_is_neither_is_refused(tmp_path: Path):
    measured().save(tmp_path / "one.npz")
    run = read_run(tmp_path / "one.npz")
    assert (run.title, run.choose(None)) == ("one.npz", 0)
    with pytest.raises(DataError, match="neither a run's folder nor a trace file"):
        read_run(tmp_path / "nothing")
