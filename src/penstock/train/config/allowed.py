"""Which values the keys of a config may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.runtime.workers.timeout import YEAR
from penstock.train.config.mesh_config import is_order


@dataclass(frozen=True)
class Allowed:
    """What a value may be: a test, and the same in words."""

    holds: Callable[[Any], bool]
    words: str


LOGGERS = {"tensorboard": ("tensorboard", "matplotlib"), "wandb": ("wandb", "matplotlib")}
"""Where metrics can be sent, and the packages that each needs."""


def logger_names(text: str) -> list[str]:
    """The names in ``train.loggers``."""
    return [name.strip() for name in text.split(",") if name.strip()]


COUNT = Allowed(lambda v: 1 <= v < 2**31, "at least 1 and below 2^31")
NOT_NEGATIVE = Allowed(lambda v: 0 <= v < 2**31, "0 or more and below 2^31")
THREADS = Allowed(lambda v: 0 <= v <= 1024, "from 0 to 1024")
POSITIVE = Allowed(lambda v: v > 0, "more than 0")
SECONDS = Allowed(lambda v: 0 < v <= YEAR, f"more than 0 and at most {YEAR} (a year)")
FRACTION = Allowed(lambda v: 0 < v < 1, "between 0 and 1, both excluded")
SHARE = Allowed(lambda v: 0 <= v <= 1, "from 0 to 1")
MOMENTUM = Allowed(lambda v: 0 <= v < 1, "from 0 to 1, 1 excluded")
KNOWN_LOGGERS = Allowed(
    lambda v: set(logger_names(v)) <= set(LOGGERS), f"names out of {', '.join(LOGGERS)}, with commas between"
)
ORDER = Allowed(is_order, "pp, dp and tp once each with commas between, outermost first")
REFUSE, ACCEPT = "refuse", "accept"
CHANGED = Allowed(lambda v: v in (REFUSE, ACCEPT), f"{REFUSE} or {ACCEPT}")
_LONGEST_NAME = 255  # bytes that a file system takes


def _is_name(text: str) -> bool:
    if text in (".", "..") or len(text.encode("utf-8", "replace")) > _LONGEST_NAME:
        return False
    return text.isprintable() and text == text.strip() and not set(text) & {"/", "\\"}


FOLDER_NAME = Allowed(_is_name, f"a plain name without a path, of at most {_LONGEST_NAME} bytes")
