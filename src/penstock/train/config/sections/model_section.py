"""The config section of the model."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.train.config.fields import Count, Positive, Table, Text
from penstock.train.data.tokenizer import BYTES


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Table):
    """``[model]``: the Llama-style decoder of `penstock.train.model.llama`; or a Hugging Face model by `path` or `config`.

    Attributes:
        path: local folder of a Hugging Face causal model whose weights to start from; sizes come from its ``config.json``,
            the tokenizer from its ``tokenizer.json``.
        config: ``config.json`` of a Hugging Face model to train from random weights (seed ``train.seed``); sizes and
            tokenizer come from its folder.
        vocabulary: number of tokens; 256 for bytes.
        width: size of the residual stream.
        layers: number of blocks.
        heads: number of query heads, which share `width` equally.
        kv_heads: number of key and value heads, each shared by ``heads / kv_heads`` query heads.
        hidden: inner size of the SwiGLU feed-forward.
        rotary_base: base of the rotary positions, whose longest wavelength is about 2π times as large.
        norm_epsilon: addend of the mean square in RMSNorm.
    """

    path: Text = ""
    config: Text = ""
    vocabulary: Count = BYTES
    width: Count = 128
    layers: Count = 6
    heads: Count = 4
    kv_heads: Count = 2
    hidden: Count = 352
    rotary_base: Positive = 10_000.0
    norm_epsilon: Positive = 1e-5
