"""Layouts whose replicas divide gradients or weights: bytes as the checker proves them, traffic by hand, and the search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.base.errors import ConfigError, ScheduleError
from penstock.plan.cluster import Host, read_cluster
from penstock.plan.explore.branch_and_bound import search
from penstock.plan.explore.outlook import left_out_text
from penstock.plan.explore.search_result import SearchResult
from penstock.plan.prediction import Prediction, predict
from penstock.plan.rank_memory import bound_sharded, rank_memory
from penstock.plan.stage_costs import StageCosts
from penstock.profile.model_profile import of_shape, with_lora
from penstock.profile.model_shape import ModelShape
from penstock.schedule.check import check
from penstock.schedule.memory import Budget, WeightBytes
from penstock.schedule.residency import Sharding, make_residency
from tests.support.lanes import exhaustive
from tests.support.planning import SEQUENCE, round_cluster, slow_links, timed_profile

SIZES = {"hidden": 1024, "heads": 8, "kv_heads": 8, "head_size": 128, "ffn": 4096, "vocabulary": 32000}
MEDIUM = of_shape(ModelShape(name="medium", layers=8, **SIZES))
ORDERS = (
    "schedule=gpipe",
    "schedule=breadth-first,v=4",
    "schedule=interleaved-1f1b,v=4",
    "schedule=zb-v,v=2",
)
SHARDINGS = (
    Sharding("gradients", None, 2), Sharding("weights"), Sharding("weights", 2, 3),
    *exhaustive(Sharding("gradients"), Sharding("weights", 1)),
)  # fmt: skip


def predicted(layout: str, batch: int = 16, **links: Any) -> Prediction:
    cluster = slow_links(**links) if links else round_cluster()
    return predict(timed_profile(16), cluster, layout, sequence=SEQUENCE, batch=batch)


def keys_of(sharding: Sharding) -> str:
    return ",".join(f"{key}={value}" for key, value in vars(sharding).items() if value not in (None, "none"))


def without_activations(plan: Prediction) -> StageCosts:
    """Costs where a rank's fullest op is that with most weights and gradients."""
    return replace(plan.costs, saved=0 * plan.costs.saved, waiting=0 * plan.costs.waiting)


# several stages with their runs apart, and a split backward; the other orders have fewer runs
@pytest.mark.parametrize("sharding", SHARDINGS, ids=keys_of)
@pytest.mark.parametrize("order", [*ORDERS[2:], *exhaustive(*ORDERS[:2])])
def test_bytes_are_those_that_the_checker_proves(order: str, sharding: Sharding):
    if order == "schedule=gpipe" and sharding.window == 2:
        sharding = replace(sharding, window=1)  # its ranks have one stage each
    plan = predicted(f"pp=2,dp=2,{order},{keys_of(sharding)}")
    schedule = plan.program.schedule
    residency = make_residency(schedule, sharding)
    empty = without_activations(plan)
    sizes = 4 * plan.costs.parameters.astype(int)
    budget = Budget(0, 0, weights=WeightBytes(sizes, sizes, 2))
    states = rank_memory(schedule, empty, plan.layout, "fp32")
    assert [rank.weights + rank.gradients for rank in states] == budget.peak(schedule, residency).tolist()
    # With activations, the peak is at least what the checker counts after an op.
    saved, waiting = (column.astype(int) for column in (plan.costs.saved, plan.costs.waiting))
    whole = replace(budget, saved=saved, waiting=waiting, freed_at="B")
    for rank, least in zip(plan.memory, whole.peak(schedule, residency), strict=True):
        assert rank.weights + rank.gradients + rank.activations >= least - waiting.max()
        assert rank.optimizer == 8 * 80 / 2
    assert bound_sharded(schedule, plan.costs, plan.layout, "fp32") <= plan.peak_bytes
    assert check(schedule, sharding=sharding).program.schedule == schedule


@pytest.mark.parametrize("order", ORDERS)
def test_bytes_beside_a_store_are_those_that_the_checker_proves(order: str):
    sharding = Sharding(store="host", window=1)
    plan = predicted(f"pp=2,{order},{keys_of(sharding)}")
    schedule = plan.program.schedule
    residency = make_residency(schedule, sharding)
    empty = without_activations(plan)
    sizes = 4 * plan.costs.parameters.astype(int)
    budget = Budget(0, 0, weights=WeightBytes(sizes, sizes, 1))
    states = rank_memory(schedule, empty, plan.layout, "fp32")
    assert [rank.weights + rank.gradients for rank in states] == budget.peak(schedule, residency).tolist()
    assert all(rank.optimizer == 0 for rank in states)
    # Frozen weights come and go as the others.
    frozen = replace(empty, frozen_bytes=empty.frozen_bytes + 100)
    more = rank_memory(schedule, frozen, plan.layout, "fp32")
    assert [b.weights - a.weights for a, b in zip(states, more, strict=True)] == [100, 100]


def test_copies_of_a_store_by_hand():
    """Two stages of 80 parameters, each of 320 bytes, on a link of 40 bytes a second: 8 s."""
    host = Host(bandwidth=40, memory_bandwidth=1000, disk_bandwidth=20)
    cluster = replace(round_cluster(), host=host)
    order = "pp=1,v=2,schedule=breadth-first"

    def of(keys: str) -> Prediction:
        return predict(timed_profile(16), cluster, f"{order},{keys}", sequence=SEQUENCE, batch=4)

    whole, plan = (
        predict(timed_profile(16), cluster, order, sequence=SEQUENCE, batch=4),
        of("store=host,window=1"),
    )
    # Forwards of both stages, then backwards of both: three stays. One reduction is beside a fetch, and one is last.
    assert plan.parts["sharding"] == pytest.approx(3 * 8 + 8)
    assert plan.parts["optimizer"] == pytest.approx(160 * 32 / 1000)
    assert of("store=disk,window=1").parts["sharding"] == pytest.approx(3 * 16 + 16)
    # With two places both stages stay for the whole step, and the second one comes beside the forwards of the first.
    assert of("store=host,window=2").parts["sharding"] == pytest.approx(8 + 8)
    # Each stage has two reductions, and its next backward waits for the first one, and for its sums to come back.
    twice = of("store=host,window=1,reduce_every=2").parts["sharding"] - plan.parts["sharding"]
    assert twice == pytest.approx(2 * 16)
    assert plan.step_seconds == pytest.approx(whole.parts["pipeline"] + sum(list(plan.parts.values())[1:]))
    assert "must have room for 2.56 KB; a device copies 4e-08 GB/s each way" in plan.assumptions[-1]
    assert plan.low is None


def test_holders_of_a_stage_add_up_gradients_in_host_memory():
    """Two ranks, each with both stages of 80 parameters: 640 bytes of gradients, and as many of the other rank."""
    host = Host(bandwidth=1e9, memory_bandwidth=1000)
    room, reduced = [], []
    for ranks_per_node, order in ((2, "dualpipe-v,v=2"), (2, "dualpipe"), (1, "dualpipe")):
        nodes = {"nodes": 2 // ranks_per_node, "ranks_per_node": ranks_per_node}
        cluster = replace(slow_links(), host=host, **nodes)
        keys = f"pp=2,schedule={order},store=host"
        plan = predict(timed_profile(16), cluster, keys, sequence=SEQUENCE, batch=4)
        room.append(plan.store_room.memory)
        reduced.append(plan.parts["reduction"])
    assert room == [16 * 160, 2 * 16 * 160, 16 * 160]
    # Read and written as a message, and read again to be added; the ranks of a host share its memory. From another host
    # they come at 20 bytes a second.
    assert reduced == pytest.approx([0, 3 * 2 * 640 / 500, 3 * 2 * 640 / 1000 + 640 / 20])


@pytest.mark.slow
def test_where_nothing_else_fits_weights_go_to_a_store():
    given: dict[str, Any] = {"sequence": 512, "batch": 4, "fixed": {"schedule": "breadth-first"}}
    cluster = read_cluster("h100*2")
    whole = search(MEDIUM, cluster, **given)
    assert whole.with_store == ""
    assert "store=host and store=disk where another layout fits" in left_out_text(whole)
    least = min(outcome.peak_bytes for outcome in whole.outcomes)
    result = search(MEDIUM, cluster, memory=0.6 * least, **given)
    assert result.with_store.startswith("No layout fits on the devices alone: weights,")
    assert {plan.layout.store for plan in result.plans} == {"host"}
    assert all(plan.fits and plan.layout.pp == 2 for plan in result.plans)
    with pytest.raises(
        ConfigError, match=r"no layout fits in memory; the smallest needs .*store=host,window=1"
    ):
        assert search(MEDIUM, cluster, memory=0.02 * least, **given).best
    # What is asked for is not replaced.
    with pytest.raises(ConfigError, match="no layout fits in memory"):
        assert search(MEDIUM, cluster, memory=0.6 * least, **{**given, "fixed": {"dp": 2, "pp": 1}}).best


def test_disks_have_no_main_weights_and_bases_of_four_bits_no_store():
    given: dict[str, Any] = {"sequence": 512, "batch": 4}
    layout = "pp=1,v=8,schedule=breadth-first,window=1"
    plans = {
        store: predict(MEDIUM, read_cluster("h100*1"), f"{layout},store={store}", **given)
        for store in ("host", "disk")
    }
    gigabytes = {bytes: f"{MEDIUM.parameters * bytes / 1e9:.3g} GB" for bytes in (4, 14, 18)}
    gigabytes[4] = f"{MEDIUM.parameters * 4 / 1e6:.3g} MB"
    assert f"memory of a host must have room for {gigabytes[18]}; a device" in plans["host"].assumptions[-1]
    said = plans["disk"].assumptions[-1]
    assert (
        f"disks of a host must have room for {gigabytes[14]}, and its memory for {gigabytes[4]} of main"
        in said
    )
    quantised = with_lora(MEDIUM, 4, 4)
    with pytest.raises(ConfigError, match="store=disk keeps plain tensors, and a base of 4 bits has others"):
        predict(quantised, read_cluster("h100*1"), f"{layout},store=disk", **given)
    with pytest.raises(ConfigError, match="store=host keeps plain tensors"):
        search(quantised, read_cluster("h100*1"), fixed={"store": "host"}, **given)
    tiny = search(quantised, read_cluster("h100*1"), memory=1e6, **given)
    assert tiny.smallest is not None
    assert tiny.smallest.layout.store == "none"


def test_what_the_smallest_layout_needs_is_its_prediction():
    """The bytes of breadth-first grow with every microbatch, and searches count those of a few."""
    result = search(
        MEDIUM,
        read_cluster("h100*1"),
        sequence=512,
        batch=32,
        memory=3e8,
        fixed={"schedule": "breadth-first"},
    )
    assert result.smallest is not None
    layout, size, exact = result.smallest
    assert exact
    plan = predict(MEDIUM, read_cluster("h100*1"), layout, sequence=512, batch=32)
    assert size == plan.peak_bytes
    assert search(
        MEDIUM,
        read_cluster("h100*1"),
        sequence=512,
        batch=32,
        memory=1.001 * size,
        fixed={"schedule": "breadth-first"},
    ).plans


def test_a_store_holds_one_pipeline():
    with pytest.raises(
        ConfigError, match="store=host holds the weights of one pipeline, and this one has 2 devices"
    ):
        predicted("pp=2,dp=2,store=host")
    with pytest.raises(ConfigError, match="leave one of them out"):
        predicted("pp=2,store=host,shard=weights")


def test_one_stage_on_each_rank_saves_nothing_of_its_weights():
    whole, sharded = (predicted(f"pp=4,dp=2,shard={shard}") for shard in ("optimizer", "weights"))
    for before, after in zip(whole.memory, sharded.memory, strict=True):
        assert after.weights == 1.5 * before.weights
        assert after.gradients == before.gradients


def test_gathers_and_reductions_by_hand():
    """Two stages of 80 parameters, each of 320 bytes, over two replicas on a link of 40 bytes a second."""
    once = 0.25 / 2 + 320 / 2 / 40
    order = "pp=1,dp=2,v=2,schedule=breadth-first,overlap=no"
    whole = predicted(f"{order},shard=optimizer", nodes=8)
    for keys, extra in (
        ("shard=gradients", 0),
        ("shard=gradients,reduce_every=4", 2),
        ("shard=weights", 0),
        ("shard=weights,window=1", 1),  # forwards of both stages, backwards of both: 3 runs
        ("shard=weights,window=1,reduce_every=2", 1 + 2 * 3),
    ):
        plan = predicted(f"{order},{keys}", nodes=8)
        assert plan.parts == {**whole.parts, "sharding": pytest.approx(extra * once)}
        assert "Over 2 replicas, " in plan.assumptions[-1]


def test_what_overlaps_hides_beside_the_ops():
    order = "pp=2,dp=2,v=4,schedule=interleaved-1f1b,shard=weights,window=1"
    apart, beside, free = (
        predicted(f"{order},overlap={flag}", **links)
        for flag, links in (("no", {"nodes": 8}), ("yes", {"nodes": 8}), ("yes", {}))
    )
    assert 0 < beside.parts["sharding"] < apart.parts["sharding"]
    assert free.parts["sharding"] == 0
    wide = predicted(f"{order.replace('window=1', 'window=4')},overlap=yes", nodes=8)
    assert wide.parts["sharding"] < beside.parts["sharding"]


def test_one_replica_has_nothing_to_divide():
    plain, sharded = (
        predicted(f"pp=4,v=2,schedule=interleaved-1f1b,{k}") for k in ("dp=1", "shard=weights,window=1")
    )
    assert (plain.parts, plain.memory) == (sharded.parts, sharded.memory)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dp=4,ep=2,shard=weights", "shard=weights does not divide experts that ep=2 divides already"),
        ("pp=2,dp=2,schedule=dualpipe,shard=gradients", "has copies of stages"),
        ("pp=2,dp=2,schedule=dualpipe-v,shard=weights,window=1", "the window is 1; use at least 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(layout: str, message: str):
    with pytest.raises((ConfigError, ScheduleError), match=message):
        predicted(layout)


LARGE = of_shape(
    ModelShape(
        name="large", layers=16, hidden=4096, heads=32, kv_heads=8, head_size=128, ffn=14336, vocabulary=32000
    )
)


def found(memory: float, **fixed: Any) -> SearchResult:
    given = {"tp": 1, "pp": 2, "cp": 1, "microbatch": 1, "recompute": "full", **fixed}
    return search(
        LARGE, read_cluster("h100*8"), sequence=2048, batch=32, memory=memory, fixed=given, top=3,
        schedules=["1f1b", "breadth-first"],
    )  # fmt: skip


def test_weights_are_sharded_where_nothing_else_fits():
    """3.75e9 parameters: four replicas of two ranks hold 6 x 1.9e9 bytes each of whole weights and gradients."""
    for shard in ("optimizer", "gradients"):
        assert not found(13.5e9, shard=shard).plans
    result = found(13.5e9)
    best = result.best.layout
    assert best.shard == "weights"
    assert best.window is not None
    assert best.window < best.v
    assert result.best.fits
    assert result.rejections["shard"]["optimizer"].text.startswith(("does not fit", "at least"))
    wider = predict(LARGE, read_cluster("h100*8"), best.with_values(window=None), sequence=2048, batch=32)
    assert wider.peak_bytes > 13.5e9
    assert found(80e9).best.layout.shard in ("none", "optimizer")
    assert "reduce_every" in left_out_text(result)


def test_a_fixed_sharding_is_kept_and_its_window_chosen():
    result = found(80e9, shard="weights")
    assert {(plan.layout.shard, plan.layout.dp * plan.layout.cp) for plan in result.plans} == {("weights", 4)}
    given = found(80e9, shard="weights", window=2)
    assert {plan.layout.window for plan in given.plans} == {2}
    with pytest.raises(ConfigError, match="no layout of large has two on 8 devices"):
        found(80e9, shard="weights", pp=8)


def test_without_overlap_a_search_shards_only_if_nothing_else_fits():
    assert found(13.5e9, overlap=False).best.layout.shard == "weights"
    fits = found(20e9, overlap=False)
    assert not {"gradients", "weights"} & set(fits.rejections["shard"])
    assert any("nothing hides their traffic" in text for text in fits.not_compared)
