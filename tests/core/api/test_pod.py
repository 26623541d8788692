"""A pod reduced to what gpushare uses."""

import inspect
from typing import Any

import pytest

from gpushare.core.api import (
    PodView,
    deletion_of,
    gates_of,
    has_ended,
    not_scheduled,
    reduced_object,
    shortest_probe_seconds,
    values_of_variable,
    waiting_reason,
)
from gpushare.front import place


def test_a_pod():
    pod = PodView.from_object(
        {
            "metadata": {
                "name": "p",
                "namespace": "ns",
                "uid": "u",
                "labels": {"a": "b"},
                "annotations": {
                    "gpushare.io/fraction": "0.25",
                    "other": "x" * 1000,
                    "gpushare.io/gpu": "GPU-1",
                    "gpushare.io/thread-percentage": "25",
                    "gpushare.io/memory-limit": "0=100M",
                },
                "ownerReferences": [{"uid": "o"}],
            },
            "spec": {
                "nodeName": "n",
                "priority": 7,
                "containers": [
                    {"resources": {"limits": {"gpushare.io/share": "25"}, "requests": {"cpu": "500m"}}},
                    {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}},
                ],
                "initContainers": [{"resources": {"limits": {"gpushare.io/share": "10"}}}],
            },
            "status": {"phase": "Running", "startTime": "2026-11-21T00:00:00Z"},
        }
    )
    assert pod.annotations == {"gpushare.io/fraction": "0.25"}
    assert (pod.node, pod.priority, pod.owner_uids, pod.finished, pod.admitted) == ("n", 7, ("o",), False, True)
    assert (pod.limit_percent, pod.cpu_milli, pod.memory_mib) == (25, 1500, 1024)
    assert pod.decision is not None
    assert pod.decision.gpu_uuids == ("GPU-1",)


def test_malformed_decisions_are_none_and_bare_pods_pass():
    pod = PodView.from_object({"metadata": {"name": "p", "uid": "u", "annotations": {"gpushare.io/gpu": "GPU-1"}}})
    assert (pod.decision, pod.node, pod.limit_percent, pod.finished) == (None, None, 0, False)
    assert PodView.from_object({"metadata": {"name": "p", "uid": "u"}, "status": {"phase": "Failed"}}).finished


def test_a_limit_that_is_no_plain_number_is_none():
    hostile = {"resources": {"limits": {"gpushare.io/share": "9" * 9999}}}
    pod = PodView.from_object({"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": [hostile]}})
    assert pod.limit_percent == 0


def test_the_controller_is_the_owner_that_manages_it():
    owners = [
        {"kind": "Other", "name": "o", "uid": "1"},
        {"kind": "ReplicaSet", "name": "rs", "uid": "2", "controller": True},
    ]
    pod = PodView.from_object({"metadata": {"name": "p", "uid": "u", "ownerReferences": owners}})
    assert (pod.controller, pod.owner_uids) == (("ReplicaSet", "rs"), ("1", "2"))


def test_requests_are_counted_as_kube_scheduler_counts_them():
    def container(cpu, **fields):
        return {"resources": {"requests": {"cpu": cpu, "memory": "100Mi"}}} | fields

    spec = {
        "initContainers": [container("1"), container("500m", restartPolicy="Always"), container("4")],
        "containers": [container("2"), container("250m")],
        "overhead": {"cpu": "10m", "memory": "1Mi"},
    }
    pod = PodView.from_object({"metadata": {"name": "p", "uid": "u"}, "spec": spec})
    assert pod.cpu_milli == 4510, "the last init container beside the sidecar asks more than what runs later"
    assert pod.memory_mib == 301, "two containers and the sidecar"


@pytest.mark.parametrize(
    ("whole", "counted"),
    [
        ({}, (5_000, 2048)),
        ({"limits": {"cpu": "64", "memory": "64Gi"}}, (5_000, 2048)),
        ({"requests": {"cpu": "16", "memory": "64Gi"}}, (17_000, 65 * 1024)),
        ({"requests": {"cpu": "2", "memory": "1Mi"}}, (3_000, 1025)),
        ({"requests": {"cpu": "16"}}, (17_000, 2048)),
        ({"requests": {"memory": "0", "hugepages-2Mi": "2Mi"}}, (5_000, 1024)),
    ],
)
def test_what_a_pod_requests_as_a_whole_takes_the_place_of_the_sum(
    whole: dict[str, object], counted: tuple[int, int]
) -> None:
    """KEP-2837, `PodRequests` of k8s.io/component-helpers: more than the sum or less, with the overhead added."""
    part = {"resources": {"requests": {"cpu": "1", "memory": "512Mi"}}}
    init = {"resources": {"requests": {"cpu": "4"}}}
    spec = {
        "containers": [part, part],
        "initContainers": [init],
        "overhead": {"cpu": "1", "memory": "1Gi"},
        "resources": whole,
    }
    obj = {"metadata": {"name": "p", "uid": "u"}, "spec": spec}
    pod = PodView.from_object(obj)
    assert (pod.cpu_milli, pod.memory_mib) == counted
    assert PodView.from_object(reduced_object(obj)) == pod


def test_a_resize_of_a_whole_pod_that_its_node_cannot_make_counts_as_what_is_allocated() -> None:
    part = {"name": "c", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}
    obj: dict[str, Any] = {
        "metadata": {"name": "p", "uid": "u"},
        "spec": {"containers": [part], "resources": {"requests": {"cpu": "500"}, "limits": {"cpu": "500"}}},
        "status": {
            "conditions": [{"type": "PodResizePending", "status": "True", "reason": "Infeasible"}],
            "allocatedResources": {"cpu": "8", "memory": "3Gi"},
        },
    }
    pod = PodView.from_object(obj)
    assert (pod.cpu_milli, pod.memory_mib) == (8_000, 1024), "the sum of memory, which it does not name as a whole"
    assert PodView.from_object(reduced_object(obj)) == pod
    obj["status"]["conditions"][0]["reason"] = "Deferred"
    assert PodView.from_object(obj).cpu_milli == 500_000


def full_pod(**status: object) -> dict[str, object]:
    resources = {"limits": {"gpushare.io/share": "25"}, "requests": {"cpu": "500m", "memory": "1Gi"}}
    return {
        "metadata": {
            "name": "p",
            "namespace": "ns",
            "uid": "u",
            "labels": {"gpushare.io/managed": "true"},
            "annotations": {"gpushare.io/fraction": "0.25", "other": "secret", "gpushare.io/gpu": "GPU-1"},
            "ownerReferences": [{"uid": "o", "kind": "Job", "name": "j", "controller": True}],
            "creationTimestamp": "2026-11-21T00:00:00Z",
            "deletionTimestamp": "2026-11-21T01:00:00Z",
            "managedFields": [{}],
        },
        "spec": {
            "priority": 7,
            "schedulingGates": [{"name": "wait"}],
            "nodeSelector": {"a": "b"},
            "tolerations": [{"key": "t", "operator": "Exists"}],
            "overhead": {"cpu": "100m"},
            "affinity": {
                "nodeAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}]
                }
            },
            "topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}],
            "containers": [{"name": "c", "env": [{"name": "TOKEN", "value": "secret"}], "resources": resources}],
            "initContainers": [{"restartPolicy": "Always", "resources": resources}],
        },
        "status": {
            "phase": "Pending",
            "startTime": "2026-11-21T00:00:01Z",
            "containerStatuses": [{"name": "c", "state": {"running": {"startedAt": "2026-11-21T00:00:02Z"}}}],
            "conditions": [
                {"type": "Ready", "status": "False"},
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/2 nodes are available: 2 Insufficient gpushare.io/share.",
                },
            ],
            **status,
        },
    }


def test_a_reduced_object_reads_as_the_whole_one():
    rejected = {
        "phase": "Failed",
        "reason": "UnexpectedAdmissionError",
        "message": "no healthy devices present; cannot allocate unregistered device gpushare.io/share",
    }
    infeasible = {
        "conditions": [{"type": "PodResizePending", "status": "True", "reason": "Infeasible"}],
        "containerStatuses": [{"name": "c", "allocatedResources": {"cpu": "123m", "memory": "77Mi"}}],
    }
    resized = full_pod(**infeasible)
    assert PodView.from_object(resized).cpu_milli == 123 + 500 + 100, "what is allocated, the sidecar and overhead"
    nominated = full_pod(nominatedNodeName="n1")
    dated = full_pod(nominatedNodeName="n1")
    dated["metadata"]["managedFields"] = fields_of(("2026-11-21T00:00:07Z", "f:nominatedNodeName"))
    for obj in (
        full_pod(),
        full_pod(**rejected),
        nominated,
        dated,
        resized,
        {"metadata": {"name": "p", "uid": "u"}},
    ):
        assert PodView.from_object(reduced_object(obj)) == PodView.from_object(obj)
    assert "secret" not in str(reduced_object(full_pod()))
    pod = PodView.from_object(full_pod())
    assert (pod.short_of_shares, pod.unschedulable, pod.gated, pod.leaving) == (True, True, True, True)
    assert (pod.nominated_node, PodView.from_object(nominated).nominated_node) == ("", "n1")
    assert PodView.from_object(full_pod(**rejected)).unserved


def fields_of(*written: tuple[str, str]) -> list[dict[str, Any]]:
    """What the API server notes of who wrote which field of a pod's status when."""
    return [
        {"manager": f"m{number}", "time": at, "fieldsV1": {"f:status": {"f:conditions": {}, name: {}}}}
        for number, (at, name) in enumerate(written)
    ]


def test_when_a_pod_was_nominated_is_what_the_api_server_noted():
    pod = full_pod(nominatedNodeName="n1")
    pod["metadata"]["managedFields"] = [
        {"manager": "kubectl", "time": "2026-11-21T00:00:09Z", "fieldsV1": {"f:spec": {}}},
        *fields_of(("2026-11-21T00:00:07Z", "f:nominatedNodeName"), ("2026-11-21T00:00:08Z", "f:phase")),
    ]
    view = PodView.from_object(pod)
    assert (view.nominated_node, view.nominated_at) == ("n1", "2026-11-21T00:00:07Z")
    del pod["status"]["nominatedNodeName"]
    view = PodView.from_object(pod)
    assert (view.nominated_node, view.nominated_at, view.is_nominated) == ("", "", False)


def test_who_is_held_back_or_bound_is_not_nominated():
    pod = {"metadata": {"name": "p", "uid": "u"}, "status": {"nominatedNodeName": "n1"}}
    assert PodView.from_object(pod).is_nominated
    for spec in ({"schedulingGates": [{"name": "wait"}]}, {"nodeName": "n1"}):
        assert not PodView.from_object({**pod, "spec": spec}).is_nominated
    going = {**pod["metadata"], "deletionTimestamp": "2026-11-21T01:00:00Z"}
    assert not PodView.from_object({**pod, "metadata": going}).is_nominated


def test_a_pod_that_the_front_refused_for_want_of_an_agent_was_not_served():
    """As seen on the local cluster: the next pod was bound to the node at once, and rejected as well."""
    ends = ("has ended, and no other has begun to serve within 60 s", "ended while it answered")
    source = inspect.getsource(place)
    assert all(f'"the gpushare agent of this node {end.partition(",")[0]}' in source for end in ends)
    for end in ends:
        message = (
            "Allocate failed due to device plugin GetPreferredAllocation rpc failed with err: rpc error: "
            f"code = Unavailable desc = the gpushare agent of this node {end}, which is unexpected"
        )
        rejected = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message}
        assert PodView.from_object(full_pod(**rejected)).unserved
        assert not PodView.from_object(full_pod(**{**rejected, "reason": "Evicted"})).unserved


def test_parts_that_a_pod_lacks_are_empty():
    assert not_scheduled({}) is None
    assert not_scheduled({"conditions": [{"type": "PodScheduled", "status": "True"}]}) is None
    assert gates_of({}) == ()
    assert waiting_reason({"containerStatuses": [{}, {"state": {"running": {}}}]}) == ""
    assert shortest_probe_seconds({"containers": [{}]}) is None
    assert deletion_of({}) == ("", 0.0)
    assert not has_ended({})


def test_parts_are_read_from_every_container():
    waits = [{"state": {"running": {}}}, {"state": {"waiting": {"reason": "ImagePullBackOff"}}}]
    assert waiting_reason({"containerStatuses": waits}) == "ImagePullBackOff"
    spec = {
        "containers": [
            {"readinessProbe": {"timeoutSeconds": 5}, "env": [{"name": "A", "value": "1"}, {"name": "B"}]},
            {"env": [{"name": "A", "value": "2"}]},
        ],
        "initContainers": [{"startupProbe": {"periodSeconds": 3}}],
    }
    assert shortest_probe_seconds(spec) == 1.0
    assert list(values_of_variable(spec, "A")) == ["1", "2"]
    assert list(values_of_variable(spec, "B")) == [None]
