"""Certificates and kubeconfigs of the local cluster, made by openssl."""

import json
from pathlib import Path

from devcluster.progress import run
from devcluster.settings import API_PORT, NODE_IP, NODE_NAME

DAYS = "3650"
SERVER_NAMES = (
    "DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,"
    f"DNS:kubernetes.default.svc.cluster.local,IP:127.0.0.1,IP:{NODE_IP},IP:10.96.0.1"
)
SUBJECTS = {
    "apiserver": "/CN=kube-apiserver",
    "admin": "/O=system:masters/CN=admin",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "proxy": "/CN=system:kube-proxy",
    "kubelet": f"/O=system:nodes/CN=system:node:{NODE_NAME}",
}


def make(directory: Path) -> None:
    """Create the authority, the service account key and one certificate per component, unless they exist."""
    if (directory / "complete").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    _key(directory / "sa.key")
    run(["openssl", "pkey", "-in", "sa.key", "-pubout", "-out", "sa.pub"], cwd=directory)
    _key(directory / "ca.key")
    authority = ["openssl", "req", "-x509", "-new", "-key", "ca.key", "-days", DAYS, "-subj", "/CN=gpushare-dev"]
    run([*authority, "-out", "ca.crt"], cwd=directory)
    extensions = directory / "extensions"
    extensions.write_text(f"subjectAltName={SERVER_NAMES}\n")
    for name, subject in SUBJECTS.items():
        _key(directory / f"{name}.key")
        request = ["openssl", "req", "-new", "-key", f"{name}.key", "-subj", subject, "-out", f"{name}.csr"]
        run(request, cwd=directory)
        sign = ["openssl", "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key"]
        run(
            [*sign, "-CAcreateserial", "-days", DAYS, "-extfile", extensions, "-out", f"{name}.crt"], cwd=directory
        )
    (directory / "complete").touch()


def _key(path: Path) -> None:
    run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path])
    path.chmod(0o600)


def kubeconfig(directory: Path, name: str, path: Path, *, port: int = API_PORT) -> Path:
    """Write the kubeconfig of one component; it refers to the certificates by path."""
    user = {"client-certificate": str(directory / f"{name}.crt"), "client-key": str(directory / f"{name}.key")}
    cluster = {"server": f"https://{NODE_IP}:{port}", "certificate-authority": str(directory / "ca.crt")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "gpushare-dev",
        "contexts": [{"name": "gpushare-dev", "context": {"cluster": "gpushare-dev", "user": name}}],
        "clusters": [{"name": "gpushare-dev", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=1))
    path.chmod(0o600)
    return path
