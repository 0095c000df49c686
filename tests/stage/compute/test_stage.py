"""The count of bytes that a stage holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.stage.compute.module_buffers import snapshot_buffers
from penstock.stage.compute.runner import Settings
from penstock.stage.compute.stage import Stage
from penstock.stage.layers import as_layers
from penstock.stage.module import StageModule
from penstock.stage.values import Message


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("policy", ["none", "full", "auto"])
def test_a_stage_holds_no_bytes_when_every_backward_has_run(policy: str, layers: int, drop: bool):
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(layers)]
    stage = Stage(0, StageModule(as_layers(blocks)), settings=Settings(recompute=policy))
    for step in range(2):
        stage.begin(step)
        for microbatch in range(2):
            stage.forward(microbatch, (Message((torch.ones(2, 4),), None, (True,)),), inputs_only=drop)
            assert stage.held_bytes > 0
            if drop:
                stage.recompute(microbatch)
            stage.backward(microbatch, (Message((torch.ones(2, 4),)),))
            assert stage.held_bytes == 0
    if policy == "auto" and not drop:
        assert [layer.inputs for layer in stage.layer_bytes()] == [2 * 4 * 4] * layers


def test_buffers_that_cannot_be_written_to_are_put_back_where_they_were_not_written():
    net = nn.Linear(2, 2)
    net.register_buffer("cache", torch.arange(3.0)[:, None].expand(-1, 2))
    restore = snapshot_buffers(net)
    cache = net.cache
    net.cache = torch.zeros(5, 2)
    restore()
    assert net.cache is cache
