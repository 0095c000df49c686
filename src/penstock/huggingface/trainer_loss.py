"""A trainer's own ``compute_loss``, on the last stage of its pipeline.

Before a step, ``compute_loss`` runs on each microbatch up to its call of the model, whose arguments become the microbatch.
On the last stage it runs again, and there the call returns what the model's own forward makes of the last hidden state. So
the loss, and the metrics that ``compute_loss`` keeps, are the trainer's own. Calls without gradients, such as those of a
reference, are evaluations of the pipeline before the step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import convert_to_fp32, send_to_device
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.huggingface.adapter_switch import AdapterSwitch
from penstock.huggingface.batch_loss_check import BatchLossCheck
from penstock.huggingface.image_division import divided_images
from penstock.huggingface.model_calls import ModelCalls
from penstock.huggingface.model_outputs import plain_output, restored_output
from penstock.huggingface.own_forward import OwnForward, Reached
from penstock.huggingface.thrown_away_run import random_state, same_random_state, thrown_away
from penstock.huggingface.trainer_batch import filled, for_every_row, joined, without_offsets
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.run_group import RunGroup
from penstock.stage.microbatches import Microbatches

_OF_HEAD = frozenset(
    {
        *("labels", "start_positions", "end_positions", "shift_labels"),
        *("num_items_in_batch", "fused_lm_head", "logits_to_keep"),
    }
)
"""Arguments of a forward that nothing before the last block needs."""
_OWN = frozenset({"use_cache", "return_dict"})
"""Arguments that stages have a value of their own for."""
_OF_MIDDLE = ("output_hidden_states", "output_attentions")
"""Arguments that ask for the outputs of middle stages."""


class _Found(BaseException):
    """End of a run of ``compute_loss`` at its call with gradients."""


class _NeedsReference(BaseException):
    """End of a run of ``compute_loss`` at a call without gradients that has no answer yet."""

    def __init__(self, call: dict[str, Any], adapters: tuple[str, ...]) -> None:
        self.call, self.adapters = call, adapters


@dataclass
class _Asked:
    """Calls of the model by ``compute_loss`` on one microbatch.

    Attributes:
        call: arguments of the call with gradients; None before it.
        needs: arguments of the first call without gradients that has no answer; None if all have one.
        adapters: adapters that were active in that call.
    """

    call: dict[str, Any] | None = None
    needs: dict[str, Any] | None = None
    adapters: tuple[str, ...] = ()


@dataclass
class _Part:
    """A microbatch in a step.

    Attributes:
        inputs: what the collator made.
        weight: weight of its loss; 0 if it fills up the batch.
        items: what ``compute_loss`` gets as ``num_items_in_batch``.
        call: arguments of its call with gradients.
        references: what its calls without gradients return.
        ran: whether ``compute_loss`` has run on the last stage.
    """

    inputs: Mapping[str, Any]
    weight: float
    items: Any
    call: dict[str, Any] = field(default_factory=dict)
    references: list[Any] = field(default_factory=list)
    ran: bool = False


class TrainerLoss:
    """The loss function of a trainer's pipeline, which computes ``trainer.compute_loss``: (hidden state, number) → scalar.

    Args:
        trainer: the trainer.
        model: the model whose blocks are the stages, without adapters' wrapper.
        own: its forward.
        forward: the forward that TRL has given it, with a fused head; None for the model's own.
        replicas: number of replicas of the pipeline.
        autocast: dtype in which the model computes; None for its own.
        of_libraries: whether the loss is computed by code of transformers or TRL alone, which divides sums by
            ``num_items_in_batch`` if Trainer says that losses of accumulated batches add up.

    Attributes:
        pipe: the pipeline, which is made with this loss.
        adapters: the adapters of the model.
    """

    pipe: Pipeline
    runs_once = True
    """True for a stage: the loss and the last layer are not recomputed, since it keeps metrics."""

    def __init__(
        self,
        trainer: Any,
        model: Any,
        own: OwnForward,
        forward: Any,
        *,
        replicas: int,
        autocast: torch.dtype | None,
        of_libraries: bool,
    ) -> None:
        own.keeps_hidden = True
        self._trainer, self._model, self._own = trainer, model, own
        self._replicas, self._autocast = replicas, autocast
        self._fused = getattr(forward, "__func__", None)
        self._calls = ModelCalls(model)
        self._lock = threading.Lock()
        self._parts: list[_Part] = []
        self._of_libraries = of_libraries
        self._has_later: bool | None = None
        self._check = BatchLossCheck(trainer, model, of_libraries, autocast)
        self._logs: list[dict[str, Any]] = []
        self._named = {*own.named, *own.images}
        self.adapters = AdapterSwitch(trainer.model, model)

    def step(
        self,
        parts: Sequence[Mapping[str, Any]],
        examples: Sequence[int],
        items: Any,
        scaled: bool,
        accumulated: int,
    ) -> Tensor:
        """Run a step on the microbatches of a batch, and return its loss.

        Args:
            examples: number of examples in each; one with none fills up the batch.
            items: what Trainer gives as ``num_items_in_batch``.
            scaled: whether Trainer adds the losses of accumulated batches; otherwise it takes their mean.
            accumulated: batches of the optimizer's step.
        """
        self._parts = [
            self._part(part, n, sum(examples), items, scaled, 1 if scaled else accumulated)
            for part, n in zip(parts, examples, strict=True)
        ]
        try:
            with self._calls.watched(), self.adapters.watched():
                self._ask_all()
                x, named = self._microbatches([part.call for part in self._parts])
                numbers = Microbatches([*range(len(self._parts))])
                loss = self.pipe.step(x, numbers, microbatches=self._of_replica, **named).loss
            assert loss is not None, "a step has a loss"
        finally:
            self._parts = []
        self._flush_logs()
        return loss.detach()

    def _part(
        self, part: Mapping[str, Any], examples: int, total: int, items: Any, scaled: bool, accumulated: int
    ) -> _Part:
        """Return a microbatch with the weight of its loss in that of the batch.

        With w the part of the examples, and a loss of a / num_items_in_batch + b, where a is a sum over its targets and b a
        mean over its examples, w times the loss for w * num_items_in_batch is a / num_items_in_batch + w * b.
        """
        if not examples:
            return _Part(part, 0.0, items)
        share = examples / total
        if self._of_libraries:
            return _Part(part, (1.0 if scaled else share) / accumulated, items)
        return _Part(part, share / accumulated, None if items is None else items * share)

    def __call__(self, hidden: Tensor, number: int) -> Tensor:
        """Return the weighted loss of a microbatch: ``compute_loss`` with the call of the model answered."""
        part, trainer = self._parts[number], self._trainer
        if not part.weight:
            return hidden[:0].sum()
        references = iter(part.references)
        called: list[dict[str, Any]] = []
        device = hidden.device

        def answer(call: dict[str, Any]) -> Any:
            if not torch.is_grad_enabled():
                if called and self._is_same_input(call, called[0]) and not self.adapters.has_others:
                    return self._output(call, device)
                if (found := next(references, None)) is None:
                    raise self._another_number()
                return found
            if called:
                raise self._twice()
            called.append(call)
            _require_same(call, part.call)
            return self._output(call, device)

        # Stages that hold the last layers in several threads share the trainer's metrics.
        with (
            self._lock,
            self._calls.answering(answer),
            self.adapters.replaying(),
            torch.autocast(device.type, enabled=False),
            # A schedule may ask for a microbatch's forward again.
            thrown_away(trainer, self._model) if part.ran else nullcontext(trainer) as of_run,
        ):
            loss = self._compute(of_run, part)
        part.ran = True
        if not called:
            raise self._another_number()
        if not isinstance(loss, Tensor) or loss.dim():
            raise ConfigError(
                f"{self._name}.compute_loss must return the loss, a tensor without dimensions, got "
                f"{_described(loss)}"
            )
        return loss * part.weight

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return a context in which calls of the model are evaluations of the pipeline, on every process alike."""
        with self._calls.watched(), self.adapters.watched(), self._calls.answering(self._evaluated):
            try:
                yield
            except RuntimeError as error:
                if "meta tensor" not in str(error):
                    raise
                raise ConfigError(
                    f"{self._name}.compute_loss reads weights of the model, and in an evaluation in processes each has "
                    "those of its own stages alone; give such a term to the optimizer (weight_decay), or run threads"
                ) from error

    def log(self, logs: dict[str, Any]) -> bool:
        """Keep what ``compute_loss`` logs until the step has ended; return whether it was called from there."""
        if not self.adapters.replays:
            return False
        self._logs.append(logs)
        return True

    def share_metrics(self) -> None:
        """Give all processes the metrics that the last stages have kept since the last log; every process calls it."""
        metrics = getattr(self._trainer, "_metrics", None)
        if not self.pipe.in_processes or not isinstance(metrics, Mapping) or "train" not in metrics:
            return
        keeps = self.pipe.holds_last
        tokens = getattr(self._trainer, "_total_train_tokens", 0)
        every = RunGroup.of(self.pipe.world).each(
            lambda: (
                (self.pipe.replica, {k: [*v] for k, v in metrics["train"].items()}, tokens) if keeps else None
            )
        )
        told = sorted((one for one in every if one is not None), key=lambda one: one[0])
        of_replicas = [kept for _, kept, _ in told]
        metrics["train"].clear()
        for name in dict.fromkeys(name for kept in of_replicas for name in kept):
            metrics["train"][name] = [value for kept in of_replicas for value in kept.get(name, [])]
        for of_mode in metrics.values():
            # The only one that TRL does not average; in an evaluation it has the tokens of the training.
            if "num_tokens" in of_mode:
                of_mode["num_tokens"] = [sum(count for _, _, count in told)]

    def compare_together(self, batch: Mapping[str, Any], items: Any, scaled: bool) -> None:
        """Warn once if the loss of two microbatches as one is not the mean of their losses; see `BatchLossCheck`.

        Args:
            batch: a batch with what the collator makes of the first two microbatches together; others are not compared.
            items: what Trainer gives as ``num_items_in_batch``.
            scaled: whether Trainer adds the losses of accumulated batches.
        """
        if not self._check.compares(batch):
            return

        def loss(inputs: Mapping[str, Any], examples: int, total: int) -> float:
            return self._loss_alone(self._part(inputs, examples, total, items, scaled, 1))

        model = self._trainer.model
        trains = model.training
        model.eval()
        try:
            with torch.no_grad(), self.evaluating():
                self._check.compare(batch, loss)
        finally:
            model.train(trains)

    def _loss_alone(self, part: _Part) -> float:
        """Return a microbatch's weighted loss in an evaluation; NaN where it cannot be computed."""
        with thrown_away(self._trainer, self._model) as trainer:
            try:
                return float(self._compute(trainer, part)) * part.weight
            except RuntimeError as error:
                if "meta tensor" not in str(error):
                    raise
                return math.nan

    # What compute_loss asks the model

    def _ask_all(self) -> None:
        """Find the arguments of each microbatch's call with gradients, and the answers to those without."""
        counted = [part for part in self._parts if part.weight]
        while True:
            asked = [self._ask(part) for part in counted]
            needs = [each.needs for each in asked if each.needs is not None]
            found = {len(needs)}
            if self._has_later is None:  # later steps find what this one has found
                found = {*RunGroup.of(self.pipe.world).each(lambda: len(needs))}  # noqa: B023 - called at once
            if found == {0}:
                break
            if found != {len(asked)}:
                raise self._another_number()
            if asked[0].call is not None:
                self._has_later = True
            with self.adapters.with_adapters(asked[0].adapters):
                outputs = self._evaluate_parts(needs)
            for part, output in zip(counted, outputs, strict=True):
                part.references.append(output)
        if self._has_later is None:
            self._has_later = False
        for part, each in zip(counted, asked, strict=True):
            assert each.call is not None
            part.call = each.call
        for part in self._parts:
            if not part.weight:
                part.call = counted[-1].call

    def _ask(self, part: _Part) -> _Asked:
        asked, answers = _Asked(), iter(part.references)

        before = random_state()
        first: dict[str, Any] = {}

        def answer(call: dict[str, Any]) -> Any:
            if asked.call is None and not same_random_state(before, random_state()):
                raise self._draws()
            if not torch.is_grad_enabled():
                if (
                    asked.call is not None
                    and self._is_same_input(call, first)
                    and not self.adapters.has_others
                ):
                    return self._nothing(call)
                if (found := next(answers, None)) is not None:
                    return found
                raise _NeedsReference(call, self.adapters.active)
            if asked.call is not None:
                raise self._twice()
            first.update(call)
            if self._has_later is False:
                asked.call = call
                raise _Found
            # What follows may write into them.
            asked.call = {n: v.clone() if isinstance(v, Tensor) else v for n, v in call.items()}
            return self._nothing(call)

        try:
            goes_on = self._has_later is not False
            with (
                thrown_away(self._trainer, self._model, modules=goes_on) as trainer,
                self._calls.answering(answer),
            ):
                self._compute(trainer, part)
        except _Found:
            pass
        except _NeedsReference as found:
            asked.needs = found.call
            asked.adapters = found.adapters
            if any(_has_nan(value) for value in found.call.values()):
                raise ConfigError(
                    f"{self._name}.compute_loss calls the model without gradients on what its call with gradients has "
                    "returned, and that is known on the last stage alone; compute it before, or in the data collator"
                ) from None
        except Exception as error:
            # It runs on numbers that are NaN once the model was called, to see whether it calls it again.
            if asked.call is None or type(error) is ConfigError:
                raise
        if asked.call is None and asked.needs is None:
            raise ConfigError(
                f"{self._name}.compute_loss returns without a call of the model with gradients, model(**inputs), so that "
                "there is nothing to run in a pipeline"
            )
        return asked

    def _compute(self, trainer: Any, part: _Part) -> Any:
        # It may write into its inputs, and runs more than once.
        inputs = {n: v.clone() if isinstance(v, Tensor) else v for n, v in part.inputs.items()}
        with trainer.compute_loss_context_manager():
            return trainer.compute_loss(trainer.model, inputs, num_items_in_batch=part.items)

    def _nothing(self, call: Mapping[str, Any]) -> Any:
        """Return what the forward returns for a hidden state of NaN, without any parameter."""
        x, named, rest = self._divided(call)
        config = self._model.config.get_text_config()
        width, dtype = config.hidden_size, self._model.dtype
        shape = x.shape if self._own.first == "input_ids" else (len(x), 4)
        hidden = torch.full((*shape, width), float("nan"), dtype=dtype, device=x.device)
        return self._made(Reached(None, hidden, self._of_last(named), x if self._own.pools else None), rest)

    # Evaluations

    def _evaluate_parts(self, calls: Sequence[dict[str, Any]]) -> list[Any]:
        """Evaluate a call of each microbatch that counts, and return what each returns, on every process."""
        every = [*calls, *[calls[-1]] * (len(self._parts) - len(calls))]
        x, named = self._microbatches(every)
        count = self._of_replica
        result = self.pipe.evaluate(x, outputs=self.pipe.holds_last, microbatches=count, **named)

        def outputs() -> dict[int, Any]:
            if not self.pipe.holds_last:
                return {}
            start = self.pipe.replica * count
            made = {}
            for n, hidden in enumerate(result.outputs, start):
                ids, of_stages, rest = self._divided(every[n])
                reached = Reached(
                    self._own.head, hidden, self._of_last(of_stages), ids if self._own.pools else None
                )
                made[n] = self._made(reached, rest)
            return made

        found = self._shared(outputs)
        return [found[n] for n in range(len(calls))]

    def _evaluated(self, call: dict[str, Any]) -> Any:
        """Return what a call of the model returns, for a batch that is divided by rows; every process makes the call."""
        if torch.is_grad_enabled():
            raise ConfigError("an evaluation calls the model with gradients; call it within torch.no_grad()")
        ids, named, rest = self._divided(call)
        rows, count = len(ids), self.pipe.microbatches * self._replicas
        more = max(0, count - rows)
        divided = divided_images(ids, named, self._model.config, rows + more, count)
        inputs = filled({self._own.first: ids, **divided}, rows, more)
        x = inputs.pop(self._own.first)
        result = self.pipe.evaluate(x, outputs=self.pipe.holds_last, **inputs)
        here: dict[int, Tensor] = {}
        if self.pipe.holds_last:
            here = {self.pipe.replica: torch.cat([*result.outputs])}
        if self._replicas > 1:
            parts = RunGroup.of(self.pipe.world).each(lambda: {n: v.cpu() for n, v in here.items()})
            here = {n: v.to(ids.device) for part in parts for n, v in part.items()} if here else {}

        def output() -> dict[int, Any]:
            if not here:
                return {}
            hidden = torch.cat([here[n] for n in sorted(here)])[:rows]
            if self._check.moves_logits and not self.adapters.has_others:
                # Another direction at every token, which does not depend on the other rows or on padding.
                hidden = hidden + hidden.roll(1, -1)
            reached = Reached(self._own.head, hidden, self._of_last(named), ids if self._own.pools else None)
            return {0: self._made(reached, rest)}

        return self._shared(output)[0]

    def _shared(self, make: Callable[[], dict[int, Any]]) -> dict[int, Any]:
        """Return what the processes with the last stage make, on every process."""
        if not self.pipe.in_processes:
            return make()
        holders = self.pipe.schedule.placement.holders[-1]
        if len(holders) > 1:
            raise ConfigError(
                f"schedule {self.pipe.schedule.name} leaves outputs on several processes, and {self._name}.compute_loss "
                "needs them; take a schedule such as '1f1b'"
            )
        device = self._trainer.args.device
        told = RunGroup.of(self.pipe.world).each(lambda: {n: plain_output(v) for n, v in make().items()})
        return {n: restored_output(value, device) for each in told for n, value in each.items()}

    # Arguments and outputs

    def _microbatches(self, calls: Sequence[Mapping[str, Any]]) -> tuple[Any, dict[str, Any]]:
        """Return the token ids and the named inputs of the stages for calls of all microbatches."""
        divided = [self._divided(call) for call in calls]
        rows = [len(ids) for ids, _, _ in divided]
        ids = Microbatches([ids for ids, _, _ in divided])
        names = dict.fromkeys(name for _, named, _ in divided for name in named)
        return ids, {name: joined([named.get(name) for _, named, _ in divided], rows) for name in names}

    def _divided(self, call: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
        """Return a call's token ids, the named inputs of stages, and what the last one alone takes."""
        values = without_offsets({name: value for name, value in call.items() if value is not None})
        if not isinstance(ids := values.pop(self._own.first, None), Tensor):
            raise ConfigError(
                f"{self._name}.compute_loss calls the model without {self._own.first}, by which a batch is divided; got "
                f"{', '.join(call)}"
            )
        for name in _OF_MIDDLE:
            if values.pop(name, False):
                raise ConfigError(
                    f"{self._name}.compute_loss calls the model with {name}=True, and the outputs of middle stages are not "
                    "on the last one, where the loss is computed; take it out, or use penstock.Pipeline with layers that "
                    "pass on what the loss needs"
                )
        if getattr(self._model.config, "output_hidden_states", False):
            raise ConfigError(
                "the config's output_hidden_states is set, and the outputs of middle stages are not on the last one, where "
                "the loss is computed; set it to False"
            )
        named = {name: values.pop(name) for name in sorted(self._named & values.keys())}
        if strange := sorted(values.keys() - _OF_HEAD - _OWN):
            raise ConfigError(
                f"{self._name}.compute_loss calls the model with {strange[0]!r}, and the stages take {self._own.first}, "
                f"labels, {', '.join(sorted(self._named))} alone; remove it in the data collator or in compute_loss"
            )
        return ids, for_every_row(named, len(ids)), values

    def _is_same_input(self, call: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Return whether two calls give the stages the same, so that the last hidden state is the same."""
        return all(call.get(name) is other.get(name) for name in {self._own.first, *self._named})

    def _of_last(self, named: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in named.items() if name in self._own.named}

    def _made(self, reached: Reached, rest: Mapping[str, Any]) -> Any:
        self._own.ends(reached)
        return self._output(rest, reached.hidden.device)

    def _output(self, call: Mapping[str, Any], device: torch.device) -> Any:
        """Return what the forward makes of the hidden state that the last layer of this thread has got.

        Where the last rank has another device it is then on the trainer's, as the hooks of a ``device_map`` return it.
        """
        rest = {name: value for name, value in call.items() if name in _OF_HEAD and value is not None}
        forward = self._fused if rest.get("fused_lm_head") else None
        home = self._trainer.args.device
        with torch.autocast(device.type, dtype=self._autocast) if self._autocast else nullcontext():
            output = self._own.output(rest if device == home else send_to_device(rest, device), forward)
        if device != home:
            output = send_to_device(output, home)
        return convert_to_fp32(output) if self._autocast else output

    def _flush_logs(self) -> None:
        """Log on every process what the last stages have logged in a step."""
        logs, self._logs = self._logs, []
        if self.pipe.in_processes:
            logs = [each for told in RunGroup.of(self.pipe.world).each(lambda: logs) for each in told]
        for each in logs:
            self._trainer.log(each)

    @property
    def _of_replica(self) -> int:
        """Number of microbatches of each replica in a step."""
        return len(self._parts) // self._replicas

    @property
    def _name(self) -> str:
        return type(self._trainer).__name__

    def _draws(self) -> ConfigError:
        return ConfigError(
            f"{self._name}.compute_loss draws random numbers before it calls the model, and it runs twice: before the "
            "pipeline, and on the last stage; draw them in the data collator"
        )

    def _twice(self) -> ConfigError:
        return ConfigError(
            f"{self._name}.compute_loss calls the model twice with gradients, and a step of a pipeline is one forward and "
            "one backward; join both inputs to one batch in the data collator, or call it within torch.no_grad() where no "
            "gradient is needed"
        )

    def _another_number(self) -> ConfigError:
        return ConfigError(
            f"{self._name}.compute_loss calls the model another number of times on the last stage than before the step, or "
            "for some microbatches than for others; it must call it alike in every step and for every part of a batch"
        )


def _has_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())


def _require_same(call: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``compute_loss`` has called the model with other values than before the step."""
    for name in call.keys() | before.keys():
        one, other = call.get(name), before.get(name)
        if one is other:
            continue
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            differs = not torch.equal(one, other)
        else:
            differs = bool(one != other)
        if differs:
            raise ConfigError(
                f"compute_loss calls the model with another {name} on the last stage than before the step; what it gives "
                "the model must follow from its inputs alone. Make what is random, or counted, in the data collator"
            )


def _described(value: object) -> str:
    return (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )
