"""Hugging Face models through the pipeline, against transformers' own loss and gradients on the whole padded batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_models

FAMILIES = sorted(hf_models.FAMILIES)
STEPS = [(12, "right"), (9, "left"), (12, "right")]
"""Sequence length and side of the padding."""


def pipeline(like: object, ranks: int | None = None, schedule: str = "1f1b") -> penstock.Pipeline:
    return penstock.Pipeline(
        penstock.from_transformers(like),
        penstock.causal_lm_loss,
        ranks=ranks,
        microbatches=4,
        schedule=schedule,
        reduction=penstock.valid_tokens,
    )


def whole_batch(net, sequence: int, side: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return transformers' loss and gradients of the whole batch."""
    net.zero_grad()
    tokens, labels, mask = hf_models.batch(sequence=sequence, side=side)
    loss = net(tokens, attention_mask=mask, labels=labels).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    return loss.detach(), found


def accumulated(net, sequence: int, side: str) -> dict[str, torch.Tensor]:
    """Return the gradients of the microbatches in order, each weighted by its valid tokens."""
    tokens, labels, mask = hf_models.batch(sequence=sequence, side=side)
    total = penstock.valid_tokens(labels)
    for t, y, m in zip(tokens.chunk(4), labels.chunk(4), mask.chunk(4), strict=True):
        loss = penstock.causal_lm_loss(net(t, attention_mask=m).logits, y)
        (loss * (penstock.valid_tokens(y) / total)).backward()
    found = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    return found


def assert_close(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(seen[name], gradient, rtol=1e-4, atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_threads_give_transformers_own_loss_and_gradients(family: str, tied: bool, ranks: int):
    net = hf_models.model(family, tied=tied)
    for sequence, side in STEPS[:2]:
        loss, gradients = whole_batch(net, sequence, side)
        pieces = accumulated(net, sequence, side)
        tokens, labels, mask = hf_models.batch(sequence=sequence, side=side)
        with pipeline(net, ranks) as pipe:
            result = pipe.step(tokens, labels, attention_mask=mask)
            seen = {name: p.grad.clone() for name, p in pipe.named_parameters()}
        net.zero_grad()
        assert abs(result.loss.item() - loss.item()) < 1e-6
        assert_close(seen, gradients)
        if not tied:  # a tied weight's gradient is summed stage by stage
            assert all(torch.equal(seen[name], gradient) for name, gradient in pieces.items())


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipe", "interleaved-1f1b"])
def test_other_schedules_do_too(schedule: str):
    net = hf_models.model("gpt2", tied=True)
    loss, gradients = whole_batch(net, 12, "right")
    tokens, labels, mask = hf_models.batch()
    with penstock.Pipeline(
        penstock.from_transformers(net),
        penstock.causal_lm_loss,
        ranks=2,
        microbatches=4,
        schedule=schedule,
        virtual_stages=2 if schedule == "interleaved-1f1b" else 1,
        reduction=penstock.valid_tokens,
    ) as pipe:
        result = pipe.step(tokens, labels, attention_mask=mask)
        assert abs(result.loss.item() - loss.item()) < 1e-6
        assert_close({name: p.grad for name, p in pipe.named_parameters()}, gradients)


@pytest.mark.parametrize("given", ["a model", "a config"])
def test_the_loss_of_a_large_vocabulary_makes_no_logits(given: str, monkeypatch: pytest.MonkeyPatch):
    net = hf_models.model("llama", vocab_size=32_000)
    layers = penstock.from_transformers(net if given == "a model" else net.config)
    x, y, mask = hf_models.batch()
    with penstock.Pipeline(layers, ranks=2, microbatches=2) as pipe:
        net.load_state_dict(pipe.state_dict())
        largest = hf_models.watch_logits(monkeypatch, 32_000)
        loss = pipe.step(x, y, attention_mask=mask).loss
        assert max(largest) == x.numel() // 2 // 8 * 32_000
        outputs = pipe.evaluate(x, y, attention_mask=mask, outputs=True).outputs
        assert outputs is not None
    logits = net(x, attention_mask=mask).logits
    assert float(loss) == pytest.approx(penstock.causal_lm_loss(logits, y).item(), rel=1e-6)
    assert torch.allclose(torch.cat(list(outputs)), logits, atol=1e-5)


def test_weights_that_a_user_has_tied_stay_tied():
    net = hf_models.model("llama", tied=True)
    net.model.layers[3].mlp.up_proj.weight = net.model.layers[0].mlp.up_proj.weight
    loss, gradients = whole_batch(net, 12, "right")
    with pipeline(net, 4) as pipe:
        tokens, labels, mask = hf_models.batch()
        result = pipe.step(tokens, labels, attention_mask=mask)
        assert_close({name: p.grad for name, p in pipe.named_parameters()}, gradients)
    assert abs(result.loss.item() - loss.item()) < 1e-6
    assert net.model.layers[3].mlp.up_proj.weight is net.model.layers[0].mlp.up_proj.weight
    assert net.lm_head.weight is net.model.embed_tokens.weight


DROPOUT = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "gpt_neox": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "llama": {"attention_dropout": 0.1},
    "gemma2": {"attention_dropout": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", DROPOUT)
def test_dropout_of_attention_too_depends_on_no_split_and_no_recompute(family: str):
    tokens, labels, mask = hf_models.batch()

    def run(ranks: int, recompute: str, dropout: dict[str, float]) -> tuple[list[float], list[torch.Tensor]]:
        layers = penstock.from_transformers(hf_models.model(family, **dropout))
        with penstock.Pipeline(
            layers, penstock.causal_lm_loss, ranks=ranks, microbatches=4, recompute=recompute
        ) as pipe:
            losses = [pipe.step(tokens, labels, attention_mask=mask).loss.item() for _ in range(2)]
            return losses, [p.grad for p in pipe.parameters()]

    losses, gradients = run(1, "none", DROPOUT[family])
    assert losses[0] != losses[1]  # each step draws new numbers
    assert run(1, "none", {})[0] != losses
    for ranks, recompute in ((2, "none"), (4, "none"), (2, "full")):
        seen, found = run(ranks, recompute, DROPOUT[family])
        assert seen == losses
        assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


def train_in_a_process(rank: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    losses = []
    with pipeline(folder) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for sequence, side in STEPS:
            tokens, labels, mask = hf_models.batch(sequence=sequence, side=side)
            losses.append(pipe.step(tokens, labels, attention_mask=mask).loss.item())
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        penstock.save_transformers(pipe, f"{folder}-saved", folder)
        return losses, pipe.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied", "ranks"), [("gpt2", True, 4), ("llama", False, 2)])
def test_processes_train_as_plain_transformers_does(
    processes: LocalProcesses, family: str, tied: bool, ranks: int, tmp_path: Path
):
    from transformers import AutoModelForCausalLM

    net = hf_models.model(family, tied=tied)
    net.save_pretrained(tmp_path / "model")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for sequence, side in STEPS:
        tokens, labels, mask = hf_models.batch(sequence=sequence, side=side)
        loss = net(tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parts = processes.run(ranks, train_in_a_process, str(tmp_path / "model"), timeout=300)
    for seen, _ in parts:
        assert seen == pytest.approx(losses, abs=1e-5)
    state = {name: value for _, part in parts for name, value in part.items()}
    assert state.keys() == dict(net.named_parameters()).keys()
    assert all(torch.allclose(state[name], p, atol=1e-5) for name, p in net.named_parameters())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model-saved")
    assert all(torch.equal(again.get_parameter(name), value) for name, value in state.items())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_mode_of_the_model_counts_after_the_pipeline_was_built(family: str):
    net = hf_models.model(family)
    tokens, labels, _ = hf_models.batch()
    with penstock.Pipeline(net, ranks=2, microbatches=4) as pipe:
        pipe.step(tokens, labels)
        net.eval()
        seen = pipe.step(tokens, labels).losses
        assert not any(
            m.training for s in pipe.stage_modules() for m in s.layers.modules() if m is not s.layers
        )
        pipe.train()
        assert all(m.training for m in net.modules())
    net.eval()
    expected = [
        penstock.causal_lm_loss(net(t).logits, y)
        for t, y in zip(tokens.chunk(4), labels.chunk(4), strict=True)
    ]
    assert torch.allclose(seen, torch.stack(expected), rtol=1e-5)
