"""The guide's own commands lead from a cluster without gpushare to the first shared pod, `helm test` included.

The release is removed first, as docs/install.md says; afterwards the demo's is there again.
"""

import re
from collections.abc import Iterator

import pytest
from bench import first_pod
from blocks import commands, words
from livecluster import RELEASE, RELEASE_NAMESPACE, Cluster, driver, helm, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

MOST_SECONDS = 300  # of all commands together, on an idle machine 15
FIRST, TESTED = "simulated", f"{RELEASE}-test"


@pytest.fixture
def bare(cluster: Cluster, image: str) -> Iterator[None]:
    """The cluster without gpushare; afterwards as it was."""
    try:
        remove(cluster)
        yield
    finally:
        for namespace, name in (("default", FIRST), (RELEASE_NAMESPACE, TESTED)):  # helm leaves a hook's pod
            cluster.try_kubectl("-n", namespace, "delete", "pod", name, "--ignore-not-found", "--force")
        # Not upgraded: the MPS host's pods would stay the guide's (OnDelete).
        helm(cluster, "uninstall", RELEASE, "--ignore-not-found", "--wait")
        driver("install", timeout_seconds=600)
        wait_for("two healthy GPUs", lambda: cluster.healthy_gpus() == 2, seconds=120)


def remove(cluster: Cluster) -> None:
    """Run the commands under "Removing", and see that nothing is left."""
    documented = [words(command) for block, command in commands() if block.page == "docs/install.md"]
    (uninstall,) = [each[1:] for each in documented if each[:2] == ["helm", "uninstall"]]
    (delete,) = [each[1:] for each in documented if each[:3] == ["kubectl", "delete", "crd"]]
    assert uninstall[-2:] == ["--namespace", RELEASE_NAMESPACE]
    helm(cluster, *uninstall[:-2], "--wait")
    cluster.kubectl(*delete)
    cluster.kubectl("delete", "namespace", RELEASE_NAMESPACE, "--wait=true", seconds=180)
    kinds = ["customresourcedefinitions", "clusterroles", "clusterrolebindings", "priorityclasses"]
    kinds += ["validatingwebhookconfigurations", "mutatingwebhookconfigurations"]
    kinds += ["validatingadmissionpolicies", "validatingadmissionpolicybindings"]
    left = cluster.kubectl("get", ",".join(kinds), "-o", "name").splitlines()
    assert [name for name in left if "gpushare" in name] == []


def test_the_guides_commands_lead_to_the_first_shared_pod(
    bare: None, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        first_pod.main([])
    timed, errors = capfd.readouterr()
    print(timed)  # pytest -rP shows it
    assert ended.value.code == 0, timed + errors
    seconds = {what: float(figure) for figure, what in re.findall(r"^ *([\d.]+) s  (.+)$", timed, re.MULTILINE)}
    *ran, total = seconds
    assert [each.split(" ")[:2] for each in ran] == [
        ["helm", "install"],
        ["helm", "test"],
        ["kubectl", "apply"],
        ["until", "kubectl"],
        ["kubectl", "gpushare"],
        ["kubectl", "gpushare"],
    ]
    assert sum(seconds[each] for each in ran) - 1 <= seconds[total] <= MOST_SECONDS

    pod, tested = (
        cluster.get("-n", namespace, "pod", name)
        for namespace, name in (("default", FIRST), (RELEASE_NAMESPACE, TESTED))
    )
    assert pod["status"]["phase"] == "Running"
    assert pod["metadata"]["annotations"]["gpushare.io/thread-percentage"] == "25"
    assert f"{FIRST}  throughput  Running" in errors
    assert f"Pod default/{FIRST} asks for 25% of a GPU" in errors
    assert tested["status"]["phase"] == "Succeeded"
    assert "this pod got its share of a GPU" in cluster.kubectl("-n", RELEASE_NAMESPACE, "logs", TESTED)
