"""Sentences about what a prediction takes as given."""

from __future__ import annotations

from penstock.plan.cluster import PRESETS, UNSTEADY, Cluster
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import attention_of, dtype_of
from penstock.profile.closed_form import PARAMETER_BYTES
from penstock.profile.model_profile import Profile


def assumptions(profile: Profile, cluster: Cluster, layout: Layout, sequence: int) -> tuple[str, ...]:
    """Return sentences about what a layout leaves open, and what a prediction of it takes as given."""
    sentences = []
    if profile.shape is not None:
        if profile.shape.windowed and profile.shape.window < sequence:
            sentences.append(
                f"Attention is counted over all {sequence:,} tokens, but {profile.shape.windowed} of {profile.shape.layers} "
                f"blocks attend to windows of {profile.shape.window:,}; kernels that skip the rest are faster."
            )
        if attention_of(profile, cluster, layout) == "unfused" and layout.attention is None:
            sentences.append(
                f"Attention stores its scores, as in the published runs that {cluster.name} is fitted to; "
                "attention=fused predicts kernels that do not."
            )
        dtype = dtype_of(profile, cluster, layout)
        sentences.append(
            f"Matrix products in {dtype}; {sum(PARAMETER_BYTES[dtype])} bytes per parameter for weights, gradients and "
            "AdamW."
        )
    if machine := profile.machine:
        sentences.append(
            f"Layers take the seconds measured on {machine.get('cores', '?')} cores ({machine.get('machine', '?')}) with "
            f"{machine.get('ranks', '?')} ranks busy; the cluster gives links, memory and optimizer alone."
        )
    if layout.overlap is None and not cluster.overlap and layout.dp > 1:
        sentences.append(
            f"Gradients are reduced after the backward, as in the published runs that {cluster.name} is fitted to; "
            "overlap=true predicts reductions that hide behind it."
        )
    sentences.append(_interval(profile, cluster))
    if layout.devices < cluster.devices:
        sentences.append(f"{cluster.devices - layout.devices} of the {cluster.devices} devices are idle.")
    return tuple(sentences)


def _interval(profile: Profile, cluster: Cluster) -> str:
    error = max(cluster.error, profile.spread)
    of_profile = profile.spread > cluster.error
    source = f"the spread of the measured {profile.name}" if of_profile else f"the error of {cluster.name}"
    again = "; measure again on a quiet machine" if error > UNSTEADY and cluster.name not in PRESETS else ""
    return f"The interval is the step divided and multiplied by {1 + error:.3g}: {source}{again}."
