"""The data of a run: files found, tokenized, and divided into training and held-out samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from penstock.base.counts import plural
from penstock.base.errors import DataError
from penstock.train.config.sections import DataConfig
from penstock.train.data.corpus import divide, open_corpus
from penstock.train.data.file_formats import DataFiles, find_files
from penstock.train.data.samples import WindowSamples
from penstock.train.data.text_tokens import Watch
from penstock.train.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenData:
    """Training and held-out samples.

    Attributes:
        text: a file that is text, not tokens; None if there is none.
    """

    training: WindowSamples
    held_out: WindowSamples
    text: Path | None
    summary: str


def open_sources(config: DataConfig, tokenizer: Tokenizer, seed: int, watch: Watch) -> OpenData:
    """Open the data of a run."""
    files = find_files(config)
    training, texts = open_corpus(files, config, tokenizer, watch), _texts(files)
    if config.held_out_path:
        apart = find_files(replace(config, path=config.held_out_path), "data.held_out_path")
        _require_apart(files, apart)
        held_out = open_corpus(apart, config, tokenizer, watch)
        texts += _texts(apart)
    else:
        training, held_out = divide(training, files, config.held_out)
    return OpenData(
        WindowSamples(training, config.sequence, seed, "training"),
        WindowSamples(held_out, config.sequence, seed, "held-out"),
        texts[0] if texts else None,
        f"{plural(len(training.documents), 'training file')} with {len(training):,} {tokenizer.unit}s",
    )


def open_whole(config: DataConfig, tokenizer: Tokenizer, watch: Watch) -> OpenData:
    """Open all of the data for an evaluation, without dividing it; `training` and `held_out` are both all of it."""
    files = find_files(config)
    corpus, texts = open_corpus(files, config, tokenizer, watch), _texts(files)
    known = files.format != "datasets" and len(texts) == len(files.paths)
    size = sum(path.stat().st_size for path in texts) if known else None
    samples = WindowSamples(corpus, config.sequence, 0, "held-out", size)
    return OpenData(samples, samples, texts[0] if texts else None, "")


def _texts(files: DataFiles) -> list[Path]:
    return [path for path in files.paths if path.suffix != ".npy"]


def _require_apart(files: DataFiles, held_out: DataFiles) -> None:
    """Raise if a held-out file is also trained on."""
    trained = {path.resolve() for path in files.paths}
    for path in held_out.paths:
        if path.resolve() in trained:
            raise DataError(
                f"{path} is both training and held-out data; let data.path and data.pattern leave it out, or set "
                "data.held_out_path to other data"
            )
