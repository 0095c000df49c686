"""Sizes of a decoder-only language model, and the parameters that follow from them; needs no torch."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

from penstock.base.counts import require_count
from penstock.base.errors import ConfigError
from penstock.base.model_variants import LARGEST_SIZE

_MOST_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of the layers: an embedding, equal blocks, a final norm and a head.

    Attributes:
        name: name of the model, for messages.
        layers: number of blocks.
        hidden: size of the hidden state.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_size: size of a head.
        ffn: inner size of the feed-forward.
        vocabulary: number of tokens.
        gated: True if the feed-forward has a gate as well as an up projection.
        positions: rows of a learned table of positions; 0 if positions are rotary.
        tied: True if the head shares the embedding's weight.
        norm_weights: norm parameters of a block, as a multiple of `hidden`.
        head_norm_weights: other parameters of a block, such as norms of queries and keys.
        final_norm_weights: parameters of the final norm, as a multiple of `hidden`.
        qkv_bias, output_bias, ffn_bias: True if these matrices of a block have biases.
        norms: number of norms that a block computes over the hidden state.
        dropout: True if a block drops out attention scores and the outputs of its halves.
        context: tokens of the longest sample that a model with rotary positions is configured for; 0 if its config does
            not say.
        window, windowed: tokens of a window of attention, and number of blocks that attend to such windows alone.
        query_rank: size of the latent that queries are expanded from; 0 if they come from the hidden state.
        kv_rank: size of the latent that keys and values are expanded from; 0 if they come from the hidden state.
        rotary_size: with `kv_rank`, part of a head's query and key that is rotated; all heads share the key's.
        value_size: size of a head's value; 0 if it is `head_size`.
        experts: number of experts of a block, which replace the feed-forward of size `ffn`; 0 if there are none.
        experts_per_token: number of experts that a token is sent to.
        expert_ffn: inner size of an expert.
        shared_ffn: inner size of the expert that all tokens take; 0 if there is none.
        dense_layers: number of first blocks that have the feed-forward of size `ffn` and no experts.
        adapter_rank: rank of the adapters beside the matrices of all blocks, which alone are trained (LoRA); 0 if there are
            none and all weights are trained.
        base_bits: with `adapter_rank`, bits of the matrices that have an adapter: 16 or 4.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    gated: bool = True
    positions: int = 0
    tied: bool = False
    norm_weights: int = 2
    head_norm_weights: int = 0
    final_norm_weights: int = 1
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    norms: int = 2
    dropout: bool = False
    context: int = 0
    window: int = 0
    windowed: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    rotary_size: int = 0
    value_size: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    adapter_rank: int = 0
    base_bits: int = 16

    def __post_init__(self) -> None:
        # The types are text, because annotations of this module are not evaluated.
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "bool" and not isinstance(value, bool):
                raise ConfigError(f"{f.name} of the model must be true or false, got {value!r}")
            if f.type == "int":
                least, most = int(f.default is MISSING), _MOST_LAYERS if f.name == "layers" else LARGEST_SIZE
                require_count(f"{f.name} of the model", value, least, most)
        if self.adapter_rank and self.experts:
            raise ConfigError(
                f"{self.name} has experts, so adapters are not costed; profile it with them by penstock.profile_layers"
            )
        if self.base_bits not in (4, 16) or (self.base_bits == 4 and not self.adapter_rank):
            raise ConfigError(
                f"base_bits of the model must be 16, or 4 with adapters (adapter_rank above 0), got {self.base_bits}"
            )
        if self.experts_per_token > self.experts:
            raise ConfigError(
                f"experts_per_token of the model must be at most its {self.experts} experts, got {self.experts_per_token}"
            )
        if self.dense_layers > (self.layers if self.experts else 0):
            raise ConfigError(
                f"dense_layers of the model must be 0 without experts and at most its {self.layers} blocks with them, got "
                f"{self.dense_layers}"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"the model's {self.heads} heads must be a multiple of its {self.kv_heads} key and value heads"
            )

    @property
    def block_parameters(self) -> int:
        """Number of parameters of a block."""
        matrices = sum(rows * columns for rows, columns in (*self.latent_matrices, *self.head_matrices))
        ffn = self.shared_ffn if self.experts else self.ffn
        matrices += self.hidden * (ffn * (3 if self.gated else 2) + self.experts) + self.expert_parameters
        latents = self.query_rank + self.kv_rank
        biased = (
            latents + self.rotary_size if self.kv_rank else (self.heads + 2 * self.kv_heads) * self.head_size
        )
        biases = biased * self.qkv_bias + self.hidden * self.output_bias
        if self.ffn_bias:
            biases += self.experts if self.experts else self.ffn * (2 if self.gated else 1) + self.hidden
        return matrices + biases + self.norm_weights * self.hidden + self.head_norm_weights + latents

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of the experts of a block that has them."""
        ups = 2 if self.gated else 1
        biases = (ups * self.expert_ffn + self.hidden) * self.ffn_bias
        return self.experts * (self.hidden * self.expert_ffn * (ups + 1) + biases)

    @property
    def dense(self) -> ModelShape:
        """The shape of its first blocks, which have no experts."""
        return replace(self, experts=0, experts_per_token=0, expert_ffn=0, shared_ffn=0, dense_layers=0)

    @property
    def is_whole(self) -> bool:
        """True if tensor parallelism is planned for none of the model's matrices."""
        return bool(self.kv_rank or self.shared_ffn or self.adapter_rank)

    @property
    def active_ffn(self) -> int:
        """Inner values of a token's feed-forward, over all experts that it is sent to."""
        return self.experts_per_token * self.expert_ffn + self.shared_ffn if self.experts else self.ffn

    @property
    def whole_parameters(self) -> int:
        """Number of parameters of a block that tensor parallelism does not divide.

        They are the weights of norms, the biases that are added after the ranks' products are summed (of the matrices from
        attention and from the feed-forward to the hidden state), and routers; experts are counted apart.
        """
        summed = int(self.output_bias) + int(self.ffn_bias and not self.experts)
        routers = self.experts * (self.hidden + int(self.ffn_bias))
        return (self.norm_weights + summed) * self.hidden + self.head_norm_weights + routers

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        """Values of a token's queries, keys and values over all heads."""
        value = self.value_size or self.head_size
        return self.heads * self.head_size, self.kv_heads * self.head_size, self.kv_heads * value

    @property
    def latent_matrices(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the matrices from the hidden state to the latents that heads are expanded from."""
        if not self.kv_rank:
            return ()
        query = ((self.hidden, self.query_rank),) if self.query_rank else ()
        return (*query, (self.hidden, self.kv_rank + self.rotary_size))

    @property
    def head_matrices(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each matrix around attention, to its heads, and from them to the hidden state."""
        query, key, value = self.attention_sizes
        out = (self.heads * (self.value_size or self.head_size), self.hidden)
        if not self.kv_rank:
            return (self.hidden, query + key + value), out
        expanded = key - self.kv_heads * self.rotary_size + value
        return (self.query_rank or self.hidden, query), (self.kv_rank, expanded), out

    @property
    def block_matrices(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each matrix of a block but for experts', queries, keys and values apart."""
        heads = self.head_matrices
        if not self.kv_rank:
            heads = (*((self.hidden, size) for size in self.attention_sizes), heads[-1])
        ffn = self.shared_ffn if self.experts else self.ffn
        router = [(self.hidden, self.experts)] if self.experts else []
        ups = [(self.hidden, ffn)] * (2 if self.gated else 1)
        return [*self.latent_matrices, *heads, *router, *([*ups, (ffn, self.hidden)] if ffn else [])]

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings of tokens and of learned positions."""
        return self.hidden * (self.vocabulary + self.positions)

    @property
    def head_parameters(self) -> int:
        """Number of parameters of the final norm and of the head, which counts also if it is tied."""
        return self.hidden * (self.vocabulary + self.final_norm_weights)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model; a tied weight counts once."""
        total = self.layers * self.block_parameters + self.embedding_parameters + self.head_parameters
        if self.dense_layers:
            total += self.dense_layers * (self.dense.block_parameters - self.block_parameters)
        return total - self.hidden * self.vocabulary * self.tied

    def as_dict(self) -> dict[str, Any]:
        """Return all sizes by name."""
        return asdict(self)
