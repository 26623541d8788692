import os
from pathlib import Path

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy, as the commands and the image do


@pytest.fixture(scope="session")
def data_directory() -> Path:
    """Where data files that tests use lie; see its README for their sources and licences."""
    return Path(__file__).parent / "data"
