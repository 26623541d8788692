"""From a cluster without gpushare to the first shared pod by the commands of docs/guide/own-cluster.md, timed.

Only what makes a cluster and puts the image on its node is another command than the page's: `hack/cluster up` for
`kind create cluster`, `hack/cluster push-images` for `docker build` and `kind load`. These two are not in the sum.

With `--registry` the image comes as docs/guide/first-hour.md has it, by `docker build` and `docker push`; both
are in the sum: it needs a Docker engine and a registry that the node can pull from.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from devcluster import backends, tools

ROOT = Path(__file__).resolve().parents[1]
PAGE, FIRST_HOUR = ROOT / "docs/guide/own-cluster.md", ROOT / "docs/guide/first-hour.md"
GUIDES_IMAGE = "registry.example.com/gpushare:0.1.0"
MOST_SECONDS = 300
SIGN_OF_LIFE = "iterations/s="  # of the tenant: its kernels run


def image_commands(image: str, build_arguments: str = "") -> list[str]:
    """Return the first hour's commands that build the image and push it, for an image of another name."""
    section = FIRST_HOUR.read_text().split("## Install\n", 1)[1].split("\n## ", 1)[0]
    script = "".join(re.findall(r"```sh\n(.*?)```", section, re.DOTALL))
    lines = [" ".join(line.split()) for line in script.replace("\\\n", "").splitlines()]
    found = [line.replace(GUIDES_IMAGE, image) for line in lines if line.startswith("docker ")]
    return [line.replace("docker build", f"docker build {build_arguments}".rstrip()) for line in found]


def commands(images: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Return the page's commands in order, each with its standard input, adapted to images of other names."""
    repository, _, tag = images["image"].rpartition(":")
    values = [f"image.tag={tag}"]
    if scheduler := images.get("scheduler"):
        name, _, version = scheduler.rpartition(":")
        values += [f"scheduler.image.repository={name}", f"scheduler.image.tag={version}"]
    section = PAGE.read_text().split("## kind, with simulated GPUs\n", 1)[1].split("\n## ", 1)[0]
    section = section.replace(GUIDES_IMAGE, images["image"])
    (script,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    (manifest,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    for line in script.replace("\\\n", "").splitlines():
        command = " ".join(line.split()).replace("registry.example.com/gpushare", repository)
        if command.startswith("helm install"):
            command += "".join(f" --set {value}" for value in values)
        if command.startswith("helm"):
            yield command, ""
    yield "kubectl apply -f -", manifest
    yield f"until kubectl logs simulated 2>/dev/null | grep -q {SIGN_OF_LIFE}; do sleep 0.2; done", ""
    seen = FIRST_HOUR.read_text().split("## See it\n", 1)[1].split("\n## ", 1)[0]
    for line in "".join(re.findall(r"```sh\n(.*?)```", seen, re.DOTALL)[:2]).splitlines():
        yield line.replace(" first", " simulated"), ""


def main(arguments: Sequence[str]) -> None:
    """Print the seconds of each command; end with 1 where one fails or all together take too long."""
    parser = argparse.ArgumentParser(prog="python -m bench first-pod", description=__doc__)
    parser.add_argument("--registry", default="", help="build by Docker, and push there: 127.0.0.1:5000")
    parser.add_argument("--build-arguments", default="", help="of docker build: --build-arg BASE_IMAGE=...")
    options = parser.parse_args(arguments)
    cluster = backends.pick()
    cluster.up()
    images = backends.push_images(cluster)
    kubectl, helm = tools.kubectl(), tools.helm()
    path = os.pathsep.join(
        [*(str(Path(one).parent) for one in (kubectl, helm, sys.executable)), os.environ["PATH"]]
    )
    env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PATH": path}
    todo: list[tuple[str, str]] = []
    if options.registry:
        images["image"] = f"{options.registry}/gpushare:0.1.0"
        todo = [(command, "") for command in image_commands(images["image"], options.build_arguments)]
    begun = time.monotonic()
    for command, stdin in [*todo, *commands(images)]:
        since = time.monotonic()
        bound = {"input": stdin, "text": True, "cwd": ROOT, "env": env, "timeout": 2 * MOST_SECONDS}
        done = subprocess.run(["bash", "-c", command], check=False, stdout=sys.stderr, **bound)
        print(f"{time.monotonic() - since:7.1f} s  {command}", flush=True)
        if done.returncode:
            sys.exit(1)
    total = time.monotonic() - begun
    print(f"{total:7.1f} s  all of it, at most {MOST_SECONDS}")
    sys.exit(int(total > MOST_SECONDS))
