"""Values: documented, checked by the schema, and read by the programs that get them."""

import importlib
import importlib.util
import json
import re
from typing import Any

import pytest
import yaml
from tests.chart.chartobjects import CHART, ROOT, VALUES, Json, Render, containers, of_kind, workloads

from gpushare.core.api import names
from gpushare.extender import options as extender_options
from gpushare.mps import host as mps_host
from gpushare_deviceplugin import options as agent_options
from gpushare_operator.admission import __main__ as admission_main
from gpushare_operator.running import Environment, Operator


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
        # of several whole GPUs a pod gets no socket of a gate, which is what the test looks at
        ({"test": {"fraction": 2}}, "fraction"),
        ({"test": {"fraction": "16"}}, "fraction"),
        ({"agent": {"cdiDirectories": ["/var/run/cdi", "/var/run/cdi"]}}, "cdiDirectories"),
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
    agent, _ = containers(workloads(list(yaml.safe_load_all(done.stdout)))["agent"])
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


SOURCES = {
    "operator": ["operator/gpushare_operator"],
    "admission": ["operator/gpushare_operator/admission"],
    "scheduler": ["src/gpushare/extender"],
    "agent": ["deviceplugin/gpushare_deviceplugin"],
    "mps": ["src/gpushare/mps"],
}


def _variables_read(part: str) -> set[str]:
    """What a part reads: variables that it names, those of options with variables, and those of `Variables`."""
    files = [path for folder in SOURCES[part] for path in (ROOT / folder).rglob("*.py")]
    for call, module in (("metrics_token", "http"), ("metrics_certificate", "certificates")):
        texts = [path.read_text() for path in files]
        if any(f"{call}(os.environ)" in text or "MetricsAndProbes(" in text for text in texts):
            files.append(ROOT / f"src/gpushare/runtime/{module}.py")
    if any("log_level_of()" in path.read_text() for path in files):
        files.append(ROOT / "src/gpushare/runtime/logs.py")
    texts = [path.read_text() for path in files]
    named = set()
    for text in texts:
        if "options_of(parser, environment)" in text:
            named |= set(re.findall(r'\badd\(\s*"([a-z-]+)"', text))
        if "Variables(" in text:
            named |= set(re.findall(r'\.(?:text|one_of|flag|count|words)\(\s*"([a-z-]+)"', text))
    declared = {f"GPUSHARE_{name.upper().replace('-', '_')}" for name in named}
    text = "\n".join(texts)
    return declared | set(re.findall(r"\b(?:GPUSHARE_[A-Z_]+|NODE_NAME)\b", text))


FOREIGN = {
    "USER",
    "GOGC",
    "GOMEMLIMIT",
    "MALLOC_ARENA_MAX",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
}


@VALUES
def test_every_variable_that_the_chart_sets_is_read(render: Render, values: Json) -> None:
    for part, workload in workloads(render(values)).items():
        for container in containers(workload):
            given = [variable["name"] for variable in container.get("env", [])]
            assert len(set(given)) == len(given)
            assert set(given) - FOREIGN <= _variables_read(part), part


def test_the_fronts_threads_share_one_malloc_arena(render: Render) -> None:
    """After two hours of pods a fifth of its memory was in arenas beside the main one."""
    for container in containers(workloads(render({}))["agent"]):
        given = {variable["name"]: variable.get("value") for variable in container.get("env", [])}
        if "gpushare.front" in container.get("command", []):
            assert given["MALLOC_ARENA_MAX"] == "1"
            return
    pytest.fail("no container runs the front")


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
    assert (ports["metrics"], ports["probes"]) == (extender.metrics_port, extender.probe_port)

    agent = agent_options.parse_options(*given("agent"))
    assert (agent.node_name, agent.simulated, str(agent.directory)) == (
        "some-node",
        "H200:2",
        names.HOST_DIRECTORY,
    )
    ports = {p["name"]: p["containerPort"] for p in containers(parts["agent"])[0]["ports"]}
    assert ports == {"metrics": agent.metrics_port, "probes": agent.probe_port}

    admission = admission_main.parse_settings(*given("admission"))
    assert admission.policy.env_caps
    assert admission.policy.allowed_env == {"CUDA_VISIBLE_DEVICES", "CUDA_MPS_LOG_DIRECTORY"}
    assert admission.policy.max_selectors == 7
    mounts = {m["mountPath"] for m in containers(parts["admission"])[0]["volumeMounts"]}
    assert str(admission.certificates) in mounts

    arguments, environment = given("mps")
    host = mps_host._parse(arguments)
    assert (host.simulated, host.keep_strangers, host.directory) == ("H200:2", True, names.HOST_DIRECTORY)
    ports = {p["name"]: p["containerPort"] for p in containers(parts["mps"])[0]["ports"]}
    assert ports == {"metrics": host.port, "probes": host.probe_port}
    assert "NODE_NAME" in environment

    operator = Environment.read(given("operator")[1])
    assert (operator.settings.defaults.max_slowdown_ratio, operator.namespaces) == (1.5, ())
    ports = {p["name"]: p["containerPort"] for p in containers(parts["operator"])[0]["ports"]}
    assert ports == {"metrics": operator.metrics_port, "probes": operator.probe_port}
    several = containers(workloads(render({"watch": {"namespaces": ["a", "b"]}}))["operator"])[0]
    environment = {v["name"]: v["value"] for v in several["env"]}
    assert Environment.read(environment).namespaces == ("a", "b")


def test_kubelet_asks_the_operators_own_server_and_not_kopfs(render: Render) -> None:
    """Before: Kopf's, in the reconciler's event loop and without bounds."""
    operator = containers(workloads(render())["operator"])[0]
    assert "--liveness" not in operator["command"]
    paths = set(Operator(Environment.read({})).routes())
    for kind in ("startupProbe", "livenessProbe"):
        probe = operator[kind]["httpGet"]
        assert probe["port"] == "probes"
        assert probe["path"] in paths


@pytest.mark.parametrize(
    ("policy", "count"),
    [
        ({}, 11),
        ({"refuseAboveBaseline": True}, 12),
        ({"restricted": ["isolated"]}, 9),
        ({"restricted": []}, 8),
    ],
)
def test_the_guide_counts_the_admission_policies_that_are_installed(
    render: Render, policy: Json, count: int
) -> None:
    assert len(of_kind(render({"policy": policy}), "ValidatingAdmissionPolicy")) == count
    written = {
        8: "with an empty list there are three fewer",
        9: "without `latency` in `policy.restricted` there are two fewer",
        11: "Eleven ValidatingAdmissionPolicies",
        12: "With `policy.refuseAboveBaseline` there is one more",
    }
    guide = " ".join((ROOT / "docs/install.md").read_text().split())
    assert written[count] in guide
