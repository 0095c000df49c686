"""Attention of models of transformers whose samples are divided over processes (context parallelism).

While a block runs on a part of each sample, its config names an implementation of attention that gathers the keys and values
of the whole sample, and then is the model's own: torch's (sdpa), or the one in the model's file (eager), which knows sinks
and caps of its logits. Masks have this part's queries and all keys.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from penstock.base.errors import ConfigError
from penstock.parallel.context.attention import Division, current_division

_NAME = "penstock_context"
_KNOWN = ("sdpa", "eager")
_thread = threading.local()


@contextmanager
def attention_of_parts(block: nn.Module) -> Iterator[None]:
    """Return a context in which a block's attention is over whole samples; nothing changes where they are not divided."""
    if current_division() is None:
        yield
        return
    every: list[Any] = [m.config for m in block.modules() if hasattr(m, "config")]
    configs = {id(config): config for config in every}.values()
    before: list[tuple[Any, str]] = [
        (c, c._attn_implementation) for c in configs if hasattr(c, "_attn_implementation")
    ]
    _register()
    _thread.own = before[0][1] if before else "sdpa"
    try:
        for config, _ in before:
            config._attn_implementation_internal = _NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


def require_known_attention(config: Any) -> None:
    """Require an implementation of attention whose keys and values can be gathered."""
    name = config._attn_implementation
    if name not in _KNOWN:
        raise ConfigError(
            f"the model's attention is {name}, and with cp it must be one of {', '.join(_KNOWN)}; load the model with "
            "attn_implementation='sdpa', or leave cp at 1"
        )


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Any:
    division = current_division()
    assert division is not None, "set in its context alone"
    own = _own_attention(module)
    if _thread.own == "eager":  # it may have numbers for each head, which groups of heads would not find
        return own(module, query, *division.keys_and_values(key, value), attention_mask, **options)
    if attention_mask is None:
        return own(module, query, key, value, None, **options)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = own(module, q, k, v, mask, **options)[0]
        return out

    return division.attend(query, key, value, attention_mask, attention, 2), None


def _own_attention(module: nn.Module) -> Callable[..., Any]:
    """Return the function that a module's attention calls where samples are whole."""
    if _thread.own == "sdpa":
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        function: Callable[..., Any] = sdpa_attention_forward
        return function
    for kind in type(module).__mro__:
        found: Callable[..., Any] | None = getattr(
            sys.modules.get(kind.__module__), "eager_attention_forward", None
        )
        if found is not None:
            return found
    raise ConfigError(
        f"{type(module).__name__} has no eager_attention_forward in its file, so its tokens cannot be divided; leave cp at 1"
    )


class ArgumentCutter:
    """Cuts arguments of blocks, which are of whole samples, to the tokens of this process.

    Args:
        length: tokens of the whole samples.
    """

    def __init__(self, division: Division, length: int) -> None:
        self._division, self._length = division, length
        self._cut: dict[int, tuple[Tensor, Tensor]] = {}  # blocks share their arguments

    def __call__(self, values: Any) -> Any:
        """Return arguments with this part's rows of masks, and its tokens of positions and rotary tables."""
        return _pytree.tree_map_only(Tensor, self._of_part, values)

    def _of_part(self, whole: Tensor) -> Tensor:
        if id(whole) not in self._cut:
            self._cut[id(whole)] = whole, self._of_whole(whole)
        return self._cut[id(whole)][1]

    def _of_whole(self, whole: Tensor) -> Tensor:
        # The last dimension of tables is their width, and of masks the keys.
        dims = [whole.dim() - 2] if whole.dim() > 2 else [*range(whole.dim())][::-1]
        dim = next((d for d in dims if whole.shape[d] == self._length), None)
        if dim is None:
            return whole
        self._division.asked = True
        return self._division.part.cut(whole, dim)
