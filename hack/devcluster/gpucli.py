"""hack/gpu/cluster: one or several verbs in a row, each with a time limit.

    hack/gpu/cluster --bundle DIR up install test run -- COMMAND...
    hack/gpu/cluster down

CLUSTER=existing takes the cluster of KUBECONFIG instead: `up` and `down` leave it as it is, `install` needs
IMAGE (and TENANT_IMAGE, an image with PyTorch), and refuses where gpushare is installed or in use unless
--yes is there. `--simulated` takes the twin's GPUs. A COMMAND of `run` finds
KUBECONFIG, kubectl and helm, and in GPUSHARE_TENANTS a file that says how pods come to PyTorch. With OUT set,
the logs of every part lie there at the end.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.gpuexisting import ExistingGpus
from devcluster.gpunode import RELEASE_NAMESPACE, GpuNodeCluster
from devcluster.progress import Failed, run, say
from devcluster.settings import patience

LIMITS = {
    "up": 150.0,
    "install": 260.0,
    "test": 90.0,
    "down": 120.0,
    "status": 30.0,
    "kubeconfig": 10.0,
    "run": 540.0,
}
DIAGNOSIS = (
    ["get", "nodes,pods,gpunodes,gpushares", "-A", "-o", "wide"],
    ["get", "events.events.k8s.io", "-A", "--sort-by=.metadata.creationTimestamp"],
    ["get", "gpunodes,gpushares", "-A", "-o", "yaml"],
)
AnyGpuCluster = GpuNodeCluster | ExistingGpus


class OutOfTimeError(Failed):
    """A step took longer than it may."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="hack/gpu/cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bundle", default=os.environ.get("GPU_BUNDLE", "dist/gpu"), help="folder of the two parts"
    )
    parser.add_argument("--simulated", action="store_true", help="the twin's GPUs, to try it without one")
    parser.add_argument("--yes", action="store_true", help="install also over a gpushare that is in use")
    parser.add_argument("--set", action="append", default=[], help="a value of the chart, for install")
    parser.add_argument("--limit", type=float, default=LIMITS["run"], help="seconds that `run` may take")
    parser.add_argument("verbs", nargs="+", choices=LIMITS)
    before, _, command = _split(sys.argv[1:])
    options = parser.parse_args(before)
    cluster = _pick(options)
    limits = {verb: seconds * patience() for verb, seconds in LIMITS.items()} | {"run": options.limit}
    code = 0
    try:
        for verb in options.verbs:
            begun = time.monotonic()
            with _limit(verb, limits[verb]):
                code = _do(cluster, verb, options, command, limits[verb])
            say(f"{verb}: {time.monotonic() - begun:.1f} s")
            if code:
                break
    except Failed as failed:
        print(f"hack/gpu/cluster: {failed}", file=sys.stderr)
        code = 1
    if (out := os.environ.get("OUT")) and options.verbs[-1] not in {"down", "status", "kubeconfig"}:
        _save(cluster, Path(out))
    return code


def _split(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    if "--" not in arguments:
        return arguments, "", []
    place = arguments.index("--")
    return arguments[:place], "--", arguments[place + 1 :]


def _pick(options: argparse.Namespace) -> AnyGpuCluster:
    if os.environ.get("CLUSTER") == "existing":
        return ExistingGpus(yes=options.yes)
    return GpuNodeCluster(Path(options.bundle).resolve(), simulated=options.simulated)


def _do(cluster: AnyGpuCluster, verb: str, options: argparse.Namespace, command: list[str], limit: float) -> int:
    verbs: dict[str, Callable[[], object]] = {
        "up": cluster.up,
        "install": lambda: cluster.install(*options.set),
        "test": cluster.test,
        "down": cluster.down,
        "status": lambda: json.dumps(cluster.status(), indent=1),
        "kubeconfig": lambda: cluster.kubeconfig,
    }
    if verb == "run":
        if not command:
            raise Failed("run needs a command behind --")
        return _run(command, cluster.environment(), limit)
    answer = verbs[verb]()
    if answer is not None:
        print(answer, flush=True)
    return 0


def _run(command: list[str], env: dict[str, str], limit: float) -> int:
    """Run a command in its own session, so that at its limit all that it started ends with it."""
    process = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        return process.wait(limit)
    except (subprocess.TimeoutExpired, OutOfTimeError):
        os.killpg(process.pid, signal.SIGTERM)  # its logs are wanted all the more
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        say(f"{command[0]} was ended after {limit:.0f} s")
        return 124


@contextmanager
def _limit(verb: str, seconds: float) -> Iterator[None]:
    """Interrupt a step that takes longer; what it waits for is told the same way."""

    def over(*_: object) -> None:
        raise OutOfTimeError(f"{verb}: not within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds + 20 * (verb == "run"))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _save(cluster: AnyGpuCluster, out: Path) -> None:
    """Leave what every part said, and the objects, in one archive."""
    logs = out / "cluster-logs"
    logs.mkdir(parents=True, exist_ok=True)

    def keep(name: str, *arguments: str) -> None:
        try:
            (logs / name).write_text(
                run(["kubectl", *arguments], env=cluster.environment(), timeout_seconds=20)[-2_000_000:]
            )
        except Failed as failed:
            (logs / name).write_text(str(failed))

    for number, arguments in enumerate(DIAGNOSIS):
        keep(f"objects-{number}.txt", *arguments)
    for part in ("agent", "mps", "operator", "admission", "scheduler"):
        label = f"app.kubernetes.io/component={part}"
        keep(
            f"{part}.log",
            "-n",
            RELEASE_NAMESPACE,
            "logs",
            "-l",
            label,
            "--all-containers",
            "--prefix",
            "--tail=5000",
        )
    if isinstance(cluster, GpuNodeCluster):
        for log in (cluster.state / "log").glob("*.log"):
            (logs / f"node-{log.name}").write_bytes(log.read_bytes()[-200_000:])
    shutil.make_archive(str(out / "cluster-logs"), "gztar", logs)
    shutil.rmtree(logs)
