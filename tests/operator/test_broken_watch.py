"""What is deleted while the operator is cut off from the API server, and no watch can be continued after."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.operator.live import PATIENCE_SECONDS, Cable, Running, Shares, decide, pod

from gpushare.core.api import Phase
from gpushare.kube import GPUSHARES, NAMESPACES, PODS, Api

pytestmark = pytest.mark.integration

Json = dict[str, Any]
# Kopf alone: says each event's type and name, and after it the names that its index holds.
WATCHER = """
import kopf

@kopf.on.startup()
async def configure(settings, **_):
    settings.posting.enabled = False

@kopf.index("gpushare.io", "v1alpha1", "gpushares")
async def known(name, **_):
    return {name: True}

@kopf.on.event("gpushare.io", "v1alpha1", "gpushares")
async def say(event, name, known, **_):
    print("event", event["type"], name, "index", *sorted(known), flush=True)
"""


@pytest.fixture
async def cable(kubeconfig: Path, tmp_path: Path) -> AsyncIterator[Cable]:
    made = Cable(kubeconfig)
    text = await made.start()
    (tmp_path / "through-the-cable").write_text(text)
    yield made
    await made.close()


@pytest.fixture
async def cut_off(
    cable: Cable, namespace: str, free_ports: Callable[[], int], tmp_path: Path
) -> AsyncIterator[Running]:
    """The operator at the end of the cable."""
    operator = Running(tmp_path / "through-the-cable", free_ports(), free_ports(), tmp_path / "operator.log")
    operator.start()
    yield operator
    if operator.process is not None and operator.process.poll() is None:
        await asyncio.to_thread(operator.stop)
    print(operator.log.read_text()[-20000:])


@pytest.fixture
def kopf_alone(cable: Cable, namespace: str, tmp_path: Path) -> Iterator["Words"]:
    """A watcher of Kopf's and nothing else at the end of the cable; answers what it says."""
    script, words = tmp_path / "watcher.py", tmp_path / "words"
    script.write_text(WATCHER)
    command = [sys.executable, "-m", "kopf", "run", "--quiet", "--standalone", f"--namespace={namespace}"]
    environment = {"KUBECONFIG": str(tmp_path / "through-the-cable"), "PATH": "/usr/bin:/bin", "USER": "test"}
    with words.open("wb") as output:
        process = subprocess.Popen([*command, str(script)], env=environment, stdout=output, stderr=output)
    yield Words(words)
    process.terminate()
    process.wait(timeout=60)
    print(words.read_text()[-20000:])


async def share(api: Api, namespace: str, name: str) -> None:
    body: Json = {"apiVersion": "gpushare.io/v1alpha1", "kind": "GpuShare", "metadata": {"name": name}}
    body["spec"] = {"selector": {"matchLabels": {"app": "web"}}}
    await api.create(GPUSHARES, body, namespace=namespace)


async def restart(api_server: Any) -> None:
    """Start the API server anew: it knows nothing of what was before, and answers old watches with 410 Gone."""
    await asyncio.to_thread(api_server.kill)
    await asyncio.to_thread(api_server.start)


class Words:
    """What Kopf alone has said so far."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> list[str]:
        return self._path.read_text().splitlines()

    async def until(self, *expected: str) -> None:
        await asyncio.to_thread(self._wait, expected)

    def _wait(self, expected: tuple[str, ...]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(any(one in line for line in self.lines()) for one in expected):
            assert time.monotonic() < deadline, f"no word of {expected}: {self.lines()[-20:]}"
            time.sleep(0.1)


async def test_kopf_does_not_report_what_a_new_list_lacks(
    real_api: Api, namespace: str, cable: Cable, api_server: Any, kopf_alone: Words
) -> None:
    """Why `listings` exists. When this fails, Kopf has learnt to, and `listings` can go."""
    await share(real_api, namespace, "goes")
    await share(real_api, namespace, "stays")
    await kopf_alone.until(" goes index", " stays index")
    cable.pull()
    await real_api.delete(GPUSHARES, "goes", namespace=namespace)
    await restart(api_server)
    cable.plug()
    await share(real_api, namespace, "later")
    await kopf_alone.until(" later index")
    await real_api.delete(GPUSHARES, "stays", namespace=namespace)
    await kopf_alone.until("DELETED stays index")
    assert not [line for line in kopf_alone.lines() if "DELETED goes" in line]
    assert kopf_alone.lines()[-1] == "event DELETED stays index goes later", "its index keeps it, too"


async def test_a_broken_watch_that_is_continued_reports_every_deletion(
    real_api: Api, namespace: str, cable: Cable, kopf_alone: Words
) -> None:
    """A dropped connection alone loses nothing: the history is still there."""
    await share(real_api, namespace, "goes")
    await kopf_alone.until(" goes index")
    cable.pull()
    await real_api.delete(GPUSHARES, "goes", namespace=namespace)
    cable.plug()
    await kopf_alone.until("DELETED goes index")


async def test_a_gpushare_deleted_while_cut_off_is_given_up(
    real_api: Api, namespace: str, shares: Shares, cable: Cable, cut_off: Running, api_server: Any
) -> None:
    """The only GpuShare goes, so that Kopf's new list is empty and Kopf reports nothing at all."""
    await share(real_api, namespace, "own")
    placed = await pod(real_api, namespace, "web-0")
    await decide(real_api, placed, "GPU-1")
    await shares.until(lambda: (s := shares.named("own")) is not None and len(s.status.placements) == 1)
    cable.pull()
    await real_api.delete(GPUSHARES, "own", namespace=namespace)
    await restart(api_server)
    cable.plug()
    await shares.until(lambda: (s := shares.named("pod-web-0")) is not None and len(s.status.placements) == 1)
    metrics = await asyncio.to_thread(cut_off.get, "/metrics", cut_off.metrics_port)
    assert 'gpushare_operator_missed_deletions{kind="GpuShare"} 1.0' in metrics


async def test_a_pod_deleted_and_made_anew_while_cut_off_is_the_new_one(
    real_api: Api, namespace: str, shares: Shares, cable: Cable, cut_off: Running, api_server: Any
) -> None:
    await share(real_api, namespace, "own")
    for name in ("goes", "comes-back"):
        await decide(real_api, await pod(real_api, namespace, name), "GPU-1")
    await shares.until(lambda: (s := shares.named("own")) is not None and len(s.status.placements) == 2)
    cable.pull()
    for name in ("goes", "comes-back"):
        await real_api.delete(PODS, name, namespace=namespace, grace_seconds=0)
    await pod(real_api, namespace, "comes-back")
    await restart(api_server)
    cable.plug()
    await shares.until(lambda: (s := shares.named("own")) is not None and s.status.phase is Phase.PENDING)
    own = shares.named("own")
    assert own is not None
    assert own.status.placements == ()


async def test_a_namespace_made_while_cut_off_is_taken_up(
    real_api: Api, namespace: str, cable: Cable, cut_off: Running, api_server: Any, shares: Shares
) -> None:
    """Kopf's own watch of namespaces tells of none that its new list has and that it did not know before."""
    later = f"{namespace}-later"
    await asyncio.to_thread(cut_off.stop)
    cut_off.start(namespace, later)
    await pod(real_api, namespace, "here")
    await shares.until(lambda: shares.named("pod-here") is not None)
    cable.pull()
    await real_api.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": later}})
    await pod(real_api, later, "there")
    await restart(api_server)
    cable.plug()
    of_later = Shares(real_api, later)
    async with of_later.reflector:
        await of_later.until(lambda: of_later.named("pod-there") is not None)
