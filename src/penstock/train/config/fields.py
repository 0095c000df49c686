"""Types of config values, which pydantic checks."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from penstock.base.tables import Count, Number
from penstock.parallel.mesh import AXIS_NAMES
from penstock.runtime.health.hang import YEAR

LOGGERS = {"tensorboard": ("tensorboard", "matplotlib"), "wandb": ("wandb", "matplotlib")}
"""Services that metrics can be sent to, each with the packages it needs."""
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_NAME_BYTES = 255  # most file systems allow no longer name


def names_in(text: str) -> list[str]:
    """Return the names in a text with commas between them, such as ``train.loggers``."""
    return [name.strip() for name in text.split(",") if name.strip()]


def axes_of(order: str) -> tuple[str, ...]:
    """Return the axes in ``parallel.order``, outermost first."""
    return tuple(axis.strip() for axis in order.split(","))


def _check_loggers(text: str) -> str:
    if not set(names_in(text)) <= set(LOGGERS):
        raise ValueError(f"be names out of {', '.join(LOGGERS)}, with commas between")
    return text


def _check_callbacks(text: str) -> str:
    if not all(_FUNCTION.fullmatch(name) for name in names_in(text)):
        raise ValueError("be MODULE:FUNCTION, or several with commas between, such as my_hooks:Notify")
    return text


def _check_order(text: str) -> str:
    if sorted({*axes_of(text), "cp"}) != sorted({*AXIS_NAMES}) or len(axes_of(text)) > len({*axes_of(text)}):
        raise ValueError("be pp, dp and tp once each, and cp or not, with commas between, outermost first")
    return text


def _check_name(text: str) -> str:
    too_long = len(text.encode("utf-8", "replace")) > _NAME_BYTES
    plain = text.isprintable() and text == text.strip() and not set(text) & {"/", "\\"}
    if text in (".", "..") or too_long or not plain:
        raise ValueError(f"be a plain name without a path, of at most {_NAME_BYTES} bytes")
    return text


NotNegative = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Threads = Annotated[int, Field(strict=True, ge=0, le=1024)]
Positive = Annotated[Number, Field(gt=0)]
NotNegativeNumber = Annotated[Number, Field(ge=0, lt=2**31)]
Seconds = Annotated[Number, Field(gt=0, le=YEAR)]
Fraction = Annotated[Number, Field(gt=0, lt=1)]
Share = Annotated[Number, Field(ge=0, le=1)]
Momentum = Annotated[Number, Field(ge=0, lt=1)]
Text = Annotated[str, Field(strict=True, pattern=r"\A[^\x00]*\z")]
FolderName = Annotated[Text, AfterValidator(_check_name)]
LoggerNames = Annotated[Text, AfterValidator(_check_loggers)]
CallbackNames = Annotated[Text, AfterValidator(_check_callbacks)]
AxisOrder = Annotated[Text, AfterValidator(_check_order)]
Bytes = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Options = dict[str, Any]
Changed = Literal["refuse", "accept"]
DataFormat = Literal["auto", "text", "tokens", "datasets"]
LogLevel = Literal["debug", "info", "warning", "error"]
OptionalCount = Annotated[Count | None, BeforeValidator(lambda given: None if given == "" else given)]
"""A number, or nothing, which ``parallel.window=`` on the command line means."""
Recompute = Literal["none", "full", "auto"] | Count
Split = Literal["even", "measured"] | list[NotNegative]
Precision = Literal["fp32", "bf16", "bf16-weights", "fp16"]
Compile = Literal["none", "block", "stage"]
LrSchedule = Literal["cosine", "linear", "constant"]
Reduction = Literal["mean", "sum"]
Sharded = Literal["none", "optimizer", "gradients", "weights"]
Stored = Literal["none", "host", "disk"]
Buffers = Literal["refuse", "mean", "first"]
RouterScores = Literal["softmax", "sigmoid"]
