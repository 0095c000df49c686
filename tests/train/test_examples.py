from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from penstock.train.config.file import load

EXAMPLES = Path(__file__).parents[2] / "examples"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_loop_of_ones_own_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    module = loaded("own_loop")
    monkeypatch.setattr(module, "STEPS", 50)
    module.main()
    out = capsys.readouterr().out
    assert "step 50  loss 0." in out
    assert "accuracy on new points: " in out


@pytest.mark.slow
def test_a_loader_of_ones_own_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    module = loaded("own_loader")
    monkeypatch.setattr(module, "EPOCHS", 2)
    monkeypatch.setattr(module, "ROWS", 512)
    module.main()
    out = capsys.readouterr().out
    first, second = (float(number) for number in re.findall(r"loss ([\d.]+)", out))
    assert second < first < 3
    assert "right letters of answers: " in out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_configs_are_sound(path: Path):
    assert load(path).train.name == path.stem
