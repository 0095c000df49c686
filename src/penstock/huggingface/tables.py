"""Attention masks and rotary tables: made once for a microbatch, not once for a block.

The blocks of a model share one `Tables`. What belongs to a mask or to position ids lives as long as that tensor; what
only depends on a shape is kept for the last few shapes.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from penstock.huggingface.families import Attention

_KEPT = 32

Turns = tuple[Tensor, Tensor] | None
"""Cosines and sines, each of shape (batch or 1, sequence, rotated size of a head)."""


class Tables:
    """The masks and rotary tables of one model; several ranks' threads may ask at once.

    Args:
        config: the model's, which says how attention is computed and with it what a mask looks like.
        rotary: the library's module for rotary tables; None where the model has none.
        rotary_by_kind: whether it wants to be told the block's kind of attention.
    """

    def __init__(self, config: Any, rotary: Any, rotary_by_kind: bool) -> None:
        self._config = config
        self._rotary = rotary
        self._rotary_by_kind = rotary_by_kind
        self._kept = _Kept()
        # The rotary module of some rules writes to its own buffers.
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tables:
        """A copy of a block goes on sharing the tables."""
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(
        self, kind: Attention, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Turns]:
        """What a block's attention needs.

        Args:
            kind: of the block's attention.
            hidden: (batch, sequence, width).
            attention_mask: (batch, sequence), 1 for a token and 0 for padding; or None.
            position_ids: (batch or 1, sequence); None counts from 0.

        Returns:
            the mask as the library wants it (None where its fast causal path serves), position ids, rotary tables.
        """
        batch, sequence = hidden.shape[:2]
        place = (sequence, hidden.dtype, hidden.device)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            positions = position_ids
            if positions is None:
                positions = self._kept.get(
                    None, ("positions", *place), lambda: torch.arange(sequence, device=hidden.device)[None]
                )
            turns = self._kept.get(
                position_ids,
                ("turns", kind if self._rotary_by_kind else None, *place),
                lambda: self._turns(kind, hidden, positions),
            )
            if attention_mask is not None and attention_mask.dim() == 4:
                return attention_mask, positions, turns
            mask = self._kept.get(
                position_ids if attention_mask is None else attention_mask,
                ("mask", kind, batch, *place, None if position_ids is None else _Same(position_ids)),
                lambda: self._mask(kind, hidden, attention_mask, positions),
            )
            return mask, positions, turns

    def _turns(self, kind: Attention, hidden: Tensor, positions: Tensor) -> Turns:
        if self._rotary is None:
            return None
        made: Turns = self._rotary(hidden, positions, *([kind] if self._rotary_by_kind else []))
        return made

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
        # What shares the given mask's memory would keep the mask alive that it is to die with.
        if mask is not None and attention_mask is not None and mask.data_ptr() == attention_mask.data_ptr():
            return mask.clone()
        return mask


class _Same:
    """A tensor as part of a key: equal to itself alone, as long as nobody writes to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._hash = hash((id(tensor), _version(tensor)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self._hash != other._hash:
            return False
        mine = self._tensor()
        return mine is not None and mine is other._tensor()


class _Kept:
    """What was made, by key: for an owner as long as it lives and is not written to, else for the last few keys."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Hashable, Any] = OrderedDict()
        self._by_owner: dict[int, tuple[weakref.ref[Tensor], int, dict[Hashable, Any]]] = {}

    def get(self, owner: Tensor | None, key: Hashable, make: Callable[[], Any]) -> Any:
        if owner is None:
            if key not in self._by_key:
                self._by_key[key] = make()
                if len(self._by_key) > _KEPT:
                    self._by_key.popitem(last=False)
            self._by_key.move_to_end(key)
            return self._by_key[key]
        of_owner = self._of(owner)
        if key not in of_owner:
            of_owner[key] = make()
        return of_owner[key]

    def _of(self, owner: Tensor) -> dict[Hashable, Any]:
        number, version = id(owner), _version(owner)
        found = self._by_owner.get(number)
        if found is None or found[0]() is not owner or found[1] != version:
            # The tensor's number can only be another one's after this call, which comes first.
            gone = weakref.ref(owner, lambda _: self._by_owner.pop(number, None))
            found = self._by_owner[number] = (gone, version, {})
        return found[2]


def _version(tensor: Tensor) -> int:
    """How often the tensor was written to; inference tensors, which count nothing, do not live long."""
    return 0 if tensor.is_inference() else tensor._version
