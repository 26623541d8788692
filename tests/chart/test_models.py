"""The chart hands interference models of other GPUs to those that decide by them, and to nobody else."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.chart.chartobjects import CHART, Json, Render, containers, of_kind, workloads

from gpushare.data import default_model
from gpushare.runtime.models import MODELS_VARIABLE

ARTEFACT = '{"artefact":"gpushare.io/interference-model","version":3,"gpu_model":"NVIDIA L4"}\n'
READERS = {"operator": {"operator"}, "scheduler": {"extender"}, "agent": {"agent", "standby"}}


def mounted(workload: Json) -> dict[str, str]:
    """Where the models lie in each container, as its environment says."""
    found = {}
    for container in containers(workload):
        env = {each["name"]: each.get("value") for each in container.get("env", [])}
        if MODELS_VARIABLE in env:
            [mount] = [each for each in container["volumeMounts"] if each["name"] == "models"]
            assert mount["readOnly"] is True
            assert mount["mountPath"] == env[MODELS_VARIABLE]
            found[container["name"]] = mount["mountPath"]
    return found


def test_without_models_there_is_no_trace_of_them(render: Render) -> None:
    objects = render({})
    assert not [each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"].endswith("-models")]
    for workload in workloads(objects).values():
        template = workload["spec"]["template"]
        assert mounted(workload) == {}
        assert "models" not in [volume["name"] for volume in template["spec"].get("volumes", [])]
        assert "checksum/models" not in (template["metadata"].get("annotations") or {})


def test_models_reach_who_decides_and_a_change_rolls_them(render: Render) -> None:
    objects = render({"models": {"l4": ARTEFACT, "a100": ARTEFACT}})
    [config] = [each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"].endswith("-models")]
    assert config["data"] == {"l4.json": ARTEFACT, "a100.json": ARTEFACT}
    changed = workloads(render({"models": {"l4": ARTEFACT}}))
    for part, workload in workloads(objects).items():
        assert set(mounted(workload)) == READERS.get(part, set())
        if part not in READERS:
            continue
        template = workload["spec"]["template"]
        [volume] = [each for each in template["spec"]["volumes"] if each["name"] == "models"]
        assert volume["configMap"]["name"] == config["metadata"]["name"]
        other = changed[part]["spec"]["template"]["metadata"]["annotations"]
        assert template["metadata"]["annotations"]["checksum/models"] != other["checksum/models"]


def test_a_file_that_is_no_model_is_refused(
    helm: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    file = tmp_path / "model.json"
    texts = {default_model().to_json(): True, "[]": False}
    for text, is_taken in texts.items():
        file.write_text(text)
        done = helm("template", "x", str(CHART), "--kube-version", "1.35.4", "--set-file", f"models.l4={file}")
        assert (done.returncode == 0) is is_taken, done.stderr
