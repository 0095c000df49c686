"""Text of ``penstock plan``: tables, reasons, and the config of a run."""

from __future__ import annotations

import click
from rich.table import Table

from penstock.cli.output import table_console
from penstock.plan.cluster import Cluster
from penstock.plan.explore.outlook import change_text, changes, experts_text, grouped_reasons
from penstock.plan.explore.search_result import SearchResult
from penstock.plan.prediction import Prediction
from penstock.plan.rank_devices import devices_text
from penstock.plan.side_by_side import side_by_side
from penstock.profile.model_profile import Profile
from penstock.show.units import (
    batch_text,
    interval_text,
    parameters_text,
    reserve_text,
    size_text,
    time_text,
)

# Ranks in the table of memory; of more, the first and the last 8.
_MAX_ROWS = 16
# Columns of a console so wide that a table has its natural width, to be compared with the terminal's.
_WIDEST = 1000
_OPTIONAL = ("tokens/s", "samples/s", "idle", "SP", "shard", "MFU", "recompute", "micro", "v")
"""Columns of the table of plans that a narrow terminal leaves out, the first ones first."""
_SHORT = {"microbatch": "micro", "sequence parallel": "SP"}


def plans_table(result: SearchResult) -> None:
    """Print the best plans, one a row."""
    columns = _columns(result)
    console = table_console()
    unlimited = console.options.update(width=_WIDEST)
    for left_out in range(len(_OPTIONAL) + 1):
        table = Table(box=None, pad_edge=False, header_style="bold")
        shown = {name: values for name, values in columns.items() if name not in _OPTIONAL[:left_out]}
        for name in shown:
            left = name in ("devices", "schedule", "recompute", "shard")
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
        for row in zip(*shown.values(), strict=True):
            table.add_row(*row)
        if console.measure(table, options=unlimited).maximum <= console.width:
            break
    console.print(table)
    ended = "" if result.complete else "; ended early, so a better one may exist"
    console.print(
        f"{result.evaluated:,} layouts, {result.simulated:,} simulated, in {result.seconds:.1f} s{ended}"
    )


def _columns(result: SearchResult) -> dict[str, list[str]]:
    """Return the cells of the table of plans by the name of their column, which is short."""
    columns = {_SHORT.get(name, name): cells for name, cells in result.table().items() if name != "slower"}
    for name in ("ep", "cp"):
        if set(columns[name]) == {"1"}:
            del columns[name]
    return columns


def summary(profile: Profile, plan: Prediction, sequence: int, batch: int) -> str:
    """Return the prediction of one layout as lines of text."""
    parts = ", ".join(f"{name} {time_text(value)}" for name, value in plan.parts.items() if value)
    fits = f"{'fits' if plan.fits else 'does NOT fit'} in {size_text(plan.capacity)}"
    frozen = profile.shape is not None and profile.shape.adapter_rank
    of_sizes = (
        f"6 FLOPs per parameter and token, {'4 of a frozen one, ' if frozen else ''}and attention in full"
    )
    experts = experts_text(profile, plan, sequence, batch)
    flops = of_sizes if profile.shape is not None else "3 times the FLOPs of the profiled forward"
    which = f" ({plan.devices[plan.fullest]}, rank {plan.fullest})" if plan.devices else ""
    lines = [
        f"model         {profile.name}, {parameters_text(profile.parameters)}, {profile.blocks} blocks",
        f"cluster       {devices_text(plan.cluster)}",
        f"batch         {batch_text(batch, sequence, plan.unit)}",
        f"layout        {plan.layout}",
        f"step          {time_text(plan.step_seconds)} ({interval_text(plan.low, plan.high)}): {parts}",
        f"speed         {plan.tokens_per_second:,.0f} {plan.unit}/s; {plan.tflops_per_device:.4g} TFLOP/s a device, MFU "
        f"{plan.mfu:.1%} ({flops}); with recompute "
        f"{plan.hardware_tflops_per_device:.4g}, {plan.hfu:.1%}",
        f"idle          {plan.bubble:.1%} of the ranks' time" + _causes(plan),
        f"memory        {size_text(plan.peak_bytes)} on the fullest device{which}: {fits}{reserve_text(plan.reserved)}",
        *([f"experts       {experts}"] if experts else []),
        *(f"assumed       {sentence}" for sentence in plan.assumptions),
    ]
    return "\n".join(lines)


def _causes(plan: Prediction) -> str:
    named = [f"{name.replace('_', ' ')} {share:.1%}" for name, share in plan.causes.items() if share >= 0.001]
    return f": {', '.join(named)}" if named else ""


def memory_table(plan: Prediction) -> None:
    """Print the memory of every rank by part."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = [name for name in plan.memory[0].as_dict() if name != "peak_op"]
    shown = [name for name in names if any(rank.as_dict()[name] for rank in plan.memory)]
    device = ("device",) if plan.devices else ()
    for name in ("rank", *device, *shown, "peak at"):
        left = name == "device"
        table.add_column(name, justify="left" if left else "right", no_wrap=left)
    for rank, memory in enumerate(plan.memory):
        if len(plan.memory) > _MAX_ROWS and _MAX_ROWS // 2 <= rank < len(plan.memory) - _MAX_ROWS // 2:
            if rank == _MAX_ROWS // 2:
                table.add_row("...", *("" for _ in (*device, *shown)), "")
            continue
        values = memory.as_dict()
        of_rank = plan.devices[rank : rank + 1]
        table.add_row(str(rank), *of_rank, *(size_text(values[name]) for name in shown), memory.peak_op)
    table_console().print(table)


def reasons_text(result: SearchResult, most: int | None = None) -> str:
    """Return, for each dimension, why the other values were rejected; values with the same reason share a line.

    With `most`, these are so many reasons, and how many more there are.
    """
    every = grouped_reasons(result)
    shown = grouped_reasons(result, most)
    lines = [f"  {chosen:24} {values}: {reason}" for chosen, values, reason in shown]
    if len(shown) < len(every):
        lines.append(f"  (the nearest of {len(every)} reasons; --why prints all)")
    return "\n".join(lines)


def changes_text(profile: Profile, cluster: Cluster, result: SearchResult, sequence: int, batch: int) -> str:
    """Return how the plan's time and rank among the best change with bandwidth, memory and batch."""
    lines = []
    for text, best in changes(profile, cluster, result, sequence, batch):
        seconds = "" if best is None else f"{time_text(best.step_seconds)} a step; "
        lines.append(f"  {text}: {seconds}{change_text(result, best)}")
    return "\n".join(lines)


def beside_table(today: Prediction, proposed: Prediction) -> None:
    """Print today's layout beside the proposed one, a figure a line."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "today", "proposed"):
        table.add_column(name, overflow="fold")
    for row in side_by_side(today, proposed):
        table.add_row(*row)
    change = proposed.step_seconds / today.step_seconds - 1
    time = f"a step takes {abs(change):.1%} {'less' if change <= 0 else 'more'} time"
    table.add_row("", "", time if today.fits else "today's does not fit, so times are not compared")
    table_console().print(table)
    click.echo()
