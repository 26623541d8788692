"""`gpushare explain`: why a pod is where it is, or why it waits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Final

import typer

from gpushare.cli.access import ContextOption, KubeconfigOption, Where, ask, no_gpushare
from gpushare.cli.console import notes
from gpushare.cli.errors import AbsentError
from gpushare.cli.explain_words import PodFacts, as_record, print_explanation
from gpushare.cli.live import LiveCluster, Objects, cluster_of, read_objects
from gpushare.cli.plan import context_of
from gpushare.cli.records import Format, emit
from gpushare.cli.scheduler_filters import SchedulerFilters
from gpushare.core.api import GpuNode, NodeRules, PodView, TenantStatus, gates_of, names, not_scheduled
from gpushare.core.placement import (
    DecisionContext,
    Explanation,
    Happening,
    PlacementRequest,
    explain,
)
from gpushare.data import default_model
from gpushare.kube import EVENTS, GPUNODES, PODS, Api, Json, NotFound

app = typer.Typer(help=__doc__)

_SPEAKERS: Final = ("gpushare.io/", "gpushare-scheduler", "default-scheduler", "kopf", "kueue")


async def read(api: Api, namespace: str, name: str) -> tuple[Objects, Json, list[Json]]:
    """Read the pod, its events, and everything that decisions depend on.

    Raises:
        AbsentError: there is no such pod, or no gpushare.
    """
    try:
        pod = await api.get(PODS, name, namespace=namespace)
    except NotFound:
        raise AbsentError(
            f'there is no pod {name} in namespace {namespace}: -n names another, "gpushare pods" lists them'
        ) from None
    try:
        await api.list(GPUNODES, _nothing)
    except NotFound:
        raise await no_gpushare(api) from None
    objects = await read_objects(api)
    events: list[Json] = []
    for regarded in {name, *_share_names(objects, pod)}:
        selector = f"regarding.name={regarded}"
        events += (await api.list(EVENTS, _whole, namespace=namespace, field_selector=selector)).items
    return objects, pod, events


def explanation_of(objects: Objects, pod: Json, events: Sequence[Json]) -> tuple[Explanation, PodFacts]:
    """Explain a pod of a cluster.

    Raises:
        AbsentError: gpushare has nothing to do with this pod; the sentence says why.
    """
    view = PodView.from_object(pod)
    if view.fraction is None:
        raise AbsentError(
            f"pod {view.key} has no annotation {names.FRACTION}: gpushare has nothing to do with it (annotate the "
            "template that it is made from)"
        )
    if view.finished:
        raise AbsentError(f"pod {view.key} has ended ({view.phase}) and holds no share any more")
    cluster = cluster_of(objects)
    mine = next((each for each in cluster.pods if each[0].pod_uid == view.key), None)
    if mine is None:
        why = next((note for note in cluster.notes if view.key in note), "what it asks cannot be read")
        raise AbsentError(f"pod {view.key} cannot be explained: {why}")
    request, placed = mine
    nodes = [GpuNode.from_object(each) for each in objects.gpunodes]
    request = replace(request, rules=NodeRules.from_spec(pod.get("spec") or {}))  # a running pod's too
    context = context_without(cluster, request)
    share = cluster.shares.of(view.namespace, view.labels, (*view.owner_uids, view.uid))
    found = explain(
        request,
        context,
        default_model,
        placed,
        defaults=cluster.settings.defaults,
        seen=_seen(nodes),
        share=share,
        happened=[_happening(event) for event in events if _is_ours(event)],
        excluded=SchedulerFilters(cluster.scheduler_nodes).excluded(request, context),
    )
    gpu_names = {gpu.uuid: f"{node.name}/{gpu.index}" for node in nodes for gpu in node.status.gpus}
    return found, PodFacts(view, gpu_names, _waits_for(pod))


def context_without(cluster: LiveCluster, request: PlacementRequest) -> DecisionContext:
    """Return the context of a decision on the cluster without the pod itself."""
    others = tuple(each for each in cluster.pods if each[0].pod_uid != request.pod_uid)
    return context_of(replace(cluster, pods=others), [request])


def _seen(nodes: Sequence[GpuNode]) -> dict[str, TenantStatus]:
    return {
        f"{tenant.namespace}/{tenant.pod}": tenant
        for node in nodes
        for gpu in node.status.gpus
        for tenant in gpu.tenants
    }


def _share_names(objects: Objects, pod: Json) -> set[str]:
    """Return the names of the GpuShares that list this pod; the operator writes its events about them."""
    uid = pod["metadata"].get("uid")
    return {
        str(share["metadata"]["name"])
        for share in objects.gpushares
        if any(each.get("podUid") == uid for each in (share.get("status") or {}).get("placements") or ())
        and share["metadata"].get("namespace") == pod["metadata"].get("namespace")
    }


def _is_ours(event: Json) -> bool:
    """Return whether an event is about placing and sharing, not about images and containers."""
    speaker = str(event.get("reportingController") or (event.get("deprecatedSource") or {}).get("component") or "")
    return speaker.startswith(_SPEAKERS)


def _happening(event: Json) -> Happening:
    series = event.get("series") or {}
    at = series.get("lastObservedTime") or event.get("eventTime") or event.get("deprecatedLastTimestamp") or ""
    count = series.get("count") or event.get("deprecatedCount") or 1
    return Happening(
        str(at)[:19], str(event.get("reason") or ""), str(event.get("note") or "").strip(), int(count)
    )


def _waits_for(pod: Json) -> str:
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    if spec.get("nodeName"):
        return ""
    if gates := gates_of(spec):
        return f"it may not be scheduled yet: {', '.join(gates)} holds it back"
    if (condition := not_scheduled(status)) is not None:
        return str(condition.get("message") or condition.get("reason") or "")
    return "kube-scheduler has not looked at it yet"


def _whole(obj: Json) -> Json:
    return obj


def _nothing(obj: Json) -> None:
    del obj


@app.callback()
def explain_pod(
    pod: Annotated[str, typer.Argument(help="name of a pod, or namespace/name")],
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="its namespace; default: the context's")
    ] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="table, json or yaml")] = Format.TABLE,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> None:
    """Say why a pod is where it is, or waits; what was promised, predicted, seen and done; why not elsewhere."""
    before, slash, name = pod.removeprefix("pod/").rpartition("/")
    where = Where(before if slash else namespace, kubeconfig, context)
    objects, obj, events = ask(where, lambda api: read(api, where.current_namespace(), name))
    found, facts = explanation_of(objects, obj, events)
    for note in cluster_of(objects).notes:
        notes().print(note)
    if output.is_data:
        emit(as_record(found, facts), output)
    else:
        print_explanation(found, facts)
