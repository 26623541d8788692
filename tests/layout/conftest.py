from collections.abc import Iterator

import pytest
import syntax


@pytest.fixture(scope="package", autouse=True)
def _trees_until_the_last_test_here() -> Iterator[None]:
    """Drop the trees that the tests here share."""
    yield
    syntax.drop()
