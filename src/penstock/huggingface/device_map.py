"""Models that ``device_map`` has put on devices, with accelerate's hooks around their modules."""

from __future__ import annotations

from typing import Any

from penstock.base.errors import ConfigError


def take_off_hooks(model: Any) -> None:
    """Remove the hooks that move values to a module's device, since a pipeline moves them itself.

    Raises:
        ConfigError: if the model is on several devices, or partly on the disk.
    """
    places = getattr(model, "hf_device_map", None)
    if places is None:
        return
    devices = list(dict.fromkeys(map(str, places.values())))
    if "disk" in devices:
        on_disk = [str(name) for name, place in places.items() if str(place) == "disk"]
        raise ConfigError(
            f"device_map leaves {on_disk[0]!r} ({len(on_disk)} of {len(places)} entries) on the disk, and a pipeline trains "
            'what is in memory; load the model with device_map={"": DEVICE}, and give it more ranks if it does not fit'
        )
    if len(devices) > 1:
        raise ConfigError(
            f"device_map has spread the model over {len(devices)} devices ({', '.join(devices[:8])}), and ranks that are "
            "threads compute on one; start one process for each GPU (torchrun --nproc-per-node N) and load it in each "
            'with device_map={"": GPU}, or leave device_map out'
        )
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    for module in model.modules():
        # accelerate puts the method back as an attribute of the module, which would count as a replaced forward.
        if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
            del module.forward
