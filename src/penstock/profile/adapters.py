"""Costs of layers whose weights are frozen, with trained adapters of low rank beside their matrices (LoRA, 2106.09685).

Every matrix of a block, [inputs, outputs], has an adapter of two matrices, [inputs, rank] and [rank, outputs]; embedding
and head have none. A base of 4 bits (QLoRA, 2305.14314) is made 16 bits wide before each product, in the forward and again
in the backward, and what is not quantised has 32 bits, as ``peft.prepare_model_for_kbit_training`` leaves it.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.profile.closed_form import Workload, matmul
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_shape import ModelShape

_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Bits of a weight in a base of 4 bits: 64 weights have a scale of 8 bits, and 256 scales one of 32 bits (2305.14314)."""


def frozen(shape: ModelShape, cost: LayerCost, load: Workload) -> LayerCost:
    """Return the cost of a layer without trained weights."""
    wide = 4 if shape.base_bits == 4 else load.element
    return replace(
        cost,
        weight_grad=(),
        waiting_bytes=0,
        parameters=0,
        matrix_parameters=0,
        frozen_parameters=cost.parameters,
        frozen_bytes=wide * cost.parameters,
        frozen_flops=cost.model_flops - cost.attention_flops,
    )


def with_adapters(shape: ModelShape, cost: LayerCost, load: Workload) -> LayerCost:
    """Return the cost of a block with an adapter beside each of its matrices."""
    rank, tokens = shape.adapter_rank, load.tokens
    base = frozen(shape, cost, load)
    products, sums, outputs = [], 0.0, 0
    for rows, columns in shape.block_matrices:
        products += [matmul(tokens, rows, rank), matmul(tokens, rank, columns)]
        # The adapter's output is added to the matrix's: two reads and a write.
        sums += 3 * columns * tokens * load.element
        outputs += rank
    works = [*products, DeviceWork("memory", sums, calls=len(shape.block_matrices))]
    quantised = sum(rows * columns for rows, columns in shape.block_matrices) if shape.base_bits == 4 else 0
    if quantised:
        works.append(DeviceWork("memory", (_BITS / 8 + 2) * quantised, calls=len(shape.block_matrices)))
    trained = sum(rank * (rows + columns) for rows, columns in shape.block_matrices)
    kept = outputs * tokens * load.element
    return replace(
        base,
        forward=(*cost.forward, *works),
        input_grad=(*cost.input_grad, *works),
        weight_grad=tuple(products),
        saved_bytes=cost.saved_bytes + kept,
        selective_bytes=cost.selective_bytes + kept,
        waiting_bytes=cost.waiting_bytes + kept,
        parameters=trained,
        matrix_parameters=trained,
        frozen_bytes=base.frozen_bytes - quantised * (4 - _BITS / 8),
        model_flops=cost.model_flops + load.cp * sum(work.amount for work in products),
    )
