"""The programs a cluster needs: Debian packages, and Go programs built from pinned modules into the cache."""

import os
import re
import shutil
from pathlib import Path

from devcluster import cache, debian, progress
from devcluster.settings import HACK, KUBERNETES_VERSION, cache_dir, containerd_major
from devcluster.toolchain import fetch_go

# One module for Kubernetes, CoreDNS and helm, so that shared dependencies are compiled once. CoreDNS and helm are
# the releases built for this Kubernetes; go.mod pins all three.
GO_MODULE = HACK / "gotools"
HELM = "helm.sh/helm/v3/cmd/helm"
# A module of its own: Kueue's dependencies are those of an older Kubernetes, and only one test needs it.
KUEUE_MODULE = HACK / "kueue"
KUEUE = "sigs.k8s.io/kueue"
JOBSET = "sigs.k8s.io/jobset"
# And one for what tests run as a user would: krew, and Argo CD's own comparison of an object with its file.
CLIENTS_MODULE = HACK / "clients"
CLIENTS = ("sigs.k8s.io/krew/cmd/krew", "./argodiff")
KWOK = "sigs.k8s.io/kwok/cmd/kwok@v0.8.0"
KIND = "sigs.k8s.io/kind@v0.33.0"
# The package that gives containers their GPU, and its programs.
NVIDIA_TOOLKIT = "github.com/NVIDIA/nvidia-container-toolkit/cmd"
NVIDIA_TOOLKIT_VERSION = "v1.19.1"
NVIDIA_TOOLKIT_PROGRAMS = ("nvidia-container-runtime", "nvidia-ctk", "nvidia-cdi-hook")
# Kubernetes 1.36 needs containerd 2, which also gives devices by CDI without a setting; Debian 12 has 1.6.
CONTAINERD_2 = "github.com/containerd/containerd/v2"
CONTAINERD_2_VERSION = "v2.2.9"
CONTAINERD_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr")
MINIMUM_GO = (1, 21)  # the first version that fetches the toolchain a go.mod asks for

# Programs that must be on the path, and the Debian package of each.
LOCAL_PROGRAMS = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "openssl": "openssl",
    "debootstrap": "debootstrap",
    "buildah": "buildah",
}
# No debugging information, which the programs drop anyway, and room for the compiler before it collects garbage:
# together a sixth less processor time for a part of Kubernetes (docs/measurements/local-cluster.md).
FLAGS = ("-trimpath", "-gcflags=all=-dwarf=false")
COMPILER_MEMORY = {"GOGC": "off", "GOMEMLIMIT": "2GiB"}
CNI_DIRECTORY = Path("/usr/lib/cni")


def install_packages() -> None:
    """Install the missing Debian packages; do nothing when none is missing."""
    missing = {package for program, package in LOCAL_PROGRAMS.items() if shutil.which(program) is None}
    if not (CNI_DIRECTORY / "bridge").exists():
        missing.add("containernetworking-plugins")
    debian.install(missing)


def _go() -> str:
    go = shutil.which("go") or next(
        (str(p) for p in (Path("/usr/local/go/bin/go"), *cache_dir().glob("go/*/go/bin/go")) if p.exists()), None
    )
    if go is not None:
        found = re.search(r"go(\d+)\.(\d+)", progress.run([go, "env", "GOVERSION"], env=_go_env(), cwd=Path("/")))
        if found and (int(found[1]), int(found[2])) >= MINIMUM_GO:
            return go
    return str(fetch_go())


def _go_env() -> dict[str, str]:
    return {"HOME": str(Path.home()), **COMPILER_MEMORY, **os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}


def _build(kind: str, package: str, flags: str, expectation: str) -> Path:
    """Build a main package of the module; the cache key is made of the module's pinned versions and the flags."""

    def build(into: Path) -> None:
        go = _go()
        with progress.step(f"building {expectation}"):
            # -mod=readonly: build the versions that go.sum pins
            command = [go, "build", "-mod=readonly", *FLAGS, f"-ldflags={flags}", "-o", into / kind, package]
            progress.run(command, cwd=GO_MODULE, env=_go_env(), timeout_seconds=3600)

    return cache.cached(kind, cache.key_of(GO_MODULE, package, flags), build) / kind


def _install(kind: str, module: str, expectation: str) -> Path:
    def build(into: Path) -> None:
        env = {**_go_env(), "GOBIN": str(into)}
        with progress.step(f"building {expectation}"):
            command = [_go(), "install", *FLAGS, "-ldflags=-s -w", module]
            progress.run(command, cwd=Path("/"), env=env, timeout_seconds=3600)

    return cache.link(kind, cache.cached(kind, cache.key_of(module), build) / kind)


def kubernetes() -> Path:
    """Return the binary with every Kubernetes component; link `kubectl` into the cache's bin directory too."""
    major, minor, _ = KUBERNETES_VERSION.split(".")
    stamp = {
        "k8s.io/component-base/version.gitVersion": f"v{KUBERNETES_VERSION}",
        "k8s.io/component-base/version.gitMajor": major,
        "k8s.io/component-base/version.gitMinor": minor,
        "k8s.io/client-go/pkg/version.gitVersion": f"v{KUBERNETES_VERSION}",
    }
    flags = " ".join(["-s -w", *(f"-X {name}={value}" for name, value in stamp.items())])
    kube = _build(
        "kube",
        "./kube",
        flags,
        f"Kubernetes {KUBERNETES_VERSION} from its Go module (first time only; 5 to 8 minutes on 2 cores)",
    )
    cache.link("kubectl", kube)
    return kube


def pause() -> Path:
    return _build("pause", "./pause", "-s -w", "the pause container's program")


def coredns() -> Path:
    return _build("coredns", "./coredns", "-s -w", "CoreDNS (first time only; seconds where Kubernetes was built)")


def helm() -> Path:
    return cache.link(
        "helm", _build("helm", HELM, "-s -w", "helm (first time only; seconds where Kubernetes was built)")
    )


def kueue() -> Path:
    """Return the directory with Kueue's manager, its definitions (`crds/`) and webhooks (`webhooks.yaml`)."""

    def build(into: Path) -> None:
        go, env = _go(), _go_env()
        with progress.step("building Kueue, which one test runs (first time only; several minutes on 2 cores)"):
            command = [go, "build", "-mod=readonly", *FLAGS, "-ldflags=-s -w", "-o", into / "kueue"]
            progress.run([*command, f"{KUEUE}/cmd/kueue"], cwd=KUEUE_MODULE, env=env, timeout_seconds=3600)
        source = Path(progress.run([go, "list", "-m", "-f", "{{.Dir}}", KUEUE], cwd=KUEUE_MODULE, env=env).strip())
        shutil.copytree(source / "config/components/crd/bases", into / "crds")
        shutil.copy(source / "config/components/webhook/manifests.yaml", into / "webhooks.yaml")

    return cache.cached("kueue", cache.key_of(KUEUE_MODULE, KUEUE), build)


def built_kueue() -> Path | None:
    """Return what `kueue` would, where it is built already."""
    found = cache_dir() / "kueue" / cache.key_of(KUEUE_MODULE, KUEUE)
    return found if found.is_dir() else None


def jobset_definition() -> Path:
    """Return the directory with JobSet's definition (`jobset.yaml`), of the version that Kueue is built with."""

    def build(into: Path) -> None:
        go, env = _go(), _go_env()
        progress.run([go, "mod", "download", JOBSET], cwd=KUEUE_MODULE, env=env, timeout_seconds=600)
        source = Path(
            progress.run([go, "list", "-m", "-f", "{{.Dir}}", JOBSET], cwd=KUEUE_MODULE, env=env).strip()
        )
        shutil.copy(source / "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml", into / "jobset.yaml")

    return cache.cached("jobset", cache.key_of(KUEUE_MODULE, JOBSET), build)


def built_jobset_definition() -> Path | None:
    """Return the file that `jobset_definition` fetches, where it is there already."""
    found = cache_dir() / "jobset" / cache.key_of(KUEUE_MODULE, JOBSET) / "jobset.yaml"
    return found if found.is_file() else None


def clients() -> Path:
    """Return the directory with `krew` and `argodiff`."""

    def build(into: Path) -> None:
        with progress.step("building krew and Argo CD's diff for tests (first time only; 2 minutes on 2 cores)"):
            command = [_go(), "build", "-mod=readonly", *FLAGS, "-ldflags=-s -w", "-o", f"{into}/"]
            progress.run([*command, *CLIENTS], cwd=CLIENTS_MODULE, env=_go_env(), timeout_seconds=3600)

    return cache.cached("clients", cache.key_of(CLIENTS_MODULE, *CLIENTS), build)


def built_clients() -> Path | None:
    """Return what `clients` would, where they are built already."""
    found = cache_dir() / "clients" / cache.key_of(CLIENTS_MODULE, *CLIENTS)
    return found if found.is_dir() else None


def kwok() -> Path:
    return _install("kwok", KWOK, "kwok (first time only; about a minute on 2 cores)")


def containerd_2() -> Path:
    """Return the directory with containerd 2, its shim and ctr."""

    def build(into: Path) -> None:
        modules = [f"{CONTAINERD_2}/cmd/{name}@{CONTAINERD_2_VERSION}" for name in CONTAINERD_PROGRAMS]
        flags = f"-ldflags=-s -w -X {CONTAINERD_2}/version.Version={CONTAINERD_2_VERSION}"
        env = {**_go_env(), "GOBIN": str(into)}
        with progress.step("building containerd 2 (first time only; several minutes on 2 cores)"):
            command = [_go(), "install", "-trimpath", flags, *modules]
            progress.run(command, cwd=Path("/"), env=env, timeout_seconds=3600)

    return cache.cached("containerd-2", cache.key_of(CONTAINERD_2, CONTAINERD_2_VERSION), build)


def containerd() -> Path | None:
    """Return the directory with the chosen containerd's programs; None for those on the path."""
    return containerd_2() if containerd_major() == 2 else None


def nvidia_toolkit() -> Path:
    """Return the directory with the programs of NVIDIA's container toolkit."""
    modules = [f"{NVIDIA_TOOLKIT}/{name}@{NVIDIA_TOOLKIT_VERSION}" for name in NVIDIA_TOOLKIT_PROGRAMS]
    # the driver's libraries are looked up when they are needed, not when the program starts
    lazy = "-Wl,-z,lazy"

    def build(into: Path) -> None:
        env = {**_go_env(), "GOBIN": str(into), "CGO_ENABLED": "1", "CGO_LDFLAGS": lazy}
        with progress.step("building NVIDIA's container toolkit (first time only; half a minute on 2 cores)"):
            flags = f"-ldflags=-s -w '-extldflags={lazy}'"
            command = [_go(), "install", "-trimpath", flags, *modules]
            progress.run(command, cwd=Path("/"), env=env, timeout_seconds=3600)

    return cache.cached("nvidia-toolkit", cache.key_of(*modules, lazy), build)


def kind() -> Path:
    if found := shutil.which("kind"):
        return Path(found)
    return _install("kind", KIND, "kind (first time only; about a minute on 2 cores)")


def kubectl() -> Path:
    """Return the pinned kubectl where Kubernetes is built, else the one on the path."""
    own = cache_dir() / "bin" / "kubectl"
    if own.exists():
        return own
    if found := shutil.which("kubectl"):
        return Path(found)
    kubernetes()
    return own
