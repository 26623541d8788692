"""Upgrade and rollback under churn: helm replaces the parts while pods come and go, and the auditor watches."""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from devcluster import progress, tools
from devcluster.demo import RELEASE, RELEASE_NAMESPACE
from devcluster.local import LocalCluster
from devcluster.progress import Failed
from devcluster.settings import REPOSITORY, patience

from bench.chaos.churn import LOOK_EVERY_SECONDS, Churn

# The last one that was landed; tests/e2e/test_upgrade.py comes from an older one.
FORMER: Final = "ea6d6e4c61552f5d0c7f7413aaacb28670a0be2e"
SETTLED_SECONDS: Final = 60.0
HELM_SECONDS: Final = 240.0


@dataclass(frozen=True, slots=True)
class UpgradeStage:
    """Observations of one stage.

    Attributes:
        seconds: how long it took, helm and the churn after it.
        settled_seconds: after the churn ended, until all was as it should be; None when it was not within the bar.
        waited_for: what was missing then.
    """

    name: str
    seconds: float
    created: int
    deleted: int
    settled_seconds: float | None
    waited_for: tuple[str, ...]
    violations: tuple[str, ...]


def stage(
    churn: Churn,
    name: str,
    act: Callable[[], object],
    *,
    seconds: float,
    when_done: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> UpgradeStage:
    """Replace pods while `act` runs and for some time after; then stop, and wait until all has settled.

    Args:
        when_done: called as soon as `act` has returned.

    Raises:
        Failed: of `act`.
    """
    begun, created, deleted = clock(), churn.load.created, churn.load.deleted
    violations: dict[str, None] = {}
    waiting: list[str] = []

    def look(*, replace: bool) -> None:
        nonlocal waiting
        wrong, waiting = churn.look(replace=replace)
        violations.update(dict.fromkeys(f"{one.rule}: {one.detail}" for one in wrong))
        sleep(LOOK_EVERY_SECONDS)

    running = _Acting(act)
    while running.goes_on():
        look(replace=True)
    when_done()
    done = clock()
    while clock() - done < seconds:
        look(replace=True)
    ended = clock()
    look(replace=False)
    while waiting and clock() - ended < SETTLED_SECONDS:
        look(replace=False)
    return UpgradeStage(
        name,
        round(ended - begun, 1),
        churn.load.created - created,
        churn.load.deleted - deleted,
        None if waiting else round(clock() - ended, 1),
        tuple(waiting),
        tuple(violations),
    )


class _Acting:
    """Background action; its failure is raised on request."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._failure: Failed | None = None

        def run() -> None:
            try:
                act()
            except Failed as failed:
                self._failure = failed

        self._thread = threading.Thread(target=run, name="helm")
        self._thread.start()

    def goes_on(self) -> bool:
        if self._thread.is_alive():
            return True
        if self._failure is not None:
            raise self._failure
        return False


def former_sources(commit: str, directory: Path) -> Path:
    """Write a former release's sources, with today's tools to build and install them; return where."""
    git = ["git", "-C", str(REPOSITORY)]
    archive = subprocess.run([*git, "archive", commit], capture_output=True, check=False)
    if archive.returncode:
        raise Failed(f"no sources of {commit}: {archive.stderr.decode().strip()}")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive.stdout, check=True)
    own = shutil.ignore_patterns("demo-values.yaml")  # a chart refuses values of a later one
    shutil.copytree(REPOSITORY / "hack", directory / "hack", dirs_exist_ok=True, ignore=own)
    return directory


def install_former(sources: Path) -> None:
    """Install that release on the cluster that runs."""
    progress.run([sources / "hack" / "cluster", "install"])


def roll_back(cluster: LocalCluster) -> None:
    """Go back to the release before, as a user does."""
    command: list[object] = [tools.helm(), "rollback", RELEASE, "--namespace", RELEASE_NAMESPACE]
    command += ["--kubeconfig", cluster.kubeconfig, "--wait", "--timeout", f"{HELM_SECONDS * patience():.0f}s"]
    progress.run(command)


def replace_hosts(cluster: LocalCluster) -> None:
    """Delete the MPS hosts' pods, which no upgrade replaces, so that those of the present release come."""
    hosts = ["-n", RELEASE_NAMESPACE, "delete", "pods", "-l", "app.kubernetes.io/component=mps"]
    cluster.kubectl(*hosts, "--timeout=120s")
