"""Plans with context parallelism: work, bytes and links of divided samples, and when a search divides them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.base.errors import ConfigError
from penstock.cli.plan import command
from penstock.plan.cluster import Cluster, Device, LinkSpeed, read_cluster
from penstock.plan.explore.branch_and_bound import search
from penstock.plan.prediction import predict
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import layer_times
from penstock.profile.closed_form import Workload, block_cost, embedding_cost, head_cost
from penstock.profile.layer_cost import DeviceWork
from penstock.profile.model_profile import of_shape
from penstock.profile.model_shape import ModelShape
from penstock.train.config.file import load
from tests.support.planning import round_cluster, timed_profile

SHAPE = ModelShape(
    name="long", layers=4, hidden=64, heads=4, kv_heads=2, head_size=16, ffn=128, vocabulary=128
)
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 131072,
}  # fmt: skip
KEYS = 2 * 2 * 16  # values of the keys and values of a token
WHOLE = Workload(microbatch=2, sequence=32)


def amounts(works: tuple[DeviceWork, ...], unit: str) -> float:
    return sum(work.amount for work in works if work.unit == unit)


@pytest.mark.parametrize("cp", [2, 4])
def test_a_device_computes_its_share_and_gathers_keys_and_values(cp: int):
    for cost in (embedding_cost, block_cost, head_cost):
        whole, part = cost(SHAPE, WHOLE), cost(SHAPE, replace(WHOLE, cp=cp))
        for works in ("forward", "input_grad", "weight_grad"):
            for unit in ("matmul", "attention"):
                shares = amounts(getattr(part, works), unit), amounts(getattr(whole, works), unit) / cp
                assert shares[0] == shares[1]
        assert (part.model_flops, part.parameters) == (whole.model_flops, whole.parameters)
        assert part.output_bytes == whole.output_bytes / cp
        assert part.waiting_bytes == whole.waiting_bytes / cp
    block = block_cost(SHAPE, replace(WHOLE, cp=cp))
    gathered = 2 * 32 * KEYS * 2
    assert amounts(block.forward, "context_gather") == gathered
    assert amounts(block.input_grad, "context_scatter") == gathered
    assert amounts(block.forward, "context_scatter") == amounts(block.input_grad, "context_gather") == 0


def test_the_ring_of_a_sample_has_the_links_of_its_ranks():
    """Ranks of tp are neighbours, so cp=2 beside tp=4 crosses nodes of four, where four rings share four links."""
    device = Device(memory=1e12, matmul={"bf16": 1e30}, memory_bandwidth=1e30)
    links = {"node": LinkSpeed(0.0, 1000.0), "network": LinkSpeed(0.0, 100.0)}
    cluster = Cluster(name="two nodes", device=device, ranks_per_node=4, nodes=2, **links)
    gathered = 2 * 32 * KEYS * 2
    shape = replace(SHAPE, kv_heads=4)
    for tp, cp, bandwidth in ((1, 2, 1000), (1, 4, 1000), (1, 8, 400), (2, 4, 200), (4, 2, 100)):
        at = Layout(tp=tp, cp=cp, microbatch=2)
        alone = replace(cluster, network=LinkSpeed(), node=LinkSpeed())
        times, quick = (
            layer_times(of_shape(shape), machines, at, 32).forward[1] for machines in (cluster, alone)
        )
        tensor = 0.0
        if tp > 1:
            tensor = 2 * 2 * (tp - 1) / tp * 2 * 32 // cp * 64 * 2 / 1000
        seconds = 2 * gathered / tp * (cp - 1) / cp / bandwidth
        assert times - quick == pytest.approx(seconds + tensor)


def test_gradients_and_states_are_divided_over_dp_and_cp():
    cluster, profile = read_cluster("h100*8"), of_shape(SHAPE)
    for layout in ("shard=optimizer", "shard=none"):
        both, of_samples = (
            predict(profile, cluster, f"{layout},microbatch={n},{degrees}", sequence=32, batch=8)
            for n, degrees in ((2, "dp=2,cp=4"), (1, "dp=8"))
        )
        for part in ("weights", "gradients", "optimizer", "buckets"):
            assert getattr(both.memory[0], part) == getattr(of_samples.memory[0], part)
        for part in ("reduction", "optimizer"):
            assert both.parts[part] == pytest.approx(of_samples.parts[part], rel=0.2)
        assert both.tflops_per_device * both.step_seconds == pytest.approx(
            of_samples.tflops_per_device * of_samples.step_seconds
        )


def test_a_search_divides_long_samples_where_nothing_else_fits():
    sizes = {"layers": 32, "hidden": 4096, "head_size": 128, "heads": 32, "kv_heads": 8, "ffn": 14336}
    profile, cluster = of_shape(replace(SHAPE, **sizes)), read_cluster("h100*8")
    given = {"tp": 1, "pp": 1, "shard": "optimizer", "schedule": "1f1b"}
    long = search(profile, cluster, sequence=131072, batch=8, fixed=given, top=30)
    assert long.best.layout.cp > 1
    assert long.rejections["cp"]["1"].text.startswith("does not fit: at least")
    assert not any(plan.layout.cp > 1 and plan.layout.sequence_parallel for plan in long.plans)
    short = search(profile, cluster, sequence=8190, batch=8, fixed=given)
    assert not short.rejections["cp"]
    assert any("cp above 1" in text for text in short.not_compared)
    assert (
        search(
            profile, cluster, sequence=64, batch=8, fixed={"cp": 2, "tp": 2, "schedule": "1f1b"}
        ).best.layout.cp
        == 2
    )


def test_what_cannot_be_divided_is_refused():
    cluster = read_cluster("h100*8")
    with pytest.raises(
        ConfigError, match=r"cp=2 divides samples of 34 tokens into .* a multiple of 4 tokens"
    ):
        predict(of_shape(SHAPE), cluster, "cp=2", sequence=34, batch=4)
    with pytest.raises(ConfigError, match="profiled with whole samples, so cp must be 1, got 2"):
        predict(timed_profile(), round_cluster(), "cp=2", sequence=32, batch=4)
    with pytest.raises(ConfigError, match=r"needs 16 devices \(pp=1 x dp=4 x cp=4 x tp=1\)"):
        predict(of_shape(SHAPE), cluster, "dp=4,cp=4", sequence=32, batch=4)
    beside = predict(of_shape(SHAPE), cluster, "cp=2,tp=2,sequence_parallel=true", sequence=32, batch=4)
    assert any("Pipeline refuses them together" in sentence for sentence in beside.assumptions)


def test_a_plan_that_divides_samples_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(LLAMA))
    words = ["config.json", "-c", "h100*8", "-s", "131072", "-b", "8"]
    outcome = CliRunner().invoke(command, [*words, "--fix", "tp=1", "--fix", "pp=1"])
    assert outcome.exit_code == 0, outcome.output
    planned = load("run.toml").parallel
    assert planned.cp > 1
    assert planned.dp * planned.cp == 8
    beside = ["--out", "beside.toml", "--layout", "cp=2,tp=4,sequence_parallel=true"]
    refused = str(CliRunner().invoke(command, [*words, *beside]).exception)
    assert "cannot write beside.toml: cp beside sequence_parallel is only predicted" in refused
    of_shape(SHAPE).save("profile.json")
    code = CliRunner().invoke(
        command, ["profile.json", "-c", "h100*2", "-s", "64", "-b", "2", "--layout", "cp=2"]
    )
    assert "mesh=penstock.MeshShape(pp=1, dp=1, cp=2)," in code.output
