"""The config section of the data."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.train.config.fields import Changed, Count, Fraction, Table, Text


@dataclass(frozen=True)
class DataConfig(Table):
    """``[data]``: the training and the held-out text.

    Attributes:
        path: file or folder of text, or of tokens in ``.npy`` files; empty for the text of Python's standard library.
        pattern: pattern of the names of a folder's files, at any depth.
        held_out: share of the *files* that are never trained on; share of the tokens, from the end, of a single file.
        sequence: length of a sample in tokens.
        changed: reaction of a resumed run to data that differs from its checkpoint's: ``refuse``, or ``accept`` it and
            report the differences.
    """

    path: Text = ""
    pattern: Text = "*"
    held_out: Fraction = 0.05
    sequence: Count = 128
    changed: Changed = "refuse"
