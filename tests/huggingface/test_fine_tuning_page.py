"""The code of docs/fine_tuning.md runs as it is printed, from top to bottom, on a small model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.support import hf_folders

PAGE = (Path(__file__).parents[2] / "docs" / "fine_tuning.md").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing` is deprecated:FutureWarning"
)  # TRL still sets it
def test_the_code_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = hf_folders.of_bytes(tmp_path).rename("my-model")
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "a_page"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M):
        exec(compile(block, "fine_tuning.md", "exec"), names)
    for saved in ("my-tuned-model", "my-merged-model"):
        assert (tmp_path / saved / "model.safetensors").is_file()
    for saved in ("my-adapters", "my-other-adapters"):
        assert (tmp_path / saved / "adapter_model.safetensors").is_file()
