"""Checkpoints without frozen weights, of any model: small, loadable where the base is the same, refused elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.base.errors import ConfigError, DataError
from penstock.checkpoint.find import read_manifest
from penstock.checkpoint.frozen_weights import FrozenDigests, digest, digests_in


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Four matrices, of which only the last is trained."""
    torch.manual_seed(seed)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).to(dtype)
    layers[:3].requires_grad_(False)
    return layers


def pipeline(layers: nn.Sequential, ranks: int = 2) -> penstock.Pipeline:
    return penstock.Pipeline(layers, nn.functional.mse_loss, ranks=ranks, microbatches=2)


def trained(pipe: penstock.Pipeline, optimizer: penstock.PipelineOptimizer, step: int) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
    pipe.step(x, x)
    optimizer.step()
    optimizer.zero_grad()


def saved(folder: Path, steps: int = 2) -> dict[str, torch.Tensor]:
    with pipeline(model()) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.1)
        with penstock.Checkpoints(folder, pipe, optimizer, keep_frozen=False) as checkpoints:
            for n in range(steps):
                trained(pipe, optimizer, n)
                checkpoints.save()
        return {name: value.clone() for name, value in pipe.state_dict().items()}


def test_only_trained_weights_are_written_and_another_layout_continues(tmp_path: Path):
    expected = saved(tmp_path)
    manifest = read_manifest(tmp_path / "step-00000002")
    names = [name for name in manifest.tensors if name.startswith("model/")]
    assert names == ["model/3.weight", "model/3.bias"]
    assert set(manifest.values["frozen"]) == {f"{n}.{kind}" for n in range(3) for kind in ("weight", "bias")}
    with pipeline(model(), 4) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.1)
        with penstock.Checkpoints(tmp_path, pipe, optimizer) as checkpoints:
            loaded = checkpoints.load_newest()
            assert loaded is not None
            assert loaded.step == 2
            assert all(torch.equal(value, expected[name]) for name, value in pipe.state_dict().items())
            checkpoints.save()
            checkpoints.wait()
    assert "frozen" not in read_manifest(tmp_path / "step-00000002").values


@pytest.mark.parametrize(("seed", "dtype"), [(1, torch.float32), (0, torch.float64)])
def test_another_base_is_refused_and_nothing_is_loaded(seed: int, dtype: torch.dtype, tmp_path: Path):
    saved(tmp_path)
    with pipeline(model(seed, dtype)) as pipe, penstock.Checkpoints(tmp_path, pipe) as checkpoints:
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        with pytest.raises(ConfigError, match=r"0\.weight, 0\.bias, 1\.weight, 1\.bias and 2 more differ"):
            checkpoints.load_newest()
        assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


def test_a_weight_of_neither_kind_is_missing(tmp_path: Path):
    saved(tmp_path)
    layers = nn.Sequential(*model(), nn.Linear(4, 4))
    with (
        pipeline(layers) as pipe,
        penstock.Checkpoints(tmp_path, pipe) as checkpoints,
        pytest.raises(ConfigError, match=r"4\.weight is missing"),
    ):
        checkpoints.load_newest()


def test_a_digest_is_of_values_shape_and_dtype_and_is_renewed_after_a_write():
    ones = torch.ones(2, 3)
    assert digest(ones) == digest(torch.ones(3, 2).t())
    others = [ones.reshape(3, 2), ones.double(), ones.bfloat16(), ones * 2, torch.ones(0)]
    assert len({digest(value) for value in (ones, *others)}) == 6
    digests = FrozenDigests()
    first = digests.of("a", ones, ones)
    assert digests.of("a", ones, ones) == first
    ones.add_(1)
    assert digests.of("a", ones, ones) == digest(ones) != first


def test_malformed_digests_are_damage():
    for wrong in (3, {"a": 3}):
        with pytest.raises(DataError, match="'frozen' must be a dictionary of digests"):
            digests_in({"frozen": wrong}, Path("x"))
