"""What a test of the cluster leaves to the next one: nothing of its pods, and no successor of them."""

from typing import Any

import livecluster
import pytest
from livecluster import Answer, Namespace

Json = dict[str, Any]


class OneNamespace:
    """A cluster with one namespace, in which a controller replaces its pod unless the namespace ends."""

    def __init__(self) -> None:
        self.is_ending = False
        self.pods = ["uid-0"]
        self.processes = ["uid-0"]
        self.tenants: list[str] = []  # the GpuNode is old: it does not name the pod yet

    def kubectl(self, *_: str, **__: object) -> str:
        return ""

    def try_kubectl(self, *arguments: str, **_: object) -> Answer:
        if arguments[:2] == ("delete", "namespace"):
            self.is_ending = True
        if "pods" in arguments:
            self.pods = [] if self.is_ending else [f"uid-{len(self.processes)}"]
            self.processes += self.pods
        return Answer(0, "", "")

    def get(self, *_: str) -> Json:
        return {"items": [{"metadata": {"uid": uid}} for uid in self.pods]}

    def gpus(self) -> list[Json]:
        return [{"tenants": [{"namespace": uid} for uid in self.tenants]}]


def test_a_namespace_ends_with_its_pods_processes_and_leaves_no_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: Any = OneNamespace()

    def processes_of(*pod_uids: str) -> list[int]:
        """Kubelet ends one between two looks."""
        found = [number for number, uid in enumerate(cluster.processes) if uid in pod_uids]
        cluster.processes = [uid for uid in cluster.processes if uid != "uid-0"]
        return found

    monkeypatch.setattr(livecluster, "processes_of", processes_of)
    monkeypatch.setattr(livecluster.time, "sleep", lambda _: None)
    Namespace(cluster, "image").close()
    assert (cluster.pods, cluster.processes) == ([], [])
