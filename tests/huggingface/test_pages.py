"""The code of docs/fine_tuning.md and docs/huggingface.md runs as it is printed, from top to bottom, on a small model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import hf_folders

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "fine_tuning.md").read_text()
PYTHON = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
BLOCKS = PYTHON.findall(PAGE)
COMMANDS = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.S | re.M)).splitlines()
SAVED = {"tune.py": "my-parallel-model/model.safetensors", "qlora.py": "my-qlora/adapter_model.safetensors"}


def small_model(root: Path) -> None:
    """The folder that the page's code reads."""
    # Kernels of bitsandbytes for CPUs take multiples of 32.
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    folder = hf_folders.of_bytes(root, **wide).rename(root / "my-model")
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))


def run_all(blocks: list[str]) -> None:
    names: dict[str, object] = {"__name__": "a_page"}
    for block in blocks:
        exec(compile(block, "a_page", "exec"), names)


def test_the_code_of_the_page_on_models_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    hf_folders.folder(tmp_path, "llama", tied=False).rename("my-llama")
    run_all(PYTHON.findall((DOCS / "huggingface.md").read_text()))
    assert AutoModelForCausalLM.from_pretrained("my-llama-tuned").config.model_type == "llama"


@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing` is deprecated:FutureWarning"
)  # TRL still sets it
@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft still reads it
def test_the_code_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    small_model(tmp_path)
    torch.manual_seed(0)
    run_all(BLOCKS)
    for saved in ("my-tuned-model", "my-merged-model"):
        assert (tmp_path / saved / "model.safetensors").is_file()
    for saved in ("my-adapters", "my-other-adapters"):
        assert (tmp_path / saved / "adapter_model.safetensors").is_file()


ALL_QLORA = [command for command in COMMANDS if command.endswith("qlora.py")]
TUNE = [command for command in COMMANDS if command.endswith(" tune.py")]


# A launch of two ranks by torchrun: tests/huggingface/test_trainer_launches.py.
@pytest.mark.exhaustive
@pytest.mark.parametrize("command", [*ALL_QLORA, *TUNE])
def test_the_script_runs_as_printed(tmp_path: Path, command: str):
    small_model(tmp_path)
    launcher, *words = command.split()
    name = words[-1]
    (script,) = [block for block in BLOCKS if block.startswith(f"# {name}\n")]
    (tmp_path / name).write_text(script)
    options = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone"],
        "accelerate": ["-m", "accelerate.commands.launch"],
        "python": [],
    }
    words = [word for word in words if word != "launch"]
    source = str(DOCS.parent / "src")
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": source}
    done = subprocess.run(
        [sys.executable, *options[launcher], *words],
        cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / SAVED[name]).is_file()
    if name == "tune.py":
        state = json.loads((tmp_path / "out-processes" / "checkpoint-4" / "trainer_state.json").read_text())
        assert state["global_step"] == 4
        assert state["train_batch_size"] == 16, "of both replicas"
