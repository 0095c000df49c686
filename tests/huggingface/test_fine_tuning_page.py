"""The code of docs/fine_tuning.md runs as it is printed, from top to bottom, on a small model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import hf_folders

PAGE = (Path(__file__).parents[2] / "docs" / "fine_tuning.md").read_text()


BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
(COMMANDS,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.S | re.M)


def small_model(root: Path) -> None:
    """The folder that the page's code reads."""
    folder = hf_folders.of_bytes(root).rename(root / "my-model")
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing` is deprecated:FutureWarning"
)  # TRL still sets it
def test_the_code_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    small_model(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "a_page"}
    for block in BLOCKS:
        exec(compile(block, "fine_tuning.md", "exec"), names)
    for saved in ("my-tuned-model", "my-merged-model"):
        assert (tmp_path / saved / "model.safetensors").is_file()
    for saved in ("my-adapters", "my-other-adapters"):
        assert (tmp_path / saved / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS.splitlines())
def test_the_script_runs_in_processes_as_printed(tmp_path: Path, command: str):
    small_model(tmp_path)
    (script,) = [block for block in BLOCKS if block.startswith("# tune.py\n")]
    (tmp_path / "tune.py").write_text(script)
    launcher, *words = command.split()
    options = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone"],
        "accelerate": ["-m", "accelerate.commands.launch"],
    }
    words = [word for word in words if word != "launch"]
    done = subprocess.run(
        [sys.executable, *options[launcher], *words],
        cwd=tmp_path,
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "my-parallel-model" / "model.safetensors").is_file()
    state = json.loads((tmp_path / "out-processes" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert state["train_batch_size"] == 16, "of both replicas"
