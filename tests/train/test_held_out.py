"""A run with held-out files of its own: evaluated on while it trains, afterwards, and after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.train.config.config import Config
from penstock.train.evaluate import evaluate
from tests.support import records
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, metrics, run


def with_held_out(config: Config, path: Path) -> Config:
    return replace(config, data=replace(config.data, held_out_path=str(path)))


def test_a_run_is_evaluated_on_its_held_out_file_and_resumes_with_it(tmp_path: Path):
    text, dev = text_folder(tmp_path), records.write_lines(tmp_path / "dev.jsonl", records.completions(6))
    data = {"sequence": 64}
    run(with_held_out(config_of(tmp_path, text, "tiny", 2, data=data, train={"eval_batches": 1}), dev))
    folder = tmp_path / "runs" / "tiny"
    ((everything,), (again,)) = (evaluate(folder, paths, []) or [None] for paths in ([], [str(dev)]))
    assert everything is not None
    assert again is not None
    assert (everything.loss, everything.tokens) == (again.loss, again.tokens)
    measured = [line["held_out_bits"] for line in metrics(folder) if line["kind"] == "held_out"]
    assert measured[-1] == pytest.approx(everything.bits_per_token, rel=1e-5)

    longer = config_of(tmp_path, text, "tiny", 4, str(folder), data=data, train={"eval_batches": 1})
    moved = dev.rename(tmp_path / "elsewhere.jsonl")
    with pytest.raises(ConfigError, match=r"data.held_out_path was '.*dev.jsonl' and is ''"):
        run(longer)
    (tmp_path / "other").mkdir()
    other = records.write_lines(tmp_path / "other" / "dev.jsonl", records.completions(6, seed=1))
    with pytest.raises(ConfigError, match=r"the data is not what .* the held-out file 'dev.jsonl' had"):
        run(with_held_out(longer, other))
    other.unlink()
    run(with_held_out(longer, moved.rename(other)))
    assert metrics(folder)[-1]["step"] == 4
