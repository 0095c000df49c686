"""Images of a batch, divided into microbatches by the tokens that rows have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.huggingface.forward_layers import image_token
from penstock.huggingface.own_forward import GRIDS
from penstock.stage.microbatches import Microbatches, even_cuts

PIXELS = "pixel_values"
BY_IMAGE = frozenset({PIXELS, "image_sizes", "pixel_attention_mask", GRIDS})
"""Inputs with an entry for each image, or for each patch of one, and not for each row."""


def divided_images(
    ids: Tensor, named: Mapping[str, Any], config: Any, rows: int, microbatches: int
) -> dict[str, Any]:
    """Return named inputs with the images of each microbatch in the place of those of the batch; None where it has none.

    Images follow each other as their tokens do. Where rows do not have one each, every image has tokens in proportion to its
    patches; of a family with another rule, the forward refuses the microbatch, since it counts the tokens itself.

    Args:
        ids: token ids, int64 (rows of the batch, tokens).
        rows: rows once the batch is filled up with copies of its last row, which have its images.

    Raises:
        ConfigError: if the tokens of rows are not those of whole images.
    """
    images = {name: value for name, value in named.items() if name in BY_IMAGE and isinstance(value, Tensor)}
    token = image_token(config)
    if PIXELS not in images or token is None:
        return dict(named)
    grids = images.get(GRIDS)
    patches = [1] * len(images[PIXELS]) if grids is None else grids.prod(1).tolist()
    tokens: list[int] = (ids == token).sum(1).tolist()
    if grids is None and len(patches) == len(tokens) and all(tokens):
        return dict(named)  # each row has its own
    of_row: list[range] = []
    done = 0
    for wanted in tokens:
        start = done
        while done < len(patches) and sum(patches[start:done]) * sum(tokens) < wanted * sum(patches):
            done += 1
        of_row.append(range(start, done))
        if sum(patches[start:done]) * sum(tokens) != wanted * sum(patches):
            break
    else:
        if done == len(patches):
            return dict(named) | _cut(images, of_row, patches, rows, microbatches)
    raise ConfigError(
        f"the data collator gives {len(patches)} images for {len(ids)} rows with {tokens} tokens for images (token "
        f"{token}), and a batch is divided into microbatches by them; give every row the tokens of its own images"
    )


def _cut(
    images: Mapping[str, Tensor], of_row: list[range], patches: list[int], rows: int, microbatches: int
) -> dict[str, Microbatches]:
    of_row = of_row + [of_row[-1]] * (rows - len(of_row))
    chosen = [[n for row in cut for n in of_row[row]] for cut in even_cuts(rows, microbatches)]
    found = {}
    for name, value in images.items():
        parts = value.split(patches) if name == PIXELS and GRIDS in images else value.split(1)
        found[name] = Microbatches([torch.cat([parts[n] for n in each]) if each else None for each in chosen])
    return found
