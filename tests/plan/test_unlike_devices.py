"""Plans for groups of unlike devices: who has which blocks, what messages cost, what fits, and which groups to leave out."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.plan.cluster import (
    Between,
    Cluster,
    GroupedCluster,
    LinkSpeed,
    each_group,
    joined,
    read_cluster,
    sized_name,
    with_memory,
)  # fmt: skip
from penstock.plan.explore.branch_and_bound import distinct, search
from penstock.plan.explore.outlook import changes, headline
from penstock.plan.plan_page import write_plan
from penstock.plan.prediction import predict
from penstock.plan.rank_devices import arrangements
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import layer_times, split_counts
from penstock.schedule.placement import Placement
from tests.support.planning import timed_profile
from tests.support.small_spaces import SmallSpace, every_plan
from tests.support.unlike import SEQUENCE, group, profile_of, unlike

FAST, SLOW = group("fast", 2.0), group("slow", 1.0)
UPDATE = 32 / 1e9
"""Seconds in which a device updates a parameter."""


def written(folder: Path, text: str) -> Cluster:
    path = folder / "mine.toml"
    path.write_text(text)
    return read_cluster(path)


TWO = '[[group]]\ndevice = "rtx-4090"\nranks_per_node = 1\n[[group]]\ndevice = "{}"\nranks_per_node = 1\n'


def test_groups_are_read_from_the_command_line_and_from_a_file(tmp_path: Path):
    cluster = read_cluster("rtx-4090*1+rtx-3090*2x3")
    assert isinstance(cluster, GroupedCluster)
    assert (cluster.name, cluster.devices) == ("rtx-4090*1+rtx-3090*2x3", 7)
    assert cluster.groups == (read_cluster("rtx-4090*1"), read_cluster("rtx-3090*2x3"))
    assert cluster.link_between == LinkSpeed(5e-5, 1.25e9)  # the slower one of their networks
    assert written(tmp_path, TWO.format("rtx-3090")) == read_cluster("rtx-4090*1+rtx-3090*1")
    near = written(tmp_path, TWO.format("rtx-3090") + "[between]\nsame_host = true\nlatency = 2e-5")
    assert isinstance(near, GroupedCluster)
    assert near.link_between == LinkSpeed(2e-5, 31.5e9)
    own = written(
        tmp_path,
        '[[group]]\nname = "mine"\ndtype = "fp32"\ndevice = {memory = 1e9, matmul = {fp32 = 1e12}, memory_bandwidth = 1e9}\n'
        '[[group]]\ndevice = {memory = 2e9, matmul = {fp32 = 2e12}, memory_bandwidth = 1e9}\ndtype = "fp32"\n',
    )
    assert sized_name(own) == "mine*1+mine-1*1"


def test_the_example_of_the_module_joins_a_group_with_another(tmp_path: Path):
    from penstock.plan import cluster as module

    lines = (module.__doc__ or "").split("``[[group]]`` for each::\n", 1)[1].splitlines()
    text = "\n".join(line.strip() for line in lines)
    assert isinstance(
        written(tmp_path, '[[group]]\ndevice = "rtx-3090"\nranks_per_node = 1\n' + text), GroupedCluster
    )


def test_the_example_of_the_docs_is_a_cluster(tmp_path: Path):
    page = (Path(__file__).parents[2] / "docs" / "unlike_devices.md").read_text()
    cluster = written(tmp_path, page.split("```toml\n", 1)[1].split("```", 1)[0])
    assert isinstance(cluster, GroupedCluster)
    assert (cluster.link_between, cluster.between.same_host) == (LinkSpeed(1e-5, 12e9), True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("group = 3", r"groups are tables of the name \[\[group\]\]"),
        (
            '[[group]]\ndevice = "rtx-409"',
            r"group 0: device must be a preset or a table, got 'rtx-409' \(did you mean",
        ),
        ('[[group]]\ndevice = "rtx-4090"\nnods = 2', r"group 0: no key nods \(did you mean 'nodes'"),
        (
            TWO.format("a10") + "[between]\nbandwith = 1e9",
            r"between: no key bandwith \(did you mean 'bandwidth'\?\)",
        ),
        (TWO.format("a10") + "[between]\nbandwidth = 0", "between: bandwidth must be greater than 0"),
        (TWO.format("a10") + "[network]\nbandwidth = 1e9", "no key network beside groups"),
        (
            TWO.format("a10") + "nodes = 2\n[between]\nsame_host = true",
            "same_host is for groups of one machine",
        ),
        ('[[group]]\ndevice = "gb200"\nnodes = 40', "gb200 has links for 18 nodes"),
    ],
)
def test_a_file_of_groups_that_means_nothing_is_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        written(tmp_path, text)


def test_more_groups_than_a_search_can_order_and_groups_without_a_common_dtype_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="at most 3 groups of unlike devices, got 4"):
        read_cluster("rtx-4090*1+rtx-3090*1+a10*1+l40s*1")
    other = replace(SLOW, dtype="bf16", device=replace(SLOW.device, matmul={"bf16": 1e12}))
    with pytest.raises(ConfigError, match=r"no common dtype \(fast: fp32; slow: bf16\)"):
        joined([FAST, other], Between())
    assert read_cluster("rtx-4090*1+v100*1").dtype == "fp16"
    (tmp_path / "two.toml").write_text(TWO.format("rtx-3090"))
    with pytest.raises(ConfigError, match="has groups with sizes of their own"):
        read_cluster(f"{tmp_path / 'two.toml'}*2")


def test_alike_devices_that_the_same_links_join_are_a_cluster_as_any_other(tmp_path: Path):
    assert read_cluster("rtx-4090*1+rtx-4090*1") == read_cluster("rtx-4090*1x2")
    assert read_cluster("h100*8x2+h100*8") == read_cluster("h100*8x3")
    assert written(tmp_path, TWO.format("rtx-4090") + "[between]\nsame_host = true") == read_cluster(
        "rtx-4090*2"
    )
    assert isinstance(
        written(tmp_path, TWO.format("rtx-4090") + "[between]\nbandwidth = 1e8"), GroupedCluster
    )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v", "gpipe"])
def test_alike_devices_in_groups_take_exactly_as_long_as_without(schedule: str):
    links = {"node": LinkSpeed(0.25, 40.0), "network": LinkSpeed(0.5, 20.0)}
    one = group("same", 1.5, ranks_per_node=1, **links)
    grouped = unlike(one, replace(one, name="other", op_overhead=1e-9))
    plain = replace(one, nodes=2)
    layout = Layout(pp=2, schedule=schedule, split="cost")
    ours, theirs = (predict(profile_of(8, 0.5, 1.5), each, layout, batch=8) for each in (grouped, plain))
    assert ours.step_seconds == pytest.approx(theirs.step_seconds, rel=1e-8)
    assert (ours.memory, ours.mfu, ours.capacity) == (
        theirs.memory,
        pytest.approx(theirs.mfu),
        theirs.capacity,
    )
    assert ours.costs is not None
    assert theirs.costs is not None
    assert ours.costs.counts == theirs.costs.counts


def test_a_device_of_twice_the_speed_has_twice_the_blocks_and_the_step_is_exact():
    plan = predict(profile_of(9), unlike(FAST, SLOW), "pp=2,split=cost", batch=1)
    assert plan.costs is not None
    assert plan.costs.counts == (6, 3)
    # 6 blocks at 2 TFLOP/s and 3 at 1 TFLOP/s take 3 s forward and 6 s backward on either device.
    assert plan.parts["pipeline"] == 3 + 3 + 6 + 6
    assert plan.parts["optimizer"] == pytest.approx(60 * UPDATE)
    # 3 x 9 TFLOPs, over devices that reach 3 TFLOP/s together.
    assert plan.mfu == pytest.approx(27 / (3 * plan.step_seconds))
    other = predict(profile_of(9), unlike(SLOW, FAST), "pp=2,split=cost", batch=4)
    assert other.costs is not None
    assert other.costs.counts == (3, 6)
    assert (other.devices, other.parts["pipeline"]) == (("slow", "fast"), 4 * 9 + 9)


def test_embedding_and_head_take_the_time_of_their_own_device():
    # A head of 6 TFLOPs is 6 blocks more: 3 + 12 / 2 on the fast device, 6 on the slow one, if it has no head.
    profile = profile_of(9, head=6.0)
    for groups, counts in (((SLOW, FAST), (5, 4)), ((FAST, SLOW), (9, 0))):
        plan = predict(profile, unlike(*groups), "pp=2,split=cost", batch=1)
        assert plan.costs is not None
        assert plan.costs.counts == counts


def test_messages_take_the_link_between_their_ranks():
    two = {"ranks_per_node": 2, "node": LinkSpeed(1.0), "network": LinkSpeed(2.0)}
    groups = replace(FAST, nodes=2, **two), replace(SLOW, **two)
    cluster = unlike(*groups, latency=4.0, bandwidth=10.0)
    plan = predict(profile_of(6), cluster, "pp=6,split=1+1+1+1+1+1", batch=1)
    forward = 4 * 0.5 + 2 * 1.0
    # Within a node 1 s, between nodes of a group 2 s, between groups 4 s and 10 bytes at 10 bytes/s; there and back.
    assert plan.parts["pipeline"] == 3 * forward + 2 * (1 + 2 + 1 + 5 + 1)
    tensor = predict(profile_of(6), cluster, "pp=3,dp=2,split=even", batch=2)
    assert tensor.parts["pipeline"] == 3 * 2 * (0.5 + 0.5 + 1) + 2 * (2 + 5)


def test_a_rank_has_as_many_blocks_as_fit_on_its_device_and_the_fullest_device_is_named():
    # A block has 160 bytes of states and 100 bytes of activations of each of two microbatches; messages are the rest.
    small = group("small", 2.0, memory=1900)
    plan = predict(profile_of(9), unlike(small, SLOW), "pp=2,split=cost", batch=4)
    assert plan.costs is not None
    assert (plan.costs.counts, plan.fits, plan.devices[plan.fullest]) == ((5, 4), True, "small")
    assert (plan.capacity, plan.capacities) == (1900, (1900, 1e6))
    assert not predict(profile_of(9), unlike(small, SLOW), "pp=2,split=6+3", batch=4).fits
    # The slow device has 4 blocks of 300 bytes: less than the other, of more of its memory.
    tight = predict(profile_of(9), unlike(small, group("tight", 1.0, memory=1100)), "pp=2,split=5+4", batch=4)
    assert tight.devices[tight.fullest] == "tight"
    assert (tight.capacity, tight.peak_bytes) == (1100, tight.memory[1].total)
    assert tight.peak_bytes < tight.memory[0].total
    # What fits on no device is split by time, so that the step is still predicted.
    none = predict(profile_of(9), unlike(*(replace(g, device=replace(g.device, memory=200)) for g in (FAST, SLOW))),
                   "pp=2,split=cost", batch=4)  # fmt: skip
    assert none.costs is not None
    assert (none.costs.counts, none.fits) == ((6, 3), False)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_other_split_has_a_busiest_rank_with_less_work(data: st.DataObject):
    ranks = data.draw(st.integers(2, 3))
    v = data.draw(st.integers(1, 2))
    speeds = data.draw(
        st.lists(st.sampled_from((0.5, 1.0, 1.7, 4.0)), min_size=ranks, max_size=ranks, unique=True)
    )
    embedding, head = (data.draw(st.sampled_from((0.0, 0.3, 2.5))) for _ in range(2))
    stages = ranks * v
    blocks = data.draw(st.integers(stages, 8))
    most = data.draw(st.none() | st.lists(st.integers(1, blocks), min_size=ranks, max_size=ranks))
    cluster = unlike(*(group(f"g{n}", speed) for n, speed in enumerate(speeds)))
    layout = Layout(pp=ranks, split="cost")
    placement = Placement.loop(ranks, v)
    times = layer_times(profile_of(blocks, embedding, head), cluster, layout, SEQUENCE)
    found = split_counts(times, layout, placement, most)

    def work(counts: tuple[int, ...]) -> float:
        load = np.zeros(ranks)
        for stage, count in enumerate(counts):
            ends = embedding * (stage == 0) + head * (stage == stages - 1)
            load[stage % ranks] += (count + ends) / speeds[stage % ranks]
        return float(load.max())

    least = [int(not (n == 0 and embedding) and not (n == stages - 1 and head)) for n in range(stages)]
    choices = [
        counts
        for counts in product(range(blocks + 1), repeat=stages)
        if sum(counts) == blocks
        and all(count >= few for count, few in zip(counts, least, strict=True))
        and (most is None or all(sum(counts[r::ranks]) <= most[r] for r in range(ranks)))
    ]
    assume(choices)
    assert found in choices
    assert work(found) == pytest.approx(min(map(work, choices)))


def test_what_groups_cannot_do_is_refused_by_name():
    cluster = unlike(FAST, SLOW)
    cases = [
        (
            "pp=2,schedule=chimera",
            "a schedule with copies of stages is planned for alike devices alone",
        ),
        ("pp=2,store=host", "store=host is planned for alike devices"),
        ("pp=1,dp=2", r"pp=1 ranks of 2 devices \(dp x cp x tp\) that are of one group"),
        ("pp=3", "needs 3 devices"),
    ]
    for layout, message in cases:
        with pytest.raises(ConfigError, match=message):
            predict(profile_of(8), cluster, layout, batch=4)
    with pytest.raises(ConfigError, match=r"seconds measured on one machine, and .* has unlike devices"):
        predict(timed_profile(8), cluster, "pp=2", batch=4)
    with pytest.raises(ConfigError, match="devices are chosen by group"):
        search(profile_of(8), cluster, sequence=SEQUENCE, batch=4, devices=1)
    with pytest.raises(ConfigError, match="the memory limit must be above 0 and at most"):
        with_memory(cluster, 2e6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_arrangement_of_a_small_cluster_is_quicker(seed: int):
    rng = np.random.default_rng(seed)
    profile = profile_of(5, *rng.choice((0.0, 0.7, 2.0), 2).tolist())
    groups = [
        group(
            name, float(speed), float(rng.choice((900, 1500, 4000))), ranks_per_node=int(rng.choice((1, 2)))
        )
        for name, speed in zip("ab", rng.choice((0.5, 1.0, 3.0), 2, replace=False), strict=True)
    ]
    cluster = unlike(*groups, latency=float(rng.choice((0.0, 0.3, 5.0))), bandwidth=1e3)
    families = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b")
    plans = [
        plan
        for arranged in arrangements(cluster)
        for plan in every_plan(SmallSpace(profile, arranged, SEQUENCE, 4, {}), families)
    ]
    quickest = distinct(plan for plan in plans if plan.fits)
    result = search(profile, cluster, sequence=SEQUENCE, batch=4, schedules=families, top=3)
    assert result.complete
    assert [plan.step_seconds for plan in result.plans] == pytest.approx(
        [p.step_seconds for p in quickest[:3]]
    )
    assert all(plan.fits for plan in result.plans)


def found(cluster: Cluster, blocks: int = 12, batch: int = 8, **options: object):
    given = {"schedules": ["1f1b"], **options}
    return search(profile_of(blocks), cluster, sequence=SEQUENCE, batch=batch, **given)


def test_a_search_places_groups_in_the_better_order_and_says_so():
    # 1F1B holds two microbatches on the first rank, which has most memory here.
    small, large = group("small", 1.0, memory=1900), group("large", 1.0, memory=1e6)
    result = found(unlike(small, large), schedules=["1f1b"], fixed={"recompute": "none"}, batch=32)
    assert result.best.devices == ("large", "small")
    assert sized_name(result.best.cluster) == "large*1+small*1"
    assert "slower" in result.rejections["devices"]["small*1+large*1"].text
    (sentence, *_) = headline(profile_of(12), result, SEQUENCE)
    assert sentence.endswith("on large*1, then small*1")
    again = predict(profile_of(12), result.best.cluster, result.best.layout, sequence=SEQUENCE, batch=32)
    assert again.step_seconds == result.best.step_seconds


def test_the_page_and_the_result_name_the_devices_of_every_plan(tmp_path: Path):
    profile, cluster = profile_of(12), unlike(FAST, SLOW)
    result = found(cluster, top=3)
    assert len(result.devices) == len(result.plans) > 1
    assert result.devices[0] in ("fast*1+slow*1", "slow*1+fast*1")
    page = write_plan(
        tmp_path / "plan.html", profile, cluster, result, sequence=SEQUENCE, batch=8
    ).read_text()
    cells = re.findall(r"<td[^>]*>((?:fast|slow)\*1(?:\+\w+\*1)?)</td>", page)
    assert cells[: len(result.devices)] == list(result.devices)
    assert found(FAST, top=3).devices == ()


@pytest.mark.parametrize("between", [{"latency": 1e3}, {}])
def test_a_device_that_slows_the_others_down_is_left_out(between: dict[str, float]):
    slower = replace(SLOW, device=replace(SLOW.device, matmul={"fp32": 1e12 if between else 1e9}))
    cluster = unlike(FAST, slower, **between)
    result = found(cluster)
    assert result.best.cluster == FAST
    assert result.without_devices.startswith("Leave slow*1 out: ")
    assert "the quickest with it, is" in result.without_devices
    alone = found(FAST)
    assert result.best.step_seconds == alone.best.step_seconds
    assert headline(profile_of(12), result, SEQUENCE)[0] == result.without_devices
    assert found(unlike(FAST, SLOW)).without_devices == ""
    under = changes(profile_of(12), cluster, result, SEQUENCE, 8)
    assert all(best is not None for _, best in under)


def test_groups_without_a_layout_for_a_batch_cannot_run_and_others_can():
    result = found(unlike(FAST, SLOW), fixed={"pp": 1})
    assert result.best.cluster == FAST
    assert result.rejections["devices"]["fast*1+slow*1"].text == "cannot run"
    assert result.without_devices == "Leave slow*1 out: no layout with it fits or can run."
    with pytest.raises(ConfigError, match="cannot run on 2 devices with pp=3"):
        found(unlike(FAST, SLOW), fixed={"pp": 3})


def test_where_no_group_has_the_memory_the_smallest_layout_is_given_as_a_share():
    small = each_group(
        unlike(FAST, SLOW), lambda each: replace(each, device=replace(each.device, memory=300))
    )
    result = found(small, fixed={"recompute": "none", "store": "none"})
    with pytest.raises(ConfigError, match=r"the smallest needs [0-9,]+% of a device's memory: pp=2"):
        _ = result.best


def test_replicas_of_a_rank_are_within_its_group():
    eight, four = group("fast", 4.0, ranks_per_node=8), group("slow", 1.0, ranks_per_node=4)
    result = search(
        profile_of(12), unlike(eight, four), sequence=SEQUENCE, batch=16, schedules=["1f1b"], top=100,
        fixed={"microbatch": 1, "recompute": "none", "shard": "none"},
    )  # fmt: skip
    whole = [plan.layout for plan in result.plans if len(plan.devices) > 1]
    # 8 + 4 devices have 2 + 1 ranks of 4, 4 + 2 of 2, and 8 + 4 of one.
    assert {(layout.pp, layout.dp) for layout in whole} == {(3, 4), (6, 2), (12, 1)}


def test_groups_in_a_group_are_refused(tmp_path: Path):
    (tmp_path / "two.toml").write_text(TWO.format("rtx-3090"))
    with pytest.raises(ConfigError, match="a group has alike devices; write all groups into one file"):
        read_cluster(f"{tmp_path / 'two.toml'}+h100*8")
