from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.base.errors import ConfigError, DataError
from penstock.stage.compute.causal_lm_loss import causal_lm_loss
from penstock.stage.module import StageModule
from penstock.train.config.config import Config, from_mapping
from penstock.train.data.run_data import open_data, training_batch
from penstock.train.data.tokenizer import ByteTokenizer, HFTokenizer, NumberTokenizer
from penstock.train.model.llama import next_token_loss
from penstock.train.model.sampling import sample_run
from penstock.train.model.trainable import build_model, default_text_note
from tests.support import hf_folders, hf_models
from tests.support.tiny_run import WORDS, text_folder, tiny
from tests.support.trainer import quietly, run

ONE = {"steps": 1}


def of(**model: object) -> Config:
    return from_mapping({"model": model, "data": {"sequence": 12}})


def test_penstocks_own_model_predicts_the_tokens_that_follow():
    language = build_model(from_mapping({}))
    assert (language.vocabulary, language.tokenizer) == (256, ByteTokenizer())
    assert language.loss_fn is next_token_loss
    assert not language.target_is_input
    assert build_model(of(vocabulary=300)).tokenizer == NumberTokenizer(300)


def test_a_folder_brings_its_vocabulary_and_tokenizer(tmp_path: Path):
    language = build_model(of(path=str(hf_folders.folder(tmp_path, "llama", tied=False))))
    assert (language.vocabulary, language.target_is_input) == (hf_models.VOCABULARY, True)
    assert language.loss_fn is causal_lm_loss
    assert isinstance(language.tokenizer, HFTokenizer)
    assert (language.tokenizer.end, language.tokenizer.start) == (hf_folders.END, hf_folders.END)
    assert language.tokenizer.decode(language.tokenizer.encode("def return")) == "def return"


def test_a_size_above_all_models_is_refused_before_anything_is_built(tmp_path: Path):
    folder = hf_folders.folder(tmp_path, "llama", tied=False)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 10**12}))
    for model in ({"path": str(folder)}, {"config": str(path)}):
        with pytest.raises(DataError, match=r"has vocab_size 1,000,000,000,000; .* at most 1,000,000,000"):
            build_model(of(**model))


def test_the_target_is_the_text_in_the_tokenizers_tokens(tmp_path: Path):
    config = tiny(
        tmp_path, text_folder(tmp_path), model={"path": str(hf_folders.folder(tmp_path, "llama", tied=False))}
    )
    language = build_model(config)
    text = open_data(config, language)
    batch = training_batch(text, config, language, 0)
    x = batch.x
    assert torch.equal(x, batch.y)
    assert x.shape == (8, 12)
    everything = " ".join(" ".join(p.read_text().split()) for p in sorted(Path(config.data.path).iterdir()))
    for row in x.tolist():
        words = [word for word in language.tokenizer.decode(row).split() if word in WORDS]
        assert " ".join(words) in everything
    files = [d.path.read_text().split() for d in text.training.corpus.documents]
    assert len(text.training.corpus) == sum(map(len, files)) + len(files)


def test_a_config_starts_from_weights_of_the_seed(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    folder = hf_folders.folder(tmp_path, "gpt2", tied=False)
    (folder / "model.safetensors").unlink()

    def config_of(seed: int) -> Config:
        model, train = {"config": str(folder / "config.json")}, {"seed": seed, "steps": 1}
        return tiny(tmp_path, tmp_path / "text", model=model, train=train, optim={"lr": 1e-30})

    def weights_of(seed: int) -> dict[str, torch.Tensor]:
        stage = StageModule(build_model(config_of(seed)).layers)
        return {name: parameter.detach() for name, parameter in stage.whole_model_parameters()}

    text_folder(tmp_path)
    quietly(config_of(1))
    saved = load_file(tmp_path / "runs" / "tiny" / "model.safetensors")
    again, other = weights_of(1), weights_of(2)
    assert all(torch.allclose(saved[name], again[name], rtol=0, atol=1e-20) for name in saved)
    assert not torch.equal(saved["transformer.wte.weight"], other["transformer.wte.weight"])
    assert (tmp_path / "runs" / "tiny" / "tokenizer.json").is_file()
    AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "tiny")


def test_a_run_is_sampled_from_its_own_folder(tmp_path: Path):
    folder = hf_folders.folder(tmp_path, "llama", tied=False)
    config = tiny(tmp_path, text_folder(tmp_path), model={"path": str(folder)})
    outcome = quietly(config)
    assert outcome.unit == "token"
    assert outcome.bigram_bits is None
    assert 0 < outcome.held_out_bits < 2 * math.log2(hf_models.VOCABULARY)
    shutil.rmtree(folder)
    assert sample_run(Path(outcome.folder)) == outcome.sample


def test_tokens_come_from_numpy_files_where_there_is_no_tokenizer(tmp_path: Path):
    folder = hf_folders.folder(tmp_path, "llama", tied=False, tokenizer=False)
    np.save(tmp_path / "tokens.npy", np.arange(500, dtype=np.uint16) % hf_models.VOCABULARY)
    config = tiny(
        tmp_path, tmp_path / "tokens.npy", model={"path": str(folder)}, sample={"prompt": "3 4"}, train=ONE
    )
    outcome = quietly(config)
    assert outcome.sample.startswith("3 4")


def test_text_without_a_tokenizer_is_refused_before_anything_is_written(tmp_path: Path):
    folder = hf_folders.folder(tmp_path, "llama", tied=False, tokenizer=False)
    config = tiny(tmp_path, text_folder(tmp_path), model={"path": str(folder)})
    with pytest.raises(DataError, match=r"file_\d.txt is text, but there is no tokenizer.json beside"):
        quietly(config)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_config_without_tokenizer_trains_on_the_bytes_of_the_default_text(tmp_path: Path):
    net = hf_models.model("llama", vocab_size=300)
    net.config.save_pretrained(tmp_path / "net")
    path = str(tmp_path / "net" / "config.json")
    text = text_folder(tmp_path)
    with pytest.raises(DataError, match=r"there is no tokenizer.json beside"):
        quietly(tiny(tmp_path, text, model={"config": path}))
    config = tiny(tmp_path, text, model={"config": path}, data={"path": ""}, train={"steps": 1})
    assert "so the tokens are the bytes of the source of Python's" in str(
        default_text_note(config, build_model(config))
    )
    outcome = quietly(config)
    assert outcome.unit == "token"
    assert all(int(token) < 300 for token in outcome.sample.split())


def test_bytes_serve_a_model_of_256_tokens_without_a_tokenizer(tmp_path: Path):
    net = hf_models.model("llama", vocab_size=256)
    net.save_pretrained(tmp_path / "bytes")
    config = tiny(tmp_path, text_folder(tmp_path), model={"path": str(tmp_path / "bytes")}, train=ONE)
    outcome = quietly(config)
    assert outcome.unit == "byte"
    assert 0 < outcome.bigram_bits < 8


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_sequence_longer_than_the_models_positions_is_refused(tmp_path: Path, family: str):
    folder = hf_folders.folder(tmp_path, family, tied=False)
    said = r"data.sequence must be at most 64, the positions .*, got 65; take data.sequence = 64"
    with pytest.raises(ConfigError, match=said):
        build_model(from_mapping({"model": {"path": str(folder)}, "data": {"sequence": 65}}))
    with pytest.raises(ConfigError, match=r"data.sequence must be at least 2"):
        build_model(from_mapping({"model": {"path": str(folder)}, "data": {"sequence": 1}}))


def test_what_is_no_model_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no local folder 'gpt2'; Penstock downloads nothing"):
        build_model(of(path="gpt2"))
    with pytest.raises(ConfigError, match="there is no file"):
        build_model(of(config=str(tmp_path / "config.json")))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ConfigError, match="transformers has no causal language model of type 't5'"):
        build_model(of(config=str(tmp_path / "config.json")))
    folder = hf_folders.folder(tmp_path, "llama", tied=False)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match="cannot read the weights"):
        build_model(of(path=str(folder)))


@pytest.mark.parametrize("precision", ["bf16", "bf16-weights"])
def test_weights_have_the_dtype_of_the_precision_whatever_the_folder_has(tmp_path: Path, precision: str):
    """An update of fine-tuning is smaller than the last bit of a bf16 weight, so only main weights may be updated."""
    from transformers import AutoModelForCausalLM

    folder = hf_folders.folder(tmp_path, "llama", tied=True)
    AutoModelForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    tables = {"model": {"path": str(folder)}, "data": {"sequence": 12}, "runtime": {"precision": precision}}
    expected = torch.bfloat16 if precision == "bf16-weights" else torch.float32
    for layer in build_model(from_mapping(tables)).layers:
        for name, p in layer.build().named_parameters():
            assert p.dtype == expected
            if f"{layer.name}.{name}" in stored:
                assert torch.equal(p.detach().bfloat16(), stored[f"{layer.name}.{name}"])


def test_the_first_lines_of_fine_tuning_say_its_defaults(tmp_path: Path):
    folder = hf_folders.folder(tmp_path, "llama", tied=False)
    runtime, train = {"precision": "bf16-weights", "recompute": "full"}, {"steps": 1, "accumulate": 2}
    said = run(
        tiny(tmp_path, text_folder(tmp_path), model={"path": str(folder)}, runtime=runtime, train=train)
    )
    assert said[1:3] == [
        "2 batches of 8 samples per step, 16 in all; precision bf16-weights (bf16 weights; fp32 gradients and main "
        "weights); recompute full",
        "fine-tuning with AdamW: learning rate 2e-05 (warm-up over 30% of the steps, then cosine to 5% of it), weight decay "
        "0.01 (none for norms, biases and embeddings); set [optim] for others",
    ]
    saved = load_file(tmp_path / "runs" / "tiny" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
