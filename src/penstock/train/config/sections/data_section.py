"""The config section of the data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.train.config.fields import (
    Changed,
    Count,
    DataFormat,
    Flag,
    Fraction,
    Given,
    Overlong,
    Positive,
    RecordKind,
    Table,
    Text,
    TrainedPart,
    names_in,
)


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Table):
    """``[[data.sources]]``: one of several sources of training data; unset keys are those of ``[data]``.

    Attributes:
        path: file or folder.
        weight: share of the samples that come from here, relative to the weights of the others.
        pattern, format, record, split: as in ``[data]``.
        text_field, prompt_field, completion_field, messages_field: as in ``[data]``.
    """

    path: Given
    weight: Positive = 1.0
    pattern: Text | None = None
    format: DataFormat | None = None
    record: RecordKind | None = None
    split: Text | None = None
    text_field: Text | None = None
    prompt_field: Text | None = None
    completion_field: Text | None = None
    messages_field: Text | None = None


@dataclass(frozen=True, kw_only=True)
class DataConfig(Table):
    """``[data]``: the training and the held-out data.

    Attributes:
        path: file or folder of text, of tokens (``.npy``), or of records: ``.jsonl``, ``.parquet``, or a folder that
            ``datasets`` saved; empty for the text of Python's standard library.
        sources: several sources in place of `path`, each a ``[[data.sources]]`` with a path and a weight.
        pattern: pattern of the names of a folder's files, at any depth.
        format: format of all files: ``text``, ``tokens``, ``jsonl``, ``parquet`` or ``datasets``; ``auto`` takes it from
            names and content, and refuses what is none of these.
        record: kind of the records: ``text``, ``completion`` (a prompt and its completion) or ``chat``; ``auto`` takes it
            from the fields of the first one.
        text_field: field of a record with its text.
        prompt_field, completion_field: fields of a record with a prompt, which is not trained on, and its completion.
        messages_field: field of a record with the messages of a chat, ``[{"role": ..., "content": ...}, ...]``.
        split: split to train on, in a folder of ``datasets`` with several.
        train_on: trained tokens of completions and chats: ``answers`` (completions, all turns of the assistant), ``last``
            (the assistant's last turn) or ``all``.
        packing: put several records into one sample. Positions restart and attention ends at their boundaries, so the
            numbers are those of one record a sample, without its padding.
        overlong: treatment of records of more than `sequence` tokens: ``cut`` (a text continues in further samples, others
            lose their end) or ``refuse``.
        held_out: share of the *files* that are never trained on, or of the records; share of the tokens, from the end, of
            a single file of text or tokens.
        held_out_path: file or folder of held-out data, of any format of `path` and read with the same keys, or several with
            commas between; nothing is then held out of the training data.
        held_out_split: split of held-out data, in a folder of ``datasets`` with several: in `held_out_path`, or if that is
            empty, in the training data's folder.
        sequence: length of a sample in tokens.
        cache: folder of tokenized files, which later runs reuse; empty for ``.tokens`` in ``train.folder``.
        changed: reaction of a resumed run to data that differs from its checkpoint's: ``refuse``, or ``accept`` it and
            report the differences.
    """

    path: Text = ""
    sources: list[SourceConfig] = field(default_factory=list)
    pattern: Text = "*"
    format: DataFormat = "auto"
    record: RecordKind = "auto"
    text_field: Text = "text"
    prompt_field: Text = "prompt"
    completion_field: Text = "completion"
    messages_field: Text = "messages"
    split: Text = "train"
    train_on: TrainedPart = "answers"
    packing: Flag = False
    overlong: Overlong = "cut"
    held_out: Fraction = 0.05
    held_out_path: Text = ""
    held_out_split: Text = ""
    sequence: Count = 128
    cache: Text = ""
    changed: Changed = "refuse"

    def of_source(self, source: SourceConfig) -> DataConfig:
        """Return the section as if this source were its only one."""
        own = {name: value for name, value in vars(source).items() if value is not None}
        del own["weight"]
        return replace(self, sources=[], **own)

    def by_source(self) -> list[DataConfig]:
        """Return a section for each source, as if it were the only one."""
        return [self.of_source(source) for source in self.sources] or [self]

    @property
    def held_out_apart(self) -> bool:
        """True if the held-out data is in files of its own, or a split."""
        return bool(self.held_out_path or self.held_out_split)

    def of_held_out(self) -> list[DataConfig]:
        """Return a section for each path of held-out data that is apart, as if it were the training data."""
        if self.held_out_path:
            parts = [replace(self, path=path, sources=[]) for path in names_in(self.held_out_path)]
        else:
            parts = self.by_source() if self.held_out_split else []
        return [replace(part, split=self.held_out_split or part.split) for part in parts]
