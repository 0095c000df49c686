"""Auxiliary loss of the routers of a mixture of experts, which is over all layers, in a model cut into stages.

With the config's ``output_router_logits``, a model adds it to its loss: the number of experts times the sum over experts of
the share of tokens that routers sent to the expert, times its mean probability (Switch Transformer, 2101.03961, equations
4 to 6; ``load_balancing_loss_func`` of transformers). Share and mean are sums over the tokens of all layers, divided by
their number. So the two sums travel from layer to layer beside the hidden state, and the last layer makes the loss of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import SplitError
from penstock.stage.named import add_loss

NAME = "router_aux_loss"
"""Name of the loss in ``StepResult.parts``."""
UNKNOWN = (
    "the config's output_router_logits is set, and how this model computes its auxiliary loss from logits of its routers is "
    "not known. Set output_router_logits to false"
)
"""Error for a model with another auxiliary loss."""


@dataclass(frozen=True)
class RouterLoss:
    """The auxiliary loss of a model's routers.

    Its sums are two tensors, float32 (experts,): how many tokens routers have sent to each expert, and the expert's
    probabilities for all tokens.

    Attributes:
        kind: class of a router.
        index: place of the logits, (tokens, experts), in what a router returns.
        routers: number of routers in the model.
        experts: number of experts of a router.
        chosen: number of experts that a router sends a token to.
        weight: weight of the loss in the model's.
    """

    kind: type[nn.Module]
    index: int
    routers: int
    experts: int
    chosen: int
    weight: float

    def zeros(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the sums before the first block."""
        count, probability = (torch.zeros(self.experts, dtype=torch.float32, device=device) for _ in range(2))
        return count, probability

    @contextmanager
    def logits_of(self, block: nn.Module) -> Iterator[list[Tensor]]:
        """Return a context with a list, to which the routers in a block add their logits when they run."""
        logits: list[Tensor] = []

        def add(_: nn.Module, args: Any, output: Any) -> None:
            logits.append(output[self.index] if isinstance(output, tuple) else output)

        hooks = [part.register_forward_hook(add) for part in block.modules() if isinstance(part, self.kind)]
        try:
            yield logits
        finally:
            for hook in hooks:
                hook.remove()

    def added(
        self, count: Tensor, probability: Tensor, logits: list[Tensor], mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sums with a block's routers added; a mask, (batch, sequence), leaves out tokens where it is 0."""
        for of_router in logits:
            if of_router.shape[1:] != (self.experts,):
                raise SplitError(UNKNOWN)
            weight = torch.ones(len(of_router), device=of_router.device) if mask is None else mask.flatten()
            weight = weight.to(torch.float32)
            probabilities = of_router.softmax(-1)
            experts = probabilities.topk(self.chosen, dim=-1).indices.flatten()
            sent = torch.zeros_like(count).scatter_add_(0, experts, weight.repeat_interleave(self.chosen))
            count = count + sent
            probability = probability + (probabilities.float() * weight.unsqueeze(-1)).sum(0)
        return count, probability

    def add_to_loss(self, count: Tensor, probability: Tensor, tokens: int, mask: Tensor | None) -> None:
        """Add the loss of a microbatch of so many tokens to the model's, after the last block."""
        counted: Any = tokens if mask is None else mask.flatten().float().sum()
        total = sum([counted] * self.routers, 0.0)  # in the library's order: each layer adds its tokens
        loss = (count / total * (probability / total)).sum() * self.experts
        add_loss(self.weight * loss, NAME)


def router_loss_of(model: Any, parent: nn.Module) -> RouterLoss | None:
    """Return the auxiliary loss that a model adds to its own; None if its config does not ask for one.

    Args:
        parent: module with the list of blocks.

    Raises:
        SplitError: if the config asks for it, and how the model computes it is not known.
    """
    if not getattr(model.config, "output_router_logits", False):
        return None
    recorder: Any = (getattr(parent, "_can_record_outputs", None) or {}).get("router_logits")
    kind: Any = getattr(recorder, "target_class", ())
    routers = sum(isinstance(part, kind) for part in parent.modules())
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    experts, chosen, weight = (getattr(model, name, None) for name in names)
    if not routers or experts is None or chosen is None or weight is None:
        raise SplitError(UNKNOWN)
    return RouterLoss(kind, recorder.index, routers, experts, chosen, weight)
