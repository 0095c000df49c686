"""The data of a run: a batch for every training step, and the samples that every evaluation reads."""

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
from penstock.train.data.tokenizer import BYTES, ByteTokenizer, HFTokenizer
from penstock.train.model.trainable import TrainableModel, require_readable


@dataclass(frozen=True)
class RunData:
    """Training and held-out data of a run.

    Attributes:
        training: the training corpus.
        held_out: the held-out batches, (x, y) of shape (batch, sequence) each.
        digest: a digest of both corpora.
    """

    training: Corpus
    held_out: tuple[tuple[Tensor, Tensor], ...]
    digest: DataDigest


def open_data(config: Config, model: TrainableModel) -> RunData:
    """Find the files, read the held-out batches, and check that the first training batch can be read.

    Raises:
        DataError: if the data cannot be read, is too short, or has tokens outside the vocabulary.
    """
    sequence, size = config.data.sequence, config.train.batch
    tokenizer = model.tokenizer if isinstance(model.tokenizer, HFTokenizer) else None
    training, held_out = open_corpora(config.data, tokenizer)
    require_readable(config, model, [d.path for d in (*training.documents, *held_out.documents)])
    check_tokens(training, "training", sequence)
    check_tokens(held_out, "held-out", sequence)
    positions = held_out_positions(len(held_out), config.train.eval_batches * size, sequence)
    x, y = windows(held_out, positions, sequence, model.vocabulary)
    if model.target_is_input:
        y = x
    batches = tuple(zip(torch.split(x, size), torch.split(y, size), strict=True))
    data = RunData(training, batches, DataDigest.of(training, held_out))
    training_batch(data, config, model, 0)
    return data


def training_batch(data: RunData, config: Config, model: TrainableModel, step: int) -> tuple[Tensor, Tensor]:
    """Return the training batch of a step: x and y of shape (batch, sequence)."""
    x, y = train_batch(
        data.training,
        seed=config.train.seed,
        step=step,
        batch=config.train.batch,
        sequence=config.data.sequence,
        vocabulary=model.vocabulary,
    )
    return x, x if model.target_is_input else y


def bigram_baseline(data: RunData, model: TrainableModel) -> float | None:
    """Return the bits a byte of a bigram table of the training files on the held-out samples; None for other tokens."""
    if not isinstance(model.tokenizer, ByteTokenizer):
        return None
    x = torch.cat([x for x, _ in data.held_out]).numpy()
    y = torch.cat([y for _, y in data.held_out]).numpy()
    if model.target_is_input:
        x, y = x[:, :-1], x[:, 1:]
    return bigram_bits(bigram_counts(data.training, BYTES), x, y)


def held_out_bits(pipe: Pipeline, data: RunData) -> float:
    """Return the model's mean bits a token on the held-out samples."""
    losses = [pipe.evaluate(x, y).loss for x, y in data.held_out]
    return sum(float(loss) for loss in losses if loss is not None) / len(losses) / math.log(2)
