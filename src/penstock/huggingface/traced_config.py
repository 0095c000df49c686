"""Profile of a model of transformers by its config alone: its layers are traced, without weights and without a device."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.base.errors import ConfigError, DataError, ProfileError, SplitError
from penstock.base.model_variants import require_positions
from penstock.huggingface.from_transformers import layers_on_meta, on_meta, read_config
from penstock.profile.model_profile import SEQUENCE, Profile
from penstock.profile.read_shape import NoClosedFormError
from penstock.profile.traced import trace_layers
from penstock.stage.compute.causal_lm_loss import causal_lm_loss


def trace_config(found: NoClosedFormError, sequence: int | None, dtype: str) -> Profile:
    """Return the profile of a model without a closed form; with "fp8", its activations are in 16 bits."""
    try:
        config = read_config(found.path)
        longest = getattr(config, "max_position_embeddings", None) or 0
        sequence = sequence or min(SEQUENCE, longest or SEQUENCE)
        require_positions(sequence, longest, "sequence")
        # Products of experts have shapes in bfloat16 alone; float16 has the same sizes.
        layers = layers_on_meta(config, torch.float32 if dtype == "fp32" else torch.bfloat16)
        tokens = torch.empty((1, sequence), dtype=torch.int64, device="meta")
        name = found.path.parent.name if found.path.name == "config.json" else found.path.stem
        profile = trace_layers(layers, tokens, target=tokens, loss_fn=causal_lm_loss, name=name)
    except (SplitError, DataError, ProfileError) as error:
        reason = " ".join(str(error).split())  # the library's errors have several lines
        raise ConfigError(f"{found}. This config cannot be traced: {reason}") from error
    return replace(profile, dtype=dtype)


def sizes_of(found: NoClosedFormError) -> tuple[int, int]:
    """Return the number of blocks, and of parameters, of a model whose family has no closed form."""
    model = on_meta(read_config(found.path))
    return model.config.get_text_config().num_hidden_layers, sum(
        parameter.numel() for parameter in model.parameters()
    )
