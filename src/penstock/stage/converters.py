"""Converters of models of other libraries to layers: a list that the rooms for these libraries fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Converter(NamedTuple):
    """Functions that make layers of a library's models.

    Attributes:
        library: package that the classes of its models are from.
        name: name of `convert`, for errors.
        convert: takes a model and returns its layers.
    """

    library: str
    name: str
    convert: Callable[[Any], object]


CONVERTERS: list[Converter] = []


def converter_of(model: object) -> Converter | None:
    """Return the converter of the library that a model's class, or a base of it, is from; None if there is none."""
    packages = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    return next((converter for converter in CONVERTERS if converter.library in packages), None)
