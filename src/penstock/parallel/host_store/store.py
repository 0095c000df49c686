"""The store of a process: where its weights are while no op reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from penstock.base.errors import ConfigError
from penstock.parallel.host_store.memory import DiskMemory, HostMemory
from penstock.parallel.host_store.participant import StoreParticipant
from penstock.parallel.host_store.stored import StoredParameter
from penstock.parallel.host_store.update import PartedUpdate
from penstock.parallel.mesh import MeshShape
from penstock.schedule.residency import Sharding
from penstock.stage.compute.runner import Settings
from penstock.stage.devices import place_of
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule


class Store:
    """Weights of all stages of a process.

    Args:
        over_stages: names of weights that several stages have; they are at home all the time, and ops read them there.

    Attributes:
        participants: its parts in the steps of this process's ranks.
    """

    def __init__(self, sharding: Sharding, over_stages: Collection[str]) -> None:
        self._kind = sharding.store
        self._over_stages = frozenset(over_stages)
        self._memory: HostMemory | None = DiskMemory() if sharding.store == "disk" else None
        self._device = torch.device("cpu")
        self._by_id: dict[int, StoredParameter] = {}
        self._by_name: dict[str, StoredParameter] = {}  # of the first rank that holds them
        self.participants: dict[int, StoreParticipant] = {}
        self._update = PartedUpdate()

    def build(self, layers: Sequence[Layer], device: torch.device | None, seed: int) -> StageModule:
        """Build a stage, and move its weights home: at no time are those of two stages in memory, if layers are functions.

        Raises:
            ConfigError: if a weight cannot be moved, or there is no room for it.
        """
        module = StageModule(layers, None, seed)
        named = list(module.whole_model_parameters())
        self._device = device or place_of(p for _, p in named) or torch.device("cpu")
        if self._memory is None:
            self._memory = HostMemory(pinned=self._device.type == "cuda")
        memory = self._memory
        if self._device.type != "cpu":
            # So that a stage's device is known though its weights are elsewhere.
            module.register_buffer("on_device", torch.empty(0), persistent=False)
            for buffer in module.buffers():
                buffer.data = buffer.data.to(self._device)
        new = [(name, p) for name, p in named if id(p) not in self._by_id]
        for name, parameter in new:
            _require_plain(name, parameter)
            if name in self._over_stages and self._device.type != "cpu":
                raise ConfigError(
                    f"{name} is a weight of several stages, which a store does not bring to a GPU; keep its layers on one "
                    "stage (split=...), or leave the store out"
                )
        if memory.on_disk:
            size = sum(p.nbytes * (2 if p.requires_grad else 1) for _, p in new)
            memory.require(size, f"the weights and gradients of {', '.join(module.names)}")
        self._by_id |= {id(p): StoredParameter(name, p, memory, self._device) for name, p in new}
        self._require_gradients()
        self._by_name |= {name: self._by_id[id(p)] for name, p in named}
        return module

    def add_rank(self, rank: int, modules: Mapping[int, StageModule]) -> None:
        """Make the part of the store in the steps of a rank, which all its executors share.

        Raises:
            ConfigError: if there is no room for the gradients of stages that another rank of this process holds, too.
        """
        stored = {}
        for s, module in modules.items():
            own = [(n, p) for n, p in module.whole_model_parameters() if n not in self._over_stages]
            # A weight that two layers of the stage have comes once.
            stored[s] = list(dict.fromkeys(self._of_rank(n, p) for n, p in own))
        self._require_gradients()
        self.participants[rank] = StoreParticipant(modules, stored, self._device)

    def _of_rank(self, name: str, parameter: nn.Parameter) -> StoredParameter:
        """Return what is stored of a parameter, which shares its home with the first rank that holds its stage."""
        if id(parameter) not in self._by_id:
            assert self._memory is not None, "stages were built"
            home = self._by_name[name].home
            self._by_id[id(parameter)] = StoredParameter(name, parameter, self._memory, self._device, home)
        return self._by_id[id(parameter)]

    def prepare_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Have room for gradients, which may have another dtype now, and for what an optimizer will keep for each weight.

        Raises:
            ConfigError: if there is none.
        """
        assert self._memory is not None, "stages were built"
        self._require_gradients()
        self._update.prepare(optimizer, self._memory)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer update the weights at home."""
        self._update.step(optimizer)

    def _require_gradients(self) -> None:
        assert self._memory is not None, "stages were built"
        if not self._memory.on_disk:
            self._memory.require(sum(each.gradient_bytes for each in self._by_id.values()), "gradients")
        for each in self._by_id.values():
            each.allocate()


def open_store(
    sharding: Sharding,
    mesh: MeshShape | None,
    settings: Settings,
    compile: str,
    over_stages: Collection[str],
) -> Store | None:
    """Return the store of a process that has one.

    Raises:
        ConfigError: if the store cannot be combined with another option; names it.
    """
    if not sharding.stored:
        return None
    which = f"store={sharding.store!r}"
    if mesh is not None and mesh.ranks > mesh.pp:
        raise ConfigError(
            f"{which} holds the weights of one pipeline, and the mesh is {mesh}; use MeshShape(pp=...) alone, or "
            "ParallelOptions(shard='weights') to divide weights over replicas"
        )
    if compile != "none":
        raise ConfigError(
            f"{which} gives weights other memory within a step, which compile={compile!r} was not proved with; use "
            "compile='none'"
        )
    if settings.offload:
        raise ConfigError(
            f"{which} was not proved with offload=True, which copies to host memory on the same links; use recompute"
        )
    return Store(sharding, over_stages)


def _require_plain(name: str, parameter: nn.Parameter) -> None:
    """Raise unless a parameter is a plain dense tensor with values."""
    reason = None
    if type(parameter) is not nn.Parameter:
        reason = f"is a {type(parameter).__name__}"
    elif parameter.layout is not torch.strided:
        reason = "is sparse"
    elif parameter.is_meta:
        reason = "is on the meta device, and would get its values later"
    if reason is not None:
        raise ConfigError(
            f"{name} {reason}, which a store does not keep; give layers as functions that build them with their values, as "
            "plain tensors, or leave the store out"
        )
