"""Whether the tests of this folder, all of them together, have produced what the page of symptoms tells of."""

import pytest
import troubles

pytestmark = pytest.mark.e2e

NOT_HERE = {
    "repeatedly and gets a GPU of its own": "two retractions take longer than a test (tests/core/placement)",
    "kubelet has not allocated": "a race within kubelet (tests/extender/test_fence.py)",
    "the node has no GPUs": "only while kubelet still has shares of a node without a GpuNode",
    "the agent ended with status": "a line of the front's log (tests/front)",
    "MiB that were decided": "two extenders that decide at one moment (tests/deviceplugin/test_plugin.py)",
    "but kubelet chose": "kubelet does not choose so (tests/deviceplugin/test_allocation.py)",
    "is not on this node": "a GPU would have to be taken out (tests/deviceplugin/test_allocation.py)",
    "due to no healthy devices": "a race of less than a second (hack/chaos has met it)",
    "of no pod connected": "the daemon's directory is the root user's of the node (tests/mps/test_gate.py)",
    "may not be written": "a node of another set-up (tests/mps/test_freezer.py)",
    "is mounted read-only": "a node of another set-up (tests/mps/test_freezer.py)",
    "MPS clients free": "a share is charged for its part of the clients, so shares run out first (docs/adr/0184)",
    "MPS is starting": "less than a second with simulated GPUs (tests/mps/test_supervision.py)",
    "tests whether ceilings bind": "less than a second with simulated GPUs (tests/mps/test_supervision.py)",
    "in FAULT and is being drained": "less than a second with simulated GPUs (tests/mps/test_supervision.py)",
    "the MPS daemon is down": "less than a second with simulated GPUs (tests/mps/test_supervision.py)",
}
"""Parts of the sentences that no test here produces, and why not."""


def test_every_symptom_of_the_page_was_seen_on_the_cluster_or_says_why_not() -> None:
    """The last of the folder; it holds where the whole folder ran."""
    told = {(heading, one) for heading in troubles.sections() for one in troubles.sentences(heading)}
    for part in NOT_HERE:
        assert sum(part in one for _, one in told) == 1, part
    missing = {
        (heading, one) for heading, one in told - troubles.produced if not any(part in one for part in NOT_HERE)
    }
    assert not missing
