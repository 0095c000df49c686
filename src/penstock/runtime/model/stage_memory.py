"""Ranges of layers that fit into the free memory of the GPU that holds a stage, by a profile of the layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from penstock.profile.closed_form import DTYPE_BYTES
from penstock.profile.layer_cost import LayerCost
from penstock.profile.model_profile import Profile
from penstock.schedule.memory import peak
from penstock.schedule.schedule import Schedule
from penstock.stage.compute.recompute import Policy

_USABLE = 0.9
"""Share of the free memory for what is counted. The rest is for messages, buckets and work spaces, and for what the
allocator rounds up."""

_STATES = 4
"""Values for each trained parameter: itself, its gradient, and two of Adam, the optimizer that most people will take. It is
made after the pipeline, so it is not known here."""


@dataclass(frozen=True)
class StageMemory:
    """Memory that each stage may take, and what its layers will take.

    Attributes:
        limits: bytes for each stage; infinite where nothing limits it.
        in_flight: microbatches whose activations each stage holds at its peak; of ranks with several stages, the mean.
        itemsize: bytes of a trained parameter.
        recompute: whether layers keep only their inputs.
    """

    limits: tuple[float, ...]
    in_flight: tuple[float, ...]
    itemsize: int
    recompute: bool

    def stops(self, parts: Sequence[Sequence[LayerCost]]) -> list[list[int]]:
        """Return for each stage, and each part that it may begin with, the end of the longest range that fits.

        Parts are layers, or several that stay together. The range is empty if the first part alone does not fit.
        """
        weights = [sum(self._states(cost) for cost in part) for part in parts]
        kept = [sum(self._kept(cost) for cost in part) for part in parts]
        passing = [max(self._passing(cost) for cost in part) for part in parts]

        def stop(start: int, limit: float, in_flight: float) -> int:
            held, most = 0.0, 0.0
            for n in range(start, len(parts)):
                held, most = held + weights[n] + in_flight * kept[n], max(most, passing[n])
                if held + most > limit:
                    return n
            return len(parts)

        each = zip(self.limits, self.in_flight, strict=True)
        return [[stop(start, *stage) for start in range(len(parts))] for stage in each]

    def _states(self, cost: LayerCost) -> float:
        return _STATES * self.itemsize * cost.parameters + cost.frozen_bytes

    def _kept(self, cost: LayerCost) -> float:
        return cost.input_bytes if self.recompute and cost.recomputes else cost.saved_bytes

    def _passing(self, cost: LayerCost) -> float:
        """Return the bytes of the layer while one microbatch is in its backward."""
        return cost.transient_bytes + cost.saved_bytes - self._kept(cost)


def make_stage_memory(
    profile: Profile, schedule: Schedule, recompute: Policy, free: Mapping[int, float]
) -> StageMemory:
    """Return the memory of each stage of a schedule.

    Args:
        recompute: policy of the stages. Of a number above 1, all layers count as kept.
        free: bytes that are free for each rank; ranks that nothing limits are missing.
    """
    chunks, placement = peak(schedule).tolist(), schedule.placement
    # A rank's stages share its memory equally, and so do the activations that it holds at its peak.
    shares = [len(stages) for stages in placement.stages_of]
    return StageMemory(
        limits=tuple(
            min(_USABLE * free[rank] / shares[rank] if rank in free else float("inf") for rank in holders)
            for holders in placement.holders
        ),
        in_flight=tuple(
            max(chunks[rank] / shares[rank] for rank in holders) for holders in placement.holders
        ),
        itemsize=DTYPE_BYTES["fp32" if profile.autocast else profile.dtype],
        recompute=recompute in ("full", "auto", 1),
    )


def free_memory(devices: Sequence[torch.device], modules: Iterable[nn.Module]) -> dict[int, float]:
    """Return the bytes that are free for each rank whose device is a GPU, which ranks may share.

    Args:
        devices: device of each rank in their order.
        modules: modules of the model. What they have on a GPU now counts as free: they are moved, or are counted again.
    """
    tensors = {id(p): p for module in modules for p in module.parameters() if p.is_cuda}
    used = Counter[torch.device]()
    for tensor in tensors.values():
        used[tensor.device] += tensor.nbytes
    ranks, free = Counter(devices), {}
    for rank, device in enumerate(devices):
        if device.type == "cuda":
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            free[rank] = (torch.cuda.mem_get_info(device)[0] + unused + used[device]) / ranks[device]
    return free
