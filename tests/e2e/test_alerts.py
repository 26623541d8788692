"""The chart's alerts fire on what the running release serves in trouble; none of the series is made by hand."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from boards import rules
from livecluster import IDLE, Cluster, Json, Namespace, decided, wait_for, without
from realprometheus import Prometheus
from tests.e2e.test_monitoring import Scraping, scraping  # noqa: F401 - a fixture
from tests.e2e.test_symptoms import PAGE_OF_SLOW_REQUESTS, PROCESS_OUTSIDE
from tests.e2e.test_upgrade import upgrade

from gpushare.mps.freezer import CgroupFreezer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

# Those that tests/chart/test_monitoring.py alone has fire, on series that the parts' own collectors serve.
NOT_PROVOKED = {
    "GpusharePromiseBroken": "two profiles have to be learnt first; tests/e2e/test_slow_pods.py breaks one",
    "GpushareCeilingsNotEnforced": "the twin's server enforces ceilings, and no setting has its self-test fail",
    "GpushareMismatch": "no tenant of the twin gets past the gate with a cap or a limit that is not its own",
    "GpushareAllocationMismatch": "kubelet gives the GPU that was decided",
    "GpushareAgentNotRegistered": "for seconds only, while the plugin or kubelet begins; none of these stays away",
    "GpushareBindFailures": "more than three bindings would have to fail within ten minutes",
    "GpushareCertificateExpires": "the chart's certificate is good for three years",
    "GpushareExtenderSlow": "it answers in milliseconds, and nothing slows it without slowing the whole machine",
}

# Those that take minutes: brought about with GPUSHARE_ALERTS=all.
SLOW = frozenset({"GpusharePodStalled", "GpushareAgentSilent"})
PROVOKES_SLOW = os.environ.get("GPUSHARE_ALERTS") == "all"


class Watch:
    """Waits for alerts, and notes those that fired."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self.fired: set[str] = set()

    def firing(self, alert: str, **labels: str) -> list[Json]:
        """Its firing alerts with these labels."""
        chosen = {"alertstate": "firing", "alertname": alert, **labels}
        selector = ",".join(f'{name}="{value}"' for name, value in chosen.items())
        return self._prometheus.query(f"ALERTS{{{selector}}}")

    def fires(self, alert: str, *, seconds: float = 120, **labels: str) -> None:
        """Wait until it fires; it must have been silent at the beginning (`is_silent`)."""
        wait_for(f"{alert} of {labels}", lambda: self.firing(alert, **labels), seconds=seconds, every=1)
        self.fired.add(alert)

    def is_silent(self) -> bool:
        """Whether none of the alerts that are to be provoked fires, and every part has been scraped."""
        up = [float(each["value"][1]) for each in self._prometheus.query("up")]
        return bool(up) and all(up) and not any(self.firing(alert) for alert in _alerts() - set(NOT_PROVOKED))


def _alerts() -> set[str]:
    return {rule["alert"] for group in rules()["groups"] for rule in group["rules"]}


def _at_once() -> Json:
    """The chart's rules, none of which waits."""
    found = rules()
    for group in found["groups"]:
        for rule in group["rules"]:
            rule["for"] = "0s"
    return found


def test_alerts_fire_in_the_troubles_of_the_running_release(
    space: Namespace,
    cluster: Cluster,
    scraping: Scraping,  # noqa: F811
) -> None:
    assert set(NOT_PROVOKED) < _alerts()
    try:
        if PROVOKES_SLOW:
            upgrade(cluster, "--set", "policy.hygiene.stalledAfterSeconds=60")  # of half an hour
        watch = Watch(scraping(_at_once()))
        wait_for("every part scraped, and no alert", watch.is_silent, seconds=120, every=1)
        _latency_targets(space, watch)
        _pods_and_processes(space, watch)
        gpus = [gpu["uuid"] for gpu in cluster.gpus()]
        with without(cluster, "mps"):
            for gpu in gpus:
                watch.fires("GpushareMpsDown", gpu_uuid=gpu, state="Down", severity="critical")
                watch.fires("GpushareGpuUnhealthy", gpu_uuid=gpu, severity="critical")
        if PROVOKES_SLOW:
            with without(cluster, "agent"):
                watch.fires("GpushareAgentSilent", seconds=300, severity="warning")
        with without(cluster, "scheduler"):  # the last: the pods that come instead are not scraped
            watch.fires("GpushareExtenderAway", severity="critical")
        assert watch.fired == _alerts() - set(NOT_PROVOKED) - (frozenset() if PROVOKES_SLOW else SLOW)
    finally:
        if PROVOKES_SLOW:
            upgrade(cluster, "--set", "policy.hygiene.stalledAfterSeconds=1800")


def _latency_targets(space: Namespace, watch: Watch) -> None:
    """Each of the two on a GPU of its own, so that no neighbour is stopped or moved away."""
    commands = {"slow": ["python", "-c", PAGE_OF_SLOW_REQUESTS], "unreachable": IDLE}
    for name, command in commands.items():
        pod = space.tenant(name, "0.6", job_class="latency", command=command)
        pod["metadata"]["annotations"] |= {
            "gpushare.io/slo": "p99<50ms",
            "gpushare.io/slo-from": "port=8080,path=/metrics,series=request_seconds",
        }
        space.create(pod)
    space.running(*commands)
    for alert, name in (("GpushareSloMissed", "slow"), ("GpushareSloUnknown", "unreachable")):
        gpu = decided(space.get(name))[0]
        watch.fires(alert, seconds=180, namespace=space.name, pod=name, gpu_uuid=gpu, severity="warning")
    assert not watch.firing("GpushareSloMissed", pod="unreachable"), "nothing was read of it"
    wait_for("the slow one is known", lambda: not watch.firing("GpushareSloUnknown", pod="slow"), every=1)
    space.delete(*commands)


def _pods_and_processes(space: Namespace, watch: Watch) -> None:
    space.create(
        space.tenant("five", "0.2", "--processes", "5", "--memory-mib", "64"),  # one has the cap of all
        space.tenant("idles", "0.3"),
    )
    _, idles = space.running("five", "idles")
    space.connected("idles")
    of_five = decided(space.get("five"))[0]
    watch.fires("GpushareConnectionsHeld", gpu_uuid=of_five, reason="PodCapInUse", severity="warning")
    with _outside(of_five):
        watch.fires("GpushareOutsideMps", gpu_uuid=of_five, severity="warning")
    space.delete("five")  # beside one that works, a pod without a profile may as well be slow
    if PROVOKES_SLOW:
        with _frozen(idles["metadata"]["uid"]):
            gpu = decided(space.get("idles"))[0]
            labels = {"namespace": space.name, "pod": "idles", "gpu_uuid": gpu, "severity": "warning"}
            watch.fires("GpusharePodStalled", seconds=240, **labels)
    space.delete("idles")


@contextmanager
def _outside(gpu: str) -> Iterator[None]:
    """A process of the node itself that uses a GPU without MPS."""
    environment = {"NVIDIA_VISIBLE_DEVICES": gpu}
    with subprocess.Popen([sys.executable, "-c", PROCESS_OUTSIDE], env=environment) as process:
        try:
            yield
        finally:
            process.kill()


@contextmanager
def _frozen(pod_uid: str) -> Iterator[None]:
    """The twin's tenants always work, so this one's cgroup is frozen from outside."""
    freezer = CgroupFreezer()
    cgroup = freezer.find(pod_uid)
    assert cgroup is not None, "the local backend's node is this machine"
    freezer.freeze(cgroup)
    try:
        yield
    finally:
        freezer.thaw(cgroup)
