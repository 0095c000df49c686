"""Modules of the library as layers of a pipeline, with a forward that takes a stage's inputs.

A layer's parameters keep their names in the library's module. So the layer is a *twin* of that module: a shallow copy that
shares its parameters, buffers and children, of a subclass with another forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.huggingface.families import Attention
from penstock.huggingface.tables import Tables
from penstock.stage.live import INTERNAL, live_copy


def twin(module: nn.Module, kind: type[nn.Module], **extra: Any) -> nn.Module:
    """Return a module with the parameters, buffers, children, mode and attributes of another.

    Args:
        kind: one of the classes below, whose forward calls the module's.
        extra: attributes of the twin; modules among them become its children.
    """
    plain = [name for name in vars(module) if name not in INTERNAL]
    copied: nn.Module = live_copy(module, plain, (kind,))
    copied.__dict__.update({n: v for n, v in vars(module).items() if n in INTERNAL and n != "training"})
    copied._modules = dict(module._modules)
    for name, value in extra.items():
        setattr(copied, name, value)
    return copied


class Tokens(nn.Module):
    """A token table and the dropout after it: int64 (batch, sequence) → (batch, sequence, width)."""

    dropout: nn.Module

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = super().forward(input_ids)
        return self.dropout(embedded)  # type: ignore[no-any-return]


class Positions(nn.Module):
    """A table of positions, added to the embedded tokens; then dropout. Shapes stay (batch, sequence, width)."""

    dropout: nn.Module

    def forward(self, hidden_states: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        added: Tensor = hidden_states + super().forward(position_ids)
        return self.dropout(added)  # type: ignore[no-any-return]


class BlockLayer(nn.Module):
    """A block: (batch, sequence, width) → the same shape.

    Its forward also takes attention_mask, (batch, sequence), 1 for a token and 0 for padding; and position_ids, int64
    (batch or 1, sequence), by default counted from 0.
    """

    tables: Tables
    attention_kind: Attention

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        mask, positions, rotary_tables = self.tables.of(
            self.attention_kind, hidden_states, attention_mask, position_ids
        )
        rotary = {} if rotary_tables is None else {"position_embeddings": rotary_tables}
        output: Tensor = super().forward(
            hidden_states, attention_mask=mask, position_ids=positions, use_cache=False, **rotary
        )
        return output


class CappedHead(nn.Module):
    """A head whose logits, (batch, sequence, vocabulary), are soft-capped to ±`cap` (2408.00118, section 2)."""

    cap: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = super().forward(hidden_states)
        return torch.tanh(logits / self.cap) * self.cap
