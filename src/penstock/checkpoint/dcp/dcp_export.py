"""Export of a checkpoint to the format of ``torch.distributed.checkpoint`` (DCP), for tools that read it.

`penstock.checkpoint.dcp.dcp_import` imports such a folder.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from penstock.checkpoint.convert import model_weights, open_sound, require_new
from penstock.checkpoint.format.json_values import decode
from penstock.checkpoint.read import Reader
from penstock.errors import ConfigError


def export_dcp(source: Path, target: Path) -> None:
    """Write a checkpoint as a DCP folder.

    The keys are those that ``torch.distributed.checkpoint.state_dict.get_state_dict`` gives a model and its optimizer:
    ``model`` by name; ``optim`` with ``state`` by parameter name and ``param_groups``, whose ``params`` are names. The
    folder also has ``step``, ``main_weights`` and ``lr_scheduler``.

    Args:
        source: folder of the checkpoint.
        target: folder to create; it must not exist.

    Raises:
        ConfigError: if `target` exists or cannot be written.
        DataError: if the checkpoint is damaged.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    require_new(target)
    manifest = open_sound(source)
    with Reader(source, manifest) as reader:
        optimizer = decode(manifest.values.get("optimizer"), reader.tensor)
    state: dict[str, Any] = {"model": model_weights(source, manifest), "step": manifest.step}
    if optimizer is not None:
        groups = [{**group, "params": []} for group in optimizer["groups"]]
        for name, parameter in optimizer["parameters"].items():
            groups[parameter["group"]]["params"].append(name)
        state["optim"] = {"state": optimizer["state"], "param_groups": groups}
        state["main_weights"] = optimizer["main_weights"]
        state["lr_scheduler"] = optimizer["lr_scheduler"]
    try:
        with warnings.catch_warnings():
            # torch warns that a single process saves, although no_dist asks for it.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save(state, checkpoint_id=str(target), no_dist=True)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error
