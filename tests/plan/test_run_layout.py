"""Layouts as text, as mappings and as objects."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.plan import run_layout
from penstock.plan.run_layout import Layout, layout_of

DEGREE = st.integers(1, 10**6)
LAYOUTS = st.builds(
    lambda sharding, **values: Layout(**sharding, **values),
    sharding=st.sampled_from([{}, {"shard": "gradients", "reduce_every": 3}, {"shard": "weights", "window": 2}]),
    pp=DEGREE, dp=DEGREE, tp=DEGREE, ep=DEGREE, microbatch=DEGREE, imbalance=st.floats(1, 10),
    v=st.none() | DEGREE,
    schedule=st.sampled_from(["1f1b", "zb-v", "my schedule.csv"]),
    recompute=st.sampled_from(["none", "selective", "full", "moe_act", "layernorm+mla_up_proj"]) | st.integers(1, 9),
    sequence_parallel=st.booleans(), overlap=st.none() | st.booleans(),
    split=st.sampled_from(["even", "cost"]) | st.lists(DEGREE, min_size=1, max_size=4).map(tuple),
    attention=st.sampled_from([None, "fused", "unfused"]), dtype=st.sampled_from([None, "bf16", "fp8", "fp32"]),
)  # fmt: skip


@settings(max_examples=30)
@given(LAYOUTS)
def test_text_mapping_and_json_give_the_same_layout(layout: Layout):
    assert Layout.parse(str(layout)) == layout
    assert layout_of(layout.as_dict()) == layout
    assert layout_of(json.loads(json.dumps(layout.as_dict()))) == layout
    assert layout_of(layout) is layout
    assert layout.devices == layout.pp * layout.dp * layout.tp


def test_keys_have_defaults_and_other_names():
    assert Layout.parse("") == Layout()
    assert str(Layout()) == "pp=1,dp=1,tp=1,microbatch=1,schedule=1f1b"
    text = " pp = 8, tp=2 ,v=2,sequence_parallel=yes,shard=gradients,reduce_every=4,overlap=no,split=3+3;2,recompute=2"
    assert Layout.parse(text) == Layout(
        pp=8, dp=1, tp=2, v=2, microbatch=1, schedule="1f1b", recompute=2, shard="gradients", reduce_every=4,
        sequence_parallel=True, split=(3, 3, 2), overlap=False,
    )  # fmt: skip
    assert Layout.parse("overlap=FALSE,recompute=full") == Layout(overlap=False, recompute="full")
    assert Layout(tp=2, sequence_parallel=True).sequence_parallel
    assert not Layout(sequence_parallel=True).sequence_parallel


def test_modules_of_recompute_have_one_order_and_selective_is_one():
    """Megatron-LM's option has blanks between modules, and core_attn alone is its default."""
    for text in ("moe_act+mla_up_proj", "mla_up_proj moe_act", " mla_up_proj + moe_act+moe_act"):
        layout = Layout.parse(f"pp=2,recompute={text}")
        assert (layout.recompute, layout.modules) == ("mla_up_proj+moe_act", ("mla_up_proj", "moe_act"))
        assert layout == Layout(pp=2, recompute="mla_up_proj+moe_act")
        assert layout.recomputes_all
        assert layout.recomputes_parts
    assert Layout(recompute="core_attn") == Layout(recompute="selective")
    assert Layout(recompute="selective+moe_act").modules == ("core_attn", "moe_act")
    for recompute, every, parts in (
        ("none", False, False),
        ("selective", True, True),
        ("full", True, False),
        (2, False, False),
    ):
        layout = Layout(recompute=recompute)
        assert (layout.recomputes_all, layout.recomputes_parts, layout.modules) == (every, parts, ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp=0", "pp must be a whole number of at least 1, got 0"),
        ("pp=-1", "pp must be a whole number of at least 1, got -1"),
        ("pp=x", "pp must be a whole number, got 'x'"),
        ("pp=2.0", "pp must be a whole number, got '2.0'"),
        ("pp=1_0", "pp must be a whole number, got '1_0'"),
        ("pp=٣", "pp must be a whole number"),
        ("pp=" + "9" * 5_000, "pp must be a whole number"),
        ("pp=a\0b", "pp must be a whole number"),
        ("v=", "v must be a whole number, got ''"),
        ("pp", "'pp' has no value; write key=value"),
        ("pp=2,pp=4", "pp is given twice"),
        ("virtual_stages=2", "no key 'virtual_stages'"),
        ("schedul=gpipe", r"no key 'schedul' \(did you mean 'schedule'"),
        ("micro_batch=2", r"no key 'micro_batch' \(did you mean 'microbatch=2'"),
        ("overlap=maybe", "overlap must be true or false, got 'maybe'"),
        ("shard=some", "shard must be one of none, optimizer, gradients, weights, got 'some'"),
        ("window=2", "window = 2 needs shard = 'weights' or a store, and shard is 'none'"),
        ("shard=weights,window=0", "window must be a number of at least 1, or None, got 0"),
        ("zero=2", "did you mean 'shard=gradients'?"),
        ("zero=true", "did you mean 'shard=optimizer'?"),
        ("zero=False", "did you mean 'shard=none'?"),
        ("fsdp", "did you mean 'shard=weights'?"),
        ("sharding-strategy=weights", "did you mean 'shard=weights'?"),
        ("recompute=ful", r"recompute must be none, selective, full or a number .* got 'ful' \(did you mean 'full'"),
        ("recompute=0", "recompute must be .* got 0"),
        ("recompute=layernorm+moe_atc", r"or modules, as in layernorm\+moe_act, of .* got 'layernorm\+moe_atc' "
         r"\(did you mean 'moe_act'"),
        ("recompute=moe_act+full", r"got 'moe_act\+full'$"),
        ("recompute=", "recompute must be .* got ''"),
        ("recompute=+", "recompute must be .* got '\\+'"),
        ("recompute=moe_act+", r"got 'moe_act\+'$"),
        ("recompute=moe_act++layernorm", r"got 'moe_act\+\+layernorm'$"),
        ("recompute=moe+moe_act+shared_experts", "moe computes all of the experts again; leave out moe_act and sha"),
        ("recompute_modules=moe_act", "did you mean 'recompute=moe_act'?"),
        ("recompute-granularity=selective", "did you mean 'recompute=selective'?"),
        ("recompute=" + "9" * 5_000, "recompute must be"),
        ("split=evn", r"split must be even, cost or .* got 'evn' \(did you mean 'even'"),
        ("split=2+-1", r"split must be .* got \(2, -1\)"),
        ("split=" + "9" * 5_000, "split must be"),
        ("attention=flash", "attention must be fused or unfused, got 'flash'"),
        ("dtype=bf61", r"dtype must be bf16, fp16, fp8 or fp32, got 'bf61' \(did you mean 'bf16'"),
    ],
)  # fmt: skip
def test_wrong_text_is_refused(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        Layout.parse(text)


@pytest.mark.parametrize(
    "values",
    [
        {"pp": True}, {"pp": 2.0}, {"pp": "2"}, {"pp": None}, {"v": 0}, {"shard": True}, {"shard": None}, {"window": [1]},
        {"overlap": 1},
        {"sequence_parallel": 3}, {"split": (True, 3)}, {"split": (1.5, 2)}, {"split": None}, {"recompute": True},
        {"recompute": None}, {"recompute": 1.5}, {"recompute": float("nan")}, {"schedule": None}, {"schedule": 3},
        {"dtype": 3}, {"attention": []},
    ],
    ids=repr,
)  # fmt: skip
def test_wrong_values_are_refused_by_name(values: dict[str, Any]):
    with pytest.raises(ConfigError, match=f"layout: {next(iter(values))} must be"):
        layout_of(values)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, "a layout must be text, a mapping or a Layout") for value in (3, None, [("pp", 2)])),
        ({"shedule": "1f1b"}, r"no key 'shedule' \(did you mean 'schedule'"),
        ({1: 2}, "no key 1"),
    ],
)  # fmt: skip
def test_other_objects_are_no_layout(value: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        layout_of(value)


def test_words_of_other_tools_lead_to_keys_that_exist():
    known = {field.name for field in fields(Layout)}
    words = [word for words in run_layout.OTHER_NAMES.values() for word in words.split()]
    assert len(set(words)) == len(words)
    assert not known & {*words, *run_layout.NO_KEYS}
    for key in run_layout.OTHER_NAMES:
        Layout.parse(key if "=" in key else "pp=1")
        assert key.partition("=")[0] in known
