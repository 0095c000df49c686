"""The library's modules as layers of a pipeline: the same object inside, a forward that takes what a stage is given.

A layer's parameters keep the names that they have in the library's module, so the layer is a *twin* of that module: a
shallow copy that shares its parameters, buffers and children, of a class with another forward in front.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from penstock.huggingface.families import Attention
from penstock.huggingface.tables import Tables


def twin(module: nn.Module, kind: type[nn.Module], **extra: Any) -> nn.Module:
    """A module with the parameters, buffers and children of another.

    Args:
        module: the library's, or the user's; it stays as it is.
        kind: one of the classes below, whose forward calls the module's own.
        extra: attributes of the twin; modules among them become its children, too.
    """
    found = copy.copy(module)
    found._modules = dict(module._modules)
    found.__class__ = _class(kind, type(module))
    for name, value in extra.items():
        setattr(found, name, value)
    return found


_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _class(kind: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    if (kind, base) not in _CLASSES:
        _CLASSES[kind, base] = type(
            base.__name__, (kind, base), {"__module__": kind.__module__, "__doc__": kind.__doc__}
        )
    return _CLASSES[kind, base]


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

    Its forward's further arguments: attention_mask, (batch, sequence), 1 for a token and 0 for padding; position_ids,
    int64 (batch or 1, sequence), counting from 0 where there are none.
    """

    tables: Tables
    attention_kind: Attention

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        mask, positions, turns = self.tables.of(
            self.attention_kind, hidden_states, attention_mask, position_ids
        )
        rotary = {} if turns is None else {"position_embeddings": turns}
        output: Tensor = super().forward(
            hidden_states, attention_mask=mask, position_ids=positions, use_cache=False, **rotary
        )
        return output


class CappedHead(nn.Module):
    """A head whose logits, (batch, sequence, vocabulary), are bent to stay within ±`cap` (2408.00118, section 2)."""

    cap: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = super().forward(hidden_states)
        return torch.tanh(logits / self.cap) * self.cap
