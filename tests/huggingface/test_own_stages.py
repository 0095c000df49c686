"""`own_stages`: from_pretrained in processes that each load the weights of their own stages alone."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)

import penstock
from penstock.base.errors import ConfigError, DataError, SplitError
from penstock.huggingface.small_config import small_config
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_models, hf_trainer
from tests.support.hf_models import distance
from tests.support.lanes import exhaustive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning"),
]
PIPELINE = {"ranks": 2, "microbatches": 4, "report": False}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
TWICE = NF4 | {"bnb_4bit_use_double_quant": True}
INT8 = {"load_in_8bit": True}
NO_BITS: dict[str, Any] = {}


def save(folder: Path, family: str = "llama", bits: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Save a small model, quantised if bits are given."""
    if family in hf_models.FAMILIES:
        net = hf_trainer.model(family, **changes)
    else:
        torch.manual_seed(0)
        config = small_config(CONFIG_MAPPING[family](), eos_token_id=None, vocab_size=hf_trainer.VOCABULARY)
        net = hf_models.moved(AutoModelForCausalLM.from_config(config))
    net.save_pretrained(folder)
    if bits is not None:
        quantised = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(**bits), device_map={"": "cpu"}
        )
        quantised.save_pretrained(folder)
    return folder


def load(
    folder: Path, pipeline: dict[str, Any] | None, kind: Any = AutoModelForCausalLM, **given: Any
) -> Any:
    """Return the model of a folder; with a pipeline, the weights of own stages alone."""
    with nullcontext() if pipeline is None else penstock.own_stages(pipeline):
        return kind.from_pretrained(folder, **given)


def make(folder: Path, pipeline: dict[str, Any] | None, *, base: Path, **changes: Any) -> Any:
    return hf_trainer.trainer(load(base, pipeline), hf_trainer.arguments(folder, **changes), pipeline)


def make_adapted(folder: Path, pipeline: dict[str, Any] | None, *, base: Path, bits: dict[str, Any]) -> Any:
    given = {"quantization_config": BitsAndBytesConfig(**bits)} if bits else {}
    net = load(base, pipeline, device_map={"": "cpu"}, **given)
    torch.manual_seed(1)
    prepared = peft.prepare_model_for_kbit_training(net, use_gradient_checkpointing=False)
    # The magnitudes of DoRA are norms of dequantised weights.
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=bits == NF4)
    return hf_trainer.trainer(peft.get_peft_model(prepared, lora), hf_trainer.arguments(folder), pipeline)


def make_scores(folder: Path, pipeline: dict[str, Any] | None, *, base: Path) -> Any:
    """A trainer of a model with a new head, whose weights are in no file, and which drops out after its loading."""
    torch.manual_seed(2)
    net = load(base, pipeline, AutoModelForSequenceClassification, num_labels=3, pad_token_id=0)
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"][0] % 3} for row in hf_trainer.rows(20)]
    net.score.weight.data += torch.rand(1).to(
        net.score.weight.device
    )  # all have drawn as many numbers before it
    args = hf_trainer.arguments(folder)
    return hf_trainer.trainer(net, args, pipeline, train_dataset=rows, eval_dataset=rows)


def names_with_values(rank: int, base: Path, pipeline: dict[str, Any]) -> set[str]:
    net = load(base, pipeline)
    return {name for name, p in net.named_parameters(remove_duplicate=False) if not p.is_meta}


def drawn(rank: int, base: Path, pipeline: dict[str, Any] | None) -> tuple[dict[str, float], float]:
    """Sums of tensors that are drawn anew, since those of the folder have another shape, and the next random number."""
    torch.manual_seed(3)
    net = load(base, pipeline, vocab_size=120, ignore_mismatched_sizes=True)
    sums = {
        name: float(p.detach().double().sum())
        for name, p in net.named_parameters()
        if p.shape[0] == 120 and not p.is_meta
    }
    return sums, float(torch.rand(()))


def refused_later(rank: int, base: Path) -> list[str]:
    """What a model with own stages alone says to what needs all of it, and a model of another shape than its folder's."""
    net, found = load(base, PIPELINE), []
    with pytest.raises(ConfigError) as refused:
        net.resize_token_embeddings(100)
    found.append(str(refused.value))

    class WithReference(penstock.PipelineTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.ref_model = load(base, PIPELINE)

    with pytest.raises(ConfigError) as refused:
        hf_trainer.trainer(net, hf_trainer.arguments(base), PIPELINE, WithReference)
    found.append(str(refused.value))
    with pytest.raises(RuntimeError) as mismatched:
        load(base, PIPELINE, vocab_size=120)
    return [*found, str(mismatched.value)]


def fails(rank: int, base: Path, asked: dict[str, Any], pipeline: dict[str, Any]) -> str:
    with pytest.raises((ConfigError, DataError, SplitError)) as raised:
        penstock.Pipeline(load(base, asked), **pipeline)
    return str(raised.value)


@pytest.mark.parametrize(
    ("stored", "bits"),
    [
        (None, NF4),
        *exhaustive((NF4, NO_BITS), (TWICE, NO_BITS), (INT8, NO_BITS), (None, INT8), (None, TWICE)),
    ],
)
def test_processes_quantise_own_layers_and_train_as_trainer_does(
    tmp_path: Path, processes: LocalProcesses, stored: dict[str, Any] | None, bits: dict[str, Any]
):
    base = save(tmp_path / "base", bits=stored, hidden_size=64, intermediate_size=128)
    made = partial(make_adapted, base=base, bits=bits)
    plain = hf_trainer.run(0, made, tmp_path / "plain", None, {})
    told = processes.run(2, hf_trainer.run, made, tmp_path / "piped", PIPELINE, {}, timeout=300)
    hf_trainer.assert_close(told[0].logged, plain.logged)
    # Outliers of int8 are columns of a whole microbatch.
    assert told[1].evaluated == pytest.approx(plain.evaluated, rel=1e-3)
    one, other = (
        hf_trainer.saved(tmp_path / side, "adapter_model.safetensors") for side in ("piped", "plain")
    )
    assert distance(one, other) < 2e-6


@pytest.mark.parametrize(
    ("family", "changes", "pipeline"),
    [
        ("llama", {"tied": True}, {"schedule": "zb-v"}),
        *exhaustive(
            ("olmo2", {}, {"schedule": "interleaved-1f1b", "virtual_stages": 2}),
            # Its files have a tensor for each expert.
            ("mixtral", {}, {"split": [1, 3]}),
            # Both processes have both stages.
            ("llama", {}, {"schedule": "dualpipe-v"}),
            ("gemma2", {}, {"schedule": "chimera"}),
        ),
    ],
)
def test_processes_load_own_layers_and_train_as_trainer_does(
    tmp_path: Path,
    processes: LocalProcesses,
    family: str,
    changes: dict[str, Any],
    pipeline: dict[str, Any],
):
    made = partial(make, base=save(tmp_path / "base", family, **changes))
    plain = hf_trainer.run(0, made, tmp_path / "plain", None, {})
    told = processes.run(2, hf_trainer.run, made, tmp_path / "piped", PIPELINE | pipeline, {}, timeout=300)
    hf_trainer.assert_as_plain(tmp_path, told, plain)


@pytest.mark.exhaustive
def test_a_new_head_is_drawn_as_in_trainer(tmp_path: Path, processes: LocalProcesses):
    made = partial(make_scores, base=save(tmp_path / "base"))
    plain = hf_trainer.run(0, made, tmp_path / "plain", None, {})
    told = processes.run(2, hf_trainer.run, made, tmp_path / "piped", PIPELINE, {}, timeout=300)
    hf_trainer.assert_as_plain(tmp_path, told, plain)


@pytest.mark.exhaustive
def test_replicas_load_own_layers_and_continue_from_a_checkpoint(tmp_path: Path, processes: LocalProcesses):
    made = partial(make, base=save(tmp_path / "base"))
    saves = {"save_steps": 2, "save_strategy": "steps"}
    whole = processes.run(4, hf_trainer.run, made, tmp_path / "piped", PIPELINE, saves, timeout=300)
    resumed = str(tmp_path / "piped" / "checkpoint-2")
    again = processes.run(4, hf_trainer.run, made, tmp_path / "again", PIPELINE, {}, resumed, timeout=300)
    assert again[0].logged[-1]["loss"] == whole[0].logged[-1]["loss"]
    one, other = (hf_trainer.saved(tmp_path / side) for side in ("piped", "again"))
    assert distance(one, other) == 0


def test_tensors_of_other_shapes_are_drawn_as_of_the_whole_model(tmp_path: Path, processes: LocalProcesses):
    base = save(tmp_path / "base")
    sums, following = drawn(0, base, None)
    assert set(sums) == {"model.embed_tokens.weight", "lm_head.weight"}
    for found, next_number in processes.run(2, drawn, base, PIPELINE):
        assert found == sums
        assert next_number == following


def test_what_needs_the_whole_model_is_refused_by_name(tmp_path: Path, processes: LocalProcesses):
    for resized, reference, mismatched in processes.run(2, refused_later, save(tmp_path / "base")):
        assert "resize the table in one process, without own_stages" in resized
        assert "trainer.ref_model has the weights of some stages alone" in reference
        assert "size mismatch" in mismatched or "ignore_mismatched_sizes" in mismatched


def test_each_process_has_the_weights_of_its_stages_alone(tmp_path: Path, processes: LocalProcesses):
    base = save(tmp_path / "base", tied=True)
    every = names_with_values(0, base, PIPELINE)  # one process has all
    first, last = processes.run(2, names_with_values, base, {**PIPELINE, "split": [1, 3]}, timeout=300)
    assert first | last == every
    # The head has the embedding's weight, so the process of either has both.
    assert first & last == {"model.embed_tokens.weight", "lm_head.weight"}
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0"}


@pytest.mark.parametrize(
    ("asked", "pipeline", "error"),
    [
        (
            {"split": [1, 3]},
            {},
            "model.layers.1.self_attn.q_proj.weight is on the meta device, where it has no values (so are 9 of "
            "9 tensors). If it was loaded within penstock.own_stages, give that the options of this pipeline.",
        ),
        ({"split": "measured"}, {}, "a measured split needs the whole model"),
        ({"ranks": 3}, {}, "pipeline['ranks'] is 3, and there are 2 processes"),
        ({"shedule": "zb-v"}, {}, "pipeline has no option 'shedule' (did you mean 'schedule'?)"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_processes(
    tmp_path: Path, processes: LocalProcesses, asked: dict[str, Any], pipeline: dict[str, Any], error: str
):
    base = save(tmp_path / "base")
    given = {"ranks": 2, "microbatches": 2}
    for told in processes.run(2, fails, base, given | asked, given | pipeline, timeout=300):
        assert told.startswith(error)
