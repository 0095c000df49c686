"""Layers sharded by torch's ``fully_shard`` (FSDP2), gathered and reduced once a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress
from typing import Any

from penstock.base.errors import PenstockError
from penstock.parallel.participant import Participant, Step, StepFailure
from penstock.stage.compute.stage import Stage


class FullyShardedLayers(Participant):
    """(Name in the whole model, layer) pairs of one rank's layers that ``fully_shard`` sharded, by stage.

    In a step, weights stay gathered until a stage's last backward, which reduces; between steps torch's defaults hold.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        self.layers: dict[int, list[tuple[str, Any]]] = {}
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # loaded if a layer uses it
        named = [(stage.index, pair) for stage in stages for pair in stage.module.named_layers()]
        for stage, (name, outer) in named if fsdp is not None else ():
            for pair in outer.named_modules(prefix=name):
                # Classes of torch's `replicate` have other names, and whole weights.
                if isinstance(pair[1], fsdp.FSDPModule) and type(pair[1]).__name__.startswith("FSDP"):
                    self.layers.setdefault(stage, []).append(pair)
        self._all = [layer for pairs in self.layers.values() for _, layer in pairs]

    def begin(self, step: Step) -> None:
        self._set(in_step=True)

    def last_backward(self, stage: Stage, backward: Callable[[], None]) -> Callable[[], None]:
        """Have torch reduce a stage's gradients in its last backward, and drop the weights."""
        return partial(self._reduce, stage.index, backward) if stage.index in self.layers else backward

    def finish(self) -> None:
        self._set(in_step=False)

    def abandon(self, failure: StepFailure) -> None:
        """Drop gathered weights, and gradients that were not reduced."""
        for layer in self._all:
            for record in _with_sums(layer):
                record.unsharded_accumulated_grad = record._unsharded_param.grad = None
            # Torch is still inside the call that failed. The outermost layer, if it has run, resets that in newer versions.
            if layer._get_fsdp_state()._is_root and hasattr(layer, "reset_iter_state"):
                layer.reset_iter_state()
        self._set(in_step=False)

    def _set(self, in_step: bool) -> None:
        """Drop all gathered weights, and begin or end a step or an evaluation."""
        for layer in self._all:
            layer.set_reshard_after_forward(not in_step, recurse=False)
            layer.reshard()  # after that, as otherwise a layer that failed in its forward keeps its weights
            # Not even after the last backward: its prefetches would gather some layers again after a recomputation.
            layer.set_reshard_after_backward(not in_step, recurse=False)
            layer.set_requires_gradient_sync(not in_step, recurse=False)

    def _reduce(self, stage: int, backward: Callable[[], None]) -> None:
        for _, layer in self.layers[stage]:
            layer.set_requires_gradient_sync(True, recurse=False)
        backward()
        for name, layer in self.layers[stage]:
            if _with_sums(layer):
                raise PenstockError(
                    f"the last backward of stage {stage} in the step did not reach {name}, so that fully_shard did not "
                    "reduce its gradients; give the last microbatch samples that use it"
                )
            layer.reshard()


def _with_sums(layer: Any) -> list[Any]:
    """Return torch's private records of parameters with gradients that it has not reduced; it shows them nowhere else."""
    state = layer._get_fsdp_state()
    groups = vars(state).get("_fsdp_param_groups") or [state._fsdp_param_group]  # torch 2.10 has one
    records = [record for group in groups if group is not None for record in group.fsdp_params]
    sums = [(r.unsharded_accumulated_grad, getattr(r, "_unsharded_param", None)) for r in records]
    unreduced = [whole is not None or getattr(param, "grad", None) is not None for whole, param in sums]
    return list(compress(records, unreduced))
