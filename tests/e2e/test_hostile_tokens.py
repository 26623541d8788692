"""Tokens of gpushare's own pods, stolen and used from a root tenant's pod, and what that pod sends to their ports.

docs/security.md names each of these beside its threat. What a token may do is done as well, so that it is no
invalid token that was refused.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hostiletenant import MERGE, STRATEGIC, HostileTenant, Said
from livecluster import IDLE, RELEASE_NAMESPACE, Cluster, Namespace, decided, is_ready, pods_of, wait_for
from tests.e2e.test_views import metrics

from gpushare.core.api import names

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Json = dict[str, Any]
PARTS = ("agent", "scheduler", "operator", "admission")  # the MPS host's pods have no token
WEBHOOK_PORT = 8443
PROBED: dict[str, tuple[int, int, str]] = {  # part -> port of metrics, port of probes, path of a probe
    "agent": (9400, 9401, "healthz"),
    "operator": (9090, 9091, "healthz"),
    "scheduler": (9090, 9091, "livez"),
    "mps": (9432, 9433, "readyz"),
}
MOST_OF_METRICS, MOST_OF_ADMISSION = 64, 512  # connections of one port
REPLICAS, BEYOND = 2, 100  # of admission; connections more than one of them keeps
REVIEWS = 6  # beside a flood
WEBHOOK_SECONDS = 5.0  # the chart's admission.timeoutSeconds
STOLEN: dict[str, Json] = {
    "an image": {"spec": {"containers": [{"name": "main", "image": "evil"}]}},
    "a deadline": {"spec": {"activeDeadlineSeconds": 1}},
    "a label": {"metadata": {"labels": {"example.com/own": "2"}}},
    "an annotation": {"metadata": {"annotations": {"example.com/own": "2"}}},
    "a finalizer": {"metadata": {"finalizers": ["example.com/stay"]}},
    "an owner": {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u"}]}},
}


@dataclass(frozen=True)
class Scene:
    """The hostile pod, which has no share, a tenant in another namespace, and tokens by part."""

    hostile: HostileTenant
    victims: Namespace
    tokens: dict[str, str]

    @property
    def victim(self) -> str:
        """The other tenant's path."""
        return f"/api/v1/namespaces/{self.victims.name}/pods/victim"

    def changes(self, part: str, path: str, body: Json, kind: str = STRATEGIC) -> Said:
        """Try to change an object with a part's token."""
        more = {"content_type": kind, "token": self.tokens[part]}
        return self.hostile.call("PATCH", f"{path}?dryRun=All", body, **more)

    def reviewed(self) -> None:
        """Hold admission to answering pods in time."""
        pod = self.hostile.space.tenant("reviewed", "0.1", command=IDLE)
        for _ in range(REVIEWS):
            answer = self.hostile.call("POST", f"{self.hostile.pods}?dryRun=All", pod)
            answer.accepted()
            assert answer.seconds < WEBHOOK_SECONDS


@pytest.fixture(scope="module")
def scene(cluster: Cluster, image: str) -> Iterator[Scene]:
    victims, space = Namespace(cluster, image), Namespace(cluster, image)
    try:
        victims.create(victims.tenant("victim", "0.1", "--memory-mib", "64"))
        hostile = HostileTenant.start(space, space.pod("hostile", []))
        victims.running("victim", seconds=180)
        yield Scene(hostile, victims, {part: token_of(cluster, part) for part in PARTS})
    finally:
        victims.close()
        space.close()


def token_of(cluster: Cluster, part: str) -> str:
    """A token like the one in a pod of that part: bound to the pod, and so naming its node."""
    pod = next(each for each in pods_of(cluster, part) if is_ready(each))
    bound = ("--bound-object-kind=Pod", f"--bound-object-name={pod['metadata']['name']}")
    account = pod["spec"]["serviceAccountName"]
    return cluster.kubectl("-n", RELEASE_NAMESPACE, "create", "token", account, *bound).strip()


@pytest.mark.parametrize("what", STOLEN)
def test_an_agents_token_changes_nothing_of_another_pod_but_its_decision(scene: Scene, what: str) -> None:
    scene.changes("agent", scene.victim, STOLEN[what]).refused("decision annotations and nothing else")
    same = {"metadata": {"annotations": {names.GPU: decided(scene.victims.get("victim"))[0]}}}
    scene.changes("agent", scene.victim, same).accepted()


def test_an_agents_token_is_of_use_for_its_own_node_only(scene: Scene, cluster: Cluster) -> None:
    """This cluster has one node: a pod on none stands for one on another."""
    pod = scene.hostile.space.tenant("elsewhere", "0.1", command=IDLE)
    pod["spec"]["schedulingGates"] = [{"name": "example.com/never"}]
    scene.hostile.call("POST", scene.hostile.pods, pod).accepted()
    decision = {"metadata": {"annotations": {names.GPU: "GPU-1"}}}
    path = f"{scene.hostile.pods}/elsewhere"
    scene.changes("agent", path, decision).refused("own node only")
    agent = next(each for each in pods_of(cluster, "agent") if is_ready(each))
    account = ("create", "token", agent["spec"]["serviceAccountName"])
    unbound = cluster.kubectl("-n", RELEASE_NAMESPACE, *account).strip()
    answer = scene.hostile.call("PATCH", scene.victim, decision, content_type=MERGE, token=unbound)
    answer.refused("has to name its node")


def test_an_agents_token_writes_no_other_nodes_gpunode(scene: Scene) -> None:
    gpunodes = "/apis/gpushare.io/v1alpha1/gpunodes?dryRun=All"
    other = {"apiVersion": names.API_VERSION, "kind": "GpuNode", "metadata": {"name": "other"}}
    answer = scene.hostile.call("POST", gpunodes, other, token=scene.tokens["agent"])
    answer.refused("may not write the GpuNode of another node")


@pytest.mark.parametrize("what", STOLEN)
def test_the_schedulers_token_changes_nothing_of_a_pod_but_its_decision(scene: Scene, what: str) -> None:
    scene.changes("scheduler", scene.victim, STOLEN[what]).refused("and nothing else")
    room = {"metadata": {"annotations": {names.ROOM_SINCE: "now"}}}
    scene.changes("scheduler", scene.victim, room).accepted()


def test_the_operators_token_evicts_none_of_the_clusters_pods_and_forces_nobody(scene: Scene) -> None:
    def evicts(namespace: str, pod: str, **options: object) -> Said:
        metadata = {"name": pod, "namespace": namespace}
        body: Json = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        if options:
            body["deleteOptions"] = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction?dryRun=All"
        return scene.hostile.call("POST", path, body, token=scene.tokens["operator"])

    for namespace in ("kube-system", RELEASE_NAMESPACE):
        evicts(namespace, "any").refused("kube-*")
    evicts(scene.victims.name, "victim", gracePeriodSeconds=0).refused("own grace period")
    evicts(scene.victims.name, "victim").accepted()


def test_the_operators_token_changes_no_gpushare(scene: Scene) -> None:
    space = scene.victims
    (share,) = wait_for(
        "the victim's GpuShare", lambda: space.cluster.get("-n", space.name, "gpushares")["items"], seconds=60
    )
    path = f"/apis/gpushare.io/v1alpha1/namespaces/{space.name}/gpushares/{share['metadata']['name']}"
    for change in ({"spec": {"fraction": "1"}}, {"metadata": {"labels": {"a": "b"}}}):
        scene.changes("operator", path, change, MERGE).refused("owners and status")
    scene.changes("operator", path, {"metadata": {"ownerReferences": None}}, MERGE).accepted()


@pytest.mark.parametrize("part", PARTS)
def test_no_token_of_ours_brings_secrets_commands_or_the_cluster(scene: Scene, part: str) -> None:
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    binding = {"metadata": {"name": "mine"}, "roleRef": role, "subjects": []}
    never = (
        ("GET", "/api/v1/secrets", None),
        ("GET", f"/api/v1/namespaces/{RELEASE_NAMESPACE}/secrets/gpushare-admission-tls", None),
        ("POST", f"/api/v1/namespaces/{scene.victims.name}/pods", scene.victims.pod("mine", ["true"])),
        ("POST", f"{scene.victim}/exec?command=id", None),
        ("POST", f"/api/v1/namespaces/{RELEASE_NAMESPACE}/serviceaccounts/gpushare-scheduler/token", {}),
        ("PATCH", "/api/v1/nodes/any", {"spec": {"unschedulable": True}}),
        ("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding),
        ("DELETE", "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/gpushare-agents", None),
        ("DELETE", f"/apis/gpushare.io/v1alpha1/namespaces/{scene.victims.name}/gpushares/any", None),
    )
    token = scene.tokens[part]
    for method, path, body in never:
        kind = {"content_type": MERGE} if method == "PATCH" else {}
        answer = scene.hostile.call(method, path, body, token=token, **kind)
        assert (answer.code, "cannot" in answer.message) == (403, True), (method, path, answer.message)
    admin = {"Impersonate-User": "admin", "Impersonate-Group": "system:masters"}
    scene.hostile.call("GET", "/api/v1/secrets", token=token, headers=admin).refused("cannot impersonate")
    group = "authentication.k8s.io/v1"
    review = {"apiVersion": group, "kind": "SelfSubjectReview"}
    answer = scene.hostile.call("POST", f"/apis/{group}/selfsubjectreviews", review, token=token)
    assert answer.accepted()["status"]["userInfo"]["username"].endswith(f":gpushare-{part}")


def state(cluster: Cluster, part: str) -> list[tuple[str, int, bool]]:
    """Name, restarts and readiness of a part's pods."""
    return [
        (
            pod["metadata"]["name"],
            sum(each["restartCount"] for each in pod["status"]["containerStatuses"]),
            is_ready(pod),
        )
        for pod in pods_of(cluster, part)
    ]


def addresses(cluster: Cluster, part: str, port: int) -> list[tuple[str, int]]:
    return [(pod["status"]["podIP"], port) for pod in pods_of(cluster, part)]


@pytest.mark.parametrize("part", PROBED)
def test_mute_connections_to_a_parts_ports_keep_no_probe_waiting(
    scene: Scene, cluster: Cluster, part: str
) -> None:
    metrics_port, probe_port, path = PROBED[part]
    before, pods = state(cluster, part), pods_of(cluster, part)
    ports = [each for port in (metrics_port, probe_port) for each in addresses(cluster, part, port)]
    for _ in range(3):
        scene.hostile.hold(*ports, count=2 * MOST_OF_METRICS)
        for pod in pods:
            name = f"{pod['metadata']['name']}:{probe_port}"
            probe = f"/api/v1/namespaces/{RELEASE_NAMESPACE}/pods/{name}/proxy/{path}"
            assert cluster.kubectl("get", "--raw", probe, seconds=5) == "ok\n"
            assert "# TYPE gpushare_" in metrics(cluster, pod, metrics_port)
        closed, still_open = scene.hostile.release()
        assert still_open <= len(ports) * MOST_OF_METRICS
        assert closed >= len(ports) * MOST_OF_METRICS
    assert state(cluster, part) == before


def test_silent_connections_to_admission_keep_no_review_waiting(scene: Scene, cluster: Cluster) -> None:
    closed, still_open = beside_a_flood(scene, cluster, "nothing")
    assert closed >= REPLICAS * BEYOND
    assert still_open <= REPLICAS * MOST_OF_ADMISSION


def test_handshakes_that_are_not_finished_keep_no_review_waiting(scene: Scene, cluster: Cluster) -> None:
    closed, still_open = beside_a_flood(scene, cluster, "hello")
    assert closed >= REPLICAS * BEYOND
    assert still_open <= REPLICAS * MOST_OF_ADMISSION


def beside_a_flood(scene: Scene, cluster: Cluster, says: str) -> tuple[int, int]:
    """Hold more connections than admission keeps, beside reviews; how many it closed, and how many it kept."""
    before, replicas = state(cluster, "admission"), addresses(cluster, "admission", WEBHOOK_PORT)
    assert len(replicas) == REPLICAS
    scene.hostile.hold(*replicas, count=MOST_OF_ADMISSION + BEYOND, says=says)
    scene.reviewed()
    # The API server asks one replica for all reviews; the other may still have to accept what the kernel queued.
    wait_for("no more open than admission keeps", lambda: scene.hostile.open() <= REPLICAS * MOST_OF_ADMISSION)
    found = scene.hostile.release()
    assert state(cluster, "admission") == before
    return found


def test_bodies_that_never_come_keep_no_review_waiting(scene: Scene, cluster: Cluster) -> None:
    """More large ones than admission reads at once."""
    before, replicas = state(cluster, "admission"), addresses(cluster, "admission", WEBHOOK_PORT)
    scene.hostile.hold(*replicas, count=48, says="head")
    scene.reviewed()
    scene.hostile.release()
    assert state(cluster, "admission") == before


def test_tiny_reviews_in_a_loop_keep_no_review_waiting(scene: Scene, cluster: Cluster) -> None:
    """Before: the smallest of all was next, so who kept some `{}` waiting kept all pods from starting."""
    before, replicas = state(cluster, "admission"), addresses(cluster, "admission", WEBHOOK_PORT)
    scene.hostile.loop(*replicas, count=40)
    try:
        scene.reviewed()
    finally:
        answers = scene.hostile.end_loop()
    assert answers > REPLICAS * 40, "they went on while the reviews were answered"
    assert state(cluster, "admission") == before


def test_bodies_of_no_kubernetes_shape_break_nothing(scene: Scene, cluster: Cluster) -> None:
    before = state(cluster, "admission")
    request: Json = {"uid": "u", "kind": {"kind": "Pod"}, "operation": "CREATE", "object": None}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
    shapes: list[Any] = [
        {"spec": []},
        {"metadata": {"annotations": {names.FRACTION: ["0.1"]}}, "spec": {"containers": [7]}},
        {"metadata": {"annotations": [names.FRACTION]}, "spec": "none"},
        [],
        "pod",
    ]
    bodies = [json.dumps({**review, "request": {**request, "object": shape}}) for shape in shapes]
    bodies += ["", "null", "[]", "{}", "[" * 100_000, "\xff\xfe", json.dumps({**review, "request": []})]
    for host, port in addresses(cluster, "admission", WEBHOOK_PORT):
        for path in ("/mutate", "/validate"):
            statuses = scene.hostile.post(host, port, path, bodies)
            assert set(statuses) <= {200, 400}, statuses
    scene.reviewed()
    assert state(cluster, "admission") == before
