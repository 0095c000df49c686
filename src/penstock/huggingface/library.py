"""The transformers package, which is optional."""

from __future__ import annotations

import importlib.util

from penstock.base.errors import ConfigError


def require_library() -> None:
    """Require the transformers package.

    Raises:
        ConfigError: if it is not installed; says how to install it.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "Hugging Face models need the transformers package: pip install 'penstock-torch[transformers]'"
        )


def package_of(kind: type) -> str:
    """Return the name of the package that a class is from."""
    return kind.__module__.partition(".")[0]
