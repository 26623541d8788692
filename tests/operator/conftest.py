"""A certificate, and a real API server of this test run's own: etcd and kube-apiserver on loopback."""

import asyncio
import os
import shutil
import ssl
import subprocess
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from certificates import make_pair
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from devcluster.loopback import unused_port
from installed import lacking
from tests.operator.admissionclient import Client, Serving
from tests.operator.live import PATIENCE_SECONDS, Running, Shares

from gpushare.core.admission import AdmissionPolicy, Defaults
from gpushare.kube import GPUNODES, GPUSHARES, NAMESPACES, AlreadyExists, Api, NotFound, Resource, connect
from gpushare_operator.admission import AdmissionServerSettings, serve
from gpushare_operator.admission.server import ServerLimits

ROOT = Path(__file__).resolve().parents[2]
DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpushare"
MakeCertificate = Callable[..., bytes]
OPERATOR = "system:serviceaccount:gpushare:gpushare-operator"  # as the chart's bindings name it


@pytest.fixture
def serving(
    tmp_path: Path, make_certificate: MakeCertificate, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> Serving:
    """Makes a server with these limits, and a client of it."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "there-is-none"))
    trusted = ssl.create_default_context(cadata=make_certificate(tmp_path).decode())

    @asynccontextmanager
    async def run(limits: ServerLimits) -> AsyncIterator[Client]:
        policy = AdmissionPolicy(Defaults(auto_fraction="0.3"), "nvidia")
        settings = AdmissionServerSettings(tmp_path, "127.0.0.1", free_port, policy, limits)
        stop = asyncio.Event()
        server = asyncio.create_task(serve(settings, stop))
        connector = aiohttp.TCPConnector(ssl=trusted)
        async with aiohttp.ClientSession(connector=connector) as session:
            ready = Client(session, f"https://127.0.0.1:{settings.port}", trusted)
            for _ in range(3000):
                try:
                    await ready.get("/healthz")
                    break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.01)
            yield ready
        stop.set()
        await server

    return run


@pytest.fixture
async def client(serving: Serving) -> AsyncIterator[Client]:
    async with serving(ServerLimits(read_seconds=60.0, wait_seconds=60.0)) as ready:
        yield ready


@pytest.fixture(scope="session")
def make_certificate() -> MakeCertificate:
    """Writes tls.crt and tls.key for localhost into a directory; answers the certificate (its own authority)."""
    return make_pair


def _private(key: Any) -> bytes:
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem


@pytest.fixture
def free_ports() -> Callable[[], int]:
    """Finds ports of the loopback that nobody listens on."""
    return unused_port


@pytest.fixture
def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    return unused_port()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until a server answers; a process that ends, or three minutes, is a failure with its last words."""
    context = ssl._create_unverified_context()
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, context=context, timeout=10) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    process.kill()
    process.wait(timeout=30)
    raise AssertionError(f"{url} does not answer: {log.read_text()[-2000:]}")


class ApiServer:
    """etcd and kube-apiserver; the latter can be killed and started again.

    Attributes:
        kubeconfig: of one who may do everything.
        operators_kubeconfig: of the operator's service account, which may do what its bindings grant.

    Args:
        authorization: an AuthorizationConfiguration; None for RBAC alone.
    """

    def __init__(self, etcd: str, kube: Path, work: Path, authorization: Path | None = None) -> None:
        self.kubeconfig = work / "kubeconfig"
        self._work = work
        client, peer, port = unused_port(), unused_port(), unused_port()
        self._url = f"https://127.0.0.1:{port}"
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (work / "sa.key").write_bytes(_private(key))
        (work / "tokens.csv").write_text(f't0ken,admin,1,"system:masters"\noperat0r,{OPERATOR},2\n')
        self.kubeconfig.write_text(_kubeconfig(self._url))
        self.operators_kubeconfig = work / "kubeconfig-of-the-operator"
        self.operators_kubeconfig.write_text(_kubeconfig(self._url, "operat0r"))
        self._command = [
            str(kube),
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{client}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={work}/apiserver",
            f"--token-auth-file={work}/tokens.csv",
            f"--authorization-config={authorization}" if authorization else "--authorization-mode=RBAC",
            "--service-account-issuer=https://localhost",
            f"--service-account-key-file={work}/sa.key",
            f"--service-account-signing-key-file={work}/sa.key",
            "--service-cluster-ip-range=10.99.0.0/24",
            "--endpoint-reconciler-type=none",
            "--disable-admission-plugins=ServiceAccount",
        ]
        self._etcd = self._launch(
            "etcd",
            [
                etcd,
                "--data-dir",
                str(work / "etcd"),
                "--listen-client-urls",
                f"http://127.0.0.1:{client}",
                "--advertise-client-urls",
                f"http://127.0.0.1:{client}",
                "--listen-peer-urls",
                f"http://127.0.0.1:{peer}",
                "--initial-advertise-peer-urls",
                f"http://127.0.0.1:{peer}",
                "--initial-cluster",
                f"default=http://127.0.0.1:{peer}",
                "--unsafe-no-fsync",
            ],
            f"http://127.0.0.1:{client}/health",
        )
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start kube-apiserver; answers once it is ready."""
        self._server = self._launch("kube-apiserver", self._command, f"{self._url}/readyz")

    def kill(self) -> None:
        """kill -9."""
        if self._server is not None:
            self._server.kill()
            self._server.wait(timeout=30)

    def close(self) -> None:
        """End both."""
        self.kill()
        self._etcd.kill()
        self._etcd.wait(timeout=30)

    def _launch(self, name: str, command: list[str], ready: str) -> subprocess.Popen[bytes]:
        log = self._work / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        _wait_for(ready, process, log)
        return process


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A fresh API server; skips where its programs are not built."""
    server = ApiServer(*server_programs(), tmp_path_factory.mktemp("api-server"))
    try:
        server.start()
        yield server
    finally:
        server.close()


def server_programs() -> tuple[str, Path]:
    """etcd and the binary with kube-apiserver; skips where they are not built."""
    etcd = shutil.which("etcd")
    kube = next(iter(sorted(CACHE.glob("kube/*/kube"))), None)
    if kube is None:
        lacking("kubernetes", "no kube-apiserver: hack/cluster tools builds it")
    if etcd is None:
        pytest.skip("no etcd: hack/cluster up installs it where it makes a cluster of its own")
    return etcd, kube


@pytest.fixture
def authorizing_server(tmp_path: Path) -> Iterator[Callable[[Path], ApiServer]]:
    """Starts API servers with an AuthorizationConfiguration; ends them with the test."""
    started: list[ApiServer] = []

    def start(authorization: Path) -> ApiServer:
        server = ApiServer(*server_programs(), tmp_path, authorization)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="session")
def kubeconfig(api_server: ApiServer) -> Path:
    """The kubeconfig of the fresh API server."""
    return api_server.kubeconfig


def _kubeconfig(server: str, token: str = "t0ken") -> str:
    cluster = {"server": server, "insecure-skip-tls-verify": True}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
    )


@pytest.fixture
def controllers(kubeconfig: Path, tmp_path: Path) -> Iterator[None]:
    """Kubernetes' own controllers of Deployments, ReplicaSets, CronJobs and Jobs, and its garbage collector."""
    kube = next(iter(sorted(CACHE.glob("kube/*/kube"))))
    parts = ("garbage-collector", "deployment", "replicaset", "cronjob", "job")
    enabled = ",".join(f"{part}-controller" for part in parts)
    command = [
        str(kube),
        "kube-controller-manager",
        f"--kubeconfig={kubeconfig}",
        f"--controllers={enabled}",
        "--leader-elect=false",
        "--secure-port=0",
    ]
    with (tmp_path / "controllers.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    yield
    process.terminate()
    process.wait(timeout=30)


@pytest.fixture
async def real_api(kubeconfig: Path) -> AsyncIterator[Api]:
    """The real API server."""
    async with connect(kubeconfig) as api:
        yield api


@pytest.fixture
async def namespace(real_api: Api) -> str:
    """A fresh namespace on a server that knows our definitions."""
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        definition = yaml.safe_load(path.read_text())
        with suppress(AlreadyExists):
            await real_api.create(DEFINITIONS, definition)
    for resource in (GPUSHARES, GPUNODES):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    await real_api.list(resource, lambda obj: obj)
                    break
                except NotFound:  # its endpoint appears a moment after the definition
                    await asyncio.sleep(0.05)
    name = f"t{uuid.uuid4().hex[:8]}"
    await real_api.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


@pytest.fixture
async def shares(real_api: Api, namespace: str) -> AsyncIterator[Shares]:
    watched = Shares(real_api, namespace)
    async with watched.reflector:
        yield watched


@pytest.fixture
async def running(
    kubeconfig: Path, namespace: str, free_ports: Callable[[], int], tmp_path: Path
) -> AsyncIterator[Running]:
    operator = Running(kubeconfig, free_ports(), free_ports(), tmp_path / "operator.log")
    operator.start()
    yield operator
    if operator.process is not None and operator.process.poll() is None:
        operator.stop()
    print(operator.log.read_text()[-20000:])
