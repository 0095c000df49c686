"""Costs of a decoder's layers in closed form, from its sizes alone.

Bytes kept for the backward follow Korthikanti et al. (2205.05198): per block and token 34 h bytes in 16 bits for a GPT with
dropout, and 5 heads × sequence more if attention stores its scores. Tensor parallelism divides the matrices, sequence
parallelism everything else as well. Blocks with a gate and without dropout are counted tensor by tensor in the same way.
Norms and gates are taken to be fused kernels, as in Megatron-LM. Kernels of eager PyTorch save more: a norm its normalised
input and scale (h + 1 values a token), a gate its activation (ffn values). A traced profile counts these.

FLOPs are of matrix products: 2 for each multiplication and addition. Scores of attention are counted in full, as in that
paper, although a causal mask leaves half of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator

from penstock.base import model_variants
from penstock.base.errors import ConfigError, nearest
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_shape import ModelShape

AttentionKernel = Literal["fused", "unfused"]
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2}
"""Bytes of an activation by the dtype of the matrix products; with fp8, activations stay in 16 bits."""


def _known(dtype: str) -> str:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"be one of {', '.join(DTYPE_BYTES)}{nearest(dtype, list(DTYPE_BYTES))}")
    return dtype


Dtype = Annotated[str, AfterValidator(_known)]

_SCORE_FORWARD = 13
_SCORE_BACKWARD = 19
"""Bytes read and written for each stored score of attention by unfused kernels in 16 bits: product, softmax, dropout."""
_FLASH_BACKWARD = 2.5
"""Products of fused attention in the backward over those in the forward: it computes the scores again (2205.14135)."""


PARAMETER_BYTES = {"bf16": (2, 4, 12), "fp16": (2, 4, 12), "fp8": (2, 4, 12), "fp32": (4, 4, 8)}
"""Bytes of a parameter's weight, gradient and optimizer state (AdamW, with fp32 main weights for 16 bits) by dtype."""
MAIN_BYTES = {"bf16": 4, "fp16": 4, "fp8": 4, "fp32": 0}
"""Part of a parameter's optimizer state that is its main weight, by dtype."""
MOMENT_BYTES = 4
"""Bytes of one moment of a parameter. AdamW has two of them, Muon one."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Conditions under which a layer is costed."""

    microbatch: int  # samples of a microbatch
    sequence: int  # tokens of a sample
    tp: int = 1
    sequence_parallel: bool = False  # what tensor parallelism leaves whole is divided along the sequence
    dtype: str = "bf16"  # of the matrix products, a key of `DTYPE_BYTES`
    attention: AttentionKernel = "fused"  # "fused" if scores stay within the kernel, else "unfused"
    ep: int = 1  # devices that divide the experts
    imbalance: float = 1.0  # rows of experts on the fullest of them, over the mean
    cp: int = 1  # devices that divide the tokens of each sample
    modules: tuple[str, ...] = ()  # of every block that are computed again; see `penstock.profile.selective`
    chunked_loss: bool = (
        False  # the loss goes through the logits in chunks, and computes their gradients at once
    )

    @property
    def tokens(self) -> int:
        """Tokens of one device."""
        return self.microbatch * self.sequence // self.cp

    @property
    def element(self) -> int:
        """Bytes of one activation."""
        return DTYPE_BYTES[self.dtype]


def require_divisible(shape: ModelShape, tp: int, ep: int = 1) -> None:
    """Raise `ConfigError` unless tensor parallelism can divide the model's matrices, and `ep` its experts."""
    if ep > 1 and not shape.experts:
        raise ConfigError(f"ep divides experts, and {shape.name} has none, so ep must be 1, got {ep}")
    if shape.experts % ep:
        raise ConfigError(
            f"ep={ep} does not divide the {shape.experts} experts of {shape.name}; take a divisor, such as "
            f"{math.gcd(ep, shape.experts)}"
        )
    for whole, what in (
        (shape.kv_rank, f"latents, from which {shape.name} expands its keys and values"),
        (shape.shared_ffn, f"the shared experts of {shape.name}"),
        (shape.adapter_rank, f"the adapters of {shape.name}"),
    ):
        if whole and tp > 1:
            raise ConfigError(f"tp={tp} does not divide {what}; take tp=1")
    if shape.experts and tp > 1 and ep == 1:
        raise ConfigError(
            f"with tp={tp} and ep=1, each device would have all {shape.experts} experts of {shape.name}, for the same "
            "tokens; take ep above 1, or tp=1"
        )
    for what, size in (
        ("heads", shape.heads),
        ("key and value heads", shape.kv_heads),
        ("feed-forward", shape.ffn),
    ):
        if size % tp:
            raise ConfigError(
                f"tp={tp} does not divide the model's {size} {what}; take a divisor, such as {largest_tp(shape, tp)}"
            )


def require_positions(shape: ModelShape, sequence: int) -> None:
    """Raise `ConfigError` if a sample has more tokens than the model is configured for."""
    model_variants.require_positions(sequence, shape.positions or shape.context, "sequence")


def largest_tp(shape: ModelShape, limit: int) -> int:
    """Return the largest tensor-parallel degree up to a limit that divides the model's matrices."""
    sizes = (1,) if shape.is_whole else (shape.heads, shape.kv_heads, shape.ffn)
    return max(t for t in range(1, limit + 1) if not any(size % t for size in sizes))


def embedding_cost(shape: ModelShape, load: Workload) -> LayerCost:
    """Return the cost of the table of tokens, and of the table of positions if there is one."""
    t, e = load.tp, load.element
    value = load.tokens * shape.hidden * e
    shard = value / (t if load.sequence_parallel else 1)
    lookups = DeviceWork("memory", 2 * value)
    collect = collectives("reduce", value, load) if t > 1 else ()
    return LayerCost(
        forward=(lookups, *collect),
        weight_grad=(
            # Reads the gradient and the rows of the table's gradient, and writes the rows.
            DeviceWork("memory", 3 * value),
            *(collectives("gather", value, load) if t > 1 else ()),
        ),
        # The backward needs the tokens, int64, and the dropout's mask of one byte an element.
        saved_bytes=load.tokens * 8 + (shard / e if shape.dropout else 0),
        selective_bytes=load.tokens * 8 + (shard / e if shape.dropout else 0),
        input_bytes=load.tokens * 8,
        output_bytes=shard,
        parameters=shape.hidden * (shape.vocabulary / t + shape.positions),
        recomputes=False,
    )


def block_cost(shape: ModelShape, load: Workload) -> LayerCost:
    t, e, tokens = load.tp, load.element, load.tokens
    hidden, (query, key, values) = shape.hidden, shape.attention_sizes
    *to_heads, (attended, _) = shape.head_matrices
    ups = 2 if shape.gated else 1
    # Each latent is kept before its norm and after it.
    latents = 2 * (shape.query_rank + shape.kv_rank)
    products = [
        *((tokens, rows, columns) for rows, columns in shape.latent_matrices),
        *((tokens, rows, columns / t) for rows, columns in to_heads),
        (tokens, attended / t, hidden),
    ]
    matmuls = (*(matmul(*sizes) for sizes in products), *feed_forward(shape, load))
    arriving, copies, moved, active_ffn, exchange = rows_of_experts(shape, load)
    attention_flops = 2 * tokens * load.sequence * (query + attended) / t
    scores = tokens * load.sequence * shape.heads / t

    # Elementwise kernels: those over the whole hidden state, and those over what tensor parallelism divides.
    shard = tokens * hidden * e / (t if load.sequence_parallel else 1)
    # A norm reads a tensor and writes one; each of the two residual additions reads two and writes one.
    whole_kernels = 2 * shape.norms + 3 * 2
    divided = (2 * (query + key + values) + latents + (ups + 1) * active_ffn + moved) * tokens * e / t
    elementwise = DeviceWork("memory", whole_kernels * shard + divided, calls=shape.norms + 4)
    # A forward kernel reads one tensor and writes one; its backward also reads the gradient: three tensors for two.
    backward_elementwise = DeviceWork(
        "memory", 1.5 * (whole_kernels * shard + divided), calls=shape.norms + 6
    )

    if load.attention == "fused":
        attention: tuple[DeviceWork, ...] = (DeviceWork("attention", attention_flops, load.sequence),)
        attention_grad: tuple[DeviceWork, ...] = (
            DeviceWork("attention", _FLASH_BACKWARD * attention_flops, load.sequence),
        )
    else:
        width = _width(load.sequence, load.sequence, shape.head_size)
        attention = (
            DeviceWork("matmul", attention_flops, width, 2),
            DeviceWork("scores", _SCORE_FORWARD * e / 2 * scores, calls=3),
        )
        attention_grad = (
            DeviceWork("matmul", 2 * attention_flops, width, 4),
            DeviceWork("scores", _SCORE_BACKWARD * e / 2 * scores, calls=3),
        )
    gathered, gather, scatter = _context(shape, load)
    value = tokens * hidden * e
    pairs = 1 if shape.experts else 2  # of matrices: attention's, and a feed-forward's without experts
    into = pairs * collectives("gather", value, load) if t > 1 else ()
    out = pairs * collectives("reduce", value, load) if t > 1 else ()
    if shape.experts and t > 1:
        # The experts' outputs of all tokens are joined; in the backward, the gradients of their inputs.
        out = (*out, DeviceWork("all_gather", value))

    # Kept for the backward, in bytes: norm inputs, inputs of the matrices, dropout masks; then what is divided.
    masks = 2 * shard / e if shape.dropout else 0
    kept_whole = (2 + 2) * shard + masks
    inner = query + key + values + attended + latents + (ups + 1) * active_ffn + 2 * copies
    inputs_divided = inner * tokens * e / t
    kept_divided = inputs_divided
    if load.cp > 1:
        # Attention keeps keys and values of whole samples in place of its own tokens', and its outputs for the two chunks,
        # which are then copied into the input of the last matrix.
        kept_divided += gathered * (1 - 1 / load.cp) + attended * tokens * e / t
    # Fused attention keeps the logarithm of each row's sum, in 32 bits.
    statistics = 4 * tokens * shape.heads / t if load.attention == "fused" else 0
    # Outputs of softmax and dropout, and the mask in one byte: 5 bytes in 16 bits (2205.05198).
    kept_scores = scores * (2 * e + 1) if load.attention == "unfused" else 0
    selective = kept_whole + kept_divided
    whole, experts = shape.whole_parameters, shape.expert_parameters
    router = shape.hidden * shape.experts
    again = 2 * tokens * router * (1 - 1 / t)  # FLOPs of a router that another device has, too
    # Rows that the fullest device has beyond the mean are others' FLOPs of the model.
    mean = (
        matmuls
        if arriving == 1
        else (*matmuls[: len(products)], *feed_forward(shape, replace(load, imbalance=1.0)))
    )
    return LayerCost(
        forward=(*matmuls, *attention, elementwise, *into, *out, *exchange, *gather),
        input_grad=(*matmuls, *attention_grad, backward_elementwise, *into, *out, *exchange, *scatter),
        weight_grad=matmuls,
        selective=attention if load.attention == "unfused" else (),
        saved_bytes=selective + statistics + kept_scores,
        selective_bytes=selective + statistics,
        # Inputs of the four matrices, and the gradients of their outputs.
        waiting_bytes=4 * shard + inputs_divided,
        input_bytes=shard,
        output_bytes=shard,
        parameters=(shape.block_parameters - experts - whole) / t + whole + experts / load.ep,
        expert_parameters=experts / load.ep,
        matrix_parameters=(sum(rows * columns for rows, columns in shape.block_matrices) - router) / t
        + router,
        model_flops=t * load.cp * (sum(work.amount for work in mean) - again + attention_flops),
        attention_flops=t * load.cp * attention_flops,
        selective_flops=t * load.cp * attention_flops if load.attention == "unfused" else 0,
    )


class ExpertRows(NamedTuple):
    """Values of the fullest device for each of its own tokens; without experts, of a feed-forward alone.

    Attributes:
        arriving: rows that arrive there, over the mean.
        copies: values of the rows that its experts take.
        moved: values that are read and written when rows are sorted, weighted and summed.
        inner: values between the two matrices of experts, of the shared expert too, or of a feed-forward.
        exchange: the exchange of tokens.
    """

    arriving: float
    copies: float
    moved: float
    inner: float
    exchange: tuple[DeviceWork, ...]


def rows_of_experts(shape: ModelShape, load: Workload) -> ExpertRows:
    # A copy of a token for each of its experts, read and written when they are sorted, and read when they are weighted and
    # summed. Divided experts also sort the rows that arrive, and sort them back.
    sent = shape.experts_per_token * shape.hidden
    arriving = load.imbalance if load.ep > 1 else 1.0
    copies = arriving * sent
    moved = 3 * sent + (4 * copies if load.ep > 1 else 0)
    inner = arriving * (shape.active_ffn - shape.shared_ffn) + shape.shared_ffn
    # Devices that divide matrices have the same tokens, and each sends its share of them to the experts.
    size = 2 * load.tokens / load.tp * copies * load.element
    exchange = (DeviceWork("all_to_all", size, calls=2),) if load.ep > 1 else ()
    return ExpertRows(arriving, copies, moved, inner, exchange)


def _context(
    shape: ModelShape, load: Workload
) -> tuple[float, tuple[DeviceWork, ...], tuple[DeviceWork, ...]]:
    """Return the bytes of gathered keys and values of whole samples, and the works of gathering and of summing gradients."""
    if load.cp == 1:
        return 0.0, (), ()
    _, key, values = shape.attention_sizes
    gathered = (key + values) * load.tokens * load.cp * load.element / load.tp
    # The parts are put in the order of the tokens twice: chunks of two halves, and then along the sequence.
    copies = DeviceWork("memory", 4 * gathered, calls=4)
    gather, scatter = (DeviceWork(unit, gathered) for unit in ("context_gather", "context_scatter"))
    return gathered, (copies, gather), (copies, scatter)


def feed_forward(shape: ModelShape, load: Workload) -> list[DeviceWork]:
    """Return the products of a feed-forward, or of a router, experts with equally many tokens each, and a shared expert."""
    tokens, hidden, ffn, ups = load.tokens, shape.hidden, shape.ffn / load.tp, 2 if shape.gated else 1
    if not shape.experts:
        return [matmul(tokens, hidden, ups * ffn), matmul(tokens, ffn, hidden)]
    # A device has the rows of `ep` devices' tokens for its share of the experts.
    count, each = shape.experts // load.ep, shape.expert_ffn
    rows = tokens / load.tp * shape.experts_per_token / count * (load.imbalance if load.ep > 1 else 1.0)
    one = (matmul(rows, hidden, ups * each), matmul(rows, each, hidden))
    works = [matmul(tokens, hidden, shape.experts)]
    works += [work._replace(amount=work.amount * count) for work in one]
    if shape.shared_ffn:
        works += [matmul(tokens, hidden, ups * shape.shared_ffn), matmul(tokens, shape.shared_ffn, hidden)]
    return works


def head_cost(shape: ModelShape, load: Workload) -> LayerCost:
    """Return the cost of the final norm, the head and the loss."""
    t, e, tokens = load.tp, load.element, load.tokens
    value = tokens * shape.hidden * e
    shard = value / (t if load.sequence_parallel else 1)
    logits = tokens * shape.vocabulary / t
    product = matmul(tokens, shape.hidden, shape.vocabulary / t)
    norm = DeviceWork("memory", 2 * shard)
    # Cast to 32 bits (e + 4 bytes), maximum (4), difference (8), exponential (8), sum (4), quotient (8); the backward
    # overwrites what they leave.
    loss, loss_grad = (
        DeviceWork("memory", (e + 36) * logits, calls=6),
        DeviceWork("memory", (8 + e) * logits, calls=2),
    )
    collect = collectives("gather", value, load) if t > 1 else ()
    spread = collectives("reduce", value, load) if t > 1 else ()
    if load.chunked_loss:
        return _chunked(shape, load, (norm, loss, loss_grad, *collect), (norm, *spread))
    # Inputs of the norm and of the product, and the logits, which the loss casts to 32 bits.
    kept = 2 * shard + 4 * logits
    return LayerCost(
        forward=(norm, product, loss, *collect),
        input_grad=(norm, product, loss_grad, *spread),
        weight_grad=(product,),
        saved_bytes=kept,
        selective_bytes=kept,
        input_bytes=shard,
        output_bytes=0,
        waiting_bytes=shard + e * logits,
        transient_bytes=e * logits,
        parameters=shape.hidden * (shape.vocabulary / t + shape.final_norm_weights),
        model_flops=t * load.cp * product.amount,
        recomputes=False,
    )


def _chunked(
    shape: ModelShape, load: Workload, forward: tuple[DeviceWork, ...], backward: tuple[DeviceWork, ...]
) -> LayerCost:
    """Return the cost of the head with `penstock.LinearCrossEntropy`, beside the given works of norm and loss.

    The forward has all three products, chunk by chunk, and the backward scales the gradients that they leave: of the head's
    input, and in fp32 of its weight.
    """
    e, tokens, parts = load.element, load.tokens, 8
    value, weight = tokens * shape.hidden * e, shape.hidden * shape.vocabulary / load.tp
    chunk = matmul(tokens / parts, shape.hidden, shape.vocabulary / load.tp)
    products = chunk._replace(amount=3 * parts * chunk.amount, calls=3 * parts)
    kept = value / (load.tp if load.sequence_parallel else 1) + value + 4 * weight
    plain = head_cost(shape, replace(load, chunked_loss=False))
    return replace(
        plain,
        # Each chunk reads and writes the weight's gradient.
        forward=(*forward, products, DeviceWork("memory", parts * 8 * weight, calls=parts)),
        input_grad=(*backward, DeviceWork("memory", 2 * value)),
        weight_grad=(DeviceWork("memory", (8 + 4 + e) * weight, calls=2),),
        saved_bytes=kept,
        selective_bytes=kept,
        waiting_bytes=4 * weight,
        # The weight's gradient in its own dtype, or a chunk of logits with its gradient in 32 bits.
        transient_bytes=max(e * weight, (e + 4) * tokens * shape.vocabulary / load.tp / parts),
    )


def matmul(rows: float, inner: float, columns: float) -> DeviceWork:
    """Return the product of matrices of shape [rows, inner] and [inner, columns]."""
    return DeviceWork("matmul", 2 * rows * inner * columns, _width(rows, inner, columns))


def _width(*sizes: float) -> float:
    """Return the width of a matrix product: FLOPs over the elements of all three matrices, times a constant."""
    return len(sizes) / sum(1 / size for size in sizes)


def collectives(half: Literal["gather", "reduce"], value: float, load: Workload) -> tuple[DeviceWork, ...]:
    """Return one direction of communication around a pair of matrices: an all-reduce has nothing to do on the other side."""
    if load.sequence_parallel:
        return (DeviceWork("all_gather" if half == "gather" else "reduce_scatter", value),)
    return (DeviceWork("all_reduce", value),) if half == "reduce" else ()
