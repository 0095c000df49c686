"""Where a layout keeps weights, gradients and the optimizer's state, and what that takes of devices, hosts and time.

    states.py      questions of a plan, and what both answers share
    on_devices.py  on the devices, whole or divided over replicas
    in_store.py    in host memory or on disk, while no op needs them

The rest of a plan asks `states_of` a layout, and does not know which of the two it is.
"""

from __future__ import annotations

from penstock.plan.run_layout import Layout
from penstock.plan.states.in_store import InStore
from penstock.plan.states.on_devices import OnDevices
from penstock.plan.states.states import States


def states_of(layout: Layout, dtype: str) -> States:
    """Return where a layout keeps its states, with matrix products in a dtype."""
    return (InStore if layout.sharding.stored else OnDevices)(layout, dtype)
