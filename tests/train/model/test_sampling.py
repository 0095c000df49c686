from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from penstock.base.errors import ConfigError, DataError
from penstock.huggingface.weights import save_part
from penstock.stage.module import StageModule
from penstock.train.config import file as config_file
from penstock.train.config.config import Config, from_mapping
from penstock.train.config.sections import ModelConfig, SampleConfig
from penstock.train.data.tokenizer import ByteTokenizer
from penstock.train.model.llama import layers
from penstock.train.model.sampling import generate, sample_run, unsplit_model
from penstock.train.model.trainable import build_model

MODEL = {"width": 8, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 8}


class Counting(torch.nn.Module):
    """Finds the token after the last one likeliest, then the one after that, and so on around."""

    def __init__(self, vocabulary: int, steep: float = 1.0) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.steep = steep
        self.shown: list[int] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.shown.append(tokens.shape[1])
        ahead = (torch.arange(self.vocabulary) - tokens[..., None] - 1) % self.vocabulary
        return -self.steep * ahead.float()


def follow(model: torch.nn.Module, seed: int = 0, **changes: object) -> list[int]:
    given = {"length": 4, "context": 8, "temperature": 1.0, "top_k": 0, "end": None} | changes
    return generate(model, [3], generator=torch.Generator().manual_seed(seed), **given)


def test_temperature_zero_takes_the_likeliest_and_top_k_of_one_leaves_no_choice():
    assert follow(Counting(10), temperature=0.0) == [3, 4, 5, 6, 7]
    assert follow(Counting(10), temperature=5.0, top_k=1) == [3, 4, 5, 6, 7]


def test_top_k_draws_only_among_the_likeliest():
    tokens = follow(Counting(1000, steep=0.0001), length=300, top_k=2, context=1)
    assert {(b - a) % 1000 for a, b in itertools.pairwise(tokens)} == {1, 2}


def test_no_temperature_is_too_low_or_too_high():
    assert follow(Counting(10), temperature=1e-320) == follow(Counting(10), temperature=0.0)
    assert len(follow(Counting(10), temperature=1e300)) == 5


def test_a_lower_temperature_strays_less():
    def strays(temperature: float) -> int:
        tokens = follow(Counting(50, steep=0.5), length=300, temperature=temperature, context=1)
        return sum((b - a) % 50 != 1 for a, b in itertools.pairwise(tokens))

    assert strays(0.1) < 30 < strays(1.0)


def test_draws_depend_on_the_seed_alone():
    assert follow(Counting(50, 0.1), seed=1) == follow(Counting(50, 0.1), seed=1)
    assert follow(Counting(50, 0.1), seed=1) != follow(Counting(50, 0.1), seed=2)


def test_the_model_is_shown_no_more_than_its_context():
    model = Counting(100)
    follow(model, length=6, context=3)
    assert model.shown == [1, 2, 3, 3, 3, 3]


def test_the_end_token_ends_the_text_and_is_left_out():
    assert follow(Counting(6), length=20, temperature=0.0, end=0) == [3, 4, 5]


def test_generating_leaves_the_number_of_threads_as_it_was():
    torch.set_num_threads(2)
    follow(Counting(10))
    assert torch.get_num_threads() == 2


def save_run(folder: Path) -> Config:
    config = from_mapping({"model": MODEL, "sample": {"prompt": "def ", "length": 12}})
    folder.mkdir()
    (folder / "config.toml").write_text(config_file.dump(config))
    save_part(folder, dict(StageModule(layers(config.model, seed=9)).whole_model_parameters()), 0, 1)
    return config


def test_a_run_is_sampled_with_its_own_weights(tmp_path: Path):
    config = save_run(tmp_path / "run")
    text = sample_run(tmp_path / "run")
    assert text.startswith("def ")
    assert sample_run(tmp_path / "run") == text
    assert sample_run(tmp_path / "run", seed=1) != text
    model = StageModule(layers(config.model, seed=9))
    prompt = list(b"import ")
    options = {"length": 5, "context": 128, "temperature": 0, "top_k": 0, "end": 0}
    best = generate(model, prompt, generator=torch.Generator(), **options)
    wanted = SampleConfig(prompt="import ", length=5, temperature=0.0)
    assert sample_run(tmp_path / "run", wanted) == ByteTokenizer().decode(best)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"is not a run folder: it has no config.toml"):
        sample_run(tmp_path)


def test_weights_of_another_model_are_all_listed():
    config = Config(model=ModelConfig(**MODEL))
    state = dict(StageModule(layers(config.model)).whole_model_parameters())
    state["extra"] = state.pop("head.norm.weight")
    state["embedding.weight"] = torch.zeros(3, 8)
    with pytest.raises(DataError) as raised:
        unsplit_model(build_model(config), state)
    assert str(raised.value) == (
        "the weights do not fit the model: head.norm.weight is missing; extra is unknown; "
        "embedding.weight has shape (3, 8), not (256, 8)"
    )
