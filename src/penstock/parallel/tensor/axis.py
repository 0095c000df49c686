"""Tensor parallelism as an axis."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from penstock.parallel.axis import Axis, AxisOptions, Layers
from penstock.parallel.replicas.exchange import run_each
from penstock.parallel.tensor.matrices import tensor_parallel


class Tensor(Axis):
    """The processes that share matrices (tp)."""

    name = "tp"
    divides_parameters = True

    def prepare(self, layers: Layers, options: AxisOptions) -> None:
        mesh = self.mesh.axis("tp")
        # All stages at once: a weight that is tied between two of them stays one parameter.
        run_each(
            lambda: tensor_parallel(layers, mesh, options.family, options.sequence_parallel),
            partial(self.processes.gather, over="run"),
        )

    def sum_norms(
        self, squares: Mapping[str, torch.Tensor], present: torch.Tensor, over_replicas: bool
    ) -> None:
        group = self.mesh.group("tp")
        self.processes.collectives.all_reduce(squares["tp"], group, "add up over sharded matrices")
