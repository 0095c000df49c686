"""Every crossing between streams waits, on a device that runs nothing but knows what each stream has waited for; the
CPU has no part in it. Real devices are for test_gpu.py."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from time import perf_counter

import pytest
import torch
from torch import nn

from penstock.parallel.clocks import Readings, clock
from penstock.runtime.health.hang import Timeout
from penstock.runtime.op_compiler import OpRecords
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.transport.streams import Streams
from penstock.runtime.transport.threads import StreamChannel, ThreadChannel, thread_channels
from penstock.runtime.workers.rank_threads import RankThreads
from penstock.schedule.families import build_schedule
from penstock.schedule.program import lower
from penstock.stage.values import Message
from tests.support import plain

DEVICE = torch.device("cpu")  # stands for the GPU
OTHER = torch.device("meta")  # and for a second one


class Queue:
    """A stream: the names of all work that is done before what is queued next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.after: set[str] = set()

    def wait_event(self, event: Mark) -> None:
        assert event.after is not None, "an event that was never recorded makes nobody wait"
        self.after |= event.after

    def wait_stream(self, other: Queue) -> None:
        self.after |= other.after


class Mark:
    """An event."""

    made = 0

    def __init__(self) -> None:
        Mark.made += 1
        self.after: set[str] | None = None

    def record(self, stream: Queue) -> None:
        self.after = set(stream.after)


class Value(torch.Tensor):
    """A tensor of the device, which notes by which streams it is used."""

    is_cuda = True
    place = DEVICE
    device = property(lambda self: self.place)
    users = property(lambda self: self.__dict__.setdefault("used_by", []))

    def record_stream(self, stream: Queue) -> None:
        self.users.append(stream)


def value(place: torch.device = DEVICE) -> Value:
    made = torch.zeros(2).as_subclass(Value)
    made.place = place
    return made


@pytest.fixture
def device(monkeypatch):
    """Puts the modelled device in CUDA's place; returns what gives the current stream of a device."""
    here = threading.local()
    defaults = {DEVICE: Queue(DEVICE), OTHER: Queue(OTHER)}  # of every thread, as CUDA's default streams are

    def current(place: torch.device) -> Queue:
        return getattr(here, "streams", {}).get(place, defaults[place])

    @contextmanager
    def entered(stream: Queue):
        before = getattr(here, "streams", {})
        here.streams = {**before, stream.device: stream}
        yield
        here.streams = before

    monkeypatch.setattr(torch.cuda, "Stream", Queue)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    Mark.made = 0
    return current


def run(rank_threads: RankThreads, *jobs) -> None:
    rank_threads.run(list(jobs), lambda: None)


@pytest.fixture
def ranks(device):
    """(rank threads, channels) of two ranks on the modelled device."""
    streams = Streams([DEVICE, DEVICE], [DEVICE, OTHER])
    rank_threads = RankThreads(2, Timeout(5.0), streams)
    yield rank_threads, thread_channels(lower(build_schedule("1f1b", 2, 4)), Timeout(5.0), streams=streams)
    rank_threads.close()


def test_what_is_handed_over_is_waited_for_and_its_memory_kept(ranks, device):
    rank_threads, channels = ranks
    sent, found = value(), {}

    def first() -> None:
        device(DEVICE).after.add("made")
        channels[0].send(1, 7, Message((sent, None, 3)))
        device(DEVICE).after.add("later")

    def second() -> None:
        assert "made" not in device(DEVICE).after
        channels[1].recv(0, 7)
        found["after"], found["stream"] = set(device(DEVICE).after), device(DEVICE)

    run(rank_threads, first, second)
    assert "made" in found["after"]
    assert "later" not in found["after"]
    assert sent.users == [found["stream"]]


def test_a_message_kept_aside_waits_for_its_own_event(ranks, device):
    rank_threads, channels = ranks
    found = []

    def first() -> None:
        for tag in (7, 8):
            device(DEVICE).after.add(f"made {tag}")
            channels[0].send(1, tag, Message((value(),)))

    def second() -> None:
        for tag in (8, 7):
            channels[1].recv(0, tag)
            found.append("made 8" in device(DEVICE).after)

    run(rank_threads, first, second)
    assert found == [True, True]


def test_a_value_on_another_device_is_waited_for_there(ranks, device):
    rank_threads, channels = ranks
    found = {}

    def first() -> None:
        device(OTHER).after.add("made")
        channels[0].send(1, 7, Message((value(OTHER),)))

    def second() -> None:
        channels[1].recv(0, 7)
        found.update(there="made" in device(OTHER).after, here="made" in device(DEVICE).after)

    run(rank_threads, first, second)
    assert found == {"there": True, "here": False}


def test_ranks_begin_after_the_caller_and_the_caller_goes_on_after_them(ranks, device):
    rank_threads, _ = ranks
    seen = []

    def job(rank: int):
        def work() -> None:
            seen.append(set(device(DEVICE).after))
            device(DEVICE).after.add(f"rank {rank}")

        return work

    device(DEVICE).after.add("inputs")
    run(rank_threads, job(0), job(1))
    assert all("inputs" in after for after in seen)
    assert not any(f"rank {n}" in after for n, after in enumerate(seen))
    assert {"rank 0", "rank 1"} <= device(DEVICE).after


def test_the_next_step_waits_for_the_stream_that_used_the_last_ones_results(ranks, device):
    rank_threads, _ = ranks
    seen = []
    run(rank_threads, lambda: None, lambda: None)
    device(DEVICE).after.add("results used")
    with torch.cuda.stream(Queue(DEVICE)):  # another stream calls, which has waited for nothing
        run(rank_threads, lambda: seen.append(set(device(DEVICE).after)), lambda: None)
    assert "results used" in seen[0]


def test_after_a_failed_step_too_the_caller_waits(ranks, device):
    rank_threads, _ = ranks

    def works() -> None:
        device(DEVICE).after.add("worked")

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(rank_threads, works, fails)
    assert "worked" in device(DEVICE).after


def test_steps_after_the_first_make_no_events(ranks, device):
    rank_threads, channels = ranks

    def step() -> None:
        run(rank_threads, lambda: channels[0].send(1, 7, Message((value(),))), lambda: channels[1].recv(0, 7))

    step()
    before = Mark.made
    step()
    assert Mark.made == before == 1


def test_a_step_that_is_timed_looks_up_its_stream_once_and_reuses_its_events(device, monkeypatch):
    class Timing(Mark):
        def __init__(self, enable_timing: bool = False) -> None:
            super().__init__()
            assert enable_timing

    asked = []
    monkeypatch.setattr(torch.cuda, "Event", Timing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: asked.append(place) or device(place))
    records = OpRecords(3, DEVICE)
    for timed in (None, False):  # two events an op are no cost that nobody asked for
        records.begin(timed)
        assert records.now is perf_counter
        assert not records.timed
    assert (asked, Mark.made) == ([], 0)
    for step in range(2):
        device(DEVICE).after.add(f"step {step}")
        records.begin(True)
        moments = [records.now() for _ in range(6)]
        assert records.timed
        assert len(set(map(id, moments))) == 6
        assert all(f"step {step}" in moment.after for moment in moments)
    assert (asked, Mark.made) == ([DEVICE, DEVICE], 6)
    other = Queue(DEVICE)
    other.after.add("other")
    with torch.cuda.stream(other):  # a caller without threads may enter another stream between two steps
        records.begin(True)
    assert records.now().after == {"other"}


def test_the_cpu_has_no_streams_and_no_events(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the CPU needs none")

    for name in ("Stream", "Event", "current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    with Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=4, ranks=2) as pipe:
        pipe.step(*plain.batch(0, 8))
        trace = pipe.trace()
    assert (trace.end >= trace.start).all()
    assert clock(None, 8) is perf_counter
    assert Streams.of([[nn.Linear(2, 2)], [nn.GELU()]]) is None
    channels = thread_channels(lower(build_schedule("1f1b", 2, 4)), Timeout(5.0))
    assert [type(channel) for channel in channels] == [ThreadChannel, ThreadChannel]
    assert not any(isinstance(channel, StreamChannel) for channel in channels)


class Tick:
    """A timing event of a device whose clock the test sets."""

    now = 0.0  # milliseconds

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at = Tick.now

    def synchronize(self) -> None:
        """Nothing is under way."""

    def elapsed_time(self, other: Tick) -> float:
        return other.at - self.at


def test_events_of_all_ranks_of_a_device_are_read_on_one_clock(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Tick)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    first, second = clock(DEVICE, 2), clock(DEVICE, 2)
    moments = {}
    for now, name, mark in ((10.0, "a", first), (11.0, "b", second), (14.0, "c", first), (12.0, "d", second)):
        Tick.now = now
        moments[name] = mark()
    Tick.now = 1000.0
    before = perf_counter()
    readings = Readings()
    later = readings.seconds(DEVICE, [moments["b"], moments["d"]])
    Tick.now = 2000.0  # the second rank is read later, against the same event
    a, c = readings.seconds(DEVICE, [moments["a"], moments["c"]])
    b, d = later
    assert [b - a, d - a, c - a] == pytest.approx([1e-3, 2e-3, 4e-3], abs=1e-9)
    assert before <= a + 0.99 <= perf_counter()
    assert first() is moments["a"]  # the first event again
