"""`gpushare profile`: the golden table from nvprof's files, a command run on played devices, and bad input."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fakecluster import check_screen
from typer.testing import CliRunner

from gpushare.cli import profile
from gpushare.cli.errors import UsageError
from gpushare.core.gpu import Counters, DevicesError, GpuHealth, GpuInfo, GpuProcess, GpuSample, Health

DATA = Path(__file__).parents[1] / "research" / "data"
GPU = GpuInfo("GPU-a", 0, "NVIDIA H200", 143771, 132)


class Played:
    """Devices that give the scripted samples one after the other; with the last one the file `over` is there."""

    def __init__(self, samples: Sequence[GpuSample | DevicesError | None], others: int = 0) -> None:
        self.samples = [None, *samples]
        self.others = others
        self.over: Path | None = None

    def list(self) -> tuple[GpuInfo, ...]:
        return (GPU,)

    def left_out(self) -> dict[int, str]:
        return {}

    def driver_version(self) -> str | None:
        return None

    def health(self, uuid: str) -> GpuHealth:
        return GpuHealth(Health.HEALTHY)

    def sample(self, uuid: str) -> GpuSample | None:
        item = self.samples.pop(0) if self.samples else None
        if not self.samples and self.over is not None:
            self.over.touch()
        if isinstance(item, DevicesError):
            raise item
        return item

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        return tuple(GpuProcess(i, 1, is_mps_client=False) for i in range(self.others))

    def close(self) -> None: ...


WAIT = 'while [ ! -e "$0" ]; do sleep 0.01; done'  # a machine may be busy for longer than any fixed time


def run(devices: Played, *command: str) -> profile.ProgramProfile:
    """Profile a command; without one, what runs until every sample has been taken."""
    with TemporaryDirectory() as folder:
        over = Path(folder) / "over"
        if not command:
            devices.over, command = over, ("sh", "-c", WAIT, str(over))
        return profile.profile_command(devices, GPU, command, 0.01)


def test_windows_are_weighted_with_their_length() -> None:
    found = run(
        Played(
            [
                GpuSample(Counters(fp32_util=0.9, hmma_tensor_util=0.3), 3.0, 2000, 1.0),
                GpuSample(Counters(fp32_util=0.1, hmma_tensor_util=0.0), 1.0, 500, None),
            ]
        )
    )
    assert found.whole.counters.fp32_util == pytest.approx(0.7)
    assert found.whole.counters.pipes() == pytest.approx({"fp32": 0.7, "fp16": 0.225})
    assert (found.whole.nvml_utilization_ratio, found.whole.seconds, found.memory_peak_mib) == (1.0, 4.0, 2000)
    assert (found.exit_code, found.is_alone) == (0, True)
    assert json.loads(json.dumps(profile.profile_json(found, ["x"])))["whole_run"]["pipes"]["fp16"] == 0.225


def reading(use: float | None, nvml: float | None = 0.0, seconds: float = 0.5) -> GpuSample:
    counters = Counters() if use is None else Counters(graphics_util=use, sm_util=use, fp32_util=0.5 * use)
    return GpuSample(counters, seconds, 1000, nvml)


def test_figures_are_of_the_time_in_which_the_gpu_was_used() -> None:
    # 2 s of imports, 0.5 s of which the half is used, 3 s of work with a pause, an end, 1 s of shutting down
    use = [0, 0, 0, 0, 0.5, 1, 1, 1, 0, 1, 1, 0.2, 0, 0]
    found = run(Played([reading(u, nvml=1.0 if i > 3 else 0.0) for i, u in enumerate(use)]))
    assert (found.whole.seconds, found.active.seconds) == (7.0, 3.0)
    assert found.active.counters.sm_util == pytest.approx(5 / 6)  # the pause is the program's own
    assert found.active.nvml_utilization_ratio == 1.0
    assert found.whole.counters.sm_util == pytest.approx(5.7 / 14)
    told = profile.profile_json(found, ["x"])
    assert (told["seconds"], told["active_seconds"]) == (7.0, 3.0)
    assert told["pipes"]["fp32"] == pytest.approx(5 / 12, abs=1e-4)
    assert told["whole_run"]["sm_activity"] == pytest.approx(0.4071, abs=1e-4)


def test_a_short_use_keeps_its_edges() -> None:
    found = run(Played([reading(u) for u in (0, 0.5, 1, 0.5, 0)]))
    assert found.active.seconds == 1.5
    assert found.active.counters.sm_util == pytest.approx(2 / 3)


def test_without_counters_nvml_says_when_the_gpu_was_used() -> None:
    found = run(Played([reading(None, nvml=u) for u in (0.0, 0.4, 1.0, 1.0, 0.4, 0.0)]))
    assert (found.active.seconds, found.active.nvml_utilization_ratio) == (1.0, 1.0)


def test_forty_columns_are_enough(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "40", "TTY_COMPATIBLE": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    found = run(Played([reading(u, nvml=0.9) for u in (0, 0.5, 1, 0.5, 0)], others=1))
    profile._print_profile(found, ["python", "train.py", "--model", "resnet50"])
    shown = capsys.readouterr().out
    files = ["--summary", str(DATA / "nvprof_summary.csv"), "--metrics", str(DATA / "nvprof_metrics.csv")]
    shown += CliRunner().invoke(profile.app, ["nvprof", *files]).stdout
    lines = [line.rstrip() for line in shown.splitlines()]
    assert max(map(len, lines)) == 40
    check_screen("profile-run-40", "".join(f"{line}\n" for line in lines))


def test_a_command_that_never_used_the_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(Played([reading(0.0)] * 4))
    assert (found.active.seconds, found.whole.counters.sm_util) == (0.0, 0.0)
    assert profile.profile_json(found, ["x"])["nvml_utilization"] is None
    profile._print_profile(found, ["x"])
    assert "never used this GPU" in capsys.readouterr().out


def test_the_command_sees_the_gpu_that_is_sampled_and_its_exit_code_is_kept(tmp_path: Path) -> None:
    script = f'echo "$CUDA_VISIBLE_DEVICES" > {tmp_path}/seen; {WAIT}; exit 3'
    devices = Played([GpuSample(Counters(), 1.0, 1, None)], others=1)
    devices.over = tmp_path / "over"
    found = run(devices, "sh", "-c", script, str(devices.over))
    assert (found.exit_code, found.is_alone) == (3, False)
    assert (tmp_path / "seen").read_text().strip() == "GPU-a"


def test_trouble_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="no-such-program: No such file"):
        run(Played([]), "no-such-program")
    with pytest.raises(UsageError, match="before one window was measured"):
        run(Played([]), "true")
    with pytest.raises(UsageError, match="GPU is lost"):
        run(Played([DevicesError("GPU is lost", retryable=True)] * 3))
    with pytest.raises(UsageError, match=r'--gpu "7" is not on this machine; there are: 0 \(GPU-a\)'):
        profile.choose_gpu((GPU,), "7")


def test_nvprof_golden() -> None:
    arguments = [
        "nvprof",
        "--summary",
        str(DATA / "nvprof_summary.csv"),
        "--metrics",
        str(DATA / "nvprof_metrics.csv"),
    ]
    told = CliRunner().invoke(profile.app, [*arguments, "--json"])
    assert told.exit_code == 0
    answer = json.loads(told.stdout)
    assert answer["pipes"]["fp32"] == {"utilization": 0.55, "level": 5.5, "coverage": pytest.approx(0.857143)}
    assert answer["kernels_without_metrics"] == ["unmeasured_kernel(int)"]
    shown = CliRunner().invoke(profile.app, arguments)
    assert "55.0%" in shown.stdout


def test_a_broken_file_is_named_with_its_line(tmp_path: Path) -> None:
    broken = tmp_path / "s.csv"
    broken.write_text((DATA / "nvprof_summary.csv").read_text().replace("400.000000", "lots"))
    told = CliRunner().invoke(
        profile.app, ["nvprof", "--summary", str(broken), "--metrics", str(DATA / "nvprof_metrics.csv")]
    )
    assert isinstance(told.exception, UsageError)
    assert str(told.exception).startswith(f"{broken}: line 7: Time:")
