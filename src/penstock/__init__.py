"""Pipeline-parallel training of PyTorch models, with schedules that are proved, simulated and shown.

Names are imported on first use, so that ``import penstock`` and the planning commands need no torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from penstock.base.version import __version__ as __version__

# It registers the converter of models of transformers, and imports that library only for such a model.
importlib.import_module("penstock.huggingface.converter")

# Without a handler, logging would print warnings on stderr.
logging.getLogger(__name__).addHandler(logging.NullHandler())

if TYPE_CHECKING:
    from penstock.base.errors import BatchError as BatchError
    from penstock.base.errors import CallOrderError as CallOrderError
    from penstock.base.errors import ConfigError as ConfigError
    from penstock.base.errors import DataError as DataError
    from penstock.base.errors import HangError as HangError
    from penstock.base.errors import NonFiniteError as NonFiniteError
    from penstock.base.errors import PeerError as PeerError
    from penstock.base.errors import PenstockError as PenstockError
    from penstock.base.errors import ProfileError as ProfileError
    from penstock.base.errors import ReplicaError as ReplicaError
    from penstock.base.errors import ScheduleError as ScheduleError
    from penstock.base.errors import SplitBackwardError as SplitBackwardError
    from penstock.base.errors import SplitError as SplitError
    from penstock.base.errors import StageError as StageError
    from penstock.base.errors import StageShapeError as StageShapeError
    from penstock.base.errors import StoppedError as StoppedError
    from penstock.base.errors import TransportError as TransportError
    from penstock.base.errors import WaitTimeoutError as WaitTimeoutError
    from penstock.checkpoint.checkpoints import Checkpoints as Checkpoints
    from penstock.checkpoint.dcp import read_dcp as read_dcp
    from penstock.forward.own_layers import split as split
    from penstock.huggingface.adapters import save_adapters as save_adapters
    from penstock.huggingface.from_transformers import from_transformers as from_transformers
    from penstock.huggingface.own_stages import own_stages as own_stages
    from penstock.huggingface.save import save_transformers as save_transformers
    from penstock.huggingface.trainer import PipelineTrainer as PipelineTrainer
    from penstock.huggingface.trainer import PipelineTrainerMixin as PipelineTrainerMixin
    from penstock.measure.profile_layers import profile_layers as profile_layers
    from penstock.parallel.context.attention import sequence_positions as sequence_positions
    from penstock.parallel.mesh import MeshShape as MeshShape
    from penstock.parallel.mesh import make_mesh as make_mesh
    from penstock.parallel.tensor.matrices import tensor_parallel as tensor_parallel
    from penstock.recordings.compare import compare as compare
    from penstock.runtime.batch.work import StepResult as StepResult
    from penstock.runtime.optim.grad_scaler import GradScaler as GradScaler
    from penstock.runtime.optim.optimizer import OptimizerStep as OptimizerStep
    from penstock.runtime.optim.optimizer import PipelineOptimizer as PipelineOptimizer
    from penstock.runtime.options import ExecutionOptions as ExecutionOptions
    from penstock.runtime.options import ParallelOptions as ParallelOptions
    from penstock.runtime.pipeline import Pipeline as Pipeline
    from penstock.schedule.check import check as check
    from penstock.schedule.families import build_schedule as build_schedule
    from penstock.schedule.families import register_family as register_family
    from penstock.schedule.ops import Kind as Kind
    from penstock.schedule.ops import Op as Op
    from penstock.schedule.ops import Pair as Pair
    from penstock.schedule.placement import Placement as Placement
    from penstock.schedule.program import Program as Program
    from penstock.schedule.program import lower as lower
    from penstock.schedule.schedule import Schedule as Schedule
    from penstock.schedule.text import read_csv as read_csv
    from penstock.schedule.text import write_csv as write_csv
    from penstock.stage.compute.causal_lm_loss import causal_lm_loss as causal_lm_loss
    from penstock.stage.compute.causal_lm_loss import valid_tokens as valid_tokens
    from penstock.stage.compute.linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
    from penstock.stage.layers import Layer as Layer
    from penstock.stage.microbatches import Microbatches as Microbatches
    from penstock.stage.named import add_loss as add_loss
    from penstock.stage.named import give as give
    from penstock.stage.token_groups import by_tokens as by_tokens
    from penstock.trace.events import Trace as Trace
    from penstock.trace.expert_load import ExpertLoad as ExpertLoad
    from penstock.train.callbacks.callback import Callback as Callback
    from penstock.train.callbacks.callback import EndEvent as EndEvent
    from penstock.train.callbacks.callback import EvaluateEvent as EvaluateEvent
    from penstock.train.callbacks.callback import SaveEvent as SaveEvent
    from penstock.train.callbacks.callback import StartEvent as StartEvent
    from penstock.train.callbacks.callback import StepEvent as StepEvent
    from penstock.train.callbacks.callback import TraceEvent as TraceEvent
    from penstock.train.callbacks.callback_list import CallbackList as CallbackList
    from penstock.verify.record import record as record

_HOME = {
    "BatchError": "penstock.base.errors",
    "Callback": "penstock.train.callbacks.callback",
    "CallbackList": "penstock.train.callbacks.callback_list",
    "Checkpoints": "penstock.checkpoint.checkpoints",
    "CallOrderError": "penstock.base.errors",
    "ConfigError": "penstock.base.errors",
    "DataError": "penstock.base.errors",
    "EndEvent": "penstock.train.callbacks.callback",
    "EvaluateEvent": "penstock.train.callbacks.callback",
    "ExecutionOptions": "penstock.runtime.options",
    "GradScaler": "penstock.runtime.optim.grad_scaler",
    "HangError": "penstock.base.errors",
    "ExpertLoad": "penstock.trace.expert_load",
    "Kind": "penstock.schedule.ops",
    "Layer": "penstock.stage.layers",
    "LinearCrossEntropy": "penstock.stage.compute.linear_cross_entropy",
    "MeshShape": "penstock.parallel.mesh",
    "Microbatches": "penstock.stage.microbatches",
    "NonFiniteError": "penstock.base.errors",
    "Op": "penstock.schedule.ops",
    "OptimizerStep": "penstock.runtime.optim.optimizer",
    "Pair": "penstock.schedule.ops",
    "ParallelOptions": "penstock.runtime.options",
    "PeerError": "penstock.base.errors",
    "PenstockError": "penstock.base.errors",
    "Pipeline": "penstock.runtime.pipeline",
    "PipelineOptimizer": "penstock.runtime.optim.optimizer",
    "PipelineTrainer": "penstock.huggingface.trainer",
    "PipelineTrainerMixin": "penstock.huggingface.trainer",
    "Placement": "penstock.schedule.placement",
    "ProfileError": "penstock.base.errors",
    "Program": "penstock.schedule.program",
    "ReplicaError": "penstock.base.errors",
    "SaveEvent": "penstock.train.callbacks.callback",
    "Schedule": "penstock.schedule.schedule",
    "ScheduleError": "penstock.base.errors",
    "SplitBackwardError": "penstock.base.errors",
    "SplitError": "penstock.base.errors",
    "StageError": "penstock.base.errors",
    "StageShapeError": "penstock.base.errors",
    "StartEvent": "penstock.train.callbacks.callback",
    "StepEvent": "penstock.train.callbacks.callback",
    "StepResult": "penstock.runtime.batch.work",
    "StoppedError": "penstock.base.errors",
    "Trace": "penstock.trace.events",
    "TraceEvent": "penstock.train.callbacks.callback",
    "TransportError": "penstock.base.errors",
    "WaitTimeoutError": "penstock.base.errors",
    "add_loss": "penstock.stage.named",
    "build_schedule": "penstock.schedule.families",
    "by_tokens": "penstock.stage.token_groups",
    "causal_lm_loss": "penstock.stage.compute.causal_lm_loss",
    "check": "penstock.schedule.check",
    "compare": "penstock.recordings.compare",
    "from_transformers": "penstock.huggingface.from_transformers",
    "give": "penstock.stage.named",
    "lower": "penstock.schedule.program",
    "make_mesh": "penstock.parallel.mesh",
    "own_stages": "penstock.huggingface.own_stages",
    "profile_layers": "penstock.measure.profile_layers",
    "read_csv": "penstock.schedule.text",
    "record": "penstock.verify.record",
    "read_dcp": "penstock.checkpoint.dcp",
    "register_family": "penstock.schedule.families",
    "save_adapters": "penstock.huggingface.adapters",
    "save_transformers": "penstock.huggingface.save",
    "split": "penstock.forward.own_layers",
    "tensor_parallel": "penstock.parallel.tensor.matrices",
    "sequence_positions": "penstock.parallel.context.attention",
    "valid_tokens": "penstock.stage.compute.causal_lm_loss",
    "write_csv": "penstock.schedule.text",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
