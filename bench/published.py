"""Predictions beside published measurements: steps, memory, and steps simulated from measured stage times.

    python -m bench.published [--only SECTION ...] [--write] [--quick] [--json]

Sections, in this order:

    a100       steps on A100s, predicted with the preset as it is
    leave-out  the same rows, each predicted with rates fitted to other models only
    memory     weights, optimizer, activations and peaks, from four sources
    h100       steps on H100s, with the preset as it is
    b200       steps on B200s, with the preset as it is
    experts    steps of mixtures of experts, with the presets as they are
    stages     steps simulated from the measured seconds of every stage
    fit        rates of the presets, fitted again

``--write`` also writes docs/trust.md and bench/PUBLISHED.md from all sections but the last.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict

import numpy as np

from bench.compare import Figures, main
from bench.comparison import Comparison, Row, table_lines
from bench.fit import RATED, errors, fit, fitted_runs, jacobian, preset_rates, seconds
from bench.published_experts import expert_rows
from bench.published_memory import memory_rows
from bench.published_runs import Run, runs
from bench.published_stages import stage_rows
from bench.trust_page import write_pages
from penstock.plan.cluster import read_cluster

EACH = 16
"""With ``--quick``, one row of so many."""


def a100(quick: bool) -> Comparison:
    """Compare steps on A100s."""
    return Comparison(
        "a100",
        "Steps on A100s",
        "Preset a100-80gb as it is, each row by its layout alone. The targets are 3 % in the mean for SC21 and for "
        "Korthikanti. The preset is fitted to the rows without a remark, so this table shows how well ten rates "
        "describe them; the next one shows foresight. vTrain's largest errors follow no rule: most rows of the model "
        "with 48 blocks that have tp=2 are measured a fifth to a half slower than tp=1, 4 and 8 would suggest, "
        "others differ by 15 % from one microbatch size to the next, and the row with 64 samples a microbatch takes "
        "twice as long as with 32. Zero Bubble's runs are faster: their blocks' passes, which the paper gives, take "
        "less than the fitted rates say.",
        tuple(_steps("a100-80gb", quick)),
    )


def leave_out(quick: bool) -> Comparison:
    """Compare steps on A100s with rates that are fitted to other models only."""
    measured = fitted_runs("a100-80gb")
    if quick:
        measured = measured[::EACH]
    cluster, rated = read_cluster("a100-80gb"), RATED["a100-80gb"]
    start = preset_rates(cluster, rated)
    slopes = jacobian(measured, cluster, start)
    rows: dict[int, Row] = {}
    for key in dict.fromkeys(run.key for run in measured):
        others = [n for n, run in enumerate(measured) if run.key != key]
        rates = fit([measured[n] for n in others], cluster, rated, start, slopes[others], 1 if quick else 6)
        for n, run in enumerate(measured):
            if run.key == key:
                rows[n] = _row(run, seconds(run, cluster, rates))
    return Comparison(
        "leave-out",
        "Steps on A100s, each model left out",
        "Each row is predicted with rates fitted to all rows of other models (another depth or width) among those "
        "that the preset is fitted to. The fit begins at the preset, and its prior is centred on rated values, which "
        "no measured step has influenced. The targets are 9 % in the mean and 4 % in the median for vTrain's rows.",
        tuple(rows[n] for n in range(len(measured))),
    )


def memory(quick: bool) -> Comparison:
    """Compare bytes."""
    return Comparison(
        "memory",
        "Memory",
        "Korthikanti: bytes of the blocks alone, as figure 1 counts them: weights, gradients and optimizer of a "
        "middle rank, activations of the first rank. Embedding and head, which the figure leaves out, add the share "
        "in the remark. The other sources give the peak of the fullest device as the allocator counts it, so the "
        "prediction is without the margin for bytes that the allocator cannot reuse. Zero Bubble and Vocabulary ran "
        "in fp16, and the peaks show that gradients took 2 bytes, so they count 2 here and not 4 as in a plan. ZB-1p "
        "is zb-h1. ZB-2p is zb-h2, which holds 2p-1 activations on the first rank and fewer on the others, which the "
        "published order fills as well; hence the largest error. The 405B rows of SimuMax exceed the peak within the "
        "pipeline. A copy of all gradients in 16 bits during the optimizer's step would explain them within 1 %; a "
        "plan does not count it, since the reports do not say so.",
        tuple(memory_rows(quick)),
    )


def h100(quick: bool) -> Comparison:
    """Compare steps on H100s."""
    return Comparison(
        "h100",
        "Steps on H100s",
        "Preset h100 as it is; the target is 7 % for rows with pp > 1. Rows with a remark are not fitted. "
        "Megatron-core does not publish its microbatches; 1 is assumed here. Llama 3's row of 131,072 tokens is published "
        "in FLOP/s, from which its seconds follow if attention was counted in full. LLAMA2-13B does not publish its virtual "
        "stages: with one stage per rank, 3 of 19 microbatches' time is idle, and the rest would have to run a fifth "
        "faster than LLAMA2-7B on one node.",
        tuple(_steps("h100", quick)),
    )


def b200(quick: bool) -> Comparison:
    """Compare steps on B200s."""
    return Comparison(
        "b200",
        "Steps on B200s",
        "Preset b200 as it is; the target is 5 %. Rows with context parallelism are fitted, too: there are no others of "
        "long samples, which tell the rate of attention.",
        tuple(_steps("b200", quick)),
    )


def sharded(quick: bool) -> Comparison:
    """Compare steps with sharded weights."""
    cluster = read_cluster("a100-80gb")
    return Comparison(
        "sharded",
        "Steps with sharded weights",
        "SC21's table 2 has three runs of DeepSpeed with ZeRO-3 and no other parallelism. Here each block is a stage of the "
        "one rank, two are gathered at a time, and preset a100-80gb is as it is: nothing is fitted to these rows. The runs "
        "are much slower than predicted. Twice as many devices took as long for the same batch, so something that a plan "
        "does not count limits them: take a prediction of sharding over hundreds of devices as a lower bound. FSDP2's runs "
        "of torchtitan are not here: their H100s have 500 W, or their products are in part in float8.",
        tuple(_row(run, seconds(run, cluster, {})) for run in runs(sharded=True)),
    )


def experts(quick: bool) -> Comparison:
    """Compare steps of mixtures of experts."""
    return Comparison(
        "experts",
        "Steps of mixtures of experts",
        "Presets h100 and b200 as they are. No rate is fitted to a mixture, so each model is one that the fit left out. The "
        "targets are 15 % in the mean and 25 % for each row that says what its step depends on. The exchange of Megatron's "
        "hybridep sends a token once to each node, so the network counts as wider by the rows that this saves. How often "
        "kernels read and write sorted rows was chosen with these rows in view: 7 times, as fused ones do; with the 13 of "
        "eager ones Qwen3_30B would be 7 % to 34 % too slow. "
        "What DeepSeekV3 recomputes on B200s is that of Megatron-Bridge's recipes for these layouts. The remark has the "
        "predicted peak. Not here are rows with hidden exchanges, which a plan does not have, but for one, tp > 1, FSDP "
        "over several nodes, hybrids of Mamba, and GB200 and GB300, which have no preset.",
        tuple(expert_rows(quick)),
    )


def stages(quick: bool) -> Comparison:
    """Compare steps that are simulated from measured stage times."""
    return Comparison(
        "stages",
        "Steps from measured stage times",
        "Vocabulary Parallelism (2411.05288) publishes the seconds of each stage's forward and backward on eight "
        "A100s. 1F1B with 128 microbatches is simulated from these, with messages of sequence x 3072 x 2 bytes; the "
        "optimizer's time is the preset's. The target is 1.5 % for each row of base and redis, which are plain 1F1B "
        "with uneven stages. The other methods have vocabulary passes S and T, in an order of their own: here each "
        "rank does S with its forward and T with its backward. That keeps its work, but not their order, nor what "
        "waits for it.",
        tuple(stage_rows(quick)),
    )


def _steps(preset: str, quick: bool) -> Iterator[Row]:
    cluster = read_cluster(preset)
    found = [run for run in runs() if run.gpu == preset and run.seconds]
    for run in found[:: EACH if quick else 1]:
        yield _row(run, seconds(run, cluster, {}))


def _row(run: Run, predicted: float) -> Row:
    group = run.group if run.layout.pp == 1 or run.gpu == "a100-80gb" else f"{run.group}, pp > 1"
    assert run.profile.shape is not None
    layout = run.layout.with_values(dtype=None) if run.layout.dtype == "bf16" else run.layout
    batch = f"batch {run.batch}, sequence {run.sequence}, vocabulary {run.profile.shape.vocabulary}"
    model = f"{run.model} {run.key[0]} x {run.key[1]}"
    return Row(
        group=group,
        model=model,
        layout=f"{layout}, {batch}",
        unit="s",
        predicted=predicted,
        measured=run.seconds or 0.0,
        remark=run.reason_not_fitted or "",
    )


SECTIONS: dict[str, Callable[[bool], Comparison]] = {
    "a100": a100,
    "leave-out": leave_out,
    "memory": memory,
    "h100": h100,
    "b200": b200,
    "sharded": sharded,
    "experts": experts,
    "stages": stages,
}


def fitted(quick: bool) -> Figures:
    """Fit the presets' rates again."""
    found = {}
    for preset in ("b200",) if quick else RATED:
        cluster, measured = read_cluster(preset), fitted_runs(preset)
        rates = fit(measured, cluster, RATED[preset], rounds=1 if quick else 12)
        error = np.abs(np.exp(errors(measured, cluster, rates)) - 1)
        sizes = f"mean {error.mean():.2%}, median {np.median(error):.2%}, largest {error.max():.2%}"
        yield f"{preset}: {len(measured)} runs, {sizes}"
        held = preset_rates(cluster, rates)
        for name, rate in rates.items():
            yield f"  {name:26} rated {RATED[preset][name]:10.4g}  fitted {rate:10.4g}  preset {held[name]:10.4g}"
        found[preset] = {"rates": rates, "preset": held}
    return found


def measure(options: argparse.Namespace) -> Figures:
    """Compare the requested sections."""
    if options.write and options.quick:
        raise SystemExit("--write writes every row; leave out --quick")
    results: dict[str, object] = {}
    comparisons = []
    for name, section in SECTIONS.items():
        if name in options.only or options.write:
            comparison = section(options.quick)
            comparisons.append(comparison)
            yield from table_lines(comparison)
            yield ""
            results[name] = {
                "rows": [asdict(row) for row in comparison.rows],
                "summaries": [asdict(summary) for summary in comparison.summaries],
            }
    if "fit" in options.only:
        results["fit"] = yield from fitted(options.quick)
    if options.write:
        write_pages(comparisons)
        yield "wrote docs/trust.md and bench/PUBLISHED.md"
    return results


def add(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    names = [*SECTIONS, "fit"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SECTION")
    parser.add_argument("--write", action="store_true", help="write the pages from all sections")


if __name__ == "__main__":
    main(measure, __doc__, add=add)
