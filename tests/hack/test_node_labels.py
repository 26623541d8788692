"""Our own clusters' nodes have a zone and a region, as every cloud's nodes have."""

from pathlib import Path

import pytest
import yaml
from devcluster import local
from devcluster.settings import HACK, NODE_LABELS


def test_kubelet_registers_the_local_clusters_node_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSHARE_STATE", str(tmp_path))
    (tmp_path / "conf").mkdir()
    cluster = local.LocalCluster()
    started: list[list[str]] = []
    monkeypatch.setattr(cluster.processes, "ensure", lambda _, argv: started.append([str(one) for one in argv]))
    monkeypatch.setattr(cluster, "wait_node", lambda: None)
    cluster._start_kubelet(Path("/kube"))
    (labels,) = (one.partition("=")[2] for one in started[0] if one.startswith("--node-labels="))
    assert dict(label.split("=") for label in labels.split(",")) == NODE_LABELS
    assert set(NODE_LABELS) == {"topology.kubernetes.io/zone", "topology.kubernetes.io/region"}


def test_so_does_kinds() -> None:
    (node,) = yaml.safe_load((HACK / "kind.yaml").read_text())["nodes"]
    assert node["labels"] == NODE_LABELS
