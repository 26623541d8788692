"""Kubernetes quantities and counts, as the API server stores them and as nobody should write them."""

from decimal import Decimal

import pytest

from gpushare.core.api.pod_resources import share_limit_of
from gpushare.core.api.quantity import parse_count, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("250m", "0.25"),
        ("1Ki", "1024"),
        ("1e3", "1000"),
        ("1E3", "1000"),
        ("2E", "2e18"),
        (".5", "0.5"),
        ("5.", "5"),
        ("-1", "-1"),
        (4, "4"),
    ],
)
def test_quantities(text, value):
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize(
    "text", ["", "lots", "1.2.3", ".", "1\n", "1 Gi", "٣", "1e9999999999", "1e1000", "9" * 65, "NaN", "Infinity"]
)
def test_what_is_no_quantity(text):
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(("text", "count"), [("25", 25), ("1k", 1000), ("1600", 1600), ("1e3", 1000), (0, 0)])
def test_counts_of_an_extended_resource(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["25m", "-1", "0.5", "x"])
def test_what_is_no_count(text):
    with pytest.raises(ValueError, match="not a"):
        parse_count(text)


def test_the_share_of_ten_gpus_is_read_as_the_api_server_stores_it():
    limits = {"limits": {"gpushare.io/share": "1k"}}
    assert share_limit_of({"containers": [{"name": "a"}, {"name": "b", "resources": limits}]}) == 1000
    assert share_limit_of({}) == 0
