"""Debian packages: installed, or only unpacked into the cache where a program runs from anywhere."""

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from devcluster import cache, progress
from devcluster.progress import Failed

_APT_ENV = {"DEBIAN_FRONTEND": "noninteractive"}


def install(packages: Collection[str]) -> None:
    """Install packages without starting their services; do nothing for none."""
    if not packages:
        return
    names = sorted(packages)
    if shutil.which("apt-get") is None:
        raise Failed(f"missing: {', '.join(names)} (Debian package names); install them and try again")
    env = {**os.environ, **_APT_ENV}
    with progress.step(f"installing Debian packages: {' '.join(names)}"):
        progress.run(["apt-get", "-qq", "update"], env=env)
        # policy-rc.d keeps Debian from starting its own etcd and containerd: we run them with our own state
        policy = Path("/usr/sbin/policy-rc.d")
        ours = not policy.exists()
        if ours:
            policy.write_text("#!/bin/sh\nexit 101\n")
            policy.chmod(0o755)
        try:
            progress.run(["apt-get", "-qq", "install", "--no-install-recommends", "-y", *names], env=env)
        finally:
            if ours:
                policy.unlink()


def prometheus() -> Path:
    """Return the directory with Debian's `prometheus` and `promtool`; nothing is installed, no service starts."""
    found = [shutil.which(program) for program in ("prometheus", "promtool")]
    if all(found):
        return Path(str(found[0])).parent
    return _unpacked("prometheus") / "usr" / "bin"


def chromium() -> Path:
    """Return Chromium; installed, as it needs libraries from some fifty other packages."""
    found = shutil.which("chromium")
    if found is None and os.geteuid() == 0:
        # fonts: a page without any has no text to look at
        install({"chromium", "fonts-dejavu-core"})
        found = shutil.which("chromium")
    if found is None:
        raise Failed("no chromium: install Debian's package (as root this happens by itself)")
    return Path(found)


def shell(name: str) -> Path:
    """Return zsh, fish or another whose package has its name; installed, as it looks for its own functions."""
    found = shutil.which(name)
    if found is None and os.geteuid() == 0:
        install({name})
        found = shutil.which(name)
    if found is None:
        raise Failed(f"no {name}: install Debian's package (as root this happens by itself)")
    return Path(found)


def busybox() -> Path:
    """Return a busybox without shared libraries."""
    return _unpacked("busybox-static") / "bin" / "busybox"


def _unpacked(package: str) -> Path:
    """Return the cached content of a package's archive."""
    if shutil.which("apt-get") is None:
        raise Failed(f"no {package}, and no apt-get to fetch Debian's package {package} with")

    def build(into: Path) -> None:
        env = {**os.environ, **_APT_ENV}
        download = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", package]
        with progress.step(f"fetching Debian's package {package} (first time only)"):
            try:
                progress.run(download, cwd=into, env=env, timeout_seconds=300)
            except Failed:  # a fresh machine has no lists of packages
                progress.run(["apt-get", "-qq", "update"], env=env, timeout_seconds=300)
                progress.run(download, cwd=into, env=env, timeout_seconds=300)
            (archive,) = into.glob("*.deb")
            progress.run(["dpkg-deb", "--extract", archive, into])
            archive.unlink()

    return cache.cached(f"debian-{package}", cache.key_of(package, _release()), build)


def _release() -> str:
    """Return the name of the Debian release, as each has its own packages."""
    release = Path("/etc/os-release")
    return release.read_text() if release.exists() else ""
