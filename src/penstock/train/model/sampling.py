"""Text generation with the weights of a trained run, in an unsplit model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.base.errors import ConfigError, DataError
from penstock.huggingface import weights
from penstock.stage.module import StageModule
from penstock.stage.rng.initial import generator_for
from penstock.train.config import file as config_file
from penstock.train.config.config import Config
from penstock.train.config.sections import SampleConfig
from penstock.train.model.trainable import TrainableModel, build_model


def sample_run(folder: Path, sample: SampleConfig | None = None, seed: int | None = None) -> str:
    """Generate text with the weights of a finished run."""
    config = read_config(folder)
    trainable = build_model(config, folder)
    # Layers from a folder have their weights already.
    model = unsplit_model(trainable, None if trainable.source else weights.load(folder))
    sample = sample or config.sample
    prompt = trainable.tokenizer.encode(sample.prompt or "")
    tokens = generate(
        model,
        prompt,
        length=sample.length,
        context=config.data.sequence,
        temperature=sample.temperature,
        top_k=sample.top_k,
        generator=generator_for(config.train.seed if seed is None else seed, "sample"),
        end=trainable.tokenizer.end,
    )
    return trainable.tokenizer.decode(tokens)


def read_config(folder: Path) -> Config:
    """Read the resolved config in a run's folder."""
    if not os.path.isfile(folder / "config.toml"):
        raise ConfigError(f"{folder} is not a run folder: it has no config.toml")
    return config_file.load(folder / "config.toml")


def unsplit_model(trainable: TrainableModel, state: dict[str, Tensor] | None) -> StageModule:
    """Return the unsplit model in evaluation mode, with the weights in `state` unless it is None."""
    model = StageModule(trainable.layers)
    if state is None:
        return model.eval()
    parameters = dict(model.whole_model_parameters())
    problems = [f"{name} is missing" for name in parameters if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in parameters]
    problems += [
        f"{name} has shape {tuple(state[name].shape)}, not {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in state and state[name].shape != parameter.shape
    ]
    if problems:
        raise DataError("the weights do not fit the model: " + "; ".join(problems))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])
    return model.eval()


def generate(
    model: torch.nn.Module,
    prompt: Sequence[int],
    *,
    length: int,
    context: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
    end: int | None = None,
) -> list[int]:
    """Return the prompt and up to `length` further tokens.

    Args:
        model: module from tokens (1, n) to logits (1, n, vocabulary).
        context: number of last tokens that the model gets.
    """
    tokens = list(prompt)
    with torch.inference_mode(), _one_thread():
        for _ in range(length):
            logits = model(torch.tensor([tokens[-context:]]))[0, -1]
            token = _draw(logits, temperature, top_k, generator)
            if token == end:
                break
            tokens.append(token)
    return tokens


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: a short sequence is too little work to share, and more threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    best, tokens = logits.topk(min(top_k, len(logits)) if top_k else len(logits))
    # Distances from the best score, in double precision, so that no temperature makes them infinite.
    scores = (best - best[0]).double() / temperature
    chosen = torch.multinomial(torch.softmax(scores, 0), 1, generator=generator)
    return int(tokens[chosen])
