"""A throwaway control plane on loopback: etcd, kube-apiserver, kube-scheduler and the extender; no node, no root.

For benchmarks and integration tests that need the real API server and the real kube-scheduler but no kubelet. It
runs beside the local cluster of hack/cluster and touches nothing of it.
"""

import contextlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from devcluster import tools
from devcluster.loopback import unused_port
from devcluster.settings import cache_dir

ROOT = Path(__file__).resolve().parents[1]
SCHEDULER_ENV = {"GOGC": "400", "GOMEMLIMIT": "448MiB"}  # as in the chart's Deployment
TOKEN = "throwaway"  # of a server on loopback that lives for minutes


def missing() -> str:
    """Return what is missing to run on this machine; empty when nothing is."""
    if shutil.which("etcd") is None:
        return "no etcd: `hack/cluster up` installs it"
    if not (cache_dir() / "kube").is_dir():
        return "no Kubernetes: `hack/cluster up` builds it"
    return ""


def scheduler_configuration(kubeconfig: str, extender_port: int) -> dict[str, Any]:
    """Return the chart's kube-scheduler configuration; tests/chart compares the two."""
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": kubeconfig, "qps": 500, "burst": 1000},
        "podInitialBackoffSeconds": 1,
        "podMaxBackoffSeconds": 5,
        "enableContentionProfiling": False,
        "profiles": [{"schedulerName": "gpushare-scheduler"}],
        "extenders": [
            {
                "urlPrefix": f"http://127.0.0.1:{extender_port}",
                "filterVerb": "filter",
                "prioritizeVerb": "prioritize",
                "preemptVerb": "preempt",
                "bindVerb": "bind",
                "weight": 10,
                "enableHTTPS": False,
                "httpTimeout": "30s",
                "nodeCacheCapable": True,
                "ignorable": False,
                "managedResources": [{"name": "gpushare.io/share", "ignoredByScheduler": False}],
            }
        ],
    }


class ControlPlane:
    """A control plane in one temporary directory, started by `running`."""

    def __init__(self, directory: Path, api_env: dict[str, str] | None = None) -> None:
        self.api_env = api_env or {}
        self.directory = directory
        self.kubeconfig = directory / "kubeconfig"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.api_port = unused_port()
        self.extender_port = unused_port()
        self.metrics_port = unused_port()
        self.scheduler_port = unused_port()
        self._kube = str(tools.kubernetes())
        self.context = ssl.create_default_context()
        self.context.check_hostname = False
        self.context.verify_mode = ssl.CERT_NONE

    def start(self, name: str, *command: str, env: dict[str, str] | None = None) -> None:
        log = (self.directory / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )

    def stop(self, name: str, *, kill: bool = False) -> None:
        process = self.processes.pop(name)
        process.kill() if kill else process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """Send one request to the API server; raise urllib's HTTPError."""
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.api_port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": content_type},
        )
        with urllib.request.urlopen(request, context=self.context, timeout=30) as response:
            raw = response.read()
        return json.loads(raw) if raw.startswith(b"{") else raw.decode()

    def start_api(self) -> None:
        """Start etcd and kube-apiserver with gpushare's definitions."""
        client, peer = f"http://127.0.0.1:{unused_port()}", f"http://127.0.0.1:{unused_port()}"
        self.start(
            "etcd",
            "etcd",
            "--data-dir",
            str(self.directory / "etcd"),
            "--unsafe-no-fsync",
            "--listen-client-urls",
            client,
            "--advertise-client-urls",
            client,
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            f"default={peer}",
            env=self.api_env,
        )
        key = self.directory / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        tokens = self.directory / "tokens.csv"
        tokens.write_text(f'{TOKEN},admin,admin,"system:masters"\n')
        self.start(
            "apiserver",
            self._kube,
            "kube-apiserver",
            f"--etcd-servers={client}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.api_port}",
            f"--cert-dir={self.directory / 'certs'}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=AlwaysAllow",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--disable-admission-plugins=ServiceAccount",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.99.0.0/24",
            env=self.api_env,
        )
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "throwaway",
            "clusters": [
                {
                    "name": "throwaway",
                    "cluster": {"server": f"https://127.0.0.1:{self.api_port}", "insecure-skip-tls-verify": True},
                }
            ],
            "users": [{"name": "admin", "user": {"token": TOKEN}}],
            "contexts": [{"name": "throwaway", "context": {"cluster": "throwaway", "user": "admin"}}],
        }
        self.kubeconfig.write_text(json.dumps(config))
        self.wait("apiserver", lambda: self.call("GET", "/readyz") == "ok")
        for path in sorted((ROOT / "crds").glob("*.yaml")):
            definition = yaml.safe_load(path.read_text())
            self.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        for plural in ("gpunodes", "gpushares"):
            self.wait("apiserver", lambda p=plural: bool(self.call("GET", f"/apis/gpushare.io/v1alpha1/{p}")))  # type: ignore[misc]

    def start_extender(self, *options: str) -> None:
        """Start the real extender process and wait until it is ready."""
        self.start(
            "extender",
            sys.executable,
            "-m",
            "gpushare.extender",
            "--kubeconfig",
            str(self.kubeconfig),
            "--port",
            str(self.extender_port),
            "--metrics-host",
            "127.0.0.1",
            "--metrics-port",
            str(self.metrics_port),
            *options,
            env={"PYTHONPATH": str(ROOT / "src")},
        )
        url = f"http://127.0.0.1:{self.metrics_port}/readyz"
        self.wait("extender", lambda: urllib.request.urlopen(url, timeout=5).status == 200)

    def start_scheduler(self, **overrides: Any) -> None:
        """Start the real kube-scheduler with the chart's configuration, pointed at our extender."""
        config = scheduler_configuration(str(self.kubeconfig), self.extender_port) | overrides
        path = self.directory / "scheduler.yaml"
        path.write_text(json.dumps(config))
        self.start(
            "scheduler",
            self._kube,
            "kube-scheduler",
            f"--config={path}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.scheduler_port}",
            f"--cert-dir={self.directory / 'certs-scheduler'}",
            "--authentication-tolerate-lookup-failure=true",
            "--authorization-always-allow-paths=/healthz,/readyz,/livez,/metrics,/debug/*",
            env=SCHEDULER_ENV,
        )

    def profile(self, name: str, seconds: int, into: Path) -> None:
        """Keep `seconds` of a Go process's processor profile, for `go tool pprof`."""
        port = {"apiserver": self.api_port, "scheduler": self.scheduler_port}[name]
        request = urllib.request.Request(
            f"https://127.0.0.1:{port}/debug/pprof/profile?seconds={seconds}",
            headers={"Authorization": f"Bearer {TOKEN}"} if name == "apiserver" else {},
        )
        with urllib.request.urlopen(request, context=self.context, timeout=seconds + 30) as response:
            (into / f"{name}.pprof").write_bytes(response.read())

    def wait(self, name: str, ready: Any, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.processes[name].poll() is not None:
                raise RuntimeError(f"{name} has ended:\n{self.log(name)}")
            with contextlib.suppress(OSError):
                if ready():
                    return
            time.sleep(0.1)
        raise RuntimeError(f"{name} is not ready after {seconds:g} s:\n{self.log(name)}")


@contextlib.contextmanager
def running(api_env: dict[str, str] | None = None) -> Iterator[ControlPlane]:
    """Yield a ready API server; the caller starts extender and scheduler. Everything ends with the block.

    Args:
        api_env: further environment of etcd and the API server.
    """
    directory = Path(tempfile.mkdtemp(prefix="gpushare-control-plane-"))
    plane = ControlPlane(directory, api_env)
    try:
        plane.start_api()
        yield plane
    finally:
        for name in reversed(list(plane.processes)):
            plane.stop(name)
        shutil.rmtree(directory, ignore_errors=True)
