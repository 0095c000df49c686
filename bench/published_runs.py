"""Published runs as inputs of a prediction: model, cluster and layout of every row that gives them.

Rows are in ``bench/data/end_to_end.csv``, each with its source; this module says how a row becomes a layout.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.plan.run_layout import Layout
from penstock.profile.model_profile import Profile, of_shape
from penstock.profile.model_shape import ModelShape

DATA = Path(__file__).parent / "data"
_GPT = {
    "gated": False, "tied": True, "dropout": True, "norm_weights": 4, "final_norm_weights": 2,
    "qkv_bias": True, "output_bias": True, "ffn_bias": True,
}  # fmt: skip
_FAMILIES = {
    "1F1B": "1f1b", "interleaved-1F1B": "interleaved-1f1b", "1F1B-I": "interleaved-1f1b", "ZB-1p": "zb-h1",
    "ZB-2p": "zb-h2", "V-Half": "v-half",
}  # fmt: skip


_GPUS = {"A100-80GB": "a100-80gb", "GB200": None, "B200": "b200", "H100-80GB": "h100", "DGX-H100": "h100"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published run.

    Attributes:
        group: short name of its source.
        source, table, model: where it is published.
        gpu: preset of its device.
        profile: profile of the model.
        layout: its layout.
        sequence, batch, gpus: tokens of a sample, samples of a step, number of devices.
        seconds: measured seconds of a step; None if not published.
        memory: measured peak in GB; None if not published.
        notes: notes on the row.
    """

    group: str
    source: str
    table: str
    model: str
    gpu: str
    profile: Profile
    layout: Layout
    sequence: int
    batch: int
    gpus: int
    seconds: float | None
    memory: float | None
    notes: str

    @property
    def key(self) -> tuple[int, int]:
        """Depth and width of the model: runs of one model are left out together."""
        assert self.profile.shape is not None
        return self.profile.shape.layers, self.profile.shape.hidden

    @property
    def weight(self) -> float:
        """Weight of the run in a fit: a few carefully measured rows would be lost among many others."""
        return 3.0 if self.group in ("SC21", "Korthikanti") else 1.0

    @property
    def reason_not_fitted(self) -> str | None:
        """Reason why no rate is fitted to the run; None if some are."""
        if self.group == "vTrain" and self.layout.tp > 8:
            return "tensor parallelism across nodes"
        # B200 has no other rows of long samples, and its rate of attention would be a guess without them.
        if self.layout.cp > 1 and self.gpu != "b200":
            return "context parallelism"
        if self.group == "Zero Bubble":
            return "other kernels than in the fitted runs"
        if self.group == "Megatron-core":
            return "microbatch not published"
        if self.model == "LLAMA2-13B":
            return "outlier: virtual stages not published"
        return None


GROUPS = {
    "2104.04473": "SC21", "vTrain": "vTrain", "2205.05198": "Korthikanti", "2401.10241": "Zero Bubble",
    "2411.05288": "Vocabulary", "NeMo": "NeMo", "Megatron-core": "Megatron-core", "SimuMax": "SimuMax",
    "2407.21783": "Llama 3",
}  # fmt: skip


def runs(sharded: bool = False) -> Iterator[Run]:
    """Yield the runs that a layout can express: dense models, no expert parallelism, a known schedule.

    With `sharded`, they are those with ZeRO-3, each block of which is a stage.
    """
    with open(DATA / "end_to_end.csv", newline="") as file:
        for row in csv.DictReader(file):
            run = _run(row, sharded)
            if run is not None:
                yield run


def _run(row: dict[str, str], sharded: bool) -> Run | None:
    group = next((name for key, name in GROUPS.items() if key in row["source"]), None)
    gpu = preset_of(row["gpu"])
    needed = ("layers", "hidden", "heads", "ffn", "seq", "global_batch", "tp", "pp", "dp", "gpus")
    sizes = [row[key] for key in needed]
    if group is None or gpu is None or not all(size.isdigit() for size in sizes):
        return None
    if row["ep"] not in ("", "1") or ("ZeRO-3" in row["schedule"]) != sharded:
        return None
    if "Table 2;" in row["table"] and not sharded:
        return None
    if any(word in row["schedule"] for word in ("FSDP", "Vocab", "interlaced", "redistributed")):
        return None
    layers, hidden, heads, ffn, sequence, batch, tp, pp, dp, gpus = map(int, sizes)
    kv_heads = int(row["kv_heads"]) if row["kv_heads"].isdigit() else heads
    gpt = any(word in row["model"] for word in ("GPT", "Nemotron"))
    vocabulary = int(row["vocab"] or 51200)
    shape = ModelShape(
        name=row["model"],
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=hidden // heads,
        ffn=ffn,
        vocabulary=vocabulary,
        **({**_GPT, "positions": sequence} if gpt else {}),
    )
    if group == "Llama 3":
        row = {**row, "vp": "7", "schedule": "interleaved-1F1B", "iter_time_s": _seconds_of(shape, row)}
    v = layers if sharded else int(row["vp"]) if row["vp"].isdigit() else 1
    if group == "Zero Bubble" and v > 1:
        return None  # its interleaved stages have unequal numbers of layers that the paper does not give
    family = "1f1b" if v == 1 else "interleaved-1f1b"
    family = _FAMILIES.get(row["schedule"].split(" (")[0], family)
    if "not stated" in row["schedule"] and pp > 1:
        return None
    recompute = row["recompute"].split()[0] if row["recompute"] in ("full", "selective", "none") else "none"
    split: str | tuple[int, ...] = "even"
    if group == "Zero Bubble":
        split = (layers // pp, *(-(-layers // pp) for _ in range(pp - 2)), layers // pp)
    layout = Layout(
        pp=pp,
        dp=dp,
        tp=tp,
        cp=int(row["cp"] or 1),
        v=v if v > 1 else None,
        microbatch=int(row["microbatch"] or 1),
        schedule=family,
        recompute=recompute,
        shard="weights" if sharded else "optimizer" if group in ("NeMo", "SimuMax") else "none",
        window=2 if sharded else None,
        sequence_parallel=row["seq_parallel"] == "yes",
        split=split,
        attention="fused" if group == "Vocabulary" else None,
        dtype="fp8" if "FP8" in row["notes"] else "bf16",
    )
    if batch % (dp * layout.microbatch):
        return None
    return Run(
        group=group,
        source=row["source"],
        table=row["table"],
        model=row["model"],
        gpu=gpu,
        profile=of_shape(shape),
        layout=layout,
        sequence=sequence,
        batch=batch,
        gpus=gpus,
        seconds=_number(row["iter_time_s"]),
        memory=_number(row["peak_mem_GB"]),
        notes=row["notes"],
    )


def _seconds_of(shape: ModelShape, row: dict[str, str]) -> str:
    """Return the seconds of a step from its FLOP/s, where a source gives only these: 6 N + 12 L h s FLOPs a token."""
    sequence = int(row["seq"])
    flops = 6 * (shape.parameters - shape.embedding_parameters) + 12 * shape.layers * shape.hidden * sequence
    if not row["tflops_per_gpu"]:
        return ""
    return str(
        flops * sequence * int(row["global_batch"]) / int(row["gpus"]) / float(row["tflops_per_gpu"]) / 1e12
    )


def _number(text: str) -> float | None:
    return float(text) if text else None


def preset_of(text: str) -> str | None:
    """Return the preset of a device by its name in the file; None if it has none."""
    return next((preset for name, preset in _GPUS.items() if name in text), None)
