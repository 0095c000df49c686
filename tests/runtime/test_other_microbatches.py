"""A step with another number of microbatches than the pipeline was built for: what a pipeline of that number gives."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import ConfigError, MeshShape, Microbatches, Pipeline, PipelineOptimizer, ScheduleError
from penstock.base.errors import PenstockError
from penstock.runtime.engine import KEPT
from penstock.runtime.options import ExecutionOptions, ParallelOptions
from penstock.runtime.transport.processes import SWITCH
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import build_schedule
from penstock.schedule.schedule import Schedule
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss
from tests.support import plain
from tests.support.groups import outcome, run_cases
from tests.support.lanes import exhaustive, slow

LAYERS, BUILT = 8, 4
NUMBERS = (2, 4, 4, 6, 8, 2)
"""With two more of each evaluation more than are kept, some of them twice: at once, and after they were dropped."""

FAMILIES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-v"]
Step = tuple[Tensor, dict[str, Tensor]]


def model(dropout: bool = False) -> nn.Sequential:
    net = plain.model(LAYERS)
    for block in net if dropout else ():
        block.append(nn.Dropout(0.3))
    return net


def built(family: str, dropout: bool = False, **options: Any) -> Pipeline:
    virtual = 2 if family == "interleaved-1f1b" else None
    given: dict[str, Any] = {"ranks": 2, "microbatches": BUILT, "schedule": family, "virtual_stages": virtual}
    return Pipeline(model(dropout), mse_loss, **{**given, "timeout": 300, **options})


def trained(rank: int, family: str, dropout: bool = False, **options: Any) -> list[Step]:
    """The losses and gradients of steps of all numbers, of what this process holds."""
    torch.set_num_threads(1)
    told = []
    with built(family, dropout=dropout, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for step, number in enumerate(NUMBERS):
            optimizer.zero_grad()
            x, y = plain.batch(step, 2 * number * pipe.replicas)
            losses = pipe.step(x, y, microbatches=number).losses
            trace = pipe.gather_trace()
            assert trace is not None
            assert sorted(set(trace.microbatch.tolist())) == list(range(number))
            told.append((losses, {name: p.grad.clone() for name, p in pipe.named_parameters()}))
            evaluated = pipe.evaluate(x, y, microbatches=number + 2, outputs=True)
            assert evaluated.losses is not None
            assert len(evaluated.losses) == (number + 2) * pipe.replicas
            optimizer.step()
    return told


def plainly() -> list[Step]:
    net, told = plain.model(LAYERS), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step, number in enumerate(NUMBERS):
        optimizer.zero_grad()
        losses, _ = plain.step(net, mse_loss, *plain.batch(step, 2 * number), number)
        told.append((losses, {name: p.grad.clone() for name, p in net.named_parameters()}))
        optimizer.step()
    return told


def assert_same(parts: list[list[Step]], wanted: list[Step], exactly: bool = True) -> None:
    for (losses, grads), *found in zip(wanted, *parts, strict=True):
        seen = {name: grad for _, part in found for name, grad in part.items()}
        assert seen.keys() == grads.keys()
        for ours, theirs in [*((each, losses) for each, _ in found), *((seen[n], grads[n]) for n in grads)]:
            if exactly:
                assert torch.equal(ours, theirs)
            else:  # copies sum in another order
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


# One stage a rank, several, and copies of stages.
@pytest.mark.parametrize("family", ["1f1b", "zb-v", "dualpipe", *exhaustive("gpipe", "interleaved-1f1b")])
def test_threads_give_the_losses_and_gradients_of_plain_pytorch(family: str):
    assert_same([trained(0, family)], plainly(), exactly=family != "dualpipe")


def through_the_group(rank: int, family: str) -> list[Step]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        return trained(rank, family)


@pytest.mark.slow
def test_processes_give_the_losses_and_gradients_of_plain_pytorch(processes: LocalProcesses):
    for run, families in ((trained, [*FAMILIES, "dualpipe"]), (through_the_group, ["1f1b", "dualpipe"])):
        told = run_cases(processes, 2, run, [(family,) for family in families])
        for family, parts in zip(families, told, strict=True):
            assert_same(parts, plainly(), exactly=family != "dualpipe")


def replicas(rank: int, family: str, zero: bool) -> list[Step]:
    """Small buckets, whose reduction begins as soon as all microbatches have added to their gradients."""
    told = []
    small = ParallelOptions(bucket_bytes=1 << 9)
    with built(family, ranks=None, mesh=MeshShape(2, 2, 1), parallel=small) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, zero=zero)
        for step, number in enumerate(NUMBERS):
            losses = pipe.step(*plain.batch(step, 4 * number), microbatches=number).losses
            optimizer.step()
            told.append((losses, {n: p.detach().clone() for n, p in pipe.named_parameters()}))
    return told


@pytest.mark.slow
def test_replicas_have_the_weights_of_plain_pytorch(processes: LocalProcesses):
    net, wanted = plain.model(LAYERS), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step, number in enumerate(NUMBERS):
        optimizer.zero_grad()
        losses, _ = plain.step(net, mse_loss, *plain.batch(step, 4 * number), 2 * number)
        optimizer.step()
        wanted.append((losses, {n: p.detach().clone() for n, p in net.named_parameters()}))
    cases = [("1f1b", False), ("zb-v", False), ("1f1b", True)]
    for parts in run_cases(processes, 4, replicas, cases):
        assert_same(parts, wanted, exactly=False)


def one_pipeline_each(family: str) -> list[Step]:
    """The same steps, each by a pipeline that was built for its number."""
    net, told = model(dropout=True), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step, number in enumerate(NUMBERS):
        optimizer.zero_grad()
        with Pipeline(net, mse_loss, microbatches=number, schedule=family, ranks=2) as pipe:
            pipe.steps = step
            losses = pipe.step(*plain.batch(step, 2 * number)).losses
            told.append((losses, {name: p.grad.clone() for name, p in pipe.named_parameters()}))
        optimizer.step()
    return told


@pytest.mark.parametrize("family", ["zb-v", *exhaustive("1f1b")])
def test_random_numbers_are_those_of_a_pipeline_of_that_number(family: str):
    assert_same([trained(0, family, dropout=True)], one_pipeline_each(family))


def test_microbatches_of_other_lengths_weigh_by_their_rows():
    net, generator = plain.model(LAYERS), torch.Generator().manual_seed(0)
    with built("1f1b") as pipe:
        for number in (3, 5, 1):
            shapes = [(1 + n % 2, 3 + n, plain.WIDTH) for n in range(number)]
            x, y = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))
            found = pipe.step(Microbatches(x), Microbatches(y), microbatches=number)
            text = f"{number} microbatch.* given, but there are 4; .* by microbatches="
            with pytest.raises(ConfigError, match=text):
                pipe.step(Microbatches(x), Microbatches(y))
            rows = [len(part) for part in x]
            losses = [mse_loss(net(a), b) for a, b in zip(x, y, strict=True)]
            for loss, count in zip(losses, rows, strict=True):
                (loss / number if len(set(rows)) == 1 else loss * (count / sum(rows))).backward()
            assert torch.equal(found.losses, torch.stack(losses).detach())
            wanted = [p.grad for p in net.parameters()]
            assert all(torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), wanted, strict=True))


def test_an_evaluation_and_log_probs_of_other_numbers_give_the_same():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    x, y = torch.randint(8, (12, 5)), torch.randint(8, (12, 5))
    with Pipeline(net, next_token_loss, microbatches=2, ranks=2) as pipe:
        wanted, loss = pipe.log_probs(x, y), pipe.evaluate(x, y).loss
        for number in (1, 3, 6):
            torch.testing.assert_close(pipe.log_probs(x, y, microbatches=number), wanted)
            torch.testing.assert_close(pipe.evaluate(x, y, microbatches=number).loss, loss)


def test_the_numbers_used_last_are_kept():
    with built("gpipe") as pipe:
        x, y = plain.batch(0, 16)
        made = {}
        for number in (4, 1, 2, 3, 4, 5):
            pipe.step(x, y, microbatches=number)
            made[number] = pipe._engine._programs[number]
        assert list(pipe._engine._programs) == [2, 3, 4, 5]
        assert len(made) == KEPT + 1
        pipe.evaluate(x, y, microbatches=4)
        assert pipe._engine._programs[4] is made[4]
        pipe.step(x, y, microbatches=1)
        assert pipe._engine._programs[1] is not made[1]


def test_every_number_has_the_ops_that_a_profile_wraps():
    seen: list[int] = []

    def wrap(rank: int, op: Any) -> Any:
        return lambda: (seen.append(rank), op())[1]

    with built("1f1b") as pipe:
        pipe.step(*plain.batch(0, 8))
        pipe.wrap_ops(wrap)
        for number in (4, 6):
            seen.clear()
            pipe.step(*plain.batch(0, 12), microbatches=number)
            assert len(seen) == 2 * 2 * number


def moving(ranks: int, microbatches: int) -> Schedule:
    """A family whose stages change their ranks with the number of microbatches."""
    return build_schedule("1f1b" if microbatches < 5 else "zb-v", ranks, microbatches)


def in_pairs(ranks: int, microbatches: int) -> Schedule:
    if microbatches % 2:
        raise ScheduleError(f"pairs of microbatches, and not {microbatches}")
    return build_schedule("1f1b", ranks, microbatches)


OWN = f"{__name__}:"


@pytest.mark.parametrize(
    ("options", "number", "text"),
    [
        ({}, 0, "ConfigError: microbatches must be a whole number of"),
        ({}, 2.0, "ConfigError: microbatches must be a whole number of"),
        ({}, 20, "BatchError: .*a batch of 8 is too small for 20"),
        ({"schedule": OWN + "in_pairs"}, 3, "ScheduleError: .*pairs of microbatches, and not 3"),
        (
            {"schedule": build_schedule("1f1b", 2, 4)},
            6,
            "ScheduleError: .*has 4 microbatches, .* one number, .* any",
        ),
        ({"schedule": OWN + "moving"}, 6, "ScheduleError: .*places its stages on other ranks than with 4"),
        (
            {"recompute": "auto", "execution": ExecutionOptions(memory=1 << 30)},
            6,
            "ConfigError: .*recompute='auto' chooses the layers for the 4 of the pipeline; give recompute='full'",
        ),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_name_and_the_pipeline_works_on(options, number, text):
    x, y = plain.batch(0, 8)
    with Pipeline(plain.model(LAYERS), mse_loss, microbatches=BUILT, ranks=2, **options) as pipe:
        assert re.match(text, outcome(pipe.step, x, y, microbatches=number))
        assert pipe.steps == 0
        found = pipe.step(x, y).losses
        if "execution" in options:  # an evaluation recomputes nothing
            pipe.evaluate(x, y, microbatches=6)
    assert torch.equal(found, plain.step(plain.model(LAYERS), mse_loss, x, y, BUILT)[0])


def each_its_own(
    rank: int, mesh: MeshShape, numbers: Any, shared_memory: str, family: str = "1f1b"
) -> list[str]:
    """Steps and evaluations of each process's own numbers; what became of them."""
    told = []
    os.environ[SWITCH] = shared_memory
    net = layers(ModelConfig(vocabulary=32, width=16, layers=4, heads=4, kv_heads=2, hidden=32))
    ids = torch.randint(32, (24, 9), generator=torch.Generator().manual_seed(0))
    try:
        with Pipeline(net, next_token_loss, microbatches=2, mesh=mesh, schedule=family, timeout=300) as pipe:
            for number in numbers:
                for call in (pipe.step, pipe.evaluate, pipe.step):
                    try:
                        found = call(ids[:, :-1], ids[:, 1:], microbatches=number[rank])
                        told.append(f"{len(found.losses)} losses")
                    except PenstockError as error:
                        told.append(f"{type(error).__name__}: {error}")
                    pipe.zero_grad()
    finally:
        del os.environ[SWITCH]
    return told


@pytest.mark.parametrize(
    ("mesh", "shared_memory"),
    [
        (MeshShape(2, 1, 1), "1"),
        *slow((MeshShape(2, 1, 1), "0"), (MeshShape(1, 2, 1), "1"), (MeshShape(1, 1, 2), "1")),
    ],
    ids=str,
)
def test_another_number_on_one_rank_is_one_error_on_every_rank(
    processes: LocalProcesses, mesh, shared_memory
):
    numbers = [(2, 6), (6, 6), (12, 3)]
    for told in processes.run(2, each_its_own, mesh, numbers, shared_memory):
        assert told[3:6] == [f"{6 * mesh.dp} losses"] * 3
        for (one, other), texts in zip(numbers[::2], (told[:3], told[6:]), strict=True):
            for name, text in zip(("step", "evaluate", "step"), texts, strict=True):
                if mesh.pp > 1:
                    assert f"rank 0 calls pipe.{name}(microbatches={one}), but rank 1 calls" in text
                    assert f"rank 1 calls pipe.{name}(microbatches={other})" in text
                else:
                    both = ", ".join(sorted(map(str, (one, other))))
                    assert f"other numbers of microbatches to one step: {both}" in text


def test_a_number_that_a_family_cannot_take_is_its_own_error_on_every_rank(processes: LocalProcesses):
    numbers = [(3, 3), (4, 4), (3, 4), (4, 4), (4, 3), (0, 4), (2, 2)]
    for told in processes.run(2, each_its_own, MeshShape(2, 1, 1), numbers, "1", OWN + "in_pairs"):
        for count, texts in zip(numbers, zip(*[iter(told)] * 3, strict=True), strict=True):
            if count[0] == count[1] != 3:
                assert texts == (f"{count[0]} losses",) * 3
            else:
                assert all(("whole number" if 0 in count else "pairs") in text for text in texts), texts


def crossing(ranks: int, microbatches: int) -> list[str]:
    """Two stages with two copies each; from the third microbatch on, ranks exchange messages that did not before."""
    on = [[j for j in range(microbatches) if j % 2 == copy] for copy in (0, 1)]
    on += [[j for j in range(microbatches) if (j // 2 + j) % 2 == copy] for copy in (0, 1)]
    return [" ".join(f"{rank // 2}{kind}{j}" for kind in "FB" for j in on[rank]) for rank in range(ranks)]


def crossed(rank: int) -> list[str]:
    told = []
    with built(OWN + "crossing", ranks=4, microbatches=2) as pipe:
        for number in (2, 4, 2):
            told.append(outcome(pipe.step, *plain.batch(0, 8), microbatches=number))
    return told


@pytest.mark.slow
def test_messages_between_ranks_that_exchanged_none_are_refused_in_processes(processes: LocalProcesses):
    assert crossed(0) == ["ok"] * 3
    for told in processes.run(4, crossed):
        assert told[0] == told[2] == "ok"
        assert told[1].startswith("ScheduleError")
        assert "rank 0 of the schedule" in told[1]
        assert "sends to rank 3, unlike with the number that the pipeline was built for" in told[1]


def scaled_alone(rank: int) -> str:
    with built("1f1b", ranks=None) as pipe:
        for number in (4, 6):
            pipe.step(*plain.batch(0, 12), microbatches=number)
            pipe.zero_grad()
        pipe.step(*plain.batch(0, 12), microbatches=4)
        for p in pipe.parameters():
            p.grad.mul_(0.5 if rank else 1.0)
        return outcome(pipe.step, *plain.batch(0, 12), microbatches=6)


def test_gradients_that_one_rank_scaled_are_told_by_a_step_of_another_number(processes: LocalProcesses):
    for text in processes.run(2, scaled_alone):
        assert "step 4: since the last step, the gradients were scaled by another factor" in text
