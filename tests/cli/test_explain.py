"""`gpushare explain`: its screens, its JSON, and the sentence where there is nothing to explain."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import troubles
import yaml
from fakecluster import HttpApiServer, check_screen, pod_object

from gpushare.cli.explain_words import verdicts
from gpushare.core.api import TenantStatus, names
from gpushare.core.placement import ExplainedGpu, ExplainedTenant
from gpushare.kube import CONFIGMAPS, CORE_EVENTS, GPUNODES, GPUSHARES, NODES, PODS

Call = Callable[..., tuple[int, str, str]]
OF_THE_CLUSTER = frozenset({"v1/nodes", "v1/pods", "v1/configmaps"})
"""What the cluster's own role `edit` in one namespace, with gpushare-view, does not allow."""
OF_A_DECISION = ("policy", "now", "standing", "nodes", "fits_on", "better", "elsewhere", "kept")


def event(about: str, reason: str, note: str, at: str, controller: str = "gpushare.io/agent") -> dict[str, Any]:
    return {
        "metadata": {"name": f"{about}.{reason}", "namespace": "shop"},
        "involvedObject": {"kind": "Pod", "name": about, "namespace": "shop"},
        "reportingComponent": controller,
        "eventTime": at,
        "reason": reason,
        "message": note,
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
        CORE_EVENTS,
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


def test_another_pod_of_the_same_name_has_another_story(told: HttpApiServer, call: Call) -> None:
    """A StatefulSet's pod is made anew under its name, with another uid; its events stay for an hour."""
    for uid, about, reason in (
        ("u0", "serve-7c9f8d6b5-xk2lp", "PodLostInFault"),
        ("s0", "web", "Retracted"),
        ("u1", "serve-7c9f8d6b5-xk2lp", "Placed"),
        ("s1", "web", "PromiseKept"),
    ):
        found = event(about, reason, "", "2026-11-22T12:05:00Z")
        told.put(CORE_EVENTS, {**found, "involvedObject": {**found["involvedObject"], "uid": uid}})
    happened = json.loads(call("explain", "serve-7c9f8d6b5-xk2lp", "-o", "json")[1])["done"]
    assert {each["reason"] for each in happened} == {"PromiseBroken", "Throttled", "Placed", "PromiseKept"}


def reported(told: HttpApiServer, seconds_ago: float) -> str:
    """Have the node's agent report so long ago."""
    (gpunode,) = told.store.objects(GPUNODES).values()
    observed_at = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()
    told.put(GPUNODES, {**gpunode, "status": {**gpunode["status"], "observedAt": observed_at}})
    return observed_at


@pytest.mark.parametrize("forbidden", [frozenset(), OF_THE_CLUSTER])
def test_how_the_pods_of_a_silent_agent_fare_is_not_known(
    told: HttpApiServer, call: Call, forbidden: frozenset[str]
) -> None:
    told.forbidden |= forbidden
    pod = "shop/serve-7c9f8d6b5-xk2lp"
    reported(told, 100)
    assert "makes 0.72, promised" in call("explain", pod)[1]
    since = reported(told, 200)
    code, out, err = call("explain", pod)
    assert code == 0, err
    assert "makes 0.72, promised" not in out
    assert f"the agent of node node-a has not reported since {since}" in err


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
    reported(told, seconds_ago)
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


@pytest.mark.parametrize("words", ["", "/", "pod/", "shop/", ".", "A_b"])
def test_what_is_no_name_of_a_pod_is_told_so(told: HttpApiServer, call: Call, words: str) -> None:
    """Before: `explain "shop/$POD"` without a POD asked for a list and ended as a defect of ours."""
    code, out, err = call("explain", words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "is no name of a pod" in err


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


@pytest.mark.parametrize("pod", ["serve-7c9f8d6b5-xk2lp", "late"])
def test_who_may_not_read_the_whole_cluster_is_told_what_the_pods_own_objects_say(
    told: HttpApiServer, call: Call, pod: str
) -> None:
    whole = json.loads(call("explain", pod, "-o", "json")[1])
    told.forbidden = set(OF_THE_CLUSTER)
    code, out, err = call("explain", pod)
    assert (code, err.count("\n")) == (0, 1)
    assert "Why there" not in out
    assert "Why not elsewhere" not in out
    check_screen(f"explain-{pod.partition('-')[0]}-own", out + f"stderr: {err}")
    code, out, err = call("explain", pod, "-o", "json")
    assert (code, "ask for the ClusterRole gpushare-explain" in err) == (0, True)
    own = json.loads(out)
    assert list(own) == list(whole)
    assert {key: own[key] for key in OF_A_DECISION} == dict.fromkeys(OF_A_DECISION)
    for key in ("placed", "done", "waits_for"):
        assert own[key] == whole[key]
    _, as_yaml, _ = call("explain", pod, "-o", "yaml")
    assert yaml.safe_load(as_yaml) == own


def test_without_gpunodes_its_gpushare_tells_of_the_pod(told: HttpApiServer, call: Call) -> None:
    web = told.store.objects(GPUSHARES)["shop/web"]
    placement = {**web["status"]["placements"][0], "promise": 0.9, "progress": 0.7}
    told.put(GPUSHARES, {**web, "status": {"placements": [placement]}})
    told.forbidden = {*OF_THE_CLUSTER, "gpunodes", "gpunodes/node-a", "v1alpha1/gpushares"}
    code, out, err = call("explain", "serve-7c9f8d6b5-xk2lp", "-o", "json")
    (gpu,) = json.loads(out)["gpus"]
    (tenant,) = gpu["tenants"]
    assert (code, gpu["uuid"], tenant["is_subject"]) == (0, "GPU-0", True)
    assert (tenant["promise_ratio"], tenant["seen"]["progress_ratio"]) == (0.9, 0.7)
    assert "you may not read GpuNodes, so its GPU has no name here" in err
    told.forbidden |= {"gpushares"}
    code, out, err = call("explain", "serve-7c9f8d6b5-xk2lp", "-o", "json")
    assert (code, err.count("\n"), err.count("gpushare-view")) == (0, 3, 2)
    (tenant,) = json.loads(out)["gpus"][0]["tenants"]
    assert (tenant["share_percent"], tenant["promise_ratio"], tenant["seen"]) == (25, None, None)


def test_the_role_for_explain_reads_the_settings_by_the_name_that_the_scheduler_has(
    told: HttpApiServer, call: Call
) -> None:
    """It may get the release's ConfigMap, not list those of the cluster."""
    labels = {"app.kubernetes.io/part-of": "gpushare", "app.kubernetes.io/component": "scheduler"}
    scheduler = {
        "metadata": {"name": "scheduler-0", "namespace": "system", "uid": "c", "labels": labels},
        "spec": {"containers": [{"name": "e", "envFrom": [{"configMapRef": {"name": "ours-settings"}}]}]},
    }
    told.put(PODS, scheduler)
    told.put(
        CONFIGMAPS,
        {
            "metadata": {
                "name": "ours-settings",
                "namespace": "system",
                "labels": {"gpushare.io/settings": "true"},
            },
            "data": {"GPUSHARE_POLICY": "bestfit"},
        },
    )
    told.forbidden = {"v1/configmaps"}
    code, out, err = call("explain", "late", "-o", "json")
    assert (code, json.loads(out)["policy"], "settings" in err) == (0, "bestfit", False)
    told.forbidden |= {"configmaps/ours-settings"}
    code, out, err = call("explain", "late", "-o", "json")
    assert (code, json.loads(out)["policy"], "gpushare-explain" in err) == (0, None, True)
    told.store.remove(CONFIGMAPS, "system/ours-settings")
    told.forbidden = {"v1/configmaps"}
    code, out, err = call("explain", "late", "-o", "json")
    assert (code, json.loads(out)["standing"]) == (0, "Waits")
    assert "the chart's defaults are assumed" in err


def test_a_process_that_keeps_an_older_cap_is_told_of() -> None:
    def tenant(pod: str, in_force: int | None) -> ExplainedTenant:
        seen = TenantStatus(pod_uid=pod, thread_percentage=30, thread_percentage_in_force=in_force)
        return ExplainedTenant(
            pod,
            is_subject=False,
            share_percent=25,
            thread_percentage=30,
            promise_ratio=None,
            is_known=True,
            predicted=None,
            seen=seen,
        )

    gpu = ExplainedGpu("GPU-1", "n1", "", (tenant("shop/a", 80), tenant("shop/b", 30), tenant("shop/c", None)))
    assert verdicts(gpu) == ["shop/a runs under 80% of the threads until its next process."]
