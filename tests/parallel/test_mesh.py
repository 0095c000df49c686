"""Every rank has its coordinates, and the groups follow from them."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from penstock.base.errors import ConfigError
from penstock.parallel.mesh import AXIS_NAMES, MeshShape, make_mesh, require_fit
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.groups import run_cases


def test_tensor_parallel_ranks_are_neighbours_and_stages_far_apart():
    shape = MeshShape(pp=2, dp=2, tp=2)
    assert [[shape.coordinate(r, axis) for axis in shape.axes] for r in range(8)] == [
        [0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1],
    ]  # fmt: skip
    assert shape.line(5, "tp") == [4, 5]
    assert shape.line(5, "dp") == [5, 7]
    assert shape.line(5, "pp") == [1, 5]
    assert str(shape) == "pp 2 x dp 2 x tp 2"


# the axes in their order, the other way round, and mixed
@pytest.mark.parametrize(
    "order", [AXIS_NAMES, AXIS_NAMES[::-1], (AXIS_NAMES[2], AXIS_NAMES[0], AXIS_NAMES[3], AXIS_NAMES[1])]
)
def test_rank_and_coordinates_are_inverses_in_any_order(order):
    shape = MeshShape(2, 3, 4, order, cp=2)
    for rank in range(48):
        place = {axis: shape.coordinate(rank, axis) for axis in AXIS_NAMES}
        assert shape.rank(**place) == rank
        assert shape.line(rank, order[-1]) == list(
            range(rank - place[order[-1]], rank - place[order[-1]] + shape.size(order[-1]))
        )


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"pp": 0}, "pp must be a positive number of ranks, got 0"),
        ({"tp": True}, "tp must be"),
        ({"dp": 1.5}, "dp must be"),
        ({"order": ("pp", "dp")}, "once each"),
        ({"order": ("pp", "dp", "cp")}, "once each"),
        ({"cp": 0}, "cp must be a positive"),
    ],
)
def test_shapes_that_cannot_be_are_refused(sizes, words):
    with pytest.raises(ConfigError, match=words):
        MeshShape(**sizes)


def test_unknown_axes_ranks_and_places_are_refused():
    shape = MeshShape(2, 1, 1)
    with pytest.raises(ConfigError, match=r"no axis .ddp. .did you mean .dp."):
        shape.size("ddp")
    with pytest.raises(ConfigError, match="no rank 2"):
        shape.coordinate(2, "pp")
    with pytest.raises(ConfigError, match="pp = 2 is not in a mesh"):
        shape.rank(pp=2)


def test_a_mesh_that_does_not_multiply_says_what_would_fit():
    with pytest.raises(
        ConfigError, match=r"has 4 ranks, but the launch has 8 processes; start 4 processes, or take dp = 4"
    ):
        require_fit(MeshShape(pp=2, dp=2), 8)
    with pytest.raises(ConfigError, match=r"the launch has 3 processes; start 4 processes$"):
        require_fit(MeshShape(pp=2, dp=2), 3)


def sums_over_axes(rank: int, order: tuple[str, ...]) -> None:
    mesh, shape = make_mesh(pp=2, tp=2, order=order), MeshShape(2, 1, 2, order)
    for axis in shape.axes:
        value = torch.tensor([float(10**rank)])
        dist.all_reduce(value, group=mesh.group(axis))
        assert mesh.axis(axis).size() == shape.size(axis)
        assert mesh.device_mesh.get_local_rank(axis) == mesh.coordinate(axis) == shape.coordinate(rank, axis)
        assert value.item() == sum(10**r for r in shape.line(rank, axis))


def test_groups_hold_the_ranks_of_their_line(processes: LocalProcesses):
    run_cases(processes, 4, sums_over_axes, [(AXIS_NAMES,), (("tp", "dp", "pp"),)])


def too_few(rank: int) -> None:
    with pytest.raises(ConfigError, match="has 3 ranks, but the launch has 2 processes"):
        make_mesh(pp=3)


def test_every_process_is_told_that_the_mesh_does_not_fit(processes: LocalProcesses):
    processes.run(2, too_few)


def test_a_mesh_without_processes_is_refused():
    with pytest.raises(ConfigError, match="torchrun"):
        make_mesh(dp=1)
