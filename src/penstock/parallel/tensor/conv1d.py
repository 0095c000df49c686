"""Tensor parallelism for layers with a weight of shape (in, out), such as ``Conv1D`` of Hugging Face's GPT-2.

torch's styles support ``nn.Linear`` and ``nn.Embedding``. This module shards transposed weights in the same ways, and also
a matrix that computes query, key and value side by side: each rank has its heads' columns of all three. Such a parameter
has torch's strided placement, so that its full tensor is exactly the matrix of one process.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_columns(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a module by columns: each rank computes its slice of the outputs from the full inputs."""
    from torch.distributed.tensor import Shard

    _distribute(module, mesh, {"weight": Shard(1), "bias": Shard(0)}, Shard(-1))


def shard_rows(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a module by rows: each rank takes its slice of the inputs; outputs are summed over the ranks."""
    from torch.distributed.tensor import Replicate, Shard

    _distribute(module, mesh, {"weight": Shard(0), "bias": Replicate()}, Replicate())


def shard_side_by_side(module: nn.Module, mesh: DeviceMesh, parts: int) -> None:
    """Shard each of `parts` matrices that lie side by side by columns."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    weight, bias = (_StridedShard(dim, split_factor=parts) for dim in (1, 0))
    _distribute(module, mesh, {"weight": weight, "bias": bias}, Shard(-1))
    module.forward = partial(_forward, module)


def _distribute(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Any], outputs: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

    def shard_parameters(_: str, owner: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(owner.named_parameters(recurse=False)):
            tensor = distribute_tensor(parameter, mesh, [placements[key]])
            owner.register_parameter(key, nn.Parameter(tensor, requires_grad=parameter.requires_grad))

    inputs = Shard(-1) if placements["weight"].is_shard(0) else Replicate()

    def prepare_input(_: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        return (DTensor.from_local(args[0], mesh, [inputs], run_check=False),)

    def prepare_output(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=[outputs]).to_local()

    distribute_module(module, mesh, shard_parameters, prepare_input, prepare_output)


def _forward(module: nn.Module, x: Any) -> Any:
    """Multiply by this rank's columns of all parts, which for the product are one matrix sharded by columns."""
    from torch.distributed.tensor import DTensor, Shard

    def side_by_side(parameter: Any, dim: int) -> Tensor:
        return DTensor.from_local(parameter.to_local(), x.device_mesh, [Shard(dim)], run_check=False)

    flat = x.view(-1, x.size(-1))
    product = torch.addmm(side_by_side(module.bias, 0), flat, side_by_side(module.weight, 1))
    return product.view(*x.shape[:-1], product.shape[-1])
