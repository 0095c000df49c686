"""Small models of images and text of transformers, and batches with an image for each row."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from penstock.huggingface.small_config import small_config
from tests.support.hf_models import moved

TEXT = 10
"""Tokens of text in a row."""

PARTS = {
    "idefics2": 2, "idefics3": 2, "smolvlm": 2, "llava_next": 5, "llava_next_video": 5, "llava_onevision": 40,
}  # fmt: skip
"""Families with several parts of an image, or several images, in dimension 1 of ``pixel_values``: how many are given."""
SIZED = ("lighton_ocr", "llava_next", "llava_next_video", "llava_onevision", "mistral3")
"""Families that take ``image_sizes``."""
GRIDS = [(1, 4, 12), (1, 4, 4), (1, 8, 4), (1, 2, 10), (1, 2, 14)]
"""Times, rows and columns of patches of images: of the first row's one, the second's two, the third's two, and so on."""
BY_IMAGE = ("pixel_values", "image_grid_thw", "image_sizes")


def model(family: str, **changes: Any) -> Any:
    """Return the library's model, all of whose parameters differ from their initial values."""
    torch.manual_seed(0)
    return moved(AutoModelForImageTextToText.from_config(small_config(CONFIG_MAPPING[family](**changes))))


def image_token(net: Any) -> int:
    """Return the token in whose places the features of an image are."""
    token: int = getattr(net.config, "image_token_id", getattr(net.config, "image_token_index", None))
    return token


def images(net: Any, rows: int, seed: int = 1) -> dict[str, Tensor]:
    """Return random images for so many rows, by the names of the model's inputs."""
    family = net.config.model_type
    size = net.config.vision_config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    parts = (PARTS[family],) if family in PARTS else ()
    generator = torch.Generator().manual_seed(seed)
    found = {"pixel_values": torch.randn(rows, *parts, 3, height, width, generator=generator)}
    if family in SIZED:
        found["image_sizes"] = torch.tensor([[height, width]] * rows)
    return found


def tokens_of_image(net: Any) -> int:
    """Return the number of tokens that the features of a row's image take."""
    with torch.no_grad():
        features = net.get_image_features(**images(net, 1), return_dict=True).pooler_output
    if isinstance(features, list | tuple):
        return sum(len(one) for one in features)
    return features.shape[:-1].numel()


def batch(net: Any, rows: int = 8, seed: int = 1) -> dict[str, Tensor]:
    """Return a batch in transformers' names: padded rows with an image each, and labels on a part of the text."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(3, 64, (rows, TEXT), generator=generator)
    places = torch.full((rows, tokens_of_image(net)), image_token(net))
    ids = torch.cat([text[:, :2], places, text[:, 2:]], 1)
    mask = torch.ones_like(ids)
    for n in range(rows):
        mask[n, ids.shape[1] - n % 4 :] = 0
    is_image = ids == image_token(net)
    whole = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.where((mask == 1) & ~is_image, ids, -100),
        **images(net, rows, seed),
    }
    if "token_type_ids" in signature(net.forward).parameters:
        whole["token_type_ids"] = is_image.long()
    return whole


def rows_with_grids(
    net: Any, rows: int, seed: int = 1, without: int | None = None
) -> list[dict[str, Tensor]]:
    """Return rows of a family that takes patches and grids: one image or two in each, and labels on a part of the text.

    Args:
        without: the row that has none.
    """
    generator = torch.Generator().manual_seed(seed)
    token, vision = image_token(net), net.config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    found = []
    for n in range(rows):
        grids = torch.tensor([GRIDS[:1], GRIDS[1:3], GRIDS[3:]][n % 3])
        if n == without:
            grids = grids[:0]
        ids = torch.randint(3, 64, (TEXT + 12,), generator=generator)
        start = 2
        for tokens in (grids.prod(1) // vision.spatial_merge_size**2).tolist():
            ids[start : start + tokens] = token
            start += tokens + 1
        mask = (torch.arange(len(ids)) < len(ids) - n % 4).long()
        is_image = ids == token
        found.append(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "labels": torch.where((mask == 1) & ~is_image, ids, -100),
                "mm_token_type_ids": is_image.long(),
                "pixel_values": torch.randn(int(grids.prod(1).sum()), width, generator=generator),
                "image_grid_thw": grids,
            }
        )
    return found


def collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch of rows, with the images of all in one tensor."""
    return {
        name: (torch.cat if name in BY_IMAGE and "image_grid_thw" in examples[0] else torch.stack)(
            [one[name] for one in examples]
        )
        for name in examples[0]
    }
