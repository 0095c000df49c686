"""Sources of a run's data: each found, tokenized, and divided into training and held-out samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.base.counts import plural
from penstock.base.errors import ConfigError, DataError
from penstock.train.config.sections.data_section import DataConfig
from penstock.train.data.corpus import Corpus, divide, open_corpus
from penstock.train.data.digest import Digestible, Joined
from penstock.train.data.file_formats import RECORDS, DataFiles, find_files
from penstock.train.data.records.record_files import DATASET_FILES
from penstock.train.data.records.record_rows import RecordSamples
from penstock.train.data.records.record_store import ChosenRecords, RecordStore
from penstock.train.data.samples.batches import Samples
from penstock.train.data.samples.mixture import Mixture, fractions_of
from penstock.train.data.samples.windows import WindowSamples
from penstock.train.data.token_cache import TokenCache
from penstock.train.data.tokenizer import Tokenizer

_KINDS = {"text": "texts", "completion": "completions", "chat": "chats"}
# Between the seeds of two sources: so far apart that runs with seeds such as 0, 1, 2 share no order.
_SEEDS_APART = 1_000_003
_WASTEFUL = 0.8

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class OpenData:
    """Training and held-out samples of one source, or of several.

    Attributes:
        corpus: the training corpus, of a single source of text or tokens; else None.
    """

    training: Samples
    held_out: Samples
    tokens: tuple[Digestible, Digestible]
    corpus: Corpus | None
    text: Path | None
    summary: str
    notes: tuple[str, ...]


def open_sources(config: DataConfig, tokenizer: Tokenizer, cache: TokenCache, seed: int) -> OpenData:
    """Open the data of a run."""
    apart = config.of_held_out()
    open_one = _open_all if apart else _open
    opened = [
        open_one(one, tokenizer, cache, seed + _SEEDS_APART * n) for n, one in enumerate(config.by_source())
    ]
    data = _mixed(config, opened, seed) if config.sources else opened[0]
    if not apart:
        return data
    _require_apart(config, apart)
    held_out = [_open_all(one, tokenizer, cache, seed, "held-out") for one in apart]
    return _with_held_out(data, opened, held_out, seed)


def _mixed(config: DataConfig, opened: Sequence[OpenData], seed: int) -> OpenData:
    weights = [source.weight for source in config.sources]
    return OpenData(
        training=Mixture([source.training for source in opened], weights, seed),
        held_out=Mixture([source.held_out for source in opened], weights, seed),
        tokens=(
            Joined([source.tokens[0] for source in opened]),
            Joined([source.tokens[1] for source in opened]),
        ),
        corpus=None,
        text=next((source.text for source in opened if source.text is not None), None),
        summary=f"{len(opened)} sources: "
        + "; ".join(
            f"{fraction:.1%} {source.summary}"
            for fraction, source in zip(fractions_of(weights), opened, strict=True)
        ),
        notes=tuple(note for source in opened for note in source.notes),
    )


def _require_apart(config: DataConfig, apart: Sequence[DataConfig]) -> None:
    """Raise if held-out files are also trained on, or have no splits to choose from."""
    trained = {place for one in config.by_source() for place in _places(find_files(one), one.split)}
    key = "data.held_out_path" if config.held_out_path else "data.held_out_split"
    for one in apart:
        files = find_files(one, key)
        if config.held_out_split and not (files.root / DATASET_FILES[1]).is_file():
            raise DataError(
                f"data.held_out_split is {config.held_out_split!r}, and {files.root} is not a folder of several splits that "
                "`datasets` saved; set data.held_out_path to files of held-out data instead"
            )
        for path, split in _places(files, one.split):
            if (path, split) in trained:
                raise DataError(
                    f"{path}{f', split {split!r},' if split else ''} is both training and held-out data; let data.path and "
                    f"data.pattern (or data.split) leave it out, or set {key} to other data"
                )


def _places(files: DataFiles, split: str) -> set[tuple[Path, str]]:
    return {(path.resolve(), split if files.format == "datasets" else "") for path in files.paths}


def _with_held_out(
    data: OpenData, opened: Sequence[OpenData], held_out: Sequence[OpenData], seed: int
) -> OpenData:
    """Return training data with held-out data of its own."""
    rows = [part.training.per_epoch for part in held_out]
    # At least a part in 2,048 each, which a mixture can draw.
    weights = [max(count, sum(rows) / 2048) for count in rows]
    tokens = [part.tokens[0] for part in held_out]
    one = len(held_out) == 1
    texts = (part.text for part in (data, *held_out))
    return OpenData(
        training=data.training,
        held_out=held_out[0].training
        if one
        else Mixture([part.training for part in held_out], weights, seed),
        tokens=(data.tokens[0], tokens[0] if one else Joined(tokens)),
        corpus=data.corpus,
        text=next((text for text in texts if text is not None), None),
        summary=data.summary,
        notes=(*data.notes, *(note for part in held_out for note in part.notes), *_shared(opened, held_out)),
    )


def _shared(opened: Sequence[OpenData], held_out: Sequence[OpenData]) -> Iterator[str]:
    """Yield a sentence if held-out records are also trained on."""
    trained, apart = (
        [part.tokens[0].hashes for part in parts if isinstance(part.tokens[0], ChosenRecords)]
        for parts in (opened, held_out)
    )
    if trained and apart:
        hashes = np.concatenate(apart)
        if count := int(np.isin(hashes, np.concatenate(trained)).sum()):
            yield f"{count:,} of {len(hashes):,} held-out records are also training records"


def open_whole(config: DataConfig, tokenizer: Tokenizer, cache: TokenCache) -> OpenData:
    """Open all of a single source for an evaluation, without dividing it; `training` and `held_out` are both all of it."""
    return _open_all(config, tokenizer, cache, 0, "held-out")


def _open_all(
    config: DataConfig, tokenizer: Tokenizer, cache: TokenCache, seed: int, role: str = "training"
) -> OpenData:
    key = "data.held_out_path" if role == "held-out" and config.held_out_path else "data.path"
    files = find_files(config, key)
    if files.format in RECORDS:
        store = _open_store(files, config, cache)
        # Padding costs an evaluation little; that it could be packed is no news.
        wasteful = _WASTEFUL if role == "training" else 0.0
        return _of_records(store, files, config, seed, {role: np.arange(len(store))}, wasteful)
    corpus = open_corpus(files, tokenizer, cache)
    texts = [path for path in files.paths if path.suffix != ".npy"]
    size = sum(path.stat().st_size for path in texts) if len(texts) == len(files.paths) else None
    return _of_corpora({role: corpus}, files, config, tokenizer, seed, size)


def _open(config: DataConfig, tokenizer: Tokenizer, cache: TokenCache, seed: int) -> OpenData:
    files = find_files(config)
    if files.format not in RECORDS:
        corpora = divide(open_corpus(files, tokenizer, cache), files, config.held_out)
        by_role = dict(zip(("training", "held-out"), corpora, strict=True))
        return _of_corpora(by_role, files, config, tokenizer, seed)
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
    chosen = {"training": np.flatnonzero(~apart), "held-out": np.flatnonzero(apart)}
    return _of_records(store, files, config, seed, chosen)


def _of_corpora(
    corpora: dict[str, Corpus],
    files: DataFiles,
    config: DataConfig,
    tokenizer: Tokenizer,
    seed: int,
    size: int | None = None,
) -> OpenData:
    both = [WindowSamples(corpus, config.sequence, seed, role, size) for role, corpus in corpora.items()]
    training, held_out = (samples.corpus for samples in (both[0], both[-1]))
    return OpenData(
        training=both[0],
        held_out=both[-1],
        tokens=(training, held_out),
        corpus=training,
        text=next((path for path in files.paths if path.suffix != ".npy"), None),
        summary=f"{plural(len(training.documents), 'training file')} with {len(training):,} {tokenizer.unit}s",
        notes=(),
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
    chosen: dict[str, Numbers],
    wasteful: float = _WASTEFUL,
) -> OpenData:
    """Return the samples of some records for training, and of others for evaluations; of the same, if there is one role."""
    both = [
        RecordSamples(store, numbers, config.sequence, seed, config.packing) for numbers in chosen.values()
    ]
    notes = _notes(store, files, config, both, wasteful)
    training, held_out = both[0], both[-1]
    tokens = [ChosenRecords(store, numbers) for numbers in chosen.values()]
    for samples, role in zip(both, chosen, strict=True):
        if not samples.per_epoch:
            raise DataError(
                f"the {role} records of {files.root} have no trained token within data.sequence = {config.sequence} tokens; "
                "take a larger one"
            )
    return OpenData(
        training=training,
        held_out=held_out,
        tokens=(tokens[0], tokens[-1]),
        corpus=None,
        text=None,
        summary=f"{len(tokens[0].numbers):,} training {_KINDS[store.kind]} with {len(tokens[0]):,} tokens in "
        f"{training.per_epoch:,} samples",
        notes=notes,
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
