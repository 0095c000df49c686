"""Outputs of models travel between processes as plain values, and are outputs again where they arrive."""

from __future__ import annotations

import torch
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from penstock.huggingface.model_outputs import plain_output, restored_output


def test_outputs_arrive_as_they_were_with_all_that_they_hold():
    logits, hidden = torch.ones(2, 3, requires_grad=True), (torch.zeros(2), torch.ones(2))
    inner = BaseModelOutput(last_hidden_state=hidden[0], hidden_states=hidden)
    given = [CausalLMOutput(loss=None, logits=logits), inner, {"counts": 3}, [hidden[1], "text"], None]
    sent = plain_output(given)
    assert not any(isinstance(value, CausalLMOutput | BaseModelOutput) for value in sent)
    output, outer, counts, values, nothing = restored_output(sent, torch.device("cpu"))
    assert isinstance(output, CausalLMOutput)
    assert output.loss is None
    assert torch.equal(output.logits, logits)
    assert not output.logits.requires_grad
    assert isinstance(outer, BaseModelOutput)
    assert torch.equal(outer.last_hidden_state, hidden[0])
    assert isinstance(outer.hidden_states, tuple)
    assert all(torch.equal(one, other) for one, other in zip(outer.hidden_states, hidden, strict=True))
    assert (counts, nothing) == ({"counts": 3}, None)
    assert torch.equal(values[0], hidden[1])
    assert values[1] == "text"
    (placed,) = restored_output(plain_output([logits]), torch.device("meta"))
    assert placed.is_meta
