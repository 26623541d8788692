"""Every rendered manifest, with several value sets, by server-side dry run on the real API server; helm lint."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from installed import lacking
from livecluster import ROOT

pytestmark = pytest.mark.integration

CHART = ROOT / "helm" / "gpushare"
# Kinds of other projects that a plain cluster does not know.
FOREIGN = {"PodMonitor", "ServiceMonitor", "PrometheusRule", "Certificate", "Issuer"}
VALUE_SETS = {
    "defaults": {},
    "demo": yaml.safe_load((ROOT / "hack" / "demo-values.yaml").read_text()),
    "everything": {
        "simulated": {"gpus": "H200:8"},
        "networkPolicy": {"enabled": True},
        "priorityClasses": {"quota": True},
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "envCapsFallback": True,
        "runtimeClassName": "nvidia",
        "watch": {"namespaces": ["default", "kube-system"]},
    },
    "small": {
        "dashboards": {"enabled": False},
        "admission": {"replicas": 1},
        "scheduler": {"replicas": 1, "image": {"tag": "v1.30.0"}},
        "nameOverride": "shared",
        "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": ["mine"]},
    },
}


def program(name: str) -> str:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpushare"
    path = Path(os.environ.get("GPUSHARE_CACHE") or base) / "bin" / name
    if not path.exists():
        lacking(name, f"no {name}: `make test` builds it")
    return str(path)


@pytest.fixture(scope="module")
def kubeconfig() -> str:
    done = subprocess.run(
        [str(ROOT / "hack" / "cluster"), "status"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        lacking("cluster", "no cluster: `make test` brings one up, or `hack/cluster up` as root")
    return str(json.loads(done.stdout)["kubeconfig"])


@pytest.mark.parametrize("name", sorted(VALUE_SETS))
def test_the_api_server_takes_every_manifest(name: str, kubeconfig: str, tmp_path: Path):
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps(VALUE_SETS[name]))
    helm = program("helm")
    lint = subprocess.run(
        [helm, "lint", "--strict", CHART, "-f", values], capture_output=True, text=True, check=False
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr
    # a namespace that exists; names apart from an installed release's
    where = ["-n", "kube-system", "--include-crds", "--kube-version", "1.35.4", "--no-hooks"]
    rendered = subprocess.run(
        [helm, "template", "dryrun", CHART, "-f", values, *where], capture_output=True, text=True, check=False
    )
    assert rendered.returncode == 0, rendered.stderr
    objects = [item for item in yaml.safe_load_all(rendered.stdout) if item and item["kind"] not in FOREIGN]
    assert len(objects) > 20
    body = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    done = subprocess.run(
        [
            program("kubectl"),
            f"--kubeconfig={kubeconfig}",
            "apply",
            "--server-side",
            "--force-conflicts",
            "--dry-run=server",
            "--validate=strict",
            "-f",
            "-",
        ],
        input=body,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("serverside-applied (server dry run)") == len(objects)
