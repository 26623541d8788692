import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy, as the commands and the image do

# How long an example takes is the machine's affair: another process's burst is no failure.
settings.register_profile("gpushare", deadline=None)
settings.load_profile("gpushare")


@pytest.fixture(scope="session")
def data_directory() -> Path:
    """Where data files that tests use lie; see its README for their sources and licences."""
    return Path(__file__).parent / "data"
