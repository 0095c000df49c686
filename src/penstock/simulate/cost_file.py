"""Costs from a TOML file, or from a JSON file if its name ends in ``.json``.

::

    F = 10.4                           # seconds of one microbatch: a number, which a rank's stages share,
    B = 10.2                           #   or a list with the seconds of every stage
    W = [7.7, 7.7, 7.7, 9.1]
    # optional
    full = 17.9                        # a full backward; B + W otherwise
    R = 10.4                           # a recompute; F otherwise
    pair = 25.0                        # a fused pair; the sum of its halves otherwise
    pair_output = "end"                # or "early": each half's output leaves when the half is done
    message_bytes = 8388608            # an activation's bytes, or a list with the bytes over every boundary
    latency = 0.00001                  # seconds; this and the next are numbers, or lists with those over every boundary
    bandwidth = 200e9                  # bytes per second
    ranks_per_node = 8
    latency_between_nodes = 0.00003    # as within a node otherwise
    bandwidth_between_nodes = 40e9
    gather = 3.1                       # one gather of a rank's weights that replicas shard; not simulated otherwise
    reduce = [0.8, 0.8, 0.8, 0.9]      # one reduction of its gradients that they shard; not simulated otherwise
    blocks = "none"                    # or "sender", "receiver", "both": who cannot compute meanwhile
"""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

from penstock.base.atomic import write_text
from penstock.base.bounded_io import MEGABYTE, read_bytes
from penstock.base.errors import ConfigError, DataError, nearest
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.simulate.costs import Communication, Costs, Link

_MAX_BYTES = 64 * MEGABYTE
_NEEDED = ("F", "B", "W")
_LINK = {"message_bytes": 0, "latency": 0, "bandwidth": math.inf}
_NODES = dict.fromkeys(("ranks_per_node", "latency_between_nodes", "bandwidth_between_nodes"))
_SHARDED = {"gather": None, "reduce": None, "blocks": "none"}
_OPTIONAL = {"full": None, "R": None, "pair": None, "pair_output": "end", **_LINK, **_NODES, **_SHARDED}


def read_costs(path: str | Path, placement: Placement, latency: float | int | None = None) -> Costs:
    """Read the costs of a placement's stages from a file; `latency` replaces all latencies of the file."""
    table = _read(Path(path))
    allowed = [*_NEEDED, *_OPTIONAL]
    for key in table:
        if key not in allowed:
            raise ConfigError(
                f"{path}: no cost is called {key!r}{nearest(key, allowed)}; there are {', '.join(allowed)}"
            )
    for key in _NEEDED:
        if key not in table:
            raise ConfigError(f"{path}: {key} is missing; F, B and W are needed")
    try:
        return _costs(_OPTIONAL | table, placement, latency)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def write_costs(path: str | Path, costs: Costs, comment: str) -> Path:
    """Write the costs of every stage to a file that `read_costs` reads: TOML, or JSON if its name ends in ``.json``.

    Both links are taken to be as fast as the one within a node.
    """
    path = Path(path)
    columns = {"F": Kind.F, "B": Kind.I, "W": Kind.W, "full": Kind.B, "R": Kind.R}
    table: dict[str, Any] = {key: costs.seconds[:, kind].tolist() for key, kind in columns.items()}
    for key in ("pair", "gather", "reduce"):
        if (column := getattr(costs, key)) is not None:
            table[key] = column.tolist()
    if (links := costs.communication.boundaries) is None:
        table["latency"] = costs.communication.same_node.latency
    else:
        table["latency"] = [link.latency for link in links]
    if path.suffix == ".json":
        text = json.dumps(table, indent=1) + "\n"
    else:
        text = "".join([f"# {comment}\n", *(f"{key} = {value!r}\n" for key, value in table.items())])
    try:
        write_text(path, text)
    except OSError as error:
        raise DataError(f"cannot write the costs {path}: {error.strerror}") from error
    return path


def _costs(table: dict[str, Any], placement: Placement, latency: float | int | None) -> Costs:
    if latency is not None:
        table |= {"latency": latency, "latency_between_nodes": None}
    return Costs.of(
        placement,
        *(table[key] for key in _NEEDED),
        full=table["full"],
        recompute=table["R"],
        pair=table["pair"],
        pair_output=table["pair_output"],
        communication=_communication(table, placement.stages - 1),
        gather=table["gather"],
        reduce=table["reduce"],
    )


def _communication(table: dict[str, Any], boundaries: int) -> Communication:
    """Return links within and between nodes or, where latency or bandwidth is a list, over every boundary."""
    size, blocks = table["message_bytes"], table["blocks"]
    speeds = {key: table[key] for key in ("latency", "bandwidth")}
    if any(isinstance(value, list) for value in speeds.values()):
        if given := [key for key in _NODES if table[key] is not None]:
            raise ConfigError(
                f"{given[0]} is for one latency and one bandwidth; leave it out beside lists of them"
            )
        columns = [value if isinstance(value, list) else [value] * boundaries for value in speeds.values()]
        for key, column in zip(speeds, columns, strict=True):
            if len(column) != boundaries:
                raise ConfigError(
                    f"{key} gives {len(column)} numbers, and there are {boundaries} boundaries between stages"
                )
        return Communication(
            size, blocks=blocks, boundaries=[Link(*pair) for pair in zip(*columns, strict=True)]
        )
    near = Link(**speeds)
    far_latency, far_bandwidth = table["latency_between_nodes"], table["bandwidth_between_nodes"]
    far = Link(
        near.latency if far_latency is None else far_latency,
        near.bandwidth if far_bandwidth is None else far_bandwidth,
    )
    return Communication(size, near, far, table["ranks_per_node"], blocks)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_bytes(path, _MAX_BYTES, pipes=True).decode("utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the costs {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path} is not a {kind} file: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path} holds a {type(table).__name__}, not a table of costs")
    return table
