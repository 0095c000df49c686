"""Models with bases of 4 and 8 bits (bitsandbytes), whose adapters a pipeline trains as plain Trainer does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import penstock
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_trainer
from tests.support.hf_models import distance
from tests.support.lanes import exhaustive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpointing` is deprecated:FutureWarning"
    ),  # peft calls it
    # Its outliers are columns of a whole batch.
    pytest.mark.filterwarnings("ignore:(?s).*The values differ little, as with one scale:RuntimeWarning"),
]
PIPELINE = {"ranks": 2, "microbatches": 4, "report": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "nf4 twice": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32,
        "bnb_4bit_use_double_quant": True,
    },
    "int8": {"load_in_8bit": True},
}  # fmt: skip


def quantised(folder: Path, config: str) -> Any:
    """Return a model of a folder with a quantised base and adapters."""
    if not (folder / "model.safetensors").exists():
        hf_trainer.model(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    bits = BitsAndBytesConfig(**CONFIGS[config])
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits, device_map={"": "cpu"})
    torch.manual_seed(1)
    prepared = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(prepared, lora)


def make(
    folder: Path, pipeline: dict[str, Any] | None, *, base: Path, config: str = "nf4", **changes: Any
) -> Any:
    net = quantised(base, config)
    return hf_trainer.trainer(net, hf_trainer.arguments(folder, **changes), pipeline)


@pytest.mark.parametrize(
    ("config", "schedule"), [("nf4 twice", "zb-v"), *exhaustive(("nf4", "1f1b"), ("int8", "zb-h1"))]
)
def test_adapters_of_quantised_bases_train_as_in_trainer(tmp_path: Path, config: str, schedule: str):
    ours, theirs = (
        make(tmp_path / str(n), each, base=tmp_path / "base", config=config)
        for n, each in enumerate((PIPELINE | {"schedule": schedule}, None))
    )
    hf_trainer.assert_close(hf_trainer.logged(ours), hf_trainer.logged(theirs))
    one, other = (peft.get_peft_model_state_dict(each.model) for each in (ours, theirs))
    assert distance(one, other) < 2e-6
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-3)
    for folder, each in (("ours", ours), ("theirs", theirs)):
        each.save_model(str(tmp_path / folder))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "ours")
    assert distance(peft.get_peft_model_state_dict(loaded), one) == 0


def test_processes_train_adapters_of_a_quantised_base(tmp_path: Path, processes: LocalProcesses):
    made = partial(make, base=tmp_path / "base")
    (tmp_path / "base").mkdir()
    plain = hf_trainer.run(0, made, tmp_path / "plain", None, {})
    told = processes.run(2, hf_trainer.run, made, tmp_path / "piped", PIPELINE, {}, timeout=300)
    for run in told:
        hf_trainer.assert_close(run.logged, plain.logged)
        assert run.evaluated == pytest.approx(plain.evaluated, rel=1e-4)
    one, other = (
        hf_trainer.saved(tmp_path / side, "adapter_model.safetensors") for side in ("piped", "plain")
    )
    assert distance(one, other) < 2e-6


def test_a_step_of_ones_own_loop_leaves_the_base_as_it_is(tmp_path: Path):
    """In evaluation mode bitsandbytes packs weights anew on some CPUs; the check of a first step runs in that mode."""
    net = quantised(tmp_path, "nf4 twice").train()
    base = [p for p in net.parameters() if not p.is_floating_point()]
    before = [(p.data.clone(), p.quant_state) for p in base]
    with penstock.Pipeline(net, penstock.causal_lm_loss, ranks=2, microbatches=2) as pipe:
        ids = torch.randint(2, hf_trainer.VOCABULARY, (4, hf_trainer.TOKENS))
        pipe.step(ids, ids)
    assert len(base) == 28
    assert all(
        torch.equal(p.data, data) and p.quant_state is state
        for p, (data, state) in zip(base, before, strict=True)
    )
    assert not any(getattr(p.quant_state, "packing_format_for_cpu", False) for p in base)


def test_other_ways_to_quantise_are_refused_by_name():
    net = hf_trainer.model()
    net.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(penstock.SplitError, match="quantised by 'gptq', and only those of bitsandbytes"):
        penstock.from_transformers(net)
