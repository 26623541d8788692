"""Kubeconfigs that no connection can be made with: each is one sentence, also of what a library only logs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpushare.kube import PODS, ApiError, connect

Json = dict[str, Any]
PROGRAM = {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never"}


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a kubeconfig with one cluster and one user."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    def write(cluster: Json, user: Json) -> Path:
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"} | cluster}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(content))
        return path

    return write


@pytest.mark.parametrize(
    ("cluster", "user"),
    [
        ({"certificate-authority-data": "bm90IGEgY2VydGlmaWNhdGU="}, {"token": "t"}),
        ({}, {"client-certificate-data": "bm9uZQ==", "client-key-data": "bm9uZQ=="}),
    ],
)
async def test_certificates_that_are_none_are_no_defect(kubeconfig: Any, cluster: Json, user: Json) -> None:
    """Before: an SSLError, which the command line reports as a defect of ours, with status 70."""
    with pytest.raises(ApiError, match="no usable cluster configuration: its certificates cannot be used"):
        async with connect(kubeconfig(cluster, user)):
            pass


async def test_an_empty_part_of_the_variable_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: it counted as the present folder, and the sentence was the library's, which names no file."""
    absent = tmp_path / "absent"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", f"{absent}:")
    with pytest.raises(ApiError, match=f"no usable cluster configuration: there is no {absent}$"):
        async with connect():
            pass


async def test_a_context_that_the_file_lacks_is_told_with_those_that_it_has(kubeconfig: Any) -> None:
    """Before: "Invalid kube-config file. Expected object with name prod in .../contexts list"."""
    path = kubeconfig({}, {"token": "t"})
    with pytest.raises(ApiError, match=r'there is no context "prod", only c$'):
        async with connect(path, context="prod"):
            pass


async def test_a_file_that_cannot_be_read_is_told_without_a_number(kubeconfig: Any, tmp_path: Path) -> None:
    """Before: "[Errno 21] Is a directory: '...'"."""
    absent = tmp_path / "absent"
    for path, why in (
        (tmp_path, f"{tmp_path}: cannot be read: Is a directory$"),
        (kubeconfig({}, {"tokenFile": str(absent)}), f"{absent}: cannot be read: No such file or directory$"),
    ):
        with pytest.raises(ApiError, match=f"no usable cluster configuration: {why}"):
            async with connect(path):
                pass


@pytest.mark.parametrize(
    "server",
    ["", "cluster.example", "127.0.0.1:6443", "ftp://127.0.0.1", "https://127.0.0.1:99999", "https://:6443"],
)
async def test_a_server_that_is_no_address_is_told_so(kubeconfig: Any, server: str) -> None:
    """Before: "the API server did not answer: /apis/...: is this the right cluster, and is it up?"."""
    with pytest.raises(ApiError, match=f'its server "{server}" is no address; write it as https://HOST:6443'):
        async with connect(kubeconfig({"server": server}, {"token": "t"})):
            pass


@pytest.mark.parametrize(
    "server", ["http://localhost:8080/", "https://[::1]:6443", "https://example.invalid/k8s/c"]
)
async def test_any_address_is_taken(kubeconfig: Any, server: str) -> None:
    async with connect(kubeconfig({"server": server}, {"token": "t"})):
        pass


@pytest.mark.parametrize(
    ("command", "says"), [("no-such-program", "no-such-program"), ("false", "process returned 1"), ("true", "")]
)
async def test_a_program_that_gives_no_credentials_is_told_so(kubeconfig: Any, command: str, says: str) -> None:
    """Before: we asked as nobody, were refused, and named a role to ask for."""
    with pytest.raises(ApiError, match=f"no usable cluster configuration: no credentials.*{says}"):
        async with connect(kubeconfig({}, {"exec": PROGRAM | {"command": command}})):
            pass


async def test_who_has_no_credentials_may_ask_without(kubeconfig: Any, server: Any) -> None:
    async with connect(kubeconfig({"server": server.url}, {})) as api:
        await api.list(PODS, lambda pod: pod)


@pytest.mark.parametrize("user", [None, {"exec": PROGRAM | {"command": "x-y"}}])
def test_nothing_but_the_sentence_is_on_standard_error(kubeconfig: Any, tmp_path: Path, user: Json | None) -> None:
    """Before: a line of the library's stood above it, such as "Config not found: ..."."""
    path = tmp_path / "absent" if user is None else kubeconfig({}, user)
    code = "import sys; from gpushare.cli.root import main; sys.argv[0] = 'gpushare'; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "pods", "--kubeconfig", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith("gpushare: no usable cluster configuration: ")
    assert done.stderr.count("\n") == 1
