"""The interface for gloo is set where the host's name does not tell, and nowhere else; `tests/hosts` tries it on hosts."""

from __future__ import annotations

import os
import sys

import pytest

from penstock.runtime.start import meeting
from penstock.runtime.start.launchers import Launch
from penstock.runtime.start.meeting import INTERFACE, choose_interface


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "")  # so that it is put back
    del os.environ[INTERFACE]


def chosen(address: str, **more: int) -> str | None:
    choose_interface(Launch(launcher="a launcher", rank=0, size=4, address=address, port=29500, **more))
    return os.environ.get(INTERFACE)


def test_nothing_is_set_if_the_user_has_or_if_there_is_no_launcher(monkeypatch: pytest.MonkeyPatch):
    choose_interface(None)
    assert INTERFACE not in os.environ
    monkeypatch.setenv(INTERFACE, "ib0")
    assert chosen("127.0.0.1") == "ib0"


@pytest.mark.parametrize(
    ("own", "address", "local_size", "interface"),
    [
        ("192.0.2.7", "127.0.0.1", None, "lo"),
        # The host's name has an address that others reach, or all processes are on this host: left to gloo.
        ("192.0.2.7", "192.0.2.1", None, None),
        ("127.0.1.1", "name-of-this-host", 4, None),
    ],
)
def test_the_loopback_interface_is_for_one_machine(monkeypatch, own, address, local_size, interface):
    monkeypatch.setattr(meeting, "address_of_name", lambda: own)
    assert chosen(address, local_size=local_size) == interface


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the interfaces")
def test_the_way_to_an_address_of_this_host_is_the_interface_that_has_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meeting, "address_of_name", lambda: "127.0.1.1")
    for address, name in meeting.reachable_interfaces().items():
        assert meeting.interface_towards(address) == name
    assert chosen("an unknown name", local_size=2) in (None, *meeting.reachable_interfaces().values())
