"""Penstock trains PyTorch models cut into pipeline stages, and shows, proves and predicts what they do.

Names are loaded on first use, so that ``import penstock`` and the planning commands need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.errors import PenstockError as PenstockError
    from penstock.parallel.buckets import GradientBuckets as GradientBuckets
    from penstock.parallel.mesh import MeshShape as MeshShape
    from penstock.parallel.mesh import make_mesh as make_mesh
    from penstock.parallel.order import parameter_order as parameter_order
    from penstock.parallel.reducer import GroupReducer as GroupReducer
    from penstock.parallel.tensor import tensor_parallel as tensor_parallel
    from penstock.parallel.threads import thread_reducers as thread_reducers
    from penstock.parallel.zero import ShardedOptimizer as ShardedOptimizer
    from penstock.runtime.grad_scaler import GradScaler as GradScaler
    from penstock.runtime.optimizer import OptimizerStep as OptimizerStep
    from penstock.runtime.optimizer import PipelineOptimizer as PipelineOptimizer
    from penstock.runtime.pipeline import Pipeline as Pipeline
    from penstock.runtime.result import StepResult as StepResult
    from penstock.schedule.check import check as check
    from penstock.schedule.families import build_schedule as build_schedule
    from penstock.schedule.ops import Kind as Kind
    from penstock.schedule.ops import Op as Op
    from penstock.schedule.ops import Pair as Pair
    from penstock.schedule.placement import Placement as Placement
    from penstock.schedule.program import Program as Program
    from penstock.schedule.program import lower as lower
    from penstock.schedule.schedule import Schedule as Schedule
    from penstock.schedule.text import read_csv as read_csv
    from penstock.schedule.text import write_csv as write_csv
    from penstock.stage.layers import Layer as Layer
    from penstock.stage.named import add_loss as add_loss
    from penstock.stage.named import give as give
    from penstock.stage.values import Microbatches as Microbatches
    from penstock.trace.events import Trace as Trace
    from penstock.train.checkpoint.checkpoints import Checkpoints as Checkpoints
    from penstock.train.checkpoint.dcp_read import read_dcp as read_dcp
    from penstock.train.models.transformers.loss import causal_lm_loss as causal_lm_loss
    from penstock.train.models.transformers.loss import valid_tokens as valid_tokens
    from penstock.train.models.transformers.save import save_transformers as save_transformers
    from penstock.train.models.transformers.split import from_transformers as from_transformers

_HOME = {
    "Checkpoints": "penstock.train.checkpoint.checkpoints",
    "GradScaler": "penstock.runtime.grad_scaler",
    "GradientBuckets": "penstock.parallel.buckets",
    "GroupReducer": "penstock.parallel.reducer",
    "Kind": "penstock.schedule.ops",
    "Layer": "penstock.stage.layers",
    "MeshShape": "penstock.parallel.mesh",
    "Microbatches": "penstock.stage.values",
    "Op": "penstock.schedule.ops",
    "OptimizerStep": "penstock.runtime.optimizer",
    "Pair": "penstock.schedule.ops",
    "PenstockError": "penstock.errors",
    "Pipeline": "penstock.runtime.pipeline",
    "PipelineOptimizer": "penstock.runtime.optimizer",
    "Placement": "penstock.schedule.placement",
    "Program": "penstock.schedule.program",
    "Schedule": "penstock.schedule.schedule",
    "ShardedOptimizer": "penstock.parallel.zero",
    "StepResult": "penstock.runtime.result",
    "Trace": "penstock.trace.events",
    "add_loss": "penstock.stage.named",
    "build_schedule": "penstock.schedule.families",
    "causal_lm_loss": "penstock.train.models.transformers.loss",
    "check": "penstock.schedule.check",
    "from_transformers": "penstock.train.models.transformers.split",
    "give": "penstock.stage.named",
    "lower": "penstock.schedule.program",
    "make_mesh": "penstock.parallel.mesh",
    "parameter_order": "penstock.parallel.order",
    "read_csv": "penstock.schedule.text",
    "read_dcp": "penstock.train.checkpoint.dcp_read",
    "save_transformers": "penstock.train.models.transformers.save",
    "tensor_parallel": "penstock.parallel.tensor",
    "thread_reducers": "penstock.parallel.threads",
    "valid_tokens": "penstock.train.models.transformers.loss",
    "write_csv": "penstock.schedule.text",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
