"""`explain`, `plan`, `snapshot` and `sim cluster` decide by the interference models of the cluster's release."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakecluster import HttpApiServer, pod_object

from gpushare.cli import sim_cluster
from gpushare.cli.live import cluster_of
from gpushare.cli.snapshot import read_snapshot
from gpushare.core.api import GpuNode, GpuNodeStatus, GpuStatus, names
from gpushare.data import default_model
from gpushare.kube import CONFIGMAPS, GPUNODES, GPUSHARES, NODES, PODS
from gpushare.runtime.models import MODELS_VARIABLE
from gpushare.sim.cluster import fill
from gpushare.twin.contention import WORKLOADS

Call = Callable[..., tuple[int, str, str]]
A100 = "NVIDIA A100-SXM4-80GB"
PART = {"app.kubernetes.io/part-of": "gpushare"}
NOT_KNOWN = "the release's models of other GPUs are not known, so the shipped model is used"
TRACE = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\nnew,1000,1,1,100\n"


def artefact() -> str:
    """A model of the A100 whose intervals are half as wide as the shipped one's on its own GPU."""
    shipped = default_model()
    return replace(shipped, gpu_model=A100, errors=shipped.errors / 2).to_json()


def share(name: str, uid: str, workload: str) -> dict[str, Any]:
    counters = WORKLOADS[workload].solo.as_dict()
    return {
        "metadata": {"name": name, "namespace": "shop", "uid": f"s-{uid}", "ownerReferences": [{"uid": uid}]},
        "status": {"profile": {"gpuModel": A100, "counters": counters, "windowSeconds": 10.0}},
    }


@pytest.fixture
def shared(cluster: HttpApiServer) -> HttpApiServer:
    """A node with one A100, on which two known workloads run."""
    offered = {"cpu": "64", "memory": "256Gi", names.SHARE_RESOURCE: "100"}
    cluster.put(NODES, {"metadata": {"name": "node-a"}, "status": {"allocatable": offered}})
    gpu = GpuStatus(uuid="GPU-0", index=0, model=A100, memory_mib=81_920)
    cluster.put(GPUNODES, GpuNode("node-a", GpuNodeStatus.of((gpu,))).to_object())
    cluster.put(
        PODS, pod_object("one", "u1", gpu="GPU-0", share=30), pod_object("two", "u2", gpu="GPU-0", share=40)
    )
    cluster.put(GPUSHARES, share("one", "u1", "bert-train"), share("two", "u2", "stream"))
    return cluster


def install(cluster: HttpApiServer, models: dict[str, str]) -> None:
    """Put what the chart makes of its value `models`, with its settings and a pod of the scheduler."""
    metadata = {"namespace": "system", "labels": {names.GROUP + "/settings": "true"}}
    cluster.put(CONFIGMAPS, {"metadata": {"name": "ours-settings", **metadata}, "data": {}})
    labels = PART | {"app.kubernetes.io/component": "scheduler"}
    spec: dict[str, Any] = {
        "containers": [{"name": "e", "envFrom": [{"configMapRef": {"name": "ours-settings"}}]}],
        "volumes": [{"name": "config", "configMap": {"name": "ours-scheduler"}}],
    }
    if models:
        spec["volumes"].append({"name": "models", "configMap": {"name": "ours-models"}})
        metadata = {"namespace": "system", "labels": PART | {"app.kubernetes.io/component": "models"}}
        cluster.put(CONFIGMAPS, {"metadata": {"name": "ours-models", **metadata}, "data": models})
    scheduler = {"name": "scheduler-0", "namespace": "system", "uid": "c", "labels": labels}
    cluster.put(PODS, {"metadata": scheduler, "spec": spec})


def width(call: Call) -> tuple[float, str]:
    """How wide the predicted interval of a pod is, and what is noted."""
    code, out, err = call("explain", "one", "-o", "json")
    assert code == 0, err
    [tenant] = [each for each in json.loads(out)["gpus"][0]["tenants"] if each["is_subject"]]
    return tenant["predicted"]["upper"] - tenant["predicted"]["lower"], err


@pytest.fixture
def shipped_width(shared: HttpApiServer, call: Call) -> float:
    install(shared, {})
    found, err = width(call)
    assert err == ""
    return found


@pytest.mark.parametrize("forbidden", [set(), {"v1/configmaps"}], ids=["lists-all", "gets-by-name"])
def test_the_models_of_the_release_predict(
    shared: HttpApiServer, call: Call, shipped_width: float, forbidden: set[str]
) -> None:
    install(shared, {"a100.json": artefact()})
    shared.forbidden = forbidden
    found, err = width(call)
    assert (found < shipped_width / 2, err) == (True, "")


@pytest.mark.parametrize("models", [{}, {"a100.json": "{"}], ids=["none", "some"])
def test_who_may_not_read_them_is_told_if_there_are_any(
    shared: HttpApiServer, call: Call, shipped_width: float, models: dict[str, str]
) -> None:
    """As under the ClusterRole of an older chart."""
    install(shared, models)
    shared.forbidden = {"v1/configmaps", "configmaps/ours-models"}
    found, err = width(call)
    assert found == shipped_width
    assert (NOT_KNOWN in err, "ask for the ClusterRole gpushare-explain" in err) == (bool(models), bool(models))


def test_models_that_are_gone_are_none(shared: HttpApiServer, call: Call, shipped_width: float) -> None:
    install(shared, {"a100.json": artefact()})
    shared.forbidden = {"v1/configmaps"}
    shared.store.remove(CONFIGMAPS, "system/ours-models")
    assert width(call) == (shipped_width, "")


@pytest.fixture
def uncached() -> Iterator[None]:
    """The shipped model is read with what the test puts beside it, and without that afterwards."""
    default_model.cache_clear()
    yield
    default_model.cache_clear()


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("text", ["{", "[]", "", '{"artefact": "gpushare.io/interference-model", "version": 3}'])
def test_a_damaged_model_is_told_in_the_extenders_words(
    shared: HttpApiServer,
    call: Call,
    shipped_width: float,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(shared, {"l4.json": text, "notes.txt": "not a model, as the extender sees it"})
    found, err = width(call)
    (tmp_path / "l4.json").write_text(text)
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path))
    default_model.cache_clear()
    assert default_model().others == ()
    [by_extender] = [record.getMessage() for record in caplog.records if record.name == "gpushare.data"]
    assert by_extender.startswith("the model l4.json cannot be used: ")
    assert (found, " ".join(err.split())) == (shipped_width, by_extender)


def fitted_on(folder: Path) -> str:
    """The GPU model whose interference model decides about A100s of a snapshot."""
    return cluster_of(read_snapshot(folder)).model().for_gpu(A100).gpu_model


def forgets_models(folder: Path) -> None:
    """Leave a snapshot as an older version wrote it."""
    saved = json.loads((folder / "cluster.json").read_text())
    del saved["models"]
    (folder / "cluster.json").write_text(json.dumps(saved))


def test_a_snapshot_keeps_them(
    shared: HttpApiServer, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Surer of what the two on the GPU keep, the release's model lets a third one in."""
    install(shared, {"a100.json": artefact()})
    code, _, err = call("snapshot", "-o", tmp_path)
    assert (code, err) == (0, "")
    assert read_snapshot(tmp_path).models == {"a100.json": artefact()}
    (tmp_path / "p.csv").write_text(TRACE)
    filled_by = []

    def noting(*arguments: Any, **options: Any) -> Any:
        filled_by.append(options["model"]().for_gpu(A100).gpu_model)
        return fill(*arguments, **options)

    monkeypatch.setattr(sim_cluster, "fill", noting)
    for is_older in (False, True):
        if is_older:
            forgets_models(tmp_path)
        assert fitted_on(tmp_path) == (default_model().gpu_model if is_older else A100)
        words = ["--snapshot", tmp_path, "--pods", tmp_path / "p.csv", "--json"]
        code, out, err = call("plan", *words)
        assert (code, NOT_KNOWN in err, "take it again" in err) == (int(is_older), is_older, is_older), out
        code, _, err = call("sim", "cluster", *words)
        assert (code, NOT_KNOWN in err, "take it again" in err) == (0, is_older, is_older)
    assert filled_by == [A100, default_model().gpu_model]


@pytest.mark.usefixtures("uncached")
def test_a_users_own_models_count_only_where_the_releases_are_not_known(
    shared: HttpApiServer, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(shared, {})
    own = tmp_path / "own"
    own.mkdir()
    (own / "a100.json").write_text(artefact())
    monkeypatch.setenv(MODELS_VARIABLE, str(own))
    default_model.cache_clear()
    assert call("snapshot", "-o", tmp_path)[0] == 0
    assert fitted_on(tmp_path) == "NVIDIA H200"
    forgets_models(tmp_path)
    assert fitted_on(tmp_path) == A100
    (note,) = cluster_of(read_snapshot(tmp_path)).notes
    assert note.startswith(f"{NOT_KNOWN}, with those of $GPUSHARE_MODELS: ")
