"""Admission: the JSON patch for a pod with our annotation, or the sentence that refuses it (design.md 2.1).

Pods and workloads are the API's JSON objects; nothing here changes them. `mutate` returns a JSON patch, with what
design.md 2.1 lists; `check_*` return None or the refusal.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gpushare.core.admission.gpu_container import (
    RULE,
    all_containers,
    amounts_of,
    annotations_of,
    container_index,
    containers_of,
    is_none,
    named,
    names_its_share,
    refuse_container,
)
from gpushare.core.admission.ownership import controller_of
from gpushare.core.admission.resolve import Defaults, Needs, least_percent, refuse_undivided, resolve
from gpushare.core.admission.tolerations import restored_tolerations, set_tolerations
from gpushare.core.api import (
    MAX_GPUS_PER_POD,
    GpuShare,
    JobClass,
    Reason,
    Rejection,
    ShareRequest,
    class_of_target,
    names,
    parse_count,
    parse_request,
    refuse_memory,
    refuse_processes,
    refuse_slo,
    share_limit_of,
    shown,
)

Json = dict[str, Any]
Object = Mapping[str, Any]

_DEFAULT_SCHEDULERS: Final = ("", "default-scheduler", names.SCHEDULER_NAME)
_PREFIX: Final = f"{names.GROUP}/"
_KNOWN_ANNOTATIONS: Final = frozenset((*names.USER_ANNOTATIONS, *names.DECISION_ANNOTATIONS, names.ROOM_SINCE))
_USER_NAMES: Final = tuple(name.removeprefix(_PREFIX) for name in names.USER_ANNOTATIONS)
MAX_NAMES: Final = 16  # most warnings about unknown annotations, and about containers that ask for other GPUs
_LONGEST_NAME: Final = 64  # longer ones are truncated and not compared
# Variables that CUDA reads. The downward API fills them in when the container starts, which is after the decision.
_CAPS_BY_VARIABLE: Final = {
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": names.THREAD_PERCENTAGE,
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": names.MEMORY_LIMIT,
}
# Variables that give a container a GPU or lift MPS's limits: set by gpushare alone.
_RESERVED_VARIABLES: Final = frozenset({"NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"})
_RESERVED_PREFIX: Final = "CUDA_MPS_"
_CAPS: Final[tuple[Json, ...]] = tuple(
    {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}}
    for name, annotation in _CAPS_BY_VARIABLE.items()
)
_JOB: Final = ("batch", "Job")
_JOBSET: Final = ("jobset.x-k8s.io", "JobSet")
_OTHER_GPU_PREFIXES: Final = ("nvidia.com/", "amd.com/gpu", "gpu.intel.com/")
# Why a share that the user left out is not what the request gives: the mutating webhook set it before.
_JUST_NOW: Final = "another webhook changed it, or gpushare's values or GPUs have just changed: create it again"
_IN_TEMPLATE: Final = "its Job was made before gpushare's values or GPUs changed, and keeps it: make the Job anew"

DEFAULT_MAX_SELECTORS: Final = 1000  # to match 300 pods takes half a second (docs/measurements/operator.md)


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """The chart values that admission applies.

    Attributes:
        defaults: values that neither the pod nor its GpuShare sets.
        runtime_class: set on pods that name none; None where the node's default runtime handles GPUs.
        env_caps: whether to also write the caps into the container's environment, for drivers on which the gate's
            ceilings have no effect (docs/design.md 2.4).
        allowed_env: reserved environment variables that pods may set nevertheless.
        max_selectors: most GpuShares with a selector per namespace; each may have to be matched with every pod.
        max_clients_per_pod: most MPS clients that the gate allows one pod on a GPU.
    """

    defaults: Defaults = field(default_factory=Defaults)
    runtime_class: str | None = None
    env_caps: bool = False
    allowed_env: frozenset[str] = frozenset()
    max_selectors: int = DEFAULT_MAX_SELECTORS
    max_clients_per_pod: int = names.MAX_CLIENTS_PER_POD


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Facts about the cluster at the time of the request; all of them may be unknown.

    Attributes:
        gpu_memories_mib: what tenants get of the memory of the cluster's GPUs; if empty, any amount is accepted.
        share: the pod's GpuShare.
        other_selectors: number of other GpuShares with a selector in the namespace.
        is_fixed: whether the pod's share is already fixed by an immutable template that was admitted earlier.
    """

    gpu_memories_mib: frozenset[int] = frozenset()
    share: GpuShare | None = None
    other_selectors: int = 0
    is_fixed: bool = False


NOTHING_KNOWN: Final = Knowledge()
STRICT: Final = AdmissionPolicy()


def check_gpushare(
    share: Object, old: Object | None, knowledge: Knowledge, policy: AdmissionPolicy
) -> Rejection | None:
    """Refuse a GpuShare that adds one selector too many to its namespace; None allows it."""
    brings_one = _has_selector(share) and not (old is not None and _has_selector(old))
    if not brings_one or knowledge.other_selectors < policy.max_selectors:
        return None
    return Rejection(
        Reason.TOO_MANY_GPUSHARES,
        f"the namespace has {knowledge.other_selectors} GpuShares with a selector already, at most "
        f"{policy.max_selectors} are allowed (the chart's value admission.maxSelectors)",
    )


def _has_selector(share: Object) -> bool:
    return (share.get("spec") or {}).get("selector") is not None


def is_ours(pod: Object | None) -> bool:
    """Return whether the pod has the annotation that asks for a share; every other pod is left alone."""
    return names.FRACTION in annotations_of(pod or {})


def mutate(pod: Object, policy: AdmissionPolicy, knowledge: Knowledge = NOTHING_KNOWN) -> list[Json] | Rejection:
    """Return the JSON patch for a new pod; empty for one that is not ours or needs no change."""
    if not is_ours(pod):
        return []
    knowledge = _as_given(pod, pod, _JOB, knowledge)
    if (refusal := _check_request(pod, policy, knowledge, _set_in_template(knowledge))) is not None:
        return refusal
    needs = _needs(pod, policy, knowledge)
    if isinstance(needs, Rejection):
        return needs
    spec: Object = pod["spec"]
    index = container_index(pod)
    shares = str(needs.limit_percent)
    patch = [
        *_set_share(spec["containers"][index], f"/spec/containers/{index}", shares),
        *_set(spec, "/spec", "schedulerName", names.SCHEDULER_NAME),
        *_set_label(pod),
        *_set_memory(pod, knowledge.share),
        *set_tolerations(spec, policy.defaults.taints),
    ]
    if policy.runtime_class and not spec.get("runtimeClassName"):
        patch += _set(spec, "/spec", "runtimeClassName", policy.runtime_class)
    if policy.env_caps:
        patch += _set_caps(spec["containers"][index], f"/spec/containers/{index}")
    return patch


def mutate_templates(
    obj: Object, old: Object | None, policy: AdmissionPolicy, know: Callable[[Object], Knowledge]
) -> list[Json] | Rejection:
    """Return the JSON patch that adds share and tolerations to a Job's or JobSet's pod templates (docs/adr/0133).

    A queue such as Kueue admits a Job by what its template requests, before any pod exists. A template is
    immutable once created, so an update restores what the request left out, and refuses nothing.

    Args:
        old: the object before an update.
        know: returns the knowledge that applies to a template.
    """
    before = dict(job_templates(old)) if old is not None else {}
    patch: list[Json] = []
    for path, template in job_templates(obj):
        if not is_ours(template):
            continue
        if old is not None:
            former, share = before.get(path) or {}, know(template).share
            taints, is_fixed = policy.defaults.taints, _is_fixed(obj, old)
            needed: list[Json] | Rejection = [
                *_restored(template, former, share, is_fixed=is_fixed),
                *restored_tolerations(template.get("spec"), former.get("spec"), taints, is_fixed=is_fixed),
            ]
        else:
            needed = _template_patch(template, policy, _as_given(template, obj, _JOBSET, know(template)))
        if isinstance(needed, Rejection):
            return needed
        patch += ({**operation, "path": path + operation["path"]} for operation in needed)
    return patch


def _template_patch(template: Object, policy: AdmissionPolicy, knowledge: Knowledge) -> list[Json] | Rejection:
    """Return the patch that adds the share, the memory it is charged for and tolerations, as for a pod of it."""
    if (refusal := _check_request(template, policy, knowledge, _set_in_template(knowledge))) is not None:
        return refusal
    needs = _needs(template, policy, knowledge)
    if isinstance(needs, Rejection):
        return needs
    index = container_index(template)
    container = template["spec"]["containers"][index]
    return [
        *_set_share(container, f"/spec/containers/{index}", str(needs.limit_percent)),
        *_set_memory(template, knowledge.share),
        *set_tolerations(template["spec"], policy.defaults.taints),
    ]


def _is_fixed(obj: Object, old: Object) -> bool:
    """Return whether the API server refuses another place for pods than before: no new tolerations or selectors.

    They may change while a job is suspended, and as a JobSet becomes so.
    """
    either = [old, obj] if obj.get("kind") == "JobSet" else [old]
    return not any((each.get("spec") or {}).get("suspend") for each in either)


def _restored(template: Object, former: Object, share: GpuShare | None, *, is_fixed: bool) -> list[Json]:
    """Return the patch that restores the share and the memory that the former template had and this one lacks.

    What the new one sets itself the API server checks. Memory that may change comes back if a GpuShare has any.
    """
    patch: list[Json] = []
    own = next(iter(containers_of(former)[container_index(former) :]), None)
    amount = amounts_of(own or {}, "limits").get(names.SHARE_RESOURCE)
    for index, container in enumerate(containers_of(template)):
        if own is not None and amount is not None and container.get("name") == own.get("name"):
            patch += _set_share(container, f"/spec/containers/{index}", str(amount))
    memory = annotations_of(former).get(names.MEMORY)
    may_be_ours = is_fixed or (share and share.spec.memory)
    if memory is not None and names.MEMORY not in annotations_of(template) and may_be_ours:
        patch += _set(annotations_of(template), "/metadata/annotations", names.MEMORY, memory)
    return patch


def job_templates(obj: Object | None) -> list[tuple[str, Object]]:
    """Return the pod templates of a Job or of a JobSet's Jobs, each with its JSON path."""
    spec = (obj or {}).get("spec") or {}
    found = [("/spec/template", spec.get("template"))]
    for index, replicated in enumerate(spec.get("replicatedJobs") or ()):
        job = ((replicated.get("template") or {}).get("spec") or {}).get("template")
        found.append((f"/spec/replicatedJobs/{index}/template/spec/template", job))
    return [(path, template) for path, template in found if template]


def check_pod(
    pod: Object, knowledge: Knowledge = NOTHING_KNOWN, policy: AdmissionPolicy = STRICT
) -> Rejection | None:
    """Check that a new pod, after every webhook has changed it, is still as `mutate` made it."""
    if not is_ours(pod):
        return None
    knowledge = _as_given(pod, pod, _JOB, knowledge)
    if (refusal := _check_request(pod, policy, knowledge, _set_in_template(knowledge) or _JUST_NOW)) is not None:
        return refusal
    container = pod["spec"]["containers"][container_index(pod)]
    for kind in ("limits", "requests"):
        if is_none(amounts_of(container, kind).get(names.SHARE_RESOURCE, "0")):
            return _conflict(
                f"{named(container)}: resources.{kind} lacks {names.SHARE_RESOURCE}; gpushare's "
                "mutating webhook adds it, so another webhook removed it or that webhook is not installed"
            )
    if pod["spec"].get("schedulerName") != names.SCHEDULER_NAME:
        return _conflict(
            f"spec.schedulerName: another webhook replaced {names.SCHEDULER_NAME}, which alone can place this pod"
        )
    if (pod["metadata"].get("labels") or {}).get(names.MANAGED_LABEL) != "true":
        return _conflict(f'label {names.MANAGED_LABEL}: another webhook removed it; it must be "true"')
    return None


def check_workload(
    obj: Object, old: Object | None = None, knowledge: Knowledge = NOTHING_KNOWN, policy: AdmissionPolicy = STRICT
) -> Rejection | None:
    """Check that pods of a workload's template would be accepted, so that a mistake is reported where it was made.

    Args:
        obj: Deployment, ReplicaSet, StatefulSet, DaemonSet, Job, CronJob or ReplicationController.
        old: the object before an update. An unchanged template is never refused, so that a workload older than
            gpushare can still be scaled, paused and deleted.
    """
    template = pod_template(obj)
    if template is None or not is_ours(template):
        return None
    if old is not None and pod_template(old) == template:
        return None
    knowledge = _as_given(template, obj, _JOBSET, knowledge)
    if old is not None and obj.get("kind") == "Job":  # Kueue changes templates of suspended Jobs
        knowledge = replace(knowledge, is_fixed=True)
    is_set = old is None and obj.get("kind") == "Job"  # by `mutate_templates`
    return _check_request(template, policy, knowledge, _JUST_NOW if is_set else "")


def pod_template(obj: Object) -> Object | None:
    """Return the pod template of a workload object; None where there is none."""
    spec = obj.get("spec") or {}
    if "jobTemplate" in spec:
        spec = (spec["jobTemplate"] or {}).get("spec") or {}
    template: Object | None = spec.get("template")
    return template


def warnings(pod: Object) -> tuple[str, ...]:
    """Return warnings about likely mistakes, for `kubectl` to print; the pod or template is accepted anyway."""
    ours = [name for name in annotations_of(pod) if name.startswith(_PREFIX)]
    unknown = [name for name in ours if name not in _KNOWN_ANNOTATIONS]
    found = [f"annotation {_plain(name)} means nothing to gpushare{_hint(name)}" for name in unknown[:MAX_NAMES]]
    if len(unknown) > MAX_NAMES:
        found.append(f"{len(unknown) - MAX_NAMES} more annotations {_PREFIX}... mean nothing to gpushare")
    if not is_ours(pod):
        if ours:
            found.append(f"without the annotation {names.FRACTION} the pod gets no GPU from gpushare")
        return tuple(found)
    doubled = [
        f"{named(container)} also asks for {_plain(str(resource))}, a GPU that gpushare does "
        f"not manage; leave out either that or the annotation {names.FRACTION}"
        for container in all_containers(pod.get("spec") or {})
        for resource in (container.get("resources") or {}).get("limits") or {}
        if str(resource).startswith(_OTHER_GPU_PREFIXES)
    ]
    return (*found, *doubled[:MAX_NAMES])


def _hint(annotation: str) -> str:
    """Return "; did you mean NAME?" with the closest known annotation, or nothing."""
    name = annotation.removeprefix(_PREFIX).lower()
    close = difflib.get_close_matches(name, _USER_NAMES, n=1) if len(name) <= _LONGEST_NAME else ()
    return f"; did you mean {_PREFIX}{close[0]}?" if close else ""


def _plain(name: str) -> str:
    return shown(name, len(_PREFIX) + _LONGEST_NAME)[1:-1]


def _needs(
    pod: Object, policy: AdmissionPolicy, knowledge: Knowledge, *, processes: bool = True
) -> Needs | Rejection:
    """Return what a pod needs and is charged, with or without counting the processes that it declares."""
    asked = annotations_of(pod)
    if not processes:
        asked = {name: value for name, value in asked.items() if name != names.PROCESSES}
    return resolve(asked, knowledge.share, policy.defaults, gpu_memories_mib=knowledge.gpu_memories_mib)


def _as_given(pod: Object, made: Object, by: tuple[str, str], knowledge: Knowledge) -> Knowledge:
    """Return the known facts; if a Job's template fixed the share, ignore isolation for ending neighbours.

    A share that is named in the template of a Job or JobSet is fixed, because that template is immutable. Then
    the pod is not isolated for ending its neighbours. In any other template a user could name a share to avoid
    isolation, so it does not count.

    Args:
        made: the pod, or the Job that the template belongs to.
        by: API group and kind of the controller that creates such objects.
    """
    owner = controller_of(made) if names_its_share(pod) else None
    if owner is None or (owner.api_version.rpartition("/")[0], owner.kind) != by:
        return knowledge
    share = knowledge.share
    if share is not None and share.status.ends_neighbours:
        share = replace(share, status=replace(share.status, neighbours_ended=()))
    return replace(knowledge, share=share, is_fixed=True)


def _set_in_template(knowledge: Knowledge) -> str:
    """Return how the share came to be that an immutable template gave its pod; empty if none did."""
    return _IN_TEMPLATE if knowledge.is_fixed else ""


def _check_request(
    pod: Object, policy: AdmissionPolicy, knowledge: Knowledge, set_before: str = ""
) -> Rejection | None:
    """Return the first reason to refuse a pod or template.

    Args:
        set_before: how the share came to be, if the webhook has set it before; a sentence for its refusal. Then
            a larger one than the request gives here is accepted too: another replica, or an earlier release or
            setting, charged more, and a pod that is charged more harms nobody.
    """
    request = parse_request(annotations_of(pod))
    if isinstance(request, Rejection):
        return request
    needs = _needs(pod, policy, knowledge)
    if isinstance(needs, Rejection):
        return needs
    if request.slo is not None and needs.job_class is not class_of_target(request.slo):
        return refuse_slo(annotations_of(pod), request.slo)
    spec = pod.get("spec") or {}
    # A template may name the share that the previous release charged, which did not count processes. Where they
    # divide a cap, only an immutable one may: the others' pods would have processes that never run.
    counts = needs.job_class is JobClass.THROUGHPUT and not knowledge.is_fixed
    former = _needs(pod, policy, knowledge, processes=counts)
    if isinstance(former, Rejection):
        return former
    least = least_percent(former, policy.defaults, knowledge.gpu_memories_mib) if request.is_auto else None
    expected = _ExpectedShare(needs.limit_percent, least, set_before, former.limit_percent)
    return (
        _check_memory(pod, request, knowledge)
        or _check_processes(needs, share_limit_of(spec) if set_before else 0, policy, knowledge)
        or refuse_container(pod)
        or _check_shares(pod, request, expected)
        or _check_environment(spec, policy)
        or _check_scheduling(spec)
    )


def _check_memory(pod: Object, request: ShareRequest, knowledge: Knowledge) -> Rejection | None:
    largest = max(knowledge.gpu_memories_mib, default=None)
    if largest is None or request.memory_mib is None or request.memory_mib <= largest:
        return None
    return refuse_memory(
        annotations_of(pod)[names.MEMORY],
        "is more memory than tenants get of any GPU of this cluster",
        f"at most {largest}Mi, what they get of the largest one",
    )


def _check_processes(
    needs: Needs, given_percent: int, policy: AdmissionPolicy, knowledge: Knowledge
) -> Rejection | None:
    """Refuse more processes than the gate lets connect; a pod on several GPUs has no gate.

    Args:
        given_percent: the share that the pod has already, which may be larger than what its request gives here.
    """
    most = policy.max_clients_per_pod
    if knowledge.is_fixed or needs.gpu_count > 1:
        return None
    if needs.processes > most:
        return refuse_processes(needs.processes, most)
    return refuse_undivided(replace(needs, share_percent=max(needs.share_percent, given_percent)))


@dataclass(frozen=True, slots=True)
class _ExpectedShare:
    """The share that a container may name.

    Attributes:
        percent: the share that its request gives here.
        least_of_auto: for "auto", the smallest share it may stand for; None for a fraction.
        set_before: how it came to be, if the webhook has set it before; then one above `percent` is accepted too.
        former: the share that the previous release gave it.
    """

    percent: int
    least_of_auto: int | None = None
    set_before: str = ""
    former: int | None = None

    def accepts(self, amount: str) -> bool:
        try:
            count = parse_count(amount)
        except ValueError:
            return False
        if self.least_of_auto is not None:
            return count >= self.least_of_auto and _is_any_share(*divmod(count, names.SHARES_PER_GPU))
        if self.set_before and self.percent < count <= names.SHARES_PER_GPU:
            return True
        return count in (self.percent, self.former)

    def __str__(self) -> str:
        if self.least_of_auto is None:
            return str(self.percent)
        return f"{max(1, self.least_of_auto)} to 100, or 100 for each whole GPU"


def _check_shares(pod: Object, request: ShareRequest, expected: _ExpectedShare) -> Rejection | None:
    """Refuse `gpushare.io/share` set by hand on another container or to another amount."""
    chosen = container_index(pod)
    for index, container in enumerate(all_containers(pod.get("spec") or {})):
        for kind in ("limits", "requests"):
            amount = amounts_of(container, kind).get(names.SHARE_RESOURCE)
            if amount is None or is_none(amount):
                continue
            where = f"{named(container)}: resources.{kind} {names.SHARE_RESOURCE}: {shown(amount)}"
            if index != chosen:
                return _conflict(
                    f"{where} is not on the container that gets the GPU; leave it out, gpushare sets it on {RULE}"
                )
            if not expected.accepts(str(amount)):
                is_raised = request.share_percent is not None and expected.percent > request.share_percent
                with_what = ", which with the pod's GPU memory, processes or isolation" if is_raised else ", which"
                return _conflict(
                    f"{where} contradicts annotation {names.FRACTION}{with_what} makes it {expected}; leave it "
                    f"out, gpushare sets it{expected.set_before and f'. If you did, {expected.set_before}'}"
                )
    return None


def _is_any_share(gpus: int, rest_percent: int) -> bool:
    return rest_percent > 0 if gpus == 0 else rest_percent == 0 and gpus <= MAX_GPUS_PER_POD


def _check_environment(spec: Object, policy: AdmissionPolicy) -> Rejection | None:
    """Refuse variables that would override the device plugin's and give the pod more than was decided."""
    for container in all_containers(spec):
        for variable in container.get("env") or ():
            name = str(variable.get("name"))
            if not (name in _RESERVED_VARIABLES or name.startswith(_RESERVED_PREFIX)):
                continue
            if name not in policy.allowed_env and not _reads(variable, _CAPS):
                return _conflict(
                    f"{named(container)}: env {_plain(name)} takes the place of what gpushare sets for the pod's "
                    "GPU; leave it out (the chart's value admission.allowedEnv allows names)"
                )
    return None


def _check_scheduling(spec: Object) -> Rejection | None:
    scheduler = spec.get("schedulerName") or ""
    if scheduler not in _DEFAULT_SCHEDULERS:
        return _conflict(
            f"spec.schedulerName: {shown(scheduler)} cannot place a pod with annotation {names.FRACTION}; "
            f"leave it out, gpushare sets {names.SCHEDULER_NAME}"
        )
    if spec.get("nodeName"):
        return _conflict(
            f"spec.nodeName: {shown(spec['nodeName'])} goes past the scheduler, so nobody would decide on which "
            "GPU the pod runs; use spec.nodeSelector or spec.affinity instead"
        )
    return None


def _set_share(container: Object, path: str, shares: str) -> list[Json]:
    """Patch limit and request, which must be equal for an extended resource."""
    share = {names.SHARE_RESOURCE: shares}
    resources = container.get("resources")
    if not resources:
        return [{"op": "add", "path": f"{path}/resources", "value": {"limits": share, "requests": share}}]
    patch: list[Json] = []
    for kind in ("limits", "requests"):
        amounts = resources.get(kind)
        if not amounts:
            patch.append({"op": "add", "path": f"{path}/resources/{kind}", "value": share})
        elif is_none(amounts.get(names.SHARE_RESOURCE, "0")):
            patch += _set(amounts, f"{path}/resources/{kind}", names.SHARE_RESOURCE, shares)
    return patch


def _set_caps(container: Object, path: str) -> list[Json]:
    """Patch in the decision's caps as environment variables, replacing the pod's own values."""
    env = list(container.get("env") or ())
    kept = [one for one in env if one.get("name") not in _CAPS_BY_VARIABLE]
    if len(kept) + len(_CAPS) == len(env) and all(_reads(one, _CAPS) for one in env[len(kept) :]):
        return []
    return [{"op": "add", "path": f"{path}/env", "value": [*kept, *_CAPS]}]


def _reads(variable: Object, caps: Iterable[Object]) -> bool:
    """Return whether a variable is one of ours.

    The API server adds apiVersion to a fieldRef, so only name and path are compared.
    """
    found = ((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath")
    return any(
        variable.get("name") == cap["name"] and found == cap["valueFrom"]["fieldRef"]["fieldPath"] for cap in caps
    )


def _set_label(pod: Object) -> list[Json]:
    labels = (pod.get("metadata") or {}).get("labels")
    if not labels:
        return [{"op": "add", "path": "/metadata/labels", "value": {names.MANAGED_LABEL: "true"}}]
    return _set(labels, "/metadata/labels", names.MANAGED_LABEL, "true")


def _set_memory(pod: Object, share: GpuShare | None) -> list[Json]:
    """Copy the GpuShare's memory into the pod's annotation; later changes of the GpuShare do not apply to it."""
    memory = share.spec.memory if share is not None else None
    if memory is None or names.MEMORY in annotations_of(pod):
        return []
    return _set(annotations_of(pod), "/metadata/annotations", names.MEMORY, memory)


def _set(parent: Object, path: str, key: str, value: str) -> list[Json]:
    if parent.get(key) == value:
        return []
    return [{"op": "add", "path": f"{path}/{key.replace('~', '~0').replace('/', '~1')}", "value": value}]


def _conflict(detail: str) -> Rejection:
    return Rejection(Reason.CONFLICT, detail)
