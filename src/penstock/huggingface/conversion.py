"""Conversion of stored tensors to the model's, as transformers converts them when it loads a folder.

Older files store each expert of a mixture by itself, or have other names. Which names and which operations is transformers'
own table. So each process still reads only the tensors of its own layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import DataError, describe_error
from penstock.base.tensor_file import DTYPES
from penstock.huggingface.model_folder import Converted, Stored, is_floating


def converted(folder: Path, model: Any, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return stored tensors by their names in the model; a name that the model lacks stays as it is.

    Args:
        model: the library's model, on the meta device.

    Raises:
        DataError: if tensors that belong together cannot be put together, or two become one; says which.
    """
    # transformers has no public function for it.
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = get_model_conversion_mapping(model)
    wanted = model.state_dict()
    found: dict[str, Stored] = {}
    groups: dict[str, list[Renamed]] = {}
    for each in renamed(stored, model, conversions):
        if each.new in wanted and each.converter is not None:
            groups.setdefault(each.new, []).append(each)
            continue
        name = each.name
        new = each.new if each.new in wanted else name
        if new in found:
            raise DataError(
                f"{found[new].name} and {stored[name].name} in {folder} are both {new} of the model"
            )
        found[new] = stored[name]
    for first, members in groups.items():
        sources = tuple(stored[each.name] for each in members)
        convert = partial(_convert, model, members, wanted[first].dtype)
        other = next((source.dtype for source in sources if not is_floating(source)), None)
        if other is not None:
            raise DataError(
                f"{members[0].name} in {folder} is {other}; {first} must be made of floating-point numbers"
            )
        try:
            made = convert([torch.empty(s.shape, dtype=DTYPES[s.dtype], device="meta") for s in sources])
        except Exception as error:  # operations on lists that are not complete fail in many ways
            raise DataError(
                f"transformers cannot make {first} of {members[0].name} and {len(members) - 1} more tensors in {folder}: "
                f"{describe_error(error)}"
            ) from error
        for name, tensor in made.items():
            if name in found:
                raise DataError(
                    f"{found[name].name} and {members[0].name} in {folder} are both {name} of the model"
                )
            found[name] = Converted(
                sources[0].path, name, tuple(tensor.shape), sources[0].dtype, sources, convert
            )
    return found


class Renamed(NamedTuple):
    """A stored tensor's name, and its name in the model.

    Attributes:
        new: name in the model; of a tensor with a converter, that of the first one that it makes.
        converter: transformers' converter of several tensors, or to several ones; None if there is none.
        pattern: the converter's pattern for this one.
    """

    name: str
    new: str
    converter: Any
    pattern: str | None

    @property
    def made(self) -> list[str]:
        """Names in the model of all that it is a part of."""
        if self.converter is None:
            return [self.new]
        first, *_ = patterns = self.converter.target_patterns
        return [self.new.replace(first, pattern) for pattern in patterns]


def renamed(names: Iterable[str], model: Any, conversions: Sequence[Any]) -> list[Renamed]:
    """Return names of stored tensors by transformers' conversions for a model, in the order in which it loads them."""
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    wanted = model.state_dict()
    found = []
    for name in sorted(names, key=dot_natural_key):
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if new not in wanted and name in wanted:
            new, pattern = name, None
        found.append(Renamed(name, new, None if pattern is None else by_pattern[pattern], pattern))
    return found


def _convert(
    model: Any, members: Sequence[Renamed], dtype: torch.dtype, tensors: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of the model that a converter makes of stored ones.

    Args:
        members: names of the stored tensors, which have the same first one of the model.
        dtype: the model's, in which the tensors are put together.
    """
    first = members[0].new
    own = copy.deepcopy(members[0].converter)
    for each, tensor in zip(members, tensors, strict=True):
        own.add_tensor(first, each.name, each.pattern, tensor.to(dtype))
    made = own.convert(first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
