"""The data of a run: a batch for every training step, and the samples that every evaluation reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.runtime.pipeline import Pipeline
from penstock.train.config.config import Config
from penstock.train.data.corpus import Corpus
from penstock.train.data.digest import DataDigest
from penstock.train.data.samples import Batch, Row, WindowSamples, batch_of, blank
from penstock.train.data.sources import open_sources
from penstock.train.data.text_tokens import Watch
from penstock.train.data.tokenizer import BYTES, ByteTokenizer
from penstock.train.model.trainable import TrainableModel, require_readable

_MAX_TOKENS = 1 << 30


@dataclass(frozen=True)
class RunData:
    """Training and held-out data of a run.

    Attributes:
        digest: a digest of the tokens of both.
    """

    training: WindowSamples
    held_out: tuple[Batch, ...]
    digest: DataDigest
    summary: str

    @property
    def per_epoch(self) -> int:
        """Number of training samples of an epoch."""
        return self.training.per_epoch


def open_data(config: Config, model: TrainableModel, watch: Watch = lambda name, share: None) -> RunData:
    """Find the files, tokenize them, read the held-out batches, and check that the first training batch can be read."""
    train = config.train
    sources = open_sources(config.data, model.tokenizer, train.seed, watch)
    require_readable(config, model, [] if sources.text is None else [sources.text])
    rows = sources.held_out.spread(train.eval_batches * train.batch)
    data = RunData(
        sources.training,
        tuple(batches_of(rows, model, train.batch)),
        DataDigest.of(sources.training.corpus, sources.held_out.corpus),
        sources.summary,
    )
    training_batch(data, config, model, 0)
    return data


def training_batch(data: RunData, config: Config, model: TrainableModel, number: int) -> Batch:
    """Return a training batch by its number, from 0 without a limit."""
    size = config.train.batch
    rows = data.training.read(np.arange(number * size, (number + 1) * size, dtype=np.int64))
    return _batch(rows, model)


def batches_of(rows: Iterable[Row], model: TrainableModel, size: int) -> Iterator[Batch]:
    """Yield batches of `size` rows; the last one is filled up with rows that count for nothing."""
    remaining = iter(rows)
    while some := list(islice(remaining, size)):
        some += [blank(len(some[0].tokens))] * (size - len(some))
        yield _batch(some, model)


def _batch(rows: Sequence[Row], model: TrainableModel) -> Batch:
    return batch_of(rows, model.vocabulary, target_is_input=model.target_is_input)


def bigram_baseline(data: RunData, model: TrainableModel) -> float | None:
    """Return the bits per byte of a bigram table of the training files on the held-out samples; None for other tokens."""
    if not isinstance(model.tokenizer, ByteTokenizer):
        return None
    x = torch.cat([batch.x for batch in data.held_out]).numpy()
    y = torch.cat([batch.y for batch in data.held_out]).numpy()
    if model.target_is_input:
        x, y = x[:, :-1], x[:, 1:]
    return bigram_bits(bigram_counts(data.training.corpus, BYTES), x, y)


def held_out_bits(pipe: Pipeline, data: RunData) -> float:
    """Return the model's mean bits per token on the held-out samples."""
    nats, tokens = total_loss(pipe, data.held_out)
    return nats / tokens / math.log(2)


def total_loss(pipe: Pipeline, batches: Iterable[Batch]) -> tuple[float, int]:
    """Return the loss of all tokens of some batches in nats, and their number, without losses that layers add to it.

    Each batch's loss is the mean over its tokens; every process of the pipeline calls this with the same batches.
    """
    nats, tokens = 0.0, 0
    for batch in batches:
        loss = mean_loss(pipe, pipe.evaluate(batch.x, batch.y).parts["loss"])
        nats, tokens = nats + loss * batch.valid, tokens + batch.valid
    return nats, tokens


def mean_loss(pipe: Pipeline, loss: Tensor | None) -> float:
    """Return the loss of a batch in nats per token, also where the pipeline adds the losses of its microbatches."""
    assert loss is not None, "the batch has a target"
    return float(loss) / (pipe.microbatches * pipe.replicas if pipe.reduction == "sum" else 1)


def steps_of(epochs: float, samples: int, data: RunData) -> int:
    """Return the number of steps that see every training sample `epochs` times, the last one maybe once more."""
    # Rounded first: 1.1 * 50 is a little more than 55, and would be 56 steps of one sample.
    steps = max(1, math.ceil(round(epochs * data.per_epoch / samples, 6)))
    if steps >= 2**31:
        raise ConfigError(
            f"train.epochs {epochs:g} of {data.per_epoch:,} samples take {steps:,} steps; a run has less than {2**31:,}"
        )
    return steps


def bigram_counts(corpus: Corpus, vocabulary: int) -> npt.NDArray[np.int64]:
    """Count the pairs of consecutive tokens, shape (vocabulary, vocabulary), over the first 2^30 tokens at most."""
    counts = np.zeros(vocabulary * vocabulary, np.int64)
    read = 0
    for tokens in corpus.chunks():
        counts += np.bincount(tokens[:-1] * vocabulary + tokens[1:], minlength=len(counts))
        read += len(tokens) - 1
        if read >= _MAX_TOKENS:
            break
    return counts.reshape(vocabulary, vocabulary)


def bigram_bits(counts: npt.NDArray[np.int64], x: npt.NDArray[np.int64], y: npt.NDArray[np.int64]) -> float:
    """Return the mean bits per token of y after x, by the counts with one added to each (Laplace)."""
    # Laplace: a pair that was never seen would cost infinitely many bits.
    smoothed = counts + 1
    surprise = np.log(smoothed.sum(axis=1))[x] - np.log(smoothed)[x, y]
    return float(surprise.mean() / math.log(2))
