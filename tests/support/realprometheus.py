"""Debian's own Prometheus and promtool, for tests: fetched once into the cache, run on a port of their own."""

import json
import os
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from devcluster import debian
from devcluster.loopback import unused_port
from devcluster.progress import Failed
from installed import lacking

START_SECONDS = 60.0


def programs() -> Path:
    """The directory with `prometheus` and `promtool`; skips where they cannot be had."""
    try:
        return debian.prometheus()
    except Failed as failed:
        lacking("prometheus", f"no Prometheus: {failed}")


def promtool(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(programs() / "promtool"), *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


class Prometheus:
    """A running Prometheus with a folder of its own; `stop` ends it."""

    def __init__(self, folder: Path, config: Mapping[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.url = f"http://127.0.0.1:{unused_port()}"
        written = folder / "prometheus.yml"
        written.write_text(json.dumps(config or {}))
        self.log = folder / "log"
        command: Sequence[str] = [
            str(programs() / "prometheus"),
            f"--config.file={written}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--storage.tsdb.retention.time=100y",  # histories of tests lie in the past
            f"--web.listen-address={self.url.removeprefix('http://')}",
            f"--web.console.templates={folder}",
            f"--web.console.libraries={folder}",
        ]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env={**os.environ})
        deadline = time.monotonic() + START_SECONDS
        while not self._ready():
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.stop()
                raise AssertionError(f"Prometheus did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def _ready(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an API answer."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant query's result; raises urllib's HTTPError where Prometheus refuses the expression."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def label_values(self, selector: str, label: str) -> list[str]:
        """What Grafana's label_values() lists."""
        found: list[str] = self.get(f"label/{label}/values", **{"match[]": selector})
        return found

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
