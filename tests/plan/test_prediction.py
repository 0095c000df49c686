"""Predicted steps: exact ones by hand, properties, every family, and bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ConfigError, ScheduleError
from penstock.plan.cluster import Cluster, LinkSpeed, read_cluster
from penstock.plan.explore.branch_and_bound import search
from penstock.plan.op_costs import op_costs
from penstock.plan.prediction import Prediction, predict, step_program
from penstock.plan.run_layout import Layout
from penstock.profile.model_profile import of_shape
from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.text import write_csv
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import bubble_fraction, makespan
from tests.support.lanes import exhaustive
from tests.support.planning import SEQUENCE, SMALL, round_cluster, slow_links, timed_profile

H100 = read_cluster("h100*8x4")
FIRST = ["1f1b", "interleaved-1f1b", "zb-v", "dualpipe"]
FEW = [*FIRST, *exhaustive(*sorted(FAMILIES.keys() - FIRST))]


def predicted(layout: Any, cluster: Cluster | None = None, batch: int = 8, blocks: int = 4) -> Prediction:
    return predict(timed_profile(blocks), cluster or round_cluster(), layout, sequence=SEQUENCE, batch=batch)


def of_small(layout: Any, cluster: Cluster = H100, batch: int = 16, **values: Any) -> Prediction:
    return predict(of_shape(SMALL), cluster, layout, sequence=values.get("sequence", SEQUENCE), batch=batch)


def test_a_cluster_without_an_error_claims_no_interval():
    prediction = predicted("pp=2", round_cluster(error=None))
    assert (prediction.low, prediction.high) == (None, None)
    assert (prediction.as_dict()["low"], prediction.step_seconds) == (None, 56)
    assert "There is no interval: the file of the cluster round has no error." in prediction.assumptions


def test_a_data_sheet_is_named_as_the_source_of_the_rates():
    plan = of_small("pp=2", read_cluster("rtx-4090*2"))
    assert plan.low is plan.high is None
    assert any("NVIDIA Ada GPU Architecture" in sentence for sentence in plan.assumptions)
    never = "There is no interval: no step on rtx-4090 has been compared with a prediction."
    assert plan.assumptions[-1] == never


def test_a_step_of_1f1b_by_hand():
    """Two stages of 2 blocks: F 2 s, B 4 s, 8 microbatches; 20 parameters a rank at 32 bytes and 320 bytes/s."""
    prediction = predicted("pp=2", round_cluster(error=0.25, step_overhead=0.5))
    assert prediction.parts == {
        "pipeline": (8 + 1) * 6,
        "reduction": 0,
        "sharding": 0,
        "optimizer": 2,
        "overhead": 0.5,
    }
    assert prediction.step_seconds == 56.5
    assert (prediction.low, prediction.high) == (56.5 / 1.25, 1.25 * 56.5)
    assert prediction.tokens_per_second == 8 * SEQUENCE / 56.5
    assert prediction.bubble == 1 / 9
    # Forward 1 TFLOP a block and microbatch, over two devices of 1 TFLOP/s.
    assert prediction.tflops_per_device == 3 * 4 * 8 / 56.5 / 2
    assert prediction.mfu == prediction.hfu == prediction.tflops_per_device
    assert prediction.layout == Layout(pp=2, v=1)


def test_recompute_by_hand():
    full, second = predicted("pp=2,recompute=full"), predicted("pp=2,recompute=2")
    assert full.parts["pipeline"] == (8 + 1) * 8
    assert second.parts["pipeline"] == (8 + 1) * 7
    assert full.hardware_tflops_per_device == 4 * 4 * 8 / full.step_seconds / 2
    assert second.hardware_tflops_per_device == 3.5 * 4 * 8 / second.step_seconds / 2
    assert full.hfu > full.mfu


def test_overheads_of_the_runtime_count_for_every_op():
    plain, slow = predicted("pp=2"), predicted("pp=2", round_cluster(op_overhead=0.25))
    assert slow.parts["pipeline"] - plain.parts["pipeline"] == 2 * 9 * 0.25


def test_messages_take_the_link_between_their_ranks():
    """Nodes of two: 10 bytes take 0.5 s within one and 1 s between two."""
    alone = predicted("pp=4", slow_links(), batch=1)
    assert alone.parts["pipeline"] == 12 + 2 * (0.5 + 1 + 0.5)
    # With two replicas, each node has one rank of each.
    assert predicted("pp=4,dp=2", slow_links(), batch=2).parts["pipeline"] == 12 + 2 * 3 * 1


def test_the_reduction_of_gradients_by_hand():
    """One stage of 40 parameters has 160 bytes of gradients: a ring of two ranks sends half of them twice."""
    near = predicted("dp=2,overlap=no", slow_links(), batch=2)
    assert near.parts["reduction"] == 2 * (0.25 / 2 + 80 / 40)
    # Eight replicas, two a node: the two share their links while they reduce, up to the speed within a node.
    far = predicted("dp=8,overlap=no", slow_links(), batch=8)
    assert far.parts["reduction"] == 2 * 7 * (0.5 / 2 + 20 / 20)
    zero = predicted("dp=2,overlap=no,shard=optimizer", slow_links(), batch=2)
    gather = 0.125 + 20 / 40  # the weights of one layer
    assert zero.parts["reduction"] == pytest.approx(near.parts["reduction"] + gather)
    assert zero.parts["optimizer"] == near.parts["optimizer"] / 2


def test_a_reduction_hides_behind_the_backward_only_as_far_as_it_can():
    apart, hidden = (predicted(f"pp=2,dp=2,overlap={flag}", slow_links(), batch=8) for flag in ("no", "yes"))
    assert 0 < hidden.parts["reduction"] <= apart.parts["reduction"]
    assert hidden.parts["pipeline"] == apart.parts["pipeline"]
    assert predicted("pp=2,dp=2", replace(slow_links(), overlap=False)).parts == apart.parts


# whole backwards, several stages, split backwards on a V, copies; the other families differ in their order alone
@pytest.mark.parametrize("schedule", FEW)
def test_a_family_is_predicted_and_equals_its_simulation(schedule: str):
    prediction = predicted(f"pp=4,schedule={schedule}", blocks=16)
    program = check(build_schedule(schedule, 4, 8)).program
    per_stage = prediction.costs.forward
    assert per_stage.sum() == 16
    again = simulate(program, Costs.of(program.schedule.placement, *(list(per_stage),) * 3))
    assert prediction.parts["pipeline"] == float(makespan(again))
    assert prediction.bubble == pytest.approx(float(bubble_fraction(again)))
    assert prediction.bubble == pytest.approx(sum(prediction.causes.values()))
    assert len(prediction.memory) == 4
    assert prediction.layout.v == program.schedule.stages // 4
    # With a closed form of the same, nothing is negative or idle beyond reason.
    sized = of_small(f"pp=4,schedule={schedule}", batch=8)
    assert 0 < sized.mfu <= sized.hfu < 1
    assert sized.low < sized.step_seconds < sized.high
    table = json.loads(json.dumps(sized.as_dict()))
    assert all(rank["total"] > 0 for rank in table["memory"])
    assert table["fits"] is True
    assert table["hardware_tflops_per_device"] == sized.hardware_tflops_per_device


def test_the_prediction_is_the_simulation_of_its_own_costs():
    prediction = of_small("pp=4,tp=2,v=2,schedule=interleaved-1f1b,microbatch=2,sequence_parallel=yes")
    program = step_program("interleaved-1f1b", 4, 8, 2)
    trace = simulate(program, op_costs(prediction.costs, H100, prediction.layout))
    assert np.array_equal(trace.end, prediction.trace.end)
    assert prediction.parts["pipeline"] == makespan(trace)


def test_assumptions_are_said():
    dropout = of_shape(replace(SMALL, dropout=True))
    said = predict(
        dropout, read_cluster("a100-80gb*8x2"), "pp=2,dp=2", sequence=SEQUENCE, batch=8
    ).assumptions
    assert len(said) == 5
    assert said[-1] == "12 of the 16 devices are idle."
    interval = "The interval is the step divided and multiplied by "
    assert predicted("pp=16", round_cluster(error=0.1), 2, 16).assumptions == (
        f"{interval}1.1: the error of round.",
    )
    measured = timed_profile(machine={"cores": 2, "machine": "x86_64", "ranks": 4}, spread=0.5)
    sentence, of_spread = predict(
        measured, round_cluster(ranks_per_node=2, error=0.1), "pp=2", batch=8
    ).assumptions
    assert sentence.startswith("Layers take the seconds measured on 2 cores (x86_64) with 4 ranks busy")
    assert of_spread == (
        f"{interval}1.5: the spread of the measured timed; measure again on a quiet machine."
    )


def test_a_layout_of_a_profile_may_name_its_dtype():
    assert predict(timed_profile(), round_cluster(), "pp=2,dtype=fp32", batch=8).dtype == "fp32"


@pytest.mark.parametrize(
    ("profile", "cluster", "layout", "message"),
    [
        (timed_profile(), round_cluster(), "pp=2,dtype=bf16", "is in fp32, so a layout's dtype must be that, got bf16"),
        (timed_profile(), H100, "pp=2", r"the profile of timed is in fp32, and h100 has .* autocast=torch\.bfloat16"),
        (of_shape(SMALL), "h100*4", "pp=2", r"cluster must be a Cluster, got 'h100\*4'; read it with penstock.plan.read_c"),
        ("my-model", H100, "pp=2", r"profile must be a Profile, got 'my-model'; read it with"),
        (of_shape(SMALL), read_cluster("a100-80gb*8"), "dtype=fp8", r"for fp8; it has bf16, fp16\. Choose one of these"),
    ],
)  # fmt: skip
def test_profiles_and_clusters_that_do_not_fit_are_refused(profile, cluster, layout: str, message: str):
    with pytest.raises(ConfigError, match=message):
        predict(profile, cluster, layout, sequence=SEQUENCE, batch=8)
    if isinstance(profile, str):
        with pytest.raises(ConfigError, match=message):
            search(profile, cluster, sequence=SEQUENCE, batch=8)


def test_a_measured_spread_widens_the_interval():
    for spread in (0.5, 1.7):
        profile = timed_profile(spread=spread, step_overhead=1.0)
        prediction = predict(profile, round_cluster(error=0.1), "", sequence=SEQUENCE, batch=8)
        seconds = prediction.step_seconds
        assert (prediction.low, prediction.high) == (seconds / (1 + spread), (1 + spread) * seconds)
    assert prediction.parts["overhead"] == 1.0


LAYOUTS = st.fixed_dictionaries(
    {
        "pp": st.sampled_from([1, 2, 4]),
        "dp": st.sampled_from([1, 2, 4]),
        "tp": st.sampled_from([1, 2]),
        "schedule": st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v"]),
        "recompute": st.sampled_from(["none", "full", "selective", 3]),
        "shard": st.sampled_from(("none", "optimizer", "gradients", "weights")),
        "sequence_parallel": st.booleans(),
        "overlap": st.booleans(),
        "split": st.sampled_from(["even", "cost"]),
    }
)
FASTER = st.sampled_from(["memory_bandwidth", "matmul", "launch", "optimizer_bandwidth", "node", "network"])


def faster(cluster: Cluster, what: str, ratio: float) -> Cluster:
    if what in ("node", "network"):
        link: LinkSpeed = getattr(cluster, what)
        reduced = None if link.reduce_bandwidth is None else link.reduce_bandwidth * ratio
        return replace(cluster, **{what: LinkSpeed(link.latency / ratio, link.bandwidth * ratio, reduced)})
    device = cluster.device
    if what == "launch":
        return replace(cluster, device=replace(device, launch=device.launch / ratio))
    if what == "matmul":
        rates = {dtype: rate * ratio for dtype, rate in device.matmul.items()}
        return replace(cluster, device=replace(device, matmul=rates))
    return replace(cluster, device=replace(device, **{what: getattr(device, what) * ratio}))


@settings(max_examples=15)
@given(LAYOUTS, FASTER, st.sampled_from([1.5, 10.0]))
def test_a_faster_machine_is_never_slower(layout: dict[str, Any], what: str, ratio: float):
    layout["split"] = "even"  # a split by cost is a choice that depends on the machine
    before, after = of_small(layout), of_small(layout, faster(H100, what, ratio))
    assert after.step_seconds <= before.step_seconds * (1 + 1e-9)
    assert after.memory == before.memory


@settings(max_examples=15)
@given(LAYOUTS, st.floats(0.1, 10))
def test_more_memory_keeps_what_fits(layout: dict[str, Any], ratio: float):
    need = of_small(layout).peak_bytes

    def with_memory(memory: float) -> Prediction:
        return of_small(layout, replace(H100, device=replace(H100.device, memory=memory, reserve=0.0)))

    assert with_memory(need).fits
    assert not with_memory(need * (1 - 1e-6)).fits
    assert with_memory(need * ratio).fits == (ratio >= 1)


@settings(max_examples=15)
@given(LAYOUTS)
def test_shares_are_shares(layout: dict[str, Any]):
    prediction = of_small(layout)
    assert 0 <= prediction.bubble < 1
    assert sum(prediction.parts.values()) == pytest.approx(prediction.step_seconds)
    assert 0 < prediction.mfu <= prediction.hfu < 1
    assert all(seconds >= 0 for seconds in prediction.parts.values())
    assert sum(prediction.costs.counts) == SMALL.layers


def test_a_schedule_of_ones_own(tmp_path: Path):
    path = tmp_path / "own.csv"
    write_csv(build_schedule("zb-h1", 4, 8), path)
    own, family = (predicted(f"pp=4,schedule={name}", blocks=16) for name in (path, "zb-h1"))
    assert own.step_seconds == family.step_seconds
    with pytest.raises(
        ConfigError, match=r"own.csv is for 4 ranks and 8 microbatches, but the layout has pp=2 and 8"
    ):
        predicted(f"pp=2,schedule={path}")
    write_csv(build_schedule("gpipe", 4, 8), path)  # a file may change between predictions
    assert predicted(f"pp=4,schedule={path}", blocks=16).step_seconds > family.step_seconds
    path.write_text("0F0,0B1\n")
    with pytest.raises(ScheduleError):
        predicted(f"pp=1,schedule={path}", batch=2)
    path.write_bytes(bytes(range(256)))
    with pytest.raises(ScheduleError, match=r"own\.csv"):
        predicted(f"pp=2,schedule={path}")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("pp=64", "needs 64 devices .pp=64 x dp=1 x tp=1., and h100 has 32"),
        ("pp=8,dp=4,tp=2", "needs 64 devices"),
        ("dp=3", "batch of 16 does not divide over dp=3 .* nearest batch that does is 15 or 18"),
        ("microbatch=99", "nearest batch that does is 99"),
        ("tp=8", "tp=8 does not divide the model's 4 key and value heads; take a divisor, such as 4"),
        ("pp=16,v=2,schedule=interleaved-1f1b", "16 blocks cannot be split into 32 stages .* take at most 16 stages"),
        ("pp=4,v=2", "1f1b has one stage per rank, got 2"),
        ("schedule=gpip", r"no schedule family 'gpip' \(did you mean 'gpipe'"),
        ("schedule=", "no schedule family ''"),
        ("pp=3,schedule=dualpipe", "dualpipe needs an even number of ranks, got 3"),
        ("schedule=none.csv", "cannot read the schedule none.csv"),
        ("schedule=a\0b.csv", "cannot read the schedule"),
        ("schedule=/dev/zero/x.csv", "cannot read the schedule"),
        ("pp=2,split=8+9", "add up to 17"),
        ("pp=2,split=16", "split gives the blocks of 1 stage"),
        ("dtype=fp32", "the cluster has no matmul rate for fp32; it has bf16, fp16, fp8"),
        ("shrd=none", "did you mean 'shard'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(layout: str, message: str):
    with pytest.raises(ConfigError, match=message) as error:
        of_small(layout)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [0, -1, True, 8.0, float("nan"), "8", 10**30])
def test_counts_of_tokens_and_samples_are_whole_numbers(value: Any):
    for name in ("sequence", "batch"):
        with pytest.raises(ConfigError, match=f"{name} must be a whole number from 1 to 1,000,000,000"):
            predict(of_shape(SMALL), H100, "", **{"sequence": 8, "batch": 8, name: value})


def test_batches_too_large_for_a_schedule_are_refused():
    with pytest.raises(ScheduleError, match="take fewer microbatches"):
        of_small("pp=2", batch=10**9)
