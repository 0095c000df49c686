"""Models that ``device_map`` has put on devices, with accelerate's hooks around their modules."""

from __future__ import annotations

from typing import Any

from penstock.base.errors import ConfigError


def take_off_hooks(model: Any) -> None:
    """Remove the hooks that move values to a module's device, since a pipeline moves them itself.

    Raises:
        ConfigError: if the model is partly on the disk.
    """
    places = getattr(model, "hf_device_map", None)
    if places is None:
        return
    on_disk = [str(name) for name, place in places.items() if str(place) == "disk"]
    if on_disk:
        raise ConfigError(
            f"device_map leaves {on_disk[0]!r} ({len(on_disk)} of {len(places)} entries) on the disk, and a pipeline trains "
            'what is in memory; load the model with device_map={"": DEVICE}, and give it more ranks if it does not fit'
        )
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    for module in model.modules():
        # accelerate puts the method back as an attribute of the module, which would count as a replaced forward.
        if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
            del module.forward
