"""Only the transport of the Kubernetes package is loaded, and the whole of it where that cannot be or Kopf did."""

import os
import subprocess
import sys

import pytest

CLIENTS = ("pydantic", "requests", "requests_oauthlib", "websocket", "kubernetes.client")
PROGRAM = """
import sys
{before}
import gpushare.kube
{after}
loaded = [name for name in {clients} if name in sys.modules]
assert gpushare.kube.Api.__module__ == "gpushare.kube.api"
print(loaded)
"""


def loaded(before: str = "", after: str = "") -> list[str]:
    program = PROGRAM.format(before=before, after=after, clients=CLIENTS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [name for name in CLIENTS if repr(name) in done.stdout]


def test_the_transport_comes_without_the_clients() -> None:
    assert loaded() == []


def test_somebody_who_imported_the_package_keeps_it_whole() -> None:
    assert loaded(before="import kubernetes") == list(CLIENTS)


@pytest.mark.parametrize(
    "after",
    [
        "import kubernetes.client, kubernetes.config\nassert kubernetes.client.V1Pod and kubernetes.config",
        "from kubernetes.client import V1ObjectMeta",
    ],
)
def test_who_wants_the_clients_afterwards_gets_them(after: str) -> None:
    assert "kubernetes.client" in loaded(after=after)


def test_a_release_that_does_not_stand_it_is_loaded_whole() -> None:
    """`kubernetes.aio.utils` has no configuration: the short cut fails half way, and nothing of it stays."""
    broken = """
import gpushare.kube.transport as transport
for name in [name for name in sys.modules if name.startswith("kubernetes")]:
    del sys.modules[name]
config, configuration, rest = transport.load_transport(("kubernetes", "kubernetes.aio", "kubernetes.aio.utils"))
assert config.load_incluster_config and configuration() and rest
import kubernetes
assert kubernetes.__version__
"""
    assert loaded(after=broken) == list(CLIENTS)
