"""Plans of runs: which layout, does it fit, how fast; predicted from a profile of the model and a cluster.

Names are imported on first use; none of them needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.plan.cluster import Cluster as Cluster
    from penstock.plan.cluster import read_cluster as read_cluster
    from penstock.plan.explore.branch_and_bound import search as search
    from penstock.plan.explore.search_result import SearchResult as SearchResult
    from penstock.plan.prediction import Prediction as Prediction
    from penstock.plan.prediction import predict as predict
    from penstock.plan.run_layout import Layout as Layout
    from penstock.profile.model_profile import Profile as Profile
    from penstock.profile.model_profile import of_shape as of_shape
    from penstock.profile.model_profile import read_model as read_model
    from penstock.profile.model_shape import ModelShape as ModelShape

_HOME = {
    "Cluster": "penstock.plan.cluster",
    "Layout": "penstock.plan.run_layout",
    "ModelShape": "penstock.profile.model_shape",
    "Prediction": "penstock.plan.prediction",
    "Profile": "penstock.profile.model_profile",
    "SearchResult": "penstock.plan.explore.search_result",
    "of_shape": "penstock.profile.model_profile",
    "predict": "penstock.plan.prediction",
    "read_cluster": "penstock.plan.cluster",
    "read_model": "penstock.profile.model_profile",
    "search": "penstock.plan.explore.branch_and_bound",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock.plan' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
