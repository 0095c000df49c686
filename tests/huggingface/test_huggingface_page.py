"""The code of docs/huggingface.md runs as it is printed, on a small model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()


def test_the_code_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    from tests.support import hf_folders

    monkeypatch.chdir(tmp_path)
    hf_folders.folder(tmp_path, "llama", tied=False).rename("my-llama")
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M):
        exec(compile(block, "huggingface.md", "exec"), names)
    assert AutoModelForCausalLM.from_pretrained("my-llama-tuned").config.model_type == "llama"
