"""A whole Kubernetes with gpushare's chart on one GPU machine that has neither network nor container engine.

What differs from the local cluster: the programs come from a bundle; no iptables are needed, as the API server
listens at its Service's address (one of loopback's) and calls webhooks at their endpoints, so neither kube-proxy
nor DNS runs; containers get their GPU by NVIDIA's container toolkit. `simulated` takes the twin's GPUs instead,
to try all of it.
"""

import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from devcluster import archive, cache, driver, gpucheck, hostimage, network, pieces, progress
from devcluster.local import COMPONENTS, LocalCluster
from devcluster.progress import Failed, say, step, wait_for
from devcluster.settings import (
    BRIDGE,
    HACK,
    KUBERNETES_VERSION,
    NODE_NAME,
    REPOSITORY,
    cache_dir,
    patience,
)

API_SERVICE = "10.96.0.1"
RELEASE, RELEASE_NAMESPACE = "gpushare", "gpushare-system"
RUNTIME_CLASS = "nvidia"
TENANT_IMAGE = "localhost/gpushare-tenant:1"
INSTALL_SECONDS = 120


class GpuNodeCluster(LocalCluster):
    """The cluster of hack/gpu/cluster."""

    name = "gpu"
    components: Sequence[str] = tuple(name for name in COMPONENTS if name not in {"coredns", "proxy"})
    api_address, api_port = "0.0.0.0", 443
    enforce_node_allocatable: Sequence[str] = ()

    def __init__(self, bundle: Path, *, simulated: bool) -> None:
        super().__init__()
        self.bundle, self.simulated = bundle, simulated
        self.programs = self.state / "programs"
        self.cni_directory = self.programs / "cni"
        self.placed = driver.Placed(self.state / "placed.json")
        # kubectl and helm as tests and benchmarks look for them
        os.environ["GPUSHARE_CACHE"] = str(self.state / "cache")
        os.environ["PATH"] = f"{self.programs / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"

    # up ---------------------------------------------------------------------------------------------------------

    def up(self) -> None:
        if os.geteuid() != 0:
            raise Failed("the cluster needs root (it makes a bridge, mounts and cgroups): run this as root")
        facts = self._unpack("cluster")
        kube = self.programs / "bin" / "kube"
        cache.link("kubectl", kube)
        if not self.simulated:
            self._driver()
            driver.install_toolkit(self.placed, self.programs / "bin", self.state / "log" / "nvidia-runtime.log")
            if facts.get("containerd") == 2:  # with a specification there, agents give GPUs by CDI (ADR 0148)
                try:
                    driver.specify(self.placed, self.state)
                except Failed as error:  # the runtime class gives the GPU then
                    say(f"no CDI specification, tenants get their GPU by the runtime class: {error}")
        for library in sorted((self.programs / "lib").glob("libseccomp.so*")):
            self.placed.copy(library, driver.LIBRARIES / library.name)
        progress.run(["ldconfig"])
        self._openssl()
        self._prepare()
        self._network()
        say(f"starting Kubernetes {KUBERNETES_VERSION} ({self.state})")
        self._start_control_plane(kube)
        self._start_containerd(self.programs / "bin" / "pause")
        self._start_kubelet(kube)
        wait_for("the default service account", self._has_account, timeout_seconds=30)
        say("the node is ready")

    def _driver(self) -> None:
        """Place the driver where it is missing; a refused machine keeps nothing of it.

        Raises:
            Failed: there is no driver, or its GPUs cannot be shared.
        """
        is_new = not self.placed.files()
        try:
            driver.install(self.placed)
            listed = progress.run([driver.PROGRAMS / "nvidia-smi", *gpucheck.QUERY], timeout_seconds=60)
            gpucheck.check(listed, gpucheck.foreign_mps())
        except Failed:
            if is_new:
                self.placed.remove()
                self.placed.forget()
            raise

    def _unpack(self, part: str) -> dict[str, Any]:
        """Unpack a part of the bundle unless it is there, every piece at once; return what it says of itself."""
        facts_file = self.state / f"{part}.json"
        if facts_file.exists():
            known: dict[str, Any] = json.loads(facts_file.read_text())
            return known
        folder = self.bundle / part
        if not (folder / "bundle.json").exists():
            raise Failed(
                f"no {folder / 'bundle.json'}: name the bundle's folder (make gpu-bundle OUT=DIR) by --bundle"
            )
        facts: dict[str, Any] = json.loads((folder / "bundle.json").read_text())
        self.programs.mkdir(parents=True, exist_ok=True)
        layers = {f"{layer}.xz" for layer in facts.get("layers", [])}

        def expand(piece: str) -> None:
            if piece in layers:
                with (self.state / piece.removesuffix(".xz")).open("wb") as out:
                    pieces.expand(folder / piece, out)
            else:
                pieces.unpack(folder / piece, self.programs)

        with step(f"unpacking {part}"), ThreadPoolExecutor() as pool:
            list(pool.map(expand, facts["pieces"]))
        facts_file.write_text(json.dumps(facts))
        return facts

    def _openssl(self) -> None:
        """Use the machine's openssl, or the bundle's with its libraries where it has none."""
        own = self.programs / "bin" / "openssl"
        others = [part for part in os.environ["PATH"].split(os.pathsep) if part != str(own.parent)]
        if shutil.which("openssl", path=os.pathsep.join(others)):
            own.unlink(missing_ok=True)
            return
        for library in ("libssl.so.3", "libcrypto.so.3"):
            self.placed.copy(self.programs / "lib" / library, driver.LIBRARIES / library)
        settings = self.state / "openssl.cnf"
        settings.write_text("[req]\ndistinguished_name = name\n[name]\n")
        os.environ["OPENSSL_CONF"] = str(settings)

    def _ip(self, *arguments: str) -> str:
        program = ["ip"] if shutil.which("ip") else [str(self.programs / "bin" / "busybox"), "ip"]
        return progress.run([*program, *arguments])

    def _network(self) -> None:
        self._ip("link", "set", "lo", "up")
        if f"{API_SERVICE}/" not in self._ip("addr", "show", "dev", "lo"):
            self._ip("addr", "add", f"{API_SERVICE}/32", "dev", "lo")
        network.make_bridge(self._ip)
        before = self.state / "forward-before"
        if not before.exists():
            before.write_text(network.FORWARD.read_text())
        network.FORWARD.write_text("1")

    def _network_down(self) -> None:
        before = self.state / "forward-before"
        if before.exists():
            network.FORWARD.write_text(before.read_text())
        for arguments in (["link", "delete", BRIDGE], ["addr", "del", f"{API_SERVICE}/32", "dev", "lo"]):
            try:
                self._ip(*arguments)
            except Failed:  # it is not there
                continue

    def _apiserver_flags(self) -> list[str]:
        return ["--enable-aggregator-routing=true"]

    def _containerd_runtimes(self) -> str:
        if self.simulated:
            return ""
        runtimes = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes'
        return f"""{runtimes}.runc]
runtime_type = "io.containerd.runc.v2"
{runtimes}.{RUNTIME_CLASS}]
runtime_type = "io.containerd.runc.v2"
{runtimes}.{RUNTIME_CLASS}.options]
BinaryName = "{driver.PROGRAMS / "nvidia-container-runtime"}"
"""

    def _kubelet_config(self) -> dict[str, object]:
        config = super()._kubelet_config()
        del config["clusterDNS"], config["clusterDomain"]
        return config

    def _has_account(self) -> bool:
        try:
            self.kubectl("get", "serviceaccount", "default")
        except Failed:
            return False
        return True

    # gpushare ---------------------------------------------------------------------------------------------------

    def install(self, *sets: str) -> None:
        """Put the images on the node and the chart into the cluster; write what tenants need to know."""
        facts = self._unpack("gpushare")
        self._check_layers(facts)
        cache.link("helm", self.programs / "bin" / "helm")
        with step("putting the images on the node"), ThreadPoolExecutor() as pool:
            jobs = [pool.submit(self._load_gpushare, facts), pool.submit(self._load_scheduler, facts["scheduler"])]
            if not self.simulated:
                jobs.append(pool.submit(self._load_tenant))
            for job in jobs:
                job.result()
        command = self.helm(
            "upgrade", "--install", RELEASE, REPOSITORY / "helm" / "gpushare", "--create-namespace"
        )
        repository, _, tag = facts["image"].rpartition(":")
        scheduler, _, version = facts["scheduler"].rpartition(":")
        own = [f"image.repository={repository}", f"image.tag={tag}"]
        own += [f"scheduler.image.repository={scheduler}", f"scheduler.image.tag={version}"]
        if self.simulated:
            command += ["--values", HACK / "demo-values.yaml"]
            own.append(f"simulated.gpus={os.environ.get('SIMULATED_GPUS', 'H200:1')}")
        else:
            own.append(f"runtimeClassName={RUNTIME_CLASS}")
            self.kubectl("label", "node", NODE_NAME, "nvidia.com/gpu.present=true", "--overwrite")
            self._apply_runtime_class()
        for one in (*own, *sets):
            command += ["--set", one]
        limit = INSTALL_SECONDS * patience()
        with step("helm install gpushare, and waiting until every part is ready"):
            progress.run([*command, "--wait", "--timeout", f"{limit:.0f}s"], timeout_seconds=limit + 15)
        wait_for("every GPU healthy", self._healthy, timeout_seconds=60 * patience())
        self.tenants_file().write_text(json.dumps(self.tenants(facts["image"]), indent=1))
        say("gpushare is installed, every GPU healthy")

    def _check_layers(self, facts: dict[str, Any]) -> None:
        """Refuse layers of another bundle: the first part carries some where the second has no room for them."""
        for layer, digest in zip(facts["layers"], facts["config"]["rootfs"]["diff_ids"], strict=True):
            place = self.state / layer
            if f"{layer}.xz" not in facts["pieces"] and not (
                place.exists() and archive.digest_of(place) == digest
            ):
                raise Failed(
                    f"{layer} belongs to the cluster's part of the same bundle, and another was unpacked here: "
                    "`hack/gpu/cluster down`, carry this bundle's cluster part, and `up` again"
                )

    def helm(self, *arguments: object) -> list[object]:
        place = ["--kubeconfig", self.kubeconfig, "--namespace", RELEASE_NAMESPACE]
        return [self.programs / "bin" / "helm", *arguments, *place]

    def test(self) -> str:
        """Run the chart's own test: a pod that asks for a hundredth and checks its caps."""
        return progress.run(self.helm("test", RELEASE, "--logs", "--timeout", "60s"), timeout_seconds=75)

    def _load_gpushare(self, facts: dict[str, Any]) -> None:
        if self.has_image(facts["image"]):
            return
        tar = self.state / "gpushare.tar"
        archive.write_layers(tar, facts["image"], facts["config"], [self.state / name for name in facts["layers"]])
        self.load(tar)
        tar.unlink()

    def _load_scheduler(self, name: str) -> None:
        if self.has_image(name):
            return
        tar = self.state / "scheduler.tar"
        links = {"/usr/local/bin/kube-scheduler": "kube"}
        files = {"/usr/local/bin/kube": self.programs / "bin" / "kube"}
        archive.write(tar, name, files, entrypoint=["/usr/local/bin/kube-scheduler"], links=links)
        self.load(tar)
        tar.unlink()

    def _load_tenant(self) -> None:
        if self.has_image(TENANT_IMAGE):
            return
        tar = self.state / "tenant.tar"
        hostimage.write(tar, TENANT_IMAGE)
        self.load(tar)
        tar.unlink()

    def _apply_runtime_class(self) -> None:
        body = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": RUNTIME_CLASS}}
        manifest = self.state / "runtime-class.json"
        manifest.write_text(json.dumps({**body, "handler": RUNTIME_CLASS}))
        self.kubectl("apply", "-f", str(manifest))

    def _healthy(self) -> bool:
        found = json.loads(self.kubectl("get", "gpunodes", "-o", "json"))["items"]
        gpus = [gpu for node in found for gpu in node.get("status", {}).get("gpus", [])]
        return bool(gpus) and all(gpu["health"] == "Healthy" and gpu["mps"]["state"] == "Active" for gpu in gpus)

    # for others -------------------------------------------------------------------------------------------------

    def tenants_file(self) -> Path:
        return self.state / "tenants.json"

    def tenants(self, image: str) -> dict[str, object]:
        """Say how a pod of this cluster comes to Python and PyTorch: image, interpreter, folders of the host."""
        if self.simulated:
            return {"image": image, "python": "python", "mounts": [], "simulated": True}
        python, mounts = hostimage.python()
        plain = {"plain_python": hostimage.PLAIN_PYTHON, "simulated": False}
        return {"image": TENANT_IMAGE, "python": python, "mounts": mounts, **plain}

    def environment(self) -> dict[str, str]:
        """Return the environment of a command of `run`, with the additions for this cluster."""
        links = cache_dir() / "bin"
        return {
            **os.environ,
            "CLUSTER": "existing",
            "KUBECONFIG": str(self.kubeconfig),
            "GPUSHARE_TENANTS": str(self.tenants_file()),
            "PATH": f"{links}{os.pathsep}{os.environ['PATH']}",
        }

    # down -------------------------------------------------------------------------------------------------------

    def down(self) -> None:
        placed = self.placed.files()
        self.placed.remove()
        super().down()
        if placed:
            progress.run(["ldconfig"])
