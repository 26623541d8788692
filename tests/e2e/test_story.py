"""The story of `make demo` as it is told: `python -m story` in a namespace of its own on the installed release."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench.chaos.excuses import BUSY_LOAD_PER_CORE
from devcluster import tools
from devcluster.demo import further_commands
from livecluster import ROOT, Cluster, Namespace, decided, wait_for
from story.acts import ACTS, BACKUP, ETL, FIRST, RANK

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

MOST_SECONDS = 180.0  # 86 to 154 measured (README.md)
FOLLOWED_SECONDS = 20  # a command that does not end by itself
ANSWERED_SECONDS = 120
ENDED_BY_TIMEOUT = 124
# Of each command that the demo prints at its end: its exit status, and what it shows. POD is a pod of the story.
FURTHER = {
    "gpushare top": (0, "train-"),
    "gpushare explain": (0, "Why there"),
    "get events": (0, "Throttled"),
    "get gpushares": (0, "etl"),
    "describe gpushare etl": (0, "Profile"),
    "logs -f deploy/train": (ENDED_BY_TIMEOUT, "[0-9]"),
    "run wrong": (1, "gpushare.io/fraction"),
}
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


def look_further(cluster: Cluster, space: Namespace) -> None:
    """Run what the demo prints at its end; `make demo-down`, the last one, would end the cluster of the tests."""
    (environment, _), *others, (last, _) = further_commands(Path(cluster.kubeconfig), space.name)
    assert last == "make demo-down"
    pod = next(each["metadata"]["name"] for each in space.pods() if each["metadata"]["labels"]["app"] == "train")
    left = dict(FURTHER)
    for command, _ in others:
        (key,) = [each for each in left if each in command]
        status, words = left.pop(key)
        script = f"set -e\n{environment}\n{command.replace(' POD', f' {pod}')}"
        most = FOLLOWED_SECONDS if status == ENDED_BY_TIMEOUT else ANSWERED_SECONDS
        bounded = ["timeout", f"{most}", "bash", "-c", script]
        ended = subprocess.run(bounded, capture_output=True, text=True, timeout=most + 30, check=False)
        shown = ended.stdout + ended.stderr
        assert ended.returncode == status, f"{command}: {shown}"
        assert re.search(words, shown), f"{command}: {shown}"
        assert "Traceback" not in shown
    assert left == {}


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
    look_further(cluster, space)
