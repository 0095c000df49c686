"""Options of ``penstock plan`` as values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.plan_config import why_not_trained
from penstock.cli.plan_files import model_tables
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.plan.cluster import Cluster
    from penstock.profile.model_profile import Profile


def layout_values_of(
    layout: str | None, fixes: tuple[str, ...], schedules: str | None, *others: float | None
) -> dict[str, Any]:
    """Return the values of a layout that ``--layout`` or ``--fix`` give.

    Args:
        others: values of the other options of a search, which must be None beside ``--layout``.

    Raises:
        UsageError: if ``--layout`` is empty, or beside options of a search.
        ConfigError: if a key or a value is not one of a layout.
    """
    from penstock.plan.run_layout import layout_values

    if layout is None:
        return layout_values(",".join(fixes))
    if fixes or schedules or any(value is not None for value in others):
        raise click.UsageError(
            "--layout predicts one layout; --fix, --schedule, --devices and --search-orders belong to a search"
        )
    values = layout_values(layout)
    if not values:
        raise click.UsageError(
            "--layout must have at least one value, as in pp=2,dp=4; leave it out to search"
        )
    return values


def sizes(
    model: Path, profile: Profile, cluster: Cluster, sequence: int | None, batch: int | None
) -> tuple[int, int]:
    """Return the tokens of a sample and the samples of a step: as given, of the model's file, or the defaults.

    Raises:
        ConfigError: if a given value is out of range.
    """
    from penstock.plan.prediction import default_sequence

    for name, value in (("--sequence", sequence), ("--batch", batch)):
        if value is not None and not 1 <= value <= 2**31:
            raise ConfigError(f"{name} must be 1 to {2**31:,}, got {value}")
    tables = model_tables(model)
    of_data, of_train = tables.get("data", {}).get("sequence"), tables.get("train", {}).get("batch")
    return (
        sequence or (of_data if isinstance(of_data, int) else default_sequence(profile)),
        batch or (of_train if isinstance(of_train, int) else 2 ** (4 * cluster.devices - 1).bit_length()),
    )


def why_untrained(profile: Profile, cluster: Cluster, values: Mapping[str, Any]) -> str | None:
    """Return why no run can multiply in the dtype that a layout's values and the cluster choose; None if one can."""
    from penstock.plan.run_layout import Layout
    from penstock.plan.stage_costs import dtype_of

    return why_not_trained(dtype_of(profile, cluster, Layout(dtype=values.get("dtype"))))
