from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.plan.cluster import Cluster, Device, read_cluster, with_memory
from penstock.plan.explore import branch_and_bound, search_space
from penstock.plan.explore.branch_and_bound import search
from penstock.plan.explore.layout_bounds import least_seconds
from penstock.plan.explore.outlook import change_text, changes, grouped_reasons, time_shares
from penstock.plan.explore.search_result import SearchResult
from penstock.plan.explore.search_space import make_space
from penstock.plan.prediction import Prediction, predict
from penstock.plan.stage_costs import layer_times
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_profile import Profile, ProfiledLayer, of_shape
from penstock.profile.model_shape import ModelShape
from penstock.schedule.families import build_schedule
from penstock.schedule.text import write_csv
from tests.support.lanes import exhaustive
from tests.support.small_spaces import SmallSpace, every_plan, small_space


def found(small: SmallSpace, top: int = 3) -> SearchResult:
    return search(
        small.profile, small.cluster, sequence=small.sequence, batch=small.batch, fixed=small.fixed, top=top
    )


# of samples that are long enough to divide, parts of 32 tokens are allowed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "least_part"),
    [*((seed, None) for seed in range(3)), (0, 32),
     *exhaustive(*((seed, None) for seed in range(3, 20)), *((seed, 32) for seed in (2, 6, 7, 10)))],
)  # fmt: skip
def test_no_layout_of_a_small_space_is_quicker(
    seed: int, least_part: int | None, monkeypatch: pytest.MonkeyPatch
):
    small = small_space(seed)
    if least_part is not None:
        monkeypatch.setattr(search_space, "LEAST_PART", least_part)
    plans = every_plan(small)
    assert least_part is None or any(plan.layout.cp > 1 for plan in plans)
    quickest = branch_and_bound.distinct(plan for plan in plans if plan.fits)
    result = found(small)
    assert result.complete
    assert [plan.step_seconds for plan in result.plans] == pytest.approx(
        [plan.step_seconds for plan in quickest[:3]], rel=1e-9
    )
    assert all(plan.fits for plan in result.plans)


def medium(blocks: int = 16, **more: object) -> Profile:
    sizes = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_size": 128, "ffn": 14336, "vocabulary": 32000}
    return of_shape(ModelShape(name="medium", layers=blocks, **{**sizes, **more}))


def searched(cluster: str = "h100*8", batch: int = 32, **options: Any) -> SearchResult:
    return search(medium(), read_cluster(cluster), sequence=2048, batch=batch, **options)


def plans_of(result: SearchResult) -> list[tuple[str, float]]:
    return [(str(plan.layout), plan.step_seconds) for plan in result.plans]


def test_the_same_search_has_the_same_result():
    first, second = (searched("h100*4", 16, schedules=["1f1b", "zb-h1"]) for _ in range(2))
    assert plans_of(first) == plans_of(second)
    assert (first.evaluated, first.simulated) == (second.evaluated, second.simulated)


def test_an_interrupt_ends_the_search_with_the_best_so_far():
    seen: list[Prediction] = []

    def interrupt(evaluated: int, simulated: int, leader: Prediction | None) -> None:
        if leader is not None:
            seen.append(leader)
        if len(seen) == 3:
            raise KeyboardInterrupt

    result = searched(batch=64, progress=interrupt)
    assert not result.complete
    assert result.best.step_seconds == seen[-1].step_seconds
    assert result.simulated <= 6  # two a step: with ZeRO and without it


@pytest.mark.parametrize("devices", [64, *exhaustive(8, 512)])
def test_a_limit_ends_the_search_early_and_with_a_plan(devices: int):
    cluster = read_cluster(f"a100-40gb*8x{devices // 8}")
    result = search(medium(48), cluster, sequence=2048, batch=2 * devices, limit=1e-9)
    assert not result.complete
    assert result.simulated <= 2  # with ZeRO and without it
    assert result.best.fits


def test_a_search_that_ended_before_a_plan_says_so():
    cluster = read_cluster("a100-40gb*8")
    result = search(
        medium(48), cluster, sequence=2048, batch=64, limit=1e-9, fixed={"recompute": "none"}, memory=24e9
    )
    assert (result.plans, result.complete) == ((), False)
    with pytest.raises(ConfigError, match=r"the search ended after .* before it found one that fits"):
        _ = result.best


@pytest.mark.parametrize(
    ("blocks", "batch", "fixed", "message"),
    [
        (4, 9, {"dp": 8}, "a batch of 9 does not divide over 8 devices with dp=8; the nearest batch that does is 8 or 16"),
        (2, 3, {"tp": 1}, "a batch of 3 does not divide over 8 devices with tp=1; the nearest batch that does is 4"),
        (4, 8, {"pp": 8}, "medium cannot run on 8 devices with pp=8: pp x dp x cp x tp must be the devices, pp at most"),
    ],
)  # fmt: skip
def test_an_empty_space_says_why(blocks: int, batch: int, fixed: dict[str, object], message: str):
    with pytest.raises(ConfigError) as error:
        search(medium(blocks), read_cluster("h100*8"), sequence=2048, batch=batch, fixed=fixed)
    assert str(error.value).startswith(message)


def test_schedules_with_one_order_are_one_plan():
    """On one stage a rank, zb-h1 and interleaved-zb are the same order."""
    given = {"pp": 2, "v": 1, "microbatch": 1, "recompute": "none"}
    both = [
        searched("h100*2", 8, fixed=given, schedules=names)
        for names in (["interleaved-zb", "zb-h1"], ["zb-h1"], ["1f1b", "zb-h1"])
    ]
    shown = [[plan.layout.schedule for plan in result.plans] for result in both]
    assert shown == [["zb-h1"], ["zb-h1"], ["zb-h1", "1f1b"]]


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_step_takes_at_least_the_ranks_work_and_the_wait_for_the_first_op(pp: int):
    given = {"pp": pp, "dp": 4 // pp, "recompute": "none", "schedule": "gpipe"}
    space = make_space(
        medium(4), read_cluster("h100*4"), sequence=512, batch=8, fixed=given, schedules=None, devices=None
    )
    for point in space.points():
        times = layer_times(space.profile, space.cluster, point.layout, space.sequence)
        backward = np.minimum(times.backward, times.input_grad + times.weight_grad)
        work = point.microbatches * float((times.forward + backward).sum()) / pp
        # A rank waits for the stages before its own: the embedding, at least, and then a block of each.
        front = times.table.roles.index("block")
        embedding, block = float(times.forward[:front].sum()), float(times.forward[front])
        wait = sum(embedding + (rank - 1) * block for rank in range(1, pp)) / pp
        least = least_seconds(space, point, times)
        assert least == pytest.approx(work + wait, rel=1e-12)
        layout = replace(point.layout, schedule="gpipe", v=1)
        found = predict(space.profile, space.cluster, layout, sequence=space.sequence, batch=space.batch)
        assert least <= found.parts["pipeline"]


def test_the_nearest_reasons_are_simulated_ones_of_different_dimensions():
    result = searched(schedules=["1f1b", "zb-h1", "interleaved-1f1b"])
    every, three = grouped_reasons(result), grouped_reasons(result, 3)
    slower = [[result.rejections[name.split("=")[0]][values.split(", ")[0]] for name, values, _ in three]]
    assert {(values, text) for _, values, text in three} < {(values, text) for _, values, text in every}
    assert len({name for name, _, _ in three}) == 3
    assert all(reason.exact for reason in slower[0])
    assert [reason.slower for reason in slower[0]] == sorted(reason.slower for reason in slower[0])


def test_shares_of_a_step_name_what_limits_it():
    profile, cluster = medium(), read_cluster("h100*8")
    slow = replace(cluster, node=replace(cluster.node, bandwidth=1e9))
    layouts = {
        "links": (slow, "tp=8"),
        "bubble": (cluster, "pp=8,microbatch=4"),
        "compute": (cluster, "pp=2,dp=4,schedule=zb-v"),
    }
    for name, (machines, layout) in layouts.items():
        plan = predict(profile, machines, layout, sequence=2048, batch=8 if name == "bubble" else 64)
        shares = time_shares(profile, plan, 2048)
        assert sum(shares.values()) == pytest.approx(1)
        assert max(shares, key=lambda part: shares[part]) == name
    again = predict(profile, cluster, "pp=8,recompute=full", sequence=2048, batch=64)
    shares = time_shares(profile, again, 2048)
    assert shares["recompute"] == pytest.approx(shares["compute"] / 3, rel=0.1)


def test_sequence_parallelism_and_the_split_are_dimensions():
    """A large vocabulary makes the last stage slow, so that a split by cost is quicker than an even one."""
    profile = medium(24, vocabulary=256_000)
    given = {"pp": 4, "tp": 2, "schedule": "1f1b", "recompute": "full", "shard": "optimizer"}
    result = search(profile, read_cluster("h100*8"), sequence=2048, batch=64, fixed=given)
    layout = result.best.layout
    assert (layout.sequence_parallel, layout.split) == (True, "cost")
    assert result.rejections["sequence_parallel"]["false"].text.endswith("slower")
    assert result.rejections["split"]["even"].text.endswith("slower")
    for key, other in (("sequence_parallel", False), ("split", "even")):
        fixed = {**given, key: other}
        slower = search(profile, read_cluster("h100*8"), sequence=2048, batch=64, fixed=fixed).best
        assert getattr(slower.layout, key) == other
        assert slower.step_seconds > result.best.step_seconds


def test_only_the_given_schedules_are_searched(tmp_path: Path):
    """Families, files and own functions."""
    order, own = tmp_path / "mine.csv", "tests.support.own_schedules:waiting"
    write_csv(build_schedule("zb-h1", 4, 16), order)
    names = ["gpipe", str(order), own]
    result = searched(schedules=names, top=50, fixed={"tp": 1, "cp": 1, "recompute": "full", "microbatch": 1})
    by_name = {plan.layout.schedule: plan for plan in result.plans}
    assert set(by_name) == set(names)
    assert all(p.layout.pp == 4 for p in result.plans if p.layout.schedule == str(order))
    family = by_name[str(order)].layout.with_values(schedule="zb-h1", v=None)
    for name, layout in ((str(order), family), (own, by_name[own].layout)):
        again = predict(medium(), read_cluster("h100*8"), layout, sequence=2048, batch=32)
        assert by_name[name].step_seconds == pytest.approx(again.step_seconds)


def test_counts_that_an_own_function_refuses_are_left_out_and_its_mistakes_are_not():
    def of(function: str) -> SearchResult:
        fixed = {"tp": 1, "cp": 1, "recompute": "full"}
        return searched("h100*4", fixed=fixed, schedules=[f"tests.support.own_schedules:{function}"], top=50)

    assert {plan.layout.v for plan in of("folded").plans} == {2}
    for function, says in (
        ("divides_by_zero", "failed with ZeroDivisionError"),
        ("without_last_weight", "is not a valid schedule: .* is missing"),
        ("refuses", r"too few"),
    ):
        with pytest.raises(ConfigError, match=says):
            _ = of(function).best


def test_devices_and_memory_are_kept():
    given = {"pp": 2, "cp": 1, "schedule": "1f1b"}
    few = searched(devices=4, fixed=given)
    assert {plan.layout.devices for plan in few.plans} == {4}
    free = searched(fixed=given)
    cap = 0.8 * free.best.peak_bytes
    capped = searched(fixed=given, memory=cap)
    assert max(plan.peak_bytes for plan in capped.plans) <= cap
    assert capped.best.step_seconds >= free.best.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *exhaustive(2, 3, 4)])
def test_where_nothing_fits_the_smallest_layout_is_named(seed: int):
    small = small_space(seed)
    nothing = replace(small, cluster=with_memory(small.cluster, 1.0))
    least = min(plan.peak_bytes for plan in every_plan(nothing))
    cap = 0.5 * least
    result = search(
        small.profile,
        small.cluster,
        sequence=small.sequence,
        batch=small.batch,
        fixed={**small.fixed, "store": "none"},
        memory=cap,
    )
    assert result.plans == ()
    assert result.smallest is not None
    layout, size, exact = result.smallest
    assert exact
    plan = predict(small.profile, small.cluster, layout, sequence=small.sequence, batch=small.batch)
    assert plan.peak_bytes == size
    assert least <= size <= 1.05 * least
    with pytest.raises(
        ConfigError, match=r"the smallest needs [\d.]+ [GM]B of [\d.]+ [GM]B per device: pp=\d"
    ):
        _ = result.best


def test_steps_of_many_microbatches_are_predicted_in_full(monkeypatch: pytest.MonkeyPatch):
    """With every step extrapolated first, the result is that of the search that extrapolates none."""
    given = {"tp": 1, "cp": 1, "shard": "optimizer"}
    monkeypatch.setattr(branch_and_bound, "LARGE", 10**9)
    exact = searched(batch=256, top=3, fixed=given)
    monkeypatch.setattr(branch_and_bound, "LARGE", 0)
    quick = searched(batch=256, top=3, fixed=given)
    assert plans_of(quick)[0] == plans_of(exact)[0]
    assert all(plan.program is not None for plan in quick.plans)


# one that repeats from its start, one of a pattern that is searched, one of two pipes
@pytest.mark.parametrize(
    "name",
    ["1f1b", "v-half", "dualpipe", *exhaustive("gpipe", "interleaved-1f1b", "zb-h1", "zb-v", "round-trip")],
)
def test_an_extrapolated_step_is_near_the_whole_one(name: str, monkeypatch: pytest.MonkeyPatch):
    fixed = {"schedule": name, "pp": 4, "tp": 1, "microbatch": 1, "recompute": "full", "shard": "optimizer"}
    profile, cluster, batch = medium(), read_cluster("h100*8"), 2 * (40 + 2 * len(name))
    extrapolated: list[Prediction] = []

    def note(evaluated: int, simulated: int, leader: Prediction | None) -> None:
        if leader is not None and leader.program is None:
            extrapolated.append(leader)

    monkeypatch.setattr(branch_and_bound, "LARGE", 0)
    search(profile, cluster, sequence=1024, batch=batch, fixed=fixed, progress=note)
    assert extrapolated
    for quick in extrapolated:
        whole = predict(profile, cluster, quick.layout, sequence=1024, batch=batch)
        assert quick.step_seconds == pytest.approx(whole.step_seconds, rel=0.01)


def test_a_measured_backward_may_take_less_than_its_halves():
    """Microbatches of two samples take less time, but not by the sum of the halves, which would prune them."""

    def cost(scale: float, forward: float, half: float, whole: float) -> LayerCost:
        one, halves, both = ((DeviceWork("seconds", scale * amount),) for amount in (forward, half, whole))
        return LayerCost(
            forward=one, input_grad=halves, weight_grad=halves, backward=both, parameters=10, output_bytes=8
        )

    def kind(scale: float) -> ProfiledLayer:
        return ProfiledLayer(((1, cost(scale, 0.5, 0.5, 1.0)), (2, cost(scale, 1.0, 2.0, 1.5))))

    layers = (("e", "embedding", 0), *((f"b{n}", "block", 1) for n in range(6)), ("h", "head", 2))
    kinds = (kind(0.1), kind(1.0), kind(0.2))
    profile = Profile(
        name="measured", source="measured", shape=None, sequence=1, dtype="fp32", kinds=kinds, layers=layers
    )
    device = Device(memory=1e9, matmul={"fp32": 1e9}, memory_bandwidth=1e9)
    cluster = Cluster(name="two", device=device, ranks_per_node=2, nodes=1, dtype="fp32")
    small = SmallSpace(profile, cluster, 1, 8, {"pp": 2, "recompute": "none", "split": "even"})
    quickest = min(every_plan(small), key=lambda plan: plan.step_seconds)
    assert quickest.layout.microbatch > 1
    result = found(small, top=1)
    assert result.complete
    assert result.best.step_seconds == pytest.approx(quickest.step_seconds, rel=1e-9)


def test_layouts_that_differ_in_v_alone_have_one_row():
    given = {"pp": 2, "dp": 1, "tp": 1, "microbatch": 1, "recompute": "none"}
    result = search(
        medium(8), read_cluster("h100*2"), sequence=512, batch=8, fixed=given, schedules=["interleaved-1f1b"]
    )
    (plan,) = result.plans
    alone = [
        predict(
            medium(8), read_cluster("h100*2"), replace(plan.layout, v=v), sequence=512, batch=8
        ).step_seconds
        for v in (2, 4)
    ]
    assert plan.step_seconds == pytest.approx(min(alone), rel=1e-9)


def test_where_a_pipeline_is_slower_the_result_says_not_to_pipeline():
    """Whole replicas fit, and in a pipeline of 1F1B ranks wait."""
    given = {"tp": 1, "cp": 1, "schedule": "1f1b"}
    result = search(medium(4), read_cluster("h100*4"), sequence=2048, batch=32, fixed=given)
    assert result.best.layout.pp == 1
    nearest = min(result.rejections["pp"].values(), key=lambda reason: reason.slower)
    assert result.without_pipeline.startswith("Do not pipeline here: data parallelism alone is best; pp=")
    assert result.without_pipeline.endswith(f", the quickest with a pipeline, is {nearest.text}.")
    (pp,) = [pp for pp, reason in result.rejections["pp"].items() if reason is nearest]
    tie = replace(result, rejections={"pp": {pp: nearest._replace(slower=0.009)}})
    assert tie.without_pipeline.startswith(
        "A pipeline gains nothing here: data parallelism alone is best; pp="
    )
    piped = search(medium(4), read_cluster("h100*4"), sequence=512, batch=4, fixed={"pp": 4})
    assert piped.without_pipeline == ""
    alone = search(medium(4), read_cluster("h100*1"), sequence=512, batch=4, fixed={"pp": 1})
    assert alone.without_pipeline == ""


def test_where_no_plan_fits_after_a_change_the_space_is_searched_anew():
    profile, cluster = medium(8), read_cluster("h100*2")
    everything = search(
        profile, cluster, sequence=2048, batch=16, fixed={"pp": 2, "recompute": "none"}, top=1
    )
    tight = search(
        profile,
        cluster,
        sequence=2048,
        batch=16,
        fixed={"pp": 2},
        top=1,
        memory=1.02 * everything.best.peak_bytes,
    )
    limited = with_memory(cluster, tight.best.capacity)
    assert tight.best.peak_bytes > 0.75 * limited.device.usable
    found = dict(changes(profile, limited, tight, 2048, 16))["3/4 of the memory"]
    assert found is not None
    assert found.peak_bytes <= 0.75 * limited.device.usable
    assert found.layout not in [plan.layout for plan in tight.plans]
    assert change_text(tight, found) == f"none of these plans fits; then {found.layout}"
    assert change_text(tight, None) == "none found that fits"
    assert change_text(tight, tight.best) == "the same plan"


def test_sharding_asked_for_on_one_device_is_answered_in_its_own_words():
    with pytest.raises(ConfigError) as error:
        search(medium(4), read_cluster("h100*1"), sequence=512, batch=4, fixed={"shard": "weights"})
    assert str(error.value).startswith(
        "shard=weights divides weights over replicas (dp x cp of them), and no layout of"
    )
    said = predict(medium(4), read_cluster("h100*1"), "shard=optimizer", sequence=512, batch=4).assumptions
    assert said[-1].startswith("shard=optimizer changes nothing: replicas divide it")
