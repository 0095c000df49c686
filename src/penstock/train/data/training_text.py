"""The text of a run: the batch of every training step, and what every evaluation reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.runtime.pipeline import Pipeline
from penstock.train.config.config import Config
from penstock.train.data.batches import check_tokens, held_out_positions, train_batch, windows
from penstock.train.data.bigram import bigram_bits, bigram_counts
from penstock.train.data.corpus import Corpus, open_corpora
from penstock.train.data.digest import DataDigest
from penstock.train.data.tokenizer import BYTES, Bytes
from penstock.train.model.trainable import TrainableModel, require_readable, words


@dataclass(frozen=True)
class Text:
    """The data of a run.

    Attributes:
        training: the training corpus.
        held_out: the held-out batches, (x, y) of shape (batch, sequence) each.
        digest: of both corpora.
    """

    training: Corpus
    held_out: tuple[tuple[Tensor, Tensor], ...]
    digest: DataDigest


def open_text(config: Config, language: TrainableModel) -> Text:
    """Find the data and read what every evaluation reads.

    Raises:
        DataError: it cannot be read, is too short, or has tokens outside the vocabulary.
    """
    data, size = config.data, config.train.batch
    training, held_out = open_corpora(data, words(language))
    require_readable(language, [d.path for d in (*training.documents, *held_out.documents)])
    check_tokens(training, "training", data.sequence)
    check_tokens(held_out, "held-out", data.sequence)
    places = held_out_positions(len(held_out), config.train.eval_batches * size, data.sequence)
    x, y = windows(held_out, places, data.sequence, language.vocabulary)
    if language.target_is_input:
        y = x
    batches = tuple(zip(torch.split(x, size), torch.split(y, size), strict=True))
    text = Text(training, batches, DataDigest.of(training, held_out))
    batch_of(text, config, language, 0)
    return text


def batch_of(text: Text, config: Config, language: TrainableModel, step: int) -> tuple[Tensor, Tensor]:
    """The training batch of a step, x and y of shape (batch, sequence)."""
    x, y = train_batch(
        text.training,
        seed=config.train.seed,
        step=step,
        batch=config.train.batch,
        sequence=config.data.sequence,
        vocabulary=language.vocabulary,
    )
    return x, x if language.target_is_input else y


def bigram_of(text: Text, language: TrainableModel) -> float | None:
    """Bits a byte of a bigram table of the training files on the held-out samples; None for other tokens."""
    if not isinstance(language.codec, Bytes):
        return None
    x = torch.cat([x for x, _ in text.held_out]).numpy()
    y = torch.cat([y for _, y in text.held_out]).numpy()
    if language.target_is_input:
        x, y = x[:, :-1], x[:, 1:]
    return bigram_bits(bigram_counts(text.training, BYTES), x, y)


def held_out_bits(pipe: Pipeline, text: Text) -> float:
    """The model's mean bits a token on the held-out samples."""
    losses = [pipe.evaluate(x, y).loss for x, y in text.held_out]
    return sum(float(loss) for loss in losses if loss is not None) / len(losses) / math.log(2)
