"""The host raises its limit of descriptors as far as it may; in a process of its own, since limits stay."""

import json
import os
import subprocess
import sys

import pytest

from .conftest import SRC

PROGRAM = """
import json, os, resource, sys
from pathlib import Path
from gpushare.mps.host import raise_descriptor_limit
hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
if sys.argv[2] == "tenant" and os.geteuid() == 0:
    os.setuid(65534)
said = raise_descriptor_limit()
print(json.dumps([said, *resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""


def limits(hard: int, who: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(hard), who],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_the_right_to_more_it_takes_all_of_the_hard_limit():
    assert limits(4096, "tenant") == [4096, 4096, 4096]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_with_the_right_to_more_it_takes_more():
    reported, soft, hard = limits(4096, "root")
    assert reported == soft
    assert hard >= soft >= 4096
