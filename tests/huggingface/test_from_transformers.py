from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, OPTConfig, RwkvConfig, T5Config
from transformers.models.llama.modeling_llama import LlamaMLP

import penstock
from penstock.base.errors import ConfigError, DataError, SplitError
from penstock.huggingface.from_transformers import config_from
from penstock.stage.layers import whole_name
from tests.support import hf_models
from tests.support.lanes import exhaustive

BOTH = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
# Absolute positions; a mask and tables for each kind of layer; other names of tables and heads.
EVERY = pytest.mark.parametrize("family", hf_models.by_lane("gpt2", "gemma3_text", "gpt_neox"))
ONE = pytest.mark.parametrize("family", hf_models.by_lane("gpt_neox"))


def saved(model, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@BOTH
@EVERY
@pytest.mark.parametrize("side", ["left", "none", *exhaustive("right")])
def test_the_layers_give_the_models_own_logits_loss_and_gradients_bit_for_bit(
    family: str, tied: bool, side: str
):
    net = hf_models.model(family, tied=tied)
    tokens, labels, mask = hf_models.batch(side="left" if side == "left" else "right")
    named = {} if side == "none" else {"attention_mask": mask}
    expected = net(tokens, labels=labels, **named)
    expected.loss.backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()

    logits = hf_models.in_sequence(penstock.from_transformers(net), tokens, **named)
    loss = penstock.causal_lm_loss(logits, labels)
    loss.backward()

    assert torch.equal(logits, expected.logits)
    assert torch.equal(loss, expected.loss)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in net.named_parameters())


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_position_ids_reach_every_layer_that_needs_them(family: str):
    net = hf_models.model(family)
    tokens, _, mask = hf_models.batch(side="left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    named = {"attention_mask": mask, "position_ids": positions}
    plain = net(tokens, attention_mask=mask).logits
    expected = net(tokens, **named).logits
    assert torch.equal(hf_models.in_sequence(penstock.from_transformers(net), tokens, **named), expected)
    assert family != "gpt2" or not torch.equal(plain, expected)


def test_packed_sequences_attend_only_to_themselves():
    net = hf_models.model("llama")
    tokens, _, _ = hf_models.batch()
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None].expand(8, -1)
    # With a cache, which training has no use for, the library does not look for packed sequences.
    expected = net(tokens, position_ids=positions, use_cache=False).logits
    logits = hf_models.in_sequence(penstock.from_transformers(net), tokens, position_ids=positions)
    assert torch.equal(logits, expected)
    assert torch.allclose(logits[:, 5:], net(tokens[:, 5:]).logits, atol=1e-5)


@BOTH
@EVERY
def test_parameters_have_the_models_names(family: str, tied: bool):
    net = hf_models.model(family, tied=tied)
    layers = penstock.from_transformers(net.config)
    assert hf_models.parameters(layers).keys() == net.state_dict().keys()
    assert [layer.role for layer in layers if layer.role != "block"] == ["embedding", "head"]
    assert sum(layer.role == "block" for layer in layers) == 4
    tie = {whole_name(layer.name, inner): other for layer in layers for inner, other in layer.tied.items()}
    same = net.lm_head.weight is net.get_input_embeddings().weight
    assert bool(tie) == same == tied
    if tied:
        assert net.get_parameter(tie["lm_head.weight"]) is net.lm_head.weight


def test_a_models_own_parameters_are_used_and_its_modules_are_not_changed():
    net = hf_models.model("gpt_neox")
    classes = [type(module) for module in net.modules()]
    names = list(net.state_dict())
    found = hf_models.parameters(penstock.from_transformers(net))
    assert all(found[name] is parameter for name, parameter in net.named_parameters())
    assert [type(module) for module in net.modules()] == classes
    assert list(net.state_dict()) == names


@ONE
def test_initial_weights_depend_on_seed_and_names_alone(family: str):
    config = hf_models.config(family, tied=True)
    before = torch.get_rng_state()
    first = hf_models.parameters(penstock.from_transformers(config, seed=3))
    torch.randn(5)
    again = hf_models.parameters(penstock.from_transformers(config, seed=3)[::-1])
    other = hf_models.parameters(penstock.from_transformers(config, seed=4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    torch.set_rng_state(before)
    hf_models.parameters(penstock.from_transformers(config))
    assert torch.equal(torch.get_rng_state(), before)


@ONE
def test_initial_weights_follow_the_librarys_rules(family: str):
    config = hf_models.config(family, hidden_size=64)
    theirs = AutoModelForCausalLM.from_config(config).state_dict()
    for name, ours in hf_models.parameters(penstock.from_transformers(config)).items():
        if theirs[name].std() == 0:
            assert torch.equal(ours, theirs[name]), name
        else:
            assert ours.std().item() == pytest.approx(theirs[name].std().item(), rel=0.15), name
            assert abs(ours.mean()) < 0.1 * ours.std()


def test_two_equal_parts_of_a_layer_start_differently():
    found = hf_models.parameters(penstock.from_transformers(hf_models.config("llama")))
    layers = "model.layers.{}.self_attn.{}_proj.weight"
    assert not torch.equal(found[layers.format(0, "k")], found[layers.format(0, "v")])
    assert not torch.equal(found[layers.format(0, "k")], found[layers.format(1, "k")])


@EVERY
def test_a_folder_gives_the_logits_of_the_model_it_was_saved_from(family: str, tmp_path: Path):
    net = hf_models.model(family, tied=family == "gpt2")
    tokens, _, mask = hf_models.batch()
    layers = penstock.from_transformers(saved(net, tmp_path, max_shard_size="8KB"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert torch.equal(
        hf_models.in_sequence(layers, tokens, attention_mask=mask), net(tokens, attention_mask=mask).logits
    )


def test_a_layer_reads_only_the_files_that_hold_its_tensors(tmp_path: Path):
    layers = penstock.from_transformers(saved(hf_models.model("llama"), tmp_path, max_shard_size="4KB"))
    block = next(layer for layer in layers if layer.name == "model.layers.2")
    for path in tmp_path.glob("*.safetensors"):
        if not any(name.startswith("model.layers.2.") for name in load_file(path)):
            path.unlink()
    block.build()
    with pytest.raises(DataError, match="cannot read the weights"):
        layers[0].build()


def test_weights_have_the_configs_dtype_or_else_the_files(tmp_path: Path):
    net = hf_models.model("llama").to(torch.bfloat16)
    layers = penstock.from_transformers(saved(net, tmp_path))
    assert {p.dtype for p in hf_models.parameters(layers).values()} == {torch.bfloat16}
    tokens, _, _ = hf_models.batch()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(hf_models.in_sequence(layers, tokens), again(tokens).logits)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"bfloat16"', "null"))
    for each in (layers, penstock.from_transformers(tmp_path)):
        assert hf_models.parameters(each[:1])["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_files_of_an_inner_model_and_buffers_of_old_ones_are_read(tmp_path: Path):
    net = hf_models.model("gpt2", tied=True)
    saved(net, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    old = {name.removeprefix("transformer."): value for name, value in state.items()}
    save_file({**old, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "model.safetensors")
    tokens, _, _ = hf_models.batch()
    logits = hf_models.in_sequence(penstock.from_transformers(tmp_path), tokens)
    assert torch.equal(logits, net(tokens).logits)


def test_a_tied_weight_stored_twice_must_be_the_same(tmp_path: Path):
    net = hf_models.model("llama", tied=True)
    saved(net, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for more in (0, 1):
        save_file({**state, "lm_head.weight": net.lm_head.weight + more}, tmp_path / "model.safetensors")
        if not more:
            penstock.from_transformers(tmp_path)
    with pytest.raises(DataError, match=r"lm_head.weight and model.embed_tokens.weight .* differ"):
        penstock.from_transformers(tmp_path)
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    save_file(state, tmp_path / "model.safetensors")
    found = hf_models.parameters(penstock.from_transformers(tmp_path))
    assert torch.equal(found["model.embed_tokens.weight"], net.lm_head.weight)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("openai-community/gpt2", "no local folder 'openai-community/gpt2'; Penstock downloads nothing"),
        (nn.Linear(2, 2), "got a Linear"),
    ],
    ids=["a name of the hub", "another object"],
)
def test_what_is_no_model_of_the_library_is_refused_without_asking_the_network(given: object, said: str):
    with pytest.raises(ConfigError, match=said):
        penstock.from_transformers(given)


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock-torch\[transformers\]'"):
        penstock.from_transformers("here")


def test_a_buffer_and_a_tie_that_only_the_model_itself_has_are_refused(monkeypatch: pytest.MonkeyPatch):
    def with_buffer(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def with_tie(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.up_proj.weight = self.gate_proj.weight

    init = LlamaMLP.__init__
    monkeypatch.setattr(LlamaMLP, "__init__", with_buffer)
    block = penstock.from_transformers(hf_models.config("llama"))[1]
    with pytest.raises(SplitError, match=r"model.layers.0.mlp.scale is a buffer that only the constructor"):
        block.build()
    monkeypatch.setattr(LlamaMLP, "__init__", with_tie)
    with pytest.raises(
        SplitError, match=r"layers.0.mlp.gate_proj.weight and .*up_proj.weight are one parameter"
    ):
        penstock.from_transformers(hf_models.config("llama"))


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (T5Config, r"no causal language model of type 't5'"),
        (
            lambda: RwkvConfig(hidden_size=16, num_hidden_layers=2, vocab_size=61),
            "RwkvForCausalLM cannot be cut: its blocks take more than the hidden state",
        ),
        (lambda: OPTConfig(layerdrop=0.1), "layerdrop is set"),
        (lambda: hf_models.config("gpt2", add_cross_attention=True), "add_cross_attention"),
        (
            lambda: hf_models.config("gemma3_text", use_bidirectional_attention=True),
            "use_bidirectional_attention",
        ),
        (lambda: hf_models.config("llama", rope_parameters=DYNAMIC), "rope_type is 'dynamic'"),
        (lambda: hf_models.model("llama").model, "LlamaModel is not a causal language model"),
    ],
)
def test_variants_that_cannot_be_split_are_refused_by_name(make: Callable[[], object], said: str):
    with pytest.raises(SplitError, match=said):
        penstock.from_transformers(make())


RULES = {
    "longrope": {
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 3.0],
        "original_max_position_embeddings": 8,
    },
    "yarn": {"original_max_position_embeddings": 16},
    "linear": {},
}


@pytest.mark.parametrize("kind", ["longrope", *exhaustive("yarn", "linear")])
def test_rotary_rules_hold_for_weights_from_a_config(kind: str):
    """The tables are computed buffers, which are not stored and start on the meta device."""
    rules = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, **RULES[kind]}
    net = hf_models.model("llama", rope_parameters=rules)
    layers = penstock.from_transformers(net.config)
    theirs = net.state_dict()
    built = {layer.name: layer.build() for layer in layers}
    for name, module in built.items():
        module.load_state_dict({inner: theirs[whole_name(name, inner)] for inner in module.state_dict()})
    for sequence in (12, 6):
        tokens, _, _ = hf_models.batch(sequence=sequence)
        x = tokens
        for module in built.values():
            x = module(x)
        assert torch.equal(x, net(tokens).logits)


def changed(folder: Path, **values: object) -> Path:
    path = saved(hf_models.model("llama"), folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def test_a_config_does_not_choose_a_kernel_that_would_be_downloaded(tmp_path: Path):
    net, (tokens, _, mask) = hf_models.model("llama"), hf_models.batch()
    keys = ("attn_implementation", "_attn_implementation", "experts_implementation")
    layers = penstock.from_transformers(changed(tmp_path, **dict.fromkeys(keys, "kernels-community/flash")))
    found = hf_models.in_sequence(layers, tokens, attention_mask=mask)
    assert torch.equal(found, net(tokens, attention_mask=mask).logits)


@pytest.mark.parametrize("layers", [5, 10**12])
def test_more_blocks_than_the_weights_have_are_refused_before_they_are_made(tmp_path: Path, layers: int):
    with pytest.raises(DataError, match=rf"{layers:,}"):
        penstock.from_transformers(changed(tmp_path, num_hidden_layers=layers))


@pytest.mark.parametrize(("family", "key"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer")])
def test_a_model_has_ten_thousand_blocks_at_most(family: str, key: str):
    """The library makes lists of so many entries."""
    table = hf_models.config(family).to_dict()
    assert config_from(table | {key: 10_000}, "a config").num_hidden_layers == 10_000
    with pytest.raises(DataError, match=rf"a config has {key} 10,001; a model has at most 10,000 blocks"):
        config_from(table | {key: 10_001}, "a config")


@pytest.mark.parametrize("key", ["vocab_size", "num_attention_heads"])
def test_a_size_above_all_models_is_refused_with_its_key_and_the_largest(tmp_path: Path, key: str):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**hf_models.config("llama").to_dict(), key: 10**12}))
    with pytest.raises(DataError, match=rf"has {key} 1,000,000,000,000; .* at most 1,000,000,000"):
        penstock.from_transformers(path)


def test_a_value_that_the_library_does_not_know_is_one_line(tmp_path: Path):
    with pytest.raises(DataError, match="cannot build the model of this LlamaConfig: KeyError") as info:
        penstock.from_transformers(changed(tmp_path, hidden_act="no_such"))
    assert "\n" not in str(info.value)
