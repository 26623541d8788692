"""hack/chaos --upgrade: a stage under churn with fakes and a clock that the test turns, its record and table."""

import json
import subprocess
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from bench.chaos import cli, report
from bench.chaos.auditor import Rule
from bench.chaos.churn import Churn
from bench.chaos.load import Load
from bench.chaos.look import Eye
from bench.chaos.parts import Component
from bench.chaos.run import write_header
from bench.chaos.upgrade import FORMER, SETTLED_SECONDS, UpgradeStage, former_sources, stage
from bench.chaos.upgrading import UPGRADE_FILE, read_stages
from chaosfakes import BreakableCluster, StoredPods
from devcluster.progress import Failed
from devcluster.settings import REPOSITORY

DONE = UpgradeStage("upgrade", 200.0, 60, 58, 4.2, (), ())


@pytest.fixture
def cluster() -> BreakableCluster:
    return BreakableCluster(StoredPods())


@pytest.fixture
def churn(cluster: BreakableCluster) -> Churn:
    load = Load(cluster.api, "load", "image", 5, gpus=1, gpu_memory_mib=143_000)
    return Churn(cluster, load, cluster, pods_per_minute=20, population=4, clock=lambda: cluster.clock)


def staged(cluster: BreakableCluster, churn: Churn, **changes: object) -> UpgradeStage:
    arguments: dict = {"act": lambda: None, "seconds": 60.0} | changes
    act = arguments.pop("act")
    return stage(churn, "upgrade", act, clock=lambda: cluster.clock, sleep=cluster.sleep, **arguments)


def test_a_stage_churns_at_the_rate_while_helm_works_and_after_and_settles(
    cluster: BreakableCluster, churn: Churn
) -> None:
    done: list[float] = []
    found = staged(cluster, churn, when_done=lambda: done.append(cluster.clock))
    assert found.violations == found.waited_for == ()
    assert found.settled_seconds is not None
    assert found.seconds >= 60
    assert 18 <= found.deleted <= 21, "20 a minute, of which the last may still go"
    assert found.created >= found.deleted
    assert len(done) == 1
    again = staged(cluster, churn)
    assert 18 <= again.deleted <= 22, "of this stage alone"


def test_a_tenant_that_ends_meanwhile_is_broken(cluster: BreakableCluster, churn: Churn) -> None:
    cluster.ended.add("load-1")
    found = staged(cluster, churn)
    assert [one.partition(": ")[0] for one in found.violations] == [Rule.ENDED]


def test_what_does_not_settle_is_told(cluster: BreakableCluster, churn: Churn) -> None:
    cluster.recovers_at = 1e9
    found = staged(cluster, churn, seconds=10.0)
    assert found.settled_seconds is None
    assert found.waited_for == ("agent is not ready",)
    assert cluster.clock >= 10.0 + SETTLED_SECONDS


def test_churn_goes_on_as_long_as_helm_works_and_its_failure_ends_the_stage(
    cluster: BreakableCluster, churn: Churn
) -> None:
    churned, release = [], threading.Event()

    def act() -> None:
        release.wait()
        raise Failed("helm: no")

    def sleep(seconds: float) -> None:
        cluster.sleep(seconds)
        churned.append(churn.load.created)
        if churned[-1] > 30:  # seen by this test alone while helm works
            release.set()

    with pytest.raises(Failed, match="helm: no"):
        stage(churn, "upgrade", act, seconds=0.0, clock=lambda: cluster.clock, sleep=sleep)
    assert churned[-1] > 30


def test_the_record_is_read_as_it_was_written_and_the_table_names_what_broke(tmp_path: Path) -> None:
    broken = replace(
        DONE,
        name="rollback",
        settled_seconds=None,
        waited_for=("agent is not ready",),
        violations=(f"{Rule.REJECTED}: load-7", f"{Rule.REJECTED}: load-8"),
    )
    (tmp_path / UPGRADE_FILE).write_text(json.dumps([asdict(DONE), asdict(broken)]))
    assert read_stages(tmp_path) == [DONE, broken]
    table = report.upgrade_table([DONE, broken], "2026-11-23, from abc and back")
    assert "| upgrade | 200 | 60 | 58 | 4.2 | none |" in table
    assert f"| rollback | 200 | 60 | 58 | not | 2 {Rule.REJECTED} |" in table
    assert "- rollback, not settled: agent is not ready" in table
    assert table.count("load-7") == 1


def test_the_former_release_gets_todays_tools(tmp_path: Path) -> None:
    git = ["git", "-C", str(REPOSITORY), "cat-file", "-e", f"{FORMER}^{{commit}}"]
    if subprocess.run(git, capture_output=True, check=False).returncode:
        pytest.skip("a shallow clone: the former release is not in its history")
    sources = former_sources(FORMER, tmp_path / "former")
    assert (sources / "helm" / "gpushare" / "Chart.yaml").is_file()
    assert (sources / "hack" / "devcluster" / "cli.py").is_file()
    with pytest.raises(Failed, match="no sources"):
        former_sources("0" * 40, tmp_path / "none")


class ApiOfParts:
    """The pods of our parts alone."""

    def __init__(self) -> None:
        self.pods: dict[str, dict] = {}

    def items(self, path: str) -> list[dict]:
        return list(self.pods.values()) if path.endswith("gpushare-system/pods") else []


def part(name: str, component: str = "admission", containers: tuple[str, ...] = ("main",)) -> dict:
    labels = {"app.kubernetes.io/component": component}
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    spec = {"containers": [{"name": each} for each in containers]}
    return {"metadata": {"name": name, "uid": name, "labels": labels}, "spec": spec, "status": ready}


def test_a_thawer_that_is_away_is_missed_where_the_pod_has_one_although_the_pod_is_ready() -> None:
    api = ApiOfParts()
    eye = Eye(api)
    api.pods = {"a": part("a", "mps", ("host", "thawer")), "former": part("former", "mps", ("host",))}
    assert "0 of 1 processes of thawer run" in eye.picture().unready
    del api.pods["a"]
    assert not any("thawer" in one for one in eye.picture().unready)


def test_pods_that_an_upgrade_had_beside_others_are_not_missing_afterwards() -> None:
    api = ApiOfParts()
    eye = Eye(api)
    api.pods = {name: part(name) for name in ("a", "b", "c")}
    assert not any("pods of admission" in one for one in eye.picture().unready)
    del api.pods["c"]
    assert "2 of 3 pods of admission" in eye.picture().unready
    eye.count_parts_anew()
    assert not any("pods of admission" in one for one in eye.picture().unready)
    assert "0 of 2 processes of admission run" in eye.picture().unready
    eye.excused = frozenset({Component.ADMISSION})
    assert not any("processes of admission" in one for one in eye.picture().unready)


def test_the_report_has_every_upgrade_that_it_is_given(tmp_path: Path) -> None:
    directories = []
    for former in ("abc", "def"):
        directories.append(tmp_path / former)
        directories[-1].mkdir()
        header = {"date": "2026-11-23", "commit": "c", "machine": "m", "former": former, "pods_per_minute": 20.0}
        write_header(directories[-1], header)
        (directories[-1] / UPGRADE_FILE).write_text(json.dumps([asdict(DONE)]))
    page = tmp_path / "page.md"
    page.write_text("# Page\n")
    assert cli._report(directories, page) == 0
    written = page.read_text()
    assert "from abc and back, 20 pods a minute" in written
    assert "from def and back" in written
    assert written.count(report.UPGRADE_MARKS[0]) == 1
