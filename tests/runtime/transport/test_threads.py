"""Channels between the threads of one process."""

from __future__ import annotations

import torch

from penstock.runtime.health.hang import Timeout
from penstock.runtime.transport.threads import thread_channels
from penstock.schedule.families import build_schedule
from penstock.schedule.program import lower
from penstock.stage.values import Message


def message(number: float) -> Message:
    return Message((torch.tensor(number),))


def test_messages_of_one_tag_from_two_peers_are_kept_apart():
    """Sums of gradients that several ranks hold have one tag, and come in any order."""
    channels = thread_channels(lower(build_schedule("gpipe", 3, 3)), Timeout(5.0), holders=[(0, 1, 2)] * 3)
    for channel in channels:
        channel.open(1)
    shared, later = 100, 101
    for peer in (1, 2):
        channels[peer].send(0, shared, message(peer))
        channels[peer].send(0, later, message(10 * peer))
    # What is waited for comes second from both peers, so both first ones are put aside.
    assert [channels[0].recv(peer, later).leaves[0].item() for peer in (1, 2)] == [10, 20]
    assert [channels[0].recv(peer, shared).leaves[0].item() for peer in (2, 1)] == [2, 1]
    channels[0].finish()
