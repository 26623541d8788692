from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_directory() -> Path:
    """Where data files that tests use lie; see its README for their sources and licences."""
    return Path(__file__).parent / "data"
