"""What a run trains: the layers of a language model, its loss, and how its tokens are read and written."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.errors import ConfigError, DataError
from penstock.huggingface.loss import causal_lm_loss
from penstock.huggingface.model_folder import CONFIG
from penstock.stage.layers import Layer
from penstock.train.config.config import Config
from penstock.train.data.tokenizer import BYTES, TOKENIZER, Bytes, Codec, HFTokenizer, Numbers, words_of
from penstock.train.model import llama


@dataclass(frozen=True)
class TrainableModel:
    """A model as the trainer needs it.

    Attributes:
        layers: from tokens, int64 (batch, sequence), to logits, (batch, sequence, vocabulary).
        loss_fn: ``loss_fn(logits, target)``, the mean in nats.
        vocabulary: number of tokens.
        codec: tokens to text and back.
        target_is_input: the target is the input itself and `loss_fn` shifts it (labels as Hugging Face means them);
            else the target is the tokens that follow.
        longest: most tokens a sequence may have; None for any number.
        source: the folder or the ``config.json`` of a Hugging Face model; None for Penstock's own.
        family: how tensor parallelism cuts it; see `penstock.parallel.tensor.plan.PLANS`.
    """

    layers: list[Layer]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    vocabulary: int
    codec: Codec
    target_is_input: bool = False
    longest: int | None = None
    source: Path | None = None
    family: str = "penstock"

    @property
    def reads_text(self) -> bool:
        """Whether a text file can be trained on."""
        return self.source is None or not isinstance(self.codec, Numbers)


def language_of(config: Config, run: Path | None = None) -> TrainableModel:
    """The model of a config.

    Args:
        config: checked.
        run: the folder of a finished run, whose weights to take where they lie in Hugging Face's layout.

    Raises:
        ConfigError: no such folder or file, a family that is not known, a sequence of more tokens than the model has
            positions; nothing has been built.
        DataError: a folder whose files do not fit together.
    """
    model = config.model
    if not (model.path or model.config):
        codec: Codec = Bytes() if model.vocabulary == BYTES else Numbers(model.vocabulary)
        return TrainableModel(
            llama.layers(model, config.train.seed), llama.next_token_loss, model.vocabulary, codec
        )
    # Brings torch's compiler along, which takes a second to load.
    from penstock.huggingface.from_transformers import from_transformers, local_folder, read_config

    source = local_folder(run or model.path) if run or model.path else Path(model.config).expanduser()
    if not os.path.exists(source):
        raise ConfigError(f"there is no file {source}; model.config must name a Hugging Face config.json")
    theirs = read_config(source / CONFIG if source.is_dir() else source)
    language = TrainableModel(
        from_transformers(source, seed=config.train.seed),
        causal_lm_loss,
        theirs.vocab_size,
        _codec_of(theirs, source if source.is_dir() else source.parent),
        target_is_input=True,
        longest=getattr(theirs, "max_position_embeddings", None),
        source=source,
        family=theirs.model_type,
    )
    if language.longest is not None and config.data.sequence > language.longest:
        raise ConfigError(
            f"data.sequence is {config.data.sequence}, but the model has {language.longest} positions "
            "(max_position_embeddings in its config.json)"
        )
    if config.data.sequence < 2:
        raise ConfigError("data.sequence must be at least 2: the first token of a sample is never predicted")
    return language


def _codec_of(config: Any, folder: Path) -> Codec:
    end = config.eos_token_id
    if isinstance(end, list):
        end = end[0] if end else None
    if (folder / TOKENIZER).is_file():
        return words_of(folder / TOKENIZER, config.vocab_size, end, config.bos_token_id)
    return Bytes() if config.vocab_size == BYTES else Numbers(config.vocab_size, end)


def words(language: TrainableModel) -> HFTokenizer | None:
    """The tokenizer that text files go through; None where their bytes are the tokens."""
    return language.codec if isinstance(language.codec, HFTokenizer) else None


def require_readable(language: TrainableModel, paths: list[Path]) -> None:
    """Refuse text files where there is nothing to read them with.

    Raises:
        DataError: naming the first.
    """
    texts = [path for path in paths if path.suffix != ".npy"]
    if texts and not language.reads_text:
        raise DataError(
            f"{texts[0]} is text, but there is no {TOKENIZER} beside {language.source}; data.path must then name .npy "
            "files of tokens"
        )
