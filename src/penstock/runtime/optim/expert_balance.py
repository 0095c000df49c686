"""Updates of modules from the tokens that each of their experts got, once in an optimizer step."""

from __future__ import annotations

from typing import Any

import torch

from penstock.runtime.pipeline import Pipeline


class ExpertBalance:
    """The modules of a pipeline that balance their experts by a rule of their own, not by a loss (2408.15664).

    Such a module has a method ``balance(load)``, and a buffer ``load`` that is in no state and of an integer dtype, to which
    its forward adds the tokens of each expert in training. After an update of the weights `balance` gets the sums over all
    microbatches, copies and replicas since the update before.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        # By the module, since one may have several places.
        found: dict[int, tuple[str, Any]] = {
            id(module): (f"{name}.{inner}", module)
            for stage in pipe.stage_modules()
            for name, layer in stage.named_layers()
            for inner, module in layer.named_modules()
            if "load" in module._buffers and callable(getattr(module, "balance", None))
        }
        self._modules = list(found.values())
        sizes = {name: module.load.numel() for name, module in self._modules}
        told = [sizes] if pipe.world is None else pipe.world.gather(sizes)
        self._slices: dict[str, slice] = {}
        self._size = 0
        for name, size in sorted({pair for each in told for pair in each.items()}):
            self._slices[name] = slice(self._size, self._size + size)
            self._size += size

    def update(self) -> None:
        """Balance all modules, and count from 0 again; every process of the run calls it."""
        if not self._slices:
            return
        total = torch.zeros(self._size, dtype=torch.float64, device="cpu")
        for name, module in self._modules:
            total[self._slices[name]] += module.load.cpu()
        total = self._pipe.sum_over_ranks(total, replicas=True)
        total /= self._pipe.tensor_ranks  # which have the same tokens
        for name, module in self._modules:
            module.balance(total[self._slices[name]].to(module.load.device))
        self.clear()

    def clear(self) -> None:
        """Count from 0 again."""
        for _, module in self._modules:
            module.load.zero_()
