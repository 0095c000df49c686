"""Sources of a run's data: each found, tokenized, and divided into training and held-out samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataError
from penstock.train.config.sections.data_section import DataConfig
from penstock.train.data.corpus import Corpus, divide, open_corpus
from penstock.train.data.digest import Digestible, Joined
from penstock.train.data.file_formats import RECORDS, DataFiles, find_files
from penstock.train.data.records.record_rows import RecordSamples
from penstock.train.data.records.record_store import ChosenRecords, RecordStore
from penstock.train.data.samples.batches import Samples
from penstock.train.data.samples.mixture import Mixture, fractions_of
from penstock.train.data.samples.windows import WindowSamples
from penstock.train.data.token_cache import TokenCache
from penstock.train.data.tokenizer import Tokenizer

_KINDS = {"text": "texts", "completion": "completions", "chat": "chats"}
_SEEDS_APART = 1_000_003
_WASTEFUL = 0.8

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class OpenData:
    """Training and held-out samples of one source, or of several.

    Attributes:
        training, held_out: the samples.
        tokens: training and held-out tokens, for a digest.
        corpus: the training corpus, of a single source of text or tokens; else None.
        text: a file that is one text, not records or tokens; None if there is none.
        summary: sizes, for the first line of a run.
        notes: what was left out or cut, a sentence each.
    """

    training: Samples
    held_out: Samples
    tokens: tuple[Digestible, Digestible]
    corpus: Corpus | None
    text: Path | None
    summary: str
    notes: tuple[str, ...]


def open_sources(config: DataConfig, tokenizer: Tokenizer, cache: TokenCache, seed: int) -> OpenData:
    """Open the data of a run.

    Args:
        config: the ``[data]`` section.
        tokenizer: tokenizer of the model.
        cache: cache of tokenized files.
        seed: seed of the order of samples.

    Raises:
        DataError: if files cannot be read, are not understood, or hold too little.
        ConfigError: if a library is missing, or the data does not suit the model or the config.
    """
    if not config.sources:
        return _open(config, tokenizer, cache, seed)
    opened = [
        _open(config.of_source(source), tokenizer, cache, seed + _SEEDS_APART * n)
        for n, source in enumerate(config.sources)
    ]
    weights = [source.weight for source in config.sources]
    return OpenData(
        Mixture([source.training for source in opened], weights, seed),
        Mixture([source.held_out for source in opened], weights, seed),
        (Joined([source.tokens[0] for source in opened]), Joined([source.tokens[1] for source in opened])),
        None,
        next((source.text for source in opened if source.text is not None), None),
        f"{len(opened)} sources: "
        + "; ".join(
            f"{fraction:.1%} {source.summary}"
            for fraction, source in zip(fractions_of(weights), opened, strict=True)
        ),
        tuple(note for source in opened for note in source.notes),
    )


def open_whole(config: DataConfig, tokenizer: Tokenizer, cache: TokenCache) -> OpenData:
    """Open all of a single source for an evaluation, without dividing it; `training` and `held_out` are both all of it.

    Raises:
        DataError, ConfigError: as `open_sources`.
    """
    files = find_files(config)
    if files.format in RECORDS:
        store = _open_store(files, config, cache)
        # Padding costs an evaluation little; that it could be packed is no news.
        return _of_records(store, files, config, 0, [np.arange(len(store))], wasteful=0.0)
    corpus = open_corpus(files, tokenizer, cache)
    texts = [path for path in files.paths if path.suffix != ".npy"]
    size = sum(path.stat().st_size for path in texts) if len(texts) == len(files.paths) else None
    return _of_corpora((corpus, corpus), files, config, tokenizer, 0, size)


def _open(config: DataConfig, tokenizer: Tokenizer, cache: TokenCache, seed: int) -> OpenData:
    files = find_files(config)
    if files.format not in RECORDS:
        corpora = divide(open_corpus(files, tokenizer, cache), files, config.held_out)
        return _of_corpora(corpora, files, config, tokenizer, seed)
    store = _open_store(files, config, cache)
    # By content, so that equal records are never on both sides.
    if (different := len(np.unique(store.hashes))) < 2:
        raise DataError(
            f"{files.root} has {different} different record to train on; at least two are needed, one to train on and one "
            "held out"
        )
    count = min(max(1, round(config.held_out * len(store))), len(store) - 1)
    last = np.sort(store.hashes)[count - 1]
    apart = store.hashes <= last
    if apart.all():
        apart = store.hashes < last
    return _of_records(store, files, config, seed, [np.flatnonzero(~apart), np.flatnonzero(apart)])


def _of_corpora(
    corpora: tuple[Corpus, Corpus],
    files: DataFiles,
    config: DataConfig,
    tokenizer: Tokenizer,
    seed: int,
    size: int | None = None,
) -> OpenData:
    training, held_out = (
        WindowSamples(corpus, config.sequence, seed, role, size)
        for corpus, role in zip(corpora, ("training", "held-out"), strict=True)
    )
    return OpenData(
        training,
        held_out,
        corpora,
        corpora[0],
        next((path for path in files.paths if path.suffix != ".npy"), None),
        f"{len(corpora[0].documents)} training files with {len(corpora[0]):,} {tokenizer.unit}s",
        (),
    )


def _open_store(files: DataFiles, config: DataConfig, cache: TokenCache) -> RecordStore:
    if config.sequence < 2:
        raise ConfigError(
            "data.sequence must be at least 2 for records: the first token of one is never predicted"
        )
    store = cache.records(files, config)
    if not len(store):
        empty, untrained = (sum(getattr(f, key) for f in store.files) for key in ("empty", "untrained"))
        raise DataError(
            f"{files.root} has no record to train on: {empty:,} are empty, {untrained:,} have no trained token"
        )
    return store


def _of_records(
    store: RecordStore,
    files: DataFiles,
    config: DataConfig,
    seed: int,
    chosen: list[Numbers],
    wasteful: float = _WASTEFUL,
) -> OpenData:
    """Return the samples of some records for training, and of others for evaluations; of the same, if there is one list."""
    both = [RecordSamples(store, numbers, config.sequence, seed, config.packing) for numbers in chosen]
    notes = _notes(store, files, config, both, wasteful)
    training, held_out = both[0], both[-1]
    tokens = [ChosenRecords(store, numbers) for numbers in chosen]
    for samples, role in ((training, "training"), (held_out, "held-out")):
        if not samples.per_epoch:
            raise DataError(
                f"the {role} records of {files.root} have no trained token within data.sequence = {config.sequence} tokens; "
                "take a larger one"
            )
    return OpenData(
        training,
        held_out,
        (tokens[0], tokens[-1]),
        None,
        None,
        f"{len(chosen[0]):,} training {_KINDS[store.kind]} with {len(tokens[0]):,} tokens in {training.per_epoch:,} samples",
        notes,
    )


def _notes(
    store: RecordStore,
    files: DataFiles,
    config: DataConfig,
    parts: list[RecordSamples],
    wasteful: float,
) -> tuple[str, ...]:
    """Return sentences about records that are left out or cut; raise DataError if they may not be cut."""
    notes = []
    cut, sequence = sum(part.cut for part in parts), config.sequence
    if cut:
        longest = max(part.longest for part in parts)
        count = f"{cut:,} of {len(store):,} records in {files.root} have more than data.sequence = {sequence:,} tokens"
        if config.overlong == "refuse":
            raise DataError(
                f"{count}, the longest {longest:,}; take a larger data.sequence, or data.overlong=cut"
            )
        how = "continue in further samples" if store.kind == "text" else "lose their end"
        notes.append(f"{count} (the longest {longest:,}) and {how}")
    left_out = {
        "empty": sum(file.empty for file in store.files),
        "without a trained token": sum(file.untrained for file in store.files),
        "whose trained tokens are all beyond data.sequence": sum(part.unreached for part in parts),
    }
    if any(left_out.values()):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items() if count)
        notes.append(f"left out of {files.root}: records {reasons}")
    if not config.packing and parts[0].used < wasteful:
        notes.append(
            f"{1 - parts[0].used:.0%} of the samples' tokens are padding; data.packing=true puts several records "
            "into a sample"
        )
    return tuple(notes)
