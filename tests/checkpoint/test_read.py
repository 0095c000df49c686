"""A process reads of an optimizer's state the elements that it updates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from penstock.checkpoint.convert import open_sound
from penstock.checkpoint.read import Reader
from penstock.parallel.replicas.shard_slice import ShardSlice, ShardValues


@pytest.mark.parametrize("transposed", [False, True])
def test_any_slice_of_a_parameter_has_its_elements_of_the_whole_state(
    two_checkpoints: Path, transposed: bool
):
    path = two_checkpoints / "step-00000002"
    with Reader(path, open_sound(path)) as reader:
        names = [name for name in reader.manifest.tensors if name.startswith("optimizer/exp_avg/")]
        assert {reader.tensor(name).dim() for name in names} >= {1, 2}
        for name in names:
            whole = reader.tensor(name)
            parameter = nn.Parameter(whole.t().contiguous().t() if transposed else whole)
            count = parameter.numel()
            for begin, end in (
                (0, count),
                (0, count // 2),
                (count // 3, count),
                (count // 2, count // 2 + 1),
                (-9, -1),
            ):
                part = ShardSlice.between(parameter, begin, end)
                of_process = SimpleNamespace(slice=part, entry=SimpleNamespace(parameter=parameter))
                found = reader.piece("exp_avg", name, of_process)
                assert isinstance(found, ShardValues)
                assert found.values.tolist() == part.of(whole).tolist()
