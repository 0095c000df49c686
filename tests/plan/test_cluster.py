"""Clusters: presets and TOML files."""

from __future__ import annotations

import math
import statistics
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.plan import cluster as module
from penstock.plan.cluster import (
    DATA_SHEETS,
    PRESETS,
    Cluster,
    Device,
    LinkSpeed,
    rated_flops,
    read_cluster,
    with_memory,
)

DEVICE = "[device]\nmemory = 1e9\nmemory_bandwidth = 1e9\nmatmul = {bf16 = 1e12}\n"


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "mine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("device", "dtype", "rated"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("NVIDIA A100-SXM4-40GB", "fp16", 312e12),
        ("AMD Instinct MI300X", "fp8", 2615e12),
        ("NVIDIA A100-SXM-64GB", "bf16", 312e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H20", "bf16", 148e12),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_a_device_is_rated_by_the_name_that_its_driver_gives(device: str, dtype: str, rated: float | None):
    assert rated_flops(device, dtype) == rated


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sound(name: str):
    cluster = read_cluster(f"{name}*8x64")
    assert (cluster.ranks_per_node, cluster.nodes, cluster.devices) == (8, 64, 512)
    device = cluster.device
    for dtype, rate in device.matmul.items():
        assert 0.3 * device.peak_rate(dtype) < rate <= device.peak_rate(dtype)
        assert 0 < device.matmul_rate(dtype, 64) < device.matmul_rate(dtype, 8192) <= rate
    assert cluster.node.bandwidth > cluster.network.bandwidth
    assert cluster.link(8) is cluster.node
    assert cluster.exchange(1) == LinkSpeed(0, math.inf)
    assert cluster.exchange(4).bandwidth == pytest.approx(cluster.node.bandwidth * 4 / 3)
    assert cluster.exchange(16).bandwidth == pytest.approx(cluster.network.bandwidth * 2)
    assert cluster.link(9).latency == cluster.network.latency
    # Ranks of two nodes use all links of a node.
    assert cluster.link(9).bandwidth == min(8 * cluster.network.bandwidth, cluster.node.bandwidth)
    assert cluster.dtype in device.matmul


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_data_sheets_give_clusters_without_an_interval(name: str):
    cluster = read_cluster(f"{name}*2x4")
    assert (cluster.ranks_per_node, cluster.nodes, cluster.error) == (2, 4, None)
    assert cluster.data_sheet.startswith("NVIDIA")
    assert cluster.dtype == ("fp16" if name == "v100" else "bf16")
    assert cluster.device.matmul[cluster.dtype] == pytest.approx(
        0.63 * cluster.device.peak_rate(cluster.dtype)
    )
    assert cluster.node.bandwidth >= cluster.network.bandwidth


def test_rates_of_data_sheets_are_medians_of_the_shares_that_fitted_presets_reach():
    """Ratings of memory and links, in one direction: data sheets of A100 80 GB SXM, H100 SXM and B200."""
    fitted = [read_cluster(name) for name in ("a100-80gb", "h100", "b200")]
    rated_memory, rated_links = (2.039e12, 3.35e12, 8e12), (300e9, 450e9, 900e9)
    rates = tomllib.loads((Path(module.__file__).parent / "clusters" / "datasheets.toml").read_text())[
        "rates"
    ]

    def share(found: list[float]) -> float:
        return statistics.median(found)

    devices = [cluster.device for cluster in fitted]
    assert rates["matmul"] == pytest.approx(
        share([d.matmul["bf16"] / d.peak_rate("bf16") for d in devices]), abs=5e-4
    )
    attention = share([d.attention_rate("bf16") / d.peak_rate("bf16") for d in devices])
    assert rates["attention"] == pytest.approx(attention, abs=5e-4)
    memory = share([d.memory_bandwidth / rated for d, rated in zip(devices, rated_memory, strict=True)])
    assert rates["memory_bandwidth"] == pytest.approx(memory, abs=5e-4)
    updates = share(
        [(d.optimizer_bandwidth or 0) / rated for d, rated in zip(devices, rated_memory, strict=True)]
    )
    assert rates["optimizer_bandwidth"] == min(1.0, updates)
    # Links of data sheets have their ratings.
    links = share(
        [cluster.node.bandwidth / rated for cluster, rated in zip(fitted, rated_links, strict=True)]
    )
    assert min(1.0, links) == 1.0
    assert rates["matmul_width"] == share([d.matmul_width for d in devices])
    assert rates["launch"] == share([d.launch for d in devices])


@pytest.mark.parametrize(
    ("name", "like", "bandwidths"), [("h200", "h100", 4.8 / 3.35), ("a100-40gb", "a100-80gb", 1555 / 2039)]
)
def test_a_preset_that_is_like_another_has_its_rates_but_for_memory(name: str, like: str, bandwidths: float):
    one, other = read_cluster(name), read_cluster(like)
    assert one.name == name
    assert (one.node, one.network, one.reach, one.overlap) == (
        other.node,
        other.network,
        other.reach,
        other.overlap,
    )
    assert (one.device.matmul, one.device.launch) == (other.device.matmul, other.device.launch)
    assert one.device.memory_bandwidth == pytest.approx(bandwidths * other.device.memory_bandwidth, rel=5e-3)


def test_a_data_sheet_has_links_for_no_more_nodes_than_share_them():
    assert read_cluster("gb200*4x18").devices == 72
    with pytest.raises(ConfigError, match="gb200 has links for 18 nodes, which share NVLink, got 19"):
        read_cluster("gb200*4x19")


def test_sizes_of_a_preset():
    assert read_cluster("h100").devices == read_cluster("h100*8").devices == 8
    assert read_cluster("h100*4").ranks_per_node == 4
    assert read_cluster("h100*4X3").nodes == 3


def test_the_files_keys_are_read(tmp_path: Path):
    """The example of the module's docstring, which also names every unit."""
    lines = (module.__doc__ or "").split("::\n", 1)[1].split("\n\nUnlike devices")[0].splitlines()
    path = written(tmp_path, "\n".join(line.strip() for line in lines))
    cluster = read_cluster(path)
    assert (cluster.name, cluster.devices, cluster.error) == ("mine", 32, 0.08)
    assert cluster.device == Device(
        memory=80e9, matmul={"bf16": 232e12}, memory_bandwidth=1.8e12, reserve=4e9, matmul_width=300,
        attention={"bf16": 150e12}, score_bandwidth=1.8e12, launch=5e-6, optimizer_bandwidth=1.5e12,
    )  # fmt: skip
    assert (cluster.reach, cluster.expert_error) == ({"tp": 8, "sequence": 8192}, 0.3)
    assert cluster.node == LinkSpeed(5e-6, 250e9)
    assert cluster.network == LinkSpeed(2e-5, 20e9, 10e9)
    assert read_cluster(f"{path}*2x5").devices == 10


def test_the_example_of_the_docs_is_a_cluster(tmp_path: Path):
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    lines = page.split("## The cluster's file", 1)[1].split("\n## ", 1)[0].splitlines()
    path = written(tmp_path, "\n".join(line.strip() for line in lines if line.startswith("    ")))
    text = path.read_text()
    assert read_cluster(path).devices == 32
    assert all(f"{field.name} = " in text for field in fields(Device) + fields(LinkSpeed))
    assert all(f"{field.name}" in page for field in fields(Cluster))


def test_a_file_needs_only_a_device(tmp_path: Path):
    cluster = read_cluster(written(tmp_path, DEVICE))
    assert (cluster.name, cluster.devices) == ("mine", 1)
    assert cluster.node == cluster.network == LinkSpeed()


@pytest.mark.parametrize(
    ("memory", "reserve", "usable"),
    [("80e9", "", 76e9), ("1e9", "", 0.9e9), ("80e9", "reserve = 0", 80e9), ("80e9", "reserve = 30e9", 50e9)],
)
def test_a_device_has_a_reserve_that_a_limit_replaces(
    memory: str, reserve: str, usable: float, tmp_path: Path
):
    cluster = read_cluster(written(tmp_path, f"{DEVICE.replace('1e9', memory, 1)}{reserve}"))
    assert cluster.device.usable == usable == cluster.device.memory - cluster.device.reserved
    limited = with_memory(cluster, float(memory)).device
    assert (limited.usable, limited.reserved) == (float(memory), 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEVICE + "lanch = 3", r"no key device\.lanch \(did you mean 'launch'"),
        ("nodess = 3\n" + DEVICE, r"no key nodess \(did you mean 'nodes'"),
        (DEVICE + "[node]\nlatencyy = 1", r"no key node\.latencyy \(did you mean 'latency'"),
        (DEVICE + "[host]\nmemory = 1", r"no key host\.memory; there are bandwidth, memory_bandwidth, disk_bandwidth"),
        (DEVICE + "launch = -1", "device.launch must be greater than or equal to 0, got -1"),
        (DEVICE + "launch = nan", "device.launch must be a finite number, got nan"),
        (DEVICE + "launch = inf", "device.launch must be a finite number, got inf"),
        (DEVICE + "launch = true", "device.launch must be a valid number, got True"),
        (DEVICE + "launch = '1'", "device.launch must be a valid number, got '1'"),
        (DEVICE + "optimizer_bandwidth = 0", "device.optimizer_bandwidth must be greater than 0"),
        (DEVICE.replace("1e9", "1" + "0" * 400, 1), "device.memory must be a valid number"),
        (DEVICE.replace("memory = 1e9\n", ""), "device.memory is missing"),
        (DEVICE.replace("{bf16 = 1e12}", "3"), "device.matmul must be a table, got 3"),
        (DEVICE.replace("{bf16 = 1e12}", "{}"), "device.matmul must have at least 1 item"),
        (DEVICE.replace("bf16", "bf61"), r"device.matmul.bf61 must be one of .* \(did you mean 'bf16'"),
        (DEVICE + "peak = {bf16 = -1}", "device.peak.bf16 must be greater than 0"),
        (DEVICE + "reserve = 1e9", "device.reserve must be below device.memory, 1e[+]09, got 1e[+]09"),
        (DEVICE + "[network]\nbandwidth = 0", "network.bandwidth must be greater than 0"),
        ("node = 3\n" + DEVICE, "node must be a table, got 3"),
        ("nodes = 0\n" + DEVICE, "nodes must be greater than or equal to 1, got 0"),
        ("nodes = true\n" + DEVICE, "nodes must be a valid integer, got True"),
        ("nodes = 2.0\n" + DEVICE, "nodes must be a valid integer, got 2.0"),
        ("nodes = 10000000\n" + DEVICE, "a cluster has 1 to 1,000,000 devices"),
        ("dtype = 'fp8'\n" + DEVICE, "dtype is 'fp8', but device.matmul has rates for bf16"),
        ("error = 1\n" + DEVICE, "error must be less than 1"),
        ("error = -0.5\n" + DEVICE, "error must be greater than or equal to 0"),
        ("reach = 3\n" + DEVICE, "reach must be a table, got 3"),
        ("reach = {dp = 3}\n" + DEVICE, "reach.dp must be 'tp' or 'sequence'"),
        ("reach = {tp = 0}\n" + DEVICE, "reach.tp must be greater than or equal to 1, got 0"),
        ("overlap = 1\n" + DEVICE, "overlap must be a valid boolean, got 1"),
        ("name = 3\n" + DEVICE, "name must be a valid string, got 3"),
        ("name = 'x'", "device is missing"),
        ("device = 3", "device must be a table"),
        (DEVICE + DEVICE, "is not TOML"),
        ("a = " + "[" * 50_000, "is not TOML"),
        ("nodes = " + "1" * 5_000, "is not TOML"),
        (bytes(range(256)), "cannot read the cluster"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused(text: str | bytes, message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        read_cluster(written(tmp_path, text))


@pytest.mark.parametrize(
    "name",
    ["", "h10", "H100", "h100*8x", "h100*0", "h100*8x0", "h100*-1", "h100*8*2", "h100*" + "9" * 5_000, "h100*٣",
     "a\0b", "a\0b.toml", "x" * 5_000, "none.toml", ".", "/dev/zero"],
)  # fmt: skip
def test_names_that_are_no_cluster_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no cluster|cannot read the cluster|a cluster has 1 to"):
        read_cluster(name)
