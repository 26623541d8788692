"""Values without an end-to-end test: nonsense is refused by name, and each reaches its processes' settings."""

import re
from typing import Any

import pytest
import yaml
from tests.chart.chartobjects import CHART, Json, Render, containers, of_kind, workloads
from tests.support.blocks import blocks

from gpushare.core.admission import JoinedWorkload
from gpushare.core.control import HygieneAction, HygieneSettings
from gpushare.core.placement import Settings, parse_settings
from gpushare.extender import options as extender_options
from gpushare.extender.options import ExtenderOptions
from gpushare.mps import host as mps_host
from gpushare_deviceplugin import options as agent_options
from gpushare_deviceplugin.options import AgentOptions
from gpushare_deviceplugin.outside import OutsidePolicy
from gpushare_deviceplugin.pods import JAX_VARIABLES
from gpushare_operator.admission import __main__ as admission_main
from gpushare_operator.running import Environment


def nested(path: str, value: object) -> Json:
    """{"policy": {"hygiene": {"stalled": value}}} for policy.hygiene.stalled."""
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


NONSENSE: dict[str, list[object]] = {
    "policy.latencyMaxSlowdown": [0, 0.9, -1.1, 1000.5, 1e9, "0.9", "1e3", "fast", "nan", "inf", "", True, [], {}],
    "policy.maxSlowdown": [0, 0.9, -1.5, 1000.5, "1e3", "nan", "inf", "", True, []],
    "policy.slowdownHeadroom": [-0.1, 0.91, 1, "1", "0.91", "0.95", ".5", "half", "nan", "", True, [], {}],
    "policy.reserveAfterSeconds": [-1, 0.5, 604_801, 1e18, "1800", "never", True, [], {}],
    "policy.hygiene": ["report", [], True, {"stall": "report"}],
    "policy.hygiene.stalled": ["kill", "Report", "", True, 1, [], {}],
    "policy.hygiene.stalledAfterSeconds": [0, 59, 604_801, 60.5, "1800", True, []],
    "policy.hygiene.outsideMps": ["end", "event", "", False, []],
    "policy.hygiene.fault": ["reset", "", False, {}],
    "extender.unseenSeconds": [-1, 0.5, 3601, 1e6, "25", True, []],
    "extender.bestNodes": [-1, 0.5, 1e6, "8", True, []],
    "policy.chargeThreads": ["false", 6, ""],
    "nodes.taints": ["nvidia.com/gpu", [""], ["a b"], ["a", "a"], [{"key": "a"}], ["/gpu"], ["a,b"], True, {}],
    "policy.joinedWorkloads": [
        "resnet=a,b",
        {"workload": "resnet", "namespaces": ["a", "b"]},
        [{"workload": "resnet"}],
        [{"namespaces": ["a", "b"]}],
        [{"workload": "resnet", "namespaces": ["a"]}],
        [{"workload": "resnet", "namespaces": ["a", "a"]}],
        [{"workload": "resnet", "namespaces": ["a", "*"]}],
        [{"workload": "resnet", "namespaces": ["a", "b,c"]}],
        [{"workload": "res*", "namespaces": ["a", "b"]}],
        [{"workload": "a b", "namespaces": ["a", "b"]}],
        [{"workload": "", "namespaces": ["a", "b"]}],
        [{"workload": "resnet", "namespaces": ["a", "b"], "selector": {}}],
        [{"workload": "resnet", "namespaces": ["a", "b"]}, {"workload": "resnet", "namespaces": ["b", "c"]}],
        [{"workload": "resnet", "namespaces": [f"n{number:060}" for number in range(2000)]}],
    ],
    "policy.retractionsPerMinute": [0, -2, 61, 1.5, "2", True, []],
    "agent.outsideMps": ["kill", "End", "report", "", True, []],
    "agent.jaxMemoryVariable": ["LD_PRELOAD", "xla_client_mem_fraction", True, 0.5, [], {}],
    "mps.maxClientsPerPod": [0, 49, -1, 1.5, "16", True, []],
    "mps.endStrangers": ["false", "no", "", 0, 1, [], {}],
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in NONSENSE.items() for value in values]
)
def test_nonsense_is_refused_by_the_values_name(render: Render, path: str, value: object) -> None:
    with pytest.raises(ValueError, match=path.rpartition(".")[2]):
        render(nested(path, value))


class Installation:
    """What each process makes of a rendered chart: its own option parser, given its arguments and environment."""

    def __init__(self, objects: list[Json]) -> None:
        self._parts = workloads(objects)
        [settings] = of_kind(objects, "ConfigMap", "gpushare-settings")
        self._settings: dict[str, str] = settings["data"]

    def _given(self, part: str) -> tuple[list[str], dict[str, str]]:
        container = next(
            each for each in containers(self._parts[part]) if each["name"] in {part, "extender", "host"}
        )
        shared = [each["configMapRef"]["name"] for each in container.get("envFrom", [])]
        assert set(shared) <= {"gpushare-settings"}
        environment = dict(self._settings) if shared else {}
        environment |= {each["name"]: each.get("value", "some-node") for each in container.get("env", [])}
        return [*container["command"][3:], *container.get("args", [])], environment

    @property
    def agent(self) -> AgentOptions:
        return agent_options.parse_options(*self._given("agent"))

    @property
    def extender(self) -> ExtenderOptions:
        return extender_options.parse_options(*self._given("scheduler"))

    @property
    def operator(self) -> Environment:
        return Environment.read(self._given("operator")[1])

    @property
    def admission(self) -> Any:
        return admission_main.parse_settings(*self._given("admission"))

    @property
    def mps(self) -> Any:
        return mps_host._parse(self._given("mps")[0])

    @property
    def shown(self) -> Settings:
        """What `gpushare plan`, `explain` and `snapshot` read from the release's ConfigMap."""
        return parse_settings(self._settings)


def test_without_values_each_process_has_its_own_defaults(render: Render) -> None:
    """The chart's defaults are those of the processes: what a test runs bare is what an installation runs."""
    found = Installation(render({}))
    assert found.shown == found.extender.settings == Settings()
    assert found.agent.hygiene == HygieneSettings()
    assert (found.agent.outside_mps, found.agent.loop, found.agent.exclusive_process) == (
        OutsidePolicy.DECIDED,
        True,
        False,
    )
    assert found.agent.defaults.latency_max_slowdown_ratio == Settings().defaults.latency_max_slowdown_ratio
    operator = found.operator.settings
    assert (operator.retraction.evicts, operator.retraction.per_minute) == (True, 2)
    assert found.mps.keep_strangers is False
    assert found.mps.max_clients_per_pod == found.admission.policy.max_clients_per_pod == 16


OTHERS: dict[str, object] = {
    "policy.placement": "bestfit",
    "policy.maxSlowdown": 1.7,
    "policy.latencyMaxSlowdown": 1.3,
    "policy.reserveAfterSeconds": 60,
    "policy.slowdownHeadroom": 0.4,
    "policy.gpuMemoryReserveMiB": 777,
    "policy.chargeMemory": False,
    "policy.chargeThreads": False,
    "policy.probationSeconds": 61,
    "policy.longestProbationSeconds": 301,
    "policy.probations": 3,
    "defaults.class": "latency",
    "defaults.fraction": "0.4",
    "throttle.enabled": False,
    "nodes.taints": ["sku", "nvidia.com/gpu"],
    "policy.joinedWorkloads": [{"workload": "resnet", "namespaces": ["a", "b"]}],
}
"""A value other than the default for each key of the release's settings."""


@pytest.mark.parametrize("path", OTHERS)
def test_a_setting_reaches_who_decides_as_it_reaches_who_explains(render: Render, path: str) -> None:
    found = Installation(render(nested(path, OTHERS[path])))
    assert found.extender.settings == found.shown != Settings()


def test_every_setting_has_a_value_that_is_tried(render: Render) -> None:
    standard = Settings().to_mapping()
    changed = set()
    for path, value in OTHERS.items():
        shown = Installation(render(nested(path, value))).shown.to_mapping()
        changed |= {name for name in standard if shown[name] != standard[name]}
    assert changed == standard.keys()


@pytest.mark.parametrize("value", [1, 1.05, "1.3", 1000])
def test_latency_max_slowdown_reaches_agent_extender_operator_and_command_line(
    render: Render, value: object
) -> None:
    found = Installation(render(nested("policy.latencyMaxSlowdown", value)))
    for defaults in (
        found.agent.defaults,
        found.extender.settings.defaults,
        found.operator.settings.defaults,
        found.shown.defaults,
    ):
        assert defaults.latency_max_slowdown_ratio == float(str(value))
        assert defaults.max_slowdown_ratio == 1.5


@pytest.mark.parametrize("value", [True, False])
def test_the_charge_for_threads_reaches_admission_and_command_line(render: Render, value: bool) -> None:
    found = Installation(render(nested("policy.chargeThreads", value)))
    assert found.admission.policy.defaults.charge_threads is value
    assert found.shown.defaults.charge_threads is value


def test_joined_workloads_reach_every_part_that_knows_of_profiles(render: Render) -> None:
    entries = [
        {"workload": "ResNet-50", "namespaces": ["team-a", "b"]},
        {"workload": "ResNet-50", "namespaces": ["c", "d", "e"]},
    ]
    found = Installation(render({"policy": {"joinedWorkloads": entries}}))
    expected = tuple(JoinedWorkload(each["workload"], tuple(each["namespaces"])) for each in entries)  # type: ignore[arg-type]
    assert found.shown.joined == found.extender.settings.joined == found.operator.settings.joined == expected
    assert found.agent.joined == found.admission.joined == expected
    assert Installation(render({})).agent.joined == ()


def test_the_joined_workload_that_the_page_shows_is_one(render: Render) -> None:
    [shown] = [
        each for each in blocks("yaml") if each.page == "docs/gpushares.md" and each.text.startswith("policy:")
    ]
    found = Installation(render(yaml.safe_load(shown.text))).shown.joined
    assert found == (JoinedWorkload("resnet50", ("team-a", "team-b")),)


@pytest.mark.parametrize("value", [1, 16, 48])
def test_what_one_pod_gets_of_the_clients_is_what_admission_takes(render: Render, value: int) -> None:
    found = Installation(render(nested("mps.maxClientsPerPod", value)))
    assert found.mps.max_clients_per_pod == found.admission.policy.max_clients_per_pod == value


@pytest.mark.parametrize("value", [0, 90, 604_800])
def test_reserve_after_seconds_reaches_extender_and_command_line(render: Render, value: int) -> None:
    found = Installation(render(nested("policy.reserveAfterSeconds", value)))
    assert found.extender.settings.reserve_after_seconds == found.shown.reserve_after_seconds == value


@pytest.mark.parametrize("value", [0, 0.25, "0.5", "0.90", 0.9, "0"])
def test_slowdown_headroom_reaches_extender_and_command_line(render: Render, value: object) -> None:
    found = Installation(render(nested("policy.slowdownHeadroom", value)))
    for settings in (found.extender.settings, found.shown):
        assert settings.slowdown_headroom_ratio == float(str(value))


@pytest.mark.parametrize("key", ["stalled", "outsideMps", "fault"])
@pytest.mark.parametrize("action", list(HygieneAction))
def test_each_hygiene_action_reaches_agent_and_operator(render: Render, key: str, action: HygieneAction) -> None:
    found = Installation(render(nested(f"policy.hygiene.{key}", action.value)))
    name = {"stalled": "stalled", "outsideMps": "outside_mps", "fault": "fault"}[key]
    others = {"stalled", "outside_mps", "fault"} - {name}
    for hygiene in (found.agent.hygiene, found.operator.settings.hygiene):
        assert getattr(hygiene, name) is action
        assert {getattr(hygiene, other) for other in others} == {HygieneAction.REPORT}


@pytest.mark.parametrize("value", [60, 3600, 604_800])
def test_stalled_after_seconds_reaches_the_agent(render: Render, value: int) -> None:
    found = Installation(render(nested("policy.hygiene.stalledAfterSeconds", value)))
    assert found.agent.hygiene.stalled_seconds == value


@pytest.mark.parametrize("value", [1, 7, 60])
def test_retractions_per_minute_reaches_the_operator(render: Render, value: int) -> None:
    found = Installation(render(nested("policy.retractionsPerMinute", value)))
    assert found.operator.settings.retraction.per_minute == value


@pytest.mark.parametrize("policy", list(OutsidePolicy))
def test_outside_mps_reaches_the_agent_and_brings_its_capability(render: Render, policy: OutsidePolicy) -> None:
    objects = render(nested("agent.outsideMps", policy.value))
    assert Installation(objects).agent.outside_mps is policy
    agent, _ = containers(workloads(objects)["agent"])
    added = agent["securityContext"]["capabilities"].get("add") or []
    assert ("KILL" in added) is (policy is not OutsidePolicy.EVENT)


@pytest.mark.parametrize("name", ["", *JAX_VARIABLES])
def test_the_variable_for_jax_reaches_the_agent(render: Render, name: str) -> None:
    assert Installation(render(nested("agent.jaxMemoryVariable", name))).agent.jax_variable == name
    assert Installation(render({})).agent.jax_variable == "", "nobody's JAX is changed unasked"


@pytest.mark.parametrize("ends", [True, False])
def test_end_strangers_reaches_the_mps_host(render: Render, ends: bool) -> None:
    assert Installation(render(nested("mps.endStrangers", ends))).mps.keep_strangers is not ends


@pytest.mark.parametrize("path", [path for path in NONSENSE if path != "policy.hygiene"])
def test_a_value_that_was_taken_away_is_the_default(render: Render, path: str) -> None:
    """`--set policy.x=null` takes it away, and so does --reuse-values from a release that did not know it."""
    found, standard = Installation(render(nested(path, None))), Installation(render({}))
    for part in ("agent", "extender", "operator", "admission", "mps", "shown"):
        assert getattr(found, part) == getattr(standard, part), part


def test_each_setting_is_rendered_at_one_place() -> None:
    """A second place could render another value, and an agent would then promise what no extender places by."""
    texts = [path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file()]
    [block] = re.findall(
        r'define "gpushare\.settings" -\}\}(.*?)\n\{\{- end \}\}\n\n', "\n".join(texts), re.DOTALL
    )
    values = set(re.findall(r"\.Values\.(?:policy|defaults)\.\w+", block))
    assert len(values) > 10
    assert {
        value: len(re.findall(rf"{re.escape(value)}\b", "\n".join(texts))) for value in values
    } == dict.fromkeys(values, 1)
