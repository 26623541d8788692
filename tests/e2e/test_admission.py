"""What is refused at `kubectl apply`, in which words, and that other pods never notice us."""

import pytest
from livecluster import GPU, Cluster, Namespace, wait_for, without
from tests.e2e.test_upgrade import upgrade
from troubles import says

pytestmark = pytest.mark.e2e

REFUSED = "The pod is refused at `kubectl apply`"  # of docs/guide/troubleshooting.md


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("fraction", "1.5", "whole percents"),
        ("fraction", "-1", "whole percents"),
        ("fraction", "abc", "whole percents"),
        ("memory", "lots", '"8Gi"'),
        ("memory", "500Gi", "what they get of the largest one"),
        ("class", "fast", '"throughput" and "latency"'),
    ],
)
def test_a_wrong_annotation_is_refused_in_a_sentence(space: Namespace, key: str, value: str, allowed: str):
    pod = space.tenant("wrong", "0.1")
    pod["metadata"]["annotations"][f"gpushare.io/{key}"] = value
    answer = space.cluster.apply(pod, namespace=space.name)
    assert answer.code != 0
    for word in (f"gpushare.io/{key}", value, allowed):
        assert word in answer.err, answer.err
    assert space.pods() == []


def test_a_fraction_that_is_not_a_whole_percent_is_refused(space: Namespace):
    answer = space.cluster.apply(space.tenant("third", "0.333"), namespace=space.name)
    assert answer.code != 0
    assert says(REFUSED, 'annotation gpushare.io/fraction: "0.333" is not a whole percent', answer.err)


def test_a_namespace_has_no_more_gpushares_with_a_selector_than_the_chart_allows(
    space: Namespace, cluster: Cluster
):
    def share(number: int) -> dict:
        spec = {"selector": {"matchLabels": {"app": f"web-{number}"}}}
        return {
            "apiVersion": "gpushare.io/v1alpha1",
            "kind": "GpuShare",
            "metadata": {"name": f"s{number}"},
            "spec": spec,
        }

    try:
        upgrade(cluster, "--set", "admission.maxSelectors=2")
        space.create(share(0), share(1))
        # An admission server counts what its watch has told it.
        sentence = "the namespace has 1000 GpuShares with a selector already"
        wait_for(
            "one too many refused",
            lambda: says(REFUSED, sentence, space.cluster.dry_run(in_namespace(share(2), space)).err),
            every=1,
        )
    finally:
        upgrade(cluster, "--set", "admission.maxSelectors=1000")


def in_namespace(obj: dict, space: Namespace) -> dict:
    return {**obj, "metadata": {**obj["metadata"], "namespace": space.name}}


@pytest.mark.parametrize(
    "variable", ["NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
)
def test_a_pod_that_gives_itself_a_gpu_or_a_cap_is_refused(space: Namespace, variable: str):
    answer = space.cluster.apply(space.tenant("own", "0.1", env={variable: "all"}), namespace=space.name)
    assert answer.code != 0
    assert f'container "main": env {variable} takes the place of what gpushare sets' in answer.err
    assert space.pods() == []


def test_a_misspelt_annotation_is_warned_of_and_many_of_others_are_no_trouble(space: Namespace):
    misspelt = space.pod("misspelt", ["sleep", "infinity"], annotations={"gpushare.io/fraktion": "0.5"})
    template = {
        "metadata": {"annotations": misspelt["metadata"]["annotations"], "labels": {"app": "misspelt"}},
        "spec": {**misspelt["spec"], "restartPolicy": "Always"},
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "misspelt"},
        "spec": {"replicas": 0, "selector": {"matchLabels": {"app": "misspelt"}}, "template": template},
    }
    for obj in (misspelt, deployment):
        answer = space.cluster.apply(obj, namespace=space.name)
        assert answer.code == 0, answer.err
        assert "gets no GPU from gpushare" in answer.err
        assert says(REFUSED, "did you mean gpushare.io/fraction?", answer.err)
    crowded = space.pod(
        "crowded", ["sleep", "infinity"], annotations={f"x.example/{n}": "" for n in range(12_000)}
    )
    crowded["spec"]["nodeSelector"] = {"gpushare.io/nowhere": "true"}
    answer = space.cluster.apply(crowded, namespace=space.name)
    assert answer.code == 0, answer.err
    assert "gpushare" not in answer.err


@pytest.mark.parametrize("annotation", ["gpu", "thread-percentage", "memory-limit", "decided-at"])
def test_a_user_cannot_write_a_decision_annotation(space: Namespace, annotation: str):
    for pod in (space.tenant("mine", "0.1"), space.pod("plain", ["sleep", "infinity"])):
        pod["metadata"]["annotations"][f"gpushare.io/{annotation}"] = "100"
        answer = space.cluster.apply(pod, namespace=space.name)
        assert answer.code != 0
        assert "written by gpushare alone" in answer.err


def test_a_user_can_neither_edit_nor_remove_a_decision_on_a_running_pod(space: Namespace):
    space.create(space.tenant("runs", "0.1", command=["sleep", "infinity"]))
    (before,) = space.running("runs")
    for change in ("gpushare.io/thread-percentage=100", f"{GPU}-", "gpushare.io/memory-limit=0=99999M"):
        answer = space.cluster.try_kubectl("-n", space.name, "annotate", "--overwrite", "pod", "runs", change)
        assert answer.code != 0
        assert "written by gpushare alone" in answer.err
    assert space.get("runs")["metadata"]["annotations"] == before["metadata"]["annotations"]
    space.cluster.kubectl("-n", space.name, "annotate", "pod", "runs", "example.com/mine=fine")


def test_a_good_pod_gets_its_share_its_scheduler_and_its_label_and_nothing_else(space: Namespace):
    given = space.tenant("good", "0.25", command=["sleep", "infinity"])
    space.create(given)
    (pod,) = space.running("good")
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"] == {"gpushare.io/share": "25"}
    assert pod["spec"]["schedulerName"] == "gpushare-scheduler"
    of_the_node = {"topology.kubernetes.io/zone", "topology.kubernetes.io/region"}  # copied by the API server
    labels = {key: value for key, value in pod["metadata"]["labels"].items() if key not in of_the_node}
    assert labels == {"gpushare.io/managed": "true"}
    assert (
        container["env"] == given["spec"]["containers"][0]["env"]
        if given["spec"]["containers"][0]["env"]
        else True
    )
    assert not any("CUDA" in one["name"] for one in container.get("env", []))


@pytest.mark.timeout(400)
def test_a_pod_without_our_annotation_runs_with_every_part_down(space: Namespace, cluster: Cluster):
    with without(cluster, "admission", "operator", "scheduler", "agent", "mps"):
        space.create(space.pod("plain", ["sleep", "infinity"]))
        space.running("plain", seconds=30)
        annotated = cluster.apply(space.tenant("asks", "0.1"), namespace=space.name)
        assert annotated.code != 0  # failurePolicy Fail: better refused than uncapped
    space.create(space.tenant("asks", "0.1"))
    space.connected("asks", seconds=60)
