"""Splits within the memory of devices, which are given here: the arithmetic is the same for every GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_profile import Profile, ProfiledLayer, Role
from penstock.runtime.model import measured_split
from penstock.runtime.model.measured_split import blocks_by_cost
from penstock.runtime.model.stage_memory import make_stage_memory
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import build_schedule
from penstock.stage.layers import as_layers

COST = LayerCost(
    forward=(DeviceWork("seconds", 1.0),), saved_bytes=100, input_bytes=10, parameters=10, transient_bytes=40
)
EMBEDDING = replace(COST, forward=(), saved_bytes=0, parameters=50, recomputes=False)


def profile_of(*costs: LayerCost, **others: Any) -> Profile:
    roles: list[Role] = ["embedding" if cost is EMBEDDING else "block" for cost in costs]
    return Profile(
        name="given",
        source="measured",
        sequence=8,
        kinds=tuple(ProfiledLayer(((1, cost),)) for cost in costs),
        layers=tuple((str(n), role, n) for n, role in enumerate(roles)),
        **others,
    )


def split_within(profile: Profile, schedule: str, free: dict[int, float], **options: Any) -> Any:
    made = build_schedule(schedule, options.pop("ranks", 2), 4)
    recompute = options.pop("recompute", "none")
    memory = make_stage_memory(profile, made, recompute, free)
    return blocks_by_cost(profile, made.stages, 1, (), memory)


def test_stages_get_fewer_blocks_where_they_do_not_fit():
    profile = profile_of(*[COST] * 6)
    # A block has 4 x 4 x 10 bytes of states, and 100 for each microbatch in flight: two on the first rank, one on the last.
    assert blocks_by_cost(profile, 2, 1) == (3, 3)
    first, last, passing = 160 + 200, 160 + 100, 40
    exact = {0: (2 * first + passing) / 0.9, 1: (4 * last + passing) / 0.9}
    assert split_within(profile, "1f1b", exact) == (2, 4)
    assert split_within(profile, "1f1b", exact | {0: exact[0] - 2}) is None
    assert split_within(profile, "1f1b", {0: exact[0] - 2}) == (1, 5)  # nothing limits the last
    # All four are in flight on both ranks.
    assert split_within(profile, "gpipe", exact) is None
    # Only inputs are kept, and what one layer saves besides is back while it is in its backward.
    kept = {0: (4 * (160 + 20) + 90 + passing) / 0.9, 1: 2 * (160 + 10 + 90 + passing)}
    assert split_within(profile, "1f1b", kept, recompute="full") == (4, 2)
    assert split_within(profile, "1f1b", kept, recompute=2) is None


def test_what_is_not_trained_has_no_gradient_and_dtypes_have_their_size():
    frozen = replace(COST, parameters=0, frozen_parameters=10, frozen_bytes=5)
    free = {0: (2 * (160 + 200) + 40) / 0.9}
    assert split_within(profile_of(*[COST] * 6), "1f1b", free) == (2, 4)
    assert split_within(profile_of(*[frozen] * 6), "1f1b", free) == (3, 3)
    assert split_within(profile_of(*[COST] * 6, dtype="bf16"), "1f1b", {0: 700 / 0.9}) == (2, 4)
    assert split_within(profile_of(*[COST] * 6, dtype="bf16", autocast=True), "1f1b", {0: 700 / 0.9}) == (
        1,
        5,
    )


def test_embeddings_stay_with_the_first_stage_and_stages_share_their_rank():
    profile = profile_of(EMBEDDING, *[COST] * 6)
    assert blocks_by_cost(profile, 2, 1) == (3, 3)
    assert split_within(profile, "1f1b", {0: (4 * 4 * 50 + 160 + 200 + 40) / 0.9}) == (1, 5)
    assert split_within(profile, "1f1b", {0: (4 * 4 * 50 + 40) / 0.9}) == (0, 6)
    # In a V both ends are on rank 0, which holds four microbatches of its two stages: two of each in the mean.
    ends = split_within(profile_of(*[COST] * 12), "zb-v", {0: 2 * (2 * (160 + 200) + 40) / 0.9})
    assert ends == (2, 4, 4, 2)
    # Both ranks have each stage of two pipelines, and the one with less memory limits it.
    assert split_within(profile_of(*[COST] * 4), "dualpipe", {1: 10.0}) is None


def blocks_of_stages(rank: int, profile: Profile) -> list[int]:
    free = {0: 2.9 * 4 * 4 * (64 * 64 + 64) / 0.9} if rank == 0 else {}
    measured_split.free_memory = lambda *_: free
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    with penstock.Pipeline(
        net, nn.functional.mse_loss, microbatches=4, split={"measured": profile}, ranks=2
    ) as pipe:
        x = torch.randn(4, 64)
        pipe.step(x, x)
        trace = pipe.gather_trace()
        assert trace is not None
        return [len(names) for names in trace.info["split"]]


@pytest.mark.slow
def test_every_process_knows_the_memory_of_all(processes: LocalProcesses):
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    x = torch.randn(2, 64)
    profile = penstock.profile_layers(net, x, target=x, loss_fn=nn.functional.mse_loss, measure=False)
    try:
        assert processes.run(2, blocks_of_stages, profile) == [[2, 4], [2, 4]]
    finally:
        processes.close()  # what replaced a function ends with them


def test_a_split_by_a_profile_keeps_to_the_memory_and_warns_if_none_does(monkeypatch: pytest.MonkeyPatch):
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    x = torch.randn(2, 64)
    profile = penstock.profile_layers(net, x, target=x, loss_fn=nn.functional.mse_loss, measure=False)
    schedule = build_schedule("1f1b", 2, 4)
    free = dict[int, float]()
    # What no machine without two GPUs can say; `free_memory` itself is tested on one.
    monkeypatch.setattr(measured_split, "free_memory", lambda *_: free)

    def split(recompute: str | None = "none") -> Any:
        return measured_split.resolve_split(
            {"measured": profile}, as_layers(net), nn.functional.mse_loss, schedule, world=None, seed=0,
            devices=[torch.device("cuda:0"), torch.device("cuda:1")], recompute=recompute,
        )  # fmt: skip

    states = 4 * 4 * (64 * 64 + 64)
    assert split() == (3, 3)
    free |= {0: 2.9 * states / 0.9, 1: 1e9}
    assert split() == (2, 4)
    assert split(None) == (3, 3)
    free[1] = 2.9 * states
    with pytest.warns(
        UserWarning, match=r"no split of the model fits .* of \[3, 3\] blocks, are of equal time"
    ):
        assert split() == (3, 3)
