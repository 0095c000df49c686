"""Where the parts of each model family of Hugging Face transformers are, one row a family.

Everything here is read from the library's own ``modeling_*.py``; the parts themselves stay the library's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import ConfigError, SplitError, nearest

Attention = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True)
class ModelFamily:
    """The parts of a causal language model, by their names within it.

    Attributes:
        embedding: the token table.
        blocks: the list of blocks.
        norm: what comes before the head, which is ``lm_head`` in all of them.
        rotary: what makes the rotary tables; None where positions are a table.
        positions: the table of positions; None where they are rotary.
        dropout: what the embedded tokens go through before the first block; None where there is none.
        windows: whether blocks look back only so far: in none, in all once the config has a ``sliding_window``, or
            where its ``layer_types`` say so.
        rotary_by_kind: whether the rotary tables differ between blocks with a window and without.
        stored_head: the head's name in files, where it is another than in the model.
    """

    embedding: str = "model.embed_tokens"
    blocks: str = "model.layers"
    norm: str = "model.norm"
    rotary: str | None = "model.rotary_emb"
    positions: str | None = None
    dropout: str | None = None
    windows: Literal["none", "all", "by layer"] = "none"
    rotary_by_kind: bool = False
    stored_head: str = "lm_head"

    def kinds(self, config: Any) -> list[Attention]:
        """Each block's kind of attention."""
        if self.windows == "by layer":
            return list(config.layer_types)
        sliding = self.windows == "all" and config.sliding_window is not None
        return ["sliding_attention" if sliding else "full_attention"] * int(config.num_hidden_layers)


HEAD = "lm_head"

FAMILIES = {
    "llama": ModelFamily(),
    "mistral": ModelFamily(windows="all"),
    "qwen2": ModelFamily(windows="by layer"),
    "qwen3": ModelFamily(windows="by layer"),
    "gemma": ModelFamily(),
    "gemma2": ModelFamily(windows="by layer"),
    "gemma3_text": ModelFamily(windows="by layer", rotary_by_kind=True),
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
"""By the config's ``model_type``."""


def family_of(config: Any) -> ModelFamily:
    """The row of a config.

    Raises:
        SplitError: a family that is not here, or a variant whose layers need more than a hidden state, a padding mask
            and positions.
    """
    kind = str(getattr(config, "model_type", ""))
    if kind not in FAMILIES:
        raise SplitError(
            f"no way to split a model of type {kind!r}{nearest(kind, list(FAMILIES))}; the families are "
            f"{', '.join(FAMILIES)}. Any other model can be given as a list of layers"
        )
    refused = {
        "add_cross_attention": "attends to an encoder",
        "use_bidirectional_attention": "attends to later tokens",
        "quantization_config": "has quantised weights",
    }
    for key, what in refused.items():
        if getattr(config, key, None):
            raise SplitError(f"the config's {key} is set: a model that {what} cannot be split")
    if not getattr(config, "is_causal", True):
        raise SplitError(
            "the config's is_causal is false: a model that attends to later tokens cannot be split"
        )
    for rule in _rotary_rules(getattr(config, "rope_parameters", None)):
        if rule == "dynamic":
            raise SplitError(
                "the config's rope_type is 'dynamic', whose tables depend on which lengths came before; that order "
                "differs between stages. Use 'linear', 'yarn', 'llama3' or 'longrope'"
            )
    return FAMILIES[kind]


def _rotary_rules(parameters: Any) -> list[str]:
    """The ``rope_type`` of rope_parameters, which some families have once for each kind of attention."""
    if not isinstance(parameters, dict):
        return []
    inner = [value for value in parameters.values() if isinstance(value, dict)]
    return [str(each["rope_type"]) for each in (inner or [parameters]) if each.get("rope_type")]


def require_library() -> None:
    """Raise a ConfigError that says what to install, if transformers is not there."""
    import importlib.util

    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "Hugging Face models need the transformers package: pip install 'penstock[transformers]'"
        )
