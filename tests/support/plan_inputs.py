"""What `penstock plan` reads: the config of a small model, and a cluster of nodes of two slow devices."""

from __future__ import annotations

import json
from pathlib import Path

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 64, "vocab_size": 256}
CLUSTER = """
ranks_per_node = 2
dtype = "fp32"

[device]
memory = 4e9
matmul = {bf16 = 2e10, fp16 = 2e10, fp32 = 2e10}
memory_bandwidth = 5e9

[node]
latency = 2e-5
bandwidth = 2e9
"""


def write_inputs(folder: Path, cluster: str = CLUSTER, **configs: dict[str, object]) -> None:
    """Write ``cluster.toml``, and a folder with a ``config.json`` for each model."""
    (folder / "cluster.toml").write_text(cluster)
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
