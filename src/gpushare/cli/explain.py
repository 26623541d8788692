"""`gpushare explain`: why a pod is where it is, or why it waits.

Who may read the pod and not the whole cluster is told what the pod's own objects say.
"""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final

import typer

from gpushare.cli.access import EXPLAINER, VIEWER, ContextOption, KubeconfigOption, Where, ask, list_ours
from gpushare.cli.console import notes
from gpushare.cli.errors import AbsentError, UsageError
from gpushare.cli.explain_words import PodFacts, as_record, print_explanation
from gpushare.cli.last_reports import heard, silence_notes
from gpushare.cli.live import LiveCluster, Objects, cluster_of, own_place, read_objects
from gpushare.cli.plan import context_of
from gpushare.cli.records import Format, emit
from gpushare.cli.scheduler_filters import SchedulerFilters
from gpushare.cli.targets import target_of
from gpushare.core.admission import ShareIndex
from gpushare.core.api import (
    GpuNode,
    GpuShare,
    NodeRules,
    PodView,
    Rejection,
    TenantStatus,
    gates_of,
    names,
    not_scheduled,
)
from gpushare.core.placement import (
    DecisionContext,
    Explanation,
    Happening,
    PlacementRequest,
    PodAccount,
    account,
    explain,
)
from gpushare.kube import CORE_EVENTS, GPUNODES, GPUSHARES, PODS, Api, Forbidden, Json, NotFound

app = typer.Typer(help=__doc__)

_POD_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")  # RFC 1123
_SPEAKERS: Final = ("gpushare.io/", "gpushare-scheduler", "default-scheduler", "kopf", "kueue")


@dataclass(frozen=True, slots=True)
class PodReading:
    """The objects read to explain one pod.

    Attributes:
        objects: everything that decisions depend on; the pod's own alone where that may not be read.
        pod: raw.
        events: raw, about the pod and its GpuShares.
        withheld: sentences on what may not be read and is left out; empty if `objects` is everything.
    """

    objects: Objects
    pod: Json
    events: Sequence[Json]
    withheld: tuple[str, ...] = ()


async def read(api: Api, namespace: str, name: str) -> PodReading:
    """Read the pod, its events, and everything that decisions depend on, as far as it may be read.

    Raises:
        AbsentError: there is no such pod.
        CommandError: the cluster has no gpushare, or another version.
        Forbidden: the pod or its events may not be read.
    """
    try:
        pod = await api.get(PODS, name, namespace=namespace)
    except NotFound:
        raise AbsentError(
            f'there is no pod {name} in namespace {namespace}: -n names another, "gpushare pods" lists them'
        ) from None
    withheld: list[str] = []
    try:
        objects = await read_objects(api)
    except Forbidden:
        objects = await _own_objects(api, pod, withheld)
    events: list[Json] = []
    shares = _share_uids(objects, pod)
    for regarded in {name, *shares}:
        selector = f"involvedObject.name={regarded}"
        events += (await api.list(CORE_EVENTS, _whole, namespace=namespace, field_selector=selector)).items
    # one without a uid counts; an earlier pod of the same name, such as a StatefulSet's, has another
    uids = {pod["metadata"].get("uid"), *shares.values(), None, ""}
    own = [each for each in events if (each.get("involvedObject") or {}).get("uid") in uids]
    return PodReading(objects, pod, own, tuple(withheld))


async def _own_objects(api: Api, pod: Json, withheld: list[str]) -> Objects:
    """Read the pod's own GpuNode and its namespace's GpuShares; add a sentence on all that is left out."""
    withheld.append(
        "you may not read the whole cluster, so what would be decided now is left out (why there, why not "
        "elsewhere), and the chart's defaults stand for the release's settings (ask for the ClusterRole "
        f"{EXPLAINER})"
    )
    gpunodes: list[Json] = []
    gpushares: list[Json] = []
    if node := (pod.get("spec") or {}).get("nodeName"):
        try:
            gpunodes.append(await api.get(GPUNODES, node))
        except Forbidden:
            withheld.append(
                "you may not read GpuNodes, so its GPU has no name here and its neighbours are left out (ask for "
                f"the ClusterRole {VIEWER})"
            )
        except NotFound:
            pass  # the pod's GPU is named by its uuid
    try:
        gpushares = await list_ours(api, GPUSHARES, _whole, namespace=pod["metadata"]["namespace"])
    except Forbidden as error:
        withheld.append(f"{error} (ask for the ClusterRole {VIEWER})")
    return Objects(None, (), gpunodes, gpushares, (pod,), time.time())


def explanation_of(objects: Objects, pod: Json, events: Sequence[Json]) -> tuple[Explanation, PodFacts]:
    """Explain a pod of a cluster.

    Raises:
        AbsentError: gpushare has nothing to do with this pod; the sentence says why.
    """
    view = _sharing(pod)
    cluster = cluster_of(objects)
    mine = next((each for each in cluster.pods if each[0].pod_uid == view.key), None)
    if mine is None:
        why = next((note for note in cluster.notes if view.key in note), "what it asks cannot be read")
        raise _unexplained(view, why)
    request, placed = mine
    nodes = _heard(objects)
    request = replace(request, rules=NodeRules.from_spec(pod.get("spec") or {}))  # a running pod's too
    context = context_without(cluster, request)
    share = cluster.share_of(view)
    found = explain(
        request,
        context,
        cluster.model,
        placed,
        defaults=cluster.settings.defaults,
        seen=_seen(nodes),
        share=share,
        happened=[_happening(event) for event in events if _is_ours(event)],
        excluded=SchedulerFilters(cluster.scheduler_nodes).excluded(request, context),
    )
    return found, _facts(view, nodes, pod)


def account_of(objects: Objects, pod: Json, events: Sequence[Json]) -> tuple[PodAccount, PodFacts]:
    """Say what a pod's own objects say.

    Raises:
        AbsentError: gpushare has nothing to do with this pod; the sentence says why.
    """
    view = _sharing(pod)
    shares = ShareIndex(GpuShare.from_object(each) for each in objects.gpushares)
    place = own_place(view, shares, objects.read_at)
    if isinstance(place, Rejection):
        raise _unexplained(view, str(place))
    request, placed = place
    nodes = _heard(objects)
    share = shares.of(view.namespace, view.labels, (*view.owner_uids, view.uid))
    happened = [_happening(event) for event in events if _is_ours(event)]
    found = account(request, placed, view.uid, nodes, share=share, happened=happened)
    return found, _facts(view, nodes, pod)


def _sharing(pod: Json) -> PodView:
    """Return the pod's view, if it is one that gpushare has to do with.

    Raises:
        AbsentError: it is not; the sentence says why.
    """
    view = PodView.from_object(pod)
    if view.fraction is None:
        raise AbsentError(
            f"pod {view.key} has no annotation {names.FRACTION}: gpushare has nothing to do with it (annotate the "
            "template that it is made from)"
        )
    if view.finished:
        raise AbsentError(f"pod {view.key} has ended ({view.phase}) and holds no share any more")
    return view


def _unexplained(view: PodView, why: str) -> AbsentError:
    return AbsentError(f"pod {view.key} cannot be explained: {why}")


def _facts(view: PodView, nodes: Sequence[GpuNode], pod: Json) -> PodFacts:
    gpu_names = {gpu.uuid: f"{node.name}/{gpu.index}" for node in nodes for gpu in node.status.gpus}
    reports = (
        tenant.slo
        for node in nodes
        for gpu in node.status.gpus
        for tenant in gpu.tenants
        if tenant.pod_uid == view.uid
    )
    return PodFacts(view, gpu_names, _waits_for(pod), target_of(view, reports, was_read=bool(nodes)))


def context_without(cluster: LiveCluster, request: PlacementRequest) -> DecisionContext:
    """Return the context of a decision on the cluster without the pod itself."""
    others = tuple(each for each in cluster.pods if each[0].pod_uid != request.pod_uid)
    return context_of(replace(cluster, pods=others), [request])


def _heard(objects: Objects) -> list[GpuNode]:
    now = -math.inf if objects.read_at is None else objects.read_at
    return [heard(GpuNode.from_object(each), now) for each in objects.gpunodes]


def _seen(nodes: Sequence[GpuNode]) -> dict[str, TenantStatus]:
    return {
        f"{tenant.namespace}/{tenant.pod}": tenant
        for node in nodes
        for gpu in node.status.gpus
        for tenant in gpu.tenants
    }


def _share_uids(objects: Objects, pod: Json) -> dict[str, str]:
    """Return by name the uids of the GpuShares that list this pod; the operator writes its events about them."""
    uid = pod["metadata"].get("uid")
    return {
        str(share["metadata"]["name"]): str(share["metadata"].get("uid") or "")
        for share in objects.gpushares
        if any(each.get("podUid") == uid for each in (share.get("status") or {}).get("placements") or ())
        and share["metadata"].get("namespace") == pod["metadata"].get("namespace")
    }


def _is_ours(event: Json) -> bool:
    """Return whether an event is about placing and sharing, not about images and containers."""
    speaker = str(event.get("reportingComponent") or (event.get("source") or {}).get("component") or "")
    return speaker.startswith(_SPEAKERS)


def _happening(event: Json) -> Happening:
    series = event.get("series") or {}
    at = series.get("lastObservedTime") or event.get("eventTime") or event.get("lastTimestamp") or ""
    count = series.get("count") or event.get("count") or 1
    return Happening(
        str(at)[:19], str(event.get("reason") or ""), str(event.get("message") or "").strip(), int(count)
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
    if not _POD_NAME.fullmatch(name):
        raise UsageError(f'"{name}" is no name of a pod')
    where = Where(before if slash else namespace, kubeconfig, context)
    reading = ask(where, lambda api: read(api, where.current_namespace(), name), role=EXPLAINER)
    found: PodAccount
    if reading.withheld:
        found, facts = account_of(reading.objects, reading.pod, reading.events)
        remarks: Sequence[str] = reading.withheld
    else:
        found, facts = explanation_of(reading.objects, reading.pod, reading.events)
        remarks = cluster_of(reading.objects).notes
    own = [node for node in _heard(reading.objects) if node.name == facts.view.node]
    for note in (*remarks, *silence_notes(own)):
        notes().print(note)
    if output.is_data:
        emit(as_record(found, facts), output)
    else:
        print_explanation(found, facts)
