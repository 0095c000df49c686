"""A model as the trainer needs it: layers, loss and tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.base.errors import ConfigError, DataError
from penstock.base.model_variants import require_positions
from penstock.huggingface.model_folder import CONFIG
from penstock.stage.compute.causal_lm_loss import (
    causal_lm_loss,
    mean_over_targets,
    valid_targets,
    valid_tokens,
)
from penstock.stage.layers import Layer
from penstock.train.config.config import Config
from penstock.train.data.tokenizer import (
    BYTES,
    TOKENIZER_FILE,
    ByteTokenizer,
    NumberTokenizer,
    Tokenizer,
    read_tokenizer,
)
from penstock.train.model import llama
from penstock.train.model.precision import weights_dtype, with_weights


@dataclass(frozen=True, kw_only=True)
class TrainableModel:
    """A language model with its loss and tokenizer.

    Attributes:
        layers: layers from tokens, int64 (batch, sequence), to logits, (batch, sequence, vocabulary).
        target_is_input: True if the target is the input itself, which `loss_fn` shifts (the labels of Hugging Face); False
            if it is the tokens that follow.
        source: folder or ``config.json`` of a Hugging Face model; None for Penstock's own.
        family: name of the plan for tensor parallelism; see `penstock.parallel.tensor.matrices.PLANS`.
    """

    layers: list[Layer]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    vocabulary: int
    tokenizer: Tokenizer
    valid_tokens: Callable[[Any], int]
    masked_loss_fn: Callable[[Tensor, Tensor], Tensor]
    target_is_input: bool = False
    source: Path | None = None
    family: str = "penstock"


def build_model(config: Config, run: Path | None = None) -> TrainableModel:
    """Return the model of a config; its layers are built later."""
    model, dtype = config.model, weights_dtype(config.runtime.precision)
    if not (model.path or model.config):
        layers, tokenizer = llama.layers(model, config.train.seed), _plain_tokenizer(model.vocabulary)
        return TrainableModel(
            layers=with_weights(layers, dtype),
            loss_fn=llama.next_token_loss,
            vocabulary=model.vocabulary,
            tokenizer=tokenizer,
            valid_tokens=valid_targets,
            masked_loss_fn=mean_over_targets,
        )
    # Here, since it loads torch's compiler, which takes a second.
    from penstock.huggingface.from_transformers import from_transformers, local_folder, read_config

    folder = run or model.path
    source = local_folder(folder) if folder else Path(model.config).expanduser()
    if not os.path.exists(source):
        raise ConfigError(f"there is no file {source}; model.config must name a Hugging Face config.json")
    hf_config = read_config(source / CONFIG if source.is_dir() else source)
    longest = getattr(hf_config, "max_position_embeddings", None)
    if longest is not None:
        require_positions(config.data.sequence, longest, "data.sequence")
    layers = from_transformers(source, seed=config.train.seed)
    if config.data.sequence < 2:
        raise ConfigError("data.sequence must be at least 2: the first token of a sample is never predicted")
    return TrainableModel(
        layers=with_weights(layers, dtype),
        loss_fn=causal_lm_loss,
        vocabulary=hf_config.vocab_size,
        tokenizer=_tokenizer_of(hf_config, source if source.is_dir() else source.parent),
        valid_tokens=valid_tokens,
        masked_loss_fn=causal_lm_loss,
        target_is_input=True,
        source=source,
        family=hf_config.model_type,
    )


def _tokenizer_of(config: Any, folder: Path) -> Tokenizer:
    end = config.eos_token_id
    if isinstance(end, list):
        end = end[0] if end else None
    if (folder / TOKENIZER_FILE).is_file():
        return read_tokenizer(folder / TOKENIZER_FILE, config.vocab_size, end, config.bos_token_id)
    return _plain_tokenizer(config.vocab_size, end)


def _plain_tokenizer(vocabulary: int, end: int | None = None) -> Tokenizer:
    return ByteTokenizer() if vocabulary == BYTES else NumberTokenizer(vocabulary, end)


def require_readable(config: Config, model: TrainableModel, paths: list[Path]) -> None:
    """Raise DataError if there are text files but no tokenizer for them.

    A Hugging Face config without tokenizer trains on the bytes of the default text, but not on the bytes of your own text.
    """
    texts = [path for path in paths if path.suffix != ".npy"]
    if not texts or model.source is None or not isinstance(model.tokenizer, NumberTokenizer):
        return
    if config.data.path or config.model.path or model.vocabulary < BYTES:
        raise DataError(
            f"{texts[0]} is text, but there is no {TOKENIZER_FILE} beside {model.source}; data.path must then name .npy "
            "files of tokens"
        )


def default_text_note(config: Config, model: TrainableModel) -> str | None:
    """Return a sentence for a run of a Hugging Face config that trains on the bytes of the default text; else None."""
    if config.data.path or model.source is None or not isinstance(model.tokenizer, NumberTokenizer):
        return None
    return (
        f"there is no {TOKENIZER_FILE} beside {model.source}, so the tokens are the bytes of the source of Python's "
        "standard library; set data.path to train on your own"
    )
