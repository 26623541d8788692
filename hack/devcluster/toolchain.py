"""Fetch Go where the machine has none: the toolchain that Go itself would fetch, from the module proxy."""

import os
import shutil
import urllib.request
import zipfile
from pathlib import Path

from devcluster import cache, progress

GO_VERSION = "1.26.8"


def fetch_go() -> Path:
    """Return the `go` program of the pinned toolchain, from the cache or the first proxy of GOPROXY."""
    proxy = os.environ.get("GOPROXY", "https://proxy.golang.org").replace("|", ",").split(",")[0].rstrip("/")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    name = f"v0.0.1-go{GO_VERSION}.linux-{machine}"

    def build(into: Path) -> None:
        archive = into / "go.zip"
        with progress.step(f"fetching Go {GO_VERSION} (first time only)"):
            url = f"{proxy}/golang.org/toolchain/@v/{name}.zip"
            with urllib.request.urlopen(url, timeout=600) as response, archive.open("wb") as out:
                shutil.copyfileobj(response, out)
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(into)
            archive.unlink()
            (into / f"golang.org/toolchain@{name}").rename(into / "go")
            for program in [*(into / "go/bin").iterdir(), *(into / "go/pkg/tool").rglob("*")]:
                program.chmod(0o755)

    return cache.cached("go", cache.key_of(name), build) / "go/bin/go"
