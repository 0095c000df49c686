"""Into which file of a converted checkpoint a tensor goes, and which folder of the library weights are exported for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock
from penstock.checkpoint.convert import _stage, export_transformers


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("model/embed.weight", 0),
        ("model/blocks.1.inner.weight", 1),
        ("model/blocks.10.inner.weight", 2),
        ("optimizer/exp_avg/blocks.1.inner.weight", 1),
        ("optimizer/exp_avg/blocks.10.bias", 2),
        ("optimizer/step", 0),
        ("main/blocks.1.inner.weight", 1),
        ("generators/1/cpu", 0),  # of no layer
    ],
)
def test_a_tensor_goes_to_the_file_of_its_layers_stage(name: str, stage: int):
    assert _stage(name, {"embed": 0, "blocks.1": 1, "blocks.10": 2}) == stage


@pytest.mark.parametrize(("key", "file"), [("path", ""), ("config", "config.json")])
def test_weights_are_exported_for_the_model_that_the_run_began_with(tmp_path: Path, key: str, file: str):
    """Its folder, or its config alone."""
    from transformers import AutoModelForCausalLM

    from tests.support import hf_folders

    source = hf_folders.folder(tmp_path, "llama", tied=False, tokenizer=False)
    with (
        penstock.Pipeline(penstock.from_transformers(source), ranks=2, microbatches=2) as pipe,
        penstock.Checkpoints(tmp_path, pipe, config={"model": {key: str(source / file)}}) as checkpoints,
    ):
        checkpoints.save()
    export_transformers(tmp_path / "step-00000000", tmp_path / "exported")
    expected, found = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (source, tmp_path / "exported")
    )
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
