"""The chart renders, with any values, into what docs/design.md promises; wrong values are refused."""

import base64
import importlib
import importlib.util
import json
import re
import ssl
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from livecluster import wait_for
from podmonitors import scrape_jobs
from realprometheus import Prometheus

from gpushare.core.api import names
from gpushare.extender import options as extender_options
from gpushare.mps import host as mps_host
from gpushare.runtime.certificates import DIRECTORY_VARIABLE, Certificate
from gpushare.runtime.http import MetricsServer, metrics_route, metrics_token, registry_of
from gpushare.twin.mps import stopped
from gpushare_deviceplugin import options as agent_options
from gpushare_deviceplugin.allocation import DeviceListStrategy
from gpushare_operator.admission import __main__ as admission_main
from gpushare_operator.running import Environment

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "gpushare"
Json = dict[str, Any]
Render = Any  # conftest's fixture
MADE_ON = "gpushare.io/made-on"

VALUE_SETS: dict[str, Json] = {
    "defaults": {},
    "simulated": {"simulated": {"gpus": "H200:2"}, "image": {"pullPolicy": "Never"}},
    "everything": {
        "certManager": {"enabled": True},
        "metrics": {"tokenSecret": "scrape", "tls": {"enabled": True}},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True},
        "networkPolicy": {"enabled": True, "metricsFrom": [{"namespaceSelector": {}}]},
        "priorityClasses": {"quota": True},
        "watch": {"namespaces": ["a", "b"]},
        "runtimeClassName": "nvidia",
        "nodes": {"selector": {"pool": "gpu"}},
        "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": ["one"]},
        "scheduler": {
            "command": ["/usr/local/bin/kube", "kube-scheduler"],
            "tolerations": [{"operator": "Exists"}],
        },
        "operator": {"podAnnotations": {"a": "b"}},
        "envCapsFallback": True,
        "policy": {"chargeMemory": False, "restricted": ["latency", "isolated"], "refuseAboveBaseline": True},
    },
    "bare": {
        "crds": {"install": False},
        "dashboards": {"enabled": False},
        "priorityClasses": {"node": "", "cluster": ""},
        "admission": {"replicas": 1},
        "scheduler": {"replicas": 1},
        "nodes": {"affinity": {}, "tolerations": []},
        "nameOverride": "share",
    },
}
VALUES = pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS.keys())


def of_kind(objects: list[Json], kind: str, name: str | None = None) -> list[Json]:
    return [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]


def workloads(objects: list[Json]) -> dict[str, Json]:
    """Part -> its Deployment or DaemonSet."""
    found = of_kind(objects, "Deployment") + of_kind(objects, "DaemonSet")
    return {o["metadata"]["labels"]["app.kubernetes.io/component"]: o for o in found}


def containers(workload: Json) -> list[Json]:
    return workload["spec"]["template"]["spec"]["containers"]


@VALUES
def test_the_chart_lints(helm: Any, values: Json, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    done = helm("lint", "--strict", str(CHART), "-f", str(file))
    assert done.returncode == 0, done.stdout


@VALUES
def test_every_part_is_there_once_and_objects_have_unique_names(render: Render, values: Json) -> None:
    objects = render(values)
    assert set(workloads(objects)) == {"operator", "admission", "scheduler", "agent", "mps"}
    keys = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(keys) == len(set(keys))
    for part, workload in workloads(objects).items():
        account = workload["spec"]["template"]["spec"]["serviceAccountName"]
        assert account.endswith(part)
        assert of_kind(objects, "ServiceAccount", account)


@VALUES
def test_selectors_find_their_pods(render: Render, values: Json) -> None:
    objects = render(values)
    pods = [w["spec"]["template"]["metadata"]["labels"] for w in workloads(objects).values()]
    selectors = [w["spec"]["selector"]["matchLabels"] for w in workloads(objects).values()]
    selectors += [o["spec"]["selector"] for o in of_kind(objects, "Service")]
    for kind, path in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        selectors += [o["spec"][path]["matchLabels"] for o in of_kind(objects, kind)]
    for selector in selectors:
        assert sum(selector.items() <= labels.items() for labels in pods) == 1, selector
    for monitor in of_kind(objects, "PodMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        assert all(wanted.items() <= labels.items() for labels in pods)


@VALUES
def test_no_container_may_gain_privileges_and_most_run_without_root(render: Render, values: Json) -> None:
    for part, workload in workloads(render(values)).items():
        pod = workload["spec"]["template"]["spec"]
        for container in pod["containers"]:
            security = {**pod.get("securityContext", {}), **container["securityContext"]}
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert security["runAsNonRoot"] is (part not in ("agent", "mps"))
            assert container["resources"]["requests"]
        assert not pod.get("hostNetwork")
        assert not pod.get("hostIPC")
        assert pod.get("hostPID", False) is (part in ("agent", "mps"))


def test_the_agent_may_end_processes_only_where_its_policy_says_so(render: Render) -> None:
    (agent,) = containers(workloads(render({"agent": {"outsideMps": "end"}}))["agent"])
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["KILL"]}
    assert {"name": "GPUSHARE_OUTSIDE_MPS", "value": "end"} in agent["env"]
    (agent,) = containers(workloads(render({}))["agent"])
    assert {"name": "GPUSHARE_OUTSIDE_MPS", "value": "event"} in agent["env"]
    assert {"name": "GPUSHARE_EXCLUSIVE_PROCESS", "value": "false"} in agent["env"]
    both = render({"agent": {"outsideMps": "end", "exclusiveProcess": True}})
    (agent,) = containers(workloads(both)["agent"])
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["KILL", "SYS_ADMIN"]}
    assert agent_options.parse_options(
        [], {v["name"]: v.get("value", "n") for v in agent["env"]}
    ).exclusive_process


@VALUES
def test_host_paths_are_the_few_that_the_node_parts_need(render: Render, values: Json) -> None:
    for part, workload in workloads(render(values)).items():
        volumes = workload["spec"]["template"]["spec"].get("volumes", [])
        paths = {v["hostPath"]["path"] for v in volumes if "hostPath" in v}
        kubelet = {"/var/lib/kubelet/device-plugins", "/var/lib/kubelet/pod-resources"}
        cdi = set() if values.get("simulated") else {"/var/run/cdi"}
        expected = {
            "agent": {names.HOST_DIRECTORY} | kubelet | cdi,
            "mps": {names.HOST_DIRECTORY, "/sys/fs/cgroup"},
        }
        assert paths == expected.get(part, set())


def test_the_agent_looks_at_cdi_and_at_the_toolkit_where_it_is_told_to(render: Render) -> None:
    own = {"cdiDirectories": ["/var/run/cdi", "/etc/cdi"], "toolkitDirectory": "/etc/nvidia-container-runtime"}
    workload = workloads(render({"agent": own}))["agent"]
    (agent,) = containers(workload)
    environment = {v["name"]: v.get("value", "some-node") for v in agent["env"]}
    options = agent_options.parse_options([], environment)
    assert options.device_list_strategy is DeviceListStrategy.AUTO
    mounts = {mount["name"]: mount for mount in agent["volumeMounts"]}
    for volume in workload["spec"]["template"]["spec"]["volumes"]:
        path = volume.get("hostPath", {}).get("path")
        if path in own["cdiDirectories"]:
            assert mounts[volume["name"]] == {"name": volume["name"], "mountPath": path, "readOnly": True}
        if path == "/etc/nvidia-container-runtime":
            inside = Path(mounts[volume["name"]]["mountPath"])
            assert mounts[volume["name"]]["readOnly"]
            assert options.runtime_files.toolkit == inside / "config.toml"
    assert {"cdi-0", "cdi-1", "toolkit"} <= mounts.keys()
    assert [str(each) for each in options.runtime_files.cdi] == own["cdiDirectories"]


@pytest.mark.parametrize("enabled", [True, False])
def test_only_the_mps_host_may_write_cgroups_and_only_for_the_throttle(render: Render, enabled: bool) -> None:
    parts = workloads(render({"throttle": {"enabled": enabled}}))
    (container,) = containers(parts["mps"])
    host = mps_host._parse([*container["command"][3:], *container["args"]])
    assert host.no_throttle is not enabled
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in parts["mps"]["spec"]["template"]["spec"]["volumes"]}
    assert mounts.keys() == volumes.keys()
    if enabled:
        assert volumes["cgroup"]["hostPath"]["path"] == "/sys/fs/cgroup"
        assert mounts["cgroup"] == {"name": "cgroup", "mountPath": str(host.cgroup_root)}, "writable"
        assert host.cgroup_root == stopped.NODE_CGROUPS, "the twin sees who is frozen"
    else:
        assert "cgroup" not in volumes


def test_an_upgrade_never_restarts_the_mps_host(render: Render) -> None:
    mps = workloads(render())["mps"]
    assert mps["spec"]["updateStrategy"] == {"type": "OnDelete"}
    (container,) = containers(mps)
    assert "livenessProbe" not in container
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"  # /healthz is 200 whatever happens
    assert mps["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_the_mps_host_may_ask_the_api_for_nothing(render: Render) -> None:
    bound = [s["name"] for o in render() if o["kind"].endswith("RoleBinding") for s in o["subjects"]]
    assert "gpushare-mps" not in bound
    assert {"gpushare-agent", "gpushare-operator", "gpushare-admission", "gpushare-scheduler"} == set(bound)


FORBIDDEN_RESOURCES = {"secrets", "*", "serviceaccounts", "roles", "clusterroles", "nodes/proxy", "pods/exec"}


@VALUES
def test_roles_name_what_they_need(render: Render, values: Json) -> None:
    objects = render(values)
    for role in of_kind(objects, "ClusterRole") + of_kind(objects, "Role"):
        for rule in role["rules"]:
            assert not FORBIDDEN_RESOURCES & set(rule["resources"]), role["metadata"]["name"]
            assert "*" not in rule["verbs"]
            assert "*" not in rule["apiGroups"]


def test_watching_few_namespaces_gives_the_operator_rights_in_these_only(render: Render) -> None:
    objects = render({"watch": {"namespaces": ["a", "b"]}})
    everywhere = {o["roleRef"]["name"] for o in of_kind(objects, "ClusterRoleBinding")}
    assert "gpushare-operator" not in everywhere
    here = {o["metadata"]["namespace"] for o in of_kind(objects, "RoleBinding", "gpushare-operator")}
    assert here == {"a", "b"}
    (operator,) = containers(workloads(objects)["operator"])
    assert operator["args"] == ["--namespace=a", "--namespace=b"]


@pytest.mark.parametrize(("retraction", "evicts"), [("evict", True), ("none", False)])
def test_the_operator_may_evict_only_where_it_is_to_retract(
    render: Render, retraction: str, *, evicts: bool
) -> None:
    objects = render({"policy": {"retraction": retraction, "retractionsPerMinute": 5}})
    (role,) = of_kind(objects, "ClusterRole", "gpushare-operator")
    rights = [rule["verbs"] for rule in role["rules"] if "pods/eviction" in rule["resources"]]
    assert rights == ([["create"]] if evicts else [])
    replacing = render({"policy": {"retraction": retraction, "hygiene": {"stalled": "replace"}}})
    (role,) = of_kind(replacing, "ClusterRole", "gpushare-operator")
    assert any("pods/eviction" in rule["resources"] for rule in role["rules"]), "replaced pods are evicted too"
    (agent,) = containers(workloads(replacing)["agent"])
    told = {one["name"]: one.get("value") for one in agent["env"]}
    assert (told["GPUSHARE_HYGIENE_STALLED"], told["GPUSHARE_HYGIENE_FAULT"]) == ("replace", "report")
    (operator,) = containers(workloads(objects)["operator"])
    given = {one["name"]: one.get("value") for one in operator["env"]}
    assert (given["GPUSHARE_RETRACTION"], given["GPUSHARE_RETRACTIONS_PER_MINUTE"]) == (retraction, "5")


@pytest.mark.parametrize(
    ("version", "tag"),
    [
        ("1.35.4", "v1.35.4"),
        ("v1.31.5-gke.1023000", "v1.31.5"),
        ("v1.30.9-eks-8cce635", "v1.30.9"),
        ("v1.33.1+k3s1", "v1.33.1"),
    ],
)
def test_kube_scheduler_is_of_the_clusters_version(render: Render, version: str, tag: str) -> None:
    scheduler = workloads(render(kube_version=version))["scheduler"]
    images = [c["image"] for c in containers(scheduler)]
    assert f"registry.k8s.io/kube-scheduler:{tag}" in images


def test_a_cluster_before_1_30_is_refused(render: Render) -> None:
    with pytest.raises(ValueError, match="kubeVersion"):
        render(kube_version="1.29.9")


def test_the_scheduler_asks_the_extender_on_localhost_about_our_resource_only(render: Render) -> None:
    (config,) = of_kind(render(), "ConfigMap", "gpushare-scheduler")
    scheduler = yaml.safe_load(config["data"]["scheduler.yaml"])
    (profile,) = scheduler["profiles"]
    (extender,) = scheduler["extenders"]
    assert profile["schedulerName"] == names.SCHEDULER_NAME
    assert extender["urlPrefix"] == "http://127.0.0.1:8888"
    assert extender["managedResources"] == [{"name": names.SHARE_RESOURCE, "ignoredByScheduler": False}]
    assert (extender["nodeCacheCapable"], extender["ignorable"]) == (True, False)
    assert {extender[f"{verb}Verb"] for verb in ("filter", "prioritize", "bind", "preempt")} == {
        "filter",
        "prioritize",
        "bind",
        "preempt",
    }
    assert scheduler["leaderElection"]["resourceName"] == "gpushare-scheduler"


def test_the_benchmark_runs_kube_scheduler_as_the_chart_does(
    render: Render, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "hack"))
    controlplane = importlib.import_module("bench.controlplane")
    objects = render()
    deployed = of_kind(objects, "Deployment", "gpushare-scheduler")[0]
    scheduler = next(one for one in containers(deployed) if one["name"] == "kube-scheduler")
    assert {one["name"]: one["value"] for one in scheduler["env"]} == controlplane.SCHEDULER_ENV
    chart = yaml.safe_load(of_kind(objects, "ConfigMap", "gpushare-scheduler")[0]["data"]["scheduler.yaml"])
    bench = controlplane.scheduler_configuration("kubeconfig", 8888)
    del chart["leaderElection"], bench["leaderElection"], bench["clientConnection"]["kubeconfig"]
    assert chart == bench


def test_a_changed_scheduler_configuration_restarts_the_scheduler(render: Render) -> None:
    def checksum(values: Json) -> str:
        template = workloads(render(values))["scheduler"]["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/config"]

    assert checksum({}) == checksum({})
    assert checksum({}) != checksum({"scheduler": {"extenderWeight": 5}})


def webhooks(objects: list[Json]) -> Iterator[Json]:
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        for configuration in of_kind(objects, kind):
            yield from configuration["webhooks"]


@VALUES
def test_no_webhook_is_asked_about_a_pod_without_an_annotation_of_ours(render: Render, values: Json) -> None:
    hooks = {hook["name"]: hook for hook in webhooks(render(values))}
    assert set(hooks) == {
        "pods.mutate.gpushare.io",
        *(f"{kind}.{when}.mutate.gpushare.io" for kind in ("jobs", "jobsets") for when in ("create", "update")),
        "pods.validate.gpushare.io",
        "pods.warn.gpushare.io",
        "workloads.validate.gpushare.io",
        "cronjobs.validate.gpushare.io",
        "gpushares.validate.gpushare.io",
    }
    own = hooks.pop("gpushares.validate.gpushare.io")
    assert [rule["resources"] for rule in own["rules"]] == [["gpushares"]], "statuses are not looked at"
    assert own["failurePolicy"] == "Ignore"
    must = {
        "pods.mutate.gpushare.io",
        "pods.validate.gpushare.io",
        "jobs.create.mutate.gpushare.io",
        "jobsets.create.mutate.gpushare.io",
    }
    for name, hook in hooks.items():
        [condition] = hook["matchConditions"]
        assert re.search(f"'{names.FRACTION}' in (object|job)\\.", condition["expression"])
        also_warns = ".validate." in name or ".warn." in name
        assert ("startsWith('gpushare.io/')" in condition["expression"]) == (also_warns and name not in must)
        assert hook["timeoutSeconds"] <= 5
        assert hook["failurePolicy"] == ("Fail" if name in must else "Ignore")


def test_webhooks_trust_the_certificate_that_the_server_gets(render: Render) -> None:
    objects = render()
    (secret,) = of_kind(objects, "Secret")
    assert {h["clientConfig"]["caBundle"] for h in webhooks(objects)} == {secret["data"]["ca.crt"]}
    with_cert_manager = render({"certManager": {"enabled": True}})
    assert not of_kind(with_cert_manager, "Secret")
    (certificate,) = of_kind(with_cert_manager, "Certificate")
    assert certificate["spec"]["secretName"] == secret["metadata"]["name"]
    assert "gpushare-admission.gpushare-system.svc" in certificate["spec"]["dnsNames"]


def test_policies_speak_of_every_annotation(render: Render) -> None:
    policies = {o["metadata"]["name"]: o for o in of_kind(render(), "ValidatingAdmissionPolicy")}

    def keys(policy: str) -> set[str]:
        condition = policies[policy]["spec"]["matchConditions"][-1]["expression"]
        return set(re.findall(r"'(gpushare\.io/[a-z-]+)'", condition))

    assert keys("gpushare-decisions") == set(names.DECISION_ANNOTATIONS)
    assert keys("gpushare-requests") == {*names.USER_ANNOTATIONS, names.MANAGED_LABEL}
    bindings = of_kind(render(), "ValidatingAdmissionPolicyBinding")
    assert {b["spec"]["policyName"] for b in bindings} == set(policies)
    assert all(b["spec"]["validationActions"] == ["Deny"] for b in bindings)


def test_policies_name_the_accounts_that_the_parts_run_as(render: Render) -> None:
    objects = render({"fullnameOverride": "other"})
    (policy,) = of_kind(objects, "ValidatingAdmissionPolicy", "other-decisions")
    allowed = set(re.findall(r"serviceaccount:([a-z-]+:[a-z-]+)", policy["spec"]["validations"][0]["expression"]))
    parts = workloads(objects)
    accounts = {
        f"gpushare-system:{parts[p]['spec']['template']['spec']['serviceAccountName']}"
        for p in ("scheduler", "agent")
    }
    assert allowed == accounts


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"simulate": {}}, "simulate"),
        ({"image": {"repo": "x"}}, "repo"),
        ({"simulated": {"gpus": "two"}, "defaults": {"fraction": "auto"}}, "fraction"),
        ({"defaults": {"class": "fast"}}, "class"),
        ({"policy": {"maxSlowdown": 0.5}}, "maxSlowdown"),
        ({"policy": {"maxSlowdown": "0.5"}}, "maxSlowdown"),
        ({"policy": {"maxSlowdown": "fast"}}, "maxSlowdown"),
        ({"agent": {"sampleSeconds": "0.1"}}, "sampleSeconds"),
        ({"agent": {"sampleSeconds": "61"}}, "sampleSeconds"),
        ({"defaults": {"fraction": 0.333}}, "fraction"),
        ({"defaults": {"fraction": 1.5}}, "fraction"),
        ({"test": {"fraction": 17}}, "fraction"),
        ({"scheduler": {"replicas": 0}}, "replicas"),
        ({"admission": {"timeoutSeconds": "5"}}, "timeoutSeconds"),
        ({"admission": {"allowedEnv": ["PATH"]}}, "allowedEnv"),
        ({"admission": {"maxSelectors": -1}}, "maxSelectors"),
        ({"image": {"digest": "abc"}}, "digest"),
        ({"logging": {"level": "loud"}}, "level"),
        ({"watch": {"namespaces": ["Not A Name"]}}, "namespaces"),
    ],
)
def test_wrong_values_are_refused_by_name(render: Render, values: Json, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        render(values)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("policy.maxSlowdown=1.3", 'GPUSHARE_MAX_SLOWDOWN: "1.3"'),
        ("policy.maxSlowdown=2", 'GPUSHARE_MAX_SLOWDOWN: "2"'),
        ("defaults.fraction=0.25", 'GPUSHARE_DEFAULT_FRACTION: "0.25"'),
        ("defaults.fraction=1", 'GPUSHARE_DEFAULT_FRACTION: "1"'),
        ("test.fraction=0.3", 'gpushare.io/fraction: "0.3"'),
        ("agent.sampleSeconds=0.5", 'value: "0.5"'),
        ("agent.sampleSeconds=2", 'value: "2"'),
    ],
)
@pytest.mark.parametrize("how", ["--set", "--set-string", "--set-json"])
def test_a_fraction_is_taken_as_helm_passes_it(helm: Any, setting: str, line: str, how: str) -> None:
    """`--set` makes strings of fractions and integers of whole numbers; a values file has numbers."""
    done = helm("template", "gpushare", str(CHART), "--kube-version", "1.35.4", how, setting)
    assert done.returncode == 0, done.stderr
    assert line in done.stdout


def test_the_agent_has_the_slowdowns_that_set_gave(helm: Any) -> None:
    settings = ("--set", "policy.maxSlowdown=1.3", "--set", "loop.enabled=false")
    done = helm("template", "gpushare", str(CHART), "--kube-version", "1.35.4", *settings)
    assert done.returncode == 0, done.stderr
    (agent,) = containers(workloads(list(yaml.safe_load_all(done.stdout)))["agent"])
    given = {each["name"]: each.get("value") for each in agent["env"]}
    names = ("LOOP", "RETRACT_AFTER_SECONDS", "DEFAULT_CLASS", "MAX_SLOWDOWN", "LATENCY_MAX_SLOWDOWN")
    assert [given[f"GPUSHARE_{name}"] for name in names] == ["false", "300", "throughput", "1.3", "1.1"]


def _generator(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "hack" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_value_is_documented_and_the_page_is_fresh() -> None:
    generator = _generator("generate_values_doc")
    text = (CHART / "values.yaml").read_text()
    listed = list(generator.values(text))
    assert [value.path for value in listed if not value.description] == []
    assert (ROOT / "docs" / "values.md").read_text() == generator.render(text), "run hack/generate_values_doc.py"

    def leaves(tree: Json, path: str = "") -> set[str]:
        out = set()
        for key, value in tree.items():
            here = f"{path}{key}"
            out |= {here} if any(v.path == here for v in listed) else leaves(value, f"{here}.")
        return out

    assert leaves(yaml.safe_load(text)) == {value.path for value in listed}


def test_the_schema_and_the_values_name_the_same_things() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(values: Json, part: Json, path: str) -> None:
        if part.get("additionalProperties") is not False:
            return
        assert set(values) <= set(part["properties"]), path
        assert set(part["properties"]) - {"global"} <= set(values), path
        for key, value in values.items():
            if isinstance(value, dict):
                compare(value, part["properties"][key], f"{path}.{key}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


def test_the_schema_offers_the_policies_that_the_extender_has() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    offered = schema["properties"]["policy"]["properties"]["placement"]["enum"]
    assert sorted(offered) == sorted(extender_options.POLICIES)


@pytest.mark.integration
def test_an_upgrade_keeps_a_young_certificate_and_renews_an_old_one_which_stays_trusted(
    api: Any, helm: Any
) -> None:
    """Before: one for ten years, for ever."""
    namespace = f"certificate-{uuid.uuid4().hex[:8]}"
    secrets = f"/api/v1/namespaces/{namespace}/secrets"
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    assert api.call("POST", "/api/v1/namespaces", space).code == 201

    def upgrade() -> tuple[Json, set[str]]:
        """The Secret that an upgrade would write, and what the webhooks would trust."""
        where = (
            "-n",
            namespace,
            "--kubeconfig",
            str(api.kubeconfig),
            "--kube-version",
            "1.35.4",
            "--dry-run=server",
        )
        done = helm("template", "gpushare", str(CHART), *where)
        assert done.returncode == 0, done.stderr
        objects = [item for item in yaml.load_all(done.stdout, yaml.CSafeLoader) if item]
        (secret,) = of_kind(objects, "Secret")
        return secret, {hook["clientConfig"]["caBundle"] for hook in webhooks(objects)}

    def aged(secret: Json, days: int | None) -> Json:
        made_on = {} if days is None else {MADE_ON: (datetime.now(UTC) - timedelta(days)).strftime("%Y-%m-%d")}
        return {**secret, "metadata": {**secret["metadata"], "annotations": made_on}}

    try:
        first, _ = upgrade()
        for days, is_kept in ((0, True), (540, True), (560, False), (None, False)):
            assert api.call("POST", secrets, aged(first, days)).code == 201
            then, trusted = upgrade()
            assert (then["data"]["tls.crt"] == first["data"]["tls.crt"]) == is_kept, days
            assert trusted == {then["data"]["ca.crt"]}
            bundle = base64.b64decode(then["data"]["ca.crt"]).decode()
            assert base64.b64decode(first["data"]["ca.crt"]).decode().strip() in bundle
            assert bundle.count("BEGIN CERTIFICATE") == (1 if is_kept else 2)
            assert api.call("DELETE", f"{secrets}/{first['metadata']['name']}").code == 200
        assert api.call("POST", secrets, aged(then, None)).code == 201
        last, _ = upgrade()
        bundle = base64.b64decode(last["data"]["ca.crt"]).decode()
        assert bundle.count("BEGIN CERTIFICATE") == 2, "the one before the last is not trusted any more"
        ssl.create_default_context(cadata=bundle)
    finally:
        api.call("DELETE", f"/api/v1/namespaces/{namespace}")


def test_every_part_asks_for_the_token_and_the_pod_monitors_bring_it(render: Render) -> None:
    objects = render({"metrics": {"tokenSecret": "scrape", "tokenKey": "it"}, "podMonitor": {"enabled": True}})
    for part, workload in workloads(objects).items():
        container = containers(workload)[0]
        (path,) = [v["value"] for v in container["env"] if v["name"] == "GPUSHARE_METRICS_TOKEN_FILE"]
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "metrics-token"]
        (volume,) = [v for v in workload["spec"]["template"]["spec"]["volumes"] if v["name"] == "metrics-token"]
        assert f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}" == path, part
        assert (volume["secret"]["secretName"], volume["secret"]["items"][0]["key"]) == ("scrape", "it")
    (monitor,) = of_kind(objects, "PodMonitor")
    credentials = [end["authorization"]["credentials"] for end in monitor["spec"]["podMetricsEndpoints"]]
    assert credentials == [{"name": "scrape", "key": "it"}] * 2


@pytest.mark.parametrize("secret", ["", "own"])
def test_every_part_serves_metrics_over_tls_and_kubelet_asks_so(render: Render, secret: str) -> None:
    objects = render({"metrics": {"tls": {"enabled": True, "secret": secret}}, "podMonitor": {"enabled": True}})
    used = secret or "gpushare-metrics-tls"
    parts = workloads(objects)
    probed = set()
    for part in ("operator", "scheduler", "agent", "mps"):
        container = containers(parts[part])[0]
        (directory,) = [v["value"] for v in container["env"] if v["name"] == DIRECTORY_VARIABLE]
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "metrics-tls"]
        (volume,) = [v for v in parts[part]["spec"]["template"]["spec"]["volumes"] if v["name"] == "metrics-tls"]
        assert (mount["mountPath"], volume["secret"]["secretName"]) == (directory, used)
        for kind in ("readinessProbe", "livenessProbe"):
            probe = container.get(kind, {}).get("httpGet", {})
            if probe.get("port") == "metrics":
                assert probe["scheme"] == "HTTPS", part
                probed.add(part)
    assert probed == {"scheduler", "agent", "mps"}
    (monitor,) = of_kind(objects, "PodMonitor")
    ends = {end["port"]: end for end in monitor["spec"]["podMetricsEndpoints"]}
    assert {end["scheme"] for end in ends.values()} == {"https"}
    assert ends["metrics"]["tlsConfig"]["ca"] == {"secret": {"name": used, "key": "ca.crt"}}
    assert ends["webhook"]["tlsConfig"]["ca"]["secret"]["name"] == "gpushare-admission-tls"
    made = {item["metadata"]["name"] for item in of_kind(objects, "Secret")}
    assert made == {"gpushare-admission-tls"} | (set() if secret else {used})
    managed = render({"metrics": {"tls": {"enabled": True, "secret": secret}}, "certManager": {"enabled": True}})
    certificates = {c["spec"]["secretName"]: c["spec"] for c in of_kind(managed, "Certificate")}
    assert not of_kind(managed, "Secret")
    assert (used in certificates) is not bool(secret)
    for spec in certificates.values():
        assert of_kind(managed, spec["issuerRef"]["kind"], spec["issuerRef"]["name"])


def test_without_tls_probes_are_plain(render: Render) -> None:
    objects = render({"podMonitor": {"enabled": True}})
    for part in ("scheduler", "agent", "mps"):
        assert containers(workloads(objects)[part])[0]["readinessProbe"]["httpGet"]["scheme"] == "HTTP"
    (monitor,) = of_kind(objects, "PodMonitor")
    assert "scheme" not in monitor["spec"]["podMetricsEndpoints"][0]


@pytest.mark.slow
def test_prometheus_scrapes_the_charts_certificate_by_the_pod_monitor(render: Render, tmp_path: Path) -> None:
    """The Secrets of one rendering, served by our servers; Prometheus trusts, asks and brings what it says."""
    token = tmp_path / "token"
    token.write_text("let me")
    values = {"metrics": {"tokenSecret": "scrape", "tls": {"enabled": True}}, "podMonitor": {"enabled": True}}
    objects = render(values)
    (monitor,) = of_kind(objects, "PodMonitor")
    secrets: dict[tuple[str, str], Path] = {("scrape", "token"): token}
    for item in of_kind(objects, "Secret"):
        for key, text in item["data"].items():
            file = tmp_path / item["metadata"]["name"] / key
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(base64.b64decode(text))
            secrets[item["metadata"]["name"], key] = file
    names_of = {"metrics": "gpushare-metrics-tls", "webhook": "gpushare-admission-tls"}
    routes = {"/metrics": metrics_route(registry_of())}
    bearer = metrics_token({"GPUSHARE_METRICS_TOKEN_FILE": str(token)})
    labels = monitor["spec"]["selector"]["matchLabels"]
    with ExitStack() as stack:
        pods = []
        for port, secret in names_of.items():
            tls = Certificate(tmp_path / secret)
            server = MetricsServer(routes, 0, "127.0.0.1", token=bearer, certificate=tls)
            server.start()
            stack.callback(server.close)
            container = {"name": port, "ports": [{"name": port, "containerPort": server.port}]}
            metadata = {"name": port, "namespace": "gpushare-system", "labels": labels}
            status = {"phase": "Running", "podIP": "127.0.0.1"}
            pods.append({"metadata": metadata, "status": status, "spec": {"containers": [container]}})
        jobs = scrape_jobs(monitor, pods, interval="1s", secrets=secrets)
        prometheus = Prometheus(tmp_path / "prometheus", {"scrape_configs": jobs})
        stack.callback(prometheus.stop)

        def ends() -> dict[str, float]:
            found = prometheus.query("gpushare_certificate_expiry_timestamp_seconds")
            return {one["metric"]["pod"]: float(one["value"][1]) for one in found}

        wait_for("both scraped", lambda: set(ends()) == set(names_of), seconds=60)
        assert {one["value"][1] for one in prometheus.query("up")} == {"1"}
        left = min(ends().values()) - time.time()
        assert 1090 * 86400 < left < 1096 * 86400, "three years"


def test_metrics_are_for_those_who_are_named(render: Render) -> None:
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    for peers in ([], [prometheus]):
        found = of_kind(render({"networkPolicy": {"enabled": True, "metricsFrom": peers}}), "NetworkPolicy")
        rules = {one["metadata"]["name"].removeprefix("gpushare-"): one["spec"]["ingress"][0] for one in found}
        assert set(rules) == {"operator", "admission", "scheduler", "agent", "mps"}
        assert "from" not in rules.pop("admission"), "the API server calls it"
        assert all(rule.get("from", []) == peers for rule in rules.values())


@pytest.mark.integration
@VALUES
def test_the_real_api_server_takes_every_manifest(api: Any, render: Render, values: Json) -> None:
    """Server-side dry run with strict field validation; kinds of operators that are not installed are left out."""
    plurals = {"NetworkPolicy": "networkpolicies"}
    for item in render(values):
        group = item["apiVersion"]
        if group.startswith(("cert-manager.io", "monitoring.coreos.com")):
            continue
        root = f"/api/{group}" if "/" not in group else f"/apis/{group}"
        namespace = item["metadata"].pop("namespace", None)
        scope = "/namespaces/default" if namespace else ""  # the release's namespace need not exist
        plural = plurals.get(item["kind"], item["kind"].lower() + "s").replace("policys", "policies")
        item["metadata"]["name"] = f"dry-{item['metadata']['name']}" if "Definition" not in item["kind"] else None
        if item["metadata"]["name"] is None:
            continue  # a definition's name is fixed; test_policies installs them for real
        answer = api.call("POST", f"{root}{scope}/{plural}", item, dry_run=True)
        assert answer.code == 201, f"{item['kind']} {item['metadata']['name']}: {answer.message}"


SOURCES = {
    "operator": ["operator/gpushare_operator"],
    "admission": ["operator/gpushare_operator/admission"],
    "scheduler": ["src/gpushare/extender"],
    "agent": ["deviceplugin/gpushare_deviceplugin"],
    "mps": ["src/gpushare/mps"],
}


def _variables_read(part: str) -> set[str]:
    """What a part reads: variables that it names, and those of the options that it declares by `add`."""
    files = [path for folder in SOURCES[part] for path in (ROOT / folder).rglob("*.py")]
    for call, module in (("metrics_token", "http"), ("metrics_certificate", "certificates")):
        if any(f"{call}(os.environ)" in path.read_text() for path in files):
            files.append(ROOT / f"src/gpushare/runtime/{module}.py")
    text = "\n".join(path.read_text() for path in files)
    declared = {
        f"GPUSHARE_{name.upper().replace('-', '_')}" for name in re.findall(r'\badd\(\s*"([a-z-]+)"', text)
    }
    return declared | set(re.findall(r"\b(?:GPUSHARE_[A-Z_]+|NODE_NAME)\b", text))


# Not ours to read: kopf reads USER, Go's runtime in kube-scheduler GO*, the NVIDIA container toolkit the others.
FOREIGN = {"USER", "GOGC", "GOMEMLIMIT", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}


@VALUES
def test_every_variable_that_the_chart_sets_is_read(render: Render, values: Json) -> None:
    for part, workload in workloads(render(values)).items():
        for container in containers(workload):
            given = [variable["name"] for variable in container.get("env", [])]
            assert len(set(given)) == len(given)
            assert set(given) - FOREIGN <= _variables_read(part), part


def test_every_program_takes_the_arguments_that_the_chart_gives(render: Render) -> None:
    """The parts' own option parsers are asked, with the rendered command line and environment."""
    values = {
        "simulated": {"gpus": "H200:2"},
        "mps": {"endStrangers": False},
        "envCapsFallback": True,
        "admission": {"allowedEnv": ["CUDA_VISIBLE_DEVICES", "CUDA_MPS_LOG_DIRECTORY"], "maxSelectors": 7},
    }
    parts = workloads(render(values))

    def given(part: str) -> tuple[list[str], dict[str, str]]:
        container = containers(parts[part])[0]
        environment = {v["name"]: v.get("value", "some-node") for v in container.get("env", [])}
        return [*container["command"][3:], *container.get("args", [])], environment

    extender = extender_options.parse_options(*given("scheduler"))
    (config,) = of_kind(render(values), "ConfigMap", "gpushare-scheduler")
    (url,) = {one["urlPrefix"] for one in yaml.safe_load(config["data"]["scheduler.yaml"])["extenders"]}
    assert url == f"http://{extender.host}:{extender.port}"
    ports = {p["name"]: p["containerPort"] for p in containers(parts["scheduler"])[0]["ports"]}
    assert ports["metrics"] == extender.metrics_port

    agent = agent_options.parse_options(*given("agent"))
    assert (agent.node_name, agent.simulated, str(agent.directory)) == (
        "some-node",
        "H200:2",
        names.HOST_DIRECTORY,
    )
    assert containers(parts["agent"])[0]["ports"] == [{"name": "metrics", "containerPort": agent.metrics_port}]

    admission = admission_main.parse_settings(*given("admission"))
    assert admission.policy.env_caps
    assert admission.policy.allowed_env == {"CUDA_VISIBLE_DEVICES", "CUDA_MPS_LOG_DIRECTORY"}
    assert admission.policy.max_selectors == 7
    mounts = {m["mountPath"] for m in containers(parts["admission"])[0]["volumeMounts"]}
    assert str(admission.certificates) in mounts

    arguments, environment = given("mps")
    host = mps_host._parse(arguments)
    assert (host.simulated, host.keep_strangers, host.directory) == ("H200:2", True, names.HOST_DIRECTORY)
    assert containers(parts["mps"])[0]["ports"] == [{"name": "metrics", "containerPort": host.port}]
    assert "NODE_NAME" in environment

    operator = Environment.read(given("operator")[1])
    assert (operator.settings.defaults.max_slowdown_ratio, operator.namespaces) == (1.5, ())
    ports = {p["name"]: p["containerPort"] for p in containers(parts["operator"])[0]["ports"]}
    assert ports["metrics"] == operator.metrics_port
    several = containers(workloads(render({"watch": {"namespaces": ["a", "b"]}}))["operator"])[0]
    environment = {v["name"]: v["value"] for v in several["env"]}
    assert Environment.read(environment).namespaces == ("a", "b")
