from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock import ExecutionOptions, MeshShape, ParallelOptions, Pipeline
from penstock.base.errors import ConfigError
from penstock.runtime.workers.agreement import require_same
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.groups import outcome, run_cases

SAME: dict[str, object] = {"microbatches": 4}
DIFFERENT: list[tuple[str, dict[str, object], dict[str, object], str]] = [
    ("microbatches", {"microbatches": 2}, {}, "microbatches is 2 on rank 0"),
    ("schedule", {"schedule": "gpipe"}, {}, "schedule is 'gpipe'"),
    ("virtual stages", {"schedule": "interleaved-1f1b", "virtual_stages": 1},
     {"schedule": "interleaved-1f1b", "virtual_stages": 2}, "placement of the stages"),
    ("split", {"split": [1, 3]}, {}, "split is [1, 3]"),
    ("mesh", {"mesh": MeshShape(dp=2), "microbatches": 2}, {}, "mesh is"),
    ("recompute", {"recompute": "full"}, {}, "recompute is 'full'"),
    ("autocast", {"autocast": torch.bfloat16}, {}, "autocast is torch.bfloat16"),
    ("seed", {"seed": 1}, {}, "seed is 1"),
    ("reduction", {"reduction": "sum"}, {}, "reduction is 'sum'"),
    ("weights", {"reduction": torch.numel}, {"reduction": len}, "reduction is "),
    ("timeout", {"timeout": 50.0}, {}, "timeout is 50.0"),
    ("parallel", {"parallel": ParallelOptions(check_replicas=5)}, {}, "parallel.check_replicas is 5"),
    ("execution", {"execution": ExecutionOptions(strict=True)}, {}, "execution.strict is True"),
    ("layers", {"layers": 5}, {}, "number of layers is"),
    ("width", {"width": 6}, {}, "parameter 0."),
]  # fmt: skip


def model(layers: int = 4, width: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def refused(rank: int, options: dict[str, object]) -> str:
    sizes = {name: options.pop(name) for name in ("layers", "width") if name in options}
    return outcome(lambda: Pipeline(model(**sizes), nn.functional.mse_loss, **{**SAME, **options}).close())


def case(rank: int, number: int) -> str:
    torch.set_num_threads(1)
    return refused(rank, dict(DIFFERENT[number][1 + rank]))


def frozen_on_one(rank: int) -> str:
    net = model()
    net[0].requires_grad_(rank > 0)
    with pytest.raises(ConfigError) as told:
        Pipeline(
            net,
            nn.functional.mse_loss,
            microbatches=2,
            mesh=MeshShape(pp=2, dp=2),
            execution=ExecutionOptions(first_timeout=60),
        )
    return str(told.value)


@pytest.mark.slow
def test_what_the_replicas_of_one_stage_differ_in_is_told_to_all_stages(processes: LocalProcesses):
    told = processes.run(4, frozen_on_one)
    assert "require a gradient: replica 0 has 2, replica 1 has 4" in told[0]
    assert len(set(told)) == 1


def test_pipelines_that_differ_are_refused_by_name(processes: LocalProcesses):
    told = run_cases(processes, 2, case, [(number,) for number in range(len(DIFFERENT))])
    for (name, _, _, shown), (first, second) in zip(DIFFERENT, told, strict=True):
        assert first == second, name
        assert shown in first, (name, first)
        assert "on rank 0 (host " in first
        assert "on rank 1 (host " in first


def with_what_may_differ(rank: int) -> float:
    torch.set_num_threads(1)
    execution = ExecutionOptions(threads=1 + rank)
    with Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=4, execution=execution) as pipe:
        loss = pipe.step(*plain.batch(0, 8)).loss
    assert loss is not None
    return loss.item()


def warned(rank: int, seed: int) -> list[str]:
    torch.manual_seed(rank * seed)
    net = model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Pipeline(net, nn.functional.mse_loss, microbatches=2).close()
    return [str(each.message) for each in caught]


def test_other_weights_on_each_process_are_told_once(processes: LocalProcesses):
    (alike, other) = run_cases(processes, 2, warned, [(0,), (1,)])
    assert alike == [[], []]
    assert other[1] == []
    assert len(other[0]) == 1
    assert "were given models with other weights" in other[0][0]


def test_hosts_may_have_other_numbers_of_threads(processes: LocalProcesses):
    first, second = processes.run(2, with_what_may_differ)
    assert first == second


def test_of_many_ranks_those_with_the_same_difference_are_named(processes: LocalProcesses):
    told = processes.run(4, seeds)
    assert len(set(told)) == 1
    assert "seed is 0 on rank 0" in told[0]
    assert "and 7 on ranks 1, 3 (host " in told[0]


def seeds(rank: int) -> str:
    return refused(rank, {"seed": (0, 7, 0, 7)[rank]})


@pytest.mark.parametrize(
    ("odd", "where"),
    [
        ([3], "rank 3"),
        ([1, 2], "ranks 1, 2"),
        ([*range(1, 9)], "ranks 1, 2, 3, 4, 5, 6, 7, 8"),
        ([*range(1, 10)], "ranks 1, 2, 3, 4, 5, 6, 7, 8, …"),
    ],
)
def test_the_first_ranks_with_a_difference_are_named(odd: list[int], where: str):
    facts = {f"fact {n}": str(n) for n in range(6)}

    def gather(value: object, group: None, action: str) -> list:
        if isinstance(value, dict):
            return [{name: "other" if n in odd else text for name, text in facts.items()} for n in range(12)]
        digest, host, note = value
        return [(digest + "x" if n in odd else digest, f"{host}{n}", note) for n in range(12)]

    with pytest.raises(ConfigError) as error:
        require_same(facts, SimpleNamespace(rank=0, gather=gather))
    text = str(error.value)
    assert text.startswith("the processes of this run differ: fact 0 is 0 on rank 0 (host ")
    assert f"and other on {where} (host " in text
    assert "fact 4 is" in text
    assert "; and 1 more. Start all" in text
    require_same(facts, SimpleNamespace(rank=0, gather=lambda value, *_: [value] * 3))


def test_layers_that_are_built_later_are_compared_by_name(processes: LocalProcesses):
    for first, second in run_cases(processes, 2, named, [("Linear",), ("ReLU",)]):
        assert first == second
        assert "layer b1 is a layer (block) on rank 0" in first
        assert "not there" in first


def named(rank: int, kind: str) -> str:
    make = nn.ReLU if kind == "ReLU" else lambda: nn.Linear(4, 4)
    layers = [("b0", make), (f"b{1 + rank}", make)]
    with pytest.raises(ConfigError) as info:
        Pipeline(layers, nn.functional.mse_loss, microbatches=4)
    return str(info.value)
