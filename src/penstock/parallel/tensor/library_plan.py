"""Plans for tensor parallelism from transformers, for families without a plan of ours.

A config's ``base_model_tp_plan`` names the matrices of a block and how each is sharded. It does not name modules that are
computed from a rank's part without being sharded, so all parameters except the named matrices are checked.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from penstock.base.errors import ConfigError

_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
_HEADS = re.compile(r".*\.[qkv]_proj")
_ATTENTION = re.compile(r".*(attn|attention).*")


def library_patterns(family: str) -> dict[str, Any] | None:
    """Return the arguments of a `TensorPlan` for a family of transformers; None if there is no plan."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import CONFIG_MAPPING

    plan = CONFIG_MAPPING[family].base_model_tp_plan if family in CONFIG_MAPPING else None
    if not plan:
        return None
    if unknown := sorted({*plan.values()} - _STYLES):
        raise ConfigError(
            f"there is no plan for tensor parallelism of {family!r}: that of transformers uses {', '.join(unknown)}, and "
            f"here are only {', '.join(sorted(_STYLES))}; leave tp at 1"
        )
    names = {style: [n.rpartition("*.")[2] for n, s in plan.items() if s == style] for style in _STYLES}
    heads = [name for name in names["colwise"] if _HEADS.fullmatch(name)]
    columns = [name for name in names["colwise"] if name not in heads]
    if fused := [name for name in columns if _ATTENTION.fullmatch(name)]:
        raise ConfigError(
            f"there is no plan for tensor parallelism of {family!r}: in {', '.join(fused)} a head may end anywhere; "
            "leave tp at 1"
        )
    embeddings = (
        n
        for n, (inputs, _) in (CONFIG_MAPPING[family].base_model_pp_plan or {}).items()
        if "input_ids" in inputs
    )
    return {
        "heads": _any_of(heads),
        "columns": _any_of(columns),
        "rows": _any_of(names["rowwise"]),
        "table": _any_of([next(embeddings, "embed_tokens")]),
        "head": "lm_head",
        "within_heads": _any_of(names["replicated_with_grad_allreduce"]),
        "complete": _any_of(sorted({name.rpartition(".")[0] for name in (*heads, *columns, *names["rowwise"])})),
    }  # fmt: skip


def _any_of(names: list[str]) -> str:
    return "|".join(map(re.escape, names)) or r"(?!)"
