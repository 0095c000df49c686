"""Sizes of a decoder-only language model, read from a ``config.json`` or from a ``[model]`` section; needs no torch.

It covers the families that `penstock.from_transformers` splits. `model_type` chooses the traits that a config leaves to the
library's code, such as biases, extra norms and defaults.
"""

from __future__ import annotations

import json
import os.path
import tomllib
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.base.bounded_io import MEGABYTE, read_bytes
from penstock.base.counts import require_count
from penstock.base.errors import ConfigError, nearest
from penstock.base.model_variants import LARGEST_SIZE, refused_architecture, refused_variant, windows

_MAX_BYTES = 16 * MEGABYTE
_MOST_LAYERS = 10_000


class NoClosedFormError(ConfigError):
    """A model of a family without a closed form; `path` is its ``config.json``."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of the layers: an embedding, equal blocks, a final norm and a head.

    Attributes:
        name: name of the model, for messages.
        layers: number of blocks.
        hidden: size of the hidden state.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_size: size of a head.
        ffn: inner size of the feed-forward.
        vocabulary: number of tokens.
        gated: True if the feed-forward has a gate as well as an up projection.
        positions: rows of a learned table of positions; 0 if positions are rotary.
        tied: True if the head shares the embedding's weight.
        norm_weights: norm parameters of a block, as a multiple of `hidden`.
        head_norm_weights: other parameters of a block, such as norms of queries and keys.
        final_norm_weights: parameters of the final norm, as a multiple of `hidden`.
        qkv_bias, output_bias, ffn_bias: True if these matrices of a block have biases.
        norms: number of norms that a block computes over the hidden state.
        dropout: True if a block drops out attention scores and the outputs of its halves.
        context: tokens of the longest sample that a model with rotary positions is configured for; 0 if its config does
            not say.
        window, windowed: tokens of a window of attention, and number of blocks that attend to such windows alone.
        query_rank: size of the latent that queries are expanded from; 0 if they come from the hidden state.
        kv_rank: size of the latent that keys and values are expanded from; 0 if they come from the hidden state.
        rotary_size: with `kv_rank`, part of a head's query and key that is rotated; all heads share the key's.
        value_size: size of a head's value; 0 if it is `head_size`.
        experts: number of experts of a block, which replace the feed-forward of size `ffn`; 0 if there are none.
        experts_per_token: number of experts that a token is sent to.
        expert_ffn: inner size of an expert.
        shared_ffn: inner size of the expert that all tokens take; 0 if there is none.
        dense_layers: number of first blocks that have the feed-forward of size `ffn` and no experts.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    gated: bool = True
    positions: int = 0
    tied: bool = False
    norm_weights: int = 2
    head_norm_weights: int = 0
    final_norm_weights: int = 1
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    norms: int = 2
    dropout: bool = False
    context: int = 0
    window: int = 0
    windowed: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    rotary_size: int = 0
    value_size: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        # The types are text, because annotations of this module are not evaluated.
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "bool" and not isinstance(value, bool):
                raise ConfigError(f"{f.name} of the model must be true or false, got {value!r}")
            if f.type == "int":
                least, most = int(f.default is MISSING), _MOST_LAYERS if f.name == "layers" else LARGEST_SIZE
                require_count(f"{f.name} of the model", value, least, most)
        if self.experts_per_token > self.experts:
            raise ConfigError(
                f"experts_per_token of the model must be at most its {self.experts} experts, got {self.experts_per_token}"
            )
        if self.dense_layers > (self.layers if self.experts else 0):
            raise ConfigError(
                f"dense_layers of the model must be 0 without experts and at most its {self.layers} blocks with them, got "
                f"{self.dense_layers}"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"the model's {self.heads} heads must be a multiple of its {self.kv_heads} key and value heads"
            )

    @property
    def block_parameters(self) -> int:
        """Number of parameters of a block."""
        matrices = sum(rows * columns for rows, columns in (*self.latent_matrices, *self.head_matrices))
        ffn = self.shared_ffn if self.experts else self.ffn
        matrices += self.hidden * (ffn * (3 if self.gated else 2) + self.experts) + self.expert_parameters
        latents = self.query_rank + self.kv_rank
        biased = (
            latents + self.rotary_size if self.kv_rank else (self.heads + 2 * self.kv_heads) * self.head_size
        )
        biases = biased * self.qkv_bias + self.hidden * self.output_bias
        if self.ffn_bias:
            biases += self.experts if self.experts else self.ffn * (2 if self.gated else 1) + self.hidden
        return matrices + biases + self.norm_weights * self.hidden + self.head_norm_weights + latents

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of the experts of a block that has them."""
        ups = 2 if self.gated else 1
        biases = (ups * self.expert_ffn + self.hidden) * self.ffn_bias
        return self.experts * (self.hidden * self.expert_ffn * (ups + 1) + biases)

    @property
    def dense(self) -> ModelShape:
        """The shape of its first blocks, which have no experts."""
        return replace(self, experts=0, experts_per_token=0, expert_ffn=0, shared_ffn=0, dense_layers=0)

    @property
    def is_whole(self) -> bool:
        """True if tensor parallelism does not divide some of the model's matrices."""
        return bool(self.kv_rank or self.experts)

    @property
    def active_ffn(self) -> int:
        """Inner values of a token's feed-forward, over all experts that it is sent to."""
        return self.experts_per_token * self.expert_ffn + self.shared_ffn if self.experts else self.ffn

    @property
    def whole_parameters(self) -> int:
        """Number of parameters of a block that tensor parallelism does not divide.

        They are the weights of norms, and the biases that are added after the ranks' products are summed: of the matrices
        from attention and from the feed-forward to the hidden state.
        """
        summed = int(self.output_bias) + int(self.ffn_bias)
        return (self.norm_weights + summed) * self.hidden + self.head_norm_weights

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        """Values of a token's queries, keys and values over all heads."""
        value = self.value_size or self.head_size
        return self.heads * self.head_size, self.kv_heads * self.head_size, self.kv_heads * value

    @property
    def latent_matrices(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the matrices from the hidden state to the latents that heads are expanded from."""
        if not self.kv_rank:
            return ()
        query = ((self.hidden, self.query_rank),) if self.query_rank else ()
        return (*query, (self.hidden, self.kv_rank + self.rotary_size))

    @property
    def head_matrices(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each matrix around attention, to its heads, and from them to the hidden state."""
        query, key, value = self.attention_sizes
        out = (self.heads * (self.value_size or self.head_size), self.hidden)
        if not self.kv_rank:
            return (self.hidden, query + key + value), out
        expanded = key - self.kv_heads * self.rotary_size + value
        return (self.query_rank or self.hidden, query), (self.kv_rank, expanded), out

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings of tokens and of learned positions."""
        return self.hidden * (self.vocabulary + self.positions)

    @property
    def head_parameters(self) -> int:
        """Number of parameters of the final norm and of the head, which counts also if it is tied."""
        return self.hidden * (self.vocabulary + self.final_norm_weights)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model; a tied weight counts once."""
        total = self.layers * self.block_parameters + self.embedding_parameters + self.head_parameters
        if self.dense_layers:
            total += self.dense_layers * (self.dense.block_parameters - self.block_parameters)
        return total - self.hidden * self.vocabulary * self.tied

    def as_dict(self) -> dict[str, Any]:
        """Return all sizes by name."""
        return asdict(self)


_LLAMA: dict[str, Any] = {}
_LAYER_NORMS = {"norm_weights": 4, "final_norm_weights": 2}
_BIASES = {"qkv_bias": True, "output_bias": True, "ffn_bias": True}

_TRAITS: dict[str, dict[str, Any]] = {
    "apertus": {"gated": False},
    "arcee": {"gated": False},
    "deepseek_v3": {},
    "ernie4_5": {"tied": True},
    "gemma": {"tied": True},
    "gemma2": {"tied": True, "norm_weights": 4, "norms": 4},
    "gemma3_text": {"tied": True, "norm_weights": 4, "norms": 4},
    "glm": {},
    "glm4": {"norm_weights": 4, "norms": 4},
    "gpt_oss": {"qkv_bias": True, "output_bias": True, "ffn_bias": True},
    "gpt2": {"gated": False, "tied": True, "dropout": True, **_LAYER_NORMS, **_BIASES},
    "gpt_neox": {"gated": False, **_LAYER_NORMS, **_BIASES},
    "helium": {},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {"gated": False, **_LAYER_NORMS},
    "llama": {},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "olmo": {"norm_weights": 0, "final_norm_weights": 0},
    "olmo2": {},
    "phi3": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {},
    "qwen3_moe": {},
    "seed_oss": {},
    "smollm3": {"tied": True},
    "vaultgemma": {"tied": True},
    "youtu": {"tied": True},
}
"""Traits by ``model_type`` that differ from Llama's, and defaults of keys that a config may lack."""

MODEL_TYPES = tuple(_TRAITS)
"""Families, by ``model_type``, that have a closed form."""

_FIXED_BIASES = {"gpt2", "ministral3", "mistral", "phi3", "qwen2"}
"""Families whose biases no key of a config changes."""


class _Mixture(NamedTuple):
    """Keys of a mixture's config: its number of experts, with the library's newer name, and an expert's inner size."""

    experts: tuple[str, ...]
    ffn: str


_MIXTURES = {
    "deepseek_v3": _Mixture(("n_routed_experts",), "moe_intermediate_size"),
    "gpt_oss": _Mixture(("num_local_experts",), "intermediate_size"),
    "mixtral": _Mixture(("num_local_experts",), "intermediate_size"),
    "qwen3_moe": _Mixture(("num_experts", "num_local_experts"), "moe_intermediate_size"),
}

_BIAS_KEYS: dict[str, dict[str, tuple[str, ...]]] = {
    "ernie4_5": {"use_bias": ("attention_bias", "mlp_bias")},
    "internlm3": {"qkv_bias": ("attention_bias",), "bias": ("mlp_bias",)},
}
"""Other keys of biases, and the usual ones that they stand for."""

_GPT2_NAMES = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}  # fmt: skip
"""Other names that the library takes for keys of a GPT-2 config, and the usual ones."""

_QKV_ONLY = {"glm", "glm4", "helium", "seed_oss"}
"""Families in which ``attention_bias`` leaves the output projection without one."""


def read_shape(path: str | Path) -> ModelShape:
    """Read the sizes of a model from a ``config.json``, a folder that has one, or a TOML file.

    The file's section ``[model]`` has the sizes, or names one of these as ``config`` or ``path``.
    """
    path = Path(path)
    if os.path.isdir(path):
        path = path / "config.json"
        if not os.path.exists(path):
            raise ConfigError(f"{path.parent} has no config.json; give a model's folder or its config.json")
    try:
        text = read_bytes(path, _MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the model {str(path)!r}: {error}") from error
    if path.suffix == ".toml":
        return _from_toml(text, path)
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not JSON: {error}; a model is a config.json, its folder, or a TOML file with [model]"
        ) from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path} must be an object with the keys of a config.json")
    return _from_config(table, path)


def _from_toml(text: str, path: Path) -> ModelShape:
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    model = table.get("model")
    if not isinstance(model, dict):
        raise ConfigError(f"{path} has no [model] section, which gives the model's sizes")
    for key in ("config", "path"):
        if model.get(key):
            return read_shape(_hugging_face(model[key], key, path))
    # Defaults of `penstock train`, in `train.config.sections.model_section`.
    defaults = {
        "vocabulary": 256, "width": 128, "layers": 6, "heads": 4, "kv_heads": 2, "hidden": 352,
    }  # fmt: skip
    of_experts = (
        "experts",
        "experts_per_token",
        "expert_hidden",
        "shared_hidden",
        "router",
        "auxiliary_loss",
        "bias_update_rate",
    )
    allowed = [*defaults, *of_experts, "rotary_base", "norm_epsilon", "path", "config"]
    for key in model:
        if key not in allowed:
            raise ConfigError(
                f"{path}: no key model.{key}{nearest(key, allowed)}; [model] has {', '.join(allowed)}"
            )
    sizes = {key: _count(model, key, path, default) for key, default in defaults.items()}
    if sizes["width"] % sizes["heads"]:
        raise ConfigError(f"{path}: width {sizes['width']} does not divide into {sizes['heads']} heads")
    return ModelShape(
        name=path.stem,
        layers=sizes["layers"],
        hidden=sizes["width"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        head_size=sizes["width"] // sizes["heads"],
        ffn=sizes["hidden"],
        vocabulary=sizes["vocabulary"],
        **_experts(model, path, sizes["hidden"]),
    )


def _experts(model: dict[str, Any], path: Path, hidden: int) -> dict[str, Any]:
    """Return the sizes of the experts of ``[model]``."""
    if model.get("experts", 0) == 0:
        return {}
    return {
        "experts": _count(model, "experts", path),
        "experts_per_token": _count(model, "experts_per_token", path, 2),
        "expert_ffn": _count(model, "expert_hidden", path, hidden),
        "shared_ffn": 0 if model.get("shared_hidden", 0) == 0 else _count(model, "shared_hidden", path),
    }


def _hugging_face(value: object, key: str, path: Path) -> Path:
    """Return the path that ``model.config`` or ``model.path`` names: as the trainer reads it, else in the file's folder."""
    if not isinstance(value, str) or value.endswith(".toml"):
        raise ConfigError(f"{path}: model.{key} must name a config.json or its folder, got {value!r}")
    named = Path(value).expanduser()
    return named if os.path.exists(named) else path.parent / named


def _from_config(table: dict[str, Any], path: Path) -> ModelShape:
    kind = table.get("model_type")
    if kind is None:
        raise ConfigError(
            f"{path}: the config has no model_type, which says of what family the model is; is it one of a language model?"
        )
    if not isinstance(kind, str) or kind not in _TRAITS:
        raise NoClosedFormError(f"{path}: {_unknown(table)}", path)
    if (reason := refused_variant(table) or refused_architecture(table)) is not None:
        raise ConfigError(f"{path}: {reason}")
    traits = dict(_TRAITS[kind])
    name = _name(table, path)
    table = {
        **{_GPT2_NAMES[key]: table[key] for key in _GPT2_NAMES if kind == "gpt2" and key in table},
        **table,
    }
    if kind == "gpt2":
        # Defaults of transformers' `GPT2Config`, which a config.json may leave out.
        hidden, heads = _count(table, "n_embd", path, 768), _count(table, "n_head", path, 12)
        layers, positions = _count(table, "n_layer", path, 12), _count(table, "n_positions", path, 1024)
        ffn = _count(table, "n_inner", path, 4 * hidden)
        kv_heads, vocabulary = heads, _count(table, "vocab_size", path, 50257)
    else:
        hidden, heads = _count(table, "hidden_size", path), _count(table, "num_attention_heads", path)
        layers, positions = _count(table, "num_hidden_layers", path), 0
        if table.get("max_position_embeddings") is not None:
            traits["context"] = _count(table, "max_position_embeddings", path)
        ffn, vocabulary = _count(table, "intermediate_size", path), _count(table, "vocab_size", path)
        kv_heads = heads if kind == "gpt_neox" else _count(table, "num_key_value_heads", path, heads)
    head_size = _count(table, "head_dim", path, hidden // heads)
    traits |= _mixture(kind, table, path)
    if kind in ("deepseek_v3", "youtu"):
        traits |= _latents(table, path)
        head_size, kv_heads = traits.pop("head_size"), heads
    elif not table.get("head_dim") and hidden % heads:
        raise ConfigError(f"{path}: hidden size {hidden} does not divide into {heads} heads")
    for key, usual in _BIAS_KEYS.get(kind, {}).items():
        table = {**dict.fromkeys(usual, table.get(key)), **table}
    bias = _flag(table, "attention_bias", path)
    if kind not in _FIXED_BIASES and bias is not None:
        traits["qkv_bias"] = bias
        traits["output_bias"] = bias and kind not in _QKV_ONLY
    for key, trait in (("mlp_bias", "ffn_bias"), ("tie_word_embeddings", "tied")):
        if (flag := _flag(table, key, path)) is not None:
            traits[trait] = flag
    if kind == "seed_oss" and (flag := _flag(table, "attention_out_bias", path)) is not None:
        traits["output_bias"] = flag
    traits["window"], traits["windowed"] = windows(kind, table, layers)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn=ffn,
        vocabulary=vocabulary,
        positions=positions,
        head_norm_weights=_head_norms(kind, heads, kv_heads, head_size),
        **traits,
    )


def _mixture(kind: str, table: dict[str, Any], path: Path) -> dict[str, int]:
    """Return the sizes of the experts of a family of mixtures; none for other families."""
    keys = _MIXTURES.get(kind)
    if keys is None:
        return {}
    # The library's own files have the second name of a number of experts.
    key = next((key for key in keys.experts if table.get(key) is not None), keys.experts[0])
    experts, each = _count(table, key, path), _count(table, keys.ffn, path)
    sizes = {
        "experts": experts,
        "experts_per_token": _count(table, "num_experts_per_tok", path),
        "expert_ffn": each,
    }
    if kind == "qwen3_moe" and (table.get("mlp_only_layers") or table.get("decoder_sparse_step", 1) != 1):
        raise NoClosedFormError(
            f"{path}: no closed form for a {kind} in which some blocks have no experts", path
        )
    if kind == "deepseek_v3":
        dense, layers = table.get("first_k_dense_replace"), _count(table, "num_hidden_layers", path)
        sizes["shared_ffn"] = each * _count(table, "n_shared_experts", path, 1)
        sizes["dense_layers"] = min(
            layers, 0 if dense == 0 else _count(table, "first_k_dense_replace", path, 3)
        )
    return sizes


def _latents(table: dict[str, Any], path: Path) -> dict[str, int]:
    """Return the sizes of attention whose queries, keys and values are expanded from latents."""
    # Defaults of transformers' `YoutuConfig` and `DeepseekV3Config`.
    rotary = _count(table, "qk_rope_head_dim", path, 64)
    without_query = "q_lora_rank" in table and table["q_lora_rank"] is None
    return {
        "query_rank": 0 if without_query else _count(table, "q_lora_rank", path, 1536),
        "kv_rank": _count(table, "kv_lora_rank", path, 512),
        "rotary_size": rotary,
        "value_size": _count(table, "v_head_dim", path, 128),
        "head_size": _count(table, "qk_nope_head_dim", path, 128) + rotary,
    }


def _unknown(table: dict[str, Any]) -> str:
    """Return why a model's family has no closed form, and what to do."""
    kind, part = table.get("model_type"), table.get("text_config")
    what = f"no closed form for a model of type {kind!r}"
    if isinstance(part, dict) and part.get("model_type") in _TRAITS:
        return f"{what}; its text part ({part['model_type']}) has one: write text_config to a config.json of its own"
    return (
        f"{what}; `penstock plan` traces a config that penstock.from_transformers takes. Give any other model as a list of "
        "layers to `penstock.profile_layers`, trace it without weights (measure=False), save the profile as JSON, and plan "
        "that; see docs/planning.md"
    )


def _head_norms(kind: str, heads: int, kv_heads: int, head_size: int) -> int:
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        return 2 * head_size
    if kind == "gpt_oss":
        return heads  # sinks of attention
    if kind == "apertus":
        return 2 * head_size + 2  # and the two parameters of its activation
    return (heads + kv_heads) * head_size if kind == "olmo2" else 0


def _name(table: dict[str, Any], path: Path) -> str:
    given = table.get("_name_or_path")
    if isinstance(given, str) and given:
        return given.rstrip("/").rpartition("/")[2]
    return path.parent.name if path.name == "config.json" else path.stem


def _count(table: dict[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = table.get(key)
    if value is None:
        if default is None:
            raise ConfigError(f"{path}: {key} is missing; the model's sizes depend on it")
        return default
    require_count(f"{path}: {key}", value, most=LARGEST_SIZE)
    return int(value)


def _flag(table: dict[str, Any], key: str, path: Path) -> bool | None:
    value = table.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise ConfigError(f"{path}: {key} must be true or false, got {value!r}")
