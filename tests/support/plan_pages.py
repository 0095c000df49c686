"""The page of a plan: one of a small model on four H100, written below a folder."""

from __future__ import annotations

from pathlib import Path

from penstock.plan.cluster import Cluster, read_cluster
from penstock.plan.explore.search_result import SearchResult
from penstock.plan.plan_page import write_plan
from penstock.plan.prediction import Prediction
from penstock.profile.model_profile import Profile, of_shape
from penstock.profile.model_shape import ModelShape

CLUSTER = read_cluster("h100*4")


def small_model(name: str = "small") -> Profile:
    return of_shape(
        ModelShape(
            name=name, layers=8, hidden=512, heads=8, kv_heads=8, head_size=64, ffn=2048, vocabulary=1024
        )
    )


def page_of(
    folder: Path, result: Prediction | SearchResult, profile: Profile, cluster: Cluster = CLUSTER
) -> Path:
    return write_plan(folder / "plan.html", profile, cluster, result, sequence=256, batch=32)
