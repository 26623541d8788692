"""hack/cluster: start a cluster, show its status, restart its parts, remove it."""

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from devcluster import backends, debian, demo, image, tools
from devcluster.local import COMPONENTS, LocalCluster
from devcluster.progress import Failed, say
from devcluster.settings import state_dir


def main() -> int:
    parser = argparse.ArgumentParser(prog="hack/cluster", description=__doc__)
    parser.add_argument("--backend", choices=backends.NAMES, help="default: CLUSTER, else what this machine has")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="start it; starts only what does not run")
    commands.add_parser("down", help="remove every trace of it")
    commands.add_parser("status", help="print what runs, as JSON; exit 1 if it is not up")
    commands.add_parser("kubeconfig", help="print the path of its kubeconfig")
    commands.add_parser("node-name", help="print the name of the node whose kubelet is real")
    commands.add_parser("load-image", help="import image archives into the node").add_argument("tar", nargs="+")
    commands.add_parser(
        "image", help="build the image (nothing to do when its sources are as they were), print its name"
    )
    commands.add_parser("push-images", help="build the images and put them on the node, print their names as JSON")
    commands.add_parser("tools", help="build Kubernetes, kubectl and helm into the cache")
    commands.add_parser(
        "test-programs", help="get what tests run: Prometheus, Chromium, zsh, fish, Kueue, krew, Argo CD diff"
    )
    commands.add_parser("install", help="build and load the images, helm install gpushare with simulated GPUs")
    commands.add_parser("demo", help="cluster, gpushare, and a story: pods come, and what happens is told")
    commands.add_parser("demo-record", help="the same, and write the story's recording").add_argument("cast")
    commands.add_parser("demo-down", help="remove every trace of the demo")
    for verb, what in (
        ("restart", "kill -9 and start again"),
        ("kill", "kill -9 and leave it dead"),
        ("start", "start one that is dead"),
        ("pid", "print the pid of"),
        ("log", "print the log file of"),
    ):
        one = commands.add_parser(verb, help=f"{what} one component (local backend)")
        one.add_argument("component", choices=COMPONENTS)
    arguments = parser.parse_args()
    if arguments.backend:
        os.environ["CLUSTER"] = arguments.backend
    try:
        return _run(arguments)
    except Failed as failed:
        print(f"hack/cluster: {failed}", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "test-programs":
        return _test_programs()
    cluster = backends.pick()
    match arguments.command:
        case "up":
            with exclusive():
                cluster.up()
            say(f"cluster ({cluster.name}) is up: export KUBECONFIG={cluster.kubeconfig}")
        case "down":
            with exclusive():
                cluster.down()
            say("nothing of the cluster is left")
        case "status":
            status = cluster.status()
            print(json.dumps(status, indent=1))
            return 0 if status["up"] else 1
        case "kubeconfig":
            print(cluster.kubeconfig)
        case "node-name":
            print(cluster.node_name)
        case "load-image":
            for tar in arguments.tar:
                cluster.load(Path(tar))
        case "tools":
            print(tools.kubernetes(), tools.helm(), sep="\n")
        case "image":
            print(image.build(docker=backends.docker_answers())[0])
        case "push-images":
            print(json.dumps(backends.push_images(cluster)))
        case "install":
            print(json.dumps(demo.Demo(cluster).install()))
        case "demo" | "demo-record":
            with exclusive():
                return demo.up(record=Path(arguments.cast).resolve() if "cast" in arguments else None)
        case "demo-down":
            with exclusive():
                demo.down()
            say("nothing of the demo is left")
        case verb:
            _component(cluster, verb, arguments.component)
    return 0


def _test_programs() -> int:
    """Fetch or build what can be had, print name and place of each; tests of the rest skip, and say why."""
    programs: dict[str, Callable[[], Path]] = {
        "prometheus": debian.prometheus,
        "chromium": debian.chromium,
        "zsh": partial(debian.shell, "zsh"),
        "fish": partial(debian.shell, "fish"),
        "kueue": tools.kueue,
        "jobset": tools.jobset_definition,
        "clients": tools.clients,
    }
    for name, fetch in programs.items():
        try:
            print(name, fetch(), flush=True)
        except Failed as failed:
            say(f"tests will skip what needs it: {failed}")
    return 0


def _component(cluster: backends.Cluster, verb: str, component: str) -> None:
    if not isinstance(cluster, LocalCluster):
        raise Failed(f"`{verb}` reaches single components of the local backend only, this is {cluster.name}")
    match verb:
        case "restart":
            cluster.restart(component)
        case "kill":
            cluster.kill(component)
        case "start":
            cluster.processes.start_again(component)
        case "pid":
            print(cluster.processes.pid(component) or "")
        case "log":
            print(cluster.processes.log(component))


@contextmanager
def exclusive() -> Iterator[None]:
    """Allow only one `up` or `down` at a time on this machine."""
    lock = state_dir().with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
