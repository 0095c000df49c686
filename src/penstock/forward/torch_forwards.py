"""Forwards of torch's own stacks of blocks, as `split` reads them: a loop over the blocks, and no faster path beside it."""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F

# Private, since a layer computes attention by another kernel where the mask is known to be causal, and torch finds it so.
from torch.nn.modules.transformer import _detect_is_causal_mask

from penstock.base.errors import PenstockError


def encoder_forward(
    self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None
) -> Any:
    """Return what ``nn.TransformerEncoder.forward`` does, without nested tensors."""
    if src_key_padding_mask is not None and self.use_nested_tensor:
        raise PenstockError(
            "nn.TransformerEncoder leaves padded tokens out in evaluation (nested tensors), which its blocks alone do not; "
            "make it with enable_nested_tensor=False"
        )
    if mask is not None:
        added = F._canonical_mask(mask, "mask", None, "", src.dtype, False)
        is_causal = _detect_is_causal_mask(added, is_causal)
    is_causal = bool(is_causal)
    for block in self.layers:
        src = block(src, src_mask=mask, is_causal=is_causal, src_key_padding_mask=src_key_padding_mask)
    if self.norm is not None:
        src = self.norm(src)
    return src
