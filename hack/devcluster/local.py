"""A whole Kubernetes on this machine from its own binaries: no container engine, no registry (needs root).

etcd, API server, controller manager, scheduler, containerd, kubelet, kube-proxy and CoreDNS run as plain processes
with their state below one directory; the node's address is that of the cluster's own bridge.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from devcluster import archive, network, pki, tools
from devcluster.processes import Processes, start_time
from devcluster.progress import Failed, run, say, wait_for
from devcluster.settings import (
    API_PORT,
    BRIDGE,
    ETCD_PORT,
    KUBERNETES_VERSION,
    NODE_IP,
    NODE_LABELS,
    NODE_NAME,
    PAUSE_IMAGE,
    POD_CIDR,
    SERVICE_CIDR,
    cgroup_root,
    state_dir,
)

DRY_RUN = "GPUSHARE_DRY_RUN"
KUBELET_DIRECTORY = Path("/var/lib/kubelet")  # the standard path: device plugins and their pods expect it
POD_LINKS = Path("/var/log/containers")
RUN_DIRECTORY = Path("/run/gpushare")  # hostPath directories of gpushare's own pods
CGROUPS = Path("/sys/fs/cgroup")
RUN_DIRECTORY_MIB = 64
NODE_GRACE_SECONDS = 180  # by default 50
CNI_RESULTS = Path("/var/lib/cni/results")
# in starting order; stopped in reverse
COMPONENTS = (
    "etcd",
    "apiserver",
    "controller-manager",
    "scheduler",
    "containerd",
    "coredns",
    "proxy",
    "kubelet",
)


class LocalCluster:
    """The cluster whose state is in `state_dir()`; every method can be called repeatedly and in any state."""

    name = "local"
    node_name = NODE_NAME
    components: Sequence[str] = COMPONENTS
    api_address, api_port = NODE_IP, API_PORT
    cni_directory = tools.CNI_DIRECTORY
    enforce_node_allocatable: Sequence[str] = ("pods",)

    def __init__(self) -> None:
        self.state = state_dir()
        self.processes = Processes(self.state / "processes", self.state / "log")
        self.kubeconfig = self.state / "kubeconfig"
        self.containerd_socket = self.state / "containerd.sock"

    # up ---------------------------------------------------------------------------------------------------------

    def up(self) -> None:
        if os.geteuid() != 0:
            raise Failed("the local cluster needs root (it makes a bridge, mounts and cgroups): run this as root")
        tools.install_packages()
        kube, coredns, pause = tools.kubernetes(), tools.coredns(), tools.pause()
        self._prepare()
        self._mount_run_directory()
        network.up(self.state)
        say(f"starting Kubernetes {KUBERNETES_VERSION} ({self.state})")
        self._start_control_plane(kube)
        self._start_containerd(pause)
        self._start_services(kube, coredns)
        self._start_kubelet(kube)
        say("the node is ready")

    def _prepare(self) -> None:
        """Make directories, certificates and kubeconfigs."""
        self._own(KUBELET_DIRECTORY)
        for directory in ("log", "pods", "cni"):
            (self.state / directory).mkdir(parents=True, exist_ok=True)
        pki.make(self.state / "pki")
        for component in ("controller-manager", "scheduler", "proxy", "kubelet"):
            self._write_kubeconfig(component, self.state / "conf" / f"{component}.kubeconfig")
        self._write_kubeconfig("admin", self.kubeconfig)

    def _write_kubeconfig(self, component: str, path: Path) -> None:
        pki.kubeconfig(self.state / "pki", component, path, port=self.api_port)

    def _start_control_plane(self, kube: Path) -> None:
        start, pki_dir, conf = self.processes.ensure, self.state / "pki", self.state / "conf"
        etcd = f"http://127.0.0.1:{ETCD_PORT}"
        peer = f"http://127.0.0.1:{ETCD_PORT + 1}"
        etcd_flags = [
            "--data-dir",
            self.state / "etcd",
            "--listen-client-urls",
            etcd,
            "--advertise-client-urls",
            etcd,
        ]
        peer_flags = ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        cluster = ["--initial-cluster", f"default={peer}", "--unsafe-no-fsync"]
        start("etcd", ["etcd", *etcd_flags, *peer_flags, *cluster])
        start(
            "apiserver",
            [
                kube,
                "kube-apiserver",
                f"--etcd-servers={etcd}",
                f"--bind-address={self.api_address}",
                f"--advertise-address={NODE_IP}",
                f"--secure-port={self.api_port}",
                f"--tls-cert-file={pki_dir}/apiserver.crt",
                f"--tls-private-key-file={pki_dir}/apiserver.key",
                f"--client-ca-file={pki_dir}/ca.crt",
                "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
                f"--service-account-key-file={pki_dir}/sa.pub",
                f"--service-account-signing-key-file={pki_dir}/sa.key",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                f"--service-cluster-ip-range={SERVICE_CIDR}",
                "--allow-privileged=true",
                f"--kubelet-client-certificate={pki_dir}/admin.crt",
                f"--kubelet-client-key={pki_dir}/admin.key",
                "--kubelet-preferred-address-types=InternalIP",
                *self._apiserver_flags(),
            ],
        )
        self.wait_api()
        start(
            "controller-manager",
            [
                kube,
                "kube-controller-manager",
                f"--kubeconfig={conf}/controller-manager.kubeconfig",
                "--bind-address=127.0.0.1",
                "--use-service-account-credentials",
                f"--service-account-private-key-file={pki_dir}/sa.key",
                f"--root-ca-file={pki_dir}/ca.crt",
                f"--cluster-signing-cert-file={pki_dir}/ca.crt",
                f"--cluster-signing-key-file={pki_dir}/ca.key",
                "--leader-elect=false",
                # Its watches sleep after outages of the API server, which tests cause: it takes the node for
                # unreachable where it sees no heartbeat for so long (docs/measurements/hostile.md).
                f"--node-monitor-grace-period={NODE_GRACE_SECONDS}s",
            ],
        )
        scheduler = [
            f"--kubeconfig={conf}/scheduler.kubeconfig",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
        ]
        start("scheduler", [kube, "kube-scheduler", *scheduler])

    def _apiserver_flags(self) -> list[str]:
        """Return flags of the API server that subclasses need."""
        return []

    def _start_containerd(self, pause: Path) -> None:
        conf = self.state / "conf"
        (conf / "containerd.toml").write_text(self._containerd_config())
        (self.state / "cni-conf").mkdir(exist_ok=True)
        (self.state / "cni-conf" / "10-gpushare.conflist").write_text(self._cni_config())
        own = tools.containerd()
        environment = {} if own is None else {"PATH": f"{own}{os.pathsep}{os.environ['PATH']}"}  # its shim too
        self.processes.ensure("containerd", ["containerd", "--config", conf / "containerd.toml"], environment)
        wait_for("containerd", self._containerd_answers, timeout_seconds=30)
        if not self.has_image(PAUSE_IMAGE):
            tar = self.state / "pause.tar"
            archive.write(tar, PAUSE_IMAGE, {"/pause": pause}, entrypoint=["/pause"])
            self.load(tar)
            tar.unlink()

    def _start_services(self, kube: Path, coredns: Path) -> None:
        """Start what makes Services and their names work."""
        start, conf = self.processes.ensure, self.state / "conf"
        (conf / "Corefile").write_text(self._corefile())
        start("coredns", [coredns, "-conf", conf / "Corefile"])
        start(
            "proxy",
            [
                kube,
                "kube-proxy",
                f"--kubeconfig={conf}/proxy.kubeconfig",
                f"--hostname-override={NODE_NAME}",
                "--proxy-mode=iptables",
                f"--cluster-cidr={POD_CIDR}",
                "--healthz-bind-address=127.0.0.1:10256",
                "--metrics-bind-address=127.0.0.1:10249",
                "--conntrack-max-per-core=0",
                "--conntrack-tcp-timeout-established=0s",
                "--conntrack-tcp-timeout-close-wait=0s",
            ],
        )

    def _start_kubelet(self, kube: Path) -> None:
        conf = self.state / "conf"
        (conf / "kubelet.json").write_text(json.dumps(self._kubelet_config(), indent=1))
        kubelet = [
            f"--config={conf}/kubelet.json",
            f"--kubeconfig={conf}/kubelet.kubeconfig",
            f"--cert-dir={self.state}/pki",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={NODE_IP}",
            f"--node-labels={','.join(f'{key}={value}' for key, value in NODE_LABELS.items())}",
        ]
        self.processes.ensure("kubelet", [kube, "kubelet", *kubelet])
        self.wait_node()

    def wait_api(self) -> None:
        self._wait("apiserver", self._api_ready, timeout_seconds=90)

    def wait_node(self) -> None:
        self._wait("kubelet", self._node_ready, timeout_seconds=120)

    def _wait(self, component: str, ready: Callable[[], bool], *, timeout_seconds: float) -> None:
        def check() -> bool:
            if self.processes.pid(component) is None:
                raise Failed(f"{component} has ended; its last words:\n{self.processes.tail(component)}")
            return ready()

        try:
            wait_for(component, check, timeout_seconds=timeout_seconds)
        except Failed as failed:
            raise Failed(f"{failed}\nsee {self.processes.log(component)}") from None

    def _api_ready(self) -> bool:
        try:
            return self.kubectl("get", "--raw", "/readyz").strip() == "ok"
        except Failed:
            return False

    def _node_ready(self) -> bool:
        path = '-o=jsonpath={.status.conditions[?(@.type=="Ready")].status}'
        try:
            return self.kubectl("get", "node", NODE_NAME, path) == "True"
        except Failed:
            return False

    def kubectl(self, *arguments: str) -> str:
        command = [tools.kubectl(), f"--kubeconfig={self.kubeconfig}", "--request-timeout=10s", *arguments]
        return run(command, timeout_seconds=60)

    def _containerd_answers(self) -> bool:
        try:
            self._ctr("version")
        except Failed:
            return False
        return True

    def _ctr(self, *arguments: str) -> str:
        own = tools.containerd()
        ctr = "ctr" if own is None else own / "ctr"
        command = [ctr, "--address", str(self.containerd_socket), "--namespace", "k8s.io", *arguments]
        return run(command, timeout_seconds=300)

    def load(self, tar: Path) -> None:
        """Import an image archive into the node."""
        self._ctr("images", "import", str(tar))

    def has_image(self, name: str) -> bool:
        return name in self._ctr("images", "list", "-q").split()

    # configuration ----------------------------------------------------------------------------------------------

    def _containerd_config(self) -> str:
        return f"""version = 2
root = "{self.state}/containerd"
state = "{self.state}/containerd-state"
[grpc]
address = "{self.containerd_socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true
disable_tcp_service = true
netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "{self.state}/cni-conf"
bin_dir = "{self.cni_directory}"
{self._containerd_runtimes()}"""

    def _containerd_runtimes(self) -> str:
        """Return the configuration of container runtimes besides runc."""
        return ""

    def _cni_config(self) -> str:
        ipam = {
            "type": "host-local",
            "dataDir": str(self.state / "cni"),
            "ranges": [[{"subnet": POD_CIDR, "rangeStart": "10.88.0.10"}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "hairpinMode": True, "ipam": ipam}
        return json.dumps({"cniVersion": "0.4.0", "name": "gpushare-dev", "plugins": [bridge]})

    def _corefile(self) -> str:
        return f""".:53 {{
    bind {NODE_IP}
    errors
    ready 127.0.0.1:18181
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {self.kubeconfig}
        pods insecure
        fallthrough in-addr.arpa
    }}
    forward . /etc/resolv.conf
    cache 10
}}
"""

    def _kubelet_config(self) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": NODE_IP,
            "healthzBindAddress": "127.0.0.1",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": cgroup_root(),
            "failCgroupV1": False,
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{self.containerd_socket}",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.state / "pki" / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "clusterDNS": [NODE_IP],
            "clusterDomain": "cluster.local",
            "enforceNodeAllocatable": list(self.enforce_node_allocatable),
            "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "maxPods": 250,
            "podLogsDir": str(self.state / "pods"),
            # a burst of pods must not wait for the client's own rate limit
            "serializeImagePulls": False,
            # tests kill parts again and again; kubelet's usual pause grows to five minutes
            "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},
            "shutdownGracePeriod": "0s",
        }

    def _mount_run_directory(self) -> None:
        """Give gpushare's directory a small file system of its own, so that tests may fill it."""
        if not RUN_DIRECTORY.exists():
            RUN_DIRECTORY.mkdir(parents=True)
            size = f"size={RUN_DIRECTORY_MIB}m,mode=755"
            run(["mount", "-t", "tmpfs", "-o", size, "gpushare-dev", RUN_DIRECTORY])

    def _own(self, directory: Path) -> None:
        """Mark a directory outside the state directory as created by us, so that `down` may remove it."""
        marker = directory / ".gpushare-dev"
        if marker.exists():
            return
        if directory.is_dir() and any(directory.iterdir()):
            raise Failed(f"{directory} belongs to another kubelet; use CLUSTER=existing or CLUSTER=kind here")
        directory.mkdir(parents=True, exist_ok=True)
        marker.touch()

    # down -------------------------------------------------------------------------------------------------------

    def down(self) -> None:
        """Remove every trace: pods, processes, mounts, cgroups, rules, bridge, files."""
        if os.geteuid() != 0:
            raise Failed("run this as root")
        # none of its state is kept, so nothing needs an orderly shutdown
        self.kill("kubelet")
        self._end_containers()
        for component in reversed(self.components):
            self.kill(component)
        ours = (KUBELET_DIRECTORY / ".gpushare-dev").exists()
        self._unmount(self.state, *outside_places(is_ours=ours, is_dry_run=DRY_RUN in os.environ))
        self._network_down()
        if ours:
            _remove_cgroups()
            for directory in (KUBELET_DIRECTORY, POD_LINKS, RUN_DIRECTORY):
                shutil.rmtree(directory, ignore_errors=True)
            for result in CNI_RESULTS.glob("gpushare-dev-*"):
                result.unlink()
            for directory in (CNI_RESULTS, CNI_RESULTS.parent):
                with contextlib.suppress(OSError):  # created by another program, or never created
                    directory.rmdir()
        shutil.rmtree(self.state, ignore_errors=True)
        if self.state.exists():
            raise Failed(f"could not remove {self.state}")

    def _network_down(self) -> None:
        network.down(self.state)

    def _end_containers(self) -> None:
        """Kill the processes of this cluster's pods: members of its cgroups, and the shims of its containerd."""
        for _ in range(50):
            groups = _pod_cgroups()
            for group in groups:
                thaw(group)
            pids = {pid for group in groups for pid in _members(group)} | self._shims()
            if not pids:
                return
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        say(f"some processes of pods did not end: {sorted(pids)}")

    def _shims(self) -> set[int]:
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                argv = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            pid = int(process.name)
            ours = b"-address" in argv and str(self.containerd_socket).encode() in argv
            if ours and b"containerd-shim" in argv[0] and start_time(pid) is not None:
                found.add(pid)
        return found

    def _unmount(self, *roots: Path) -> None:
        prefixes = tuple(f"{root}/" for root in roots)
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for mount in reversed([m for m in mounts if f"{m}/".startswith(prefixes)]):
            subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)

    # status -----------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        pids = {name: self.processes.pid(name) for name in self.components}
        up = all(pids.values())
        return {
            "backend": self.name,
            "up": up and self._api_ready(),
            "state": str(self.state),
            "kubeconfig": str(self.kubeconfig),
            "pids": pids,
        }

    def kill(self, component: str) -> None:
        """Kill a component with kill -9 and do not restart it."""
        self.processes.stop(component, signal.SIGKILL)

    def restart(self, component: str) -> None:
        self.processes.restart(component)
        if component == "apiserver":
            self.wait_api()
        elif component == "containerd":
            wait_for("containerd", self._containerd_answers, timeout_seconds=30)


def _pod_cgroups() -> list[Path]:
    """Return the cgroups below kubelet's root cgroup, innermost first, in every hierarchy."""
    if not (KUBELET_DIRECTORY / ".gpushare-dev").exists():
        return []
    ours = f"{cgroup_root().strip('/')}/kubepods".lstrip("/")
    roots = [p for p in (CGROUPS / ours, *CGROUPS.glob(f"*/{ours}")) if p.is_dir()]
    # os.walk skips groups that vanish meanwhile
    groups = [Path(place) for root in roots for place, _, _ in os.walk(root)]
    return sorted(groups, key=lambda group: len(group.parts), reverse=True)


def outside_places(*, is_ours: bool, is_dry_run: bool) -> list[Path]:
    """Return the directories outside the state directory that `down` unmounts before it removes what is in them.

    In a dry run (hack/gpu/dry-run) its own file systems hide the machine's directories, which may be those of a
    cluster that runs: they stay mounted until their namespace ends.
    """
    return [KUBELET_DIRECTORY, RUN_DIRECTORY] if is_ours and not is_dry_run else []


def thaw(group: Path) -> None:
    """Let a cgroup's processes run: a pod may be stopped by a throttle, and what is frozen does not die."""
    for name, running in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
        if (group / name).exists():
            with contextlib.suppress(OSError):
                (group / name).write_text(running)


def _members(group: Path) -> list[int]:
    try:
        return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _remove_cgroups() -> None:
    for group in _pod_cgroups():
        for _ in range(20):
            try:
                group.rmdir()
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.05)
            else:
                break
