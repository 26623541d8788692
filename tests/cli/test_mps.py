import json
import os
import signal
import subprocess
import time
from dataclasses import replace

import pytest

from gpushare.cli import main as command
from gpushare.mps.identity import start_ticks_of
from gpushare.mps.layout import GpuDirectory, write_status
from gpushare.mps.status import ClientStatus, GateState, GateStatus


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["gpushare", "mps", *arguments])
    with pytest.raises(SystemExit) as stopped:
        command()
    return int(stopped.value.code or 0)


@pytest.fixture
def base(tmp_path):
    for number in (1, 2):
        gpu = GpuDirectory.of(tmp_path, f"GPU-{number}")
        gpu.create()
        status = GateStatus(
            gpu.uuid, GateState.ACTIVE, time.time(), clients=(ClientStatus(7, "uid", 25, 8192, 100),)
        )
        write_status(gpu, replace(status, clients=status.clients if number == 1 else ()))
    return str(tmp_path)


def test_status_of_every_gpu(monkeypatch, capsys, base):
    assert run(monkeypatch, "status", "--directory", base) == 0
    shown = capsys.readouterr().out
    assert "GPU-1" in shown
    assert "Active" in shown
    assert run(monkeypatch, "status", "--directory", base, "--json") == 0
    assert [(g["gpu_uuid"], g["state"], g["fresh"], g["held"]) for g in json.loads(capsys.readouterr().out)] == [
        ("GPU-1", "Active", True, []),
        ("GPU-2", "Active", True, []),
    ]


def test_clients_as_table_and_json(monkeypatch, capsys, base):
    assert run(monkeypatch, "clients", "--directory", base) == 0
    assert "8192 MiB" in capsys.readouterr().out
    assert run(monkeypatch, "clients", "--directory", base, "--json", "--gpu", "GPU-1") == 0
    (client,) = json.loads(capsys.readouterr().out)
    assert (client["pid"], client["pod_uid"], client["gpu_uuid"]) == (7, "uid", "GPU-1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "--directory", "/nonexistent"], "no GPU is kept here"),
        (["daemon", "log"], "2 GPUs are kept"),
        (["status", "--gpu", "GPU-9"], "no GPU GPU-9"),
        (["set", "--gpu", "GPU-1"], "nothing to set"),
        (["terminate", "--gpu", "GPU-1"], "either --pid or --pod"),
        (["daemon", "dance", "--gpu", "GPU-1"], "allowed are start, stop and log"),
        (["set", "--gpu", "GPU-1", "--thread-percentage", "20"], "cannot run nvidia-cuda-mps-control"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_code_2(monkeypatch, capsys, base, arguments, message):
    where = [] if "--directory" in arguments else ["--directory", base]
    monkeypatch.setenv("PATH", "/nonexistent")
    assert run(monkeypatch, *arguments, *where) == 2
    error = capsys.readouterr().err
    assert error.startswith("gpushare: ")
    assert message in error
    assert error.count("\n") == 1


def test_clients_of_a_gate_that_is_away_are_doubted(monkeypatch, capsys, base):
    gpu = GpuDirectory.of(base, "GPU-1")
    write_status(gpu, GateStatus("GPU-1", GateState.ACTIVE, time.time() - 100, clients=(ClientStatus(7, "uid"),)))
    GpuDirectory.of(base, "GPU-2").status.unlink()
    assert run(monkeypatch, "clients", "--directory", base, "--json") == 0
    out, err = capsys.readouterr()
    assert [each["pid"] for each in json.loads(out)] == [7]
    assert "GPU-1: the gate's status is 1" in err
    assert "GPU-2: there is no gate's status, so its clients are not known" in err


def test_nobody_ended_is_not_done(monkeypatch, capsys, base):
    """A pod's uid that is mistyped, or a gate that cannot be read, was "ended 0 clients" and status 0."""
    GpuDirectory.of(base, "GPU-2").status.write_text("")
    assert run(monkeypatch, "terminate", "--directory", base, "--pod", "nobody") == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "no client of pod nobody is on GPU-1, GPU-2; GPU-2: there is no gate's status" in err


@pytest.mark.parametrize(
    "words",
    [("--thread-percentage", "0"), ("--thread-percentage", "101"), ("--memory-mib", "-5"), ("--priority", "2")],
)
def test_ceilings_that_no_server_has_are_refused_before_it_is_asked(monkeypatch, capsys, base, words):
    assert run(monkeypatch, "set", "--directory", base, "--gpu", "GPU-1", *words) == 2
    assert "invalid value for" in capsys.readouterr().err


def test_who_was_ended_is_told_though_another_client_is_refused(monkeypatch, capsys, base):
    """Before: only the refusal was told, as if nobody had been ended."""
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        first = ClientStatus(sleeper.pid, "uid", start_ticks=start_ticks_of(sleeper.pid))
        for number, clients in ((1, (ClientStatus(7, "uid"),)), (2, (first,))):
            gpu = GpuDirectory.of(base, f"GPU-{number}")
            write_status(gpu, GateStatus(gpu.uuid, GateState.ACTIVE, time.time(), clients=clients))
        assert run(monkeypatch, "terminate", "--directory", base, "--pod", "uid", "--json") == 2
        shown = capsys.readouterr()
        assert json.loads(shown.out) == [sleeper.pid]
        assert "client 7: the gate lists no such client" in shown.err
        assert sleeper.wait(60) == -signal.SIGKILL


def test_a_client_that_had_ended_already_is_told_as_that(monkeypatch, capsys, base):
    with subprocess.Popen(["true"]) as over:
        ticks = start_ticks_of(over.pid)
    gpu = GpuDirectory.of(base, "GPU-1")
    client = ClientStatus(over.pid, "uid", start_ticks=ticks or 1)
    write_status(gpu, GateStatus(gpu.uuid, GateState.ACTIVE, time.time(), gate_pid=os.getpid(), clients=(client,)))
    assert run(monkeypatch, "terminate", "--directory", base, "--gpu", "GPU-1", "--pid", str(over.pid)) == 3
    assert f"client {over.pid} has ended by itself" in capsys.readouterr().err
