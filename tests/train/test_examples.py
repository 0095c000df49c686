from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from penstock.train.config.file import load

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_loop_of_ones_own_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLES / "own_loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "STEPS", 50)
    module.main()
    out = capsys.readouterr().out
    assert "step 50  loss 0." in out
    assert "accuracy on new points: " in out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_configs_are_sound(path: Path):
    assert load(path).train.name == path.stem
