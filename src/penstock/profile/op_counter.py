"""Counter of the operations that run under it: FLOPs of matrix products, bytes of everything else, bytes in use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from penstock.profile.layer_cost import DeviceWork, Unit

_aten = torch.ops.aten
_forward_flops: Callable[..., int] = sdpa_flop_count
_backward_flops: Callable[..., int] = sdpa_backward_flop_count
_CPU_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_GROUPED = {_aten._grouped_mm.default, _aten._scaled_grouped_mm.default}
"""Matrix products of experts, which torch's own counter leaves out."""


@dataclass
class _Sum:
    """Operations of one unit: FLOPs or bytes, the sum of each one's share over its width, and the number of calls."""

    amount: float = 0.0
    over_width: float = 0.0
    calls: int = 0

    def work(self, unit: Unit) -> DeviceWork:
        width = self.amount / self.over_width if self.over_width else 0.0
        return DeviceWork(unit, self.amount, width, self.calls)


class OpCounter(TorchDispatchMode):
    """Operations of everything that runs within the mode; `weights` are storages of the parameters, by `storage_key`."""

    def __init__(self, weights: Collection[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.weight_outputs = 0  # bytes that matrix products with a parameter put out
        # Bytes of each storage that these products take besides parameters.
        self.weight_inputs: dict[int, int] = {}
        # Most bytes that were in use at once of those made within the mode, without what it returned last.
        self.peak_bytes = 0
        # Every operation, with the shapes and dtypes of what it took and made.
        self.operations: list[object] = []
        self._weights = weights
        self._sums: dict[str, _Sum] = {}
        self._live: dict[int, Any] = {}
        self._bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _grouped(func, args, kwargs or {}) if func in _GROUPED else func(*args, **(kwargs or {}))
        if func.namespace != "aten":
            return out
        taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.operations.append((func, *((x.shape, x.dtype) for x in (*taken, *made))))
        storages = {storage_key(x) for x in taken}
        mutates = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if not mutates and made and all(storage_key(x) in storages for x in made):
            return out  # a view
        for tensor in made:
            self._watch(tensor, storages)
        self._count(func, args, kwargs or {}, out, taken, made)
        return out

    def _watch(self, tensor: Tensor, known: set[int]) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in known or key in self._live:
            return
        size = storage.nbytes()
        self._bytes += size
        # The weak reference tells when the last tensor on the storage is gone.
        self._live[key] = weakref.ref(storage, partial(self._gone, key, size))
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _gone(self, key: int, size: int, _: Any) -> None:
        self._bytes -= size
        self._live.pop(key, None)

    def _count(
        self, func: Any, args: Any, kwargs: Any, out: Any, taken: list[Tensor], made: list[Tensor]
    ) -> None:
        flops, unit = 0.0, "memory"
        if func is _CPU_ATTENTION:
            flops, unit = _forward_flops(*_attention_shapes(*args[:3])), "attention"
        elif func is _CPU_ATTENTION_BACKWARD:
            flops, unit = _backward_flops(args[0].shape, *_attention_shapes(*args[1:4])), "attention"
        elif func in _GROUPED:
            flops, unit = _grouped_flops(*args[:2]), "matmul"
        elif func._overloadpacket in flop_registry:
            flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            unit = "attention" if "attention" in str(func) else "matmul"
        moved = sum(x.numel() * x.element_size() for x in (*taken, *made))
        total = self._sums.setdefault(unit, _Sum())
        total.calls += 1
        if unit == "memory":
            total.amount += moved
            return
        total.amount += flops
        elements = sum(x.numel() for x in (*taken, *made)[:4])
        # Of a product of n x k and k x m: 3 / (1/n + 1/k + 1/m) is 3/2 of FLOPs over the elements of the three.
        total.over_width += elements / 1.5 if flops else 0.0
        if unit == "matmul" and any(storage_key(x) in self._weights for x in taken):
            self.weight_outputs += sum(x.numel() * x.element_size() for x in made)
            for tensor in taken:
                if (key := storage_key(tensor)) not in self._weights:
                    self.weight_inputs[key] = tensor.untyped_storage().nbytes()

    @property
    def flops(self) -> float:
        """FLOPs of matrix products and attention."""
        return sum(self._sums[unit].amount for unit in ("matmul", "attention") if unit in self._sums)

    @property
    def attention_flops(self) -> float:
        return self._sums["attention"].amount if "attention" in self._sums else 0.0

    def works(self) -> tuple[DeviceWork, ...]:
        """Return the operations, one entry for each unit that has any."""
        units: tuple[Unit, ...] = ("matmul", "attention", "memory")
        return tuple(
            self._sums[unit].work(unit) for unit in units if unit in self._sums and self._sums[unit].calls
        )

    def without(self, other: OpCounter) -> OpCounter:
        """Return the operations of this one that another, which did a part of the same, did not do."""
        rest = OpCounter(self._weights)
        for unit, each in self._sums.items():
            less = other._sums.get(unit, _Sum())
            rest._sums[unit] = _Sum(
                max(0.0, each.amount - less.amount),
                max(0.0, each.over_width - less.over_width),
                max(0, each.calls - less.calls),
            )
        return rest


def _grouped(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a product of groups; torch 2.13 computes it for fp32 matrices, and for 16-bit ones gives the shape alone."""
    wide = args[0].dtype
    if wide != torch.float32:
        return func(*args, **kwargs)
    narrow = [x.to(torch.bfloat16) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    return func(*narrow, **kwargs).to(wide)


def _grouped_flops(a: Tensor, b: Tensor) -> float:
    """Return the FLOPs of products of groups: of rows of a, of columns of b, of both, or of whole matrices of a stack."""
    groups = a.shape[0] if a.dim() > b.dim() else 1
    return 2.0 * a.numel() / groups * b.shape[-1]


def _attention_shapes(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[int, ...]]:
    """Return the shapes with as many heads as the query has; torch before 2.12 does not count shared key and value heads."""
    return [(x.shape[0], query.shape[1], *x.shape[2:]) for x in (query, key, value)]


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors on the same live storage share."""
    return int(tensor.untyped_storage()._cdata)
