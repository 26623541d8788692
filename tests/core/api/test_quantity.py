"""Kubernetes quantities and counts, as the API server stores them and as nobody should write them."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.api.pod_resources import requests_of, share_limit_of
from gpushare.core.api.quantity import (
    MOST_BYTES,
    MOST_COUNT,
    MOST_MILLI,
    parse_bytes,
    parse_count,
    parse_cpu_milli,
    parse_quantity,
)

INT64_MAX, PODS_OF_A_NODE = 2**63 - 1, 10**6


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


AMOUNTS = st.builds(
    "{}{}".format, st.integers(0, 10**12), st.sampled_from(["", "m", "k", "E", "Ei", "P", "e30", "e300", "e999"])
)
CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {
            "resources": st.fixed_dictionaries(
                {
                    "requests": st.fixed_dictionaries({"cpu": AMOUNTS, "memory": AMOUNTS}),
                    "limits": st.fixed_dictionaries({"gpushare.io/share": AMOUNTS}),
                }
            )
        },
        optional={"restartPolicy": st.just("Always")},
    ),
    max_size=4,
)


@pytest.mark.parametrize("text", ["9E", "5P", "1e300", "1e999"])
def test_no_amount_of_cpu_or_memory_is_beyond_what_adds_up(text):
    requests = {"requests": {"cpu": text, "memory": text}}
    cpu_milli, memory_mib = requests_of({"containers": [{"resources": requests}] * 3, "overhead": {"cpu": text}})
    assert cpu_milli == MOST_MILLI
    assert memory_mib == min(3 * int(parse_quantity(text)), MOST_BYTES) // 2**20
    assert (parse_cpu_milli("16"), parse_bytes("1Gi")) == (16_000, 2**30)


OF_A_POD = st.fixed_dictionaries({"cpu": AMOUNTS, "memory": AMOUNTS})


@given(CONTAINERS, CONTAINERS, OF_A_POD, st.none() | st.fixed_dictionaries({"requests": OF_A_POD}))
def test_the_requests_of_a_million_pods_add_up_in_64_bits(containers, init, overhead, whole):
    spec = {"containers": containers, "initContainers": init, "overhead": overhead, "resources": whole}
    for amount in (*requests_of(spec), share_limit_of(spec)):
        assert 0 <= amount * PODS_OF_A_NODE <= INT64_MAX // 4


def test_a_limit_of_shares_is_bounded():
    limits = {"limits": {"gpushare.io/share": "9E"}}
    assert share_limit_of({"containers": [{"resources": limits}] * 2}) == MOST_COUNT
