import json
import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.api import JobClass
from gpushare.mps.layout import (
    Decisions,
    GpuDirectory,
    PodDecision,
    decisions_reader,
    gpu_directories,
    status_reader,
    write_atomically,
    write_decisions,
    write_status,
)
from gpushare.mps.status import (
    ClientStatus,
    GateState,
    GateStatus,
    HeldStatus,
    HoldReason,
    Mismatch,
    MismatchKind,
    SelfTest,
    SelfTestResult,
    TurnedAway,
    TurnStatistics,
)


@pytest.fixture
def gpu(tmp_path):
    gpu = GpuDirectory.of(tmp_path, "GPU-1")
    gpu.create()
    return gpu


def test_tenants_see_one_open_directory_and_nothing_of_the_rest(gpu):
    assert list(gpu.tenant.iterdir()) == []
    assert gpu.tenant.stat().st_mode & 0o777 == 0o755
    assert gpu.pipe.stat().st_mode & 0o777 == 0o700
    assert gpu.log.stat().st_mode & 0o777 == 0o700
    assert gpu_directories(gpu.path.parent) == (gpu,)


def test_no_directory_holds_no_gpus(tmp_path):
    assert gpu_directories(tmp_path / "missing") == ()


@given(
    st.dictionaries(
        st.uuids().map(str),
        st.builds(PodDecision, st.integers(1, 100), st.integers(1, 2**20), processes=st.integers(1, 48)),
        max_size=5,
    )
)
def test_decisions_read_back_as_written(pods):
    decisions = Decisions(pods)
    assert Decisions.from_json(json.loads(json.dumps(decisions.to_json()))) == decisions


def test_the_files_form_is_what_agent_and_gate_agreed_on(gpu):
    write_decisions(gpu, Decisions({"uid": PodDecision(25, 8192, JobClass.LATENCY)}))
    assert json.loads(gpu.decisions.read_text()) == {
        "version": 1,
        "pods": {"uid": {"thread_percentage": 25, "memory_mib": 8192, "job_class": "latency"}},
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 2, "pods": {}}',
        '{"version": 1}',
        '{"version": 1, "pods": []}',
        '{"version":1,"pods":{"a":{"thread_percentage":0,"memory_mib":1}}}',
        '{"version":1,"pods":{"a":{"thread_percentage":101,"memory_mib":1}}}',
        '{"version":1,"pods":{"a":{"thread_percentage":true,"memory_mib":1}}}',
        '{"version":1,"pods":{"a":{"thread_percentage":25,"memory_mib":-1}}}',
        '{"version":1,"pods":{"a":{"thread_percentage":25,"memory_mib":1,"job_class":7}}}',
        '{"version":1,"pods":{"a":7}}',
    ],
)
def test_a_bad_file_is_one_logged_error_and_the_last_good_value_stays(gpu, text, caplog):
    reader = decisions_reader(gpu)
    write_decisions(gpu, Decisions({"good": PodDecision(25, 1)}))
    good = reader.read()
    gpu.decisions.write_text(text)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert reader.read() == good
    assert len(caplog.records) == 1
    assert reader.bad_reads == 1
    write_decisions(gpu, Decisions({"new": PodDecision(30, 2)}))
    assert set(reader.read().pods) == {"new"}


@pytest.mark.parametrize("processes", [0, -1, 1.5, "4", True, None])
def test_a_number_of_processes_that_is_none_keeps_the_former_decisions(processes):
    pod = {"thread_percentage": 25, "memory_mib": 1024, "processes": processes}
    with pytest.raises(ValueError, match=r"pod a: processes .* is not a positive integer"):
        Decisions.from_json({"version": 1, "pods": {"a": pod}})


@pytest.mark.parametrize("clients", [0, -1, 1.5, "4", True])
def test_a_number_of_clients_that_is_none_keeps_the_former_decisions(clients):
    pod = {"thread_percentage": 25, "memory_mib": 1024, "clients": clients}
    with pytest.raises(ValueError, match=r"pod a: clients .* is not a positive integer"):
        Decisions.from_json({"version": 1, "pods": {"a": pod}})


def test_an_earlier_agent_says_nothing_of_clients():
    pods = {"a": PodDecision(25, 1024), "b": PodDecision(25, 1024, clients=12)}
    written = Decisions(pods).to_json()
    assert "clients" not in written["pods"]["a"]
    assert Decisions.from_json(written) == Decisions(pods)


def test_a_later_agents_decisions_are_read_without_what_is_new_in_them(gpu):
    """Before: one class that an older gate does not know, and it read none of the file."""
    write_atomically(
        gpu.decisions,
        {
            "version": 1,
            "epoch": 7,
            "pods": {
                "new": {"thread_percentage": 25, "memory_mib": 1024, "job_class": "batch", "priority": 3},
                "old": {"thread_percentage": 30, "memory_mib": 2048, "job_class": "latency"},
            },
        },
    )
    decisions = decisions_reader(gpu).read()
    assert decisions.pods == {
        "new": PodDecision(25, 1024, is_class_known=False),
        "old": PodDecision(30, 2048, JobClass.LATENCY),
    }
    assert decisions.unknown == 3


def test_a_later_gates_status_is_read_without_what_is_new_in_it(gpu):
    data = full_status().to_json()
    data["state"] = "Hibernating"
    data["held"][0]["reason"] = "FullMoon"
    unheard = {"kind": "Unheard", "pod_uid": None, "pid": 1, "detail": ""}
    data["mismatches"] = [*data["mismatches"], unheard]
    data["self_test"]["result"] = "Maybe"
    write_atomically(gpu.status, data)
    status = status_reader(gpu).read()
    assert (status.state, status.waiting_connections[0].reason) == (GateState.DOWN, HoldReason.OTHER)
    assert status.mismatches == full_status().mismatches
    assert status.self_test.result is SelfTestResult.PENDING


def test_what_killed_writers_left_behind_goes(gpu):
    """Before: a temporary file for each kill -9 in the middle of a write, for ever."""
    for number in range(5):
        (gpu.path / f".gate.json.{number}").write_text("{")
    write_atomically(gpu.decisions, {})
    gpu.remove_left_behind(time.time() + 30)
    assert len(list(gpu.path.glob(".*"))) == 5, "a write may go on"
    gpu.remove_left_behind(time.time() + 61)
    assert list(gpu.path.glob(".*")) == []
    assert gpu.decisions.exists()


def test_a_file_that_could_not_be_read_for_a_moment_is_read_again(gpu, monkeypatch, caplog):
    """Before: it counted as read until the agent replaced it, and its newest pods waited until then."""
    reader = decisions_reader(gpu)
    write_decisions(gpu, Decisions({"a": PodDecision(25, 4096)}))
    with monkeypatch.context() as short:

        def fails(_path):
            raise OSError(12, "Cannot allocate memory")

        short.setattr(type(gpu.decisions), "read_bytes", fails)
        for _ in range(3):
            assert reader.read() == Decisions()
    assert list(reader.read().pods) == ["a"]
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot read {gpu.decisions}, keeping its previous content: [Errno 12] Cannot allocate memory"
    ]


def test_the_last_decisions_stay_in_force_when_their_file_is_removed(gpu):
    reader = decisions_reader(gpu)
    assert reader.read() == Decisions()
    write_decisions(gpu, Decisions({"a": PodDecision(25, 1)}))
    assert "a" in reader.read().pods
    gpu.decisions.unlink()
    assert "a" in reader.read().pods


def test_a_failed_write_leaves_the_old_file_and_nothing_else(gpu):
    write_atomically(gpu.decisions, {"old": True})
    with pytest.raises(TypeError):
        write_atomically(gpu.decisions, {"bad": object()})
    assert json.loads(gpu.decisions.read_text()) == {"old": True}
    assert sorted(path.name for path in gpu.path.iterdir()) == ["decisions.json", "log", "pipe", "tenant"]


def full_status() -> GateStatus:
    return GateStatus(
        "GPU-1",
        GateState.FAULT,
        1.5,
        "why",
        7,
        1.0,
        8,
        1.1,
        2,
        4,
        9,
        3,
        "fault",
        1.2,
        SelfTest(SelfTestResult.PASSED, "26 of 132", "580", 1.3),
        (ClientStatus(10, "uid", 25, 8192, 100, 1.4, 99), ClientStatus(11, None)),
        (HeldStatus(12, None, HoldReason.UNKNOWN_POD, 1.0),),
        {"ControlCommand": 4},
        (Mismatch(MismatchKind.STALE_CEILING, "uid", 13, "detail"),),
        5,
        TurnStatistics(1, 2, 3.0, 4.0, 5.0),
        ("uid", "uid-of-one-that-left"),
        turned_away=(TurnedAway(14, "uid", 808, 1.4),),
    )


def test_a_status_reads_back_as_written(gpu):
    write_status(gpu, full_status())
    assert status_reader(gpu).read() == full_status()


def test_a_later_versions_new_fields_are_no_trouble(gpu):
    data = full_status().to_json()
    data["new_field"] = 1
    data["clients"][0]["new_field"] = data["turned_away"][0]["new_field"] = 2
    write_atomically(gpu.status, data)
    assert status_reader(gpu).read() == full_status()
