"""Conversion of stored tensors to the model's, as transformers converts them when it loads a folder.

Older files store each expert of a mixture by itself, or have other names. Which names and which operations is transformers'
own table. So each process still reads only the tensors of its own layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
    by_pattern = {pattern: each for each in _converters(conversions) for pattern in each.source_patterns}
    wanted = model.state_dict()
    found: dict[str, Stored] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, new, pattern in names_in_model(stored, model, conversions):
        if new in wanted and pattern is not None:
            groups.setdefault(new, []).append((name, pattern))
            continue
        new = new if new in wanted else name
        if new in found:
            raise DataError(
                f"{found[new].name} and {stored[name].name} in {folder} are both {new} of the model"
            )
        found[new] = stored[name]
    for first, members in groups.items():
        sources = tuple(stored[name] for name, _ in members)
        convert = partial(_convert, model, by_pattern[members[0][1]], first, members, wanted[first].dtype)
        other = next((source.dtype for source in sources if not is_floating(source)), None)
        if other is not None:
            raise DataError(
                f"{members[0][0]} in {folder} is {other}; {first} must be made of floating-point numbers"
            )
        try:
            made = convert([torch.empty(s.shape, dtype=DTYPES[s.dtype], device="meta") for s in sources])
        except Exception as error:  # operations on lists that are not complete fail in many ways
            raise DataError(
                f"transformers cannot make {first} of {members[0][0]} and {len(members) - 1} more tensors in {folder}: "
                f"{describe_error(error)}"
            ) from error
        for name, tensor in made.items():
            if name in found:
                raise DataError(
                    f"{found[name].name} and {members[0][0]} in {folder} are both {name} of the model"
                )
            found[name] = Converted(
                sources[0].path, name, tuple(tensor.shape), sources[0].dtype, sources, convert
            )
    return found


def names_in_model(
    names: Iterable[str], model: Any, conversions: Sequence[Any]
) -> list[tuple[str, str, str | None]]:
    """Return (name, name in the model, pattern) for names of stored tensors, in the order in which they are loaded.

    Args:
        conversions: transformers' conversions for the model. One with several tensors for one of the model has a pattern
            for each, and the name in the model is that of the first that it makes.
    """
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters, wanted = _converters(conversions), model.state_dict()
    found = []
    for name in sorted(names, key=dot_natural_key):
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        found.append((name, name, None) if new not in wanted and name in wanted else (name, new, pattern))
    return found


def _converters(conversions: Sequence[Any]) -> list[Any]:
    from transformers.core_model_loading import WeightConverter

    return [each for each in conversions if isinstance(each, WeightConverter)]


def _convert(
    model: Any,
    converter: Any,
    first: str,
    members: Sequence[tuple[str, str]],
    dtype: torch.dtype,
    tensors: Sequence[Tensor],
) -> dict[str, Tensor]:
    """Return the tensors of the model that a converter makes of stored ones.

    Args:
        first: name of the first tensor that is made.
        members: names of the stored tensors, and the converter's pattern of each.
        dtype: the model's, in which the tensors are put together.
    """
    own = copy.deepcopy(converter)
    for (name, pattern), tensor in zip(members, tensors, strict=True):
        own.add_tensor(first, name, pattern, tensor.to(dtype))
    made = own.convert(first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
