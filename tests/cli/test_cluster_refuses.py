"""Every command that asks a cluster, where none answers as it should: one line, its status, and what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakecluster import HttpApiServer, kubeconfig, pod_object

from gpushare.core.api import names
from gpushare.kube.fake import ObjectStore

Call = Callable[..., tuple[int, str, str]]
COMMANDS = ("top", "pods", "gpus", "gain", "explain", "profile show", "snapshot", "plan")
OF_EVERYTHING = frozenset({"explain", "snapshot", "plan"})  # these read what a decision depends on


def without_gpushare(cluster: HttpApiServer) -> None:
    cluster.store.served.clear()


def other_version(cluster: HttpApiServer) -> None:
    cluster.store.served[names.GROUP] = ("v1",)


def forbidden(cluster: HttpApiServer) -> None:
    cluster.forbidden = {"pods", "pods/late", "nodes", "gpunodes", "gpushares", "configmaps"}


def without_gpushare_and_rights(cluster: HttpApiServer) -> None:
    """The server looks at rights first, so that it answers 403 where there is no such type."""
    without_gpushare(cluster)
    cluster.forbidden = {"gpunodes", "gpushares", "nodes", "v1/pods", "configmaps"}


def other_version_and_no_rights(cluster: HttpApiServer) -> None:
    without_gpushare_and_rights(cluster)
    other_version(cluster)


def broken(cluster: HttpApiServer) -> None:
    cluster.broken = True


def gone(cluster: HttpApiServer) -> None:
    cluster.kubeconfig.write_text(kubeconfig("http://127.0.0.1:1"))


INSTALL = "install the chart helm/gpushare, or choose another cluster with --context"
SAME_RELEASE = "use the kubectl-gpushare of the same release"
REFUSALS = {
    without_gpushare: (3, "this cluster has no gpushare", INSTALL),
    other_version: (6, f"the cluster's gpushare speaks v1 and this program {names.VERSION}", SAME_RELEASE),
    forbidden: (4, 'User "ann" cannot list ', "ask for the rights of the ClusterRole "),
    without_gpushare_and_rights: (3, "this cluster has no gpushare", INSTALL),
    other_version_and_no_rights: (6, "the cluster's gpushare speaks v1", SAME_RELEASE),
    broken: (5, "the API server is in trouble: etcd is away", "try again in a moment"),
    gone: (5, "the API server did not answer", "is this the right cluster (--context), and is it up?"),
}


@pytest.fixture
def words(tmp_path: Path) -> dict[str, tuple[str, ...]]:
    """Each command with the arguments that it needs."""
    pods = tmp_path / "pods.json"
    pods.write_text(json.dumps(pod_object("next", "u9", share=60)))
    more = {"explain": ("late",), "snapshot": ("-o", f"{tmp_path}/taken"), "plan": ("--pods", str(pods))}
    return {command: (*command.split(), *more.get(command, ())) for command in COMMANDS}


@pytest.mark.parametrize("refuse", REFUSALS, ids=lambda refuse: refuse.__name__)
@pytest.mark.parametrize("command", COMMANDS)
def test_one_line_its_status_and_what_to_do(
    busy: HttpApiServer,
    call: Call,
    words: dict[str, tuple[str, ...]],
    command: str,
    refuse: Callable[[HttpApiServer], None],
    tmp_path: Path,
) -> None:
    refuse(busy)
    code, out, err = call(*words[command])
    status, what, advice = REFUSALS[refuse]
    assert (code, out, err.count("\n")) == (status, "", 1), err
    assert err.startswith("gpushare: ")
    assert what in err
    assert advice in err
    if refuse is forbidden:
        role = "gpushare-explain" if command in OF_EVERYTHING else "gpushare-view"
        assert f"{advice}{role}" in err
    assert not (tmp_path / "taken").exists()


def test_what_may_be_given_instead_of_a_cluster_that_is_away_is_a_sentence_of_its_own(
    busy: HttpApiServer, call: Call, words: dict[str, tuple[str, ...]]
) -> None:
    """Before: "and is it up?, or give --snapshot or --nodes"."""
    gone(busy)
    _, _, err = call(*words["plan"])
    assert err.endswith("is this the right cluster (--context), and is it up? Or give --snapshot or --nodes\n")


@pytest.mark.parametrize("item", [3, None, {}, {"metadata": 3}], ids=json.dumps)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_list_whose_items_are_no_objects_is_no_api_servers(
    busy: HttpApiServer,
    call: Call,
    words: dict[str, tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    item: Any,
) -> None:
    """Before: status 70, which means a defect of ours."""
    respond = ObjectStore.respond

    def malformed(store: ObjectStore, method: str, *rest: Any) -> Any:
        found = respond(store, method, *rest)
        return {**found, "items": [item]} if "items" in found else found

    monkeypatch.setattr(ObjectStore, "respond", malformed)
    code, out, err = call(*words[command])
    assert (code, out, err.count("\n")) == (5, "", 1), err
    assert "what answers is no API server" in err


@pytest.mark.parametrize("command", ["gpus", "gain", "snapshot"])
def test_a_cluster_without_a_gpu_is_status_3(
    cluster: HttpApiServer, call: Call, words: dict[str, tuple[str, ...]], command: str
) -> None:
    """As of a report of a snapshot (tests/cli/test_report.py)."""
    code, out, err = call(*words[command])
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "no node has a GPU that gpushare manages: do the agent's pods run" in err


@pytest.mark.parametrize(("command", "key"), [("gpus", None), ("gain", "gpus")])
def test_what_is_for_programs_stays_parsable_where_there_is_no_gpu(
    cluster: HttpApiServer, call: Call, command: str, key: str | None
) -> None:
    code, out, err = call(command, "-o", "json")
    assert (code, err.count("\n")) == (3, 1)
    found = json.loads(out)
    assert (found == []) if key is None else (found[key] == 0)
