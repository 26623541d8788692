"""The story of `make demo` as it is told: `python -m story` in a namespace of its own on the installed release."""

import os
import re
import subprocess
import sys
import time

import pytest
from bench.chaos.excuses import BUSY_LOAD_PER_CORE
from devcluster import tools
from livecluster import ROOT, Cluster, Namespace, decided, wait_for
from story.acts import ACTS, BACKUP, ETL, FIRST, RANK

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

MOST_SECONDS = 210.0  # on a quiet machine 105 to 150
# How the sentences begin that are told in this order; others come between. Whose promise is broken is up to noise.
TOLD = (
    "Packed: train and recommend share GPU ",
    f"Placed: {ETL} starts on GPU ",
    "Broken promise: ",
    f"Asked to leave: {ETL} came last: ",
    f"Retraction: {ETL} is evicted so that its neighbours keep their promises: ",
    f"Placed elsewhere: {ETL} starts again on GPU ",
    f"Placed: {BACKUP} starts on GPU ",
    f"Throttle: {BACKUP} runs ",
    f"Kept by a throttle: {BACKUP} stands still ",
)
BESIDES = (f"Profiled in place: with all threads {ETL} ", "Kept again: ", f"Packed: {ETL} and {RANK} share GPU ")


def test_the_demo_tells_of_packing_a_broken_promise_a_retraction_and_a_throttle_in_order(
    space: Namespace, cluster: Cluster
) -> None:
    command = [sys.executable, "-m", "story", f"--kubeconfig={cluster.kubeconfig}", f"--namespace={space.name}"]
    command += [f"--image={space.image}", f"--kubectl={tools.kubectl()}"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'hack'}:{ROOT / 'src'}"}
    patience = sum(act.seconds for act in ACTS)
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience + 60, check=False, env=env)
    seconds = time.monotonic() - begun
    print(f"{seconds:.0f} s\n{done.stdout}")  # pytest -rP shows it
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert FIRST == ("train", "recommend")

    sentences = re.findall(r"^ *\d+ s  (.*)$", done.stdout, re.MULTILINE)
    rest = iter(sentences)
    missing = [opening for opening in TOLD if not any(one.startswith(opening) for one in rest)]
    assert missing[:1] == [], done.stdout
    assert [each for each in BESIDES if not any(one.startswith(each) for one in sentences)] == []
    told, _, gained = done.stdout.partition("What sharing gains now:")
    assert gained.strip(), told

    # What was told is what the cluster says.
    gpus = {pod["metadata"]["labels"]["app"]: decided(pod)[0] for pod in space.pods()}
    assert gpus[ETL] == gpus[RANK] != gpus["train"] == gpus["recommend"] == gpus[BACKUP]
    reasons = {event["reason"] for event in cluster.get("-n", space.name, "events")["items"]}
    assert {"PromiseBroken", "Throttled", "RetractionAsked", "Retracted"} <= reasons

    def is_stopped() -> bool:
        tenants = [tenant for gpu in cluster.gpus() for tenant in gpu.get("tenants", [])]
        return any(one["pod"].startswith(f"{BACKUP}-") and one.get("throttle") for one in tenants)

    wait_for("backup throttled", is_stopped, seconds=30)

    is_busy = os.getloadavg()[0] > BUSY_LOAD_PER_CORE * (os.cpu_count() or 1)
    assert seconds < MOST_SECONDS or is_busy
