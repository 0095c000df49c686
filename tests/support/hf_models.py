"""Tiny random models of every family, and batches with padding."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.stage.layers import Layer, whole_name
from tests.support.lanes import exhaustive, slow

VOCABULARY = 61

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA = {**_COMMON, "intermediate_size": 24, "num_key_value_heads": 2}
_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "sliding_window": 4},
    "qwen2": {**_LLAMA, **_WINDOWS, "use_sliding_window": True},
    "qwen3": {**_LLAMA, "head_dim": 8},
    "phi3": {**_LLAMA, "sliding_window": 4, "resid_pdrop": 0.0},
    "olmo2": _LLAMA,
    "smollm3": {**_LLAMA, **_WINDOWS, "use_sliding_window": True, "no_rope_layers": [1, 1, 0, 1]},
    "glm": {**_LLAMA, "head_dim": 8},
    "gemma": {**_LLAMA, "head_dim": 8},
    "gemma2": {**_LLAMA, **_WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_LLAMA, **_WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt2": {**_COMMON, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {**_COMMON, "intermediate_size": 24, "hidden_dropout": 0.0, "attention_dropout": 0.0},
}


def watch_logits(monkeypatch: pytest.MonkeyPatch, vocabulary: int) -> list[int]:
    """Return a list that gets the number of logits that each call of a head from now on computes."""
    seen: list[int] = []
    linear = F.linear

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = linear(x, weight, bias)
        if weight.shape[0] == vocabulary:
            seen.append(output.numel())
        return output

    monkeypatch.setattr(F, "linear", watched)
    return seen


def by_lane(*fast: str) -> list[Any]:
    """Return all families for a parameter list: two beside the fast ones are slow, the rest exhaustive."""
    more = ("mistral", "smollm3")
    return [*fast, *slow(*more), *exhaustive(*sorted({*FAMILIES} - {*fast, *more}))]


def config(family: str, *, tied: bool = False, **changes: Any) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[family](**{**FAMILIES[family], "tie_word_embeddings": tied, **changes})


def model(family: str, *, tied: bool = False, seed: int = 0, **changes: Any) -> Any:
    """Return the library's model with every parameter moved from its initial value (zeros and ones hide mistakes)."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return moved(AutoModelForCausalLM.from_config(config(family, tied=tied, **changes)), 0.2)


def moved(net: Any, by: float = 0.1) -> Any:
    """Move every parameter, in place, so that none has its initial value; return the model in training."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=by)
    return net.train()


def batch(
    size: int = 8, sequence: int = 12, side: str = "right", step: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens, labels, mask) of rows of many lengths, padded on one side; padding has the label -100."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(3, VOCABULARY, (size, sequence), generator=generator)
    lengths = 3 + (torch.arange(size) * 5 + step) % (sequence - 2)
    places = torch.arange(sequence)[None]
    if side == "left":
        places = places.flip(1)
    mask = (places < lengths[:, None]).long()
    return tokens * mask, torch.where(mask == 1, tokens, -100), mask


def pipeline(like: Any, ranks: int | None = 2, **options: Any) -> penstock.Pipeline:
    """Make a pipeline of layers, or of what `penstock.from_transformers` takes, whose loss is the mean over all targets."""
    layers = like if isinstance(like, list) else penstock.from_transformers(like)
    given = {"microbatches": 4, "reduction": penstock.valid_tokens, **options}
    return penstock.Pipeline(layers, penstock.causal_lm_loss, ranks=ranks, **given)


class Step(NamedTuple):
    """A step over microbatches: loss, losses and gradients, and the logits of the whole batch."""

    loss: float
    losses: list[float]
    gradients: dict[str, Tensor | None]
    logits: Tensor


def taken(net: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients, and take them from the model."""
    found = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    return found


def plainly(
    net: Any,
    whole: dict[str, Tensor],
    parts: int = 4,
    count: Callable[[Tensor], Any] = penstock.valid_tokens,
    autocast: bool = False,
) -> Step:
    """Plain transformers over one microbatch after the other: the model's own losses, weighed by their targets."""
    each = [{name: value.chunk(parts)[n] for name, value in whole.items()} for n in range(parts)]
    return plainly_each(net, each, count, autocast)


def plainly_each(
    net: Any,
    parts: Sequence[dict[str, Tensor]],
    count: Callable[[Tensor], Any] = penstock.valid_tokens,
    autocast: bool = False,
) -> Step:
    """Plain transformers over microbatches, as `plainly` runs it over those of a batch."""
    counts = [count(part["labels"]) for part in parts]
    losses, logits, loss = [], [], 0.0
    for part, targets in zip(parts, counts, strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = net(**part, use_cache=False)
        share = float(targets / sum(counts))
        (output.loss * share).backward()
        losses.append(output.loss.item())
        logits.append(output.logits.detach())
        loss += losses[-1] * share
    return Step(loss, losses, taken(net), torch.cat(logits))


def piped(net: Any, whole: dict[str, Tensor], parts: int = 4, **options: Any) -> Step:
    layers = penstock.from_transformers(net)
    with penstock.Pipeline(layers, ranks=2, microbatches=parts, **options) as pipe:
        result = pipe.step(whole, outputs=True)
    return Step(float(result.loss), result.losses.tolist(), taken(net), torch.cat(list(result.outputs)))


def assert_same(seen: Step, expected: Step, summed: Collection[str] = ()) -> None:
    """Compare bit for bit; gradients that are summed in another order, to rounding."""
    assert seen.loss == pytest.approx(expected.loss, rel=1e-6)
    assert seen.losses == expected.losses
    assert torch.equal(seen.logits, expected.logits)
    assert seen.gradients.keys() == expected.gradients.keys()
    for name, wanted in expected.gradients.items():
        found = seen.gradients[name]
        if found is None or wanted is None:
            assert found is wanted, name
        elif name in summed:
            assert (found - wanted).norm() <= 1e-6 * wanted.norm(), name
        else:
            assert torch.equal(found, wanted), name


def assert_same_step(
    net: Any,
    whole: dict[str, Tensor],
    parts: int = 4,
    count: Callable[[Tensor], Any] = penstock.valid_tokens,
    **options: Any,
) -> Step:
    """Compare a step of a pipeline with that of plain transformers, which this returns; stages sum tied gradients."""
    expected = plainly(net, whole, parts, count)
    uses = Counter(id(p) for _, p in net.named_parameters(remove_duplicate=False))
    tied = [name for name, p in net.named_parameters() if uses[id(p)] > 1]
    assert_same(piped(net, whole, parts, **options), expected, tied)
    return expected


def in_sequence(layers: list[Layer], x: Tensor, **named: Tensor | None) -> Tensor:
    """Apply the layers one after the other, each with the named inputs that its forward lists."""
    for layer in layers:
        module = layer.build()
        wanted = inspect.signature(module.forward).parameters
        x = module(x, **{name: value for name, value in named.items() if name in wanted})
    return x


def parameters(layers: list[Layer]) -> dict[str, Tensor]:
    """Return every parameter by its name in the whole model."""
    built = [(layer.name, layer.build()) for layer in layers]
    return {whole_name(name, inner): p for name, module in built for inner, p in module.named_parameters()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The norm of the difference of all weights, relative to their norm."""
    assert one.keys() == other.keys()
    ours, theirs = (torch.cat([state[name].flatten() for name in sorted(state)]) for state in (one, other))
    return float((ours - theirs).norm() / theirs.norm())
