"""Build gpushare's image with the tools of this machine, and the scheduler's image, as archives in the cache.

With a Docker engine: `docker build` on the Dockerfile's own base. Without one: buildah (no daemon), on a base made
by debootstrap, with the dependencies as wheels from the host's package index; no registry of images is needed.
"""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

from devcluster import archive, cache, tools
from devcluster.progress import Failed, run, step
from devcluster.settings import IMAGE, KUBERNETES_VERSION, REPOSITORY, SCHEDULER_IMAGE, cache_dir

BASE_PACKAGES = "python3,python3-venv"
# What a base image does not need once it is built.
BASE_WASTE = (
    "var/cache/apt/*.bin",
    "var/cache/apt/archives/*.deb",
    "var/lib/apt/lists/*",
    "usr/share/doc/*",
    "usr/share/man/*",
    "usr/share/locale/*",
    "usr/share/info/*",
    "var/log/*.log",
)
SOURCES = ("Dockerfile", "pyproject.toml", "README.md", "LICENSE", "src", "operator", "deviceplugin", "hack/image")


def source_key() -> str:
    """Return a key that changes with everything that goes into the image."""
    return cache.key_of(os.environ.get("BASE_IMAGE", ""), *(REPOSITORY / source for source in SOURCES))


def build(*, docker: bool) -> tuple[str, Path]:
    """Build the image, also tagged `dev`; return its name, tagged by its content, and the archive."""
    key = source_key()
    name = f"{IMAGE}:dev-{key[:12]}"

    def make(into: Path) -> None:
        with step(f"building the image {name}"):
            (_docker_build if docker else _buildah_build)(name, into / "image.tar")

    made = cache.cached("image", f"{'docker' if docker else 'buildah'}-{key}", make)
    _keep_newest(made.parent, 3)
    return name, made / "image.tar"


def scheduler() -> tuple[str, Path]:
    """Build an image of the stock kube-scheduler, for clusters that cannot pull one."""
    kube = tools.kubernetes()
    name = f"{SCHEDULER_IMAGE}:v{KUBERNETES_VERSION}"

    def make(into: Path) -> None:
        links = {"/usr/local/bin/kube-scheduler": "kube"}
        files = {"/usr/local/bin/kube": kube}
        archive.write(into / "image.tar", name, files, entrypoint=["/usr/local/bin/kube-scheduler"], links=links)

    return name, cache.cached("scheduler-image", cache.key_of(str(kube.resolve()), name), make) / "image.tar"


def _keep_newest(directory: Path, count: int) -> None:
    whole = [entry for entry in directory.iterdir() if not entry.name.startswith(".")]  # others are being built
    entries = sorted(whole, key=lambda entry: entry.stat().st_mtime, reverse=True)
    for old in entries[count:]:
        shutil.rmtree(old, ignore_errors=True)


def _docker_build(name: str, out: Path) -> None:
    arguments = [f"--build-arg=BASE_IMAGE={base}"] if (base := os.environ.get("BASE_IMAGE")) else []
    passed_on = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    arguments += [f"--build-arg={setting}" for setting in passed_on if setting in os.environ]
    run(["docker", "build", "-q", "--network=host", *arguments, "-t", name, "-t", f"{IMAGE}:dev", REPOSITORY])
    run(["docker", "save", "-o", out, name, f"{IMAGE}:dev"])


def _buildah(*arguments: object) -> str:
    storage = cache_dir() / "buildah"
    where = ["--root", storage / "root", "--runroot", storage / "run", "--storage-driver", "overlay"]
    return run(["buildah", *where, *arguments])


def _buildah_build(name: str, out: Path) -> None:
    base = os.environ.get("BASE_IMAGE") or _base_image()
    wheels = _wheels(_python_version(base))
    target = REPOSITORY / "build" / "wheels"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for wheel in wheels.glob("*.whl"):
        shutil.copy2(wheel, target)
    command = ["build", "--layers", "--isolation=chroot", "--pull-never", "--network=host", "--timestamp=0"]
    _buildah(*command, f"--build-arg=BASE_IMAGE={base}", "-t", name, "-t", f"{IMAGE}:dev", REPOSITORY)
    _buildah("push", "-q", name, f"docker-archive:{out}:{name}")


def _python_version(base: str) -> str:
    container = _buildah("from", "--pull-never", base).strip()
    try:
        return _buildah(
            "run",
            "--isolation=chroot",
            container,
            "--",
            "python3",
            "-c",
            "import sys; print('%d.%d' % sys.version_info[:2])",
        ).strip()
    finally:
        _buildah("rm", container)


def _suite_and_mirror() -> tuple[str, str, str]:
    """Return the suite and the mirror that this Debian or Ubuntu itself installs from."""
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)', Path("/etc/os-release").read_text(), re.MULTILINE))
    suite = release.get("VERSION_CODENAME", "bookworm")
    found = run(
        ["apt-get", "indextargets", "--format", "$(CREATED_BY) $(CODENAME) $(SITE)", "Created-By: Packages"]
    )
    mirrors = [line.split()[2] for line in found.splitlines() if line.startswith(f"Packages {suite} ")]
    if not mirrors:
        raise Failed(f"apt names no mirror for {suite}: set BASE_IMAGE to an image with Python")
    return suite, mirrors[0], "main,universe" if release.get("ID") == "ubuntu" else "main"


def _base_image() -> str:
    """Create a minimal Debian with Python in buildah's storage and return its name."""
    suite, mirror, components = _suite_and_mirror()
    key = cache.key_of(suite, BASE_PACKAGES, ",".join(BASE_WASTE))
    name = f"localhost/gpushare-base:{key}"

    def make(into: Path) -> None:
        root = into / "root"
        with step(f"making a base image of {suite} with Python (first time only; about a minute)"):
            options = ["--variant=minbase", f"--include={BASE_PACKAGES}", f"--components={components}"]
            run(["debootstrap", *options, suite, root, mirror])
            for pattern in BASE_WASTE:
                for waste in root.glob(pattern):
                    shutil.rmtree(waste) if waste.is_dir() and not waste.is_symlink() else waste.unlink()
            run(["tar", "-C", root, "--one-file-system", "--numeric-owner", "-cf", into / "base.tar", "."])
            shutil.rmtree(root)

    tar = cache.cached("base", key, make) / "base.tar"
    try:
        _buildah("inspect", "--type=image", name)
    except Failed:
        container = _buildah("from", "scratch").strip()
        try:
            _buildah("add", "-q", container, tar, "/")
            _buildah("commit", "-q", container, name)
        finally:
            _buildah("rm", container)
    return name


def _wheels(python_version: str) -> Path:
    """Download every dependency as a wheel for the image's Python, with the host's pip and its configuration."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    machine = os.uname().machine
    key = cache.key_of(python_version, machine, *wanted)

    def make(into: Path) -> None:
        platforms = [
            f"--platform={kind}_{machine}" for kind in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
        ]
        with step("fetching the image's dependencies as wheels (first time only)"):
            command = [
                _pip(),
                "download",
                "-q",
                "--only-binary=:all:",
                "--implementation=cp",
                "-d",
                into,
                *platforms,
            ]
            run([*command, f"--python-version={python_version}", *wanted])

    return cache.cached("wheels", key, make)


def _pip() -> Path:
    own = REPOSITORY / ".venv" / "bin" / "pip"
    if not own.exists():
        subprocess.run(["make", "-C", REPOSITORY, "venv"], check=True)
    return own
