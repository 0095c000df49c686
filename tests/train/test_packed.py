"""Packed samples train as unpacked ones, and runs on packed, weighted data resume to the sample."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.stage.module import StageModule
from penstock.train.config.config import Config
from penstock.train.data.run_data import open_data, training_batch
from penstock.train.model.trainable import TrainableModel, build_model
from tests.support import hf_models, records
from tests.support.trainer import config_of


def gradients(
    config: Config, model: TrainableModel, batches: int
) -> tuple[float, dict[str, torch.Tensor], int]:
    """Sum of the losses of an epoch's tokens, its gradients, and the number of tokens, in plain PyTorch."""
    data = open_data(config, model)
    net = StageModule(model.layers)
    total, valid = 0.0, 0
    for step in range(batches):
        batch = training_batch(data, config, model, step)
        loss = model.masked_loss_fn(net(batch.x, **batch.named), batch.y) * batch.valid
        loss.backward()
        total, valid = total + loss.item(), valid + batch.valid
    return total, {name: p.grad for name, p in net.whole_model_parameters()}, valid


FAMILIES = ["own", *sorted(hf_models.FAMILIES)]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_training_is_unpacked_training_to_summation_order(tmp_path: Path, family: str):
    path = records.write_lines(tmp_path / "pairs.jsonl", records.completions(40))
    place = {} if family == "own" else {"path": str(records.folder(tmp_path, family))}
    found = []
    for packing in (False, True):
        data = {"packing": packing, "sequence": 96, "held_out": 0.2}
        # An epoch in one batch.
        size = 32
        config = config_of(tmp_path, path, "packed", 1, model=place, data=data, train={"batch": size})
        model = build_model(config)
        rows = open_data(config, model).per_epoch
        assert rows < 20 if packing else rows == size
        config = config_of(
            tmp_path,
            path,
            "p",
            1,
            model=place,
            data=data,
            train={"batch": rows},
            schedule={"microbatches": 1},
        )
        found.append(gradients(config, model, 1))
    (loss, grads, valid), (packed_loss, packed_grads, packed_valid) = found
    assert valid == packed_valid > 400
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    for name, grad in grads.items():
        scale = grad.abs().max().item()
        assert torch.allclose(packed_grads[name], grad, rtol=0, atol=2e-5 * scale + 1e-6), name
