"""Processes that are killed, stopped or hang: the others end soon, and say who it was and at what."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.runtime.health.hang import HUNG
from penstock.runtime.health.peers import supported
from penstock.runtime.start.meeting import STORE
from penstock.runtime.workers.pool import process_context
from tests.support.lanes import exhaustive

pytestmark = pytest.mark.skipif(not supported(), reason="needs Linux on x86-64")

# Four layers on so many ranks, or on half as many in two replicas. In its second step one rank does something to itself: in
# the forward or the backward of microbatch 2, in a reduction, or before the gradients' norm is taken.
VICTIM = """
import os, signal, sys, torch
from torch import nn
from penstock import Pipeline
from penstock.base.errors import PenstockError
from penstock.parallel.mesh import MeshShape
from penstock.runtime.options import ParallelOptions
from tests.support import plain

torch.set_num_threads(1)
if "APART" in os.environ:  # as on a host each: no process sees another one's memory or state
    from penstock.runtime.health import peers as roster
    roster.machine = lambda: f"host {os.getpid()}"
rank, victim, act, at, dp, timeout = int(os.environ["RANK"]), *sys.argv[1:6]
STRIKES = {"kill": lambda: os.kill(os.getpid(), 9), "stop": lambda: os.kill(os.getpid(), 19), "hang": lambda: spin()}

def spin():
    while True:
        pass

def strike():
    print("struck", flush=True)
    STRIKES[act]()

class Trap(nn.Module):
    seen, armed = -1, False
    def forward(self, x):
        self.seen += 1
        if self.armed and self.seen == 2 and at == "F":
            strike()
        if self.armed and self.seen == 2 and at == "B":
            x.register_hook(lambda grad: strike())
        return x * 1.0

traps = [Trap() for _ in range(4)]
net = plain.model(4)
for layer, trap in zip(net, traps):
    layer.append(trap)
dp = int(dp)
ranks = int(os.environ["WORLD_SIZE"])
mesh = MeshShape(ranks // dp, dp, 1) if dp > 1 else None
buckets = ParallelOptions(bucket_bytes=64)
with Pipeline(net, nn.functional.mse_loss, microbatches=4, mesh=mesh, timeout=float(timeout), parallel=buckets) as pipe:
    pipe.step(*plain.batch(0, 8 * dp))
    pipe.clip_grad_norm_(1.0)
    for trap in traps:
        trap.seen, trap.armed = -1, rank == int(victim)
    if rank == int(victim) and at == "reduction":
        from penstock.parallel.replicas.reducer import GroupReducer
        all_reduce = GroupReducer.all_reduce
        GroupReducer.all_reduce = lambda self, flat: (all_reduce(self, flat), strike())[0]
    try:
        pipe.step(*plain.batch(1, 8 * dp))
        if rank == int(victim) and at == "clip":
            strike()
        pipe.clip_grad_norm_(1.0)
    except PenstockError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
"""


class Ended(NamedTuple):
    """What became of one process."""

    code: int
    out: str
    err: str


def run(
    tmp_path: Path, victim: int, act: str, at: str, dp: int = 1, timeout: float = 20.0, **more: str
) -> list[Ended]:
    """Three ranks, or two in each of two replicas, until all but a stopped one have ended; that one is ended then."""
    ranks = 2 * dp if dp > 1 else 3
    own = {"WORLD_SIZE": str(ranks), STORE: str(tmp_path / "store"), "OMP_NUM_THREADS": "1"}
    environment = os.environ | own | more
    arguments = [str(victim), act, at, str(dp), str(timeout)]
    context = process_context()
    outputs = [(tmp_path / f"out{rank}", tmp_path / f"err{rank}") for rank in range(ranks)]
    started = [
        context.Process(target=become, args=(arguments, environment | {"RANK": str(rank)}, *outputs[rank]))
        for rank in range(ranks)
    ]
    try:
        for process in started:
            process.start()
        for rank, process in enumerate(started):
            process.join(120 if rank != victim else 0)
        if act == "stop":
            started[victim].kill()
        started[victim].join(60)
        codes = [process.exitcode for process in started]
        assert None not in codes, f"did not end: {codes}"
        return [
            Ended(code, out.read_text(), err.read_text())
            for code, (out, err) in zip(codes, outputs, strict=True)
        ]
    finally:
        for process in started:
            process.kill()


def become(arguments: list[str], environment: dict[str, str], out: Path, err: Path) -> None:
    """Run the victim's program in this forked process, as a command with its own environment and output."""
    os.environ.clear()
    os.environ.update(environment)
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv[1:] = arguments
    exec(compile(VICTIM, "victim", "exec"), {"__name__": "__main__"})


def said(ended: Sequence[Ended], victim: int) -> list[str]:
    """What the others said; they have all said something and failed."""
    others = [one for rank, one in enumerate(ended) if rank != victim]
    assert [one.code for one in others] == [1] * len(others), [one.err for one in others]
    assert "struck" in ended[victim].out
    return [one.out for one in others]


def test_a_killed_process_is_named_by_all_with_the_op_it_was_in_and_what_they_waited_for(tmp_path):
    ended = run(tmp_path, 1, "kill", "B")
    for text in said(ended, 1):
        assert "rank 1 has ended (process id " in text
        assert "in op 1B2 (stage 1, microbatch 2) of step 2" in text
        assert "(at rank " in text
    assert ended[1].code == -signal.SIGKILL


@pytest.mark.slow
def test_a_stopped_process_is_named_by_all_with_the_stacks_of_those_that_waited(tmp_path):
    ended = run(tmp_path, 1, "stop", "F", timeout=10.0)
    for text in said(ended, 1):
        assert "ank 1 is stopped (by SIGSTOP, or by a debugger)" in text
        assert "in op 1F2 (stage 1, microbatch 2) of step 2" in text
    for rank in (0, 2):
        assert "the stacks of this process" in ended[rank].err


@pytest.mark.slow
def test_a_process_that_hangs_shows_its_stacks_and_ends_and_the_others_name_it(tmp_path):
    ended = run(tmp_path, 1, "hang", "F", timeout=10.0)
    for text in said(ended, 1):
        assert "ank 1 is in op 1F2 (stage 1, microbatch 2) of step 2" in text
    assert ended[1].code == HUNG
    assert "in spin" in ended[1].err


HOST, APART = socket.gethostname(), {"APART": "1", "PENSTOCK_SHARED_MEMORY": "0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("struck", "apart", "told"),
    [
        ((3, "kill", "reduction", 2), {}, "rocess 3 (pp 1, dp 1, tp 0) has ended"),
        ((2, "stop", "clip"), APART, f"rank 2 on host {HOST} did not come"),
        *exhaustive(  # the same two ways: ended on this host, absent on another
            ((2, "kill", "clip"), {}, "rank 2 has ended (process id "),
            (
                (2, "kill", "clip"),
                APART,
                f"PeerError: rank 2 on host {HOST} did not come, when the processes were to add up",
            ),
        ),
    ],
)
def test_a_process_killed_or_frozen_in_a_collective_is_named_by_all(tmp_path, struck, apart, told):
    for text in said(run(tmp_path, *struck, timeout=10.0, **apart), struck[0]):
        assert told in text
        if "stop" in struck:
            waited = "waited 10 s for the other processes, to add up over the pipeline's ranks"
            assert text.startswith(f"WaitTimeoutError: {waited}")


@pytest.mark.slow
def test_a_host_that_is_frozen_in_a_reduction_is_named_by_its_replicas(tmp_path):
    told = said(run(tmp_path, 3, "stop", "reduction", dp=2, timeout=10.0, **APART), 3)
    assert any(f"process 3 (pp 1, dp 1, tp 0) on host {HOST} did not come" in text for text in told)
