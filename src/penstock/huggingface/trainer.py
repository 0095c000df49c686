"""Hugging Face's Trainer, with a pipeline in the place of its forward and backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from penstock.base.counts import is_count
from penstock.base.errors import ConfigError, PenstockError, describe_error, nearest
from penstock.huggingface.from_transformers import from_transformers
from penstock.huggingface.heads import CAUSAL, IMAGES, SEQUENCE, head_of
from penstock.huggingface.library import package_of
from penstock.huggingface.loss import ModelLoss, chunked_loss, has_library_loss
from penstock.huggingface.one_process import FilledSampler, WholeOptimizer, as_one_process, make_one_process
from penstock.huggingface.own_forward import IMAGE_INPUTS
from penstock.huggingface.own_optimizers import read_own_optimizers, with_own_optimizers
from penstock.huggingface.run_report import RunReport
from penstock.parallel.context.attention import SequencePart
from penstock.parallel.mesh import MeshShape
from penstock.runtime.batch.work import StepResult
from penstock.runtime.model.pipeline_model import gather_state
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.start.place import current_place
from penstock.runtime.workers.run_group import RunGroup
from penstock.stage.compute.linear_cross_entropy import IGNORED, LinearCrossEntropy
from penstock.stage.compute.shifted_loss import next_targets
from penstock.stage.split_backward.intercepted import has_local_uses

_OURS = {
    "loss_fn": "the model's own loss is used",
    "reduction": "losses are weighted by num_items_in_batch, as Trainer does",
    "seed": "set it in the training arguments",
    "autocast": "set bf16=True in the training arguments",
    "device": "it is that of the training arguments",
    "mesh": "give ranks, those of one pipeline; processes beyond them are replicas of it",
    "parallel": "the trainer sets it",
}
"""Options of `Pipeline` that the trainer sets, and what to do instead of giving them."""


class _StepLoss:
    """A model's own loss, summed over a microbatch's targets and divided by the number of targets of the whole step.

    Args:
        smoother: Trainer's label smoother, whose loss takes the place of the model's; None for none.

        shifts: whether a causal model's labels are those of the tokens themselves, which the loss shifts.

    Attributes:
        divisor: number of targets of the whole step.
    """

    def __init__(self, model: Any, smoother: Any, shifts: bool) -> None:
        head = head_of(model)
        if head == IMAGES and smoother is not None:
            raise ConfigError(
                "label_smoothing_factor must be 0 with a model of images and text: Trainer does not shift the labels of its "
                "class, so that each token would be trained to predict itself"
            )
        self.own, self.smoother = ModelLoss(model, head), smoother
        self.own.shifts &= shifts
        self.divisor: Tensor | int = 1
        self._chunked: LinearCrossEntropy | None = None
        if self.own.head == CAUSAL:
            self._chunked = chunked_loss(model, 0.0 if smoother is None else smoother.epsilon)
            if not shifts and self._chunked is not None:
                self._chunked = self._chunked.without_shift
        self.postpones_logits = self._chunked is not None

    def __call__(self, logits: Tensor, target: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        labels = target
        if isinstance(target, tuple):
            labels, counts = target
            logits, labels = logits[counts], labels[counts]
        assert isinstance(labels, Tensor)
        if not len(labels):  # only rows that fill up the batch
            return logits.sum()
        if self._chunked is not None:
            return self._chunked(logits, labels) * (self.own.count(labels) / self.divisor)
        if self.smoother is None:
            return self.own(logits, labels, self.divisor)
        smoothed: Tensor = self.smoother(
            {"logits": logits}, labels, shift_labels=self.own.shifts, num_items_in_batch=self.divisor
        )
        return smoothed


class PipelineTrainerMixin:
    """Trains by a pipeline in any subclass of ``transformers.Trainer``: ``class T(PipelineTrainerMixin, SFTTrainer)``.

    In one process the ranks are threads. Under torchrun or ``accelerate launch`` each process is a rank: ``ranks`` of them
    are a pipeline, and with more there are replicas of it. A step then takes as many rows as Trainer takes with a process
    for each replica, and the same ones.

    The model's own modules and parameters are used, so optimizers, schedules, clipping, callbacks, checkpoints and adapters
    of peft are the Trainer's. Loss, gradients and weights are the Trainer's up to the order in which microbatches are
    summed. The loss is the model's, by the labels that the data collator makes; with a vocabulary of 32,000 or more it is
    computed by chunks (`penstock.LinearCrossEntropy`), and the logits exist only where metrics of an evaluation need them.

    Args:
        pipeline: keyword arguments of `Pipeline`: ``microbatches`` (required), ``ranks``, ``schedule``, ``virtual_stages``,
            ``split``, ``recompute``, ``timeout``, ``execution``. A batch whose rows do not divide into the microbatches is
            filled up with rows that count for nothing. Two more are about what a run leaves in ``output_dir``:
            ``report=False`` writes no ``report.html``, ``metrics.jsonl`` and ``traces/``, and ``trace_every=50`` keeps the
            trace of every 50th update beside the first and the last. ``optimizer=[{"match": r"layers.*proj.weight",
            "optimizer": torch.optim.Muon, "lr": 0.02}]`` gives parameters an optimizer of their own, as `PipelineOptimizer`
            takes it; Trainer's learning-rate schedule holds for it, too. ``ep=2`` divides the experts of a mixture over the
            replicas, see `MeshShape`; ``cp=2`` divides the tokens of each sample over two processes, for which the data
            collator must pad to a multiple of ``2 * cp`` tokens.
        model, args, others, kwargs: arguments of the Trainer. ``activation_checkpointing=True``, once called
            ``gradient_checkpointing``, becomes ``recompute="full"``, unless `pipeline` says otherwise.

    Attributes:
        pipe: the pipeline.

    Raises:
        ConfigError: if an argument cannot work with a pipeline; says which and what to do instead.
    """

    pipe: Pipeline

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

    def __init__(
        self, model: Any = None, args: Any = None, *others: Any, pipeline: Mapping[str, Any], **kwargs: Any
    ) -> None:
        options = dict(pipeline)
        for name, instead in _OURS.items():
            if name in options:
                raise ConfigError(f"pipeline[{name!r}] cannot be given to a trainer: {instead}")
        allowed = [*signature(Pipeline).parameters, "report", "trace_every", "optimizer", "ep", "cp"]
        for name in options:
            if name not in allowed:
                raise ConfigError(
                    f"pipeline has no option {name!r}{nearest(name, allowed)}; it takes those of Pipeline, report, "
                    "trace_every, optimizer, ep and cp"
                )
        if "microbatches" not in options:
            raise ConfigError(
                'pipeline must say how many microbatches, as in {"ranks": 2, "microbatches": 8}'
            )
        reports, trace_every = options.pop("report", True), options.pop("trace_every", 0)
        self._own_optimizers = read_own_optimizers(options.pop("optimizer", []))
        if not isinstance(reports, bool):
            raise ConfigError(f"pipeline['report'] must be True or False, got {reports!r}")
        if trace_every != 0 and not is_count(trace_every):
            raise ConfigError(
                f"pipeline['trace_every'] must be a number of updates, or 0 for the first and the last alone, got "
                f"{trace_every!r}"
            )
        _require_known_loss(type(self))
        place = current_place()
        self._rank, processes = (0, 1) if place is None else place
        self._replicas = 1
        ep, self._cp = options.pop("ep", 1), options.pop("cp", 1)
        if processes > 1:
            ranks = options.setdefault("ranks", processes)
            self._replicas = _replicas(ranks, self._cp, processes)
            options["mesh"] = MeshShape(pp=ranks, dp=self._replicas, ep=ep, cp=self._cp)
        elif ep != 1 or self._cp != 1:
            name, size, what = ("ep", ep, "experts") if ep != 1 else ("cp", self._cp, "samples")
            raise ConfigError(
                f"pipeline[{name!r}] is {size!r}, and {what} are divided over processes: start torchrun with a multiple of "
                f"ranks x {name} processes"
            )
        self._in_processes = processes > 1
        if args is not None:
            _require_supported(args, self._in_processes, ep)
            args = copy.copy(args)
            for name in (
                "activation_checkpointing",
                "gradient_checkpointing",
            ):  # the new name and the old one
                if getattr(args, name, None):
                    setattr(args, name, False)
                    options.setdefault("recompute", "full")
        super().__init__(model, args, *others, **kwargs)  # type: ignore[call-arg]  # object is not the next class
        trainer: Any = self
        _require_supported_trainer(trainer, self._in_processes)
        if self._own_optimizers and trainer.optimizer is not None:
            raise ConfigError("give pipeline['optimizer'] or optimizers=, not both")
        settings = trainer.args
        trainer._train_batch_size = settings.train_batch_size  # Trainer read it before there were replicas
        settings._n_gpu = min(settings.n_gpu, 1)  # with more, Trainer would copy the model to every GPU
        base = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(base, "get_base_model"):
            base = base.get_base_model()
        # TRL replaces it by one that computes its loss in chunks; here, the loss is the pipeline's. Accelerate wraps it for
        # an earlier run. One of the user's stays, and is refused below.
        if _is_of_libraries(vars(base).get("_original_forward", vars(base).get("forward")), type(base)):
            vars(base).pop("forward", None)
        _require_plain_gradients(base)
        self._whole_model, self._loss = base, _StepLoss(base, trainer.label_smoother, self._cp == 1)
        self._require_same_loss()
        self._index, self._updates, self._logits_asked = 0, -1, True
        self.pipe = Pipeline(
            from_transformers(trainer.model),
            self._loss,
            reduction="sum",
            seed=settings.seed,
            device=settings.device,
            autocast=torch.bfloat16 if settings.bf16 else None,
            **options,
        )
        names = self.pipe.layers[0].batch
        self._takes = sorted(names.others) if names is not None else []
        self._report: RunReport | None = None
        if reports:
            self._report = RunReport(
                self.pipe,
                trace_every=trace_every,
                dtype="bf16" if settings.bf16 else str(base.dtype).removeprefix("torch."),
                mean_of_tokens=self._loss.own.head == CAUSAL and not settings.label_smoothing_factor,
            )
            trainer.add_callback(self._report)
        self._whole_optimizer: WholeOptimizer | None = None
        if self._in_processes and self._loss.own.head == CAUSAL:
            vars(base)["generate"] = partial(_generate, base, base.generate)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator; in processes, Trainer and Accelerate then see one process with a batch for all replicas."""
        trainer: Any = self
        base: Any = super()
        if not self._in_processes:
            base.create_accelerator_and_postprocess()
            return
        trainer.args = as_one_process(trainer.args, self._rank, self._replicas)
        base.create_accelerator_and_postprocess()
        make_one_process(trainer.accelerator, lambda norm: self.pipe.clip_grad_norm_(norm))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does; in processes, an error of one is told to the others, which end with it."""
        base: Any = super()
        try:
            return base.train(*args, **kwargs)
        except BaseException as error:
            if self.pipe.world is not None and isinstance(error, Exception):
                self.pipe.world.peer_registry.report_error(describe_error(error))
            if self._report is not None:
                self._report.close(error)
            raise

    def get_train_dataloader(self) -> Any:
        """Return the batches of a run: with replicas, the last one of an epoch is filled up as Accelerate does."""
        base: Any = super()
        loader = base.get_train_dataloader()
        workers = loader.worker_init_fn
        if self._in_processes and isinstance(workers, partial) and "rank" in workers.keywords:
            workers.keywords["rank"] = 0  # all processes draw the same random numbers
        batches = loader.batch_sampler
        trainer: Any = self
        fills = trainer.args.accelerator_config.even_batches and not trainer.args.dataloader_drop_last
        # The sampler of a streamed data set has no length: how many rows its last batch lacks is not known.
        if self._replicas > 1 and fills and isinstance(getattr(batches, "sampler", None), Sized):
            batches.sampler = FilledSampler(batches.sampler, batches.batch_size)
        return loader

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer as Trainer does; in processes, of this rank's parameters."""
        trainer: Any = self
        base: Any = super()
        if trainer.optimizer is not None:
            return base.create_optimizer(*args, **kwargs)
        elsewhere = [p for p in trainer.model.parameters() if p.is_meta and p.requires_grad]
        for parameter in elsewhere:
            parameter.requires_grad_(False)
        try:
            with _groups_of_one_process():
                optimizer = base.create_optimizer(*args, **kwargs)
        finally:
            for parameter in elsewhere:
                parameter.requires_grad_(True)
        if self._own_optimizers:
            optimizer = trainer.optimizer = with_own_optimizers(
                optimizer, trainer.model, self._own_optimizers
            )
        if self.pipe.mesh is not None and self.pipe.mesh.ep > 1:
            _update_one_by_one(optimizer)
            # Those of a checkpoint are the options of the run that saved it.
            optimizer.register_load_state_dict_post_hook(_update_one_by_one)
        if self._in_processes:
            self._whole_optimizer = WholeOptimizer(self.pipe, trainer.model, optimizer)
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
        trainer: Any = self
        model.train()
        self.pipe.train()
        if hasattr(trainer.optimizer, "train"):  # optimizers without a schedule switch their weights
            trainer.optimizer.train()
        batch = self._batch(trainer._prepare_inputs(inputs))
        self._loss.divisor = self._divisor(
            batch, num_items_in_batch, trainer.current_gradient_accumulation_steps
        )
        self._count_steps(trainer.state.global_step, trainer.args.gradient_accumulation_steps)
        if self.pipe.replicas > 1:
            self.pipe.reduce_gradients = trainer.accelerator.sync_gradients
        loss = self.pipe.step(batch.ids, batch.target, **batch.named).loss
        assert loss is not None, "the batch has labels"
        return loss.detach()

    def _require_same_loss(self) -> None:
        """Raise ConfigError if the loss of Trainer or of the model is not, or no longer, the one that the stages compute."""
        trainer: Any = self
        if trainer.compute_loss_func is not None or "compute_loss" in vars(trainer):
            name = "compute_loss_func" if trainer.compute_loss_func is not None else "trainer.compute_loss"
            raise ConfigError(
                f"{name} needs the logits of the whole batch, which a pipeline never has at once; use penstock.Pipeline "
                "with your loss_fn and a loop of your own"
            )
        model = self._whole_model
        if not has_library_loss(model):
            raise ConfigError(
                f"the loss_function of the {type(model).__name__} is {model.loss_function!r}, and only those of "
                "transformers are known to be sums that microbatches can divide; delete model._loss_function, or "
                "use penstock.Pipeline with yours as loss_fn and a loop of your own"
            )
        if trainer.label_smoother is not self._loss.smoother:
            raise ConfigError(
                "trainer.label_smoother was changed after the pipeline was built with the loss; set label_smoothing_factor "
                "in the training arguments"
            )

    def _batch(self, inputs: Mapping[str, Any]) -> _Batch:
        self._require_same_loss()
        batch = _Batch(inputs, self.pipe.microbatches * self._replicas, self._loss.own)
        if strange := [name for name in batch.named if name not in self._takes]:
            raise ConfigError(
                f"the data collator gives {strange[0]!r}, and the stages take input_ids, labels, {', '.join(self._takes)} "
                "alone; remove it in the data collator"
            )
        return batch

    def _divisor(self, batch: _Batch, counted: Tensor | int | None, accumulated: int) -> Tensor | int:
        """Return what the losses of a batch's targets are divided by, as Trainer divides them."""
        trainer: Any = self
        loss = self._loss
        if counted is not None and (loss.own.head == CAUSAL or loss.smoother is not None):
            return counted
        scaled = trainer.loss_is_scaled_for_ga
        if scaled is None:
            scaled = trainer.model_accepts_loss_kwargs and counted is not None
        return batch.targets if scaled else batch.targets * accumulated

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
        trainer: Any = super()
        return trainer.prediction_step(model, inputs, prediction_loss_only, *others, **kwargs)

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
        batch = self._batch(inputs)
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
        return result.loss, CausalLMOutput(loss=result.loss, logits=logits)

    def _joined(self, result: StepResult) -> Tensor:
        """Return the logits of an evaluation's batch, with those of all replicas; every process calls it."""
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
        trainer: Any = self
        if pipe.mesh is not None and (cp := pipe.mesh.cp) > 1:
            every = torch.stack([of_replica[n] for n in range(pipe.replicas)]).unflatten(0, (-1, cp))
            of_replica = dict(enumerate(SequencePart(0, cp).join(parts, 1) for parts in every))
        return torch.cat([of_replica[n] for n in range(self._replicas)]).to(trainer.args.device)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the model; in processes the first one writes all of it."""
        trainer: Any = self
        base: Any = super()
        if not self._in_processes:
            base._save(output_dir, state_dict)
            return
        world = self.pipe.world
        assert world is not None, "the ranks are processes"
        own = {name: value for name, value in trainer.model.state_dict().items() if not value.is_meta}
        whole = gather_state(
            {name: value.detach().cpu() for name, value in own.items()}, world, keeps=self._rank == 0
        )
        # Tied weights come from two processes; one tensor under both names is written once.
        for name, tied_to in getattr(trainer.model, "all_tied_weights_keys", {}).items():
            if name in whole and tied_to in whole:
                whole[name] = whole[tied_to]
        self._lead(lambda: base._save(output_dir, whole))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        trainer: Any = self
        base: Any = super()
        whole = self._whole_optimizer
        if whole is None:
            base._save_optimizer_and_scheduler(output_dir)
            return
        saved = _Saved(whole.state(keep=self._rank == 0))
        optimizer, trainer.optimizer = trainer.optimizer, saved
        try:
            self._lead(lambda: base._save_optimizer_and_scheduler(output_dir))
        finally:
            trainer.optimizer = optimizer

    def _save_rng_state(self, output_dir: str) -> None:
        base: Any = super()
        self._lead(lambda: base._save_rng_state(output_dir))

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        base: Any = super()
        with _parts_of_a_file():
            base._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        base: Any = super()
        with _parts_of_a_file():
            base._load_best_model()

    def _lead(self, job: Callable[[], None]) -> None:
        """Run a job on the first process while the others wait for it; its error is raised on all of them."""
        if not self._in_processes:
            job()
            return

        def run() -> None:
            try:
                job()
            except (PenstockError, OSError):
                raise
            except Exception as error:  # of torch, safetensors or the tokenizer
                raise PenstockError(describe_error(error)) from error

        RunGroup.of(self.pipe.world).decide(run)


class PipelineTrainer(PipelineTrainerMixin, transformers.Trainer):  # type: ignore[misc]  # transformers is untyped here
    """``transformers.Trainer`` that trains a model by a pipeline; see `PipelineTrainerMixin`."""


def _generate(model: Any, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Generate, unless this process has only the weights of its own stages."""
    if any(p.is_meta for p in model.parameters()):
        raise ConfigError(
            "model.generate needs all weights, and while it trains in processes each has those of its own stages alone: "
            "train in one process, with ranks as threads, or generate from a saved model in another script"
        )
    return generate(*args, **kwargs)


class _Saved:
    """A state in the place of an optimizer that is saved."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


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


@contextmanager
def _parts_of_a_file() -> Iterator[None]:
    """Return a context in which torch does not warn that weights of other processes are left alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*to a meta parameter in the current model", category=UserWarning
        )
        yield


class _Batch:
    """A batch of a data collator, filled up to a multiple of the microbatches of all replicas.

    Attributes:
        ids: int64, (rows, tokens).
        target: labels; of a filled batch with a label for each row, also which rows count, bool (rows).
        named: the other inputs of the model's forward.
        rows: rows before it was filled up.
        targets: number of targets that count; at least 1.
    """

    def __init__(self, inputs: Mapping[str, Any], microbatches: int, loss: ModelLoss) -> None:
        values = {name: value for name, value in inputs.items() if value is not None}
        missing = [name for name in ("input_ids", "labels") if name not in values]
        if missing:
            raise ConfigError(
                f"the data collator gives {', '.join(values)} and no {' and no '.join(missing)}; take one that makes "
                "labels, such as DataCollatorForLanguageModeling(tokenizer, mlm=False) for a causal language model"
            )
        if "cu_seq_lens_q" in values or "seq_idx" in values:
            raise ConfigError(
                "the data collator put all rows of the batch into one (padding_free, or TRL's packing), which a pipeline "
                "cannot divide into microbatches; take packing_strategy='wrapped', and padding_free=False"
            )
        self.rows, self.targets = len(values["input_ids"]), loss.count(values["labels"]).clamp(min=1)
        for name in IMAGE_INPUTS:
            if name in values and len(values[name]) != self.rows:
                raise ConfigError(
                    f"the data collator gives {len(values[name])} {name} for {self.rows} rows, and a batch is divided into "
                    "microbatches by rows; give every row one image"
                )
        # The model would broadcast what it gets for one row, such as positions.
        values = {
            name: value.expand(self.rows, *value.shape[1:])
            if isinstance(value, Tensor) and value.dim() and len(value) == 1
            else value
            for name, value in values.items()
        }
        more = -self.rows % microbatches
        if more:
            values = {
                name: torch.cat([value, value[-1:].expand(more, *value.shape[1:])])
                if isinstance(value, Tensor) and value.dim() and len(value) == self.rows
                else value
                for name, value in values.items()
            }
        self.ids, labels = values.pop("input_ids"), values.pop("labels")
        self.target: Tensor | tuple[Tensor, Tensor] = labels
        if more and loss.head == SEQUENCE:  # numbers have no value that is ignored
            self.target = labels, torch.arange(len(labels), device=labels.device) < self.rows
        elif more:
            labels[self.rows :] = IGNORED
        if loss.head == CAUSAL and not loss.shifts:
            self.target = next_targets(labels, IGNORED)
        self.named = values


def _replicas(ranks: object, cp: object, processes: int) -> int:
    """Return how many replicas with samples of their own the processes are."""
    if not is_count(cp):
        raise ConfigError(f"pipeline['cp'] must be a positive number of processes, got {cp!r}")
    if not is_count(ranks) or processes % (ranks * cp):
        times = f" x cp {cp}" if cp > 1 else ""
        raise ConfigError(
            f"pipeline['ranks'] is {ranks!r}{times}, and there are {processes} processes; start a multiple of the "
            "ranks, one for each rank of each replica"
        )
    return processes // (ranks * cp)


def _require_plain_gradients(model: Any) -> None:
    """Raise ConfigError if a parameter's gradient has hooks: they would see that of each microbatch."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"parameter {name} has a hook of its gradient, which Trainer runs once a batch, and a pipeline once a "
                "microbatch; change gradients in a callback's on_pre_optimizer_step"
            )


def _is_of_libraries(forward: Any, kind: Any) -> bool:
    """Return whether a forward on a model is its class's or TRL's."""
    # TRL's has the name and module of the class's, so the module whose globals it reads tells where it is from.
    of = getattr(forward, "__globals__", {}).get("__name__", "")
    return getattr(forward, "__func__", None) is kind.forward or of.startswith("trl.")


def _require_known_loss(kind: type) -> None:
    """Raise ConfigError if a trainer's class computes a loss of its own, or runs a step, which would not be used."""
    for base in kind.__mro__[kind.__mro__.index(PipelineTrainerMixin) + 1 :]:
        if "training_step" in vars(base) and package_of(base) not in ("transformers", "trl"):
            raise ConfigError(
                f"{base.__name__} has a training_step of its own, which the pipeline's would replace; define it in a class "
                "that inherits from PipelineTrainerMixin, where super().training_step is the pipeline's"
            )
    for base in kind.__mro__:
        ours = base in (PipelineTrainerMixin, transformers.Trainer)
        sft = base.__module__.startswith("trl.") and base.__name__ == "SFTTrainer"  # its loss is the model's
        if "compute_loss" in vars(base) and not (ours or sft):
            raise ConfigError(
                f"{base.__name__} computes a loss of its own from the logits of the whole batch (compute_loss), which a "
                "pipeline never has at once; use penstock.Pipeline with your loss_fn and a loop of your own"
            )


_UPDATES_IN_BACKWARD = ("lomo", "adalomo", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise",
                        "galore_adafactor_layerwise", "apollo_adamw_layerwise")  # fmt: skip
_OF_EACH_PARAMETER = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
"""Optimizers that update each parameter by itself, and so on the rank that has it."""


def _require_supported(args: Any, in_processes: bool, ep: int) -> None:
    """Raise ConfigError if a training argument cannot work with a pipeline."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer == "adafactor" and ep > 1:
        raise ConfigError(
            f"optim='adafactor' cannot be used with ep = {ep}: transformers' own computes with whole matrices, and ep "
            "divides those of experts; take adamw_torch, or leave ep at 1"
        )
    refused = {
        "fsdp": (args.fsdp, "the pipeline divides the model; take fsdp out"),
        "deepspeed": (args.deepspeed, "the pipeline divides the model; take deepspeed out"),
        "parallelism_config": (
            getattr(args, "parallelism_config", None),
            "the pipeline divides the model; give ranks in pipeline={...}",
        ),
        "torch_compile": (
            args.torch_compile,
            'compile the stages with pipeline={"execution": penstock.ExecutionOptions(compile=...)}',
        ),
        "fp16": (args.fp16, "take bf16=True, which needs no loss scale"),
        "neftune_noise_alpha": (
            args.neftune_noise_alpha,
            "its noise would depend on the microbatches; unset it",
        ),
        "predict_with_generate": (
            getattr(args, "predict_with_generate", False),
            "a pipeline evaluates losses and logits; generate with the saved model",
        ),
        "loss_type": (
            getattr(args, "loss_type", "nll") != "nll" and args.loss_type,
            "the loss is the model's own, loss_type='nll'",
        ),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "a pipeline is built for its microbatches; choose per_device_train_batch_size",
        ),
        "use_liger_kernel": (
            args.use_liger_kernel,
            "its kernels take the place of modules that the stages already have; apply them to the model before",
        ),
        "optim": (
            optimizer in _UPDATES_IN_BACKWARD and optimizer,
            "it updates weights within the backward of each batch; take another one, such as adamw_torch",
        ),
    }
    if in_processes:
        refused |= {
            "split_batches": (
                args.accelerator_config.split_batches,
                "every process takes the batch of all replicas; set it to False in accelerator_config",
            ),
            "dispatch_batches": (
                args.accelerator_config.dispatch_batches,
                "every process reads the rows itself; leave it out of accelerator_config",
            ),
            "save_on_each_node": (
                args.save_on_each_node,
                "the first process writes for all; set it to False",
            ),
            "eval_use_gather_object": (args.eval_use_gather_object, "set it to False"),
            "fp16_full_eval": (
                args.fp16_full_eval,
                "the weights that train would be converted; set it to False",
            ),
            "bf16_full_eval": (
                args.bf16_full_eval,
                "the weights that train would be converted; set it to False",
            ),
        }
        if optimizer not in _OF_EACH_PARAMETER:
            refused["optim"] = optimizer, f"in processes, take one of {', '.join(_OF_EACH_PARAMETER)}"
    for name, (value, instead) in refused.items():
        if value:
            raise ConfigError(f"{name}={value!r} cannot be used with a pipeline: {instead}")


def _require_supported_trainer(trainer: Any, in_processes: bool) -> None:
    """Raise ConfigError if an argument of the Trainer itself cannot work with a pipeline."""
    if trainer.model_init is not None:
        raise ConfigError(
            "model_init makes a new model when training begins, and the pipeline is built before; give model=model_init()"
        )
    if getattr(trainer.model.config, "output_router_logits", False):
        raise ConfigError(
            "the config's output_router_logits is set, and Trainer adds the auxiliary loss of the whole batch's routers, "
            "which a pipeline never has at once; set it to False (TRL's SFTTrainer sets it unless router_aux_loss_coef=0.0 "
            "in SFTConfig), or use penstock.Pipeline, which adds that of each microbatch"
        )
    if in_processes and (trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None):
        raise ConfigError(
            "in processes the optimizer is made of each rank's own parameters, by the training arguments (optim, "
            "learning_rate); leave out optimizers and optimizer_cls_and_kwargs"
        )
