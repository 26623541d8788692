"""The checked-in gRPC stubs are what the checked-in protos give (make proto), and import as their package."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "deviceplugin" / "gpushare_deviceplugin"
STUBS = [f"{name}_pb2{kind}" for name in ("api", "podresources") for kind in (".py", ".pyi", "_grpc.py")]


def test_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    installed = importlib.metadata.version("grpcio-tools")
    if f"GRPC_GENERATED_VERSION = '{installed}'" not in (PACKAGE / "api_pb2_grpc.py").read_text():
        pytest.skip(f"grpcio-tools {installed} writes other stubs than the version that made these")
    protos = [f"gpushare_deviceplugin/{name}.proto" for name in ("api", "podresources")]
    out = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PACKAGE.parent), *out, *protos]
    subprocess.run(command, check=True, cwd=PACKAGE.parent, timeout=60)
    for name in STUBS:
        assert (tmp_path / "gpushare_deviceplugin" / name).read_text() == (PACKAGE / name).read_text(), name
    assert "from gpushare_deviceplugin import api_pb2" in (PACKAGE / "api_pb2_grpc.py").read_text()
