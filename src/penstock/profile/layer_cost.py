"""Cost of one layer: its operations, the bytes it keeps for the backward, its parameters, the value it hands on.

A cost belongs to one device, one microbatch, and one degree of tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from penstock.base.tables import Count, Flag, Number, Table

Amount = Annotated[Number, Field(ge=0)]
Unit = Literal[
    "matmul",
    "attention",
    "memory",
    "scores",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "context_gather",
    "context_scatter",
    "seconds",
]


class DeviceWork(NamedTuple):
    """Operations of one kind on one device.

    Attributes:
        unit: part of the device that does the work: "matmul" (matrix multiplication), "attention" (matrix products of
            fused attention), "memory" (elementwise operations, limited by bandwidth), "scores" (the same on stored scores
            of attention), a collective among the tensor-parallel ranks, "all_to_all" (among the ranks that divide experts),
            "context_gather" or "context_scatter" (a gather, or a sum of the parts, among the ranks that divide samples), or
            "seconds" (measured).
        amount: FLOPs of matmul and attention; bytes read and written of memory and scores; bytes of the whole tensor of
            a collective, or that a rank sends in exchanges, its own part included; seconds if measured.
        width: smallest dimension of the matrices, on which their efficiency depends (default 0).
        calls: number of kernel launches, or of collectives (default 1).
    """

    unit: Unit
    amount: Amount
    width: Amount = 0
    calls: Count = 1


@dataclass(frozen=True, kw_only=True)
class LayerCost(Table):
    """Cost of one layer for one microbatch on one device.

    Attributes:
        forward: operations of the forward.
        input_grad: operations of the half of the backward that computes the gradient of the input.
        weight_grad: operations of the half that computes the gradients of the weights.
        selective: operations that selective recompute does again.
        backward: operations of a backward that is not split; empty (default) if it runs the operations of its halves.
        again: operations that full recompute adds to the backward; empty (default) if it repeats the whole forward.
        saved_bytes: bytes that the forward keeps for the backward, without recompute.
        selective_bytes: the same with selective recompute: of the scores of attention, or of the modules that were chosen.
        waiting_bytes: bytes that wait from the first half of a split backward to the second: inputs of the matrices and
            gradients of their outputs. The first half drops all else.
        input_bytes: bytes of the value that the layer takes; with full recompute, all that is kept.
        output_bytes: bytes of the value that it hands on.
        transient_bytes: bytes in use only while one microbatch is in the layer's backward, such as the gradient of logits.
        parameters: number of parameters on this device that are trained.
        expert_parameters: part of `parameters` that is experts'.
        matrix_parameters: part of `parameters` that Muon updates: matrices of blocks, but for experts'.
        frozen_parameters: number of the others, which have neither gradient nor optimizer state.
        frozen_bytes: bytes of these.
        model_flops: FLOPs of the forward over all devices of tp and cp, in the usual convention: matrix products only,
            attention in full although a causal mask leaves half.
        attention_flops: part of `model_flops` that is attention's products of queries, keys and values.
        selective_flops: part of `model_flops` that selective recompute does again.
        frozen_flops: FLOPs that gradients of frozen weights would take, in the convention of `model_flops`.
        recomputes: True if the layer runs again with full recompute.
    """

    forward: tuple[DeviceWork, ...] = ()
    input_grad: tuple[DeviceWork, ...] = ()
    weight_grad: tuple[DeviceWork, ...] = ()
    selective: tuple[DeviceWork, ...] = ()
    backward: tuple[DeviceWork, ...] = ()
    again: tuple[DeviceWork, ...] = ()
    saved_bytes: Amount = 0
    selective_bytes: Amount = 0
    waiting_bytes: Amount = 0
    input_bytes: Amount = 0
    output_bytes: Amount = 0
    transient_bytes: Amount = 0
    parameters: Amount = 0
    expert_parameters: Amount = 0
    matrix_parameters: Amount = 0
    frozen_parameters: Amount = 0
    frozen_bytes: Amount = 0
    model_flops: Amount = 0
    attention_flops: Amount = 0
    selective_flops: Amount = 0
    frozen_flops: Amount = 0
    recomputes: Flag = True
