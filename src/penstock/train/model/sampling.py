"""Text from a trained run: its weights in an unsplit model, one token after the other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import ConfigError, DataError
from penstock.huggingface import weights
from penstock.stage.module import StageModule
from penstock.stage.rng.initial import generator_for
from penstock.train.config import file as config_file
from penstock.train.config.config import Config, SampleConfig
from penstock.train.model.trainable import TrainableModel, language_of


def sample_run(folder: Path, wanted: SampleConfig | None = None, seed: int | None = None) -> str:
    """Generate text with the weights of a finished run.

    Args:
        folder: the run's.
        wanted: prompt, length and way of drawing; the run's own if not given.
        seed: of the draws; the run's own if not given.

    Returns:
        The prompt and what follows it.

    Raises:
        ConfigError: no such run, or a prompt that is none.
        DataError: weights that cannot be read or do not fit the run's model.
    """
    config = read_config(folder)
    language = language_of(config, folder)
    # Layers from a folder have their weights already.
    model = whole_model(language, None if language.source else weights.load(folder))
    wanted = wanted or config.sample
    prompt = language.codec.encode(wanted.prompt or "")
    tokens = generate(
        model,
        prompt,
        length=wanted.length,
        context=config.data.sequence,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        generator=generator_for(config.train.seed if seed is None else seed, "sample"),
        end=language.codec.end,
    )
    return language.codec.decode(tokens)


def read_config(folder: Path) -> Config:
    """The resolved config a run has left in its folder."""
    if not os.path.isfile(folder / "config.toml"):
        raise ConfigError(f"{folder} is no run folder: it has no config.toml")
    return config_file.load(folder / "config.toml")


def whole_model(language: TrainableModel, state: dict[str, Tensor] | None) -> StageModule:
    """The unsplit model in evaluation mode, with these weights if there are any.

    Raises:
        DataError: weights missing, unknown or of another shape; all are listed.
    """
    model = StageModule(language.layers)
    if state is None:
        return model.eval()
    own = dict(model.whole_model_parameters())
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in own]
    problems += [
        f"{name} has shape {tuple(state[name].shape)}, not {tuple(parameter.shape)}"
        for name, parameter in own.items()
        if name in state and state[name].shape != parameter.shape
    ]
    if problems:
        raise DataError("the weights do not fit the model: " + "; ".join(problems))
    with torch.no_grad():
        for name, parameter in own.items():
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
    """The prompt and up to `length` further tokens.

    Args:
        model: tokens (1, n) → logits (1, n, vocabulary).
        prompt: at least one token.
        length: how many to add at most.
        context: how many of the last tokens the model is shown.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: draw among this many; 0 draws among all.
        generator: for the draws.
        end: the token at which the text ends early; it is left out.
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
    """One short sequence is too little work to share; more threads would only wait for one another."""
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
    # As distances from the best one, in double precision, so that no temperature makes them infinite.
    scores = (best - best[0]).double() / temperature
    chosen = torch.multinomial(torch.softmax(scores, 0), 1, generator=generator)
    return int(tokens[chosen])
