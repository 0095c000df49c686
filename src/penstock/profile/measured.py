"""Profile of a model's layers, measured on this machine while as many ranks compute as will.

Each kind of layer runs as a stage of its own, as Penstock's pipelines run their stages: forwards, full backwards, both
halves of split ones, recomputes. The time of a stage without a layer is subtracted, and becomes the overhead of an op.
"""

from __future__ import annotations

import copy
import os
import platform
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from penstock.profile.fake_layers import LayerRun, Sample
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_profile import Profile, ProfiledLayer
from penstock.profile.traced import input_values, kinds_of, profile_of_runs, require_autocast, trace_sizes
from penstock.stage.compute.runner import LossFunction, LossInputs, Messages, Settings
from penstock.stage.compute.stage import Stage
from penstock.stage.devices import device_of
from penstock.stage.layers import Layer, as_layers
from penstock.stage.microbatches import on_device
from penstock.stage.module import StageModule
from penstock.stage.rng.random_state import RandomState
from penstock.stage.values import Message, flatten

Exchange = Callable[[Any], list[Any]]
"""Function that gives a value to all processes and returns every process's; all of them call it."""

_EMPTY = -1
"""Kind of the stage without a layer."""
_LEAST_ROUNDS = 5
# Runs of a case in a row: processes meet once for all of them.
_REPEATS = 3
_STEADY = 0.01
"""Largest change of the sum of all medians from one half of the rounds to all, at which they count as steady."""


@dataclass(frozen=True)
class Effort:
    """Bounds on the measurement.

    Attributes:
        seconds: seconds after which no further round begins (default 20).
        rounds: largest number of rounds (default 60).
        quantile: quantile of repeated times that counts (default 0.5, the median).
    """

    seconds: float = 20.0
    rounds: int = 60
    quantile: float = 0.5


DEFAULT_EFFORT = Effort()


def measure_layers(
    model: object,
    example: object,
    *,
    target: object = None,
    loss_fn: LossFunction | None = None,
    named: Mapping[str, object] | None = None,
    microbatches: Sequence[int] | None = None,
    ranks: int = 1,
    effort: Effort = DEFAULT_EFFORT,
    exchange: Exchange | None = None,
    name: str | None = None,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Profile:
    """Measure a model's layers on this machine, with `ranks` threads of this process that compute at the same time.

    Arguments are as for `trace_layers`, but the example's values count where they are whole numbers; floating-point
    values are drawn at random. Copies of the layers run, without hooks on their parameters; layers that are built run
    as they are. `exchange` joins processes that measure at the same time; all of them return the same profile, whose
    works are seconds. They run on `device`, or where the layers are and the values were given (None, the default).
    """
    layers = as_layers(model)
    sample = Sample(example, target, loss_fn, named or {}, seed, require_autocast(autocast))
    runs = trace_sizes(layers, sample, microbatches)
    _, chosen = kinds_of(runs)
    cases = [
        (kind, size, way)
        for kind in (_EMPTY, *range(len(chosen)))
        for size in runs
        for way in ("whole", "split", "recomputed")
    ]
    representatives = [[at_size[n] for at_size in runs.values()] for n in chosen]
    benches = [_Bench(layers, representatives, list(runs), sample, device) for _ in range(ranks)]
    samples, rounds = _repeat(benches, cases, effort, exchange)
    times = {op: _quantile(found, effort.quantile) for op, found in samples.items()}
    held = {case[:2]: benches[0].waiting[case[:2]] for case in cases if case[0] != _EMPTY}
    kinds = tuple(
        ProfiledLayer(
            tuple(
                (size, _cost(run.cost, times, kind, size, held[kind, size]))
                for size, run in zip(runs, representative, strict=True)
            )
        )
        for kind, representative in enumerate(representatives)
    )
    smallest = next(iter(runs))
    empty = [times[_EMPTY, smallest, way, op] for way, op in (("whole", "F"), ("whole", "B"))]
    return replace(
        profile_of_runs(name or type(model).__name__, layers, sample, runs),
        source="measured",
        kinds=kinds,
        machine=_machine(ranks, rounds),
        op_overhead=statistics.mean(empty),
        spread=_spread(samples),
    )


def measure_devices(
    layers: Sequence[Layer],
    sample: Sample,
    devices: Sequence[torch.device],
    effort: Effort = DEFAULT_EFFORT,
) -> list[float]:
    """Return the seconds of a forward and a backward of the block with most FLOPs, on each device after the other."""
    runs = trace_sizes(layers, sample, [sample.rows])
    ((rows, of_layers),) = runs.items()
    blocks = [run for run in of_layers if run.layer.role == "block"]
    largest = max(
        blocks, key=lambda run: sum(work.amount for work in run.cost.forward if work.unit != "memory")
    )
    found = []
    for device in devices:
        bench = _Bench(layers, [[largest]], [rows], sample, device)
        samples, _ = _repeat([bench], [(0, rows, "whole")], effort, None)
        found.append(sum(_quantile(seconds, effort.quantile) for seconds in samples.values()))
    return found


_Case = tuple[int, int, str]
"""Kind of layer, samples of the microbatch, and "whole", "split" or "recomputed"."""
_Samples = dict[tuple[int, int, str, str], list[float]]
"""Seconds of every repetition of each case's ops."""


def _cost(traced: LayerCost, times: Mapping[Any, float], kind: int, size: int, held: int) -> LayerCost:
    """Return a layer's cost in seconds: the times of its stage, less the times of a stage without a layer."""

    def net(way: str, op: str) -> float:
        return max(0.0, times[kind, size, way, op] - times[_EMPTY, size, way, op])

    def work(seconds: float) -> tuple[DeviceWork, ...]:
        return (DeviceWork("seconds", max(0.0, seconds)),)

    forward, backward = net("whole", "F"), net("whole", "B")
    # A forward that prepares a split backward takes longer; the schedule knows one forward, so the difference goes to I.
    input_half = net("split", "I") + net("split", "F") - forward
    again = net("recomputed", "B") + net("recomputed", "F") - backward - forward
    return replace(
        traced,
        forward=work(forward),
        input_grad=work(input_half),
        weight_grad=work(net("split", "W")),
        backward=work(backward),
        again=work(again),
        waiting_bytes=held,
    )


class _Bench:
    """Stages of one layer each, with inputs, for one rank."""

    def __init__(
        self,
        layers: Sequence[Layer],
        representatives: Sequence[Sequence[LayerRun]],
        sizes: Sequence[int],
        sample: Sample,
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self._gpu = device_of([layer.module for layer in layers if layer.module is not None])
        if device is not None:
            self._gpu = device if device.type == "cuda" else None
        # Bytes that a stage holds between the halves of a split backward, by kind and size.
        self.waiting: dict[tuple[int, int], int] = {}
        self._random = RandomState(sample.seed)
        self._autocast = sample.autocast
        self._stages: dict[_Case, Stage] = {}
        self._inputs: dict[tuple[int, int], tuple[Messages, LossInputs | None]] = {}
        self._grads: dict[_Case, Messages | None] = {}
        self._steps = 0
        for kind, at_sizes in enumerate(representatives):
            layer = at_sizes[0].layer
            module = StageModule([layer], seed=sample.seed)
            if layer.module is not None:
                module = copy.deepcopy(module)  # gradients and buffers of the user's own stay as they are
            module.to(device)
            last = layer is layers[-1] and sample.loss_fn is not None
            for size, run in zip(sizes, at_sizes, strict=True):
                value, named = input_values(run, sample)
                target = on_device(_rows(sample.target, sample.rows, size), device)
                self._inputs[kind, size] = (
                    self._placed(_messages(value, named)),
                    LossInputs(target) if last else None,
                )
                self._add(kind, size, module, sample.loss_fn if last else None)
        for size in sizes:
            empty = _messages(torch.randn(size, 1).requires_grad_(), {})
            self._inputs[_EMPTY, size] = self._placed(empty), None
            self._add(_EMPTY, size, StageModule([Layer("empty", nn.Identity)]), None)

    def _placed(self, messages: Messages) -> Messages:
        return messages if self._device is None else tuple(m.moved(self._device) for m in messages)

    def _now(self) -> float:
        """Return the time once the work so far is done: on a GPU, it was only queued."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        return perf_counter()

    def _add(self, kind: int, size: int, module: StageModule, loss_fn: LossFunction | None) -> None:
        for way in ("whole", "split", "recomputed"):
            recompute = "full" if way == "recomputed" else "none"
            settings = Settings(recompute, autocast=self._autocast, random=self._random)
            self._stages[kind, size, way] = Stage(0, module, loss_fn, settings)

    def run(self, case: _Case, repeats: int) -> list[dict[str, float]]:
        """Run microbatches of a case as a step; return the seconds of each one's ops."""
        self._steps += 1
        stage = self._stages[case]
        stage.begin(self._steps)
        found = [self._microbatch(case, stage, number) for number in range(repeats)]
        stage.end()
        return found

    def _microbatch(self, case: _Case, stage: Stage, number: int) -> dict[str, float]:
        kind, size, way = case
        kept, loss = self._inputs[kind, size]
        messages = tuple(
            message._replace(
                leaves=tuple([x.detach() if isinstance(x, Tensor) else x for x in message.leaves])
            )
            for message in kept
        )
        split = way == "split"
        begin = self._now()
        if loss is None:
            outputs = stage.forward(number, messages, split)
        else:
            stage.forward_with_loss(number, messages, loss, split)
        middle = self._now()
        if case not in self._grads:
            self._grads[case] = None if loss is not None else tuple(map(_ones, outputs))
        grads = self._grads[case]
        start = self._now()
        if not split:
            stage.backward(number, grads)
            return {"F": middle - begin, "B": self._now() - start}
        stage.backward_input(number, grads)
        between = self._now()
        self.waiting[kind, size] = stage.held_bytes
        stage.backward_weight(number)
        return {"F": middle - begin, "I": between - start, "W": self._now() - between}


def _repeat(
    benches: Sequence[_Bench], cases: Sequence[_Case], effort: Effort, exchange: Exchange | None
) -> tuple[_Samples, int]:
    """Run every case on all ranks at the same time, round after round, until the medians are steady."""
    samples: _Samples = {}
    deadline, totals, rounds = perf_counter() + effort.seconds, [], 0
    with _Ranks(benches) as ranks:
        for case in cases:  # the first microbatches are checked and compiled
            ranks.run(case, 2)
        while rounds < effort.rounds:
            rounds += 1
            for case in cases:
                if exchange is not None:
                    # As a barrier: all processes run the case at the same time.
                    exchange(None)
                for ops in ranks.run(case, _REPEATS):
                    for op, seconds in ops.items():
                        samples.setdefault((*case, op), []).append(seconds)
            totals.append(sum(_quantile(found, effort.quantile) for found in samples.values()))
            halfway = totals[len(totals) // 2]
            done = rounds >= _LEAST_ROUNDS and abs(totals[-1] - halfway) <= _STEADY * totals[-1]
            done = done or perf_counter() > deadline
            if all(exchange(done)) if exchange is not None else done:
                break
    if exchange is not None:
        joined: _Samples = {}
        for other in exchange(samples):
            for op, found in other.items():
                joined.setdefault(op, []).extend(found)
        samples = joined
    return samples, rounds


class _Ranks:
    """One thread for each rank, which run the same case at the same time."""

    def __init__(self, benches: Sequence[_Bench]) -> None:
        self._benches = benches
        self._barrier = threading.Barrier(len(benches))

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self._barrier.abort()

    def run(self, case: _Case, repeats: int) -> list[dict[str, float]]:
        """Return the seconds of the case's ops, of all ranks and repetitions."""
        found: list[dict[str, float]] = []
        errors: list[BaseException] = []
        others = self._benches[1:]
        threads = [
            threading.Thread(
                target=self._guarded, args=(errors, partial(self._one, bench, case, repeats, found))
            )
            for bench in others
        ]
        for thread in threads:
            thread.start()
        self._guarded(errors, partial(self._one, self._benches[0], case, repeats, found))
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    def _guarded(self, errors: list[BaseException], call: Callable[[], None]) -> None:
        try:
            call()
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            self._barrier.abort()

    def _one(self, bench: _Bench, case: _Case, repeats: int, found: list[dict[str, float]]) -> None:
        self._barrier.wait()
        found.extend(bench.run(case, repeats))


def _messages(value: Any, named: Mapping[str, Any]) -> Messages:
    messages = []
    for part in (value, dict(named)) if named else (value,):
        leaves, structure = flatten(part)
        needs = tuple([isinstance(x, Tensor) and x.requires_grad for x in leaves])
        messages.append(Message(leaves, structure, needs))
    return tuple(messages)


def _ones(output: Message) -> Message:
    return Message(
        tuple(
            torch.ones_like(x) for x, needed in zip(output.leaves, output.needs_grad, strict=True) if needed
        )
    )


def _rows(target: Any, given: int, size: int) -> Any:
    """Return the target of a microbatch of another size, by repeating its rows."""
    if isinstance(target, Tensor) and target.dim() and target.shape[0] == given:
        return target[torch.arange(size) % given]
    return target


def _quantile(found: Sequence[float], quantile: float) -> float:
    ordered = sorted(found)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


def _spread(samples: _Samples) -> float:
    """Return half the distance of the quartiles of all ops, over the sum of their medians."""
    half = sum((_quantile(found, 0.75) - _quantile(found, 0.25)) / 2 for found in samples.values())
    return half / sum(_quantile(found, 0.5) for found in samples.values())


def _machine(ranks: int, rounds: int) -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "ranks": ranks,
        "rounds": rounds,
    }
