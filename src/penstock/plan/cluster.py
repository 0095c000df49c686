"""Clusters: devices, their achieved rates, and the links between them.

A cluster is a preset, such as ``a100-80gb*8x64`` (8 devices a node, 64 nodes), or a TOML file. Presets are fitted to
published runs, or have the figures of a data sheet. A file has these keys::

    name = "mine"
    ranks_per_node = 8
    nodes = 4
    dtype = "bf16"                   # of the matrix products, unless a layout says otherwise
    error = 0.08                     # a step may take 1.08 times as long or short as predicted
    expert_error = 0.3               # the same of mixtures of experts; this is error by default
    reach = {tp = 8, sequence = 8192}  # largest tp and tokens of a sample for which error holds; it is 0.5 beyond

    [device]
    memory = 80e9                    # bytes
    reserve = 4e9                    # bytes that a plan leaves free; this is the default, at most a tenth of the memory
    matmul = {bf16 = 232e12}         # FLOP/s of large matrix products
    matmul_width = 300               # size of matrices at which half of that is reached
    attention = {bf16 = 150e12}      # FLOP/s of fused attention
    memory_bandwidth = 1.8e12        # bytes/s of elementwise kernels, read and written
    score_bandwidth = 1.8e12         # the same for kernels on stored scores of attention
    launch = 5e-6                    # seconds of a kernel launch
    optimizer_bandwidth = 1.5e12     # bytes/s of the optimizer's update

    [node]                           # links within a node
    latency = 5e-6                   # seconds
    bandwidth = 250e9                # bytes/s of a device

    [network]                        # links between nodes
    latency = 2e-5
    bandwidth = 20e9                 # bytes/s of a device
    reduce_bandwidth = 10e9          # bytes/s of a device while all reduce gradients; bandwidth otherwise

    [host]                           # where a store keeps weights; every value has a default
    bandwidth = 31.5e9               # bytes/s between a device and host memory, in each direction
    memory_bandwidth = 204.8e9       # bytes/s of a node's memory, for updates of all its ranks
    disk_bandwidth = 7e9             # bytes/s of a node's disks

Unlike devices are groups: ``rtx-4090*1+rtx-3090*1``, or a file with a ``[[group]]`` for each::

    [[group]]                        # every key of a cluster's file; a preset has the values of those that are left out
    device = "rtx-4090"              # a preset, or [group.device] as above
    ranks_per_node = 1
    nodes = 1

    [between]                        # link between two groups; by default, the slower one of their networks
    same_host = true                 # all groups are in one machine: by default, the slower one of their nodes' links
    latency = 1e-5
    bandwidth = 31.5e9               # bytes/s of a device
"""

from __future__ import annotations

import math
import os.path
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from penstock.base.bounded_io import MEGABYTE, read_bytes
from penstock.base.errors import ConfigError, nearest
from penstock.base.tables import Count, Flag, Number, Table, explain
from penstock.profile.closed_form import Dtype

PRESETS = ("a100-40gb", "a100-80gb", "h100", "h200", "b200", "mi300x")
"""Names of the clusters that are fitted to published runs, one file each in ``penstock/plan/clusters``."""
DATA_SHEETS = (
    "rtx-3090", "rtx-4090", "rtx-5090", "l40s", "a10", "rtx-6000-ada", "v100", "h800", "h20", "gb200",
)  # fmt: skip
"""Names of the clusters with the figures of a data sheet, all in ``penstock/plan/clusters/datasheets.toml``."""
_OTHER_CARDS = frozenset({"laptop", "d", "max"})
"""Words in a device's name that tell a slower card of the same number."""
ERROR_BEYOND = 0.5
"""Least error beyond a cluster's reach, where published steps take up to 1.49 times as long as predicted.

bench/PUBLISHED.md has them. They are A100s with tp = 16, and H100s with samples of 131,072 tokens (1.22 times).
"""
MEASURED_ERROR = 0.1
"""Least error of a cluster whose rates were measured."""
UNSTEADY = 0.2
"""Error above which the rates of a cluster were not steady when they were measured."""
_MAX_BYTES = 4 * MEGABYTE
# An H100's CUDA context takes about half a GB, NCCL's buffers one or two; the rest is for what the allocator fragments.
_RESERVE, _RESERVED_SHARE = 4e9, 0.1
_MAX_DEVICES = 1_000_000
_MAX_GROUPS = 3  # a search tries all orders of them
# Products and quotients of several such numbers are still finite.
_LARGEST = 1e30


def _sized(value: float) -> float:
    if value and not 1 / _LARGEST <= value <= _LARGEST:
        raise ValueError(f"be {1 / _LARGEST:g} to {_LARGEST:g}")
    return value


Size = Annotated[Number, Field(ge=0), AfterValidator(_sized)]
Rate = Annotated[Number, Field(gt=0), AfterValidator(_sized)]
Rates = Annotated[Mapping[Dtype, Rate], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Device(Table):
    """Achieved rates of one device; see the module's docstring for units."""

    memory: Rate
    matmul: Rates
    memory_bandwidth: Rate
    reserve: Size | None = None
    matmul_width: Size = 0.0
    attention: Rates | None = None
    score_bandwidth: Rate | None = None
    launch: Size = 0.0
    optimizer_bandwidth: Rate | None = None
    peak: Rates | None = None

    @property
    def reserved(self) -> float:
        """Bytes of the memory that a plan leaves for the context, buffers of collectives and fragmentation."""
        return min(_RESERVE, _RESERVED_SHARE * self.memory) if self.reserve is None else self.reserve

    @property
    def usable(self) -> float:
        """Bytes of the memory that a plan may use."""
        return self.memory - self.reserved

    def matmul_rate(self, dtype: str, width: float) -> float:
        """Return the FLOP/s of a matrix product of the given width (see `LayerCost`)."""
        return self._of("matmul", self.matmul, dtype) / (1 + self.matmul_width / max(width, 1.0))

    def attention_rate(self, dtype: str) -> float:
        """Return the FLOP/s of fused attention; with fp8 it runs in bf16."""
        table = self.attention or self.matmul
        return table[dtype] if dtype in table else self._of("attention", table, "bf16")

    def peak_rate(self, dtype: str) -> float:
        """Return the rated FLOP/s, the base of MFU; the achieved ones if there is no rating."""
        return self._of("matmul", self.peak or self.matmul, dtype)

    def _of(self, what: str, table: Mapping[str, float], dtype: str) -> float:
        if dtype not in table:
            raise ConfigError(
                f"the cluster has no {what} rate for {dtype}; it has {', '.join(table)}. Choose one of these with "
                "dtype=... in the layout, or add it to the cluster's file"
            )
        return table[dtype]


@dataclass(frozen=True)
class LinkSpeed(Table):
    """A link of one device.

    Attributes:
        latency: seconds of a message whatever its size.
        bandwidth: bytes per second.
        reduce_bandwidth: bytes per second in reductions of gradients; None (default) is `bandwidth`.
    """

    latency: Size = 0.0
    bandwidth: Rate = math.inf
    reduce_bandwidth: Rate | None = None


@dataclass(frozen=True)
class Host(Table):
    """Memory and disks of a node, where a store keeps weights.

    Attributes:
        bandwidth: bytes per second between a device and host memory, each way; by default 16 lanes of PCI Express 4.
        memory_bandwidth: bytes per second of host memory; by default two channels of DDR5-5600, 8 bytes wide.
        disk_bandwidth: bytes per second of the disks; by default about four lanes of PCI Express 4, one NVMe disk.
    """

    bandwidth: Rate = 31.5e9
    memory_bandwidth: Rate = 89.6e9
    disk_bandwidth: Rate = 7e9

    def fetch_rate(self, store: str, devices: int) -> float:
        """Return the bytes per second that each of a node's devices reads from a store while all do."""
        shared = self.disk_bandwidth if store == "disk" else self.memory_bandwidth
        return min(self.bandwidth, shared / devices)


@dataclass(frozen=True, kw_only=True)
class Cluster(Table):
    """Devices on nodes, and the links between them.

    Attributes:
        name: name for messages.
        device: achieved rates of each device.
        ranks_per_node, nodes: number of devices.
        node, network: links within a node and between nodes.
        host: memory and disks of a node.
        dtype: default dtype of matrix products.
        error: a prediction's interval reaches from its seconds / (1 + error) to its seconds * (1 + error); None (default)
            claims no interval.
        expert_error: the same of mixtures of experts; None (default) is `error`.
        reach: largest "tp", and "sequence" (tokens of a sample), for which `error` holds; beyond, it is at least
            `ERROR_BEYOND`. Without them (default), it holds for all.
        op_overhead: seconds that the runtime adds to each op of a schedule.
        step_overhead: seconds that the runtime adds to each step.
        slowdown: factor on the seconds of all ops (default 1), as from a recalibration on a run.
        overlap: True (default) if reductions of gradients hide behind the backward; a layout may say otherwise.
        unfused_dropout: True if models with dropout in attention run kernels that store scores.
        data_sheet: source of the device's figures, if no run on it has been compared with a prediction.
    """

    name: str
    device: Device
    ranks_per_node: Count = 1
    nodes: Count = 1
    node: LinkSpeed = LinkSpeed()
    network: LinkSpeed = LinkSpeed()
    host: Host = Host()
    dtype: str = "bf16"
    error: Annotated[Number, Field(ge=0, lt=1)] | None = None
    expert_error: Annotated[Number, Field(ge=0, le=10)] | None = None
    reach: Annotated[Mapping[Literal["tp", "sequence"], Count], Field(min_length=1)] | None = None
    op_overhead: Size = 0.0
    step_overhead: Size = 0.0
    slowdown: Rate = 1.0
    overlap: Flag = True
    unfused_dropout: Flag = False
    data_sheet: str = ""

    @property
    def devices(self) -> int:
        """Number of devices of all groups."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of devices of every group."""
        return tuple(group.ranks_per_node * group.nodes for group in self.groups)

    def ranks(self, width: int) -> int:
        """Return the number of pipeline ranks that there are devices for: so many for each, which are of one group."""
        return sum(size // width for size in self.sizes)

    @property
    def groups(self) -> tuple[Cluster, ...]:
        """The groups of alike devices, each a cluster, in the order in which pipeline ranks are placed on them."""
        return (self,)

    @property
    def between(self) -> Between:
        """The link between two groups, as it was given."""
        return Between()

    @property
    def link_between(self) -> LinkSpeed:
        """The link between two groups."""
        return self.network

    @property
    def no_interval(self) -> str:
        """Reason why a step has no interval; empty if it may have one."""
        if self.error is not None:
            return ""
        compared = f"no step on {self.name} has been compared with a prediction"
        return compared if self.data_sheet else f"the file of the cluster {self.name} has no error"

    def beyond(self, tp: int, sequence: int) -> str:
        """Return which of a layout's values are beyond the cluster's reach, as text; empty if none is."""
        given, reach = {"tp": tp, "sequence": sequence}, self.reach or {}
        return ", ".join(
            f"{name}={given[name]:,} (above {most:,})" for name, most in reach.items() if given[name] > most
        )

    def link(self, span: int) -> LinkSpeed:
        """Return the slowest link of a ring of `span` neighbouring ranks; between two nodes it uses all links of a node."""
        if span <= self.ranks_per_node:
            return self.node
        bandwidth = min(self.ranks_per_node * self.network.bandwidth, self.node.bandwidth)
        return replace(self.network, bandwidth=bandwidth)

    def ring(self, ranks: int, apart: int, *, within: bool, reduces: bool = False) -> LinkSpeed:
        """Return the slowest link of rings of `ranks` that are so many devices apart; all devices have one at the same time.

        `within` says that they stay within a node; `reduces`, that gradients are reduced.
        """
        node = self.node.reduce_bandwidth or self.node.bandwidth if reduces else self.node.bandwidth
        if within:
            return LinkSpeed(self.node.latency, node)
        network = self.network
        bandwidth = network.reduce_bandwidth or network.bandwidth if reduces else network.bandwidth
        # Neighbours in a ring that share a node share its links, so each of them has that many.
        together = max(1, min(ranks, self.ranks_per_node // apart))
        return LinkSpeed(network.latency, min(together * bandwidth, node))

    def exchange(self, ranks: int) -> LinkSpeed:
        """Return the latency, and the bytes that a rank sends to all of `ranks` neighbours over the seconds it takes.

        A rank's parts for its node and for other nodes leave at the same time, each over its own link.
        """
        near = math.gcd(ranks, self.ranks_per_node)
        parts = [(near - 1, self.node), (ranks - near, self.network)]
        used = [(others / ranks, link) for others, link in parts if others]
        seconds = max((part / link.bandwidth for part, link in used), default=0.0)
        return LinkSpeed(
            max((link.latency for _, link in used), default=0.0), 1 / seconds if seconds else math.inf
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the keys that have a value, as in a cluster's file."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Between(Table):
    """Link between two groups of devices.

    Attributes:
        latency: seconds of a message whatever its size; None (default) is the larger one of the groups' own links.
        bandwidth: bytes per second of a device; None (default) is the smaller one of the groups' own links.
        same_host: True if all groups are in one machine; otherwise (default) each has machines of its own.
    """

    latency: Size | None = None
    bandwidth: Rate | None = None
    same_host: Flag = False


@dataclass(frozen=True, kw_only=True)
class GroupedCluster(Cluster):
    """Groups of unlike devices, in the order in which pipeline ranks are placed on them; made by `joined`.

    Attributes:
        groups, between, link_between: as of any cluster; other attributes that all must share are those of the first group.
    """

    # Without defaults, the properties of `Cluster` would be taken for them.
    groups: tuple[Cluster, ...] = ()
    between: Between = Between()
    link_between: LinkSpeed = LinkSpeed()
    no_interval: ClassVar[str] = "no step on unlike devices has been compared with a prediction"


def common_dtypes(groups: Sequence[Cluster]) -> list[str]:
    """Return the dtypes of matrix products that all groups have rates for."""
    return [dtype for dtype in groups[0].device.matmul if all(dtype in each.device.matmul for each in groups)]


def sized_name(cluster: Cluster) -> str:
    """Return the name of a cluster with its size, such as ``h100*8x4``; of groups, of each of them."""
    return "+".join(
        f"{group.name}*{group.ranks_per_node}{f'x{group.nodes}' if group.nodes > 1 else ''}"
        for group in cluster.groups
    )


def each_group(cluster: Cluster, change: Callable[[Cluster], Cluster]) -> Cluster:
    """Return a cluster in which a change is made to every group."""
    return joined([change(group) for group in cluster.groups], cluster.between)


def joined(groups: Sequence[Cluster], between: Between) -> Cluster:
    """Return a cluster of some groups; of alike devices that the same links join, one without groups.

    Raises:
        ConfigError: if there are too many groups, one machine cannot have them, or no dtype is common to all.
    """
    first, same_host = groups[0], between.same_host
    if len(groups) == 1:
        return first
    name = "+".join(map(sized_name, groups))
    if any(len(group.groups) > 1 for group in groups):
        raise ConfigError(f"{name}: a group has alike devices; write all groups into one file")
    if same_host and any(group.nodes > 1 for group in groups):
        raise ConfigError(f"{name}: same_host is for groups of one machine; leave out same_host, or nodes")
    own = [group.node if same_host else group.network for group in groups]
    latency = max(link.latency for link in own) if between.latency is None else between.latency
    bandwidth = min(link.bandwidth for link in own) if between.bandwidth is None else between.bandwidth
    link = LinkSpeed(latency, bandwidth)
    devices = [replace(group, name="", ranks_per_node=1, nodes=1) for group in groups]
    if all(each == devices[0] for each in devices) and link == replace(own[0], reduce_bandwidth=None):
        # Alike devices whose own links join the groups: a cluster as any other.
        if same_host:
            return replace(first, ranks_per_node=sum(group.ranks_per_node for group in groups))
        if all(group.ranks_per_node == first.ranks_per_node for group in groups):
            return replace(first, nodes=sum(group.nodes for group in groups))
    if len(groups) > _MAX_GROUPS:
        raise ConfigError(
            f"{name}: a cluster has at most {_MAX_GROUPS} groups of unlike devices, got {len(groups)}"
        )
    if not (dtypes := common_dtypes(groups)):
        rates = "; ".join(f"{group.name}: {', '.join(group.device.matmul)}" for group in groups)
        raise ConfigError(f"{name}: the groups have rates of matrix products for no common dtype ({rates})")
    return GroupedCluster(
        **vars(first)
        | {
            "name": name,
            "dtype": first.dtype if first.dtype in dtypes else dtypes[0],
            "step_overhead": max(group.step_overhead for group in groups),
            "overlap": all(group.overlap for group in groups),
            "unfused_dropout": any(group.unfused_dropout for group in groups),
        },
        groups=tuple(groups),
        between=between,
        link_between=link,
    )


_CLUSTER, _BETWEEN = TypeAdapter(Cluster), TypeAdapter(Between)


def read_cluster(text: str | Path) -> Cluster:
    """Return a preset, or a cluster read from a TOML file.

    Args:
        text: name of a preset or path of a file, with ``*N`` for N devices on one node or ``*NxM`` for N on each of M nodes;
            or several, with ``+`` between, for groups of unlike devices.

    Raises:
        ConfigError: if there is no such preset or file, or a value is missing, unknown or out of range.
    """
    name, counts = str(text), None
    if match := re.fullmatch(r"(.+?)\*([0-9]{1,12})(?:[xX]([0-9]{1,12}))?", name):
        name, counts = match[1], (int(match[2]), int(match[3] or 1))
    if name in PRESETS or name in DATA_SHEETS:
        return _sized_as(_from_table(_preset_table(name, counts), name), counts)
    if "+" in name and not os.path.exists(name):
        return joined([read_cluster(part.strip()) for part in str(text).split("+")], Between())
    if name.endswith(".toml") or os.path.exists(name):
        try:
            source = read_bytes(Path(name), _MAX_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the cluster {name!r}: {error}") from error
    else:
        raise ConfigError(
            f"no cluster {name!r}{nearest(name, [*PRESETS, *DATA_SHEETS])}; give a TOML file, or one of "
            f"{', '.join((*PRESETS, *DATA_SHEETS))} with its size, such as a100-80gb*8x4 for 4 nodes of 8"
        )
    try:
        table = tomllib.loads(source)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not TOML: {error}") from error
    if "group" in table or "between" in table:
        if counts is not None:
            raise ConfigError(f"{name} has groups with sizes of their own, got {text}; leave out the size")
        return _of_groups(table, name)
    return _sized_as(_from_table(table, name), counts)


def _of_groups(table: dict[str, Any], name: str) -> Cluster:
    """Return the cluster of a file with groups."""
    allowed = ("group", "between")
    for key in table:
        if key not in allowed:
            raise ConfigError(
                f"{name}: no key {key}{nearest(key, list(allowed))} beside groups; there are [[group]] and [between], and "
                "other keys belong to a group"
            )
    tables = table.get("group")
    if not isinstance(tables, list) or not tables or not all(isinstance(each, dict) for each in tables):
        raise ConfigError(f"{name}: groups are tables of the name [[group]], one for each")
    groups = []
    for number, own in enumerate(tables):
        where = f"{name}: group {number}"
        device = own.get("device")
        if isinstance(device, str):
            if device not in (*PRESETS, *DATA_SHEETS):
                raise ConfigError(
                    f"{where}: device must be a preset or a table, got {device!r}{nearest(device, [*PRESETS, *DATA_SHEETS])}"
                )
            nodes = own.get("nodes", 1)
            counts = (1, nodes) if isinstance(nodes, int) else None
            own = {**_preset_table(device, counts), "nodes": 1, **own}
            own["device"] = _preset_table(device, None)["device"]
        groups.append(_sized_as(_from_table({"name": f"{Path(name).stem}-{number}", **own}, where), None))
    try:
        between = _BETWEEN.validate_python(table.get("between", {}))
    except ValidationError as error:
        raise ConfigError(
            f"{name}: between: {explain(error, lambda key: _keys_near(key, Between))}"
        ) from None
    return joined(groups, between)


def _sized_as(cluster: Cluster, counts: tuple[int, int] | None) -> Cluster:
    """Return a cluster with so many devices a node and nodes, or its own if None."""
    if counts is not None:
        cluster = replace(cluster, ranks_per_node=counts[0], nodes=counts[1])
    if not 1 <= cluster.devices <= _MAX_DEVICES:
        raise ConfigError(
            f"{cluster.name}: a cluster has 1 to {_MAX_DEVICES:,} devices, got {cluster.ranks_per_node} x {cluster.nodes}"
        )
    return cluster


def _preset(name: str) -> dict[str, Any]:
    """Return the tables of a file that comes with Penstock; one that is `like` another has the other's values besides."""
    table = tomllib.loads((files("penstock.plan") / "clusters" / f"{name}.toml").read_text())
    if other := table.pop("like", None):
        values = _preset(other)
        return {**values, **table, "name": name, "device": values["device"] | table["device"]}
    return table


def _preset_table(name: str, counts: tuple[int, int] | None) -> dict[str, Any]:
    """Return the tables of a preset; of a data sheet, with the shares of its ratings that fitted presets reach."""
    if name in PRESETS:
        return _preset(name)
    tables = _preset("datasheets")
    sheet, rates, links = tables["devices"][name], tables["rates"], tables["links"]
    most = sheet.get("most_nodes")
    if most is not None and counts is not None and counts[1] > most:
        raise ConfigError(
            f"{name} has links for {most} nodes, which share NVLink, got {counts[1]}; give a TOML file with the links "
            "between your racks"
        )
    peak, bandwidth = sheet["tflops"] * 1e12, sheet["memory_bandwidth"]
    dtypes = ("fp16",) if "dtype" in sheet else ("bf16", "fp16")
    return {
        "name": name,
        "data_sheet": sheet["source"],
        "ranks_per_node": sheet["ranks_per_node"],
        "dtype": dtypes[0],
        "node": links[sheet["node"]],
        "network": links[sheet["network"]],
        "host": tables["hosts"][sheet["host"]],
        "device": {
            "memory": sheet["memory"],
            "peak": dict.fromkeys(dtypes, peak),
            "matmul": dict.fromkeys(dtypes, peak * rates["matmul"]),
            "matmul_width": rates["matmul_width"],
            "attention": dict.fromkeys(dtypes, peak * rates["attention"]),
            "memory_bandwidth": bandwidth * rates["memory_bandwidth"],
            "optimizer_bandwidth": bandwidth * rates["optimizer_bandwidth"],
            "launch": rates["launch"],
        },
    }


def rated_flops(device: str, dtype: str) -> float | None:
    """Return the rated FLOP/s of a device by its driver's name for it, as "NVIDIA H100 80GB HBM3"; None if unknown."""
    words = set(re.split(r"[^a-z0-9]+", device.lower()))
    for preset in (*PRESETS, *DATA_SHEETS):
        # Devices with more memory are rated alike.
        named = {word for word in preset.split("-") if not word.endswith("gb")}
        if named <= words and not words & _OTHER_CARDS:
            return (read_cluster(preset).device.peak or {}).get(dtype)
    return None


def with_memory(cluster: Cluster, memory: float) -> Cluster:
    """Return a cluster on whose devices a plan may use so many bytes of memory, without a reserve."""

    def limited(group: Cluster) -> Cluster:
        most = group.device.memory
        if not 0 < memory <= most:
            raise ConfigError(
                f"the memory limit must be above 0 and at most {most / 1e9:.4g} GB, the memory of a device of {group.name}, "
                f"got {memory / 1e9:.4g} GB"
            )
        return replace(group, device=replace(group.device, memory=float(memory), reserve=0.0))

    return each_group(cluster, limited)


def _from_table(table: dict[str, Any], name: str) -> Cluster:
    try:
        cluster = _CLUSTER.validate_python({"name": Path(name).stem, **table})
    except ValidationError as error:
        raise ConfigError(f"{name}: {explain(error, _near)}") from None
    device = cluster.device
    if cluster.dtype not in device.matmul:
        raise ConfigError(
            f"{name}: dtype is {cluster.dtype!r}, but device.matmul has rates for {', '.join(device.matmul)}"
        )
    if device.usable <= 0:
        raise ConfigError(
            f"{name}: device.reserve must be below device.memory, {device.memory:g}, got {device.reserved:g}"
        )
    return cluster


def _near(name: str) -> str:
    """Return the keys that are meant by an unknown one, and all keys of its section."""
    section, _, key = name.rpartition(".")
    kind = {"": Cluster, "device": Device, "host": Host}.get(section, LinkSpeed)
    return _keys_near(key, kind)


def _keys_near(key: str, kind: type[Table]) -> str:
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # tables are dataclasses
    return f"{nearest(key, known)}; there are {', '.join(known)}"
