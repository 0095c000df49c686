"""Hugging Face's Trainer, with a pipeline in the place of its forward and backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput, QuestionAnsweringModelOutput

from penstock.base.counts import is_count
from penstock.base.errors import ConfigError, describe_error
from penstock.huggingface.forward_layers import forward_of
from penstock.huggingface.from_transformers import from_transformers
from penstock.huggingface.heads import CAUSAL, IMAGES, MASKED, QUESTIONS, SEQUENCE, TOKEN, head_of
from penstock.huggingface.loss import StepLoss
from penstock.huggingface.one_process import FilledSampler, WholeOptimizer, as_one_process, make_one_process
from penstock.huggingface.own_optimizers import read_own_optimizers, with_own_optimizers
from penstock.huggingface.part_collator import (
    EXAMPLES,
    PARTS,
    TOGETHER,
    PartCollator,
    counted,
    divided_by_rows,
)
from penstock.huggingface.run_report import RunReport
from penstock.huggingface.token_budget import NAME as TOKENS
from penstock.huggingface.token_budget import TokenBudget, attention_share, read_budget
from penstock.huggingface.trainer_batch import PartsBatch, TrainerBatch
from penstock.huggingface.trainer_loss import TrainerLoss
from penstock.huggingface.trainer_options import require_options, trainer_mesh
from penstock.huggingface.trainer_refusals import (
    computes_own_loss,
    is_of_libraries,
    require_known_step,
    require_own_parameters,
    require_plain_gradients,
    require_same_loss,
    require_supported_arguments,
    require_supported_trainer,
)
from penstock.huggingface.trainer_saves import TrainerSaves
from penstock.parallel.context.attention import SequencePart
from penstock.runtime.batch.work import StepResult
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.start.place import current_place
from penstock.runtime.workers.run_group import RunGroup
from penstock.stage.devices import place_of, places_of
from penstock.stage.split_backward.intercepted import has_local_uses


class PipelineTrainerMixin(TrainerSaves):
    """Trains by a pipeline in any subclass of ``transformers.Trainer``: ``class T(PipelineTrainerMixin, SFTTrainer)``.

    In one process the ranks are threads. Under torchrun or ``accelerate launch`` each process is a rank: ``ranks`` of them
    are a pipeline, and with more there are replicas of it. A step then takes as many rows as Trainer takes with a process
    for each replica, and the same ones.

    The model's own modules and parameters are used, so optimizers, schedules, clipping, callbacks, checkpoints and adapters
    of peft are the Trainer's. Loss, gradients and weights are the Trainer's up to the order in which microbatches are
    summed. The loss is the model's, by the labels that the data collator makes; with a vocabulary of 32,000 or more it is
    computed by chunks (`penstock.LinearCrossEntropy`), and the logits exist only where metrics of an evaluation need them.

    Args:
        pipeline: keyword arguments of `Pipeline`: ``microbatches``, ``ranks``, ``schedule``, ``virtual_stages``, ``split``,
            ``recompute``, ``timeout``, ``execution``. A batch with fewer examples than microbatches is filled up with ones
            that count for nothing. ``devices=["cuda:0", "cuda:1"]`` gives each rank of one process its own.
            ``tokens_per_microbatch=4096`` in place of ``microbatches`` sorts the examples of a batch by length into as many
            microbatches as it takes for each to have at most so many tokens, padding included, and at least as many as there
            are ranks, which is the number of an evaluation. Two more are about what a run leaves in ``output_dir``:
            ``report=False`` writes no ``report.html``, ``metrics.jsonl`` and ``traces/``, and ``trace_every=50`` keeps the
            trace of every 50th update beside the first and the last.
            ``optimizer=[{"match": r"layers.*proj.weight", "optimizer": torch.optim.Muon, "lr": 0.02}]`` gives parameters an
            optimizer of their own, as `PipelineOptimizer` takes it; Trainer's learning-rate schedule holds for it, too.
            ``ep=2`` divides the experts of a mixture over the replicas, see `MeshShape`; ``cp=2`` divides the tokens of each
            sample over two processes, for which the data collator must pad to a multiple of ``2 * cp`` tokens.
        given, kwargs: arguments of the Trainer. ``activation_checkpointing=True``, once called
            ``gradient_checkpointing``, becomes ``recompute="full"``, unless `pipeline` says otherwise.

    Attributes:
        pipe: the pipeline.

    Raises:
        ConfigError: if an argument cannot work with a pipeline; says which and what to do instead.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class whose constructor or methods are a Trainer's and not the pipeline's, by the order of its bases."""
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[1 : cls.__mro__.index(PipelineTrainerMixin)]:
            takes = signature(base).parameters.values()
            passes_on = any(p.name == "pipeline" or p.kind is p.VAR_KEYWORD for p in takes)
            if base is transformers.Trainer or ("__init__" in vars(base) and not passes_on):
                raise ConfigError(
                    f"PipelineTrainerMixin must come before {base.__name__} among the bases of {cls.__name__}; after it, "
                    f"the pipeline's methods are not reached. Write class {cls.__name__}(PipelineTrainerMixin, ...)"
                )

    def __init__(self, *given: Any, pipeline: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        options = dict(pipeline) if isinstance(pipeline, Mapping) else {}
        require_options(options)
        reports, trace_every = options.pop("report", True), options.pop("trace_every", 0)
        collate = options.get("collate", "parts")
        if collate not in ("parts", "batch"):
            raise ConfigError(
                f"pipeline['collate'] must be 'parts', where the data collator makes each microbatch of a part of the "
                f"examples, or 'batch', where it makes the whole batch, whose rows are divided; got {collate!r}"
            )
        self._collates_parts = collate == "parts"
        self._own_optimizers = read_own_optimizers(options.pop("optimizer", []))
        if not isinstance(reports, bool):
            raise ConfigError(f"pipeline['report'] must be True or False, got {reports!r}")
        if trace_every != 0 and not is_count(trace_every):
            raise ConfigError(
                f"pipeline['trace_every'] must be a number of updates, or 0 for the first and the last alone, got "
                f"{trace_every!r}"
            )
        require_known_step(type(self), PipelineTrainerMixin)
        place = current_place()
        self._rank, processes = (0, 1) if place is None else place
        self._replicas = 1
        ep, self._cp = options.pop("ep", 1), options.pop("cp", 1)
        if processes > 1:
            mesh = trainer_mesh(options | {"ep": ep, "cp": self._cp}, processes)
            options |= {"ranks": mesh.pp, "mesh": mesh}
            self._replicas = mesh.dp
        elif ep != 1 or self._cp != 1:
            name, size, what = ("ep", ep, "experts") if ep != 1 else ("cp", self._cp, "samples")
            raise ConfigError(
                f"pipeline[{name!r}] is {size!r}, and {what} are divided over processes: start torchrun with a multiple of "
                f"ranks x {name} processes"
            )
        self._in_processes = processes > 1
        budget = read_budget(options, self._replicas, self._cp)
        options.pop("collate", None)
        devices = options.pop("devices", None)
        self._has_devices = devices is not None
        # Trainers of TRL have another order of arguments.
        every = [*given, *kwargs.values()]
        args = next((one for one in every if isinstance(one, transformers.TrainingArguments)), None)
        if args is not None:
            before = args
            require_supported_arguments(args, self._in_processes, ep)
            args = copy.copy(args)
            # The new name and the old one.
            for name in ("activation_checkpointing", "gradient_checkpointing"):
                if getattr(args, name, None):
                    setattr(args, name, False)
                    options.setdefault("recompute", "full")
            given = tuple(args if one is before else one for one in given)
            kwargs = {name: args if one is before else one for name, one in kwargs.items()}
        super().__init__(*given, **kwargs)
        require_supported_trainer(self, self._in_processes)
        if self._own_optimizers and self.optimizer is not None:
            raise ConfigError("give pipeline['optimizer'] or optimizers=, not both")
        settings = self.args
        # Trainer read it before there were replicas.
        setattr(self, "_train_batch_size", settings.train_batch_size)  # noqa: B010 - a private name of the library
        settings._n_gpu = min(settings.n_gpu, 1)  # with more, Trainer would copy the model to every GPU
        base = self.accelerator.unwrap_model(self.model)
        if hasattr(base, "get_base_model"):
            base = base.get_base_model()
        # TRL replaces it by one that computes its loss in chunks; here, the loss is the pipeline's. Accelerate wraps it for
        # an earlier run. One of the user's stays, and is refused below.
        forward = vars(base).get("_original_forward", vars(base).get("forward"))
        fused = None
        if _is_forward_of_libraries(forward, type(base)):
            fused = None if getattr(forward, "__func__", None) is type(base).forward else forward
            vars(base).pop("forward", None)
        require_plain_gradients(base)
        self._whole_model = base
        self._index, self._updates, self._logits_asked = 0, -1, True
        layers = from_transformers(self.model)
        forward_of(layers).divides_images = False  # they belong to examples, or are divided by their tokens
        self._budget: TokenBudget | None = None
        if budget is not None:
            self._budget = replace(budget, attention=attention_share(layers, base.config))
        self._own_loss: TrainerLoss | None = None
        self._loss: StepLoss | None = None
        if computes_own_loss(self, base, PipelineTrainerMixin, self._cp):
            self._own_loss = TrainerLoss(
                self,
                base,
                forward_of(layers),
                fused,
                replicas=self._replicas,
                autocast=torch.bfloat16 if settings.bf16 else None,
                of_libraries=is_of_libraries(self, PipelineTrainerMixin),
            )
        else:
            self._loss = StepLoss(base, self.label_smoother, self._cp == 1)
            require_same_loss(self, self._whole_model, self._loss)
            if (labels := _labels_of_row(self._loss.own.head, place_of(base.parameters()))) is not None:
                self._loss.own.passes_items = forward_of(layers).passes_items(labels)
        if devices is None and len(places_of(base.parameters())) <= 1:
            devices = settings.device
        self.pipe = Pipeline(
            layers,
            self._own_loss or self._loss,
            reduction="sum",
            seed=settings.seed,
            device=devices,
            autocast=torch.bfloat16 if settings.bf16 else None,
            **options,
        )
        if self.pipe.ranks == 1 and "ranks" not in options:
            warnings.warn(
                "pipeline has no 'ranks', so one rank has the whole model and nothing is divided; give their number, "
                'as in {"ranks": 2, "microbatches": 8}, or "devices" with a device for each',
                stacklevel=2,
            )
        if self._has_devices:
            # As transformers says it of a model that a device_map has spread, which accelerate then leaves where it is.
            base.hf_device_map = {n.rpartition(".")[0]: p.device for n, p in base.named_parameters()}
        if self._own_loss is not None:
            self._own_loss.pipe = self.pipe
            if fused is not None:
                vars(base)["forward"] = fused
        names = self.pipe.layers[0].batch
        self._takes = sorted(names.others) if names is not None else []
        self._first_step = True
        self._report: RunReport | None = None
        if reports:
            self._report = RunReport(
                self.pipe,
                trace_every=trace_every,
                dtype="bf16" if settings.bf16 else str(base.dtype).removeprefix("torch."),
                mean_of_tokens=self._loss is not None
                and self._loss.own.head == CAUSAL
                and not settings.label_smoothing_factor,
                varies=self._budget is not None,
            )
            self.add_callback(self._report)
        self._whole_optimizer: WholeOptimizer | None = None
        if self._in_processes and head_of(base) in (CAUSAL, IMAGES):
            vars(base)["generate"] = partial(_generate, base, base.generate)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator; in processes, Trainer and Accelerate then see one process with a batch for all replicas."""
        if not self._in_processes:
            super().create_accelerator_and_postprocess()
            return
        self.args = as_one_process(self.args, self._rank, self._replicas)
        super().create_accelerator_and_postprocess()
        make_one_process(self.accelerator, lambda norm: self.pipe.clip_grad_norm_(norm))

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Leave a model whose ranks have a device each where it is; one device may not have the memory for all of it.

        Of one that has the weights of own stages alone, the pipeline moves these.
        """
        self._has_devices |= len(places_of(model.parameters())) > 1 and not self._in_processes
        has_own_alone = self._in_processes and any(p.is_meta for p in model.parameters())
        if not self._has_devices and not has_own_alone:
            super()._move_model_to_device(model, device)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does; in processes, an error of one is told to the others, which end with it."""
        try:
            return super().train(*args, **kwargs)
        except BaseException as error:
            if self.pipe.world is not None and isinstance(error, Exception):
                self.pipe.world.peer_registry.report_error(describe_error(error))
            if self._report is not None:
                self._report.close(error)
            raise

    def get_train_dataloader(self) -> Any:
        """Return the batches of a run: with replicas, the last one of an epoch is filled up as Accelerate does."""
        collator = self.data_collator
        if self._collates_parts:
            parts = self._budget or self.pipe.microbatches * self._replicas
            # A sum over targets that transformers or TRL divide by their number is that of its parts.
            sums = is_of_libraries(self, PipelineTrainerMixin) and self._is_scaled(1)
            compares = self._own_loss is not None and not sums
            main_input = self._whole_model.main_input_name
            self.data_collator = PartCollator(collator, parts, main_input, compares)
        try:
            loader = super().get_train_dataloader()
        finally:
            self.data_collator = collator
        workers = loader.worker_init_fn
        if self._in_processes and isinstance(workers, partial) and "rank" in workers.keywords:
            workers.keywords["rank"] = 0  # all processes draw the same random numbers
        batches = loader.batch_sampler
        fills = self.args.accelerator_config.even_batches and not self.args.dataloader_drop_last
        # The sampler of a streamed data set has no length: how many rows its last batch lacks is not known.
        if self._replicas > 1 and fills and isinstance(getattr(batches, "sampler", None), Sized):
            batches.sampler = FilledSampler(batches.sampler, batches.batch_size)
        return loader

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer as Trainer does; in processes, of this rank's parameters."""
        if self.optimizer is not None:
            return super().create_optimizer(*args, **kwargs)
        elsewhere = [p for p in self.model.parameters() if p.is_meta and p.requires_grad]
        for parameter in elsewhere:
            parameter.requires_grad_(False)
        try:
            with _groups_of_one_process():
                optimizer = super().create_optimizer(*args, **kwargs)
        finally:
            for parameter in elsewhere:
                parameter.requires_grad_(True)
        if self._own_optimizers:
            optimizer = self.optimizer = with_own_optimizers(optimizer, self.model, self._own_optimizers)
        if self.pipe.mesh is not None and self.pipe.mesh.ep > 1:
            _update_one_by_one(optimizer)
            # Those of a checkpoint are the options of the run that saved it.
            optimizer.register_load_state_dict_post_hook(_update_one_by_one)
        if self._in_processes:
            self._whole_optimizer = WholeOptimizer(self.pipe, self.model, optimizer)
        return optimizer

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        """Leave the norm of gradients of divided experts to the pipeline, too."""
        return False

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run the forward and backward of a batch; gradients accumulate in the parameters.

        Args:
            model: the model, which is the trainer's own.
            inputs: what the data collator made.
            num_items_in_batch: targets of all batches of the optimizer's step; None if Trainer does not count them: batches
                then have equal weights. Models with classification heads do not use it, and Trainer then adds the means of
                accumulated batches where it has counted, as here.

        Returns:
            The loss, a 0-d tensor.
        """
        model.train()
        self.pipe.train()
        if hasattr(self.optimizer, "train"):  # optimizers without a schedule switch their weights
            self.optimizer.train()
        inputs = self._prepared(inputs)
        if self._first_step and self._in_processes:
            require_own_parameters(self)
        if self._budget is not None and PARTS not in inputs:
            raise ConfigError(
                f"pipeline[{TOKENS!r}] divides batches in the trainer's own data loader, and get_train_dataloader returns "
                "another; make yours of super().get_train_dataloader(), or give pipeline['microbatches'] in its place"
            )
        accumulated = self.current_gradient_accumulation_steps
        self._count_steps(self.state.global_step, self.args.gradient_accumulation_steps)
        if self.pipe.replicas > 1:
            self.pipe.reduce_gradients = self.accelerator.sync_gradients
        if (own_loss := self._own_loss) is not None:
            if PARTS not in inputs:
                inputs = divided_by_rows(inputs, self.pipe.microbatches * self._replicas)
            scaled = self._is_scaled(num_items_in_batch)
            loss = own_loss.step(inputs[PARTS], inputs[EXAMPLES], num_items_in_batch, scaled, accumulated)
            own_loss.compare_together(inputs, num_items_in_batch, scaled)
            self._first_step = False
            return loss.to(self.args.device)
        assert self._loss is not None
        self._first_step = False
        batch = self._batch(inputs)
        self._loss.divisor = self._divisor(batch, num_items_in_batch, accumulated)
        count = batch.count // self._replicas
        found = self.pipe.step(batch.ids, batch.target, microbatches=count, **batch.named).loss
        assert found is not None, "the batch has labels"
        return found.detach().to(self.args.device)  # the last rank may have another one

    def _prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return what Trainer makes of a batch, with its parts as of accumulated batches."""
        if PARTS not in inputs:
            prepared: dict[str, Any] = self._prepare_inputs(inputs)
            return prepared
        made = {**inputs, PARTS: [self._prepare_inputs(part) for part in inputs[PARTS]]}
        if TOGETHER in inputs:
            made[TOGETHER] = self._prepare_inputs(inputs[TOGETHER])
        return made

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count the targets of batches as Trainer counts those of accumulated ones: by microbatch."""
        return super()._get_num_items_in_batch(
            [part for batch in batch_samples for part in counted(batch)], device
        )

    def _batch(self, inputs: Mapping[str, Any]) -> TrainerBatch | PartsBatch:
        assert self._loss is not None
        require_same_loss(self, self._whole_model, self._loss)
        batch: TrainerBatch | PartsBatch
        if PARTS in inputs:
            batch = PartsBatch(inputs[PARTS], inputs[EXAMPLES], self._loss.own)
        else:
            batch = TrainerBatch(inputs, self.pipe.microbatches * self._replicas, self._loss.own)
        if strange := [name for name in batch.named if name not in self._takes]:
            raise ConfigError(
                f"the data collator gives {strange[0]!r}, and the stages take {self._loss.own.first}, labels, "
                f"{', '.join(self._takes)} "
                "alone; remove it in the data collator"
            )
        return batch

    def _divisor(
        self, batch: TrainerBatch | PartsBatch, counted: Tensor | int | None, accumulated: int
    ) -> Tensor | int:
        """Return what the losses of a batch's targets are divided by, as Trainer divides them."""
        loss = self._loss
        assert loss is not None
        if counted is not None and (batch.takes_items or loss.smoother is not None):
            return counted
        scaled = self._is_scaled(counted)
        targets = batch.targets.clamp(min=1)
        return targets if scaled else targets * accumulated

    def _is_scaled(self, counted: Tensor | int | None) -> bool:
        """Return whether losses of accumulated batches add up, by the rule of Trainer."""
        scaled: bool | None = self.loss_is_scaled_for_ga
        if scaled is not None:
            return scaled
        of_model = self.model_accepts_loss_kwargs and counted is not None
        return bool(of_model or self.compute_loss_func is not None)

    def _count_steps(self, updates: int, accumulated: int) -> None:
        """Number the batch from the start of the run, also in a resumed one: dropout depends on this number."""
        self._index = self._index + 1 if updates == self._updates else 0
        self._updates = updates
        self.pipe.steps = updates * accumulated + self._index

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, *others: Any, **kwargs: Any
    ) -> Any:
        """Return loss, logits and labels of a batch of an evaluation, as Trainer does.

        Args:
            prediction_loss_only: whether the loss is enough; logits are then not kept.
        """
        self._logits_asked = not prediction_loss_only
        with nullcontext() if self._own_loss is None else self._own_loss.evaluating():
            return super().prediction_step(model, inputs, prediction_loss_only, *others, **kwargs)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the loss of a batch of an evaluation, and its logits, if they are asked for.

        Args:
            return_outputs: also return the model's output, with the loss and the logits (default False).
            num_items_in_batch: number by which the summed loss is divided; None for the number of targets.
        """
        if self._loss is None:
            more = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch, **kwargs}
            return super().compute_loss(model, inputs, **more)
        batch = self._batch(inputs)
        assert isinstance(batch, TrainerBatch)
        self._loss.divisor = self._divisor(batch, num_items_in_batch, 1)
        keep = return_outputs and self._logits_asked
        for name in ("output_hidden_states", "output_attentions") if keep else ():
            if getattr(self._whole_model.config, name, False):
                raise ConfigError(
                    f"the config's {name} is set, and a pipeline's predictions are the logits alone; set it to False, or "
                    "prediction_loss_only=True in the training arguments"
                )
        result = self.pipe.evaluate(batch.ids, batch.target, outputs=keep, **batch.named)
        if not return_outputs:
            return result.loss
        logits = self._joined(result)[: batch.rows] if keep else None
        if logits is not None and self._loss.own.head == QUESTIONS:
            start, end = logits.unbind(-1)
            return result.loss, QuestionAnsweringModelOutput(
                loss=result.loss, start_logits=start, end_logits=end
            )
        return result.loss, CausalLMOutput(loss=result.loss, logits=logits)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does, with the metrics that its loss has kept on the processes with the last stage."""
        if self._own_loss is not None:
            if self._own_loss.log(logs):
                return
            self._own_loss.share_metrics()
        super().log(logs, *args, **kwargs)

    def _joined(self, result: StepResult) -> Tensor:
        """Return the logits of an evaluation's batch over all replicas; every process calls it."""
        pipe = self.pipe
        if not self._in_processes:
            return torch.cat(result.outputs)
        holders = pipe.schedule.placement.holders[-1]
        if len(holders) > 1:
            raise ConfigError(
                f"schedule {pipe.schedule.name} leaves an evaluation's logits on several processes; set "
                "prediction_loss_only=True, or take a schedule such as '1f1b'"
            )
        parts = RunGroup.of(pipe.world).each(
            lambda: (pipe.replica, torch.cat(result.outputs).cpu()) if pipe.holds_last else None
        )
        of_replica = dict(part for part in parts if part is not None)
        if pipe.mesh is not None and (cp := pipe.mesh.cp) > 1:
            every = torch.stack([of_replica[n] for n in range(pipe.replicas)]).unflatten(0, (-1, cp))
            of_replica = dict(enumerate(SequencePart(0, cp).join(parts, 1) for parts in every))
        return torch.cat([of_replica[n] for n in range(self._replicas)]).to(self.args.device)


class PipelineTrainer(PipelineTrainerMixin, transformers.Trainer):  # type: ignore[misc]  # transformers is untyped here
    """``transformers.Trainer`` that trains a model by a pipeline; see `PipelineTrainerMixin`."""


def _labels_of_row(head: str, device: torch.device | None) -> Tensor | None:
    """Return labels of one row of four tokens; None of a head whose loss is known to take a number of targets, or not to."""
    shape = {MASKED: (1, 4), TOKEN: (1, 4), SEQUENCE: (1,)}.get(head)
    return None if shape is None else torch.zeros(shape, dtype=torch.int64, device=device)


def _generate(model: Any, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Generate, unless this process has only the weights of its own stages."""
    if any(p.is_meta for p in model.parameters()):
        raise ConfigError(
            "model.generate needs all weights, and while it trains in processes each has its own stages' weights alone: "
            "train in one process, with ranks as threads, or generate from a saved model in another script"
        )
    return generate(*args, **kwargs)


def _update_one_by_one(optimizer: Any) -> None:
    """Turn off torch's updates of many tensors at once in groups with experts: they take no DTensors beside others."""
    for group in optimizer.param_groups:
        if any(map(has_local_uses, group["params"])):
            group.update(dict.fromkeys({"foreach", "fused"} & group.keys(), False))


@contextmanager
def _groups_of_one_process() -> Iterator[None]:
    """Return a context in which Trainer makes no groups of their own for DTensors, so that every layout has the same."""
    module: Any = transformers.trainer
    before = getattr(module, "has_mixed_dtensor", None)
    if before is not None:
        module.has_mixed_dtensor = lambda parameters: False
    try:
        yield
    finally:
        if before is not None:
            module.has_mixed_dtensor = before


def _is_forward_of_libraries(forward: Any, kind: Any) -> bool:
    """Return whether a forward on a model is its class's or TRL's."""
    # TRL's has the name and module of the class's, so the module whose globals it reads tells where it is from.
    of = getattr(forward, "__globals__", {}).get("__name__", "")
    return getattr(forward, "__func__", None) is kind.forward or of.startswith("trl.")
