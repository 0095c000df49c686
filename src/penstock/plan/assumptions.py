"""Sentences beside a prediction: what it takes as given, and how far it may be wrong."""

from __future__ import annotations

from penstock.plan.cluster import ERROR_BEYOND, PRESETS, UNSTEADY, Cluster
from penstock.plan.rank_devices import RankDevices
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import attention_of, dtype_of
from penstock.plan.states import states_of
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
        if profile.shape.adapter_rank:
            sentences.append(
                f"Adapters of rank {profile.shape.adapter_rank} beside all matrices of the blocks are trained; the base has "
                f"{profile.shape.base_bits} bits. TFLOP/s and MFU leave out gradients of the base, which nothing computes."
            )
        if layout.ep > 1:
            sentences.append(
                f"The fullest of the {layout.ep} devices that divide the experts gets {layout.imbalance:g} times the mean "
                "number of rows (imbalance); layers wait for each exchange of rows."
            )
        if layout.cp > 1 and layout.sequence_parallel:
            sentences.append(
                "Sequence parallelism beside cp is only predicted: Pipeline refuses them together."
            )
        dtype = dtype_of(profile, cluster, layout)
        sentences.append(
            f"Matrix products in {dtype}; {sum(PARAMETER_BYTES[dtype])} bytes per "
            f"{'trained ' if profile.shape.adapter_rank else ''}parameter for weights, gradients and "
            f"AdamW{', or a moment less of matrices that Muon updates' if layout.optimizer == 'muon' else ''}."
        )
    elif profile.source == "traced":
        sentences.append(
            f"Layers are traced with tp=1, kernel by kernel as torch runs them in {profile.dtype}; fused kernels keep less "
            "and are faster."
        )
    if machine := profile.machine:
        sentences.append(
            f"Layers take the seconds measured on {machine.get('cores', '?')} cores ({machine.get('machine', '?')}) with "
            f"{machine.get('ranks', '?')} ranks busy; the cluster gives links, memory and optimizer alone."
        )
    if layout.overlap is None and not cluster.overlap and layout.replicas > 1:
        fitted = next(group.name for group in cluster.groups if not group.overlap)
        sentences.append(
            f"Gradients are reduced after the backward, as in the published runs that {fitted} is fitted to; "
            "overlap=true predicts reductions that hide behind it."
        )
    sentences += RankDevices(cluster, layout).sentences()
    for name, sheet in dict.fromkeys((group.name, group.data_sheet) for group in cluster.groups):
        if sheet:
            sentences.append(
                f"Rates of {name} are those of its data sheet ({sheet}) times the shares that fitted "
                "presets reach; measure your machine with penstock doctor --measure."
            )
    sentences.append(interval(profile, cluster, layout, sequence)[1])
    if layout.devices < cluster.devices:
        sentences.append(f"{cluster.devices - layout.devices} of the {cluster.devices} devices are idle.")
    return tuple(sentences)


def interval(profile: Profile, cluster: Cluster, layout: Layout, sequence: int) -> tuple[float | None, str]:
    """Return the error that a prediction may have, None if nothing is known of it, and a sentence about its interval."""
    why = states_of(layout, dtype_of(profile, cluster, layout)).no_interval or cluster.no_interval
    if why or cluster.error is None:
        return None, f"There is no interval: {why}."
    name, shape = cluster.name, profile.shape
    again = "; measure again on a quiet machine"
    noisy = again if max(cluster.error, profile.spread) > UNSTEADY and name not in PRESETS else ""
    known = [
        (cluster.error, f"the error of {name}{noisy}"),
        (profile.spread, f"the spread of the measured {profile.name}{noisy}"),
    ]
    if shape is not None and shape.experts and cluster.expert_error is not None:
        known.append((cluster.expert_error, f"the error of {name} for mixtures of experts"))
    if shape is not None and (far := cluster.beyond(layout.tp, sequence)):
        known.append((ERROR_BEYOND, f"no published step is near {far}"))
    error, why = max(known, key=lambda pair: pair[0])
    return error, f"The interval is the step divided and multiplied by {1 + error:.3g}: {why}."
