"""The chart suite's newcomer: what counts as kept again, and the step's walk beside a bench of its own."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU_TESTS = ROOT / "tests" / "gpu"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(GPU_TESTS))
    return importlib.import_module("chart_suite")


def test_a_promise_is_kept_again_when_it_is_kept_for_three_seconds(suite: ModuleType) -> None:
    module = suite.chart_newcomer

    def looks(*own: float) -> list[Any]:
        return [module.Look(0.5 * number, each) for number, each in enumerate(own)]

    high, low = [0.7] * 8, [0.5]
    assert module.kept_again(looks(*high, *high), 0.6) == 0.0  # nobody broke it
    assert module.kept_again(looks(*high, *low * 4, *high), 0.6) == 2.0
    assert module.kept_again(looks(*low, 0.7, 0.7, *low, *high), 0.6) == 2.0  # a second of it does not count
    assert module.kept_again(looks(*high, *low, 0.7, 0.7), 0.6) is None  # the looks end too early
    assert module.kept_again(looks(*high, *low * 8), 0.6) is None


class Newcomer:
    """The victim makes half of its speed beside the newcomer; a throttle leaves it more."""

    simulated = False

    def __init__(self, after: float, profile_after: float = 4.0) -> None:
        self.now, self.after, self.profile_after = 1000.0, after, profile_after
        self.slowdowns: dict[str, float] = {}
        self.running: dict[str, float] = {}  # by name: since when
        self.seconds_read = 0.0
        self.cluster = SimpleNamespace(get=self._share, kubectl=self._kubectl)
        self.space = SimpleNamespace(name="space")

    def _kubectl(self, *_: str, stdin: str) -> None:
        body = json.loads(stdin)
        self.slowdowns[body["metadata"]["name"]] = body["spec"]["maxSlowdown"]

    def _share(self, *asked: str) -> dict[str, Any]:
        if asked[-1] == "newcomer":
            if "newcomer" not in self.running or self.now < self.running["newcomer"] + self.profile_after:
                return {"status": {}}
            self.seconds_read = 2.0
        return {"status": {"profile": {"any": 1}}}

    def gpus(self) -> list[str]:
        return ["one"]

    def torch(self, program: str, seconds: float) -> list[str]:
        return [program, str(seconds)]

    def pod(self, name: str, *_: object, **__: object) -> str:
        return name

    def start(self, name: str) -> None:
        self.running[name] = self.now

    def delete(self, name: str) -> None:
        del self.running[name]

    def until(self, name: str, event: str) -> dict[str, Any]:
        return {"t": self.running[name], "event": event}

    def reasons(self, _: str) -> set[str]:
        return set()

    def rate(self, name: str, newest: int) -> float:
        if name == "alone":
            return 100.0
        if "newcomer" not in self.running:
            return 75.0
        if self.slowdowns["victim"] == 10.0:
            return 50.0
        return 50.0 if self.now < self.running["newcomer"] + 4 else 100 * self.after

    def metrics(self, pattern: str) -> dict[str, float]:
        return {pattern: self.seconds_read}

    def of_pod(self, metric: str, name: str) -> float | None:
        return 0.75 / self.slowdowns[name] if metric == "gpushare_pod_promise_ratio" else 0.5


def test_a_newcomer_is_read_breaks_a_promise_and_is_throttled(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(bench: Newcomer) -> dict[str, Any]:
        def passes(seconds: float) -> None:
            bench.now += seconds

        def wait_for(what: str, probe: Callable[[], object], seconds: float = 60.0, every: float = 0.5) -> object:
            until = bench.now + seconds
            while not (found := probe()):
                if bench.now >= until:
                    raise suite.chart_newcomer.NotYet(f"not within {seconds} s: {what}")
                passes(every)
            return found

        monkeypatch.setattr(
            suite.chart_newcomer, "time", SimpleNamespace(time=lambda: bench.now, sleep=passes), raising=True
        )
        monkeypatch.setattr(suite.chart_newcomer, "wait_for", wait_for)
        found: dict[str, Any] = suite.chart_newcomer.newcomer(bench)
        return found

    found = step(Newcomer(after=0.7))
    assert found["unknown"]["first_kernel_to_profile_s"] == 4.0
    assert found["unknown"]["part_of_the_neighbours_minute"] == pytest.approx(2 / 60, abs=1e-3)
    assert (found["beside"], found["before"], found["slowdown_asked"]) == (0.5, 0.75, 1.2)
    assert found["promise"] == pytest.approx(0.625)
    assert (found["broken_for_s"], found["lowest"], found["met"]) == (4.0, 0.5, True)
    assert step(Newcomer(after=0.7, profile_after=31.0))["met"] is False  # the bar of 30 s
    with pytest.raises(suite.chart_newcomer.Failed, match="not kept again"):
        step(Newcomer(after=0.55))
    with pytest.raises(suite.chart_newcomer.Failed, match="a profile of the newcomer"):
        step(Newcomer(after=0.7, profile_after=60.0))


@pytest.mark.parametrize(
    ("name", "title", "readings"),
    [
        ("h200-newcomer", "With a newcomer, and with the defects of 28 November mended", 6.0),
        ("h200-newcomer-1130", "After the gate's and the operator's mends of 28 to 30 November", 15.0),
    ],
)
def test_the_page_says_of_the_newcomer_what_the_record_says(
    suite: ModuleType, name: str, title: str, readings: float
) -> None:
    step = json.loads((ROOT / f"tests/data/chart/{name}.json").read_text())["details"]
    page = (ROOT / "docs/measurements/cluster-h200.md").read_text().replace("**", "")
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = {
        name: row
        for row in section.splitlines()
        for name in ("unknown", "known")
        if f"| newcomer, {name} |" in row
    }
    unknown = step["unknown"]
    assert f"profile {unknown['first_kernel_to_profile_s']} s after its first kernel" in rows["unknown"]
    assert f"cost the neighbour {unknown['part_of_the_neighbours_minute']:.0%} of a minute" in rows["unknown"]
    assert list(unknown["readings"].values()) == [readings]
    assert f"fft makes {step['beside']} beside it and is promised {step['promise']}" in rows["known"]
    looks = [suite.chart_newcomer.Look(*each) for each in step["looks"]]
    broken = suite.chart_newcomer.kept_again(looks, step["promise"] - suite.chart_newcomer.TOLERANCE)
    assert f"below the promise for {broken} s" in rows["known"]
    assert f"{looks[0].own:.2f} at once, {min(look.own for look in looks):.2f} at the lowest" in rows["known"]
    late = [look.own for look in looks if look.at > 10]
    assert f"{min(late):.2f} to {max(late):.2f}" in rows["known"]
    assert f"stands still {step['throttle_of_newcomer']:.0%} of the time" in rows["known"]
