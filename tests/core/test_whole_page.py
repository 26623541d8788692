"""Every sentence of the page of symptoms is one that an e2e test produces, or one that says why none does."""

import ast
from pathlib import Path

import pytest
import troubles

ROOT = Path(__file__).resolve().parents[2]
NOT_ON_THE_CLUSTER = {
    "repeatedly and gets a GPU of its own": "two retractions take longer than a test",
    "with enough share has": "a share is charged for its part of it, so shares run out first (docs/adr/0116)",
    "MPS clients free": "a share is charged for its part of the clients, so shares run out first (docs/adr/0184)",
    "which is nominated to this node": "for the moment between its victims and its next try alone",
    "kubelet has not allocated": "a race within kubelet",
    "the node has no GPUs": "only while kubelet has shares of a node without a GpuNode",
    "the agent ended with status": "a line of the front's log",
    "MiB that were decided": "two extenders that decide at one moment",
    "but kubelet chose": "kubelet does not choose so",
    "is not on this node": "a GPU would have to be taken out",
    "due to no healthy devices": "kubelet's own, in a race of less than a second",
    "requested number of devices unavailable": "kubelet's own, in a race of less than a second",
    "MPS is starting": "less than a second with simulated GPUs",
    "tests whether ceilings bind": "less than a second with simulated GPUs",
    "in FAULT and is being drained": "less than a second with simulated GPUs",
    "the MPS daemon is down": "less than a second with simulated GPUs",
    "ended process 4711": "MPS refuses it the memory before",
    "what was decided for the pod": "the policies let nobody change a pod's annotations",
    "of no pod connected": "the daemon's directory is the root user's of the node",
    "is mounted read-only": "a node of another set-up",
    "may not be written": "a node of another set-up",
    "the driver reports": "the twin's driver asks for no recovery",
    "nvidia-smi lists no GPU": "the twin's nvidia-smi lists its GPUs",
    "the driver's library": "the twin needs no library of the driver",
    "and gpushare needs": "no e2e test; the twin plays it in tests/devices/test_contract.py",
    "cannot be read and is left out": "no e2e test; the twin plays it in tests/devices/test_contract.py",
    "not written, retrying": "a line of the agent's log",
    "could not write its GpuNode": "after 150 s in which the API server refuses writes",
    "MIG mode is on": "the twin's GPUs have no MIG mode",
    "see NVIDIA's list of XID errors": "the twin's driver reports no XID",
    "the driver lost the GPU": "no e2e test takes a GPU from the twin's bus",
    "the driver does not list this GPU": "no e2e test takes a GPU from the twin's bus",
    "the driver does not answer": "no e2e test hangs the twin's driver; hack/chaos does",
    "had a fault moments ago": "not with the default `policy.hygiene`",
    "processes use it outside MPS": "not with the default `policy.hygiene`",
    "a pod on it is in trouble": "not with the default `policy.hygiene`",
    "did not take process 4711": "the twin's MPS server turns no client away without a fault",
    "has lost its record of this pod's share": "kubelet keeps its checkpoint; two minutes without it",
}
"""Parts of the sentences that no e2e test produces, and why not; the code writes them all (test_troubles.py)."""


def texts_of_e2e() -> set[str]:
    """Every text that the e2e tests hold what they see against."""
    found = set()
    for path in (ROOT / "tests" / "e2e").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_every_symptom_is_produced_on_the_cluster_or_says_why_not() -> None:
    told = [one for heading in troubles.sections() for one in troubles.sentences(heading)]
    produced = texts_of_e2e()
    missing = [one for one in told if one not in produced]
    assert len(told) > 40
    assert [one for one in missing if not any(part in one for part in NOT_ON_THE_CLUSTER)] == []


@pytest.mark.parametrize("part", NOT_ON_THE_CLUSTER)
def test_a_reason_is_about_one_sentence_that_is_not_produced(part: str) -> None:
    told = [one for heading in troubles.sections() for one in troubles.sentences(heading) if part in one]
    assert len(told) == 1
    assert told[0] not in texts_of_e2e()
