"""Processes that are given different batches refuse the step, whichever step it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.parallel.mesh import MeshShape
from penstock.runtime.batch.digests import FULL_STEPS, batch_digest, digest_of, sample_digest_of
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.microbatches import Microbatches
from tests.support import plain
from tests.support.groups import outcome
from tests.support.lanes import exhaustive

STEPS = FULL_STEPS + 3


def each_rank_drifts(rank: int, mesh: MeshShape, schedule: str) -> list[str]:
    """Return what became of equal steps, a different one among them, and two evaluations, of which one is different."""
    texts = []
    options = {"microbatches": 2, "mesh": mesh, "schedule": schedule, "timeout": 300}
    with Pipeline(plain.model(4), nn.functional.mse_loss, **options) as pipe:
        calls = [(pipe.step, 0)] * (STEPS - 1) + [(pipe.step, rank), (pipe.step, 0)]
        for call, seed in [*calls, (pipe.evaluate, rank), (pipe.evaluate, 0)]:
            texts.append(outcome(call, *plain.batch(seed, 8)))
    return texts


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        (MeshShape(1, 2, 1), "1f1b"),
        (MeshShape(2, 1, 1), "chimera"),  # each rank has both ends
        *exhaustive((MeshShape(2, 1, 1), "1f1b"), (MeshShape(1, 1, 2), "1f1b")),
    ],
    ids=str,
)
def test_a_loader_that_drifts_after_the_first_steps_is_refused_in_training_and_evaluation(
    processes: LocalProcesses, mesh: MeshShape, schedule: str
):
    for texts in processes.run(mesh.ranks, each_rank_drifts, mesh, schedule):
        odd = [text for text in texts if text != "ok"]
        assert [n for n, text in enumerate(texts) if text != "ok"] == [STEPS - 1, STEPS + 1]
        for text, number in zip(odd, (STEPS, STEPS + 2), strict=True):
            assert text.startswith(f"BatchError: step {number}: the processes were given different batches")


def each_rank_has_what_it_needs(rank: int) -> list[float]:
    with Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=2, ranks=2, timeout=300) as pipe:
        batches = [plain.batch(step, 8) for step in range(STEPS)]
        return [pipe.step(*((x, None) if rank == 0 else (None, y))).loss for x, y in batches]


def test_ranks_that_are_given_only_what_they_need_are_not_compared(processes: LocalProcesses):
    first, second = processes.run(2, each_rank_has_what_it_needs)
    assert first == second


def test_all_bytes_count_at_first_and_a_sample_later():
    x, y = torch.randn(8, 5000), torch.arange(8)
    changed = x.clone()
    changed[3, 17] += 1
    digests = [[batch_digest((each, y), number, True) for each in (x, changed)] for number in (0, FULL_STEPS)]
    assert digests[0][0] == digest_of((x, y)) != digests[0][1]
    assert digests[1][0] == sample_digest_of((x, y))
    assert batch_digest((x, y), 0, False) == sample_digest_of((x, y))


KINDS = [
    *(
        (shape, torch.float32)
        for shape in [(64, 3, 32, 32), (5000, 1), (1, 1, 9000), (7, 0), (), (2, 5000, 3)]
    ),
    *(((100_000,), dtype) for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.complex64)),
]


@pytest.mark.parametrize(("shape", "dtype"), KINDS, ids=str)
def test_a_sample_tells_shuffled_rows_apart_and_equal_tensors_not(shape: tuple[int, ...], dtype: torch.dtype):
    x = torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)
    found = sample_digest_of((x,))
    assert found is not None
    assert found == sample_digest_of((x.clone(),))
    assert found == sample_digest_of((x.unsqueeze(-1).expand(*x.shape, 2)[..., 0],))  # not contiguous
    assert found != sample_digest_of((x.unsqueeze(0),))
    if x.dim() and len(x) > 1 and x.numel():
        assert found != sample_digest_of((x.flip(0),))


@pytest.mark.parametrize("digest", [digest_of, sample_digest_of])
def test_batches_are_told_apart_by_their_bytes_and_shapes(digest):
    x, y = plain.batch(0, 8)
    assert digest((x, y)) == digest((x.clone(), y.clone()))
    others = [(y, x), (x[:7], y), (x.double(), y), ({"a": x, "b": x}, y), (Microbatches((x, y)), y)]
    assert len({digest(given) for given in [(x, y), *others]}) == 1 + len(others)
    changed = x.clone()
    changed[-1, -1] += 1
    assert digest((changed, y)) != digest((x, y))
    assert digest((None, "text")) is None
    assert digest((torch.tensor([1 + 2j]).conj(), torch.empty(0))) is not None
    assert sample_digest_of((x.to("meta"), y), 1) is None
