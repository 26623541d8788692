"""Pods, GpuShares and answers for the tests of admission's decisions."""

import copy
import json
from typing import Any

from gpushare.core.admission.review import (
    AdmissionPolicy,
    Knowledge,
    check_pod,
    mutate,
)
from gpushare.core.api.objects import GpuShare
from gpushare.core.api.rejection import Rejection

Json = dict[str, Any]
POLICY = AdmissionPolicy()
H200 = Knowledge(frozenset({143771}))
LABEL = {"op": "add", "path": "/metadata/labels/gpushare.io~1managed", "value": "true"}
TOLERATIONS = {
    "op": "add",
    "path": "/spec/tolerations",
    "value": [{"key": "nvidia.com/gpu", "operator": "Exists"}, {"key": "gpushare.io/gpus", "operator": "Exists"}],
}
SCHEDULER = {"op": "add", "path": "/spec/schedulerName", "value": "gpushare-scheduler"}


def pod(annotations: Json | None = None, *, containers: list[Json] | None = None, **spec: Any) -> Json:
    metadata: Json = {"name": "web-0", "namespace": "shop"}
    if annotations is not None:
        metadata["annotations"] = annotations
    containers = containers or [{"name": "main", "image": "x", "resources": {}}]
    return {"kind": "Pod", "metadata": metadata, "spec": {"containers": containers, **spec}}


def share(**status: Any) -> GpuShare:
    return GpuShare.from_object(
        {"metadata": {"name": "s", "namespace": "shop"}, "spec": {"fraction": "0.4"}, "status": status}
    )


def apply(document: Json, patch: list[Json]) -> Json:
    """RFC 6902 `add`, all that we emit."""
    result = copy.deepcopy(document)
    for operation in patch:
        assert operation["op"] == "add"
        *parents, last = (p.replace("~1", "/").replace("~0", "~") for p in operation["path"].split("/")[1:])
        node: Any = result
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node[part]
        node[last] = json.loads(json.dumps(operation["value"]))
    return result


def patched(document: Json, policy: AdmissionPolicy = POLICY, knowledge: Knowledge | None = None) -> list[Json]:
    patch = mutate(document, policy, knowledge or Knowledge())
    assert not isinstance(patch, Rejection), patch
    return patch


def refused(document: Json, knowledge: Knowledge | None = None) -> str:
    answer = mutate(document, POLICY, knowledge or Knowledge())
    assert isinstance(answer, Rejection)
    checked = check_pod(document, knowledge or Knowledge())  # with the mutating webhook bypassed as well
    assert checked is not None
    cut = (". If you did, another webhook", 1)  # what /validate says besides, as the share may have been set by us
    assert (checked.reason, checked.detail.split(*cut)[0]) == (answer.reason, answer.detail)
    return answer.detail
