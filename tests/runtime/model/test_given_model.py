"""What may be given to a Pipeline as its model, and what is said about the rest."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import penstock
from penstock.base.errors import ConfigError, SplitError
from tests.support import hf_models, own_models
from tests.support.lanes import exhaustive


@pytest.mark.parametrize("family", ["llama", *exhaustive("gpt2")])
def test_a_model_of_hugging_face_goes_in_as_it_is_and_comes_back(family: str):
    net = hf_models.model(family, tied=True)
    expected = copy.deepcopy(net)
    tokens, labels, mask = hf_models.batch(sequence=10, side="right")
    loss = expected(tokens, attention_mask=mask, labels=labels).loss
    loss.backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    with penstock.Pipeline(net, ranks=2, microbatches=4, reduction=penstock.valid_tokens) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        result = pipe.step(tokens, labels, attention_mask=mask)
        optimizer.step()
        state = pipe.full_state_dict()
    assert abs(result.loss - loss.detach()) < 1e-6
    assert list(state) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        assert torch.allclose(state[name], value, rtol=1e-4, atol=1e-6), name
    assert pipe.unsplit() is net
    assert net.lm_head.weight is net.get_input_embeddings().weight
    expected.load_state_dict(state, strict=True)


def test_split_names_the_way_for_models_of_libraries():
    with pytest.raises(SplitError, match="to the Pipeline as it is"):
        penstock.split(hf_models.model("gpt2"))


def test_layers_that_were_split_before_keep_their_loss():
    net = own_models.made(own_models.NanoGPT)
    x, y = own_models.batch()
    with penstock.Pipeline(penstock.split(net, x, y), ranks=2, microbatches=2) as pipe:
        loss = pipe.step(x, y).loss
        assert pipe.unsplit() is net
    assert torch.allclose(loss, net(x, y)[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "loss_fn", "said"),
    [
        (nn.Sequential(nn.Linear(2, 2)), None, r"loss_fn must be given as loss_fn\(output, target\)"),
        (nn.Sequential(nn.Linear(2, 2)), 3, "loss_fn must be callable"),
        (3, nn.functional.mse_loss, "cannot cut a int into stages"),
        ("gpt2", nn.functional.mse_loss, "cannot cut a str into stages"),
        ({"a": 1}, nn.functional.mse_loss, "cannot cut a dict into stages"),
    ],
)
def test_what_is_no_model_or_loss_is_refused(model: object, loss_fn: object, said: str):
    with pytest.raises(ConfigError, match=said):
        penstock.Pipeline(model, loss_fn, microbatches=2)
