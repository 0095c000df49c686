"""Table of model families of Hugging Face transformers: the names of their modules, one row a family.

The names come from the library's own ``modeling_*.py``. A family with the same forward as a row here needs no row:
`penstock.huggingface.family_of` finds its modules by the library's pipeline plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from penstock.base.errors import ConfigError, SplitError

Attention = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Names of the modules of a causal language model, and what its forward does between them.

    Attributes:
        norm: norm before the head, which is ``lm_head`` in all families.
        rotary: module that makes the rotary tables; None if positions are a table.
        positions: table of positions; None if they are rotary.
        dropout: dropout between embedding and first block; None if there is none.
        windows: blocks with sliding-window attention: none, all if the config has a ``sliding_window``, or those that
            the config's ``layer_types`` name.
        capped: whether the config's ``final_logit_softcapping`` bounds the logits.
        stored_head: name of the head in files, if it differs from that in the model.
    """

    embedding: str = "model.embed_tokens"
    blocks: str = "model.layers"
    norm: str = "model.norm"
    rotary: str | None = "model.rotary_emb"
    positions: str | None = None
    dropout: str | None = None
    windows: Literal["none", "all", "by layer"] = "none"
    rotary_by_kind: bool = False
    capped: bool = False
    stored_head: str = "lm_head"

    def kinds(self, config: Any) -> list[Attention]:
        """Return each block's kind of attention.

        Raises:
            SplitError: if a block has another kind than those here.
        """
        if self.windows == "by layer":
            if unknown := sorted({*config.layer_types} - {*get_args(Attention)}):
                raise SplitError(f"the config's layer_types has {', '.join(unknown)}, which cannot be split")
            return list(config.layer_types)
        sliding = self.windows == "all" and config.sliding_window is not None
        return ["sliding_attention" if sliding else "full_attention"] * int(config.num_hidden_layers)


HEAD = "lm_head"

FAMILIES = {
    "llama": ModelFamily(),
    "mistral": ModelFamily(windows="all"),
    "qwen2": ModelFamily(windows="by layer"),
    "gemma": ModelFamily(),
    "gemma2": ModelFamily(windows="by layer", capped=True),
    "gemma3_text": ModelFamily(windows="by layer", rotary_by_kind=True, capped=True),
    "gpt2": ModelFamily(
        embedding="transformer.wte",
        blocks="transformer.h",
        norm="transformer.ln_f",
        rotary=None,
        positions="transformer.wpe",
        dropout="transformer.drop",
    ),
    "gpt_neox": ModelFamily(
        embedding="gpt_neox.embed_in",
        blocks="gpt_neox.layers",
        norm="gpt_neox.final_layer_norm",
        rotary="gpt_neox.rotary_emb",
        dropout="gpt_neox.emb_dropout",
        stored_head="embed_out",
    ),
}
"""Families by the config's ``model_type``."""


def require_library() -> None:
    """Require the transformers package.

    Raises:
        ConfigError: if it is not installed; says how to install it.
    """
    import importlib.util

    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "Hugging Face models need the transformers package: pip install 'penstock-torch[transformers]'"
        )
