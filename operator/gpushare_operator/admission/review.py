"""Parse and answer AdmissionReview v1; the decisions come from `gpushare.core.admission.review`."""

import base64
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final

import orjson

from gpushare.core import admission
from gpushare.core.api import Rejection, names, shown

Json = dict[str, Any]
# From the pod (or a workload's pod template) and its namespace to the known facts that matter for its review.
Know = Callable[[Mapping[str, Any], str], admission.Knowledge]

_WITH_TEMPLATES: Final = (("batch", "Job"), ("jobset.x-k8s.io", "JobSet"))
_REFUSED: Final = 422  # the API server's own status for an invalid field


class Webhook(StrEnum):
    """Endpoint of the webhooks."""

    MUTATE = "mutate"
    VALIDATE = "validate"


class BadReviewError(ValueError):
    """The posted body is not an AdmissionReview v1; the message says why."""


def review(body: object, webhook: Webhook, policy: admission.AdmissionPolicy, know: Know) -> Json:
    """Answer one AdmissionReview.

    Raises:
        BadReviewError: the body is not an AdmissionReview v1 request.
    """
    if not isinstance(body, dict) or body.get("kind") != "AdmissionReview":
        raise BadReviewError("the body is not an AdmissionReview")
    if body.get("apiVersion") != "admission.k8s.io/v1":
        raise BadReviewError(f"AdmissionReview {shown(body.get('apiVersion'))} is not supported, only v1 is")
    request = body.get("request")
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str):
        raise BadReviewError("the AdmissionReview has no request with a uid")
    if not isinstance(request.get("namespace") or "", str):
        raise BadReviewError("the request's namespace is no text")
    for name in ("object", "oldObject"):
        _check_shape(request.get(name), name)
    answer = _mutate(request, policy, know) if webhook is Webhook.MUTATE else _validate(request, policy, know)
    return {"apiVersion": body["apiVersion"], "kind": body["kind"], "response": {"uid": request["uid"], **answer}}


def _check_shape(obj: object, where: str) -> None:
    """Refuse a shape that no API server sends, so that the decisions can rely on the types.

    Raises:
        BadReviewError: a field that is read has another type than Kubernetes gives it.
    """
    if obj is None:
        return
    root = _mapping(obj, where)
    metadata = _mapping(root.get("metadata"), f"{where}.metadata")
    for name in ("annotations", "labels"):
        for value in _mapping(metadata.get(name), f"{where}.metadata.{name}").values():
            if not isinstance(value, str):
                raise BadReviewError(f"{where}.metadata.{name} has a value that is not text")
    _objects(metadata.get("ownerReferences"), f"{where}.metadata.ownerReferences")
    spec = _mapping(root.get("spec"), f"{where}.spec")
    for kind in ("containers", "initContainers"):
        for container in _objects(spec.get(kind), f"{where}.spec.{kind}"):
            _check_container(container, f"{where}.spec.{kind}")
    _objects(spec.get("tolerations"), f"{where}.spec.tolerations")
    if "jobTemplate" in spec:
        job = _mapping(spec["jobTemplate"], f"{where}.spec.jobTemplate")
        spec = _mapping(job.get("spec"), f"{where}.spec.jobTemplate.spec")
    for replicated in _objects(spec.get("replicatedJobs"), f"{where}.spec.replicatedJobs"):
        job = _mapping(replicated.get("template"), f"{where}.spec.replicatedJobs.template")
        if "replicatedJobs" in _mapping(job.get("spec"), f"{where}.spec.replicatedJobs.template.spec"):
            raise BadReviewError(f"{where}.spec.replicatedJobs.template.spec has Jobs of its own")
        _check_shape({"spec": job.get("spec")}, f"{where}.spec.replicatedJobs.template")
    if "template" in spec:
        template = _mapping(spec["template"], f"{where}.spec.template")
        if {"template", "jobTemplate", "replicatedJobs"} & _mapping(
            template.get("spec"), f"{where}.spec.template.spec"
        ).keys():
            raise BadReviewError(f"{where}.spec.template.spec has a template of its own")
        _check_shape(
            {"metadata": template.get("metadata"), "spec": template.get("spec")}, f"{where}.spec.template"
        )


def _check_container(container: Json, where: str) -> None:
    resources = _mapping(container.get("resources"), f"{where}.resources")
    for kind in ("limits", "requests"):
        _mapping(resources.get(kind), f"{where}.resources.{kind}")
    for variable in _objects(container.get("env"), f"{where}.env"):
        source = _mapping(variable.get("valueFrom"), f"{where}.env.valueFrom")
        _mapping(source.get("fieldRef"), f"{where}.env.valueFrom.fieldRef")


def _mapping(value: object, where: str) -> Json:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadReviewError(f"{where} is not an object")
    return value


def _objects(value: object, where: str) -> list[Json]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise BadReviewError(f"{where} is not a list of objects")
    return value


def refusal_of(answer: Json) -> str | None:
    """Return the reason of an answered review that refuses; None when it allows."""
    response = answer["response"]
    return None if response["allowed"] else str(response["status"]["message"])


def _mutate(request: Json, policy: admission.AdmissionPolicy, know: Know) -> Json:
    pod = request.get("object")
    if _kind(request) in _WITH_TEMPLATES and isinstance(pod, dict):
        return _mutate_templates(request, pod, policy, know)
    if request.get("operation") != "CREATE" or not _is_pod(request) or not isinstance(pod, dict):
        return {"allowed": True}
    patch = admission.mutate(pod, policy, know(pod, request.get("namespace") or ""))
    if isinstance(patch, Rejection):
        return _refuse(patch)
    return _patched(_allow(pod), patch)


def _mutate_templates(request: Json, obj: Json, policy: admission.AdmissionPolicy, know: Know) -> Json:
    old = request.get("oldObject") if request.get("operation") == "UPDATE" else None
    owners = (obj.get("metadata") or {}).get("ownerReferences") or ()

    def know_of(template: Mapping[str, Any]) -> admission.Knowledge:
        """Return the facts for a pod of the template: its labels, and the owners of the workload (a CronJob)."""
        metadata = {"labels": (template.get("metadata") or {}).get("labels"), "ownerReferences": owners}
        return know({"metadata": metadata}, request.get("namespace") or "")

    patch = admission.mutate_templates(obj, old, policy, know_of)
    return _refuse(patch) if isinstance(patch, Rejection) else _patched({"allowed": True}, patch)


def _patched(answer: Json, patch: list[Json]) -> Json:
    if not patch:
        return answer
    return answer | {"patchType": "JSONPatch", "patch": base64.b64encode(orjson.dumps(patch)).decode()}


def _validate(request: Json, policy: admission.AdmissionPolicy, know: Know) -> Json:
    obj, old = request.get("object"), request.get("oldObject")
    if not isinstance(obj, dict):  # DELETE and CONNECT carry no object
        return {"allowed": True}
    namespace = request.get("namespace") or ""
    if _is_pod(request):
        if request.get("operation") != "CREATE":  # on updates, the chart's own policy keeps them unchanged
            return {"allowed": True}
        refusal = admission.check_pod(obj, know(obj, namespace), policy)
        if refusal is None and admission.is_ours(obj):
            return {"allowed": True}  # /mutate has warned already
        return _refuse(refusal) if refusal is not None else _allow(obj)
    if _kind(request) == (names.GROUP, "GpuShare"):
        refusal = admission.check_gpushare(obj, old, know(obj, namespace), policy)
        return _refuse(refusal) if refusal is not None else {"allowed": True}
    template = admission.pod_template(obj) or {}
    refusal = admission.check_workload(obj, old, know(template, namespace), policy)
    if refusal is not None:
        return _refuse(refusal)
    return {"allowed": True} if old and admission.pod_template(old) == template else _allow(template)


def _allow(pod: Mapping[str, Any]) -> Json:
    """Allow a pod or a pod template, with warnings for its author."""
    notes = admission.warnings(pod)
    return {"allowed": True, **({"warnings": list(notes)} if notes else {})}


def _kind(request: Json) -> tuple[str, object]:
    """Return group and kind of the reviewed object."""
    kind = _mapping(request.get("kind"), "kind")
    return kind.get("group") or "", kind.get("kind")


def _is_pod(request: Json) -> bool:
    return _kind(request) == ("", "Pod")


def _refuse(refusal: Rejection) -> Json:
    status = {"code": _REFUSED, "reason": "Invalid", "message": refusal.detail}
    return {"allowed": False, "status": status, "auditAnnotations": {"reason": refusal.reason.value}}
