"""Modules of selective recompute: bytes that each drops and works that it repeats, counted by hand.

What a module drops and repeats is said in Megatron-core: `TransformerConfig.recompute_modules` in
megatron/core/transformer/transformer_config.py and "Checkpointing" in megatron/core/transformer/moe/README.md. Tensors have
16 bits; norms and gates are fused kernels, as in `penstock.profile.closed_form`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from penstock.profile.closed_form import Workload, block_cost
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_shape import ModelShape
from penstock.profile.selective import MODULES, OUTPUTS, modules_of, with_modules
from tests.support.planning import DEEPSEEK, MIXTRAL

TOKENS = 2 * 32
LOAD = Workload(microbatch=2, sequence=32)
EACH = 2 * TOKENS  # bytes of one value for every token
# DeepSeek: values of queries, keys and values of 4 heads, and of the hidden state.
QUERY, KEY, VALUE, HIDDEN = 4 * 24, 4 * 24, 4 * 16, 64


def of(shape: ModelShape, *modules: str, **load: object) -> LayerCost:
    at = replace(LOAD, modules=modules, **load)
    return with_modules(shape, block_cost(shape, at), at)


def dropped(cost: LayerCost) -> float:
    return cost.saved_bytes - cost.selective_bytes


def amounts(cost: LayerCost) -> dict[str, float]:
    found: dict[str, float] = {}
    for work in cost.selective:
        found[work.unit] = found.get(work.unit, 0) + work.amount
    return found


@pytest.mark.parametrize(
    ("shape", "module", "values", "multiplied", "moved"),
    [
        # two norms: each reads and writes the hidden state
        (DEEPSEEK, "layernorm", 2 * HIDDEN, 0, 4 * HIDDEN),
        (MIXTRAL, "layernorm", 2 * HIDDEN, 0, 4 * HIDDEN),
        # from the latent of 32 to queries, from that of 16 to keys without their 8 rotated values a head, and to values; the
        # 8 that all heads share stay; rotary positions read and write all three
        (DEEPSEEK, "mla_up_proj", QUERY + KEY + VALUE - 8, 32 * QUERY + 16 * (4 * 16 + VALUE), 2 * (QUERY + KEY + VALUE)),
        # two experts of 48 a token: the gate reads two values for each that it writes
        (DEEPSEEK, "moe_act", 2 * 48, 0, 3 * 2 * 48),
        (MIXTRAL, "moe_act", 2 * 224, 0, 3 * 2 * 224),
        (DEEPSEEK, "shared_experts", 3 * 40, 3 * HIDDEN * 40, 3 * 40),
        # the router, two experts and the shared one; a token's copies before and after its experts, which are written, read
        # and summed: three passes over them
        (DEEPSEEK, "moe", 3 * (2 * 48 + 40) + 2 * 2 * HIDDEN, HIDDEN * 8 + 3 * HIDDEN * (2 * 48 + 40),
         3 * (2 * 48 + 40) + 3 * 2 * HIDDEN),
        (MIXTRAL, "moe", 3 * 2 * 224 + 2 * 2 * HIDDEN, HIDDEN * 8 + 3 * HIDDEN * 2 * 224, 3 * 2 * 224 + 3 * 2 * HIDDEN),
        (DEEPSEEK.dense, "mlp", 3 * 160, 3 * HIDDEN * 160, 3 * 160),
    ],
)  # fmt: skip
def test_a_module_drops_and_repeats_what_was_counted(
    shape: ModelShape, module: str, values: int, multiplied: int, moved: int
):
    cost = of(shape, module)
    assert dropped(cost) == values * EACH
    assert amounts(cost) == {"memory": moved * EACH} | (
        {"matmul": 2 * TOKENS * multiplied} if multiplied else {}
    )
    assert cost.selective_flops == 2 * TOKENS * multiplied
    plain = block_cost(shape, LOAD)
    assert replace(cost, selective=(), selective_bytes=0, selective_flops=0) == replace(
        plain, selective=(), selective_bytes=0, selective_flops=0
    )


def test_scores_are_a_module_that_fused_attention_lacks():
    assert (dropped(of(DEEPSEEK, "core_attn")), of(DEEPSEEK, "core_attn").selective) == (0, ())
    scores = of(DEEPSEEK, "core_attn", attention="unfused")
    plain = block_cost(DEEPSEEK, replace(LOAD, attention="unfused"))
    assert scores == plain
    # softmax's output, dropout's and its mask, for 4 heads
    assert dropped(scores) == 5 * 4 * 32 * TOKENS
    assert scores.selective_flops == plain.attention_flops > 0


@pytest.mark.parametrize("shape", [DEEPSEEK, MIXTRAL], ids=["deepseek", "mixtral"])
def test_only_the_whole_of_the_experts_repeats_an_exchange(shape: ModelShape):
    for name in modules_of(shape):
        cost = of(shape, name, ep=4)
        exchanges = [work for work in cost.selective if work.unit == "all_to_all"]
        # to the experts and back: two rows a token each way
        twice = [DeviceWork("all_to_all", 2 * 2 * HIDDEN * EACH, calls=2)]
        assert exchanges == (twice if name == "moe" else []), name
    divided, whole = of(shape, "moe", ep=4), of(shape, "moe")
    # Rows that arrive are sorted twice, read and written.
    assert amounts(divided)["memory"] - amounts(whole)["memory"] == 4 * 2 * HIDDEN * EACH
    assert dropped(divided) == dropped(whole)


def test_the_fullest_device_repeats_its_rows_and_the_model_only_its_own():
    even, full = (of(MIXTRAL, "moe", ep=4, imbalance=n) for n in (1.0, 1.5))
    assert full.selective_flops == even.selective_flops
    router = 2 * TOKENS * HIDDEN * 8
    assert amounts(full)["matmul"] - router == 1.5 * (amounts(even)["matmul"] - router)
    assert dropped(full) == 1.5 * dropped(even)
    assert dropped(of(MIXTRAL, "moe_act", ep=4, imbalance=1.5)) == 1.5 * 2 * 224 * EACH


def test_with_divided_samples_gathered_keys_and_values_stay():
    whole, half = of(DEEPSEEK, "mla_up_proj"), of(DEEPSEEK, "mla_up_proj", cp=2)
    assert dropped(half) == (QUERY - 8) * EACH / 2
    assert amounts(half) == {unit: amount / 2 for unit, amount in amounts(whole).items()}
    assert half.selective_flops == whole.selective_flops


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism_divides_a_feed_forward_and_sums_it_again(sequence_parallel: bool):
    dense = MIXTRAL.dense
    cost = of(dense, "mlp", "layernorm", tp=2, sequence_parallel=sequence_parallel)
    shard = 1 if not sequence_parallel else 2
    assert dropped(cost) == 3 * 224 * EACH / 2 + 2 * HIDDEN * EACH / shard
    whole = HIDDEN * EACH
    sums = {"all_gather": whole, "reduce_scatter": whole} if sequence_parallel else {"all_reduce": whole}
    found = amounts(cost)
    assert {unit: found[unit] for unit in found if unit not in ("matmul", "memory")} == sums
    assert cost.selective_flops == 2 * TOKENS * 3 * HIDDEN * 224
    experts = of(MIXTRAL, "moe", tp=2, ep=2)
    # Both devices have the router, for the same tokens; the model has it once.
    assert experts.selective_flops == of(MIXTRAL, "moe").selective_flops
    assert [work for work in experts.selective if work.unit == "all_gather"] == [
        DeviceWork("all_gather", whole)
    ]


@pytest.mark.parametrize("shape", [DEEPSEEK, DEEPSEEK.dense, MIXTRAL], ids=["experts", "dense", "mixtral"])
@pytest.mark.parametrize(
    "load", [{}, {"ep": 4, "imbalance": 1.25}, {"cp": 2}, {"attention": "unfused"}], ids=str
)
def test_any_modules_keep_more_than_the_input_and_repeat_less_than_the_forward(
    shape: ModelShape, load: dict[str, object]
):
    if not shape.experts:
        load = {key: value for key, value in load.items() if key not in ("ep", "imbalance")}
    forward = block_cost(shape, replace(LOAD, **load)).forward
    for count in (1, 2, 3, 4, 5):
        for modules in combinations(MODULES, count):
            if "moe" in modules and {"moe_act", "shared_experts"} & {*modules}:
                continue
            cost = of(shape, *modules, **load)
            assert cost.input_bytes < cost.selective_bytes <= cost.saved_bytes
            assert cost.selective_flops < cost.model_flops
            for unit, amount in amounts(cost).items():
                assert amount <= sum(work.amount for work in forward if work.unit == unit)
            assert dropped(cost) == pytest.approx(sum(dropped(of(shape, name, **load)) for name in modules))


def test_a_model_has_the_modules_of_its_blocks():
    assert modules_of(DEEPSEEK) == MODULES
    assert modules_of(MIXTRAL) == ("layernorm", "core_attn", "moe_act", "moe")
    assert modules_of(MIXTRAL.dense) == ("layernorm", "core_attn", "mlp")
    assert {*OUTPUTS} < {*MODULES}
