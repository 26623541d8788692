"""`gpushare explain`: its screens, its JSON, and the sentence where there is nothing to explain."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import troubles
from fakecluster import HttpApiServer, check_screen, pod_object

from gpushare.core.api import names
from gpushare.kube import EVENTS, GPUNODES, GPUSHARES, NODES, PODS

Call = Callable[..., tuple[int, str, str]]


def event(about: str, reason: str, note: str, at: str, controller: str = "gpushare.io/agent") -> dict[str, Any]:
    return {
        "metadata": {"name": f"{about}.{reason}", "namespace": "shop"},
        "regarding": {"kind": "Pod", "name": about, "namespace": "shop"},
        "reportingController": controller,
        "eventTime": at,
        "reason": reason,
        "note": note,
    }


@pytest.fixture
def told(busy: HttpApiServer) -> HttpApiServer:
    """The busy cluster with its node, its GpuShares and events."""
    busy.put(
        NODES,
        {
            "metadata": {"name": "node-a"},
            "status": {"allocatable": {"cpu": "64", "memory": "256Gi", names.SHARE_RESOURCE: "100"}},
        },
    )
    busy.put(
        GPUSHARES,
        {
            "metadata": {
                "name": "web",
                "namespace": "shop",
                "uid": "s1",
                "ownerReferences": [{"kind": "Pod", "uid": "u1"}],
            },
            "status": {"placements": [{"podUid": "u1", "pod": "serve-7c9f8d6b5-xk2lp"}]},
        },
    )
    busy.put(
        EVENTS,
        event("serve-7c9f8d6b5-xk2lp", "PromiseBroken", "makes 0.72 of 0.91", "2026-11-22T12:03:00.1Z"),
        event("serve-7c9f8d6b5-xk2lp", "Pulled", "an image", "2026-11-22T12:01:00Z", controller="kubelet"),
        event("web", "Throttled", "train-5d4c-p9 is slowed down to keep it", "2026-11-22T12:03:04.2Z"),
        event("late", "NoRoom", "0/1 GPU nodes fit", "2026-11-22T12:04:00Z"),
    )
    return busy


@pytest.mark.parametrize("pod", ["serve-7c9f8d6b5-xk2lp", "late"])
def test_screens(told: HttpApiServer, call: Call, pod: str) -> None:
    code, out, err = call("explain", pod)
    assert code == 0
    check_screen(
        f"explain-{pod.partition('-')[0]}", out + "".join(f"stderr: {line}\n" for line in err.splitlines())
    )


@pytest.mark.parametrize("pod", ["serve-7c9f8d6b5-xk2lp", "late"])
def test_forty_columns_are_enough(told: HttpApiServer, narrow: Call, pod: str) -> None:
    code, out, _ = narrow("explain", pod)
    assert code == 0
    check_screen(f"explain-{pod.partition('-')[0]}-40", out)


def test_a_place_that_it_would_not_get_again_is_told_with_the_refusal(told: HttpApiServer, call: Call) -> None:
    little = {"cpu": "100m", "memory": "256Gi", names.SHARE_RESOURCE: "100"}
    told.put(NODES, {"metadata": {"name": "node-a"}, "status": {"allocatable": little}})
    code, out, err = call("explain", "train-5d4c-p9", "-n", "shop")
    assert code == 0, err
    told_now = " ".join(out.split())
    assert "its own is not among them: asked again now, it would be refused: fits on none of 1 nodes;" in told_now


@pytest.mark.parametrize(
    ("shares", "seconds_ago", "says"),
    [
        ("0", 1, "the node's agent is not running, so kubelet has no shares to give there now"),
        ("100", 200, "the node's agent has not reported for more than 150 s"),
        ("100", 100, "needs 60% of one GPU, the freest has 25% free"),
    ],
)
def test_where_the_agent_is_away_or_silent_nothing_has_room(
    told: HttpApiServer, call: Call, tmp_path: Path, shares: str, seconds_ago: float, says: str
) -> None:
    """As the extender counts (tests/extender/test_silent_agents.py); a snapshot stays what it was when taken."""
    offered = {"cpu": "64", "memory": "256Gi", names.SHARE_RESOURCE: shares}
    told.put(NODES, {"metadata": {"name": "node-a"}, "status": {"allocatable": offered}})
    (gpunode,) = told.store.objects(GPUNODES).values()
    observed_at = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()
    told.put(GPUNODES, {**gpunode, "status": {**gpunode["status"], "observedAt": observed_at}})
    code, out, err = call("explain", "late")
    assert code == 0, err
    assert f"node-a: {says}" in " ".join(out.split())
    assert "would be on" not in out
    troubles.told("The pod waits", says)
    pods = tmp_path / "pods.json"
    pods.write_text(json.dumps(pod_object("next", "u9", share=60)))
    assert says in call("plan", "--pods", pods, "--json")[1]
    assert call("snapshot", "-o", tmp_path)[0] == 0
    _, planned, _ = call("plan", "--pods", pods, "--snapshot", tmp_path, "--json")
    assert says in planned
    saved = json.loads((tmp_path / "cluster.json").read_text())
    del saved["read_at"]  # as an older version wrote it
    (tmp_path / "cluster.json").write_text(json.dumps(saved))
    _, planned, _ = call("plan", "--pods", pods, "--snapshot", tmp_path, "--json")
    assert ("not reported" in planned, "not running" in planned) == (False, shares == "0")


def test_it_is_data_too(told: HttpApiServer, call: Call) -> None:
    found = json.loads(call("explain", "pod/shop/late", "-o", "json")[1])
    assert (found["placed"], found["standing"], found["waits_for"]) == (None, "Waits", "0/1 nodes are available")
    assert found["elsewhere"][0]["rejection"]["reason"] == "NotEnoughShare"
    assert found["request"]["share_percent"] == 60
    explained = json.loads(call("explain", "-n", "shop", "serve-7c9f8d6b5-xk2lp", "-o", "json")[1])
    assert [each["reason"] for each in explained["done"]] == ["PromiseBroken", "Throttled"]
    (gpu,) = explained["gpus"]
    assert [each["pod"] for each in gpu["tenants"]] == ["shop/serve-7c9f8d6b5-xk2lp", "shop/train-5d4c-p9"]
    assert gpu["tenants"][0]["seen"]["progress_ratio"] == 0.72


def test_a_workload_with_phases_is_told_of_with_what_the_worst_of_them_leaves(
    told: HttpApiServer, call: Call
) -> None:
    def tenant() -> dict[str, Any]:
        explained = json.loads(call("explain", "-n", "shop", "serve-7c9f8d6b5-xk2lp", "-o", "json")[1])
        [found] = [each for each in explained["gpus"][0]["tenants"] if each["is_subject"]]
        return found

    profile = {
        "gpuModel": "NVIDIA H200",
        "counters": {"sm_util": 0.3, "dram_bw_util": 0.1, "fp32_util": 0.05},
        "windowSeconds": 60.0,
    }
    web = told.store.objects(GPUSHARES)["shop/web"]
    told.put(GPUSHARES, {**web, "status": {**web["status"], "profile": profile}})
    assert "several kinds of work" not in call("explain", "serve-7c9f8d6b5-xk2lp")[1]
    assert tenant()["phases"] == 0
    heavy = {"counters": {"sm_util": 0.95, "fp32_util": 0.8}, "windowSeconds": 20.0}
    told.put(GPUSHARES, {**web, "status": {**web["status"], "profile": {**profile, "phases": [heavy]}}})
    output = " ".join(call("explain", "serve-7c9f8d6b5-xk2lp")[1].split())
    assert "shop/serve-7c9f8d6b5-xk2lp: several kinds of work in turn; promised and predicted is what" in output
    assert tenant()["phases"] == 1


def test_auto_is_told_with_the_share_that_it_stands_for(told: HttpApiServer, call: Call) -> None:
    pod = told.store.objects(PODS)["shop/late"]
    metadata = {**pod["metadata"], "annotations": {**pod["metadata"]["annotations"], names.FRACTION: "auto"}}
    told.put(PODS, {**pod, "metadata": metadata})
    code, out, _ = call("explain", "pod/shop/late")
    assert code == 0
    assert 'asks for "auto", which is 60% of a GPU' in out
    assert json.loads(call("explain", "pod/shop/late", "-o", "json")[1])["request"]["is_auto"] is True


def test_a_pod_that_a_gate_holds_back_is_told(told: HttpApiServer, call: Call) -> None:
    pod = told.store.objects(PODS)["shop/late"]
    told.put(PODS, {**pod, "spec": {**pod["spec"], "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}})
    _, out, _ = call("explain", "late")
    assert "it may not be scheduled yet: kueue.x-k8s.io/admission holds it back" in out


def test_where_there_is_nothing_to_explain_a_sentence_says_why(told: HttpApiServer, call: Call) -> None:
    code, out, err = call("explain", "nobody")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "there is no pod nobody in namespace shop" in err
    plain = {"metadata": {"name": "plain", "namespace": "shop", "uid": "p"}, "spec": {"containers": []}}
    told.put(PODS, plain)
    code, _, err = call("explain", "plain")
    assert (code, f"has no annotation {names.FRACTION}" in err) == (3, True)
    ended = told.store.objects(PODS)["shop/late"]
    told.put(PODS, {**ended, "status": {"phase": "Succeeded"}})
    code, _, err = call("explain", "late")
    assert (code, "has ended (Succeeded)" in err) == (3, True)
    told.forbidden = {"/nodes"}
    code, _, err = call("explain", "serve-7c9f8d6b5-xk2lp")
    assert (code, err.count("\n")) == (4, 1)


def test_a_cluster_without_gpushare(told: HttpApiServer, call: Call) -> None:
    told.absent = {"gpunodes"}
    told.store.served.clear()
    code, _, err = call("explain", "late")
    assert (code, "this cluster has no gpushare" in err) == (3, True)
