"""A GPU that the shipped model was not fitted on: measured (made up here), fitted, and taken by what decides."""

import inspect
import json
from pathlib import Path

import pytest

from gpushare.cli.calibrate import calibrate as command
from gpushare.core.api import ConditionStatus
from gpushare.core.gpu import GpuInfo, interval_widening
from gpushare.core.interference import InterferenceModel, model_from_json
from gpushare.data import default_model
from gpushare.research.calibration.run import CalibrationOrder, calibrate, plan_of
from gpushare.research.dataset import parse
from gpushare.research.interference import training
from gpushare.research.interference.fit import fit_model
from gpushare.research.solo_profiles import profile_of
from gpushare.runtime.models import MODELS_VARIABLE, fitted_on
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import conditions_of

L4 = "NVIDIA L4"
PROGRAMS = (
    "resnet50-train-fp32-b32",
    "gemm-fp32-4096",
    "gpt-train-tf32-b8",
    "bert-infer-fp16-b1",
    "stream-fp32-512m",
    "lstm-train-fp32-b64",
)
ORDER = CalibrationOrder(1, 90, workloads=PROGRAMS, simulated=L4)


def measure(output: Path, order: CalibrationOrder = ORDER) -> tuple[int, list[str]]:
    log: list[str] = []
    return calibrate(output, order, budget_seconds=60.0, progress=lambda *_: None, log=log.append), log


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, InterferenceModel]:
    folder = tmp_path_factory.mktemp("models")
    dataset = folder / "l4.jsonl"
    measure(dataset)
    source = dataset.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "STEPS", 5)  # how good it is, is another test's
        model = fit_model(parse(source.splitlines()), seed=1, source=source, progress=lambda *_: None, members=1)
    (folder / "l4.json").write_text(model.to_json())
    return folder, model


def test_a_plan_says_what_is_left_and_a_dataset_is_gone_on_with(tmp_path: Path) -> None:
    output = tmp_path / "l4.jsonl"
    plan = plan_of(ORDER, output)
    assert plan.left == sum(len(phase.runs) for phase in plan.phases) >= 90
    assert 60 < plan.seconds < 200
    written, log = measure(output)
    assert written == plan.left
    assert log[0] == plan.words(60.0)
    assert "call it again" in log[0]
    assert json.loads(output.read_text().splitlines()[0]) == {
        "schema": "gpushare.io/colocation/v1",
        "gpu_model": L4,
        "driver": "simulated",
        "mechanism": "mps",
    }
    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:40]))
    assert plan_of(ORDER, output).left == plan.left - 39
    assert measure(output)[0] == plan.left - 39
    assert plan_of(ORDER, output).seconds == 0.0


def test_the_standard_plan_fits_a_quarter_of_an_hour_with_the_fit(tmp_path: Path) -> None:
    defaults = {name: each.default for name, each in inspect.signature(command).parameters.items()}
    assert defaults["budget"] <= 10.0
    order = CalibrationOrder(defaults["phases"], defaults["runs_per_phase"], simulated=L4)
    plan = plan_of(order, tmp_path / "none")
    assert plan.seconds < 600.0
    assert max(len(phase.cells) for phase in plan.phases) <= 48


def test_an_unknown_workload_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no workload is called nonesuch"):
        plan_of(CalibrationOrder(workloads=("nonesuch",), simulated=L4), tmp_path / "none")


def test_the_calibrated_gpu_has_its_own_model_and_narrower_intervals(
    fitted: tuple[Path, InterferenceModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = fitted
    assert model.gpu_model == L4
    profile = profile_of(parse((folder / "l4.jsonl").read_bytes().splitlines()), PROGRAMS[0])
    pair = [(profile, 50), (profile, 50)]
    default_model.cache_clear()
    strange = default_model().for_gpu(L4)
    assert strange.widening == 1.75
    monkeypatch.setenv(MODELS_VARIABLE, str(folder))
    default_model.cache_clear()
    try:
        chosen = default_model().for_gpu(L4)
        others = [default_model().for_gpu(name) for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB")]
    finally:
        default_model.cache_clear()
    assert (chosen.gpu_model, chosen.widening) == (L4, 1.0)
    assert chosen.predict(pair) == model_from_json(model.to_json()).predict(pair)
    assert [each.widening for each in others] == [1.0, interval_widening("NVIDIA A100-SXM4-80GB")]


def condition(gpu_model: str, models: tuple[str, ...]) -> tuple[ConditionStatus, str]:
    state = NodeState(lambda: 0.0)
    state.set_gpus((GpuInfo("GPU-a", 0, gpu_model, 23034, 58),))
    [found] = [each for each in conditions_of(state, fitted_on=models) if each.type == "ModelCalibrated"]
    return found.status, found.message or ""


def test_the_nodes_condition_follows(fitted: tuple[Path, InterferenceModel]) -> None:
    known = ("NVIDIA H200", *fitted_on(str(fitted[0])))
    assert known == ("NVIDIA H200", L4)
    assert condition(L4, known) == (ConditionStatus.TRUE, "")
    status, message = condition("NVIDIA A100-SXM4-80GB", known)
    assert status is ConditionStatus.FALSE
    assert "fitted on NVIDIA H200, NVIDIA L4;" in message
    assert condition(L4, known[:1])[0] is ConditionStatus.FALSE


def test_damaged_artefacts_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "odd.json").write_text('{"gpu_model": 3}')
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    assert fitted_on(str(tmp_path)) == ()
    assert fitted_on("") == fitted_on(str(tmp_path / "none")) == ()
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path))
    default_model.cache_clear()
    try:
        assert default_model().others == ()
    finally:
        default_model.cache_clear()
    for name in ("broken.json", "odd.json", "bytes.json"):
        assert name in caplog.text
