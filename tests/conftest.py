import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy, as the commands and the image do

# How long an example takes is the machine's affair: another process's burst is no failure.
settings.register_profile("gpushare", deadline=None)
settings.load_profile("gpushare")


TESTS = Path(__file__).parent
# Rooms whose tests ask nothing of the machine but time: they compute, render the chart and pages, run commands.
# At idle priority beside a cluster's tests, those of bench, cli, extender, exporter and twin passed on 2026-11-30.
COMPUTING = {"bench", "chart", "cli", "core", "exporter", "extender", "layout", "research", "sim", "twin"}


@pytest.hookimpl(tryfirst=True)  # before markers are chosen by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the rooms that ask only for time, and those that have an API server of their own."""
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
