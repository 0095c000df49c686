"""The config section of LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from penstock.base.errors import ConfigError
from penstock.train.config.fields import Flag, Momentum, NotNegative, Positive, Table, Text


def _joined(value: object) -> object:
    """Join a list of names with commas, so that a config may have either."""
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return ",".join(value)
    return value


def _check_names(text: str) -> str:
    if not any(name.strip() for name in text.split(",")):
        raise ValueError("all-linear, or names of modules with commas between")
    return text


Names = Annotated[Text, BeforeValidator(_joined)]
TargetNames = Annotated[Names, AfterValidator(_check_names)]


@dataclass(frozen=True, kw_only=True)
class LoraSection(Table):
    """``[lora]``: low-rank adapters (2106.09685) of Hugging Face's peft, trained in place of the weights of ``model.path``.

    Attributes:
        rank: rank of new adapters, for example 16; 0 for none.
        alpha: factor of the adapters, divided by the rank (default: twice the rank).
        dropout: share of an adapter's inputs that dropout sets to zero.
        target_modules: names of the modules that get an adapter, as ``q_proj,v_proj`` or a list; ``all-linear`` for all
            matrices but the head.
        modules_to_save: names of modules that are trained and saved as a whole, likewise; empty for none.
        bias: biases that are trained, too: ``none``, ``all``, or ``lora_only`` for those of modules with an adapter.
        rslora: divide `alpha` by the root of the rank instead (rsLoRA, 2312.03732).
        dora: train magnitudes beside directions (DoRA, 2402.09353).
        path: folder of existing adapters to train further, which brings its own values of the keys above; empty for new
            ones.
        save: ``adapters`` saves the adapters alone, in peft's format; ``merged`` adds them to the weights and saves a whole
            model.
    """

    rank: NotNegative = 0
    alpha: Positive | None = None
    dropout: Momentum = 0.0
    target_modules: TargetNames = "all-linear"
    modules_to_save: Names = ""
    bias: Literal["none", "all", "lora_only"] = "none"
    rslora: Flag = False
    dora: Flag = False
    path: Text = ""
    save: Literal["adapters", "merged"] = "adapters"

    @property
    def enabled(self) -> bool:
        """True if the run trains adapters."""
        return bool(self.rank or self.path)


_OF_ANY = ("path", "save")
"""Keys that belong to existing adapters, too."""


def check_lora(table: Any, lora: LoraSection, model_path: str, tp: int) -> None:
    """Check ``[lora]`` together with the other sections.

    Args:
        table: the keys that were given.
        lora: the section.
        model_path: ``model.path``.
        tp: ``parallel.tp``.

    Raises:
        ConfigError: if keys contradict each other, or are of no effect.
    """
    given = sorted({*table} - {*_OF_ANY}) if isinstance(table, dict) else []
    if lora.path and given:
        raise ConfigError(
            f"lora.{given[0]} is given beside lora.path, whose adapter_config.json has its value; leave one of them out"
        )
    if not lora.enabled:
        if others := [key for key in table if table[key] != getattr(LoraSection(), key)]:
            raise ConfigError(
                f"lora.{others[0]} is given without adapters; set lora.rank, for example lora.rank=16, or lora.path to "
                "train existing ones further"
            )
        return
    if not model_path:
        raise ConfigError(
            "[lora] adds adapters to the weights of a Hugging Face model; set model.path to its folder"
        )
    if tp > 1:
        raise ConfigError(
            f"parallel.tp must be 1 with [lora], got {tp}: tensor parallelism does not shard adapters; use more pipeline "
            "ranks (parallel.pp) or replicas (parallel.dp)"
        )


def written(lora: LoraSection) -> dict[str, Any]:
    """Return the keys of the section that `check_lora` accepts again; none for a run without adapters."""
    if not lora.enabled:
        return {}
    keys = _OF_ANY if lora.path else tuple(vars(lora))
    return {key: value for key in keys if (value := getattr(lora, key)) is not None}
