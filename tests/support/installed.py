"""Programs that tests run and that a machine may lack."""

import os
from typing import NoReturn

import pytest

INSTALLED = "GPUSHARE_TEST_PROGRAMS"  # set by hack/test: the names of what it has installed or brought up


def lacking(program: str, why: str) -> NoReturn:
    """Skip the test, or fail it where hack/test said that the program is there."""
    if program in os.environ.get(INSTALLED, "").split():
        pytest.fail(f"hack/test has {program}, and yet: {why}", pytrace=False)
    pytest.skip(why)
