"""The config section of the data."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.train.config.fields import Changed, Count, DataFormat, Fraction, Table, Text


@dataclass(frozen=True, kw_only=True)
class DataConfig(Table):
    """``[data]``: the training and the held-out data.

    Attributes:
        path: file or folder of text or of tokens (``.npy``), or a folder that ``datasets`` saved; empty for the text of
            Python's standard library.
        pattern: pattern of the names of a folder's files, at any depth.
        format: format of all files: ``text``, ``tokens`` or ``datasets``; ``auto`` takes it from names and content, and
            refuses what is none of these.
        text_field: column with the text, in a folder of ``datasets``.
        split: split to train on, in a folder of ``datasets`` with several.
        held_out: share of the *files* that are never trained on; of a single file or a folder of ``datasets``, share of the
            tokens, from the end.
        held_out_path: file or folder of held-out data, of any format of `path` and read with the same keys; nothing is then
            held out of the training data.
        sequence: length of a sample in tokens.
        changed: reaction of a resumed run to data that differs from its checkpoint's: ``refuse``, or ``accept`` it and
            report the differences.
    """

    path: Text = ""
    pattern: Text = "*"
    format: DataFormat = "auto"
    text_field: Text = "text"
    split: Text = "train"
    held_out: Fraction = 0.05
    held_out_path: Text = ""
    sequence: Count = 128
    changed: Changed = "refuse"
