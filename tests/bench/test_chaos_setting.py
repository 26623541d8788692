"""What a chaos run leaves: nothing, also where kubelet does not end a pod."""

import subprocess
from typing import Any

import pytest
from bench.chaos import node, setting

UID = "8f5e2b1a-0000-4000-8000-000000000001"


class StuckApi:
    """An API server with one load, whose pod stays until it is removed by force."""

    def __init__(self) -> None:
        self.pods = [{"metadata": {"name": "stays", "uid": UID}, "status": {"phase": "Running"}}]

    def items(self, path: str) -> list[dict[str, Any]]:
        if path == "/api/v1/namespaces":
            names = ["default", *(["chaos-e2e"] if self.pods else [])]
            return [{"metadata": {"name": name}} for name in names]
        assert path == "/api/v1/namespaces/chaos-e2e/pods"
        return list(self.pods)

    def delete(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        if path.endswith("/pods/stays") and body is not None and body["gracePeriodSeconds"] == 0:
            self.pods.clear()
        return {}


def test_a_pod_that_is_not_ended_is_told_removed_by_force_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as its, subprocess.Popen(["sleep", "600"]) as anothers:
        found = (
            node.RunningProcess(its.pid, UID, "sleep 600", "sleep"),
            node.RunningProcess(anothers.pid, UID.replace("1", "2"), "sleep 600", "sleep"),
        )
        monkeypatch.setattr(node, "processes", lambda: found)
        monkeypatch.setattr(setting, "GONE_SECONDS", 0.0)
        api = StuckApi()
        with pytest.warns(UserWarning, match=r"pod chaos-e2e/stays was not ended: .*Running"):
            setting.remove_namespaces(api)  # type: ignore[arg-type]
        assert api.pods == []
        assert its.wait(timeout=60) == -9
        assert anothers.poll() is None
        anothers.kill()
