"""Modules of the library as layers of a pipeline, with a forward that takes a stage's inputs.

A layer's parameters keep their names in the library's module. So the layer is a *twin* of that module: a shallow copy that
shares its parameters, buffers and children, of a subclass with another forward. The blocks share masks and rotary tables.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.huggingface.families import Attention
from penstock.stage.live import INTERNAL, live_copy

# Tables kept by shape; the least recently used one goes.
_MAX_ENTRIES = 32

RotaryTables = tuple[Tensor, Tensor] | None
"""Cosines and sines, each of shape (batch or 1, sequence, rotated size of a head)."""


class Tables:
    """Masks and rotary tables of one model, for the threads of several ranks; made once a microbatch, not once a block.

    The blocks of a model share one `Tables`. Entries for a mask or for position ids live as long as that tensor; entries
    that only depend on a shape are kept for the last few shapes.

    Args:
        rotary: module of the library that makes rotary tables; None if the model has none.
        rotary_by_kind: whether that module takes the block's kind of attention.
    """

    def __init__(self, config: Any, rotary: Any, rotary_by_kind: bool) -> None:
        self._config = config
        self._rotary = rotary
        self._rotary_by_kind = rotary_by_kind
        self._cache = _Cache()
        # The rotary module of some rules writes to its own buffers.
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tables:
        """Return self, as copies of a block share the tables."""
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(
        self, kind: Attention, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor | None, Tensor, RotaryTables]:
        """Return mask, position ids and rotary tables of a block's attention.

        Args:
            hidden: hidden state, (batch, sequence, width).
            attention_mask: (batch, sequence), 1 for a token and 0 for padding; or None.
            position_ids: (batch or 1, sequence); None counts from 0.

        Returns:
            The mask in the library's form (None if its fast causal path suffices), position ids, rotary tables.
        """
        batch, sequence = hidden.shape[:2]
        place = (sequence, hidden.dtype, hidden.device)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            positions = position_ids
            if positions is None:
                positions = self._cache.get(
                    None, ("positions", *place), lambda: torch.arange(sequence, device=hidden.device)[None]
                )
            rotary_tables = self._cache.get(
                position_ids,
                ("rotary", kind if self._rotary_by_kind else None, *place),
                lambda: self._rotary_tables(kind, hidden, positions),
            )
            if attention_mask is not None and attention_mask.dim() == 4:
                return attention_mask, positions, rotary_tables
            mask = self._cache.get(
                position_ids if attention_mask is None else attention_mask,
                ("mask", kind, batch, *place, None if position_ids is None else _Same(position_ids)),
                lambda: self._mask(kind, hidden, attention_mask, positions),
            )
            return mask, positions, rotary_tables

    def _rotary_tables(self, kind: Attention, hidden: Tensor, positions: Tensor) -> RotaryTables:
        if self._rotary is None:
            return None
        tables: RotaryTables = self._rotary(hidden, positions, *([kind] if self._rotary_by_kind else []))
        return tables

    def _mask(
        self, kind: Attention, hidden: Tensor, attention_mask: Tensor | None, positions: Tensor
    ) -> Tensor | None:
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        make = create_causal_mask if kind == "full_attention" else create_sliding_window_causal_mask
        mask: Tensor | None = make(
            config=self._config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=positions,
        )
        # The entry must not share the mask's memory: it would keep alive the mask that ends its life.
        if mask is not None and attention_mask is not None and mask.data_ptr() == attention_mask.data_ptr():
            return mask.clone()
        return mask


class _Same:
    """A tensor as part of a key: equal only to itself, until it is written to."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._hash = hash((id(tensor), _version(tensor)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self._hash != other._hash:
            return False
        tensor = self._tensor()
        return tensor is not None and tensor is other._tensor()


class _Cache:
    """Values by key: those with an owner until it dies or is written to, others for the last few keys."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Hashable, Any] = OrderedDict()
        self._by_owner: dict[int, tuple[weakref.ref[Tensor], int, dict[Hashable, Any]]] = {}

    def get(self, owner: Tensor | None, key: Hashable, make: Callable[[], Any]) -> Any:
        if owner is None:
            if key not in self._by_key:
                self._by_key[key] = make()
                if len(self._by_key) > _MAX_ENTRIES:
                    self._by_key.popitem(last=False)
            self._by_key.move_to_end(key)
            return self._by_key[key]
        of_owner = self._of(owner)
        if key not in of_owner:
            of_owner[key] = make()
        return of_owner[key]

    def _of(self, owner: Tensor) -> dict[Hashable, Any]:
        number, version = id(owner), _version(owner)
        entry = self._by_owner.get(number)
        if entry is None or entry[0]() is not owner or entry[1] != version:
            # The callback runs before another tensor can have this id.
            reference = weakref.ref(owner, lambda _: self._by_owner.pop(number, None))
            entry = self._by_owner[number] = (reference, version, {})
        return entry[2]


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written to; 0 for inference tensors, which do not count and live briefly."""
    return 0 if tensor.is_inference() else tensor._version


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
        embedded: Tensor = self.dropout(super().forward(input_ids))
        return embedded


class Positions(nn.Module):
    """A table of positions, added to the embedded tokens; then dropout. Shapes stay (batch, sequence, width)."""

    dropout: nn.Module

    def forward(self, hidden_states: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        added: Tensor = self.dropout(hidden_states + super().forward(position_ids))
        return added


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
