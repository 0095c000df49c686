"""Models drawn at random: bit-equal to plain PyTorch, within a bound, or refused by name; and nothing else."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from penstock.runtime.workers.pool import LocalProcesses
from tests.support.lanes import exhaustive, slow
from tests.zoo.case import Case, draw, read
from tests.zoo.judge import judge
from tests.zoo.kind import KINDS
from tests.zoo.not_yet import NOT_YET, drawn, known
from tests.zoo.piped import piped, piped_many
from tests.zoo.shrink import shrink

THREADS = drawn(0, 120, "threads")


@pytest.mark.parametrize(
    "case",
    [*THREADS[:6], *slow(*THREADS[6:20]), *exhaustive(*THREADS[20:])],
    ids=lambda case: f"seed {case.seed}",
)
def test_threads(case):
    verdict = judge(case, [piped(0, case)])
    assert verdict.outcome != "FAILED", f"{verdict.why}\npython -m bench.zoo --case '{case.text()}'"


@pytest.mark.parametrize(("first", "count"), [*slow((10_000, 12)), *exhaustive((10_012, 24))])
# Sparse gradients of a case go from process to process.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_processes(processes: LocalProcesses, first: int, count: int):
    require_all(processes, drawn(first, count, "processes"))


@pytest.mark.parametrize(("first", "count"), [*slow((30_000, 8)), *exhaustive((30_008, 24))])
def test_replicas_that_divide_what_they_hold(processes: LocalProcesses, first: int, count: int):
    require_all(processes, [draw(seed, sharded=True) for seed in range(first, first + count)])


def require_all(processes: LocalProcesses, drawn_cases: list[Case]) -> None:
    groups: dict[int, list[Case]] = defaultdict(list)
    for case in drawn_cases:
        groups[case.processes].append(case)
    failed = []
    for count, cases in groups.items():
        runs = processes.run(count, piped_many, [case.text() for case in cases])
        for n, case in enumerate(cases):
            verdict = judge(case, [run[n] for run in runs])
            if verdict.outcome == "FAILED":
                failed.append(f"{verdict.why}\n  python -m bench.zoo --case '{case.text()}'")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("case", drawn(20_000, 3, "threads"), ids=lambda case: f"seed {case.seed}")
def test_a_run_is_the_same_again(case):
    one, other = piped(0, case), piped(0, case)
    assert (one.raised is None) == (other.raised is None)
    assert len(one.steps) == len(other.steps)
    for a, b in zip(one.steps, other.steps, strict=True):
        assert torch.equal(a.losses, b.losses)
        assert all(torch.equal(value, b.weights[name]) for name, value in a.weights.items())


IN_ORDER = Case(seed=3, kinds=("mlp", "layer_norm", "weight_twice"), schedule="zb-h1", optimizer="momentum")
IN_ANY_ORDER = replace(IN_ORDER, schedule="chimera")


@pytest.mark.parametrize("case", [IN_ORDER, IN_ANY_ORDER], ids=["in order", "in any order"])
def test_a_wrong_number_is_found(case):
    original = piped(0, case)
    for what in ("losses", "gradients", "weights"):
        run = copy.deepcopy(original)
        step = run.steps[1]
        found = step.losses if what == "losses" else next(iter(getattr(step, what).values()))
        found.view(-1)[0] += 2e-6
        verdict = judge(case, [run])
        assert verdict.outcome == "FAILED"
        assert verdict.why.startswith(f"{what} ")
        assert "step 1" in verdict.why


def test_a_bit_is_found_where_the_order_is_kept():
    run = piped(0, IN_ORDER)
    gradient = next(iter(run.steps[2].gradients.values()))
    gradient.copy_(torch.nextafter(gradient, torch.full_like(gradient, 9.0)))
    assert "gradients of step 2" in judge(IN_ORDER, [run]).why


def test_a_missing_gradient_a_foreign_error_and_a_refusal_without_need_are_found():
    run = piped(0, IN_ORDER)
    run.steps[0].gradients["0.0.weight"] = None
    assert "0.0.weight None instead of there" in judge(IN_ORDER, [run]).why
    case = replace(IN_ORDER, loss="detached")
    run = piped(0, case)
    assert judge(case, [run]).outcome == "refused"
    assert "plain PyTorch is not" in judge(IN_ORDER, [run]).why
    run.raised.known = False
    assert "not Penstock's own" in judge(case, [run]).why
    run.raised.known, run.raised.untouched = True, False
    assert "weights were changed" in judge(case, [run]).why


def test_a_case_is_the_same_from_its_seed_and_from_its_text():
    for seed in range(20):
        case = draw(seed)
        assert case == draw(seed) == read(case.text())
    assert {name for seed in range(len(KINDS)) for name in draw(seed, forwards=()).kinds} == set(KINDS)


def test_a_failing_case_is_made_simpler():
    case = draw(5)
    assert len(case.kinds) > 2
    wanted = case.kinds[1]
    small = shrink(case, lambda smaller: wanted in smaller.kinds)
    assert small.kinds == (wanted,)
    assert (small.ranks, small.microbatches, small.dp, small.steps) == (1, 1, 1, 1)
    assert small.transport == "threads"


def test_what_is_left_out_is_known_and_short():
    assert NOT_YET.keys() <= KINDS.keys()
    assert known(Case(seed=0, kinds=("linear",))) == ""
