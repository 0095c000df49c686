"""Corpora of files, opened as a run opens them."""

from __future__ import annotations

from penstock.train.config.sections import DataConfig
from penstock.train.data.corpus import Corpus, divide, open_corpus
from penstock.train.data.file_formats import find_files
from penstock.train.data.tokenizer import ByteTokenizer, Tokenizer


def open_corpora(config: DataConfig, tokenizer: Tokenizer | None = None) -> tuple[Corpus, Corpus]:
    """The training and the held-out corpus, of bytes unless there is a tokenizer."""
    tokenizer = tokenizer or ByteTokenizer()
    files = find_files(config)
    return divide(open_corpus(files, config, tokenizer, lambda name, share: None), files, config.held_out)
