"""A model that several processes train: each has the trained weights of its own stages alone."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from penstock.errors import ConfigError
from penstock.runtime.workers.world import World
from penstock.stage.own_model.partly_trained import up_to_date_names


def require_up_to_date(model: nn.Module | None, names: Iterable[str], world: World | None) -> None:
    """Check that this process has the trained weights of the stages it begins with; every process calls it.

    Args:
        model: the model that was given; None if it was a list of layers.
        names: names of the parameters of this process's stages.
        world: the processes; None if the ranks are threads of one process.

    Raises:
        ConfigError: on every process, if an earlier pipeline trained one of them in another process.
    """
    held = None if model is None else up_to_date_names(model)
    stale = [] if held is None else sorted(name for name in names if name not in held)
    found = [stale[:1]] if world is None else world.all_gather_run(stale[:1], "compare the model's weights")
    for rank, missing in enumerate(found):
        if missing:
            where = "this process" if world is None else f"rank {rank}"
            raise ConfigError(
                f"an earlier Pipeline trained this model in other processes, so {where} has old weights of {missing[0]!r}; "
                "before you close that pipeline, call model.load_state_dict(pipe.full_state_dict()) on every rank"
            )
