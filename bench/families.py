"""Every causal family of the installed transformers, cut in two: does it train as plain PyTorch does?

A small random model of each family takes one step of two microbatches in a pipeline of two ranks (threads), in training
mode. Loss and every gradient must have the bits of plain PyTorch, which accumulates over the same microbatches; the
gradient of a tied weight, a sum of several terms in another order, may differ by 1e-6 of its norm. With dropout of 0.1,
where the family has it, two ranks must have the bits of one. Families are equal, refused with the reason, or wrong.

    python -m bench.families [FAMILY ...] [--quick] [--json] [--write]

``--write`` puts the table into docs/huggingface.md.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import penstock
from bench.compare import machine
from penstock.base.errors import PenstockError, first_line
from penstock.huggingface.small_config import small_config

PAGE = Path(__file__).parent.parent / "docs" / "huggingface.md"
START, STOP = "<!-- from python -m bench.families --write -->", "<!-- end -->"
MOST_WEIGHTS = 8_000_000
"""Weights above which a model is not small, and a family is left out: it would take minutes."""
MISSING = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
"""Values for what every checkpoint of a family has and the defaults of its config lack (None)."""
MISSING_OF = {"lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16}}
TOLERANCE = 1e-6
MICROBATCHES = 2


QUICK = ("llama", "mixtral", "rwkv")
"""Families of ``--quick``: a dense one, a mixture, and one that is refused."""


class Row(NamedTuple):
    """Outcome for a family: ``equal``, ``refused``, ``wrong``, or ``none`` if no small model can be made of it."""

    family: str
    outcome: str
    reason: str = ""


def build(family: str, dropout: float) -> Any:
    """Return a small random model, all of whose parameters differ from their initial values."""
    config = CONFIG_MAPPING[family](**MISSING_OF.get(family, {}))
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for key, value in MISSING.items():
            if vars(part).get(key, value) is None:
                setattr(part, key, value)
    config = small_config(config, dropout=dropout)
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(f"its small model has {weights:,} weights")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def batch(model: Any) -> tuple[Tensor, Tensor]:
    # Some have more embeddings than the tokens that may be targets.
    tokens = min(model.get_input_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)
    ids = torch.randint(3, tokens, (4, 8), generator=torch.Generator().manual_seed(1))
    return ids, ids.clone()


def plain(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return loss and gradients of plain accumulation over the microbatches."""
    losses = []
    for x, y in zip(ids.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
        loss = penstock.causal_lm_loss(model(input_ids=x, use_cache=False).logits, y)
        (loss * (1 / MICROBATCHES)).backward()
        losses.append(loss.detach())
    return torch.stack(losses), gradients(model)


def gradients(model: Any) -> dict[str, Tensor | None]:
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def cut(model: Any, ids: Tensor, labels: Tensor, ranks: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return loss and gradients of a pipeline's step."""
    layers = penstock.from_transformers(model)
    with penstock.Pipeline(layers, penstock.causal_lm_loss, ranks=ranks, microbatches=MICROBATCHES) as pipe:
        losses = pipe.step(ids, labels).losses
    return torch.stack(list(losses)), gradients(model)


def differing(
    model: Any,
    one: tuple[Tensor, dict[str, Tensor | None]],
    other: tuple[Tensor, dict[str, Tensor | None]],
) -> str:
    """Return what differs in two steps; empty if nothing does."""
    if not torch.equal(one[0], other[0]):
        return f"loss {one[0].tolist()} and {other[0].tolist()}"
    names: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)] = names.get(id(parameter), 0) + 1
    for name, parameter in model.named_parameters():
        a, b = one[1][name], other[1][name]
        if a is None or b is None:
            if (a is None or not a.any()) and (b is None or not b.any()):
                continue
            return f"gradient of {name}"
        if not torch.equal(a, b):
            tied = names[id(parameter)] > 1
            if not tied or (a - b).norm() > TOLERANCE * a.norm():
                return f"gradient of {name}"
    return ""


def row(family: str) -> Row:
    """Train a family cut in two and compare."""
    try:
        model = build(family, dropout=0.0)
        dropping = build(family, dropout=0.1)
        ids, labels = batch(model)
        expected = plain(model, ids, labels)
    except Exception as error:  # the library's own checks, of many kinds
        return Row(family, "none", first_line(error))
    if not bool(expected[0].isfinite().all()):
        return Row(family, "none", "its small model gives no finite loss")
    try:
        found = cut(model, ids, labels, 2)
        if reason := differing(model, expected, found):
            return Row(family, "wrong", reason)
        one, two = cut(dropping, ids, labels, 1), cut(dropping, ids, labels, 2)
    except PenstockError as error:
        return Row(family, "refused", first_line(error))
    if reason := differing(dropping, one, two):
        return Row(family, "wrong", f"with dropout: {reason}")
    return Row(family, "equal")


def table(rows: list[Row]) -> str:
    """Return the outcomes as they stand in the docs."""
    equal = [r.family for r in rows if r.outcome == "equal"]
    refused = [r for r in rows if r.outcome in ("refused", "wrong")]
    lines = [
        f"With transformers {transformers.__version__}, {len(equal)} families train equal: {', '.join(equal)}.",
        "",
        "| refused | reason |",
        "|---|---|",
        *(f"| {r.family} | {r.reason.replace('|', '/')} |" for r in refused),
    ]
    return "\n".join(lines)


def write(text: str) -> None:
    """Put the table into the page."""
    page = PAGE.read_text()
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(STOP)
    PAGE.write_text(f"{before}{START}\n\n{text}\n\n{STOP}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="families to train (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"train {', '.join(QUICK)} alone")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    parser.add_argument("--write", action="store_true", help="put the table into docs/huggingface.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    every = QUICK if options.quick else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for family in options.families or every:
        rows.append(row(family))
        if not options.json:
            print(f"{family:28} {rows[-1].outcome:8} {rows[-1].reason:.160}".rstrip(), flush=True)
    if options.json:
        print(json.dumps([r._asdict() for r in rows], indent=1))
    else:
        print(machine())
    if options.write:
        write(table(rows))


if __name__ == "__main__":
    main()
