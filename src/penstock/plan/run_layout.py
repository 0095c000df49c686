"""Layout of a run: how a model is cut over devices, in which order it runs, and what it keeps in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from penstock.base.counts import is_count, require_count
from penstock.base.errors import ConfigError, ScheduleError, nearest
from penstock.profile.selective import MODULES
from penstock.schedule.residency import Shard, Sharding, Store

Recompute = str | int
"""``"none"``, ``"selective"`` (scores of attention), ``"full"`` (every block), k (every k-th block of a stage), or modules
of every block with ``+`` between, as in ``"layernorm+moe_act"``: see `penstock.profile.selective`."""
_RECOMPUTES = ("none", "selective", "full")

# Negative numbers, too, so that the error says that they are too small.
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_MOST_IMBALANCE = 1_000_000
OTHER_NAMES = {
    "attention=fused": "flash flash_attention flash_attn sdpa use_flash_attn",
    "chunked_loss": "chunked_cross_entropy cut_cross_entropy fused_linear_cross_entropy linear_cross_entropy",
    "cp": "context context_length_parallel context_parallel context_parallel_degree context_parallel_size "
    "cp_degree cp_size ring",
    "dp": "data data_parallel data_parallel_size ddp dp_degree dp_size replicas",
    "dtype": "amp mixed_precision precision",
    "dtype=bf16": "bf16 bfloat16",
    "dtype=fp16": "fp16 float16 half",
    "dtype=fp8": "fp8 float8",
    "ep": "ep_degree ep_size expert expert_model_parallel_size expert_parallel expert_parallel_size experts moe",
    "microbatch": "accumulate accumulation gradient_accumulation_steps mbs micro micro_batch micro_batch_size "
    "microbatch_size",
    "overlap": "overlap_grad_reduce overlap_reduce",
    "pp": "num_stages pipeline pipeline_model_parallel_size pipeline_parallel pp_degree pp_size stages",
    "recompute": "activation_checkpoint activation_checkpointing activation_recompute checkpointing "
    "gradient_checkpointing recomputation recompute_granularity recompute_modules remat",
    "recompute=selective": "recompute_activations",
    "schedule": "order pipeline_schedule schedule_name",
    "shard": "sharding sharding_strategy zero_stage",
    "shard=gradients": "shard_grad_op zero2 zero_2 zero=2",
    "shard=none": "no_shard zero=0 zero=false zero=no zero=off",
    "shard=optimizer": "distributed_optimizer use_distributed_optimizer zero zero1 zero_1",
    "shard=weights": "fsdp fsdp2 full_shard fully_shard hsdp use_fsdp zero3 zero_3 zero=3",
    "sequence_parallel=true": "sp",
    "store=host": "cpu_offload offload offload_optimizer offload_params zero_offload",
    "split": "blocks layers partition",
    "tp": "tensor tensor_model_parallel_size tensor_parallel tensor_parallel_size tp_degree tp_size",
    "v": "chunks interleave interleaving num_virtual_stages virtual virtual_pipeline virtual_stages vp vpp",
}
"""Names, some with a value, that people and other tools have for a key, or for a key with a value."""
NO_KEYS = {
    "batch": "samples of a step are the option --batch",
    **dict.fromkeys(("devices", "gpus"), "the number of devices is the option --devices"),
    **dict.fromkeys(MODULES, "modules of recompute are joined by +, as in recompute=layernorm+moe_act"),
    "memory": "bytes of a device are the option --memory-limit",
    "nodes": "the number of nodes is part of --cluster, as in h100*8x4",
    **dict.fromkeys(("seq", "seq_length"), "tokens of a sample are the option --sequence"),
    "sequence": "tokens of a sample are the option --sequence; cp=2 divides them over two devices, and "
    "sequence_parallel=true divides activations over tp",
    "ulysses": "no plan exchanges heads for tokens; cp=2 divides the tokens of each sample over two devices",
}
"""Names that are no key of a layout, with the keys that they mean."""

_TRUE, _FALSE = {"true", "yes", "1", "on"}, {"false", "no", "0", "off"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run a model on devices.

    Attributes:
        pp: pipeline ranks (default 1).
        dp: replicas of the pipeline that share each batch (default 1).
        tp: devices that share every matrix of a stage (default 1).
        ep: devices that divide the experts of a stage: a divisor of dp * cp * tp, whose devices they are (default 1).
        cp: devices that divide the tokens of each sample (default 1).
        v: stages per rank; None (default) is the schedule family's number.
        microbatch: samples of a microbatch (default 1).
        schedule: name of a schedule family, MODULE:FUNCTION that builds one, or path of a CSV file (default "1f1b").
        recompute: activations that are computed again; see `Recompute` (default "none").
        shard: what replicas divide: "none" (default), "optimizer" (its state, ZeRO-1), also "gradients" (ZeRO-2), or also
            "weights" (ZeRO-3); see `penstock.schedule.residency.Sharding`.
        store: where weights are while no op reads them, and gradients and optimizer state: on the devices ("none", default),
            in "host" memory or on "disk", of one pipeline alone; see `penstock.schedule.residency.Sharding`.
        window: with shard="weights" or a store, stages whose weights a rank may hold at once; None (default) for all of the
            rank.
        reduce_every: with shard="gradients" or "weights" or a store, microbatches whose gradients are added up before they
            are summed over the replicas, or leave the device; None (default) for all of the step.
        sequence_parallel: True if activations between the matrices are divided along the sequence, over `tp`.
        split: "even" (default), "cost" (equal times, with embedding and head), or the blocks of every stage, with commas.
        attention: "fused" or "unfused" (stores scores); None (default) is the cluster's rule.
        overlap: True if gradients are reduced while the backward runs; None (default) is the cluster's rule.
        dtype: "bf16", "fp16", "fp8" or "fp32"; None (default) is the cluster's.
        chunked_loss: True if the loss is `LinearCrossEntropy`, which never has whole logits (default False).
        optimizer: "adamw" (default), or "muon": of matrices of the blocks but for experts', which then have one moment.
        imbalance: rows that go to the experts of the fullest of the `ep` devices, over the mean (default 1: equally many).
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    cp: int = 1
    v: int | None = None
    microbatch: int = 1
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    shard: Shard = "none"
    store: Store = "none"
    window: int | None = None
    reduce_every: int | None = None
    sequence_parallel: bool = False
    split: str | tuple[int, ...] = "even"
    attention: str | None = None
    overlap: bool | None = None
    dtype: str | None = None
    chunked_loss: bool = False
    optimizer: str = "adamw"
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        for key in ("pp", "dp", "tp", "ep", "cp", "microbatch", "v"):
            value = getattr(self, key)
            if key == "v" and value is None:
                continue
            require_count(f"layout: {key}", value)
        if type(self.imbalance) not in (int, float) or not 1 <= self.imbalance <= _MOST_IMBALANCE:
            raise ConfigError(
                f"layout: imbalance must be a number from 1 to {_MOST_IMBALANCE:,}, the rows of the fullest device over the "
                f"mean, got {self.imbalance!r}"
            )
        try:
            # Searches make many layouts, most of them with these values.
            plain = self.shard in ("none", "optimizer") and self.store == "none"
            if not plain or (self.window, self.reduce_every) != (None, None):
                Sharding(self.shard, self.window, self.reduce_every, self.store)
        except ScheduleError as error:
            raise ConfigError(f"layout: {error}") from None
        if self.store != "none" and self.devices > self.pp:
            raise ConfigError(
                f"layout: store={self.store} holds the weights of one pipeline, and this one has {self.devices // self.pp} "
                "devices for each rank; take dp, tp and cp 1"
            )
        for key in ("sequence_parallel", "chunked_loss", "overlap"):
            value = getattr(self, key)
            if not isinstance(value, bool) and not (key == "overlap" and value is None):
                raise ConfigError(f"layout: {key} must be true or false, got {value!r}")
        if not isinstance(self.schedule, str):
            raise ConfigError(
                f"layout: schedule must be a name, MODULE:FUNCTION or a CSV file, got {self.schedule!r}"
            )
        if self.recompute not in _RECOMPUTES and not is_count(self.recompute):
            # Layouts that run alike are equal, so modules have one order.
            object.__setattr__(self, "recompute", _modules_text(self.recompute))
        _one_of("optimizer", self.optimizer, ("adamw", "muon"))
        if self.attention is not None:
            _one_of("attention", self.attention, ("fused", "unfused"))
        if self.dtype is not None:
            _one_of("dtype", self.dtype, ("bf16", "fp16", "fp8", "fp32"))
        if isinstance(self.split, list | tuple) and all(is_count(count, least=0) for count in self.split):
            object.__setattr__(self, "split", tuple(self.split))  # JSON has lists for tuples
        else:
            _one_of("split", self.split, ("even", "cost"), "the blocks of every stage, as in 3+3+2")
        if self.sequence_parallel and self.tp == 1:
            # One device divides nothing, and layouts that run alike are equal.
            object.__setattr__(self, "sequence_parallel", False)

    @property
    def devices(self) -> int:
        """Number of devices: pp * dp * cp * tp."""
        return self.pp * self.replicas * self.tp

    @property
    def replicas(self) -> int:
        """Number of devices with the same parameters, whose gradients are summed: dp * cp."""
        return self.dp * self.cp

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules of every block that are computed again, if they are chosen by name."""
        if isinstance(self.recompute, int) or self.recompute in _RECOMPUTES:
            return ()
        return tuple(self.recompute.split("+"))

    @property
    def recomputes_all(self) -> bool:
        """True if every block is computed again, all of it or parts."""
        return isinstance(self.recompute, str) and self.recompute != "none"

    @property
    def recomputes_parts(self) -> bool:
        """True if parts of every block are computed again: the scores of attention, or modules."""
        return self.recompute == "selective" or bool(self.modules)

    @property
    def expert_replicas(self) -> int:
        """Number of devices of a stage that have the same experts: dp * cp * tp / ep."""
        return self.replicas * self.tp // self.ep

    @property
    def sharding(self) -> Sharding:
        """Choice of what replicas divide, nothing if there is one, or of what a store keeps."""
        if self.store != "none":
            return _make_sharding("none", self.window, self.reduce_every, self.store)
        if self.replicas == 1:
            return _make_sharding("none", None, None)
        return _make_sharding(self.shard, self.window, self.reduce_every)

    @property
    def shard_text(self) -> str:
        """Words for a table about what replicas divide or a store keeps, as "weights, window 2"; empty for nothing."""
        window = "" if self.window is None else f", window {self.window}"
        every = "" if self.reduce_every is None else f", every {self.reduce_every}"
        kept = f"{self.store} store" if self.store != "none" else "" if self.shard == "none" else self.shard
        return f"{kept}{window}{every}" if kept else ""

    def as_dict(self) -> dict[str, Any]:
        """Return all keys with their values."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the layout as `parse` reads it, without values that are the default."""
        return ",".join(
            f"{key}={_text(value)}" for key, value in asdict(self).items() if self._shown(key, value)
        )

    def _shown(self, key: str, value: object) -> bool:
        default = next(f.default for f in fields(self) if f.name == key)
        return value != default or key in ("pp", "dp", "tp", "microbatch", "schedule")

    @staticmethod
    def parse(text: str) -> Layout:
        """Read a layout from a text of ``key=value`` pairs with commas, as in ``pp=8,dp=8,tp=8,schedule=1f1b``.

        Several numbers after ``split=`` are separated by ``+`` or ``;``.

        Raises:
            ConfigError: if a key is unknown (with the nearest one), is given twice, or has a value that it does not allow.
        """
        return Layout(**layout_values(text))

    def with_values(self, **values: Any) -> Layout:
        """Return a layout in which some keys have other values."""
        return replace(self, **values)


_make_sharding = lru_cache(maxsize=64)(Sharding)


def layout_values(text: str) -> dict[str, Any]:
    """Return the values that a text gives to keys of a layout, as `Layout.parse` reads it."""
    values: dict[str, Any] = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        require_key(key, value)
        if not equals:
            raise ConfigError(f"layout: {pair!r} has no value; write key=value with commas between")
        if key in values:
            raise ConfigError(f"layout: {key} is given twice")
        values[key] = _value(key, value)
    Layout(**values)
    return values


def require_key(key: object, value: object = "") -> None:
    """Raise `ConfigError` unless a layout has such a key; it names the key that other tools' names stand for."""
    known = [f.name for f in fields(Layout)]
    if key in known:
        return
    name = str(key).lower().strip("-").replace("-", "_")
    if name in NO_KEYS:
        raise ConfigError(f"layout: no key {key!r}: {NO_KEYS[name]}")
    others = {other: ours for ours, names in OTHER_NAMES.items() for other in names.split()}
    near = others.get(f"{name}={value}".lower()) or others.get(name, "")
    if near and "=" not in near and value != "":
        near = f"{near}={value}"
    hint = f" (did you mean {near!r}?)" if near else nearest(str(key), known)
    raise ConfigError(f"layout: no key {key!r}{hint}; the keys are {', '.join(known)}")


def _value(key: str, text: str) -> Any:
    if key in ("sequence_parallel", "chunked_loss", "overlap"):
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        return text
    if key in ("schedule", "shard", "store", "attention", "dtype", "optimizer"):
        return text
    if key == "split":
        if text in ("even", "cost"):
            return text
        parts = [part.strip() for part in text.replace(";", "+").split("+")]
        return tuple(int(part) for part in parts) if all(map(_WHOLE.fullmatch, parts)) else text
    if _WHOLE.fullmatch(text):
        return int(text)
    if key == "recompute":
        return text
    if key == "imbalance":
        try:
            return float(text)
        except ValueError:
            return text
    raise ConfigError(f"layout: {key} must be a whole number, got {text!r}")


def _modules_text(value: object) -> str:
    """Return modules of recompute in their order, from text with + between, or with blanks as in Megatron-LM's options."""
    names = set(re.split(r"\s*\+\s*|\s+", value.strip())) if isinstance(value, str) else set()
    names = {"core_attn" if name == "selective" else name for name in names}
    wrong = sorted(names - {*MODULES})
    if wrong or not names:
        near = nearest(wrong[0], [*_RECOMPUTES, *MODULES]) if wrong and wrong[0] not in _RECOMPUTES else ""
        raise ConfigError(
            "layout: recompute must be none, selective, full or a number k from 1: every k-th block; or modules, as in "
            f"layernorm+moe_act, of {', '.join(MODULES)}; got {value!r}{near}"
        )
    if "moe" in names and (within := names & {"moe_act", "shared_experts"}):
        raise ConfigError(
            f"layout: recompute=moe computes all of the experts again; leave out {' and '.join(sorted(within))}"
        )
    return "selective" if names == {"core_attn"} else "+".join(name for name in MODULES if name in names)


def _one_of(key: str, value: object, allowed: tuple[str, ...], others: str = "") -> None:
    if value not in allowed:
        near = nearest(value, list(allowed)) if isinstance(value, str) else ""
        *first, last = (*allowed, others) if others else allowed
        raise ConfigError(f"layout: {key} must be {', '.join(first)} or {last}, got {value!r}{near}")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def layout_of(values: Mapping[str, Any] | str | Layout) -> Layout:
    """Return a layout given as text, as a mapping, or as a layout."""
    if isinstance(values, Layout):
        return values
    if isinstance(values, str):
        return Layout.parse(values)
    if not isinstance(values, Mapping):
        raise ConfigError(f"a layout must be text, a mapping or a Layout, got {values!r}")
    for key, value in values.items():
        require_key(key, value)
    return Layout(**values)
