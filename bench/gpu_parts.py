"""Parts of `bench.gpu` that are no benches of their own, each as a command; on CPUs at small sizes, with --quick.

- qlora: a small Llama with a base of 4 bits and adapters, by plain Trainer and by a pipeline of two ranks in threads on the
  same device: largest relative difference of a loss and of a gradient norm, and seconds of a run.
- predicted: a decoder of three sizes on one device, whose rates are measured first: step and bytes, as `penstock.plan`
  predicts them before anything runs, and as measured. Bytes are of activations, and on CUDA also of the device.
- processes: two ranks in two processes, over NCCL with a card each or over gloo, beside plain PyTorch: largest relative
  difference of a loss and of a gradient.
- device-map: two ranks in threads with a card each, beside the same stages in turn on the whole batch, which is what
  ``device_map`` does.
- replicas: two processes as stages of a pipeline, and as replicas, on the same batch.

    python -m bench.gpu_parts PART [--device cuda] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from bench.compare import Figures, alternate, main, ratio
from bench.peer import add_device
from penstock.measure.device_rates import TORCH_DTYPES, measure_device
from penstock.parallel.mesh import MeshShape
from penstock.plan.cluster import MEASURED_ERROR, Cluster, Device, LinkSpeed
from penstock.plan.prediction import predict
from penstock.plan.run_layout import Layout
from penstock.profile.model_profile import read_model
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

MICROBATCHES, STEPS = 8, 5
BUDGET = {"cuda": 0.05, "cpu": 0.005}
"""Seconds that one kernel may take to become steady, by device."""
SIZES = {"cuda": ((512, 512), (1024, 1024), (2048, 2048)), "cpu": ((32, 16), (64, 32), (128, 32))}
"""Width and tokens of a sample of each size, by device."""


def synchronised(device: str) -> float:
    """Return the moment when the devices have done what they were given, in seconds."""
    if device == "cuda":
        for card in range(torch.cuda.device_count()):
            torch.cuda.synchronize(card)
    return perf_counter()


def seconds_of(device: str, step: Callable[[], object]) -> float:
    """Return the seconds of one call, with what it leaves to the devices."""
    begin = synchronised(device)
    step()
    return synchronised(device) - begin


def blocks(width: int) -> nn.Sequential:
    """Return eight blocks, the same on every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(8)
        )
    )


def batch(width: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return input and target of a step."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(rows, width, generator=generator) for _ in range(2))
    return x, y


def width_of(device: str) -> tuple[int, int]:
    """Return the width of the blocks and the rows of a batch."""
    return (2048, 8192) if device == "cuda" else (64, 64)


def difference(one: Tensor, other: Tensor) -> float:
    """Return the distance over the norm of the second."""
    return float((one.cpu() - other.cpu()).double().norm() / other.double().norm())


def qlora(options: argparse.Namespace) -> Figures:
    """Train adapters of a base of 4 bits with and without a pipeline."""
    import peft
    from tests.support import hf_trainer
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PrinterCallback
    from transformers.utils.logging import disable_progress_bar

    bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    disable_progress_bar()
    size = 64 if options.device == "cpu" else 1024
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        hf_trainer.model(hidden_size=size, intermediate_size=2 * size).save_pretrained(f"{folder}/base")
        for name, pipeline in (("plain", None), ("pipeline", hf_trainer.PIPELINE)):
            base = AutoModelForCausalLM.from_pretrained(
                f"{folder}/base",
                quantization_config=bits,
                device_map={"": 0 if options.device == "cuda" else "cpu"},
            )
            torch.manual_seed(1)
            base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
            lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
            args = hf_trainer.arguments(Path(folder) / name, use_cpu=options.device == "cpu")
            trainer = hf_trainer.trainer(peft.get_peft_model(base, lora), args, pipeline)
            trainer.remove_callback(PrinterCallback)
            begin = synchronised(options.device)
            lines = hf_trainer.logged(trainer)
            found[name] = (lines, synchronised(options.device) - begin)
    (ours, seconds), (theirs, plain) = found["pipeline"], found["plain"]
    gaps = {
        key: max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(ours, theirs, strict=True))
        for key in ("loss", "grad_norm")
    }
    yield f"largest difference of a loss {gaps['loss']:.1e}, of a gradient norm {gaps['grad_norm']:.1e}"
    yield f"seconds of {len(ours)} steps {seconds:.2f}, plain Trainer {plain:.2f}"
    return {"differences": gaps, "ours": seconds, "peer": plain}


def predicted(options: argparse.Namespace) -> Figures:
    """Predict steps and bytes of three sizes, then measure them."""
    device, cpu = torch.device(options.device), options.device == "cpu"
    rates = measure_device(device, 1, BUDGET[options.device])
    spread = rates.pop("spread")
    name = "bf16" if options.device == "cuda" and "bf16" in rates["matmul"] else "fp32"
    # One device sends nothing, so that its link counts for nothing.
    link = LinkSpeed(latency=1e-6, bandwidth=1e11)
    cluster = Cluster(
        name="this device",
        device=Device(**rates),
        ranks_per_node=1,
        node=link,
        dtype=name,
        error=max(MEASURED_ERROR, spread),
    )
    rows = {}
    head = (
        f"{'size':>14}{'predicted ms':>14}{'measured':>13}{'ratio':>20}{'activations MB':>16}{'measured':>10}"
    )
    yield head + (f"{'device MB':>12}{'measured':>10}" if options.device == "cuda" else "")
    for width, sequence in SIZES[options.device]:
        shape: dict[str, int] = {
            "vocabulary": 256 if cpu else 4096,
            "width": width,
            "layers": 2 if cpu else 8,
            "heads": 4,
            "kv_heads": 4,
            "hidden": 3 * width,
        }
        with tempfile.TemporaryDirectory() as folder:
            table = "\n".join(f"{key} = {value}" for key, value in shape.items())
            (Path(folder) / "model.toml").write_text(f"[model]\n{table}\n")
            profile = read_model(str(Path(folder) / "model.toml"))
        plan = predict(profile, cluster, Layout(pp=1, microbatch=1), sequence=sequence, batch=MICROBATCHES)
        measured = measured_step(ModelConfig(**shape), sequence, device, TORCH_DTYPES[name])
        row = rows[f"{width} x {sequence}"] = {
            "predicted": plan.step_seconds,
            "ratio": plan.step_seconds / measured["step"],
            "predicted activations": plan.memory[0].activations,
            "predicted bytes": plan.memory[0].total,
            **measured,
        }
        line = (
            f"{width:>7} x {sequence:>4}{plan.step_seconds * 1e3:14.1f}{row['step'] * 1e3:13.1f}{row['ratio']:20.2f}"
            f"{row['predicted activations'] / 1e6:16.1f}{row['activations'] / 1e6:10.1f}"
        )
        on_device = f"{row['predicted bytes'] / 1e6:12.1f}{row['bytes'] / 1e6:10.1f}"
        yield line + (on_device if options.device == "cuda" else "")
    blocks_of = f"{shape['layers']} blocks in {name}"
    yield f"{blocks_of}, {MICROBATCHES} microbatches of one sample, AdamW; spread of the rates {spread:.1%}"
    return {"rows": rows, "dtype": name}


def measured_step(
    config: ModelConfig, sequence: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Return the median seconds of a step with its update, and its most bytes of activations and of the device."""
    model = nn.ModuleList(layer.build() for layer in layers(config)).to(device, dtype)
    tokens = torch.randint(config.vocabulary, (MICROBATCHES, sequence + 1), device=device)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with Pipeline(list(model), next_token_loss, microbatches=MICROBATCHES, ranks=1) as pipe:
        optimizer = PipelineOptimizer(
            pipe, torch.optim.AdamW, lr=1e-4, clip=1.0, main_weights=dtype != torch.float32
        )

        def step() -> None:
            pipe.step(x, y)
            optimizer.step()

        for _ in range(2):
            step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = [seconds_of(device.type, step) for _ in range(STEPS)]
        most = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        pipe.tracing = True
        step()
        trace = pipe.trace()
        assert trace is not None
        assert trace.held is not None
        return {
            "step": statistics.median(seconds),
            "activations": float(trace.held.max()),
            "bytes": float(most),
        }


def beside_plain(rank: int, device: str, schedule: str) -> tuple[float, float]:
    """Return the largest differences of a loss and of a gradient of this rank from plain PyTorch."""
    width, rows = width_of(device)
    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    x, y = batch(width, rows)
    plain = blocks(width).to(place)
    losses = []
    for a, b in zip(x.to(place).chunk(MICROBATCHES), y.to(place).chunk(MICROBATCHES), strict=True):
        loss = nn.functional.mse_loss(plain(a), b)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    with Pipeline(
        blocks(width), nn.functional.mse_loss, microbatches=MICROBATCHES, ranks=2, schedule=schedule, device=place,
        timeout=60,
    ) as pipe:  # fmt: skip
        found = pipe.step(x, y).losses
        expected = dict(plain.named_parameters())
        grads = [
            difference(p.grad, expected[name].grad)
            for name, p in pipe.named_parameters()
            if p.grad is not None
        ]
    assert grads
    return difference(found, torch.stack(losses)), max(grads)


def processes(options: argparse.Namespace) -> Figures:
    """Compare two processes with plain PyTorch."""
    rows = {}
    transport = "NCCL" if options.device == "cuda" else "gloo"
    yield f"{'over ' + transport:20}{'loss':>10}{'gradient':>10}"
    with LocalProcesses(2) as pool:
        for schedule in ("1f1b", "zb-v", "interleaved-zb"):
            told = pool.run(2, partial(beside_plain, device=options.device, schedule=schedule), timeout=120)
            loss, grad = (max(each) for each in zip(*told, strict=True))
            rows[schedule] = {"loss": loss, "gradient": grad}
            yield f"{schedule:20}{loss:10.1e}{grad:10.1e}"
    worst = max(value for row in rows.values() for value in row.values())
    if worst > 1e-4:
        raise SystemExit(f"a difference of {worst:.1e} from plain PyTorch is more than rounding")
    return {"transport": transport, "rows": rows}


def device_map(options: argparse.Namespace) -> Figures:
    """Time a pipeline beside the same stages in turn."""
    width, rows = width_of(options.device)
    first, second = ("cuda:0", "cuda:1") if options.device == "cuda" else ("cpu", "cpu")
    x, y = (part.to(place) for part, place in zip(batch(width, rows), (first, second), strict=True))

    def placed() -> nn.Sequential:
        net = blocks(width)
        for n, block in enumerate(net):
            block.to(first if n < len(net) // 2 else second)
        return net

    turn = placed()

    def in_turn() -> None:
        middle = turn[: len(turn) // 2](x).to(second)
        nn.functional.mse_loss(turn[len(turn) // 2 :](middle), y).backward()

    with Pipeline(placed(), nn.functional.mse_loss, microbatches=MICROBATCHES, ranks=2) as pipe:
        contest = {"ours": lambda: pipe.step(x, y), "in turn": in_turn}
        times = alternate(
            {name: partial(seconds_of, options.device, run) for name, run in contest.items()}, STEPS
        )
    share = ratio(times["ours"], times["in turn"])
    ours, theirs = (statistics.median(times[name]) for name in ("ours", "in turn"))
    yield f"a pipeline over stages in turn: {share:.2f}; ours {ours * 1e3:.1f} ms, in turn {theirs * 1e3:.1f} ms"
    return {"ours": ours, "peer": theirs, "ratio": share}


def steps_of(rank: int, device: str) -> dict[str, list[float]]:
    """Return this process's seconds of steps as a stage and as a replica, in turn."""
    width, rows = width_of(device)
    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    x, y = batch(width, rows)
    pipes = {
        str(mesh): Pipeline(
            blocks(width), nn.functional.mse_loss, microbatches=MICROBATCHES // mesh.dp, mesh=mesh, device=place,
            timeout=60,
        )
        for mesh in (MeshShape(pp=2), MeshShape(dp=2))
    }  # fmt: skip
    runs = {name: partial(seconds_of, device, partial(pipe.step, x, y)) for name, pipe in pipes.items()}
    times = alternate(runs, STEPS)
    for pipe in pipes.values():
        pipe.close()
    return times


def replicas(options: argparse.Namespace) -> Figures:
    """Time two processes as stages, and as replicas."""
    with LocalProcesses(2) as pool:
        told = pool.run(2, partial(steps_of, device=options.device), timeout=120)
    # The slowest rank counts, round by round.
    times = {name: [max(each) for each in zip(*(t[name] for t in told), strict=True)] for name in told[0]}
    for name, found in times.items():
        yield f"{name:20}{statistics.median(found) * 1e3:9.1f} ms"
    stages, copies = times.values()
    yield f"stages over replicas: {ratio(stages, copies):.2f}"
    return {"ratio": ratio(stages, copies), "seconds": times}


PARTS = {
    "qlora": qlora,
    "predicted": predicted,
    "processes": processes,
    "device-map": device_map,
    "replicas": replicas,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this bench."""
    parser.add_argument("part", choices=tuple(PARTS), help="what to measure")
    add_device(parser)


def measure(options: argparse.Namespace) -> Figures:
    """Measure a part; on a CPU with one thread an operation, since the ranks compute at the same time."""
    if options.device == "cpu":
        torch.set_num_threads(1)
    return (yield from PARTS[options.part](options))


if __name__ == "__main__":
    main(measure, __doc__, add=add_options)
