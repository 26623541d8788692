"""AdmissionReview v1 in and out; the decisions are `gpushare.core.admission.review`'s."""

import base64
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final

import orjson

from gpushare.core.admission import review as admission
from gpushare.core.api.rejection import Rejection

Json = dict[str, Any]
# The pod (or a workload's pod template) and its namespace -> what is known that bears on it.
Know = Callable[[Mapping[str, Any], str], admission.Knowledge]

_REFUSED: Final = 422  # as for any field that the API server itself finds invalid


class Webhook(StrEnum):
    """The two endpoints."""

    MUTATE = "mutate"
    VALIDATE = "validate"


class BadReviewError(ValueError):
    """What was posted is no AdmissionReview v1; the message says why."""


def review(body: object, webhook: Webhook, policy: admission.Policy, know: Know) -> Json:
    """Answer one AdmissionReview.

    Raises:
        BadReviewError: the body is not an AdmissionReview v1 request.
    """
    if not isinstance(body, dict) or body.get("kind") != "AdmissionReview":
        raise BadReviewError("the body is not an AdmissionReview")
    if body.get("apiVersion") != "admission.k8s.io/v1":
        raise BadReviewError(f"AdmissionReview {body.get('apiVersion')!r} is not supported, only v1 is")
    request = body.get("request")
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str):
        raise BadReviewError("the AdmissionReview has no request with a uid")
    answer = _mutate(request, policy, know) if webhook is Webhook.MUTATE else _validate(request, know)
    return {"apiVersion": body["apiVersion"], "kind": body["kind"], "response": {"uid": request["uid"], **answer}}


def refusal_of(answer: Json) -> str | None:
    """The sentence of an answered review that refuses; None when it allows."""
    response = answer["response"]
    return None if response["allowed"] else str(response["status"]["message"])


def _mutate(request: Json, policy: admission.Policy, know: Know) -> Json:
    pod = request.get("object")
    if request.get("operation") != "CREATE" or not _is_pod(request) or not isinstance(pod, dict):
        return {"allowed": True}
    patch = admission.mutate(pod, policy, know(pod, request.get("namespace") or ""))
    if isinstance(patch, Rejection):
        return _refuse(patch)
    notes = admission.warnings(pod) if admission.is_ours(pod) else ()
    answer: Json = {"allowed": True, **({"warnings": list(notes)} if notes else {})}
    if patch:
        answer |= {"patchType": "JSONPatch", "patch": base64.b64encode(orjson.dumps(patch)).decode()}
    return answer


def _validate(request: Json, know: Know) -> Json:
    obj, old = request.get("object"), request.get("oldObject")
    if not isinstance(obj, dict):  # DELETE and CONNECT carry none
        return {"allowed": True}
    namespace = request.get("namespace") or ""
    if _is_pod(request):
        if request.get("operation") != "CREATE":  # the chart's in-tree policy keeps the request as it was
            return {"allowed": True}
        refusal = admission.check_pod(obj, know(obj, namespace))
    else:
        template = admission.pod_template(obj) or {}
        refusal = admission.check_workload(obj, old, know(template, namespace))
    return _refuse(refusal) if refusal is not None else {"allowed": True}


def _is_pod(request: Json) -> bool:
    kind = request.get("kind") or {}
    return kind.get("kind") == "Pod" and not kind.get("group")


def _refuse(refusal: Rejection) -> Json:
    status = {"code": _REFUSED, "reason": "Invalid", "message": refusal.detail}
    return {"allowed": False, "status": status, "auditAnnotations": {"reason": refusal.reason.value}}
