"""What the steps of gate_suite.py hold a promise to."""

import re

from gate_bench import Bench

START = 60.0  # seconds within which a tenant has its context even on a loaded machine


class Failed(Exception):
    """What was promised did not hold."""


def must(condition: bool, text: str) -> None:
    if not condition:
        raise Failed(text)


def sms_at(bench: Bench, percentage: int) -> tuple[int, int]:
    """SMs that a ceiling allows: facts.md 7 and 11 round down to pairs; one pair of tolerance for other chips."""
    exact = bench_sms(bench) * percentage / 100
    return max(1, int(exact) - 3), max(8, int(exact) + 1)  # an H200 gives 8 SMs at 5% and below


def bench_sms(bench: Bench) -> int:
    """All SMs of the GPU, as the self-test's uncapped probe saw them."""
    found = re.search(r"of (\d+) SMs", bench.status().self_test.detail)
    return int(found[1]) if found else 132
