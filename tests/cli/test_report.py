"""`gpushare report` from a real Prometheus and from a snapshot: figures one can reckon by hand, and trouble."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from histories import UNTIL, prometheus_with_history
from realprometheus import Prometheus

from gpushare.cli import main as command
from gpushare.core.api import GpuNode, GpuNodeStatus, GpuStatus, TenantStatus, names

Run = Callable[..., int]


@pytest.fixture
def gpushare(monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*arguments: object) -> int:
        monkeypatch.setattr("sys.argv", ["gpushare", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            command()
        return int(stopped.value.code or 0)

    return run


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    running = prometheus_with_history(tmp_path_factory.mktemp("prometheus"))
    yield running
    running.stop()


@pytest.fixture
def reported(prometheus: Prometheus, gpushare: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The figures of the two hours, and the page beside them."""
    where = ("--prometheus", prometheus.url, "--since", "2h", "--until", UNTIL, "--points", 120)
    assert gpushare("report", *where, "-o", tmp_path / "page.html", "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_gpus_used_and_progress_gained(reported: Any) -> None:
    assert reported["unit"] == "GPU-hours"
    assert reported["step_seconds"] == 60
    assert reported["gpus_in_use"] == pytest.approx(2.0, rel=0.02)
    assert reported["progressed"] == pytest.approx((78 + 81) / 60, rel=0.02)


def test_time_without_figures_is_not_time_without_work(
    prometheus: Prometheus, gpushare: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prometheus has the last two of these four hours; GPU-a was in use in all of them."""
    where = ("--prometheus", prometheus.url, "--since", "4h", "--until", UNTIL, "--points", 120)
    assert gpushare("report", *where, "-o", tmp_path / "page.html", "--json") == 0
    [note] = json.loads(capsys.readouterr().out)["notes"]
    assert re.fullmatch(r"Prometheus has no figures for (1\.9|2\.0) h of these 4\.0 h: .*", note)
    page = (tmp_path / "page.html").read_text()
    assert note in page
    assert "1.0 of 2.0" in page


def test_gpus_spared_are_the_progress_above_the_gpus_in_use(reported: Any, tmp_path: Path) -> None:
    # train alone spares nothing; beside serve they make 1.5 on one GPU for 60 min, then 1.3 for 30 min
    assert reported["spared"] == pytest.approx(0.5 * 1 + 0.3 * 0.5, rel=0.03)
    assert f"{reported['spared']:.1f} GPU-hours</dd>" in (tmp_path / "page.html").read_text().replace(
        "<small>", "</dd>"
    )


def test_showback_by_namespace_says_asked_given_and_progressed(reported: Any) -> None:
    train, serve = reported["namespaces"]
    assert (train["namespace"], serve["namespace"]) == ("team-train", "team-serve")
    assert [train[name] for name in ("asked", "given", "progressed")] == pytest.approx([1.0, 1.0, 1.3], rel=0.02)
    assert [serve[name] for name in ("asked", "given", "progressed")] == pytest.approx(
        [1.0, 0.375, 1.35], rel=0.03
    )
    assert (train["pods"], serve["pods"]) == (1, 1)


def test_promises_kept(reported: Any) -> None:
    assert reported["promise_kept_ratio"] == pytest.approx(1 - 30 / 210, abs=0.01)
    kept = {row["workload"]: row["kept_ratio"] for row in reported["workloads"]}
    assert kept["serve-job"] == 1
    assert kept["train-job"] == pytest.approx(0.75, abs=0.01)


def test_who_slowed_whom_is_against_what_each_made_alone(reported: Any) -> None:
    first, second = reported["neighbours"]
    assert (first["slowed"], first["by"]) == (["team-train", "train-job"], ["team-serve", "serve-job"])
    assert first["alone_ratio"] == pytest.approx(1.0)
    assert first["lost"] == pytest.approx(0.7, rel=0.03)
    assert first["together"] > first["lost"]
    assert second["lost"] == pytest.approx(0.15, rel=0.03)


def test_who_would_gain_from_another_fraction(reported: Any) -> None:
    [row] = reported["fractions"]  # serve holds what its profile recommends
    assert row["workload"] == ["team-train", "train-job"]
    assert (row["share_ratio"], row["recommended_ratio"]) == pytest.approx((0.5, 0.25))
    assert row["freed"] == pytest.approx(0.25 * 2, rel=0.02)
    assert row["faster"] == pytest.approx(-0.1 * 2, rel=0.02)
    assert row["gain"] == pytest.approx(0.3, rel=0.02)


def test_the_page_is_one_small_file_that_names_what_was_found(reported: Any, tmp_path: Path) -> None:
    page = (tmp_path / "page.html").read_text()
    assert len(page) < 1_500_000
    for words in ("1.0 of 2.0", f"{reported['promise_kept_ratio']:.1%}", "team-train/train-job", "gained in all"):
        assert words in page
    assert "//" not in page.replace("http://127.0.0.1", "")  # nothing is fetched from anywhere


def test_a_snapshot_is_a_report_of_one_moment(gpushare: Run, tmp_path: Path, capsys: Any) -> None:
    tenant = TenantStatus(
        pod_uid="u", namespace="shop", pod="web-0", share_percent=50, progress_ratio=0.8, promise_ratio=0.9
    )
    node = GpuNode("n", GpuNodeStatus.of((GpuStatus(uuid="GPU-0", tenants=(tenant,)), GpuStatus(uuid="GPU-1"))))
    curve = [{"threadPercentage": 30, "progress": 0.7}, {"threadPercentage": 50, "progress": 0.8}]
    profile = {"counters": {"sm_util": 0.5, "fp32_util": 0.4}, "capCurve": curve}
    owner = [{"kind": "Pod", "uid": "u", "name": "web-0", "apiVersion": "v1"}]
    share = {
        "metadata": {"namespace": "shop", "name": "web", "ownerReferences": owner},
        "status": {"recommendedFraction": "0.3", "profile": profile},
    }
    limits = {"limits": {names.SHARE_RESOURCE: "50"}}
    pod = {
        "metadata": {"namespace": "shop", "name": "web-0", "uid": "u", "annotations": {names.FRACTION: "0.5"}},
        "spec": {"containers": [{"resources": limits}]},
    }
    objects = {"settings": None, "nodes": [], "gpunodes": [node.to_object()], "gpushares": [share], "pods": [pod]}
    (tmp_path / "cluster.json").write_text(json.dumps(objects))
    assert gpushare("report", "--snapshot", tmp_path, "-o", tmp_path / "page.html", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["unit"], found["gpus_in_use"], found["progressed"]) == ("GPUs", 1.0, 0.8)
    assert found["promise_kept_ratio"] == 0
    [row] = found["workloads"]
    assert (row["workload"], row["asked"], row["given"]) == ("web", 0.5, 0.5)
    [fraction] = found["fractions"]
    assert [fraction[name] for name in ("recommended_ratio", "freed", "faster", "gain")] == pytest.approx(
        [0.3, 0.2, -0.1, 0.1]
    )
    assert "one moment" in (tmp_path / "page.html").read_text()


def test_a_snapshot_without_gpus_is_status_3(gpushare: Run, tmp_path: Path, capsys: Any) -> None:
    objects = {"settings": None, "nodes": [], "gpunodes": [], "gpushares": [], "pods": []}
    (tmp_path / "cluster.json").write_text(json.dumps(objects))
    status, err = _fails(gpushare, capsys, tmp_path, "--snapshot", tmp_path)
    assert (status, "no GPU that gpushare manages" in err) == (3, True)


def _fails(gpushare: Run, capsys: Any, tmp_path: Path, *arguments: object) -> tuple[int, str]:
    status = gpushare("report", *arguments, "-o", tmp_path / "page.html")
    err = capsys.readouterr().err
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err
    assert not (tmp_path / "page.html").exists()
    return status, err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "say where the figures come from"),
        (("--prometheus", "http://127.0.0.1:1", "--snapshot", "x"), "say where the figures come from"),
        (("--prometheus", "localhost:9090"), "is no address"),
        (("--prometheus", "http://127.0.0.1:1", "--since", "a day"), "is no span of time"),
        (("--prometheus", "http://127.0.0.1:1", "--until", "noon"), "is no time"),
        (("--prometheus", "http://127.0.0.1:1", "--since", "999999w"), "reaches back to before 1970"),
        (("--prometheus", "http://127.0.0.1:1", "--until", "1970-01-01"), "reaches back to before 1970"),
        (("--prometheus", "http://127.0.0.1:1", "--token-file", "/nowhere"), "cannot be read"),
        (("--snapshot", "/nowhere"), "holds no cluster.json"),
    ],
)
def test_wrong_words_are_status_2(gpushare: Run, capsys: Any, tmp_path: Path, arguments: Any, words: str) -> None:
    status, err = _fails(gpushare, capsys, tmp_path, *arguments)
    assert (status, words in err) == (2, True), err


def test_a_prometheus_without_gpushare_is_status_3(
    prometheus: Prometheus, gpushare: Run, capsys: Any, tmp_path: Path
) -> None:
    status, err = _fails(gpushare, capsys, tmp_path, "--prometheus", prometheus.url, "--until", "2020-01-01T00:00")
    assert (status, "no figure of gpushare" in err) == (3, True)


def test_a_span_that_ends_before_1970_is_not_asked_for(
    prometheus: Prometheus, gpushare: Run, capsys: Any, tmp_path: Path
) -> None:
    where = ("--prometheus", prometheus.url, "--until", "1800-01-01T00:00")
    status, err = _fails(gpushare, capsys, tmp_path, *where)
    assert (status, '--since "24h" reaches back to before 1970, where no figure can be' in err) == (2, True), err
