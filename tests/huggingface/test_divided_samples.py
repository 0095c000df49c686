"""Models of transformers whose samples are divided over processes: numbers of one process, to the order of sums."""

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

import penstock
from penstock import MeshShape, Pipeline, PipelineOptimizer
from penstock.base.errors import PenstockError
from penstock.huggingface.small_config import small_config
from penstock.parallel.context import attention as context
from penstock.parallel.dtensor import full_tensor
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.groups import run_cases
from tests.support.hf_models import moved
from tests.support.lanes import exhaustive, slow

ROWS, TOKENS, MICROBATCHES, STEPS = 4, 16, 2, 2
Tensors = dict[str, Tensor]


class Case(NamedTuple):
    family: str
    sizes: dict[str, int]
    schedule: str = "1f1b"
    recompute: str = "none"
    shape: str = "full"
    changes: dict[str, Any] = {}  # noqa: RUF012 (read alone)


PP_CP, CP_TP, CP4 = {"pp": 2, "cp": 2}, {"cp": 2, "tp": 2}, {"cp": 4}
# Windows of 4 tokens are smaller than a chunk of pp 2 x cp 2, and as large as two of cp 4.
CASES = [
    Case("llama", CP_TP, shape="packed"),
    Case("llama", CP4, "zb-h1", "full", "left"),
    Case("mistral", PP_CP),
    Case("gemma2", CP4, shape="right"),
    Case("gpt_oss", PP_CP, shape="right"),
    Case("llama", PP_CP, changes={"vocab_size": 32_000}),  # a loss by chunks, without logits
]
MORE = [
    Case("qwen3", PP_CP, "zb-v"),
    Case("mistral", CP4, recompute="full", shape="left"),
    Case("gemma3_text", PP_CP),
    Case("gpt2", PP_CP, shape="left"),
]


def model(family: str, kind: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = small_config(CONFIG_MAPPING[family](), dropout=0.0)
    config.pad_token_id = 0
    for name, value in changes.items():
        setattr(config, name, value)
    return moved(kind.from_config(config))


def batch(shape: str, step: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return tokens, labels and named inputs: a padding mask, positions of two documents in a row, or none."""
    ids = torch.randint(3, 60, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))
    places = torch.arange(TOKENS)
    if shape == "packed":
        starts = torch.tensor([[5], [16], [8], [11]])
        return ids, ids, {"position_ids": torch.where(places < starts, places, places - starts)}
    if shape == "full":
        return ids, ids, {}
    shown = places[None] < torch.tensor([[16], [11], [16], [3]])
    mask = (shown if shape == "right" else shown.flip(1)).long()
    return ids, torch.where(mask == 1, ids, -100), {"attention_mask": mask}


def plain(case: Case) -> tuple[list[float], Tensors, Tensors]:
    net, losses, first = model(case.family, **case.changes), [], Tensors()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        ids, labels, named = batch(case.shape, step)
        total = 0.0
        parts = (value.chunk(MICROBATCHES) for value in (ids, labels, *named.values()))
        for x, y, *values in zip(*parts, strict=True):
            output = net(x, use_cache=False, **dict(zip(named, values, strict=True))).logits
            share = (y[:, 1:] != -100).sum() / (labels[:, 1:] != -100).sum()
            loss = penstock.causal_lm_loss(output, y) * share
            loss.backward()
            total += loss.item()
        first = first or {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, first, {n: p.detach() for n, p in net.named_parameters()}


def divided(rank: int, case: Case) -> tuple[list[float], Tensors, Tensors]:
    context._LEAST = 0  # keys come by groups of heads
    net = model(case.family, **case.changes)
    before = net.config._attn_implementation
    with Pipeline(
        net, microbatches=MICROBATCHES, mesh=MeshShape(**case.sizes), timeout=120,
        schedule=case.schedule, recompute=case.recompute,
        parallel=penstock.ParallelOptions(family=case.family) if "tp" in case.sizes else penstock.ParallelOptions(),
    ) as pipe:  # fmt: skip
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, clip=1.0)
        losses, first = [], Tensors()
        for step in range(STEPS):
            ids, labels, named = batch(case.shape, step)
            loss = pipe.step(ids, labels, **named).loss
            assert loss is not None
            losses.append(loss.item())
            first = first or {
                n: full_tensor(p.grad).clone() for n, p in pipe.named_parameters() if p.grad is not None
            }
            optimizer.step()
        weights = {n: full_tensor(p.detach()).clone() for n, p in pipe.named_parameters()}
    assert net.config._attn_implementation == before
    return losses, first, weights


@pytest.mark.parametrize("cases", [*slow(CASES), *exhaustive(MORE)], ids=["each kind", "more"])
def test_losses_gradients_and_weights_are_those_of_one_process(processes: LocalProcesses, cases: list[Case]):
    for case, ranks in zip(cases, run_cases(processes, 4, divided, [(case,) for case in cases]), strict=True):
        losses, first, weights = plain(copy.deepcopy(case))
        seen: set[str] = set()
        for got_losses, got_first, got_weights in ranks:
            assert got_losses == pytest.approx(losses, rel=1e-5), case
            for expected, got in ((first, got_first), (weights, got_weights)):
                for name, value in got.items():
                    assert torch.allclose(value, expected[name], rtol=1e-4, atol=2e-6), (case, name)
            seen |= got_weights.keys()
        assert seen == weights.keys(), case


def refused(rank: int, what: str) -> str:
    changes: dict[str, Any] = {"lfm2": {"layer_types": ["conv", "full_attention"] * 2}}.get(what, {})
    family, kind = (
        ("llama", AutoModelForSequenceClassification) if what == "rows" else (what, AutoModelForCausalLM)
    )
    family = family.removesuffix(" in bf16")
    net = model("llama" if what in ("flex", "length") else family, kind, **changes)
    ids = torch.ones((ROWS, 14 if what == "length" else TOKENS), dtype=torch.int64)
    if what.endswith("bf16"):
        net.bfloat16()
    layers = penstock.from_transformers(net)
    if what == "flex":
        net.config._attn_implementation = "flex_attention"
    try:
        with Pipeline(layers, microbatches=MICROBATCHES, mesh=MeshShape(cp=2), timeout=60) as pipe:
            pipe.evaluate(ids) if what == "rows" else pipe.step(ids, ids)
    except PenstockError as error:
        return str(error)
    return "no error"


REFUSED = {
    "mamba": r"layer backbone.layers.0 \(\w*MambaBlock\) gives other values if the tokens of its samples are divided",
    "jamba": r"layer model.layers.0 \(\w*JambaMambaDecoderLayer\) gives other values",
    # Its rounding is larger than what a state changes.
    "jamba in bf16": r"layer model.layers.0 \(\w*JambaMambaDecoderLayer\) gives other values",
    "falcon_h1": r"layer model.layers.0 \(\w*FalconH1DecoderLayer\) gives other values",
    "qwen3_next": r"layer model.layers.0 \(\w*Qwen3NextDecoderLayer\) gives other values",
    "lfm2": r"layer model.layers.0 \(\w*Lfm2DecoderLayer\) .*gives other values",
    "gptj": r"layer transformer.h.0 \(\w*GPTJBlock\) fails with RuntimeError",
    "rows": r"LlamaForSequenceClassification has logits of each row",
    "flex": r"the model's attention is flex_attention, and with cp it must be one of sdpa, eager",
    "length": r"a sequence of 14 tokens does not divide into 2 x cp = 4 chunks; pad it to 16",
}


OTHERS = ["mamba", "falcon_h1", "qwen3_next", "lfm2"]
"""They have states as jamba has."""


@pytest.mark.parametrize(
    "whats",
    [*slow([what for what in REFUSED if what not in OTHERS]), *exhaustive(OTHERS)],
    ids=["each", "more"],
)
def test_what_cannot_be_divided_is_refused_by_name_on_every_rank(processes: LocalProcesses, whats: list[str]):
    found = run_cases(processes, 2, refused, [(what,) for what in whats])
    for what, ranks in zip(whats, found, strict=True):
        for message in ranks:
            assert re.search(REFUSED[what], message), (what, message)
