"""Pack the kubectl plugin for krew: an archive with everything but Python, and the manifest that names its sum.

python hack/krew.py --uri https://example.com/releases/v0.1.0 -o dist/

The archive holds compiled libraries, so it is for the platform and the Python that it is packed with; the launcher
says so where another one runs it. Try it with
`kubectl krew install --manifest=dist/gpushare.yaml --archive=dist/NAME.tar.gz`.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
# Dependencies of the project that the commands import; the agent, the operator and NVML are not in the plugin.
LEFT_OUT = ("kopf", "grpcio", "h2", "protobuf", "nvidia-ml-py", "prometheus-client")
DESCRIPTION = """\
Shows who shares which GPU under gpushare, at what cap, what was promised, how each pod fares
and what sharing gains; explains why a pod is where it is, or why it waits.
"""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
LAUNCHER = """\
#!/bin/sh
# kubectl gpushare, packed with its libraries.
here=$(dirname "$(readlink -f "$0")")
python=${GPUSHARE_PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (MAJOR, MINOR))' 2>/dev/null; then
    echo "kubectl gpushare: needs Python MAJOR.MINOR: install it, or name it in GPUSHARE_PYTHON" >&2
    exit 2
fi
PYTHONPATH="$here/site${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -c '
import sys
from gpushare.cli import complete, main
sys.argv[0] = "NAME"
(complete if sys.argv[0].startswith("kubectl_complete") else main)()
' "$@"
"""


def launcher(name: str) -> str:
    """Return the program `name`, which runs on the Python that the libraries were packed with."""
    major, minor = sys.version_info[:2]
    return LAUNCHER.replace("MAJOR", str(major)).replace("MINOR", str(minor)).replace("NAME", name)


def requirements() -> list[str]:
    """Return the packages that pip must install beside our own code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [each for each in project["dependencies"] if not each.startswith(LEFT_OUT)]


def install(site: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(site)]
    subprocess.run([*pip, *requirements()], check=True)
    subprocess.run([*pip, "--no-deps", str(ROOT)], check=True)


def pack(folder: Path, archive: Path) -> str:
    """Pack a folder with `site/` in it, the launchers and the licence; return the archive's SHA-256."""
    for name in ("kubectl-gpushare", "kubectl_complete-gpushare"):
        (folder / name).write_text(launcher(name))
        (folder / name).chmod(0o755)
    (folder / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    with tarfile.open(archive, "w:gz") as tar:
        for each in sorted(folder.iterdir()):
            tar.add(each, arcname=each.name, filter=_plain)
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Drop owner and compiled Python from an archive, so that equal content gives equal archives but times."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return None if "__pycache__" in entry.name else entry


def manifest(version: str, uri: str, sha256: str, machine: str) -> dict[str, Any]:
    """Return Krew's manifest for one platform."""
    python = ".".join(map(str, sys.version_info[:2]))
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "gpushare"},
        "spec": {
            "version": f"v{version}",
            "shortDescription": "See who shares which GPU, and why",
            "description": DESCRIPTION,
            "caveats": f"Needs Python {python} on the path, or named in GPUSHARE_PYTHON.\n",
            "platforms": [
                {
                    "selector": {"matchLabels": {"os": "linux", "arch": ARCHITECTURES[machine]}},
                    "uri": uri,
                    "sha256": sha256,
                    "bin": "kubectl-gpushare",
                }
            ],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--uri", required=True, help="folder that the archive will be downloaded from")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    machine = os.uname().machine
    name = f"kubectl-gpushare_{version}_linux_{ARCHITECTURES[machine]}"
    folder: Path = arguments.output / name
    folder.mkdir(parents=True)
    install(folder / "site")
    archive = arguments.output / f"{name}.tar.gz"
    found = manifest(version, f"{arguments.uri.rstrip('/')}/{archive.name}", pack(folder, archive), machine)
    (arguments.output / "gpushare.yaml").write_text(yaml.safe_dump(found, sort_keys=False))
    print(f"{archive} ({archive.stat().st_size / 2**20:.0f} MiB), {arguments.output / 'gpushare.yaml'}")


if __name__ == "__main__":
    main()
