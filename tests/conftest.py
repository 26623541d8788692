import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy, as the commands and the image do

# How long an example takes is the machine's affair: another process's burst is no failure.
settings.register_profile("gpushare", deadline=None)
settings.load_profile("gpushare")


TESTS = Path(__file__).parent
COMPUTING = {"core", "sim", "research"}  # rooms whose tests ask nothing of the machine but time


@pytest.hookimpl(tryfirst=True)  # before markers are chosen by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the rooms that only compute, and those that have an API server of their own."""
    for item in items:
        room = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if room in COMPUTING:
            item.add_marker(pytest.mark.compute)
        if room == "operator" and item.get_closest_marker("integration") is not None:
            item.add_marker(pytest.mark.own_server)


@pytest.fixture(scope="session")
def data_directory() -> Path:
    """Where data files that tests use lie; see its README for their sources and licences."""
    return TESTS / "data"
