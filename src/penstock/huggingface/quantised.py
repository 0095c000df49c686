"""Models whose weights are quantised: which can be split, and their configs without what says so."""

from __future__ import annotations

import copy
from typing import Any

from penstock.base.errors import SplitError

_KNOWN = ("bitsandbytes",)
"""Methods whose modules hold all that they compute with, so that a stage is complete with its own."""


def require_known_quantisation(model: Any) -> None:
    """Require that a model's weights are not quantised, or by a method whose modules can be split.

    Raises:
        SplitError: if they are quantised by another method; names it.
    """
    given = getattr(model.config, "quantization_config", None)
    if given is None:
        return
    table = given if isinstance(given, dict) else given.to_dict()
    method = str(getattr(method := table.get("quant_method"), "value", method))
    if method not in _KNOWN:
        raise SplitError(
            f"the config's quantization_config is set: the weights are quantised by {method!r}, and only those of "
            f"{', '.join(_KNOWN)} are known to be complete within each module; load the model with a BitsAndBytesConfig, or "
            "in bf16"
        )


def without_quantisation(config: Any) -> Any:
    """Return a config, and those within it, without the quantisation of weights; itself if it has none."""
    if getattr(config, "quantization_config", None) is None:
        return config
    plain = copy.deepcopy(config)
    for part in [plain, *vars(plain).values()]:
        if hasattr(part, "model_type"):
            vars(part).pop("quantization_config", None)
    return plain
