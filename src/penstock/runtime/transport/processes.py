"""One process's end of its edges: shared memory to ranks on this machine, ``torch.distributed`` to all other ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import distributed as dist

from penstock.base.errors import CallOrderError, PeerError, TransportError
from penstock.base.host import core_limits
from penstock.runtime.health.hang import Timeout
from penstock.runtime.health.peers import PeerRegistry, supported
from penstock.runtime.health.rank_progress import WAITS, RankProgress, other_calls
from penstock.runtime.transport.channel import Failure
from penstock.runtime.transport.process_group import Bulk, GroupIncoming, GroupOutgoing
from penstock.runtime.transport.shared_memory import Host, SharedIncoming, SharedOutgoing, WakePipe
from penstock.stage.values import Message

SWITCH = "PENSTOCK_SHARED_MEMORY"
"""Environment variable; ``0`` sends all messages through ``torch.distributed``."""

_EVALUATION = 1 << 40
"""Bit that the tags of an evaluation's messages have besides the row of the op."""
_MICROBATCHES = 41
"""Bits of a tag below the number of the step's microbatches."""


class ProcessChannel:
    """One process's end of all its edges; every rank makes its own at the same time.

    Args:
        incoming, outgoing: (slots, capacity) of the edge from and to each peer.
    """

    one_process = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        exchange: Callable[[Any], list[Any]],
        *,
        incoming: Mapping[int, tuple[int, int]],
        outgoing: Mapping[int, tuple[int, int]],
        timeout: Timeout,
        bulk: Mapping[tuple[int, int], Bulk] | None = None,
        peer_registry: PeerRegistry | None = None,
    ) -> None:
        shares = not bulk and supported() and os.environ.get(SWITCH, "1") != "0"
        self._peer_registry = peer_registry if peer_registry is not None else PeerRegistry()
        self._wake_pipe = WakePipe(self._peer_registry) if shares else None
        self.progress = self._peer_registry.progress
        self.all_progress: Sequence[RankProgress | None] = ()
        self.hosts: Sequence[str] = ()
        rank = dist.get_rank(group)
        communicators = bulk or {}
        self._out: dict[int, GroupOutgoing | SharedOutgoing] = {}
        self._in: dict[int, GroupIncoming | SharedIncoming] = {}
        self._open_shared(exchange, incoming, outgoing, timeout)
        for peer, (slots, capacity) in sorted(outgoing.items()):
            if peer not in self._out:
                self._out[peer] = GroupOutgoing(
                    group, peer, slots, capacity, timeout, communicators.get((rank, peer))
                )
        for peer, (slots, capacity) in sorted(incoming.items()):
            if peer not in self._in:
                self._in[peer] = GroupIncoming(
                    group, peer, slots, capacity, timeout, communicators.get((peer, rank))
                )
        self._rank = rank
        self._step = 0
        self._early: dict[int, tuple[int, int, Message | Failure]] = {}
        self._kind = 0  # the bits that tags have besides the row
        self._aside: dict[tuple[int, int], Message] = {}  # by peer and tag
        self._taken: dict[int, int] = {}  # messages of this step, by peer
        # Peers whose notice of a failed step has come, or whose connection broke.
        self._ended: set[int] = set()

    def _open_shared(
        self,
        exchange: Callable[[Any], list[Any]],
        incoming: Mapping[int, tuple[int, int]],
        outgoing: Mapping[int, tuple[int, int]],
        timeout: Timeout,
    ) -> None:
        """Open the edges that can go through shared memory; both ends must be able to."""
        wake_pipe = self._wake_pipe
        hosts: list[Host | None] = exchange(wake_pipe.host if wake_pipe is not None else None)
        offered: dict[int, SharedOutgoing] = {}
        if wake_pipe is not None:
            near = [host is not None and host.machine == wake_pipe.host.machine for host in hosts]
            if sum(near) > len(core_limits().cpus):
                wake_pipe.spins = 0
            for peer, (_, capacity) in sorted(outgoing.items()):
                host = hosts[peer]
                if host is not None and near[peer]:
                    # Another container or user may hide its files; then the edge goes through the group.
                    with contextlib.suppress(OSError):
                        offered[peer] = SharedOutgoing(peer, capacity, timeout, wake_pipe, host)
        offers = exchange({peer: edge.offer() for peer, edge in offered.items()})
        rank = hosts.index(wake_pipe.host) if wake_pipe is not None else -1
        for peer in sorted(incoming):
            host = hosts[peer]
            if wake_pipe is not None and host is not None and rank in offers[peer]:
                with contextlib.suppress(OSError):  # as above
                    self._in[peer] = SharedIncoming(peer, timeout, wake_pipe, host, offers[peer][rank])
        opened: list[set[int]] = exchange(set(self._in))
        for peer, edge in offered.items():
            if rank in opened[peer]:
                self._out[peer] = edge
                edge.check = partial(self._require_no_notice, peer)
            else:
                edge.close()

    @property
    def ways(self) -> dict[int, str]:
        """Transport to each peer: "shared memory" or "process group"."""
        return {
            peer: "shared memory" if isinstance(edge, SharedOutgoing) else "process group"
            for peer, edge in self._out.items()
        }

    def widen(self, outgoing: Mapping[int, int]) -> None:
        """Let at least so many messages be under way to each peer; each rank does so for itself, between two steps."""
        self._drop_before(self._step + 1)
        for peer, capacity in outgoing.items():
            self._out[peer].widen(capacity)

    def _drop_before(self, step: int) -> None:
        for incoming in self._in.values():
            if isinstance(incoming, SharedIncoming):
                incoming.drop_before(step)

    def open(self, step: int, trains: bool = True, microbatches: int = 0) -> None:
        self._step = step
        self._kind = (0 if trains else _EVALUATION) | microbatches << _MICROBATCHES
        self._aside.clear()
        self._early = {peer: early for peer, early in self._early.items() if early[0] >= step}
        self._drop_before(step)
        self._taken = dict.fromkeys(self._in, 0)
        self._ended.clear()
        self._peer_registry.report_error("")

    def find_failed(self, patience: float = 0.0) -> str | None:
        return self._peer_registry.find_failed(patience)

    def send(self, peer: int, tag: int, message: Message) -> None:
        self.progress[WAITS] = peer + 1
        self._out[peer].send(self._step, tag | self._kind, message)
        self.progress[WAITS] = 0

    def recv(self, peer: int, tag: int) -> Message:
        tag |= self._kind
        if (peer, tag) in self._aside:
            return self._aside.pop((peer, tag))
        self.progress[WAITS] = peer + 1
        while True:
            step, arrived, content = self._next(peer)
            if step < self._step:
                continue  # left by a step that failed
            self._require_present(peer, step, arrived, content)
            if isinstance(content, Failure):
                self._ended.add(peer)
                raise PeerError(content.message, content)
            if (arrived ^ self._kind) >= _EVALUATION:
                raise self._other_call(peer, arrived)
            self._taken[peer] += 1
            if arrived == tag:
                self.progress[WAITS] = 0
                return content
            self._aside[peer, arrived] = content

    def _require_present(self, peer: int, step: int, arrived: int, content: Message | Failure) -> None:
        """Raise if what has arrived is of a later step, for which it is kept: this one has failed at its sender."""
        if step > self._step:
            self._early[peer] = step, arrived, content
            raise PeerError(f"rank {peer} is in step {step}; step {self._step} failed there")

    def _next(self, peer: int) -> tuple[int, int, Message | Failure]:
        if peer in self._early:
            return self._early.pop(peer)
        try:
            return self._in[peer].next()
        except TransportError:
            self._peer_registry.require_same_call()  # the connection of a rank that has left after it was told
            raise

    def _require_no_notice(self, peer: int) -> None:
        """Raise if a rank that this one waits to send to has failed: it takes no more messages in this step."""
        incoming = self._in.get(peer)
        while isinstance(incoming, SharedIncoming) and peer not in self._early and incoming.has_notice:
            step, arrived, content = incoming.next()
            self._require_present(peer, step, arrived, content)
            if isinstance(content, Failure) and step == self._step:
                raise PeerError(content.message, content)

    def _other_call(self, peer: int, arrived: int) -> CallOrderError:
        kinds = (self._kind, arrived)
        calls = ["pipe.evaluate()" if kind & _EVALUATION else "pipe.step()" for kind in kinds]
        if calls[0] == calls[1]:
            own = self._peer_registry.call.removesuffix(")")
            calls = [f"{own}microbatches={kind >> _MICROBATCHES})" for kind in kinds]
        return CallOrderError(other_calls(dict(zip((self._rank, peer), calls, strict=True))))

    def fail(self, failure: Failure) -> None:
        self._peer_registry.report_error(failure.message)
        for edge in self._out.values():
            # A peer that is gone must not keep the notice from the other ranks.
            with contextlib.suppress(TransportError, RuntimeError):
                edge.notify(self._step, failure)

    def drain(self, senders: Sequence[int]) -> None:
        # A send through a process group waits until it is received; no notice can end the wait.
        # In the order of the step's own receives, which the schedule's check has proved to be free of deadlock.
        taken = dict(self._taken)
        for peer in senders:
            if taken[peer]:
                taken[peer] -= 1
            elif peer not in self._ended and isinstance(self._in[peer], GroupIncoming):
                self._drop_next(peer)

    def _drop_next(self, peer: int) -> None:
        """Drop the next message of this step from a rank."""
        incoming = self._in[peer]
        try:
            step, _, content = incoming.next()
            while step < self._step:  # left by an earlier step that failed
                step, _, content = incoming.next()
        except TransportError:
            self._ended.add(peer)
            return
        if isinstance(content, Failure):
            self._ended.add(peer)

    def finish(self) -> None:
        assert not self._aside, f"messages that were never taken: {sorted(self._aside)}"
        for edge in self._out.values():
            edge.wait_sent()

    def close(self) -> None:
        self._aside.clear()
        for receiver in self._in.values():
            receiver.close()
        for sender in self._out.values():
            sender.close()
        self._in.clear()
        self._out.clear()
        if self._wake_pipe is not None:
            self._wake_pipe.close()
