"""A run with held-out files of its own: evaluated on while it trains, afterwards, and after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.train.config.config import Config
from penstock.train.evaluate import evaluate
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, metrics, run


def with_held_out(config: Config, path: Path) -> Config:
    return replace(config, data=replace(config.data, held_out_path=str(path)))


def test_a_run_is_evaluated_on_its_held_out_file_and_resumes_with_it(tmp_path: Path):
    text, dev = text_folder(tmp_path), tmp_path / "dev.txt"
    # As many windows as the batch of an evaluation has samples, so that it sees each token once.
    dev.write_text(("the cat sat on a mat. " * 200)[: Config().train.batch * 64])
    data, evaluated = {"sequence": 64}, {"eval_batches": 1, "batch": Config().train.batch}
    run(with_held_out(config_of(tmp_path, text, "tiny", 2, data=data, train=evaluated), dev))
    folder = tmp_path / "runs" / "tiny"
    ((everything,), (again,)) = (evaluate(folder, paths, []) or [None] for paths in ([], [str(dev)]))
    assert everything is not None
    assert again is not None
    assert (everything.loss, everything.tokens) == (again.loss, again.tokens)
    measured = [line["held_out_bits"] for line in metrics(folder) if line["kind"] == "held_out"]
    assert measured[-1] == pytest.approx(everything.bits_per_token, rel=1e-5)

    longer = config_of(tmp_path, text, "tiny", 4, str(folder), data=data, train=evaluated)
    moved = dev.rename(tmp_path / "elsewhere.txt")
    with pytest.raises(ConfigError, match=r"data.held_out_path was '.*dev.txt' and is ''"):
        run(longer)
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "dev.txt"
    other.write_text("a dog saw three cats. " * 40)
    with pytest.raises(ConfigError, match=r"the data is not what .* the held-out file 'dev.txt' had"):
        run(with_held_out(longer, other))
    other.unlink()
    run(with_held_out(longer, moved.rename(other)))
    assert metrics(folder)[-1]["step"] == 4
