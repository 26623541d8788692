"""Record which node the cluster autoscaler expects from each text in docs/guide/autoscaler.md.

    python tests/autoscaler/autoscaler_nodes.py SOURCE --version 1.36.1

SOURCE is the directory cluster-autoscaler of a checkout of its repository: as a module of its own it is not
available from every proxy. Nothing in it is changed: `go test -overlay` lays one test of ours
(tests/autoscaler/CLOUD) in each cloud's package in place of the package's own tests, so that the code that builds
the template of a node runs whole. It takes some ten minutes of two cores the first time, as Kubernetes and the
clouds' clients are compiled.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "autoscaler.md"
TESTS = ROOT / "tests" / "autoscaler"
RECORD = ROOT / "tests" / "data" / "autoscaler" / "nodes.json"
CLOUDS = {"aws": "AWS,", "azure": "Azure,", "gce": "Google Compute Engine,", "clusterapi": "Cluster API"}

Given = dict[str, str] | str


def given(page: str) -> dict[str, Given]:
    """Return what the page says to write for each cloud: tags, kube-env or annotations."""
    texts = {}
    for cloud, begins in CLOUDS.items():
        found = re.search(rf"^{begins}.*?^```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        if found is None:
            raise ValueError(f"the page has no text for {cloud}")
        texts[cloud] = _read(cloud, found[1])
    return texts


def _read(cloud: str, text: str) -> Given:
    if cloud == "gce":
        return text
    if cloud == "clusterapi":
        annotations: dict[str, str] = yaml.safe_load(text)["metadata"]["annotations"]
        return annotations
    pairs = (line.split(" = ") for line in text.splitlines())
    return {key.strip(): value.strip() for key, value in pairs}


def expected_node(source: Path, cloud: str, text: Given) -> dict[str, Any]:
    """Return the node that the cloud's package makes of a text; on failure raise an error with Go's output."""
    package = source / "cloudprovider" / cloud
    with tempfile.TemporaryDirectory() as scratch:
        overlay, node = Path(scratch, "overlay.json"), Path(scratch, "node.json")
        replaced = {str(path): "" for path in package.glob("*_test.go")}
        replaced[str(package / "shares_test.go")] = str(TESTS / cloud / "shares_test.go")
        overlay.write_text(json.dumps({"Replace": replaced}))
        command = [
            "go",
            "test",
            "-count=1",
            "-vet=off",
            f"-overlay={overlay}",
            "-run=TestShares",
            f"./cloudprovider/{cloud}",
        ]
        environment = {**os.environ, "GOWORK": "off", "GIVEN": json.dumps(text), "NODE": str(node)}
        done = subprocess.run(
            command, cwd=source, env=environment, capture_output=True, text=True, timeout=3600, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{cloud}: {(done.stdout + done.stderr)[-3000:]}")
        found: dict[str, Any] = json.loads(node.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--version", required=True, help="of the source, for the record")
    parser.add_argument("--only", choices=CLOUDS, action="append", help="this cloud, the rest of the record stays")
    arguments = parser.parse_args()
    for cloud, text in given(PAGE.read_text()).items():
        if cloud not in (arguments.only or CLOUDS):
            continue
        node = expected_node(arguments.source.resolve(), cloud, text)
        labels = node["metadata"]["labels"]
        labels.pop("kubernetes.io/hostname", None)  # random
        status = {"labels": labels, "allocatable": node["status"]["allocatable"]}
        record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        record[cloud] = {"version": arguments.version, "given": text, **status}
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        print(f"{cloud}: {status['allocatable'].get('gpushare.io/share', 'no')} shares", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
