"""Plans of mixtures of experts: rows, bytes and exchanges in exact closed forms, the search, and the run that starts."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.base.errors import ConfigError
from penstock.cli.plan import command
from penstock.plan.cluster import Cluster, Device, LinkSpeed, read_cluster, with_memory
from penstock.plan.explore.branch_and_bound import search
from penstock.plan.explore.outlook import experts_text
from penstock.plan.prediction import Prediction, predict
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import layer_times
from penstock.profile.closed_form import Workload, block_cost
from penstock.profile.layer_cost import DeviceWork
from penstock.profile.model_profile import Profile, of_shape, read_profile
from penstock.profile.model_shape import ModelShape
from penstock.show.units import size_text
from penstock.train.config.file import load
from tests.support.planning import timed_profile

WIDTH, FFN, EXPERTS, CHOSEN = 64, 32, 8, 2
SHAPE = ModelShape(
    name="mixture", layers=4, hidden=WIDTH, heads=4, kv_heads=4, head_size=16, ffn=128, vocabulary=100, experts=EXPERTS,
    experts_per_token=CHOSEN, expert_ffn=FFN,
)  # fmt: skip
TOKENS = 2 * 16
WHOLE = Workload(microbatch=2, sequence=16)


def experts_of(load: Workload) -> list[DeviceWork]:
    """Return the products of experts, the last two of a block."""
    works = [work for work in block_cost(SHAPE, load).forward if work.unit == "matmul"]
    return works[-2:]


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_a_device_has_its_share_of_the_experts_and_as_many_rows(ep: int):
    divided = replace(WHOLE, ep=ep)
    cost, whole = block_cost(SHAPE, divided), block_cost(SHAPE, WHOLE)
    weights = EXPERTS * 3 * WIDTH * FFN
    assert (whole.expert_parameters, cost.expert_parameters) == (weights, weights / ep)
    assert whole.parameters - cost.parameters == weights - weights / ep
    # Each of the experts here gets ep times the rows that it has from one device's tokens.
    rows = TOKENS * CHOSEN * ep // EXPERTS
    up, down = experts_of(divided)
    assert (up.amount, down.amount) == (
        2 * TOKENS * CHOSEN * WIDTH * 2 * FFN,
        2 * TOKENS * CHOSEN * FFN * WIDTH,
    )
    assert up.width == pytest.approx(3 / (1 / rows + 1 / WIDTH + 1 / (2 * FFN)))
    assert cost.model_flops == whole.model_flops
    assert (cost.saved_bytes, cost.waiting_bytes) == (whole.saved_bytes, whole.waiting_bytes)


def test_rows_travel_twice_each_way():
    exchange = DeviceWork("all_to_all", 2 * TOKENS * CHOSEN * WIDTH * 2, calls=2)
    cost = block_cost(SHAPE, replace(WHOLE, ep=4))
    for works in (cost.forward, cost.input_grad):
        assert [work for work in works if work.unit == "all_to_all"] == [exchange]
    assert not any(
        work.unit == "all_to_all" for work in (*cost.weight_grad, *block_cost(SHAPE, WHOLE).forward)
    )


def test_the_fullest_device_has_more_rows_and_the_model_as_many_flops():
    even, full = (block_cost(SHAPE, replace(WHOLE, ep=4, imbalance=x)) for x in (1.0, 1.5))
    for a, b in zip(
        experts_of(replace(WHOLE, ep=4)), experts_of(replace(WHOLE, ep=4, imbalance=1.5)), strict=True
    ):
        assert b.amount == 1.5 * a.amount
    sent = [work.amount for cost in (even, full) for work in cost.forward if work.unit == "all_to_all"]
    assert sent[1] == 1.5 * sent[0]
    assert full.model_flops == even.model_flops
    # Kept of each row: input and output of its expert, and the three values of the gate.
    assert full.saved_bytes - even.saved_bytes == 0.5 * TOKENS * CHOSEN * (2 * WIDTH + 3 * FFN) * 2
    assert block_cost(SHAPE, replace(WHOLE, imbalance=1.5)) == block_cost(SHAPE, WHOLE)


def test_an_exchange_takes_the_slower_of_both_links():
    device = Device(memory=1e12, matmul={"bf16": 1e30}, memory_bandwidth=1e30)
    links = {"node": LinkSpeed(1.0, 1000.0), "network": LinkSpeed(3.0, 100.0)}
    cluster = Cluster(name="two nodes", device=device, ranks_per_node=4, nodes=2, **links)
    size = 4 * TOKENS * CHOSEN * WIDTH * 2  # of a forward and a backward
    expected = {1: 0, 2: 4 + size / 2 / 1000, 4: 4 + size * 3 / 4 / 1000, 8: 12 + size / 2 / 100}
    for ep, seconds in expected.items():
        times = layer_times(of_shape(SHAPE), cluster, Layout(dp=8, ep=ep, microbatch=2), 16)
        assert (times.forward + times.backward)[1] == pytest.approx(seconds)


def test_states_of_experts_are_divided_over_those_that_have_the_same():
    """Weights and gradients take 6 bytes a parameter, states 12."""
    cluster = read_cluster("h100*8")
    plain = predict(of_shape(SHAPE), cluster, "dp=8", sequence=16, batch=8).memory[0]
    experts = SHAPE.layers * SHAPE.expert_parameters
    rest = SHAPE.parameters - experts
    assert plain.optimizer == 12 * SHAPE.parameters
    for ep in (1, 2, 8):
        (divided,) = predict(
            of_shape(SHAPE), cluster, f"dp=8,ep={ep},shard=optimizer", sequence=16, batch=8
        ).memory
        assert (divided.weights, divided.gradients) == (2 * (rest + experts / ep), 4 * (rest + experts / ep))
        assert divided.optimizer == 12 * (rest / 8 + experts / ep / (8 / ep))


def test_gradients_of_experts_are_reduced_among_fewer():
    cluster = replace(read_cluster("h100*8"), overlap=False, node=LinkSpeed(0.0, 1e9))
    experts = SHAPE.layers * SHAPE.expert_parameters
    rest = SHAPE.parameters - experts
    for ep in (1, 2, 8):
        step = predict(of_shape(SHAPE), cluster, f"dp=8,ep={ep}", sequence=16, batch=8)
        same = 8 // ep
        expected = 2 * 4 * (rest * 7 / 8 + experts / ep * (same - 1) / same) / 1e9
        assert step.parts["reduction"] == pytest.approx(expected)


def test_the_reduction_after_the_backward_is_the_longest_of_any_rank():
    """The rank with most parameters has fewer of those that all replicas share, and is done first."""
    cluster = replace(read_cluster("h100*8"), overlap=False, node=LinkSpeed(0.0, 1e9))
    profile = of_shape(replace(SHAPE, vocabulary=400))
    step = predict(profile, cluster, "pp=3,dp=2,ep=2,split=1+2+1", sequence=16, batch=8)
    assert step.costs is not None
    counts, experts = step.costs.parameters, step.costs.expert_parameters
    shared = counts - experts
    assert counts.argmax() != shared.argmax()
    assert step.parts["reduction"] == pytest.approx(2 * 4 * float(shared.max()) / 2 / 1e9)


@pytest.mark.slow
def test_a_search_divides_experts_where_whole_ones_do_not_fit():
    """8 blocks have 1.6 billion parameters of experts."""
    sizes = {"layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 16, "head_size": 128, "vocabulary": 32000}
    large, cluster = of_shape(replace(SHAPE, expert_ffn=4096, **sizes)), read_cluster("h100*4")
    fixed = {"pp": 1, "schedule": "1f1b", "shard": "optimizer"}
    roomy = search(large, cluster, sequence=1024, batch=16, fixed=fixed)
    assert {plan.layout.ep for plan in roomy.plans} == {1, 2, 4}
    tight = search(large, cluster, sequence=1024, batch=16, fixed=fixed, memory=12e9)
    assert tight.best.layout.ep > 1
    assert tight.rejections["ep"]["1"].text.startswith("does not fit: at least")
    only = search(large, cluster, sequence=1024, batch=16, fixed={**fixed, "ep": 2})
    assert {plan.layout.ep for plan in only.plans} == {2}
    for ep in (1, 2, 4):
        plan = predict(large, cluster, f"dp=4,ep={ep},shard=optimizer", sequence=1024, batch=16)
        assert roomy.best.step_seconds <= plan.step_seconds


def test_models_without_experts_are_not_divided():
    dense = of_shape(SHAPE.dense)
    result = search(dense, read_cluster("h100*4"), sequence=16, batch=16, schedules=["1f1b"])
    assert {plan.layout.ep for plan in result.plans} == {1}
    assert not result.rejections["ep"]


@pytest.mark.parametrize(
    ("profile", "layout", "message"),
    [
        (of_shape(SHAPE), "dp=4,ep=3", r"ep=3 does not divide dp x tp = 4, .*; take a divisor of 4"),
        (of_shape(SHAPE), "dp=16,ep=16", r"ep=16 does not divide the 8 experts of mixture; .* such as 8"),
        (of_shape(SHAPE.dense), "dp=2,ep=2", r"mixture has none, so ep must be 1, got 2"),
        (of_shape(SHAPE), "dp=2,ep=0", r"ep must be a whole number"),
        (of_shape(SHAPE), "dp=2,imbalance=0.5", r"imbalance must be a number from 1 .*, got 0.5"),
        (of_shape(SHAPE), "dp=2,imbalance=nan", r"imbalance must be a number from 1 .*, got nan"),
        (of_shape(SHAPE), "dp=2,imbalance=much", r"imbalance must be a number from 1 .*, got 'much'"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(profile: Profile, layout: str, message: str):
    with pytest.raises(ConfigError, match=message):
        predict(profile, read_cluster("h100*16"), layout, sequence=16, batch=16)
    with pytest.raises(ConfigError, match="does not tell apart, so ep must be 1, got 2"):
        timed_profile(8).table(Workload(microbatch=1, sequence=32, ep=2))


def test_a_search_refuses_a_degree_that_no_layout_can_have():
    for fixed, message in (
        ({"ep": 3}, "ep=3 does not divide the 8 experts"),
        ({"ep": 8, "dp": 2}, "must divide dp x cp x tp"),
    ):
        with pytest.raises(ConfigError, match=message):
            search(of_shape(SHAPE), read_cluster("h100*4"), sequence=16, batch=16, fixed=fixed)


def test_a_profile_keeps_a_mixture(tmp_path: Path):
    profile = of_shape(replace(SHAPE, dense_layers=1))
    profile.save(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    assert profile.table(WHOLE).kinds == (0, 3, 1, 1, 1, 2)


def test_the_written_run_divides_the_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.toml").write_text(
        "[model]\nwidth = 32\nlayers = 2\nhidden = 64\nexperts = 4\n[parallel]\nep = 4\n"
    )
    words = ["model.toml", "-c", "h100*4", "-s", "16", "-b", "8", "--out", "run.toml"]
    for ep in (2, 1):
        done = CliRunner().invoke(command, [*words, "--layout", f"dp=4,imbalance=1.2,ep={ep}"])
        assert done.exit_code == 0, done.output
        assert tomllib.loads((tmp_path / "run.toml").read_text())["parallel"]["ep"] == ep
        config = load(tmp_path / "run.toml")
        assert (config.parallel.dp, config.parallel.ep) == (4, ep)
        assert ("gets 1.2 times the mean" in done.output) == (ep > 1)


def test_the_answer_says_in_words_why_this_ep():
    cluster = read_cluster("h100*4")
    plan = predict(of_shape(SHAPE), cluster, "dp=4,ep=2", sequence=16, batch=8)
    one, four = (predict(of_shape(SHAPE), cluster, f"dp=4,ep={ep}", sequence=16, batch=8) for ep in (1, 4))

    def change(other: Prediction) -> str:
        share = other.step_seconds / plan.step_seconds - 1
        text = f"{abs(share):.1%} {'slower' if share >= 0 else 'quicker'}"
        return f"ep={other.layout.ep} is {text} and needs {size_text(other.peak_bytes)}"

    text = experts_text(of_shape(SHAPE), plan, 16, 8)
    assert text == f"ep=2: a device has 4 of 8 experts a block; {change(one)}; {change(four)}"
    tight = with_memory(cluster, (one.peak_bytes + plan.peak_bytes) / 2)
    within = predict(of_shape(SHAPE), tight, "dp=4,ep=2", sequence=16, batch=8)
    assert f"; {change(one)}, more than {size_text(tight.device.usable)}; " in experts_text(
        of_shape(SHAPE), within, 16, 8
    )
    alone = predict(of_shape(SHAPE), cluster, "pp=2", sequence=16, batch=8)
    assert experts_text(of_shape(SHAPE), alone, 16, 8) == "ep=1: a device has 8 of 8 experts a block"
    dense = of_shape(SHAPE.dense)
    assert experts_text(dense, predict(dense, cluster, "pp=2", sequence=16, batch=8), 16, 8) == ""
