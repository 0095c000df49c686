"""Expert parallelism as an axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor
from torch import distributed as dist

from penstock.base.errors import ConfigError
from penstock.parallel.axis import Axis, AxisOptions, Layers, Processes
from penstock.parallel.experts.exchange import ExpertExchange
from penstock.parallel.experts.layers import TensorRanks, divide_experts, find_experts, undo_division
from penstock.parallel.mesh import Mesh
from penstock.parallel.participant import Participant
from penstock.parallel.replicas.exchange import run_each
from penstock.parallel.replicas.reducer import GroupReducer
from penstock.parallel.replicas.replica_checks import bytes_of, digest
from penstock.stage.split_backward.intercepted import local_weight
from penstock.trace.expert_load import ProcessLoad

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Experts(Axis):
    """The processes that divide the experts of layers (ep)."""

    name = "ep"
    exchanges = True
    divides_parameters = True

    def __init__(self, processes: Processes, mesh: Mesh) -> None:
        super().__init__(processes, mesh)
        shape, ranks = mesh.shape, sorted(mesh.ranks[r] for r in mesh.shape.expert_ranks(mesh.rank))
        # torch caches what it knows of operations with the mesh of the first DTensor, also for a later, equal mesh, and
        # finds its communicator by the name.
        self._group = processes.named_group(f"penstock-ep-{'-'.join(map(str, ranks))}", ranks)
        self._replicas = processes.open_group(processes.lines(shape.expert_replicas))
        self._exchange = ExpertExchange(processes, mesh)

    @property
    def participants(self) -> Sequence[Participant]:
        return [self._exchange]

    def prepare(self, layers: Layers, options: AxisOptions) -> None:
        processes, exchange = self.processes, self._exchange
        mesh, same_tokens = self.mesh, None
        if mesh.shape.tp > 1:
            gather = partial(exchange.all_gather, group=mesh.group("tp"))
            same_tokens = TensorRanks(mesh.coordinate("tp"), mesh.shape.tp, gather)
        require_same_stacks(layers, processes)
        found = run_each(
            lambda: divide_experts(layers, self._device_mesh(), exchange, same_tokens, local_weight),
            partial(processes.gather, over="run"),
        )
        if any(found):
            return
        near = processes.gather(
            [
                ".".join(filter(None, (name, n)))
                for name, layer in layers
                for n, m in layer.named_modules()
                if hasattr(m, "num_experts") and any(p.dim() == 3 for p in m.parameters(recurse=False))
            ]
        )
        names = [name for each in near for name in each]
        raise ConfigError(
            f"the mesh ({mesh.shape}) divides experts, and no layer has a module with stacks of them: parameters of shape "
            "(num_experts, ...), and forward(hidden_states, top_k_index, top_k_weights); leave ep at 1"
            + (f". {names[0]} has num_experts, but other parameters or another forward" if names else "")
        )

    def _device_mesh(self) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self._group, self.processes.device_type, mesh_dim_names=("ep",))

    def open_reducer(self) -> GroupReducer | None:
        if dist.get_world_size(self._replicas) == 1:
            return None
        return self.processes.open_reducer(self._replicas)

    def sum_norms(self, squares: Mapping[str, Tensor], present: Tensor, over_replicas: bool) -> None:
        action = "add up over divided experts"
        for values in (squares["ep"], present):
            if over_replicas and dist.get_world_size(self._replicas) > 1:
                self.processes.sum_over_stage(values, action)
            else:
                self.processes.collectives.all_reduce(values, self._group, action)

    def record_kept(self) -> AbstractContextManager[None]:
        return self._exchange.record_kept()

    def load(self) -> ProcessLoad:
        """Return the work of this process's experts in the last step; waits for its GPU."""
        return self._exchange.load()

    def undo(self, layers: Layers) -> None:
        undo_division(layers)


def require_same_stacks(layers: Layers, processes: Processes) -> None:
    """Compare the experts of the processes of a stage, before each keeps a share of them."""
    stacks = {
        f"{name}.{inner}": digest(bytes_of(p.detach()))
        for name, module in find_experts(layers)
        for inner, p in module.named_parameters()
    }
    told = processes.gather(stacks, "stage", "compare their experts")
    others = processes.gather(
        next((name for name in stacks if any(t.get(name) != stacks[name] for t in told)), None)
    )
    if (odd := next((name for name in others if name is not None), None)) is not None:
        raise ConfigError(
            f"the experts {odd} differ between the processes that divide them; use the same seed or checkpoint on all"
        )
