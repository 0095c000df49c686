"""Options that give the costs of ops and messages, and sizes in bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import click

from penstock.base.errors import ConfigError
from penstock.schedule.placement import Placement
from penstock.simulate.cost_file import read_costs
from penstock.simulate.costs import Communication, Costs, Link

COSTS = click.option(
    "--costs", default="1,1,1", show_default=True, metavar="FILE|F,B,W",
    help="Seconds that a rank spends on one microbatch's forward, input gradient and weight gradient, shared out over its "
    "stages (a full backward takes B+W), or a TOML or JSON file with the costs of every stage.",
)  # fmt: skip
LATENCY = click.option(
    "--latency", metavar="C", help="Seconds per message between ranks. Default: the file's, or 0."
)
SAVED = click.option(
    "--saved", default="1", metavar="BYTES[,...]",
    help="Bytes that a forward saves for its backward: one number, or one per stage. Default: 1, to count activations.",
)  # fmt: skip
WAITING = click.option(
    "--waiting", default="0", metavar="BYTES[,...]",
    help="Bytes kept from the input-gradient half to the weight half: one number, or one per stage. Default: 0.",
)  # fmt: skip

_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_UNITS = {
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "b": 1,
}  # fmt: skip


def priced(costs: str, latency: str | None, placement: Placement) -> Costs:
    """Return the costs that the options give the stages of a placement."""
    seconds = None if latency is None else _number(latency)
    if latency is not None and seconds is None:
        raise ConfigError(f"--latency must be a number of seconds, got {latency!r}")
    numbers = [_number(word) for word in costs.split(",")]
    if len(numbers) == 3 and None not in numbers:
        f, b, w = (number for number in numbers if number is not None)
        link = Link(seconds or 0)
        return Costs.of(placement, f, b, w, communication=Communication(same_node=link, other_node=link))
    if not os.path.exists(costs):
        raise ConfigError(f"--costs must be three numbers, such as 1,1,1, or a file; {costs!r} is neither")
    return read_costs(costs, placement, seconds)


def late_ranks(texts: Sequence[str]) -> dict[int, float]:
    """Return the shares by which ranks are late, from texts such as ``2=0.1``."""
    late: dict[int, float] = {}
    for text in texts:
        rank, _, share = (part.strip() for part in text.partition("="))
        number = _number(share)
        if not rank.isdecimal() or number is None or int(rank) in late:
            raise ConfigError(f"--late must be RANK=SHARE, each rank once, such as 2=0.1, got {text!r}")
        late[int(rank)] = number
    return late


def parse_bytes(option: str, text: str) -> float:
    """Return a number of bytes given with or without a unit."""
    lower = text.strip().lower()
    unit = next((name for name in _UNITS if lower.endswith(name)), None)
    try:
        size = float(lower.removesuffix(unit or "")) * (_UNITS[unit] if unit else 1)
    except ValueError:
        size = 0.0
    if not 0 < size < 1e18:
        raise ConfigError(
            f"{option} must be bytes above 0 in B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 70GB, got {text!r}"
        )
    return size


def parse_count(option: str, text: str) -> float:
    """Return a large number given with or without K, M, B or T for thousands, millions, billions and trillions."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kmbt]?)", text.strip().lower().replace(",", ""))
    try:
        count = float(match[1]) * _THOUSANDS[match[2]] if match else 0.0
    except ValueError:
        count = 0.0
    if not 1 <= count < 1e18:
        raise ConfigError(f"{option} must be a number from 1, such as 300B or 1.5e12, got {text!r}")
    return count


def stage_bytes(option: str, text: str) -> int | list[int]:
    """Return bytes with or without a unit, as one number or one per stage."""
    try:
        numbers = [
            int(word) if word.strip().isdecimal() else _whole_bytes(option, word) for word in text.split(",")
        ]
    except ConfigError:
        raise ConfigError(
            f"{option} must be a whole number of bytes, or one per stage such as 10,20,30, got {text!r}"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


def _whole_bytes(option: str, text: str) -> int:
    size = parse_bytes(option, text)
    if size != int(size):
        raise ConfigError(f"{option} must be whole bytes, got {text!r}")
    return int(size)


def _number(text: str) -> int | float | None:
    """Parse a number; a whole one stays an int."""
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return None
