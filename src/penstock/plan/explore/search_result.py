"""Result of a search for layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.base.errors import ConfigError
from penstock.plan.cluster import sized_name
from penstock.plan.explore.rejections import GROUPS, Reason, Smallest
from penstock.plan.explore.search_space import Space
from penstock.plan.prediction import Prediction
from penstock.plan.rank_devices import needs_text
from penstock.plan.run_layout import Layout
from penstock.show.units import size_text, time_text

_WORTH = 0.01
"""Share of a step from which a pipeline is called slower; below, it is called no gain."""


class SimulatedLayout(NamedTuple):
    """Time and memory of a layout, which may be extrapolated from a shorter step."""

    layout: Layout
    step_seconds: float
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Best layouts of a search.

    Attributes:
        plans: predictions of the best layouts that fit, the quickest first; one for each choice of degrees, microbatch and
            schedule.
        evaluated: number of layouts that were bounded or simulated.
        simulated: number of layouts that were simulated.
        seconds: seconds that the search took.
        complete: True if the whole space was covered, so that no layout of it is quicker than the first.
        rejections: reasons why the other values of each dimension were rejected.
        smallest: of the layouts that do not fit, the one that needs the least memory.
        outcomes: every simulated layout that fits.
        not_compared: what the search left out, each with the value that asks for it with ``--fix`` or ``--layout``.
        space: the layouts that were searched.
        needs_store: True if they have a store because no layout without one fits.
    """

    plans: tuple[Prediction, ...]
    evaluated: int
    simulated: int
    seconds: float
    complete: bool
    rejections: Mapping[str, Mapping[str, Reason]]
    smallest: Smallest | None = None
    outcomes: tuple[SimulatedLayout, ...] = ()
    not_compared: tuple[str, ...] = ()
    space: Space = field(repr=False, compare=False)
    needs_store: bool = False

    @property
    def with_store(self) -> str:
        """Sentence that says that weights are in a store because nothing else fits; empty otherwise."""
        if not self.needs_store or not self.plans:
            return ""
        return (
            "No layout fits on the devices alone: weights, gradients and the optimizer's state are in host memory, and "
            "come to a device as it needs them."
        )

    @property
    def without_devices(self) -> str:
        """Sentence that says which groups of devices to leave out, because the step is quicker then; empty otherwise."""
        others = self.rejections.get(GROUPS, {})
        used = sized_name(self.best.cluster).split("+") if self.plans else []
        whole = {name: reason for name, reason in others.items() if len(name.split("+")) > len(used)}
        if not whole:
            return ""
        nearest = min(whole, key=lambda name: whole[name].slower)
        left = [name for name in nearest.split("+") if name not in used]
        them = "it" if len(left) == 1 else "them"
        slower = f"no layout with {them} fits or can run"
        if whole[nearest].slower < math.inf:
            slower = f"{nearest}, the quickest with {them}, is {whole[nearest].text}"
        return f"Leave {' and '.join(left)} out: {slower}."

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices of every plan; empty if all plans are for the same alike ones."""
        names = tuple(sized_name(plan.cluster) for plan in self.plans)
        unlike = any(plan.devices for plan in self.plans) or len(set(names)) > 1
        return names if unlike else ()

    def table(self) -> dict[str, list[str]]:
        """Return the cells of a table of the plans, one a row, by the name of their column."""
        plans, layouts = self.plans, [plan.layout for plan in self.plans]
        keys = ("pp", "dp", "tp", "ep", "cp", "v", "microbatch", "schedule", "recompute")
        return {
            **({"devices": list(self.devices)} if self.devices else {}),
            **{key: [str(getattr(at, key)) for at in layouts] for key in keys},
            "shard": [at.shard_text for at in layouts],
            "sequence parallel": ["yes" if at.sequence_parallel else "" for at in layouts],
            "step": [time_text(plan.step_seconds) for plan in plans],
            "slower": [f"{plan.step_seconds / self.best.step_seconds - 1:.1%}" for plan in plans],
            f"{self.best.unit}/s": [f"{plan.tokens_per_second:,.0f}" for plan in plans],
            "MFU": [f"{plan.mfu:.1%}" for plan in plans],
            "memory": [size_text(plan.peak_bytes) for plan in plans],
            "idle": [f"{plan.bubble:.1%}" for plan in plans],
        }

    @property
    def without_pipeline(self) -> str:
        """Sentence that says not to pipeline, where the best layout has no pipeline and others have; empty otherwise."""
        others = self.rejections.get("pp", {})
        nearest = min(others, key=lambda pp: others[pp].slower, default=None)
        if not self.plans or (best := self.best.layout).pp > 1 or nearest is None:
            return ""
        named = {
            "FSDP": best.sharding.shard == "weights",
            "data parallelism": best.dp > 1 and best.sharding.shard != "weights",
            "tensor parallelism": best.tp > 1,
            "context parallelism": best.cp > 1,
        }
        reason = others[nearest]
        slower = "no layout with pp above 1 fits or can run"
        if reason.slower < math.inf:
            slower = f"pp={nearest}, the quickest with a pipeline, is {reason.text}"
        advice = "Do not pipeline here" if reason.slower >= _WORTH else "A pipeline gains nothing here"
        return (
            f"{advice}: {' with '.join(name for name, has in named.items() if has)} alone is best; {slower}."
        )

    @property
    def best(self) -> Prediction:
        """The quickest plan.

        Raises:
            ConfigError: if no layout fits; says what would.
        """
        if self.plans:
            return self.plans[0]
        if not self.complete:
            raise ConfigError(
                f"the search ended after {self.seconds:.1f} s and {self.evaluated:,} layouts, before it found one that "
                "fits; give it more time, or fix values such as pp"
            )
        if self.smallest is None:
            raise ConfigError(
                "no layout of the space can run: the schedules do not allow its stages and microbatches; fix fewer "
                "values, or allow more schedules"
            )
        layout, size, exact = self.smallest
        least = "" if exact else "at least "
        raise ConfigError(
            f"no layout fits in memory; the smallest needs {least}{needs_text(self.space.cluster, size, reserve=True)}: "
            f"{layout}. "
            "Take more devices, devices with more memory, or a smaller batch or sequence; "
            "a chunked loss (--fix chunked_loss=true); or train an adapter (--lora, --base-bits)"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values, as `penstock plan --json` prints it."""
        return {
            "plans": [plan.as_dict() for plan in self.plans],
            "evaluated": self.evaluated,
            "simulated": self.simulated,
            "seconds": self.seconds,
            "complete": self.complete,
            "rejections": {
                dimension: {value: reason.text for value, reason in reasons.items()}
                for dimension, reasons in self.rejections.items()
            },
            "not_compared": list(self.not_compared),
            "with_store": self.with_store,
            "without_pipeline": self.without_pipeline,
            "without_devices": self.without_devices,
        }
