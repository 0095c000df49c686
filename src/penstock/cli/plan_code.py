"""Python of ``penstock plan`` for a model of one's own: the pipeline of a plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.cli.plan_config import header

if TYPE_CHECKING:
    from penstock.plan.prediction import Prediction
    from penstock.profile.model_profile import Profile


def pipeline_code(profile: Profile, plan: Prediction, batch: int) -> str:
    """Return a script's lines that make the pipeline of a plan, from the names ``model`` and ``loss_fn``.

    Args:
        batch: samples of a step, over all replicas.
    """
    from penstock.schedule.text import is_csv

    layout, costs = plan.layout, plan.costs
    arguments = {
        "microbatches": str(batch // (layout.dp * layout.microbatch)),
        "schedule": json.dumps(layout.schedule),
    }
    if layout.dp * layout.tp > 1:
        degrees = f"pp={layout.pp}, dp={layout.dp}" + (f", tp={layout.tp}" if layout.tp > 1 else "")
        arguments = {"mesh": f"penstock.MeshShape({degrees})", **arguments}
    else:
        arguments = {"ranks": str(layout.pp), **arguments}
    if layout.v is not None and layout.v > 1 and not is_csv(layout.schedule):
        arguments["virtual_stages"] = str(layout.v)
    if costs is not None and layout.split != "even":
        arguments["split"] = str(list(costs.counts))
    if layout.recompute == "full" or isinstance(layout.recompute, int):
        arguments["recompute"] = json.dumps(layout.recompute)
    half = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(plan.dtype)
    if half is not None and (profile.autocast or profile.shape is not None):
        arguments["autocast"] = half
    if layout.sequence_parallel:
        arguments["parallel"] = "penstock.ParallelOptions(sequence_parallel=True)"
    lines = "".join(f"    {name}={value},\n" for name, value in arguments.items())
    text = f"pipe = penstock.Pipeline(\n    model,\n    loss_fn,\n{lines})\n"
    if layout.zero and layout.dp > 1:
        text += "optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, zero=True)\n"
    imports = "import torch\n\nimport penstock\n" if "torch." in text else "import penstock\n"
    return f"{header(plan)}{imports}\n{text}"
