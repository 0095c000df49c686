"""Selective recompute by module: bytes of a block that are dropped after its forward, and works that make them again.

The modules have the names and boundaries of Megatron-core's `TransformerConfig.recompute_modules` (default there: core_attn)
and of its README of experts:

- ``layernorm``: drops the outputs of the norms before attention and before the feed-forward; two elementwise passes again.
- ``mla_up_proj``: drops queries, keys and values of multi-head latent attention; the matrices from the latents, and the
  rotary positions, again. The latents and the part of the keys that is rotated are its inputs, and stay.
- ``core_attn``: drops the scores of unfused attention; fused attention stores none.
- ``mlp``: drops all within the feed-forward of a block without experts; its matrices and activation again.
- ``moe_act``: drops the outputs of the experts' activation, the inputs of their second matrix; one elementwise pass again.
- ``shared_experts``: drops all within the shared expert; its matrices and activation again.
- ``moe``: drops all within router and experts, the copies of the tokens, too; all of it again, and both exchanges.

layernorm, mla_up_proj and moe_act discard outputs there; the others are checkpoints that keep their input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.base.errors import ConfigError
from penstock.profile.closed_form import Workload, collectives, feed_forward, matmul, rows_of_experts
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_shape import ModelShape

MODULES = ("layernorm", "mla_up_proj", "core_attn", "mlp", "moe_act", "shared_experts", "moe")
"""Names of the modules, in the order in which a block runs them."""
OUTPUTS = ("layernorm", "mla_up_proj", "moe_act")
"""Modules that free many bytes for few seconds, and exchange nothing."""


def modules_of(shape: ModelShape) -> tuple[str, ...]:
    """Return the modules that blocks of a model have."""
    dense = _of_block(shape.dense) if shape.dense_layers else ()
    others = _of_block(shape) if shape.dense_layers < shape.layers else ()
    return tuple(name for name in MODULES if name in others or name in dense)


def _of_block(shape: ModelShape) -> tuple[str, ...]:
    """Return the modules of one block, with experts if the model has any."""
    has = {
        "mla_up_proj": shape.kv_rank,
        "mlp": not shape.experts,
        "moe_act": shape.experts,
        "shared_experts": shape.shared_ffn,
        "moe": shape.experts,
    }
    return tuple(name for name in MODULES if has.get(name, True))


def require_modules(shape: ModelShape, modules: Sequence[str]) -> None:
    """Raise `ConfigError` unless a model has these modules and they can be costed."""
    if modules and shape.adapter_rank:
        raise ConfigError(
            f"recompute={'+'.join(modules)}: modules of {shape.name} with adapters are not costed; take none, selective, "
            "full or a number"
        )
    has = modules_of(shape)
    for name in modules:
        if name not in has:
            lacks = {
                "mla_up_proj": "latent attention",
                "mlp": "blocks without experts",
                "shared_experts": "shared experts",
            }
            what = lacks.get(name, "experts")
            raise ConfigError(
                f"recompute={name}: {shape.name} has no {what}; its modules are {', '.join(has)}"
            )


def with_modules(shape: ModelShape, cost: LayerCost, load: Workload) -> LayerCost:
    """Return the cost of a block whose selective recompute is of `load.modules`; with none, it stays that of scores."""
    if not load.modules:
        return cost
    balanced = replace(load, imbalance=1.0)
    works: list[DeviceWork] = []
    dropped = flops = 0.0
    for name in load.modules:
        if name == "core_attn":
            works += cost.selective
            dropped += cost.saved_bytes - cost.selective_bytes
            flops += cost.selective_flops
            continue
        again, size = _again(shape, name, load)
        works += again
        dropped += size
        # Rows that the fullest device has beyond the mean are others' FLOPs of the model, as in `model_flops`.
        own = sum(work.amount for work in _again(shape, name, balanced)[0] if work.unit == "matmul")
        if name == "moe":
            own -= 2 * load.tokens * shape.hidden * shape.experts * (1 - 1 / load.tp)
        flops += load.tp * load.cp * own
    return replace(
        cost,
        selective=tuple(works),
        selective_bytes=cost.saved_bytes - dropped,
        selective_flops=flops,
    )


def _again(shape: ModelShape, name: str, load: Workload) -> tuple[list[DeviceWork], float]:
    """Return the works of a module of one block, and the bytes that are dropped; none if the block does not have it."""
    if name not in _of_block(shape):
        return [], 0.0  # other blocks of the model have it
    ups = 2 if shape.gated else 1
    each = load.tokens * load.element / load.tp  # bytes of one value for every token
    value = load.tokens * shape.hidden * load.element
    rows, products = rows_of_experts(shape, load), feed_forward(shape, load)
    if name == "layernorm":
        shard = value / (load.tp if load.sequence_parallel else 1)
        norms = min(2, shape.norms)
        return [DeviceWork("memory", 2 * norms * shard, calls=norms)], norms * shard
    if name == "mla_up_proj":
        query, key, values = shape.attention_sizes
        expand = [
            matmul(load.tokens, inputs, outputs / load.tp) for inputs, outputs in shape.head_matrices[:-1]
        ]
        # With cp, attention keeps keys and values of whole samples, which came from other devices as well.
        outputs = query - shape.rotary_size + (key + values if load.cp == 1 else 0)
        return [*expand, DeviceWork("memory", 2 * (query + key + values) * each)], outputs * each
    if name == "moe_act":
        inner = rows.inner - shape.shared_ffn
        return [DeviceWork("memory", (ups + 1) * inner * each)], inner * each
    if name == "shared_experts":
        activation = (ups + 1) * shape.shared_ffn * each
        return [*products[-2:], DeviceWork("memory", activation)], activation
    activation = (ups + 1) * rows.inner * each
    if name == "mlp":
        pair = (*collectives("gather", value, load), *collectives("reduce", value, load))
        return [*products, DeviceWork("memory", activation), *(pair if load.tp > 1 else ())], activation
    sort = DeviceWork("memory", activation + rows.moved * each)
    join = (DeviceWork("all_gather", value),) if load.tp > 1 else ()
    return [*products, sort, *rows.exchange, *join], activation + 2 * rows.copies * each
