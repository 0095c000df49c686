"""Every bench command that the pages name prints its figures, here from the fewest cases and rounds."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.commands import python
from tests.support.hosts.hosts import missing as no_hosts

pytest.importorskip("selenium")

from tests.support.browser import missing

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"python -m (bench\.[a-z_0-9.]*[a-z_0-9](?: --[a-z-]+(?: (?:\d+|[A-Z]+)\b)?)*)")
FOREVER = {
    "bench.zoo --count 2000": "bench.zoo", "bench.zoo --count 2000 --seed 700000": "bench.zoo",
    "bench.faults": "bench.faults --rows 3", "bench.gpu": "bench.gpu --device cpu --only split --limit 4000",
}  # fmt: skip
"""What is run instead where the settings themselves are what takes long, or need a GPU."""

DROPPED = r"not opened: no Chromium here, or no selenium"
LINES = {
    "bench.overhead": [
        r"interleaved-1f1b v=4 +N +N +N +N", r"1f1b v=1 +N +N +N +N", r"threads 1f1b v=1: N ms; unsplit N ms",
        r"threads interleaved-1f1b v=4: N ms; unsplit N ms",
        r"threads gpipe v=1: N ms; unsplit N ms; torchgpipe N ms; ours/torchgpipe N",
    ],
    "bench.split_check": [
        r"\| mid-size \| N \| N \| N \| N \| N \|", r"\| tiny \| N \| N \| N \| N \| N \|",
        r"\| mid-size \| threads \| N \| N \| N \| N \|", r"\| tiny \| processes \| N \| N \| N \| N \|",
    ],
    "bench.step": [
        r"1f1b( +N){7}", r"zb-v( +N){7}", r"median( +N){7}",
        r"best of ours over the bound: N \(.+\)", r"best of peer over the bound: N \(.+\)",
    ],
    "bench.chunked_loss": [r"fp32( +N){6}", r"bf16( +N){6}"],
    "bench.head_stage": [
        r"even +N s +blocks N\+N.*", r"a block with the head +N s .*", r"cost +N s .*",
        r"measured here: layers .* step over even N .*",
    ],
    "bench.several_optimizers": [
        r"plain, halves added +N", r"pp 2 x dp 1 x tp 1 +0\.0e\+00 +0\.0e\+00 +N +N +N",
        r"pp 2 x dp 2 x tp 1 +N +0\.0e\+00 +N +N +N", r"pp 2 x dp 1 x tp 2 +N +N +N +N +N",
    ],
    "bench.split": [r"mid-size block +N +N +N +N", r"48 tiny parameters +N +N +N +N"],
    "bench.memory": [r"1f1b +8 +N N N N +N", r"zb-v +8 +N N N N +N", r"largest deviation N"],
    "bench.bf16": [rf"{name} +N +N +N( +N MB){{5}}" for name in ("fp32", "bf16 autocast", "bf16 weights")],
    "bench.expert_parallel": [
        r"pp 2 x dp 2 x tp 1 \(ep 2\) +N +N +N +N +N +N%",
        r"zb-h1 over 1f1b, pp 2 x dp 2 x tp 1 \(ep 2\): N; a step of 1f1b N ms",
        r"experts of a layer over transformers' AllToAllEP, ep 2: N; ours N ms, theirs N ms",
    ],
    "bench.context": [r" +4 +N +N +N +N% +N% +N +N%", r"largest difference N%; quickest of N steps"],
    "bench.residency": [
        r"pp 2 x dp 2 x tp 1, interleaved-1f1b, shard weights, window 1 +N +N +N +N +N +N +N +N",
        r"bytes beside the formula: N% at worst; gathers as planned on every rank: True",
        r"a step of pp 1 x dp 4 x tp 1, breadth-first, window 2, over FSDP2's: N; ours N ms, theirs N ms",
        r"with 0.6 times the weights to get: weights: two steps, loss N; optimizer: RuntimeError: .*",
    ],
    "bench.host_weights": [
        r"threads 1, breadth-first v=4, store host, window 1 +0e\+00 +0e\+00 +N +N +N",
        r"bytes beside the formula: N% at worst of every rank",
        r"a step of 64 rows over the resident one: host N, disk N; resident N ms",
        r"weights of N MB with N MB of private memory, AdamW: plain: RuntimeError: .*; disk: loss N in step 1, private .*",
    ],
    "bench.host_weights --link": [
        r"sleeps +1 +2 +1 +N +N +N +N +N%",
        r"a layer sleeps: 1 cases, error N% in the median, N% at most; quickest of 1 step",
    ],
    "bench.experts": [r" +64 +256 +512 +32 +2 +N +N +N"],
    "bench.recompute": [
        r"recompute=none +N +N +N MB +N +N MB", r"recompute=full +N +N +N MB +N +N MB", r"recompute=2 +N +N +N MB +N +N MB",
        r"plain, checkpointed +N +N +\(over plain\)",
    ],
    "bench.buckets --bucket-mib 4": [
        r"ours +N +N", r"ddp +N +N", r"blocking +N +N", r"without +N", r"step, ours over DDP: N .*",
        r"exposed, ours over blocking: N",
    ],
    "bench.buckets --sleep": [r" +0.6 +N +N +N +N +N"],
    "bench.mesh": [
        r"one process, reversed +N +N +N", r"1f1b +N +N +N +same bits", r"zb-v +N +N +N +same bits",
        r"pp 1 x dp 2 x tp 1 +N +same bits +N +N +N",
    ],
    "bench.mesh --zero": [
        rf"{mesh} +(0.0e\+00|\d.\de-0[7-9]) +same bits +N +N +{share}\d\d" for mesh, share in (
            ("pp 1 x dp 1 x tp 1", "1.00"), ("pp 1 x dp 2 x tp 1", "0.50"), ("pp 1 x dp 4 x tp 1", "0.25"),
            ("pp 1 x dp 2 x tp 2", "0.50"),
        )
    ],
    "bench.predict": [
        r"decoder +threads +2 +1 +1f1b +1 +2 +even +none +N ms +N ms +N",
        r"conv +processes +1 +2 +1f1b +1 +4 +even +none +N ms +N ms +N",
        r"sleep +processes +2 +1 +1f1b +1 +4 +even +none +N ms +N ms +N",
        r"computing layers: N; error N in the median, N for nine of ten, N at most",
        r"sleeping layers: N; error N in the median, N for nine of ten, N at most",
        r"sleeping layers, relative to the group.s reference: N; error N in the median, N for nine of ten, N at most",
        r"peak bytes: N; error N in the median, N for nine of ten, N at most", r"inside the printed interval: N of N",
    ],
    "bench.sleep": [r"1f1b +4 +16 +4 KB +N +N +N", r"1f1b +4 +16 +4 MB +N +N +N"],
    "bench.simulate": [
        r"closed forms: (\d+) of \1 cases exact, 47 forms", r"  gpipe +makespan +(\d+)/\1 +\(m\+p-1\)\(F\+BW\)",
        r"zero-bubble paper, table 5: 4 of 4 rates to four digits .*", r"  6.2B +8 +24( +N N){4}",
        r"  +4  10,10,10,0 +N +N +N +N +N", r"  largest: N", r"  +N  in a fresh process: .*", r"  +N  in a running one: .*",
        r"  +N  with nothing compiled yet: .*", r"  +N  PyTorch's .*", r"  +16 +320 +10,240( +N){7}",
    ],
    "bench.hosts": [
        r"1f1b +5 +N +N +N +N +N", r"largest difference N told the link, N told a round trip; quickest of N steps?",
        r"clocks: largest error N ms, at N ms, with a bound of N ms; all within their bounds",
    ],
    "bench.checkpoint": [r"checkpoint +N MB", r"blocking save +N ms", r"stall +N ms: N of it"],
    "bench.faults": [r" 3 \| a stage raises .* \| passed \| error on every rank after: thread N s"],
    "bench.faults.fuzz": [
        rf"{kind} +40 +\d+ +\d+ +0" for kind in ("config", "data", "schedule", "checkpoint", "trace", "dcp")
    ],
    "bench.faults --every 15": [
        r"a fault every N s, seed 0; 2 processes, a checkpoint every 10 steps", r"process +N.*", r"host +N.*", r"disk +N.*",
        r"progress: N of N s, N steps of N s", r"steps redone: N", r"starts: [1-9]\d*",
        r"weights bit-equal to a run without faults: True",
    ],
    "bench.trace": [
        r"recording an op +N µs: N of the demo's step of N s", r"keeping a trace +N ms, .*",
        r"page 8 x 64 x 2 +N s the first time, then N s; N MB",
        rf"50,\d+ blocks +({DROPPED if missing() else 'open in N s .N MB.; N ms a picture while dragged'})",
    ],
    "bench.published": [
        r"  SC21: \d rows?, mean N, median N, largest N", r"leave-out: Steps on A100s, each model left out",
        r"  vTrain: \d+ rows?, mean N, median N, largest N", r"h100: Steps on H100s", r"b200: Steps on B200s",
        r"  Korthikanti, activations: 4 rows, mean N, median N, largest N",
        r"  Zero Bubble, peak: 1 row, mean N, median N, largest N",
        r"  plain 1F1B: 2 rows, mean N, median N, largest N", r"b200: 18 runs, mean N, median N, largest N",
        r"  matmul.bf16 +rated +N  fitted +N  preset +N",
    ],
    "bench.search": [
        r"loop p=4 m=8 v=2 full 1,1,1 c=0 k=8 +57 +57 +0.00% +9 +57 +N", r"reached 3 of 3; N above the optimum at most",
        r"1/2 +N +N +N +N +N +v-min", r"1 +N +N +N +N +N +[a-z-]+",
        r"64 ranks, 512 microbatches, .*: N in N s; V-Half N; gap N",
    ],
    "bench.search --sleep": [r"v-min +4 +8 +4 +226( +N){6}", r"gained of what was predicted: N at least"],
    "bench.plan_search": [
        r"Llama-3 8B +h100.8( +N){7}", r"GPT 175B +a100-80gb.8x8( +N){7}", r"Llama-3 405B +h100.8x64( +N){7}",
        r"small spaces: worse than an exhaustive search in 0 of 3; N of N layouts simulated",
    ],
    "bench.zoo --count 2000": [r"linear +N +N +N +0", r"24 cases: N bit-equal, N bounded, N refused, 0 FAILED; N s"],
    "bench.zoo --count 2000 --seed 700000": [r"24 cases: N bit-equal, N bounded, N refused, 0 FAILED; N s"],
    "bench.lines": [
        r"plain loop +11 +N +N +N", r"Penstock, threads +11 +N +N +N", r"Penstock, processes +11 +N +N +N",
        r"torch.distributed.pipelining +43 +N +N +N",
    ],
    "bench.families": [r"llama +equal", r"mixtral +equal", r"rwkv +refused +RwkvForCausalLM cannot be cut: .*"],
    "bench.hf_trainer": [
        *(
            line
            for layout in ("threads 2", "processes 2", "pp 2 x dp 2")
            for line in (
                rf"full training +{layout} +\d\.\de-0[7-9] +(0\.0e\+00|\d\.\de-0[7-9]) +\d\.\de-0[7-9]",
                rf"QLoRA, 4 bits +{layout}( +\d\.\de[-+]\d\d){{3}}",
            )
        ),
        r"stage after stage +N +1\.00", r"8 microbatches +N +N",
        r"plain +N +1.00", r"threads 2 +N +N", r"processes 2 +N +N",
        r"whole, by each +N +N", r"within own_stages +N +N",
    ],
    "bench.token_budget": [
        *(rf"spread {spread}, +N tokens( +N){{6}}  [\d, ]+( +N){{6}}" for spread in (r"0\.3", r"0\.6", r"0\.9")),
        r"1f1b +N +N", r"zb-h1 +N +N", r"zb-v +N +N",
    ],
    "bench.conformance": [
        *(rf"torch Schedule{name} +torch \S+( +N){{6}}" for name in ("GPipe", "1F1B, as it runs", "DualPipeV")),
        r"torch files, messages +torch \S+( +N){6}", r"DeepSpeed \w+Schedule +(rules|deepspeed \S+)( +N){6}",
        r"Megatron-core layout strings +(rules|megatron-core \S+)( +N){6}",
        r"torchgpipe clock cycles +torchgpipe \S+( +N){6}",
        r"torch Schedule1F1B, its visualizer: .* microbatch 9 has only 4F9, .*",
    ],
    "bench.gpu": [r"\| part, on CPU \| result \| seconds \|", r"\| split \| passed \| N \|", "failed: none"],
    "bench.mutants": [r"detected: N of N, N%", r"named: N of N, N%"],
    "bench.recording": [r" +512 +plain +N +N", r" +512 +1f1b, 2 threads +N +N"],
    "bench.advice": [r"largest difference N; of the wrong sign N of N"],
}  # fmt: skip


def test_every_command_that_is_named_is_run():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench" / "RESULTS.md"]
    assert {found for page in pages for found in NAMED.findall(page.read_text("utf-8"))} == set(LINES)


def runs() -> dict[str, list[str]]:
    """Lines of what is run; commands that are run as one are run once."""
    found: dict[str, list[str]] = {}
    for command, lines in LINES.items():
        found.setdefault(FOREVER.get(command, command), []).extend(lines)
    return found


SLOW = ("bench.bf16", "bench.published", "bench.faults --rows 3")
"""A bench that measures, one that computes, and one of faults."""


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        pytest.param(command, lines, id=command, marks=() if command in SLOW else pytest.mark.exhaustive)
        for command, lines in runs().items()
    ],
)
def test_a_command_prints_all_its_figures(command: str, lines: list[str], tmp_path: Path):
    if command in ("bench.context", "bench.hosts") and no_hosts():
        pytest.skip(no_hosts())
    words = command.replace("FOLDER", str(tmp_path)).split()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = python(["-m", *words, "--quick"], ROOT, environment, seconds=550)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not re.search(r"\b(nan|inf)\b", done.stdout), done.stdout
    for line in lines:
        pattern = line.replace("N", r"[-+]?\d[\d,.]*(?:e[-+]\d+)?%?")
        assert re.search(rf"^{pattern}$", done.stdout, re.MULTILINE), f"no line as {line!r} in\n{done.stdout}"
    assert done.stdout.splitlines()[-1].startswith(f"{os.uname().machine}, Python ")
