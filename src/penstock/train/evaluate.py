"""Loss of a trained model on files, through a pipeline at any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.base.errors import ConfigError
from penstock.checkpoint.checkpoints import Checkpoints
from penstock.checkpoint.find import FOLDER, is_checkpoint
from penstock.huggingface import weights
from penstock.huggingface.model_folder import CONFIG, INDEX, WEIGHTS, read_json
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.start.place import current_place
from penstock.train.config import file as config_file
from penstock.train.config.config import Config
from penstock.train.config.resolve import resolve, shape_of
from penstock.train.data.run_data import batches_of, total_loss
from penstock.train.data.samples import WindowSamples
from penstock.train.data.sources import open_sources, open_whole
from penstock.train.data.text_tokens import Watch
from penstock.train.device import choose_device, sharing_cores
from penstock.train.loop import build_pipeline
from penstock.train.model.trainable import TrainableModel, build_model, require_readable

# Tokens of a sample for a Hugging Face folder, whose config has no data.sequence.
_SEQUENCE = 1024


@dataclass(frozen=True)
class Evaluation:
    """Loss of a model on some data.

    Attributes:
        loss: mean loss in nats per token.
        perplexity: exponential of the loss; None if it is too large for a number.
        bits_per_token: the loss in bits.
        bits_per_byte: bits by bytes of the text; None where its bytes are not known, as for ``.npy`` files.
    """

    data: str
    tokens: int
    loss: float
    perplexity: float | None
    bits_per_token: float
    bits_per_byte: float | None


def evaluate(
    target: Path, paths: Sequence[str], overrides: Sequence[str], watch: Watch = lambda name, share: None
) -> list[Evaluation] | None:
    """Evaluate a model on files, in threads or as one of several processes.

    Args:
        paths: files or folders of data; none for the held-out data of the run.

    Returns:
        An evaluation of each path, on the leading process; None on the others.
    """
    config, run = _config_of(target, overrides)
    if run is None and not paths:
        raise ConfigError(
            f"{target} is not a run, which would have held-out data; give files to evaluate it on"
        )
    place = current_place()
    config = resolve(config, place.size if place else None)
    trained = run if run is not None and target == run and _has_weights(run) else None
    model = build_model(config, trained)
    device = choose_device(config.runtime.device, in_processes=place is not None)
    opened = [_open(path, config, model, watch) for path in (paths or (None,))]
    results = []
    with ExitStack() as stack:
        threads = stack.enter_context(
            sharing_cores(
                shape_of(config.parallel).ranks, config.runtime.threads, in_processes=place is not None
            )
        )
        pipe = stack.enter_context(build_pipeline(config, model, device, None))
        torch.set_num_threads(threads)
        if run is not None:
            _load(pipe, target, run, model)
        for name, samples in opened:
            nats, tokens = total_loss(pipe, batches_of(samples.once(), model, config.train.batch))
            results.append(_evaluation(name, nats, tokens, samples, model))
        leads = pipe.world is None or torch.distributed.get_rank() == 0
    return results if leads else None


def _config_of(target: Path, overrides: Sequence[str]) -> tuple[Config, Path | None]:
    """Return the config to evaluate with, and the folder of the run, if the target is one or a checkpoint in one."""
    run = target.parent.parent if is_checkpoint(target) else target
    if (run / "config.toml").is_file():
        config = config_file.load(run / "config.toml", overrides)
        return replace(config, train=replace(config.train, resume="")), run
    if not (target / CONFIG).is_file():
        raise ConfigError(
            f"{target} is neither the folder of a run (there is no config.toml in it), nor a checkpoint in one, nor a "
            f"Hugging Face folder with a {CONFIG}"
        )
    longest = read_json(target / CONFIG).get("max_position_embeddings")
    sequence = min(_SEQUENCE, longest) if isinstance(longest, int) else _SEQUENCE
    return config_file.load(
        None, [f"model.path={str(target)!r}", f"data.sequence={sequence}", *overrides]
    ), None


def _has_weights(run: Path) -> bool:
    return any((run / name).is_file() for name in (WEIGHTS, INDEX))


def _open(path: str | None, config: Config, model: TrainableModel, watch: Watch) -> tuple[str, WindowSamples]:
    if path is None:
        opened = open_sources(config.data, model.tokenizer, config.train.seed, watch)
    else:
        opened = open_whole(replace(config.data, path=path, held_out_path=""), model.tokenizer, watch)
    require_readable(config, model, [] if opened.text is None else [opened.text])
    return path or "held-out data of the run", opened.held_out


def _load(pipe: Pipeline, target: Path, run: Path, model: TrainableModel) -> None:
    """Load the weights of a run or a checkpoint, unless the layers have them already."""
    if target == run and _has_weights(run):
        if model.source is None:
            pipe.load_state_dict(weights.load(run))
        return
    with Checkpoints(run / FOLDER, pipe) as checkpoints:
        if target != run:
            checkpoints.load(target)
        elif checkpoints.load_newest() is None:
            raise ConfigError(f"the run {run} has neither weights nor a checkpoint yet")


def _evaluation(
    name: str, nats: float, tokens: int, samples: WindowSamples, model: TrainableModel
) -> Evaluation:
    loss = nats / tokens
    bits = nats / math.log(2)
    size = tokens if model.tokenizer.unit == "byte" else samples.size
    return Evaluation(
        name,
        tokens,
        loss,
        math.exp(loss) if loss < 700 else None,
        bits / tokens,
        bits / size if size else None,
    )
