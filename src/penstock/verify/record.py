"""Recording of what a training loop computes, tensor by tensor, without keeping the tensors."""

from __future__ import annotations

import os
import re
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from penstock.base.counts import require_count
from penstock.base.errors import ConfigError
from penstock.base.tensor_file import DTYPES
from penstock.parallel.dtensor import boxes_in_whole, is_dtensor, local
from penstock.parallel.replicas.shard_slice import ShardSlice
from penstock.parallel.replicas.shards import ShardedParameter
from penstock.recordings.files import Key, Kind, Writer
from penstock.recordings.fingerprint import Fingerprint, fingerprint, fingerprints_of_range, forget_vectors
from penstock.recordings.in_memory import hook_on_all_modules, tensors_returned
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.stage.module import StageModule
from penstock.verify.sources import PipelineSource, PlainSource, Source, StagesSource


@contextmanager
def record(
    folder: str | os.PathLike[str],
    model: nn.Module | Pipeline | Mapping[str, nn.Module],
    *,
    steps: int = 2,
    first_microbatch: int = 0,
    tensors: str | None = None,
) -> Iterator[Notes]:
    """Record what is computed in the block: outputs, gradients, updates and buffers, for `penstock.compare`.

    For each module, microbatch and step it keeps of the output and of the gradient of the output, for each parameter of the
    gradient as the optimizer sees it and of the value after the update, and of each buffer then: a digest of the bits, the
    norm, the number of values that are not finite, shape, dtype, and projections on a few pseudo-random vectors. Of parts
    of a tensor these add up, so that a parameter that processes divide (DTensor) is compared with the undivided one. No
    number of the run changes. Files are lines of JSON, and of the tensors that `tensors` names the values in safetensors'
    format; at most 1 GiB for a process together.

    A step ends with the update by an optimizer of ``torch.optim``, whichever has parameters of the model. A forward of the
    model with gradients enabled is a microbatch; so a loop that accumulates gradients has as many as a pipeline. In several
    processes every one records into the same folder.

    Args:
        folder: where to write; made if it is not there. It may not have a recording of this process.
        model: a module, such as one within DistributedDataParallel or one that ``fully_shard`` divided; a `Pipeline` at any
            layout; or a mapping from prefixes of names in the whole model to modules, such as the stages of
            ``torch.distributed.pipelining`` on this process.
        steps: number of steps to record (default 2); later ones run as without recording.
        first_microbatch: number of this process's first microbatch in the whole batch, where processes have their own
            (default 0). A `Pipeline` knows it.
        tensors: regular expression; of modules, parameters and buffers whose whole name it matches, values are kept, too,
            and `penstock.compare` then names the number that differs most (default: of none).

    Returns:
        A context manager; its value has a method `Notes.note` for tensors that no module returns, such as losses.

    Raises:
        ConfigError: if the folder has a recording of this process, the model is compiled, or an argument is wrong.
    """
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ConfigError(f"folder must be the path of a folder, got {folder!r:.80}")
    require_count("steps", steps)
    if not isinstance(first_microbatch, int) or first_microbatch < 0:
        raise ConfigError(f"first_microbatch must be a whole number of at least 0, got {first_microbatch!r}")
    try:
        kept = None if tensors is None else re.compile(tensors)
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"tensors must be a regular expression of names, got {tensors!r:.80}: {error}"
        ) from error
    if isinstance(model, Pipeline):
        source: Source = PipelineSource(model)
    elif isinstance(model, StageModule):
        source = StagesSource(model.named_layers(), list(model.whole_model_parameters()))
    elif isinstance(model, nn.Module):
        source = PlainSource({"": model}, first_microbatch)
    elif isinstance(model, Mapping) and model and all(isinstance(m, nn.Module) for m in model.values()):
        source = PlainSource(dict(model), first_microbatch)
    else:
        raise ConfigError(
            f"record takes a module, a Pipeline or a mapping from name prefixes to modules, got {model!r:.80}"
        )
    process, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    writer = Writer(Path(folder), process, processes, source.aliases)
    complete = False
    try:
        recorder = _Recorder(source, writer, steps, kept)
        if kept is not None and not any(map(kept.fullmatch, source.names)):
            known = ", ".join(sorted(source.names)[:6])
            raise ConfigError(
                f"tensors={tensors!r} matches the whole name of no module or parameter; the first names are {known}. Add .* "
                "for all that is within a module"
            )
        with recorder.hooks():
            yield Notes(recorder.note, source.has_module)
        complete = True
        if writer.entries == recorder.begun:
            warnings.warn(
                f"nothing was recorded into {folder}: no forward of the model with gradients, and no update of its "
                "parameters by an optimizer of torch.optim, ran in the block; record the model that is trained",
                RuntimeWarning,
                stacklevel=3,
            )
    finally:
        writer.close(complete)
        forget_vectors()


class Notes:
    """Tensors that are recorded besides those of modules and parameters.

    Args:
        write: function that records a tensor under a name, for a microbatch.
        is_module: function that tells whether a module of the model has a name.
    """

    def __init__(self, write: Callable[[str, Tensor, int], None], is_module: Callable[[str], bool]) -> None:
        self._write, self._is_module = write, is_module

    def note(self, name: str, value: Tensor | float, *, microbatch: int = -1) -> None:
        """Record a tensor or a number, such as a microbatch's loss.

        Args:
            name: name under which both sides record it, other than a module's.
            microbatch: number of the microbatch within the step (default -1: the step's).

        Raises:
            ConfigError: if an argument is none of these, or the block has ended.
        """
        if not isinstance(name, str) or not name or self._is_module(name):
            raise ConfigError(f"a note's name must be a text that no module of the model has, got {name!r}")
        if not isinstance(value, Tensor | float | int):
            raise ConfigError(f"note {name!r}: its value must be a tensor or a number, got {value!r:.80}")
        if not isinstance(microbatch, int) or microbatch < -1:
            raise ConfigError(f"note {name!r}: microbatch must be a whole number, got {microbatch!r}")
        self._write(name, torch.as_tensor(value), microbatch)


class _Recorder:
    """Hooks that write what a source computes."""

    def __init__(self, source: Source, writer: Writer, steps: int, kept: re.Pattern[str] | None) -> None:
        self._source, self._writer, self._steps, self._kept = source, writer, steps, kept
        self._step, self._updated = 0, False
        # Updates before the present step of a pipeline's optimizer; None outside of one.
        self._pipeline_updates: int | None = None
        self._written: set[Key] = set()
        self._calls: Counter[tuple[int, str, str]] = Counter()
        self._names = {id(p): name for name, p in source.parameters}
        self._last: tuple[weakref.ref[Tensor], int, Fingerprint] | None = None
        self._lock = threading.Lock()
        self.begun = 0  # entries before the first step

    @property
    def active(self) -> bool:
        return self._step < self._steps

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Return a context in which all is recorded."""
        values = self._source.values()
        for name, parameter in self._source.parameters:
            if not is_lazy(parameter) and (values is None or name in values):
                key = Key(-1, Kind.PARAMETER, -1, name)
                self._write(key, parameter if values is None else values[name])
        self._write_buffers(-1)
        self.begun = self._writer.entries
        with ExitStack() as stack:
            stack.enter_context(hook_on_all_modules(self._output))
            # After the hook of outputs: a model's own output is still one of its forward.
            self._source.install(self.begin_forward, stack)
            stack.callback(register_optimizer_step_pre_hook(self._before_update).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_update).remove)
            for name, parameter in self._source.parameters if self._source.shares else ():
                if parameter.requires_grad and not is_dtensor(parameter) and not is_lazy(parameter):
                    stack.callback(parameter.register_hook(partial(self._share, name)).remove)
            yield

    def begin_forward(self) -> None:
        """Begin the next step if the optimizer has updated parameters since the last forward."""
        if self._updated:
            self._updated = False
            self._step += 1
            self._written.clear()
            self._calls.clear()
            self._source.next_step()

    def _output(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        place = self._source.place(module)
        if place is None:
            return
        self.begin_forward()
        if not self.active:
            return
        name, microbatch = place.name, place.microbatch
        with self._lock:
            call = place.first_call + self._calls[microbatch, place.run, name]
            self._calls[microbatch, place.run, name] += 1
        for slot, (leaf, own) in enumerate(tensors_returned(args, kwargs, output)):
            if not place.again:
                self._write(Key(self._step, Kind.OUTPUT, microbatch, name, call, slot), leaf)
            if own:
                of_grad = Key(self._step, Kind.OUTPUT_GRADIENT, microbatch, name, call, slot)
                leaf.register_hook(partial(self._output_gradient, of_grad))

    def note(self, name: str, value: Tensor, microbatch: int) -> None:
        """Record a tensor under a name of its own; see `Notes.note`."""
        if self._writer.closed:
            raise ConfigError(f"note {name!r} comes after the block that records has ended")
        if self.active:
            self._write(Key(self._step, Kind.OUTPUT, microbatch, name), value)

    def _output_gradient(self, key: Key, gradient: Tensor) -> None:
        if self._source.in_forward:
            return
        self._source.backward_of = key.microbatch
        if key.step == self._step:
            self._write(key, gradient)

    def _share(self, name: str, gradient: Tensor) -> None:
        if self.active and self._source.backward_of is not None:
            self._write(Key(self._step, Kind.SHARE, self._source.backward_of, name), gradient)

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A pipeline's optimizer averages and clips first, and then calls those of its ranks.
        if isinstance(optimizer, PipelineOptimizer):
            self._pipeline_updates = optimizer.steps
        elif self.active and (sharded := self._source.sharded()):
            self._write_ranges(sharded, {id(p) for group in optimizer.param_groups for p in group["params"]})
        elif self.active:
            for name, whole, parameter in self._parameters_of(optimizer):
                if parameter.grad is not None:
                    self._write(Key(self._step, Kind.GRADIENT, -1, name), parameter.grad, whole)

    def _write_ranges(self, sharded: Sequence[ShardedParameter], updated: Collection[int]) -> None:
        """Write the gradients of this process's ranges of the parameters that an optimizer has."""
        for entry, elements, shard in sharded:
            if shard is None or id(shard) not in updated or shard.grad is None:
                continue
            key, whole = Key(self._step, Kind.GRADIENT, -1, entry.name), entry.parameter
            if elements.whole:
                self._write(key, shard.grad)
            elif key not in self._written and _in_order(elements):
                self._written.add(key)
                place = (whole.shape, boxes_in_whole(whole)) if is_dtensor(whole) else ()
                for part in fingerprints_of_range(shard.grad, elements.shape, elements.first, *place):
                    self._writer.write(key, part)

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer, PipelineOptimizer):
            before, self._pipeline_updates = self._pipeline_updates, None
            # A step in which gradients accumulate has no update, nor has one that is skipped; and where a class overrides
            # `step`, hooks run around the inherited one, too.
            if before is None or optimizer.steps == before:
                return
        elif self._pipeline_updates is not None:
            return  # what a pipeline's optimizer does after those of its ranks counts
        if not self.active:
            return
        values = self._source.values()
        for name, whole, parameter in self._parameters_of(optimizer):
            self._updated = True
            key = Key(self._step, Kind.PARAMETER, -1, name)
            if values is None:
                self._write(key, parameter, whole)
            elif name in values:
                self._write(key, values[name])
        if self._updated:
            self._write_buffers(self._step)

    def _write_buffers(self, step: int) -> None:
        self._last = None  # batch normalization changes its statistics without counting a write
        for name, buffer in self._source.buffers():
            if not is_lazy(buffer):
                self._write(Key(step, Kind.BUFFER, -1, name), buffer)

    def _parameters_of(self, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Yield the name of each of an optimizer's parameters, the model's parameter, and the optimizer's.

        An optimizer may have this process's part of a DTensor as a parameter of its own, in the same memory.
        """
        by_place = {
            place: (name, whole)
            for name, whole in self._source.parameters
            if (place := local(whole).data_ptr())
        }
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (name := self._names.get(id(parameter))) is not None:
                    yield name, parameter, parameter
                    continue
                found = by_place.get(local(parameter).data_ptr())
                if found is not None and local(found[1]).shape == local(parameter).shape:
                    yield *found, parameter

    def _write(self, key: Key, value: Tensor, whole: Tensor | None = None) -> None:
        """Write a tensor.

        Args:
            whole: DTensor whose part on this process `value` may be.
        """
        with self._lock:
            if key in self._written:
                return
            self._written.add(key)
        with torch.no_grad():
            parts = self._sums(value, whole)
        for found in parts:
            # Of a tensor in parts, no process has the values; of dtypes that the format lacks, sums are all there is.
            keeps = self._kept is not None and self._kept.fullmatch(key.name) and found.whole
            storable = keeps and value.dtype in DTYPES.values() and value.layout is torch.strided
            self._writer.write(key, found, local(value) if storable else None)

    def _sums(self, value: Tensor, whole: Tensor | None) -> list[Fingerprint]:
        """Return the sums over each part of a tensor that this process has; none if parts are terms of a sum."""
        whole = value if whole is None or is_dtensor(value) else whole
        if is_dtensor(whole):
            if any(placement.is_partial() for placement in whole.placements):
                return []
            part = local(value)
            return fingerprints_of_range(
                part.flatten(), part.shape, whole=whole.shape, boxes=boxes_in_whole(whole)
            )
        # A module often returns what its last inner module has returned.
        last = self._last
        if last is not None and last[0]() is value and last[1] == value._version:
            return [last[2]]
        found = fingerprint(value)
        self._last = (weakref.ref(value), value._version, found)
        return [found]


def _in_order(elements: ShardSlice) -> bool:
    """Return whether a parameter's elements are in memory in the order of its indices."""
    return elements.stride == torch.empty(elements.shape, device="meta").stride()
