"""The chart renders, with any values, into what docs/design.md promises; wrong values are refused."""

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.chartobjects import CHART, ROOT, VALUES, Json, Render, containers, of_kind, webhooks, workloads

from gpushare.core.admission import Defaults
from gpushare.core.api import names
from gpushare.mps import host as mps_host
from gpushare.mps import thawer as mps_thawer
from gpushare.twin.mps import stopped
from gpushare_deviceplugin import options as agent_options
from gpushare_deviceplugin.allocation import DeviceListStrategy


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
            # To stop, hold and kill clients that are to be ended, and to kill who left MPS.
            added = {"mps": {"add": ["KILL", "SYS_PTRACE"]}, "agent": {"add": ["KILL"]}}.get(part, {})
            if container["name"] == "thawer":
                added = {}
            assert security["capabilities"] == {"drop": ["ALL"], **added}
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert security["runAsNonRoot"] is (part not in ("agent", "mps"))
            assert container["resources"]["requests"]
        assert not pod.get("hostNetwork")
        assert not pod.get("hostIPC")
        assert pod.get("hostPID", False) is (part in ("agent", "mps"))


PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def test_the_agent_may_end_processes_only_where_its_policy_says_so(render: Render) -> None:
    agent, _ = containers(workloads(render({"agent": {"outsideMps": "end"}}))["agent"])
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["KILL"]}
    assert {"name": "GPUSHARE_OUTSIDE_MPS", "value": "end"} in agent["env"]
    agent, _ = containers(workloads(render({"agent": {"outsideMps": "event"}}))["agent"])
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    agent, _ = containers(workloads(render({}))["agent"])
    assert {"name": "GPUSHARE_OUTSIDE_MPS", "value": "decided"} in agent["env"]
    assert {"name": "GPUSHARE_EXCLUSIVE_PROCESS", "value": "false"} in agent["env"]
    both = render({"agent": {"outsideMps": "end", "exclusiveProcess": True}})
    agent, _ = containers(workloads(both)["agent"])
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["KILL", "SYS_ADMIN"]}
    assert agent_options.parse_options(
        [], {v["name"]: v.get("value", "n") for v in agent["env"]}
    ).exclusive_process


def test_the_standby_can_do_all_that_the_agent_can_and_requests_less(render: Render) -> None:
    agent, standby = containers(workloads(render())["agent"])
    assert [agent["name"], standby["name"]] == ["agent", "standby"]
    assert {one["name"] for one in agent["ports"]} == {"metrics", "probes"}
    probed = {one[kind]["httpGet"]["port"] for one in (agent, standby) for kind in PROBES}
    assert probed == {one["containerPort"] for one in agent["ports"] if one["name"] == "probes"}
    assert standby["resources"]["limits"] == agent["resources"]["limits"]
    assert standby["resources"]["requests"] != agent["resources"]["requests"]
    differs = {"name", "ports", "resources"}
    same = [{key: value for key, value in one.items() if key not in differs} for one in (agent, standby)]
    assert same[0] == same[1]


@pytest.mark.parametrize("key", ["resources", "securityContext", "standby"])
def test_of_the_agent_a_group_of_values_may_be_taken_away(render: Render, key: str) -> None:
    """`agent.resources=null` means none, as for the other parts; before, an error of the template's."""
    agent, standby = containers(workloads(render({"agent": {key: None}}))["agent"])
    if key == "resources":
        assert agent["resources"] == {}
        assert standby["resources"].keys() == {"requests"}
    if key == "securityContext":
        assert agent["securityContext"] == {"capabilities": {"add": ["KILL"]}}
    if key == "standby":
        assert standby["resources"]["limits"] == agent["resources"]["limits"]


def test_the_standby_follows_its_values(render: Render) -> None:
    (agent,) = containers(workloads(render({"agent": {"standby": {"enabled": False}}}))["agent"])
    assert agent["name"] == "agent"
    own = {"resources": {"limits": {"memory": "1Gi"}}, "standby": {"requests": {"memory": "48Mi"}}}
    _, standby = containers(workloads(render({"agent": own}))["agent"])
    assert standby["resources"]["limits"] == {"memory": "1Gi"}
    assert standby["resources"]["requests"]["memory"] == "48Mi"


def test_the_agent_keeps_as_much_memory_from_tenants_as_the_scheduler(render: Render) -> None:
    agent, _ = containers(workloads(render({"policy": {"gpuMemoryReserveMiB": 1024}}))["agent"])
    environment = {v["name"]: v.get("value", "n") for v in agent["env"]}
    assert agent_options.parse_options([], environment).gpu_memory_reserve_mib == 1024


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
    agent, _ = containers(workload)
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
    container, *thawers = containers(parts["mps"])
    assert [one["name"] for one in thawers] == (["thawer"] if enabled else [])
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


def test_the_thawer_sees_what_the_mps_host_sees_and_can_write_nothing_else(render: Render) -> None:
    values = {"mps": {"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}, "logging": {"level": "DEBUG"}}
    host, thawer = containers(workloads(render(values))["mps"])
    assert thawer["command"][:3] == ["python", "-m", mps_thawer.__name__]
    given = mps_thawer.parse([*thawer["command"][3:], *thawer["args"]])
    seen = mps_host._parse([*host["command"][3:], *host["args"]])
    assert (given.directory, given.cgroup_root) == (seen.directory, seen.cgroup_root)
    own = {mount["mountPath"]: mount for mount in host["volumeMounts"]}
    for mount in thawer["volumeMounts"]:
        assert mount["name"] == own[mount["mountPath"]]["name"]
        assert mount.get("readOnly", False) is (mount["mountPath"] != str(given.cgroup_root))
    assert thawer["securityContext"] == {**host["securityContext"], "capabilities": {"drop": ["ALL"]}}
    assert thawer["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    assert thawer["env"] == [{"name": "GPUSHARE_LOG_LEVEL", "value": "DEBUG"}]
    assert not {"ports", "readinessProbe", "livenessProbe", "startupProbe", "lifecycle"} & thawer.keys()


def test_the_thawer_follows_its_values_and_does_without(render: Render) -> None:
    own = {"requests": {"memory": "20Mi"}, "limits": {"memory": "48Mi"}}
    _, thawer = containers(workloads(render({"throttle": {"thawer": {"resources": own}}}))["mps"])
    assert thawer["resources"] == {"requests": {"cpu": "5m", "memory": "20Mi"}, "limits": {"memory": "48Mi"}}
    for values in ({"throttle": {"thawer": None}}, {"throttle": {"thawer": {"resources": None}}}):
        _, thawer = containers(workloads(render(values))["mps"])
        assert not thawer["resources"]  # as with a former release's values
    _, thawer = containers(workloads(render({"mps": {"securityContext": None}}))["mps"])
    assert thawer["securityContext"] == {"capabilities": {"drop": ["ALL"]}}


def test_the_node_parts_tolerate_the_taints_of_gpu_nodes_and_what_is_added(render: Render) -> None:
    own = {"operator": "Exists", "effect": "NoExecute"}
    found = workloads(render({"nodes": {"taints": ["sku"], "tolerations": [own]}}))
    for part in ("agent", "mps"):
        assert found[part]["spec"]["template"]["spec"]["tolerations"] == [
            own,
            {"key": "sku", "operator": "Exists"},
        ]
        usual = workloads(render())[part]["spec"]["template"]["spec"]["tolerations"]
        assert usual == [{"key": key, "operator": "Exists"} for key in Defaults().taints]


def test_the_pod_of_helm_test_is_placed_by_what_admission_adds_as_a_users_is(render: Render) -> None:
    """Before: it had the tolerations of the agent, and passed on a node that no user's pod could go to."""
    (pod,) = of_kind(render(), "Pod")
    assert (
        not {"tolerations", "nodeSelector", "affinity", "schedulerName", "runtimeClassName"} & pod["spec"].keys()
    )


def test_an_upgrade_never_restarts_the_mps_host(render: Render) -> None:
    mps = workloads(render())["mps"]
    assert mps["spec"]["updateStrategy"] == {"type": "OnDelete"}
    container, thawer = containers(mps)
    assert not {"livenessProbe", "startupProbe"} & (container.keys() | thawer.keys())
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
    objects = render({"watch": {"namespaces": ["a", "b", "123", "true"]}})  # names that YAML takes for no text
    everywhere = {o["roleRef"]["name"] for o in of_kind(objects, "ClusterRoleBinding")}
    assert "gpushare-operator" not in everywhere
    here = {o["metadata"]["namespace"] for o in of_kind(objects, "RoleBinding", "gpushare-operator")}
    assert here == {"a", "b", "123", "true"}
    (operator,) = containers(workloads(objects)["operator"])
    assert operator["args"] == [f"--namespace={name}" for name in ("a", "b", "123", "true")]


def test_the_operator_may_evict_where_the_value_was_taken_away(render: Render) -> None:
    """Before: the operator took the default, evict, without the right to it."""
    (role,) = of_kind(render({"policy": {"retraction": None}}), "ClusterRole", "gpushare-operator")
    assert any("pods/eviction" in rule["resources"] for rule in role["rules"])


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
    agent, _ = containers(workloads(replacing)["agent"])
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


@pytest.mark.parametrize(
    ("version", "tag"),
    [
        ("v1.36.0-rc.1", "v1.36.0-rc.1"),
        ("v1.36.0-alpha.2.17+abc", "v1.36.0-alpha.2"),
        ("v1.31.5-gke.1023000", "v1.31.5"),
        ("v1.30.9-eks-8cce635", "v1.30.9"),
        ("v1.33.1+k3s1", "v1.33.1"),
    ],
)
def test_kube_scheduler_is_of_the_clusters_pre_release(version: str, tag: str) -> None:
    """Of the pattern: an installation has the cluster's whole version, --kube-version loses what follows x.y.z."""
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    (pattern,) = re.findall(r'regexFind "(\^v[^"]+)" \.Capabilities', helpers)
    found = re.match(pattern.replace("\\\\", "\\"), version)
    assert found is not None
    assert found[0] == tag


@pytest.mark.parametrize("tag", ["0.0.9", "v0.0.12"])
def test_an_image_of_an_older_release_is_refused(render: Render, tag: str) -> None:
    """Before: kubelet asked an older image at ports for probes that it did not have, and no part became ready."""
    with pytest.raises(ValueError, match=rf"image.tag {tag} is of a release before this chart's, 0.1.0"):
        render({"image": {"tag": tag}})
    digest = f"sha256:{'0' * 64}"
    assert workloads(render({"image": {"tag": tag, "digest": digest}})), "the digest beats the tag"


@pytest.mark.parametrize(
    "tag", ["", "0.1.0", "v0.1.1", "1.0.0", "dev-0a1b2c", "0.0.9-mine", "20.04", "2024.01.05", 7]
)
def test_any_other_tag_is_taken(render: Render, tag: object) -> None:
    images = {containers(one)[0]["image"] for one in workloads(render({"image": {"tag": str(tag)}})).values()}
    assert f"gpushare/gpushare:{tag or '0.1.0'}" in images


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
    assert own["failurePolicy"] == "Fail", "a limit that holds only while admission answers is none"
    [condition] = own["matchConditions"]
    assert "has(object.spec.selector)" in condition["expression"]
    assert "!has(oldObject.spec.selector)" in condition["expression"], "who has one already waits for nobody"
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


def test_policies_speak_of_every_annotation(render: Render) -> None:
    policies = {o["metadata"]["name"]: o for o in of_kind(render(), "ValidatingAdmissionPolicy")}

    def keys(policy: str) -> set[str]:
        condition = policies[policy]["spec"]["matchConditions"][-1]["expression"]
        return set(re.findall(r"'(gpushare\.io/[a-z-]+)'", condition))

    assert keys("gpushare-decisions") == set(names.DECISION_ANNOTATIONS)
    assert keys("gpushare-requests") == {*names.USER_ANNOTATIONS, names.MANAGED_LABEL}
    bindings = of_kind(render(), "ValidatingAdmissionPolicyBinding")
    assert {b["spec"]["policyName"] for b in bindings} == set(policies)
    actions = {b["spec"]["policyName"]: b["spec"]["validationActions"] for b in bindings}
    assert actions == {key: ["Deny"] for key in policies} | {"gpushare-latency-templates": ["Warn"]}


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
