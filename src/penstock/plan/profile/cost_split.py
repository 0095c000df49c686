"""Split of a model's blocks into stages of equal cost, by a profile."""

from __future__ import annotations

from penstock.base.errors import SplitError
from penstock.plan.profile.layer_cost import LayerCost
from penstock.plan.profile.model_profile import Profile
from penstock.stage.partition import by_weights


def blocks_by_cost(profile: Profile, stages: int, microbatch: int) -> tuple[int, ...]:
    """Return the number of blocks of every stage, such that the most expensive stage costs least.

    The first stage also gets the embeddings, the last one the heads and the loss.
    """
    roles = [role for _, role, _ in profile.layers]
    if "block" not in roles:
        raise SplitError(f"the profile of {profile.name} has no blocks, so they cannot be split by cost")
    each = layer_costs(profile, microbatch)
    first, last = roles.index("block"), len(roles) - roles[::-1].index("block")
    weights = each[first:last]
    weights[0] += sum(each[:first])
    weights[-1] += sum(each[last:])
    return tuple(stop - start for start, stop in by_weights(weights, stages))


def layer_costs(profile: Profile, microbatch: int) -> list[float]:
    """Return seconds of a forward and a backward of every layer, or FLOPs if nothing was measured."""
    return [_seconds(profile.kinds[kind].at(microbatch)) for *_, kind in profile.layers]


def _seconds(cost: LayerCost) -> float:
    """Return seconds of a forward and a backward; FLOPs, and a hundredth of the bytes moved, if nothing was measured."""
    works = (*cost.forward, *(cost.backward or (*cost.input_grad, *cost.weight_grad)))
    return sum(work.amount * (0.01 if work.unit == "memory" else 1) for work in works)
