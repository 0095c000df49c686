"""Sizes read from configs: parameters are those of the library's own models, and bad files are refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.base.errors import ConfigError
from penstock.huggingface.from_transformers import from_transformers, read_config
from penstock.plan.cluster import read_cluster
from penstock.plan.explore.branch_and_bound import search
from penstock.plan.prediction import predict
from penstock.profile.closed_form import Workload, block_cost
from penstock.profile.layer_cost import LayerCost
from penstock.profile.model_profile import of_shape
from penstock.profile.model_shape import ModelShape
from penstock.profile.read_shape import MODEL_TYPES, NoClosedFormError, read_shape
from penstock.profile.traced import trace_layers
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers
from tests.support.lanes import exhaustive

SMALL = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4,
    "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


def written(folder: Path, table: object, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(table))
    return path


def with_toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def library_config(kind: str, **values: Any) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    count = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {kind}")
    return CONFIG_MAPPING[kind](**{count: 2, "vocab_size": 1000, "pad_token_id": None, **values})


def parameters_of(config: Any) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_every_family_with_a_closed_form_is_a_causal_language_model():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert set(MODEL_TYPES) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


TOLD_APART = (
    "deepseek_v3",
    "gpt_oss",
    "gpt2",
    "mistral",
    "qwen3_moe",
    "ernie4_5",
    "apertus",
    "seed_oss",
    "internlm3",
)
LATENTS = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("youtu", {**LATENTS, "num_key_value_heads": 4}),
        ("youtu", {**LATENTS, "num_key_value_heads": 4, "q_lora_rank": None}),
    ],
    ids=["llama", "youtu", "youtu without a latent of queries"],
)  # fmt: skip
def test_a_block_has_the_flops_and_parameters_of_a_traced_one(
    kind: str, more: dict[str, Any], tmp_path: Path
):
    """Eager kernels save more than the fused ones of the closed form: 4/9 more in a block of Llama as small as this."""
    config = library_config(
        kind, **{**SMALL, "model_type": kind, **more, "num_hidden_layers": 2, "bos_token_id": 1}
    )
    traced = trace_layers(from_transformers(config), torch.randint(100, (2, 32)))
    actual = traced.kinds[traced.layers[1][2]].points[0][1]
    path = written(tmp_path, {**json.loads(config.to_json_string(use_diff=False)), "model_type": kind})
    expected = block_cost(read_shape(path), Workload(microbatch=2, sequence=32, dtype="fp32"))
    assert (actual.model_flops, actual.parameters) == (expected.model_flops, expected.parameters)
    assert expected.saved_bytes < actual.saved_bytes < 1.5 * expected.saved_bytes
    assert actual.output_bytes >= expected.output_bytes  # and the rotary tables


def test_latents_are_not_divided(tmp_path: Path):
    config = library_config("youtu", **LATENTS)
    shape = read_shape(written(tmp_path, {**config.to_dict(), "model_type": "youtu"}))
    with pytest.raises(ConfigError, match=r"tp=2 does not divide latents, .*; take tp=1"):
        of_shape(shape).table(Workload(microbatch=1, sequence=64, tp=2))
    plans = search(of_shape(shape), read_cluster("h100*2"), sequence=64, batch=4, schedules=["1f1b"]).plans
    assert {plan.layout.tp for plan in plans} == {1}


def test_experts_keep_what_traced_ones_do_and_shared_ones_are_not_divided(tmp_path: Path):
    sizes = {"width": 32, "layers": 2, "hidden": 64, "experts": 4, "shared_hidden": 24}
    shape = read_shape(with_toml(tmp_path, "[model]\n" + "\n".join(f"{k} = {v}" for k, v in sizes.items())))
    traced = trace_layers(layers(ModelConfig(**sizes)), torch.zeros(2, 32, dtype=torch.int64))
    actual = traced.kinds[traced.layers[1][2]].at(2)
    expected = block_cost(shape, Workload(microbatch=2, sequence=32, dtype="fp32"))
    assert (actual.model_flops, actual.parameters) == (expected.model_flops, expected.parameters)
    assert expected.saved_bytes < actual.saved_bytes < 1.5 * expected.saved_bytes
    assert actual.waiting_bytes == pytest.approx(expected.waiting_bytes, rel=0.05)
    cluster = read_cluster("h100*2")
    plans = search(of_shape(shape), cluster, sequence=64, batch=4, schedules=["1f1b"]).plans
    assert {plan.layout.tp for plan in plans} == {1}
    for refused in (
        lambda: of_shape(shape).table(Workload(microbatch=1, sequence=64, tp=2)),
        lambda: search(of_shape(shape), cluster, sequence=64, batch=4, fixed={"tp": 2}),
    ):
        with pytest.raises(ConfigError, match=r"tp=2 does not divide the shared experts of run; take tp=1"):
            refused()


def test_experts_beside_divided_matrices_are_divided_too(tmp_path: Path):
    shape = read_shape(with_toml(tmp_path, "[model]\nwidth = 32\nlayers = 2\nhidden = 64\nexperts = 4"))
    profile, cluster = of_shape(shape), read_cluster("h100*4")
    with pytest.raises(ConfigError, match=r"with tp=2 and ep=1, each device would have all 4 experts of run"):
        predict(profile, cluster, "dp=2,tp=2", sequence=64, batch=4)
    with pytest.raises(ConfigError, match="sequence_parallel is planned for models without experts"):
        predict(profile, cluster, "dp=2,tp=2,ep=2,sequence_parallel=yes", sequence=64, batch=4)
    plans = search(profile, cluster, sequence=64, batch=4, fixed={"tp": 2}, schedules=["1f1b"], top=50).plans
    assert {(plan.layout.tp, plan.layout.ep > 1) for plan in plans} == {(2, True)}
    assert {plan.layout.ep for plan in plans} == {2, 4}
    whole, half = (profile.table(Workload(microbatch=1, sequence=64, tp=tp, ep=2)).costs[1] for tp in (1, 2))

    def amounts(cost: LayerCost, unit: str) -> float:
        return sum(work.amount for work in cost.forward if work.unit == unit)

    # A device sends its half of the tokens, the router reads all of them, and outputs of all tokens are joined.
    tokens, router = 64, 2 * 64 * 32 * 4
    assert amounts(half, "all_to_all") == amounts(whole, "all_to_all") / 2
    assert amounts(half, "matmul") - router == (amounts(whole, "matmul") - router) / 2
    assert amounts(half, "all_gather") == amounts(half, "all_reduce") == tokens * 32 * 2
    assert half.model_flops == pytest.approx(whole.model_flops, rel=1e-12)
    assert half.expert_parameters == whole.expert_parameters


@pytest.mark.parametrize(
    "kind", ["deepseek_v2", "olmoe", *exhaustive("qwen2_moe", "llama4_text", "ernie4_5_moe")]
)
def test_experts_and_compressed_attention_are_refused_by_name(kind: str, tmp_path: Path):
    config = library_config(kind)
    path = written(tmp_path, {**json.loads(config.to_json_string(use_diff=False)), "model_type": kind})
    with pytest.raises(ConfigError, match=rf"no closed form for a model of type '{kind}'.*measure=False"):
        read_shape(path)


VARIANTS = {
    "cross attention": ({"add_cross_attention": True}, "add_cross_attention is set: a model that attends to an encoder"),
    "quantised weights": ({"quantization_config": {"bits": 4}}, "quantization_config is set: a model that has quantised"),
    "both directions": ({"use_bidirectional_attention": True}, "attends to later tokens"),
    "not causal": ({"is_causal": False}, "is_causal is false"),
    "dynamic rotary": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "is 'dynamic'"),
    "dynamic rotary, older": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "is 'dynamic'"),
    "a classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "and only causal language models"),
}  # fmt: skip


@pytest.mark.parametrize("case", VARIANTS)
def test_variants_that_are_not_split_are_refused_by_the_same_rules(case: str, tmp_path: Path):
    values, message = VARIANTS[case]
    path = written(tmp_path, {**SMALL, **values})
    for read in (read_shape, read_config):
        with pytest.raises(ConfigError, match=message):
            read(path)


@pytest.mark.parametrize("architectures", [None, [], ["LlamaForCausalLM"], ["LlamaModel"]])
def test_causal_models_and_bodies_are_planned_and_split(architectures: object, tmp_path: Path):
    path = written(tmp_path, {**SMALL, "architectures": architectures})
    assert read_shape(path).layers == 4
    read_config(path)


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("llama", {}, (0, 0)),
        ("mistral", {"sliding_window": 512}, (512, 4)),
        ("mistral", {"sliding_window": None}, (0, 0)),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, (128, 2)),
        ("gemma2", {"head_dim": 16}, (4096, 2)),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 64}, (64, 4)),
        ("gemma3_text", {"head_dim": 16, "sliding_window_pattern": 2}, (4096, 2)),
        ("qwen2", {"sliding_window": 64}, (0, 0)),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, (64, 3)),
        ("qwen3", {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 2}, (0, 0)),
    ],
)
def test_windows_of_attention(kind: str, values: dict[str, Any], expected: tuple[int, int], tmp_path: Path):
    path = written(tmp_path, {**SMALL, "model_type": kind, **values})
    shape = read_shape(path)
    assert (shape.window, shape.windowed) == expected
    if "sliding_window_pattern" not in values:  # older files have it; the library writes layer_types
        config = read_config(path)
        kinds = getattr(config, "layer_types", None)
        if kinds is not None:
            windowed = kinds.count("sliding_attention") if config.to_dict().get("sliding_window") else 0
            assert shape.windowed == windowed
    said = predict(of_shape(shape), read_cluster("h100*2"), "pp=2", sequence=8192, batch=8).assumptions
    assert any("attend to windows of" in sentence for sentence in said) == bool(expected[1])


def test_the_text_part_of_a_larger_model_is_named(tmp_path: Path):
    table = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    with pytest.raises(ConfigError, match=r"its text part \(gemma3_text\) has one: write text_config to"):
        read_shape(written(tmp_path, table))
    for far in ("bert", "mamba", "bloom"):
        with pytest.raises(
            ConfigError, match=rf"no closed form for a model of type '{far}'; `penstock plan` traces"
        ):
            read_shape(written(tmp_path, {"model_type": far}))


def test_keys_of_biases_that_a_family_names_differently(tmp_path: Path):
    plain = {**SMALL, "model_type": "internlm3"}
    usual = read_shape(written(tmp_path, {**plain, "attention_bias": True, "mlp_bias": True}))
    assert usual.qkv_bias
    assert usual.ffn_bias
    assert read_shape(written(tmp_path, {**plain, "qkv_bias": True, "bias": True})) == usual


def test_gpt2_may_have_the_names_of_other_families(tmp_path: Path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    names = {**sizes, "max_position_embeddings": 32}
    shape = read_shape(written(tmp_path, {"model_type": "gpt2", "vocab_size": 100, **names}))
    assert (shape.hidden, shape.heads, shape.layers, shape.positions) == (64, 4, 3, 32)
    assert shape.parameters == parameters_of(library_config("gpt2", **{**names, "vocab_size": 100}))


def test_only_learned_positions_are_a_limit(tmp_path: Path):
    learned = read_shape(written(tmp_path, {"model_type": "gpt2", "n_positions": 512}))
    rotary = read_shape(written(tmp_path, {**SMALL, "max_position_embeddings": 512}))
    assert (learned.positions, learned.context) == (512, 0)
    assert (rotary.positions, rotary.context) == (0, 512)


# biases, tied weights, latents, mixtures, windows and other names of keys
@pytest.mark.parametrize(
    "kind", [*TOLD_APART, *exhaustive(*(kind for kind in MODEL_TYPES if kind not in TOLD_APART))]
)
def test_parameters_are_those_of_the_library(kind: str, tmp_path: Path):
    variants: list[dict[str, Any]] = [{}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True}]
    default = library_config(kind)
    if kind == "internlm3":
        variants += [{"attention_bias": flag, "mlp_bias": flag} for flag in (False, True)]
    else:
        keys = [key for key in default.to_dict() if "bias" in key and hasattr(default, key)]
        variants += [{key: flag} for key in keys for flag in (False, True)]
    if kind == "deepseek_v3":
        variants += [{"num_hidden_layers": 4, "first_k_dense_replace": dense} for dense in (0, 1, 4)]
        variants += [{"num_hidden_layers": 4, "n_shared_experts": 2, "q_lora_rank": None}]
    for values in variants:
        config = library_config(kind, **values)
        expected = parameters_of(config)
        for table in (json.loads(config.to_json_string(use_diff=False)), config.to_diff_dict()):
            path = written(tmp_path, {**table, "model_type": kind})
            assert read_shape(path).parameters == expected, values


def test_a_mixture_with_blocks_of_both_kinds_is_traced(tmp_path: Path):
    for values in ({"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}):
        table = {**library_config("qwen3_moe", **values).to_dict(), "model_type": "qwen3_moe"}
        with pytest.raises(NoClosedFormError, match="some blocks have no experts"):
            read_shape(written(tmp_path, table))


def test_a_folder_and_a_toml_file_that_name_a_config_give_the_same_model(tmp_path: Path):
    shape = read_shape(written(tmp_path, SMALL))
    assert read_shape(tmp_path) == shape
    for key in ("config", "path"):
        for value in (str(tmp_path), str(tmp_path / "config.json"), "config.json"):
            assert read_shape(with_toml(tmp_path, f"[model]\n{key} = {json.dumps(value)}")) == shape


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"width": 96, "heads": 6, "kv_heads": 3, "hidden": 100, "layers": 2, "vocabulary": 77},
        {"layers": 2, "experts": 4},
        {"layers": 2, "experts": 3, "experts_per_token": 1, "expert_hidden": 40, "shared_hidden": 24},
    ],
)
def test_the_built_in_model_has_the_parameters_of_its_layers(values: dict[str, int], tmp_path: Path):
    path = with_toml(tmp_path, "[model]\n" + "\n".join(f"{key} = {value}" for key, value in values.items()))
    modules = [layer.build() for layer in layers(ModelConfig(**values))]
    built = [sum(p.numel() for p in module.parameters()) for module in modules]
    shape = read_shape(path)
    assert shape.parameters == sum(built)
    parts = [shape.embedding_parameters, shape.block_parameters, shape.head_parameters]
    assert parts == [built[0], built[1], built[-1]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"hidden_size": float("nan")}, "hidden_size must be a whole number from 1 to 1,000,000,000, got nan"),
        ({"hidden_size": True}, "hidden_size must be a whole number .* got True"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number .* got '64'"),
        ({"hidden_size": 66}, "hidden size 66 does not divide into 4 heads"),
        ({"num_hidden_layers": -2}, "num_hidden_layers must be a whole number .* got -2"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number .* got 0"),
        ({"num_key_value_heads": 3}, "4 heads must be a multiple of its 3 key and value heads"),
        ({"vocab_size": 10**30}, "vocab_size must be a whole number"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"model_type": "lama"}, "no closed form for a model of type 'lama'"),
        ({"model_type": ["llama"]}, "no closed form for a model of type"),
        ({"model_type": None}, "the config has no model_type"),
        ({"attention_bias": "no"}, "attention_bias must be true or false, got 'no'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"head_dim": 0}, "head_dim must be a whole number"),
        ("[model]\nwidht = 3", "no key model.widht .did you mean 'width'"),
        ("[model]\nwidth = 130", "width 130 does not divide into 4 heads"),
        ("[model]\nwidth = true", "width must be a whole number"),
        ("[model]\nheads = 4\nkv_heads = 3", "must be a multiple of its 3"),
        ("[model]\nexperts = 4\nexperts_per_token = 5", "must be at most its 4 experts, got 5"),
        ("[model]\nexperts = -1", "experts must be a whole number"),
        ("[model]\nconfig = 'run.toml'", "config must name a config.json or its folder, got 'run.toml'"),
        ("[model]\npath = 3", "model.path must name a config.json or its folder, got 3"),
        ('[model]\nconfig = "a\\u0000b"', "cannot read the model .*null"),
        ("[model]\nconfig = 'none'", "No such file"),
        ("model = [1]", r"no \[model\] section"),
        ("[train]\nsteps = 3", r"no \[model\] section"),
        ("[model", "is not TOML"),
        ("a = " + "[" * 50_000, "is not TOML"),
        ("a = " + "1" * 5_000, "is not TOML"),
        *((content, r"model\.json") for content in (b"", b"[]", bytes(range(256)) * 8, b'{"model_type": 1' + b"1" * 5_000)),
        *((content * 100_000, r"model\.json") for content in (b"[", b'{"a":')),
    ],
)  # fmt: skip
def test_wrong_files_are_refused(content: dict[str, Any] | str | bytes, message: str, tmp_path: Path):
    """Changes of a config, TOML files, and bytes that are neither."""
    if isinstance(content, bytes):
        path = tmp_path / "model.json"
        path.write_bytes(content)
    else:
        path = (
            with_toml(tmp_path, content)
            if isinstance(content, str)
            else written(tmp_path, {**SMALL, **content})
        )
    with pytest.raises(ConfigError, match=message):
        read_shape(path)


@pytest.mark.parametrize("name", ["", "a\0b", "none.json", "x" * 5_000, "/dev/zero"])
def test_paths_that_are_no_model_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read the model|has no config.json"):
        read_shape(name)


def test_sizes_given_in_python_are_checked():
    shape = ModelShape(name="m", layers=2, hidden=8, heads=2, kv_heads=1, head_size=4, ffn=16, vocabulary=10)
    for change in ({"layers": 0}, {"hidden": 2.0}, {"norms": -1}, {"tied": 1}, {"positions": True}):
        with pytest.raises(ConfigError, match=f"{next(iter(change))} of the model must be"):
            replace(shape, **change)
