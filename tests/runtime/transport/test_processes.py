"""Whatever stages hand over arrives as it was sent, through shared memory and through the process group."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from penstock.base.errors import PeerError, PenstockError, TransportError, WaitTimeoutError
from penstock.runtime.health.hang import Timeout
from penstock.runtime.health.peers import supported
from penstock.runtime.health.rank_progress import STEP
from penstock.runtime.transport import processes as transport
from penstock.runtime.transport.channel import Failure
from penstock.runtime.transport.frame import FRAME_BYTES
from penstock.runtime.transport.process_group import POSTED_BYTES, posted_receives
from penstock.runtime.transport.shared_memory import SharedIncoming
from penstock.runtime.workers.pool import LocalProcesses
from penstock.runtime.workers.world import World
from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.stage.values import Message, pack, unpack

only_there = pytest.mark.skipif(not supported(), reason="needs Linux on x86-64")
# Lanes are for values on GPUs; here the device is the CPU and the lanes' backend gloo.
both_ways = pytest.mark.parametrize(
    "way", [pytest.param("shared memory", marks=only_there), "process group", "lanes"]
)


def world(rank: int, way: str) -> World:
    os.environ[transport.SWITCH] = "1" if way == "shared memory" else "0"
    device = torch.device("cpu") if way == "lanes" else None
    program = check(build_schedule("1f1b", 2, 4)).program
    joined = World(rank, 2, 300.0)
    joined.connect(program, program.schedule.placement.holders, device, "gloo")
    del os.environ[transport.SWITCH]
    for edge in joined.channel._in.values():
        assert isinstance(edge, SharedIncoming) == (way == "shared memory")
    return joined


def values() -> list[object]:
    """Small and large, growing and shrinking, plain and nested, of every kind of dtype and memory layout."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    shapes = [(4, 3), (4, 3), (0, 3), (300, 300), (4, 3), (700, 300), (300, 300)]
    found: list[object] = [rand(*shape) for shape in shapes]
    found += [rand(64, 8).t(), rand(500, 400).t(), rand(1, 5).expand(4, 5), rand(6, 6)[::2, 1:4]]
    image = rand(2, 3, 16, 16).to(memory_format=torch.channels_last)
    found += [image, image[:, :2], image.expand(3, 2, 3, 16, 16), image[:, :, ::2, 1:]]
    found += [rand(1, 7).t(), rand(9).unfold(0, 3, 1), rand(400, 500).t().unsqueeze(0)]
    found += [rand(1, 1).expand(400, 500), rand(90, 4000)[:, 5], rand(400, 1000)[:, 3:400:7]]
    found += [(rand(64, 8).t(), rand(400, 500).t(), rand(3)), rand(0, 4).t(), torch.tensor(1.5).expand(3)]
    for size in (4, 300):
        wave = torch.complex(rand(size, size), rand(size, size))
        found += [wave, wave.conj(), wave.conj().t(), wave.conj().imag, wave.conj()[::3, 1]]
    dtypes = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)
    found += [rand(3, 3).to(dtype) for dtype in dtypes]
    found += [torch.tensor(3.5), (rand(2, 2), None, 7, "text"), {"a": rand(200, 200), "b": [rand(3), True]}]
    found += [(rand(5).requires_grad_(), torch.arange(4), rand(2, 2))]
    found += [rand(n % 50 + 1, 2) for n in range(600)]  # more layouts than are remembered
    found += [rand(n * 4000 + 1) for n in range(12)]
    return found


def same(ours: object, theirs: object) -> bool:
    if isinstance(ours, torch.Tensor):
        return (
            torch.equal(ours, theirs)
            and (ours.stride() == theirs.stride() or not ours.numel())
            and ours.is_conj() == theirs.is_conj()
            and ours.dtype == theirs.dtype
            and ours.requires_grad == theirs.requires_grad
        )
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list | tuple):
        return type(ours) is type(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    return ours == theirs


def exchange(rank: int, way: str) -> int:
    joined = world(rank, way)
    channel, kept = joined.channel, []
    for step, value in enumerate(values()):
        channel.open(step)
        if rank == 0:
            channel.send(1, 5, pack(value)[0])
            channel.send(1, 6, pack(value)[0])
            assert channel.recv(1, 7).leaves[0] == step
        else:
            late, early = channel.recv(0, 6), channel.recv(0, 5)  # taken out of order
            assert same(unpack(early), value), step
            assert same(unpack(late), value), step
            kept = [*kept[-3:], (unpack(late), value)]  # what is still in use is not written over
            assert all(same(a, b) for a, b in kept)
            channel.send(0, 7, Message((step,)))
        channel.finish()
    joined.disconnect()
    return step + 1


@pytest.mark.slow
@both_ways
def test_every_value_arrives_as_it_was_sent(processes: LocalProcesses, way):
    assert processes.run(2, exchange, way) == [len(values())] * 2


def failing(rank: int, way: str) -> list[str]:
    joined = world(rank, way)
    channel, told = joined.channel, []
    big = torch.ones(300, 300)
    for step in range(3):
        channel.open(step)
        if rank == 0:
            channel.send(1, 1, Message((big * step,)))
            if step == 1:
                channel.fail(Failure(0, 1, "it failed"))
                continue
            channel.send(1, 2, Message((big * step,)))
            channel.recv(1, 3)
        else:
            if step == 1:  # it has not even taken the first message
                with pytest.raises(PeerError) as info:
                    channel.recv(0, 2)
                assert isinstance(info.value.failure, Failure)
                told.append(str(info.value))
                continue
            assert torch.equal(channel.recv(0, 1).leaves[0], big * step)
            channel.recv(0, 2)
            channel.send(0, 3, Message((torch.ones(1),)))
            told.append("ok")
    joined.disconnect()
    return told


@both_ways
def test_the_notice_of_a_failure_arrives_and_what_it_left_behind_is_dropped(processes: LocalProcesses, way):
    assert processes.run(2, failing, way)[1] == ["ok", "it failed", "ok"]


def refusing(rank: int, sends: bool, steps: int = 20) -> list[str]:
    """Rank 0 refuses more steps than an edge has room for notices, before rank 1 begins the first of them."""
    joined = world(rank, "shared memory")
    joined.timeout.timeout = joined.timeout.first = joined.timeout.seconds = 20.0
    channel, told = joined.channel, []
    for step in range(1, steps + 1) if rank == 0 else ():
        channel.open(step)
        channel.fail(Failure(0, step, "it failed"))
    joined.gather(None)
    for step in range(steps + 1 if rank == 0 else 1, steps + 2):
        channel.open(step)
        channel.progress[STEP] = step
        try:
            if rank == 0 and sends:
                channel.send(1, 5, Message((step,)))
                continue
            if rank == 1 and step > steps and not sends:
                channel.send(0, 5, Message((step,)))
                continue
            told.append(f"got {channel.recv(1 - rank, 5).leaves[0]}")
        except TransportError as error:
            told.append(f"{type(error).__name__}: {error}")
        channel.progress[STEP] = 0
    joined.gather(None)
    joined.disconnect()
    return told


@only_there
@pytest.mark.parametrize("sends", [True, False])
def test_a_rank_that_refused_many_steps_is_not_waited_for_in_them(processes: LocalProcesses, sends: bool):
    first, second = processes.run(2, refusing, sends)
    refused, then = (second[:20], second[20:] + first)
    assert then == ["got 21"]
    for step, text in enumerate(refused, 1):
        assert text == "PeerError: it failed" or f"step {step} failed there" in text


def widened(rank: int, way: str) -> list[int]:
    """Twice more messages than before, all of them sent before the first is taken, and a notice behind them."""
    joined = world(rank, way)
    channel, taken = joined.channel, []
    for step, count in enumerate((3, 40, 100)):
        if rank == 0:
            channel.widen({1: count})
            channel.open(step)
            for tag in range(count):
                channel.send(1, tag, Message((torch.full((20 + tag,), float(tag)),)))
        joined.gather(step)  # until here nothing is taken
        if rank == 1:
            channel.open(step)
            taken.append(sum(channel.recv(0, tag).leaves[0][-1].item() == tag for tag in range(count)))
        joined.gather(step)
        channel.finish()
    if rank == 0:
        channel.widen({1: 300})
        channel.fail(Failure(0, 2, "it failed"))
    joined.gather(None)
    if rank == 1:
        # In shared memory as while it waits to send.
        take = (channel._require_no_notice, 0) if way == "shared memory" else (channel.recv, 0, 0)
        with pytest.raises(PeerError, match="it failed"):
            take[0](*take[1:])
    joined.disconnect()
    return taken


@both_ways
def test_more_messages_are_under_way_after_an_edge_was_widened(processes: LocalProcesses, way):
    assert processes.run(2, widened, way)[1] == [3, 40, 100]


def dying(rank: int, way: str) -> str:
    joined = world(rank, way)
    joined.channel.open(1)
    if rank == 1:
        os._exit(3)
    joined.channel.recv(1, 1)
    raise AssertionError("nothing was raised")


@pytest.mark.slow
@both_ways
def test_the_end_of_a_process_is_noticed_long_before_the_limit(way):
    # The pool waits less long than the channel would.
    with LocalProcesses(2) as pool, pytest.raises(PenstockError, match="rank 1 ended without a result"):
        pool.run(2, dying, way, timeout=290)


def broken(rank: int, way: str) -> list[str]:
    joined = world(rank, way)
    channel = joined.channel
    channel.open(1)
    if rank == 1:
        joined.disconnect(failed=True)
        dist.destroy_process_group()
        return []
    told = []
    for act in (lambda: channel.recv(1, 1), lambda: channel.send(1, 1, Message((torch.ones(1),)))):
        with pytest.raises(PeerError) as info:
            act()
        told.append(str(info.value))
    channel.fail(Failure(0, 1, "the others are still told"))
    return told


@pytest.mark.parametrize("way", ["process group", "lanes"])
def test_a_connection_that_is_broken_when_a_message_is_sent_is_the_peers_failure(
    processes: LocalProcesses, way
):
    told, _ = processes.run(2, broken, way)
    assert all(text.startswith("the connection to rank 1 broke: ") for text in told), told


def waiting(rank: int, way: str) -> None:
    joined = world(rank, way)
    joined.timeout.timeout = joined.timeout.first = joined.timeout.seconds = 0.2
    joined.channel.open(1)
    if rank == 0:
        with pytest.raises(WaitTimeoutError, match=r"waited 0\.2 s for rank 1"):
            joined.channel.recv(1, 1)
    dist.barrier()  # until then the other is there, but says nothing
    joined.disconnect(failed=True)


@both_ways
def test_a_wait_ends_at_its_limit(processes: LocalProcesses, way):
    processes.run(2, waiting, way)


def too_long(rank: int, way: str) -> None:
    joined = world(rank, way)
    joined.channel.open(1)
    if rank == 0:
        with pytest.raises(TransportError, match="hand over fewer or shorter plain values"):
            joined.channel.send(1, 1, pack((torch.ones(1), "x" * 70_000))[0])
    joined.disconnect()


@both_ways
def test_a_description_that_does_not_fit_is_refused(processes: LocalProcesses, way):
    processes.run(2, too_long, way)


@pytest.mark.parametrize("offer", [{}, {0: object()}])
def test_a_process_without_shared_memory_takes_no_offer(offer: dict):
    """Its peers have it, and offer it to whom they can."""
    host = SimpleNamespace(machine="one")
    told: list[object] = []
    answers = iter([[None, host], [{}, offer], [set(), set()]])

    def exchange(value: object) -> list:
        told.append(value)
        return next(answers)

    channel = SimpleNamespace(_wake_pipe=None, _in={}, _out={})
    transport.ProcessChannel._open_shared(channel, exchange, {1: (2, 2)}, {1: (2, 2)}, Timeout(1.0))
    assert told == [None, {}, set()]
    assert channel._in == channel._out == {}


def test_leaves_that_cannot_travel_are_refused_before_they_do():
    with pytest.raises(Exception, match="a stage returned a object among its outputs"):
        pack((torch.ones(1), object()))


def test_as_many_receives_are_posted_as_messages_may_be_under_way_but_for_large_ones():
    # A long link: none of eight small messages waits for word of a receive.
    assert posted_receives(2, 8, 0) == 8
    assert posted_receives(2, 512, 0) == POSTED_BYTES // FRAME_BYTES
    assert posted_receives(2, 8, 4 << 20) == 2  # never fewer than the slots
    assert posted_receives(2, 8, 1 << 20) == 7
