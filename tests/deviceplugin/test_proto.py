"""The checked-in gRPC stubs are what the checked-in protos give (make proto), and import as their package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "deviceplugin" / "gpushare_deviceplugin"
STUBS = [f"{name}_{kind}" for name in ("api", "podresources") for kind in ("pb2.py", "pb2.pyi", "pb2_grpc.py")]


def test_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    protos = [f"gpushare_deviceplugin/{name}.proto" for name in ("api", "podresources")]
    out = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PACKAGE.parent), *out, *protos]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, check=True, cwd=PACKAGE.parent, timeout=60, env=environment)
    made = [
        re.findall(r"^# Protobuf Python Version: .*", (folder / "api_pb2.py").read_text(), re.MULTILINE)
        for folder in (PACKAGE, tmp_path / "gpushare_deviceplugin")
    ]
    if made[0] != made[1]:
        pytest.skip(f"the protoc here writes stubs for another protobuf: {made[1]}, checked in are {made[0]}")
    for name in STUBS:
        assert (tmp_path / "gpushare_deviceplugin" / name).read_text() == (PACKAGE / name).read_text(), name
