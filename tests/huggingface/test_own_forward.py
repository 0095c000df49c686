"""Models of transformers cut by their own forward: what is proved, what is refused, and what is kept."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, LlamaForCausalLM, LlamaModel

import penstock
from penstock.base.errors import SplitError
from penstock.huggingface.own_forward import OwnForward
from penstock.huggingface.proof import require_equal
from penstock.huggingface.small_config import small_config
from tests.support import hf_models

HIDDEN = torch.zeros(8, 12, 16)
NO_VALUES: dict[str, torch.Tensor | None] = {}


def forward_of(family: str = "llama") -> OwnForward:
    net = hf_models.model(family)
    return OwnForward(net, net.get_submodule)


def test_blocks_of_a_microbatch_share_one_mask():
    own = forward_of()
    _, _, mask = hf_models.batch()
    calls = [own.call(n, HIDDEN, {"attention_mask": mask}) for n in range(4)]
    assert all(each.kwargs["attention_mask"] is calls[0].kwargs["attention_mask"] for each in calls)
    other = own.call(0, HIDDEN, {"attention_mask": mask.clone()})
    assert other.kwargs["attention_mask"] is not calls[0].kwargs["attention_mask"]


def test_arguments_are_dropped_with_their_mask():
    own = forward_of()
    _, _, mask = hf_models.batch()
    found = weakref.ref(own.call(0, HIDDEN, {"attention_mask": mask}).kwargs["attention_mask"])
    assert found() is not None
    del mask
    gc.collect()
    assert found() is None


def test_a_mask_that_was_written_to_is_made_again():
    own = forward_of()
    _, _, mask = hf_models.batch()
    before = own.call(0, HIDDEN, {"attention_mask": mask}).kwargs["attention_mask"].clone()
    mask[:, 2] = 0
    assert not torch.equal(own.call(0, HIDDEN, {"attention_mask": mask}).kwargs["attention_mask"], before)


def test_arguments_made_while_generating_serve_training():
    own = forward_of()
    with torch.inference_mode():
        own.call(0, HIDDEN, NO_VALUES)
    cosine, _ = own.call(0, HIDDEN, NO_VALUES).kwargs["position_embeddings"]
    assert not cosine.is_inference()


def test_recording_arguments_draws_no_random_numbers():
    own = forward_of("gpt2")
    assert own.model.training
    own.model.transformer.drop.p = 0.5
    before = torch.get_rng_state()
    own.call(0, HIDDEN, NO_VALUES)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_copy_of_a_layer_shares_the_forward():
    own = forward_of()
    assert copy.deepcopy(own) is own


def test_a_forward_that_does_something_between_blocks_is_refused(monkeypatch: pytest.MonkeyPatch):
    net = hf_models.model("llama")

    def between(self: nn.Module, input_ids=None, inputs_embeds=None, **kwargs):
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        places = torch.arange(hidden.shape[1])[None]
        tables = self.rotary_emb(hidden, places)
        for block in self.layers:
            hidden = block(hidden, position_embeddings=tables) * 2
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    monkeypatch.setattr(type(net.model), "forward", between)
    with pytest.raises(SplitError, match="changes the hidden state between block 0 and block 1"):
        penstock.from_transformers(net)


def test_other_numbers_after_the_blocks_are_refused(monkeypatch: pytest.MonkeyPatch):
    config = hf_models.config("llama", intermediate_size=28)
    monkeypatch.setattr(OwnForward, "hidden_of", lambda self, output: output * 1.5)
    # The norms behind it divide the factor away, except for their epsilon.
    words = r"other logits than its forward\. The first tensor that differs from the model's: model\.layers\.1\.self_attn"
    with pytest.raises(SplitError, match=words):
        require_equal(config, weights=1)


def test_a_decoder_whose_loss_does_not_shift_labels_is_refused():
    with pytest.raises(SplitError, match=r"for labels its forward computes another loss"):
        require_equal(small_config(CONFIG_MAPPING["bart"]()), weights=1)


class Doubled(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss * 2
        return output


class Named(LlamaForCausalLM):
    """A class whose forward is the library's."""


class Scaled(LlamaModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state * 2
        return output


def test_a_forward_of_a_subclass_is_refused():
    config = hf_models.model("llama").config
    with pytest.raises(SplitError, match="Doubled has a forward of its own"):
        penstock.from_transformers(Doubled(config))
    penstock.from_transformers(Named(config))
    net = LlamaForCausalLM(config)
    net.model = Scaled(config)
    with pytest.raises(SplitError, match="model has the forward of Scaled"):
        penstock.from_transformers(net)


def hook(*_: object) -> None:
    return None


@pytest.mark.parametrize(
    ("path", "register"),
    [
        ("", "register_forward_hook"),
        ("", "register_forward_pre_hook"),
        ("", "register_full_backward_hook"),
        ("model", "register_forward_pre_hook"),
    ],
)
def test_hooks_on_what_no_stage_runs_whole_are_refused(path: str, register: str):
    net = hf_models.model("llama")
    getattr(net.get_submodule(path), register)(hook)
    with pytest.raises(SplitError, match="has hooks"):
        penstock.from_transformers(net)


def test_a_block_whose_forward_was_replaced_is_refused():
    net = hf_models.model("llama")
    net.model.layers[2].forward = net.model.layers[2].forward
    with pytest.raises(SplitError, match=r"the forward of model\.layers\.2 was replaced"):
        penstock.from_transformers(net)
