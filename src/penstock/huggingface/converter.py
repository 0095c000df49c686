"""Models of transformers as layers, where a Pipeline gets them as they are; the library is imported on first use."""

from __future__ import annotations

from penstock.stage.converters import CONVERTERS, Converter


def _layers_of(model: object) -> object:
    from penstock.huggingface.from_transformers import from_transformers

    return from_transformers(model)


CONVERTERS.append(Converter("transformers", "penstock.from_transformers", _layers_of))
