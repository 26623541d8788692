"""The e2e suite for GPUs: what it makes of its steps, what it refuses and puts back; its two tenants agree."""

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from devcluster import gpuexisting
from devcluster.progress import Failed

ROOT = Path(__file__).resolve().parents[2]
GPU_TESTS = ROOT / "tests" / "gpu"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(GPU_TESTS))
    return importlib.import_module("chart_suite")


def row(name: str, details: dict[str, Any] | None = None, ok: bool | None = True) -> dict[str, Any]:
    return {"step": name, "ok": ok, "details": details or {}}


def test_a_missed_bar_is_told_and_fails_only_a_strict_suite(suite: ModuleType) -> None:
    results = [
        row("kept", {"met": True}),
        row("late", {"median": 2.0, "met": False}),
        row("within", {"stranger": {"met": True}, "leaver": {"met": False}}),
        row("elsewhere", ok=None),
    ]
    assert [line.split("|")[2].strip() for line in suite.table(results).splitlines()[2:]] == [
        "holds",
        "holds, bar missed",
        "holds, bar missed",
        "not here",
    ]
    assert suite.summary(results) == "3 of 4 steps hold; bar missed: ['late', 'within']; failed: none"
    assert (suite.exit_code(results, strict=False), suite.exit_code(results, strict=True)) == (0, 1)
    assert suite.exit_code([row("kept", {"met": True}), row("elsewhere", ok=None)], strict=True) == 0
    broken = [*results, row("broken", {"met": True}, ok=False)]
    assert (suite.exit_code(broken, strict=False), suite.exit_code(broken, strict=True)) == (1, 1)
    assert suite.summary(broken).endswith("failed: ['broken']")


class Bench:
    """What a step's record asks of the bench."""

    def __init__(self, clears: bool) -> None:
        self.cluster = SimpleNamespace(try_kubectl=lambda *_, **__: SimpleNamespace(out=""))
        self.space = SimpleNamespace(name="e2e")
        self._clears = clears

    def clear(self) -> None:
        if not self._clears:
            raise AssertionError("the GPUs free of the suite's pods: not within 40 s")


def test_a_step_whose_pods_do_not_go_fails(suite: ModuleType) -> None:
    def fine(_: Bench) -> dict[str, Any]:
        return {"met": True}

    assert suite._one(Bench(clears=True), fine, 60.0)["ok"] is True
    stuck = suite._one(Bench(clears=False), fine, 60.0)
    assert stuck["ok"] is False
    assert "its pods did not go: the GPUs free" in suite.table([stuck])


PROGRAM = """#!/usr/bin/env python3
import json, pathlib, sys
here = pathlib.Path(sys.argv[0])
with here.with_suffix(".told").open("a") as told:
    told.write(json.dumps(sys.argv[1:]) + "\\n")
for words, answer in json.loads(here.with_suffix(".answers").read_text()):
    if set(words) <= set(sys.argv[1:]):
        print(answer)
        break
"""


class Program:
    """kubectl or helm on a path of its own: answers by the words it is called with, and remembers them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(exist_ok=True)
        path.write_text(PROGRAM.replace("/usr/bin/env python3", sys.executable))
        path.chmod(0o755)
        self.answers()

    def answers(self, *answers: tuple[list[str], str]) -> None:
        self.path.with_suffix(".answers").write_text(json.dumps(answers))

    @property
    def told(self) -> list[list[str]]:
        file = self.path.with_suffix(".told")
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    program = Program(tmp_path / "bin" / "kubectl")
    monkeypatch.setattr(gpuexisting.tools, "kubectl", lambda: program.path)
    return program


@pytest.fixture
def helm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    program = Program(tmp_path / "bin" / "helm")
    monkeypatch.setattr(gpuexisting.tools, "helm", lambda: program.path)
    monkeypatch.setenv("PATH", f"{program.path.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return program


def gpu_nodes(*tenants: dict[str, str]) -> str:
    return json.dumps({"items": [{"status": {"gpus": [{"uuid": "GPU-1", "tenants": list(tenants)}]}}]})


def releases(*names: tuple[str, str]) -> str:
    return json.dumps([{"name": name, "namespace": "theirs", "chart": chart} for name, chart in names])


TENANT = {"podUid": "u", "namespace": "shop", "pod": "web-1"}
NODES = (["nodes"], json.dumps({"items": [{"metadata": {"name": "n1"}, "status": {"allocatable": {"cpu": "8"}}}]}))
CRD = (["crd"], "customresourcedefinition.apiextensions.k8s.io/gpunodes.gpushare.io")


@pytest.mark.parametrize(
    ("found", "nodes", "words"),
    [
        (releases(("gpushare", "gpushare-0.9.0")), None, "release theirs/gpushare"),
        (releases(("gpus", "gpushare-0.9.0"), ("web", "nginx-1")), None, "release theirs/gpus"),
        (releases(), gpu_nodes(TENANT), "pod shop/web-1"),
    ],
)
def test_nothing_is_installed_where_gpushare_is_in_use_unless_it_is_asked_for(
    found: str, nodes: str | None, words: str, kubectl: Program, helm: Program
) -> None:
    helm.answers((["list"], found))
    # of the two calls that name the resource, the definition's is the one with `crd`
    kubectl.answers(NODES, *([] if nodes is None else [CRD, (["gpunodes.gpushare.io"], nodes)]))
    with pytest.raises(Failed, match=f"{words}.*YES=1"):
        gpuexisting.ExistingGpus().install()
    assert not [told for told in helm.told if "upgrade" in told]
    gpuexisting.ExistingGpus(yes=True).install()
    assert [told[:3] for told in helm.told if "upgrade" in told] == [["upgrade", "--install", "gpushare"]]


@pytest.mark.parametrize("has_definitions", [True, False])
def test_an_unused_cluster_gets_the_chart(has_definitions: bool, kubectl: Program, helm: Program) -> None:
    helm.answers((["list"], releases(("web", "nginx-1.0"))))
    kubectl.answers(NODES, *([CRD, (["gpunodes.gpushare.io"], gpu_nodes())] if has_definitions else []))
    gpuexisting.ExistingGpus().install()
    assert "upgrade" in helm.told[-1]


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"])
def test_nothing_is_installed_beside_another_device_plugin(resource: str, kubectl: Program, helm: Program) -> None:
    offered = {"items": [{"metadata": {"name": "n1"}, "status": {"allocatable": {"cpu": "8", resource: "4"}}}]}
    helm.answers((["list"], releases()))
    kubectl.answers((["nodes"], json.dumps(offered)))
    with pytest.raises(Failed, match=f"another device plugin offers GPUs .*: n1 4 {resource}\\. .*YES=1"):
        gpuexisting.ExistingGpus().install()
    assert not [told for told in helm.told if "upgrade" in told]
    gpuexisting.ExistingGpus(yes=True).install()
    assert "upgrade" in helm.told[-1]
    offered["items"][0]["status"]["allocatable"] = {resource: "0"}  # a plugin that has gone leaves this
    kubectl.answers((["nodes"], json.dumps(offered)))
    gpuexisting.ExistingGpus().install()


def test_make_asks_twice_only_with_yes() -> None:
    def made(*words: str) -> str:
        command = ["make", "-n", "test-gpu", "CLUSTER=existing", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "--yes" not in made()
    assert "--yes" not in made("YES=0")
    assert made("YES=1").count("--yes") == 2


def test_the_suite_refuses_gpus_with_tenants(
    suite: ModuleType,
    kubectl: Program,
    helm: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    kubectl.answers((["gpunodes"], gpu_nodes(TENANT)))
    monkeypatch.setattr(sys, "argv", ["chart_suite.py", "--out", str(tmp_path / "out")])
    assert suite.main() == 2
    assert "shop/web-1" in capsys.readouterr().out
    assert len(kubectl.told) == 1  # it only looked
    assert helm.told == []


def test_an_upgraded_release_is_put_back_once_and_an_uninstalled_one_is_not(
    suite: ModuleType, kubectl: Program, helm: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"image": "i", "python": "p", "mounts": [], "simulated": True}))
    monkeypatch.setenv("GPUSHARE_TENANTS", str(tenants))
    bench = suite.ChartBench(tmp_path)
    released = (["list"], "gpushare")
    helm.answers((["status"], '{"version": 7}'), released)
    bench.restore()
    assert helm.told == []  # nothing was changed
    bench.upgrade("policy.maxSlowdown=1.3")
    helm.answers((["status"], '{"version": 8}'), released)
    bench.upgrade("logging.level=DEBUG")
    bench.restore()
    assert [told[:3] for told in helm.told if "rollback" in told] == [["rollback", "gpushare", "7"]]
    bench.restore()
    assert len([told for told in helm.told if "rollback" in told]) == 1
    bench.upgrade("logging.level=DEBUG")
    helm.answers((["list"], ""))
    bench.restore()
    assert len([told for told in helm.told if "rollback" in told]) == 1


def test_what_was_changed_is_put_back_where_a_step_ends_the_suite(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called = []

    class Changed:
        def __init__(self, _: Path) -> None:
            pass

        def restore(self) -> None:
            called.append("restore")
            raise AssertionError("helm does not answer")

        def close(self) -> None:
            called.append("close")

    def ended(_: object) -> dict[str, Any]:
        sys.exit(143)  # as SIGTERM does

    monkeypatch.setattr(suite, "ChartBench", Changed)
    monkeypatch.setattr(suite, "STEPS", (ended,))
    monkeypatch.setattr(suite.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["chart_suite.py", "--yes", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        suite.main()
    assert called == ["restore", "close"]
    monkeypatch.setattr(suite, "STEPS", ())
    assert suite.main() == 1  # and that it could not be put back fails the suite
    assert "put_back | FAILS" in (tmp_path / "chart_suite.md").read_text()


def spoken(program: str) -> tuple[dict[str, set[str]], list[str]]:
    """The events that a tenant says, each with its keys, and the arguments that it takes."""
    events: dict[str, set[str]] = {}
    arguments = []
    for node in ast.walk(ast.parse((GPU_TESTS / program).read_text())):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "say":
            assert isinstance(node.args[0], ast.Constant), "an event's name is a literal"
            events.setdefault(str(node.args[0].value), set()).update(str(word.arg) for word in node.keywords)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            arguments.append(ast.unparse(node))
    return events, sorted(arguments)


def test_the_twins_tenant_takes_the_same_modes_and_says_the_same_events_as_cudas() -> None:
    cuda, twin = spoken("cuda_tenant.py"), spoken("chart_twin_tenant.py")
    assert "'long'" in "".join(cuda[1])
    assert len(cuda[0]) >= 10
    assert twin == cuda


def test_a_long_kernel_of_the_twins_tenant_is_one_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(GPU_TESTS))
    tenant = importlib.import_module("chart_twin_tenant")
    now = [100.0]

    def tick(_: float) -> dict[str, float]:
        now[0] += 0.5
        return {"iterations_per_s": 7.0}

    monkeypatch.setattr(tenant, "time", SimpleNamespace(time=lambda: now[0]))
    tenant.run(SimpleNamespace(tick=tick), SimpleNamespace(mode="long", seconds=5.0, mib=0))
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in events[:3]] == ["long", "kernel", "rate"]
    assert events[0]["t"] == 100.0
    assert events[1]["t"] >= 105.0


def test_a_cgroups_memory_is_counted_as_kubelet_does(suite: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text(f"{150 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {80 << 20}\ninactive_file {60 << 20}\nactive_file 9\n")
    assert suite.trouble._working_set_mib(tmp_path) == 90.0


class Recorded:
    """A bench that keeps what a step asks of it; the cluster admits the pod at the second try."""

    simulated = False

    def __init__(self, sms: int, profiles: list[dict[str, Any]]) -> None:
        self.sets: list[str] = []
        self.applied: list[dict[str, Any]] = []
        self.sms = sms
        shares = [{"status": {"profile": profile}} for profile in profiles]
        self.space = SimpleNamespace(name="e2e")
        self.cluster = SimpleNamespace(apply=self._apply, get=lambda *_: {"items": shares})

    def _apply(self, pod: dict[str, Any], namespace: str) -> SimpleNamespace:
        self.applied.append(pod)
        return SimpleNamespace(code=int(len(self.applied) < 2))

    def upgrade(self, *sets: str) -> None:
        self.sets += sets

    def torch(self, program: str, seconds: float, env: object = None) -> list[str]:
        assert env is None, "what the program itself sets nobody is told of"
        return ["python", program, str(seconds)]

    def pod(self, name: str, command: list[str], fraction: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "command": command, "fraction": fraction, **more}

    def until(self, _: str, event: str) -> dict[str, Any]:
        return {"event": event, "sms": self.sms}

    def gpus(self) -> list[dict[str, int]]:
        return [{"smCount": 132}]


def test_own_threads_are_set_in_the_pods_object_which_is_allowed_first(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite.checks.time, "sleep", lambda _: None)
    bench = Recorded(39, [{"threadPercentage": 30}])
    assert suite.checks.own_threads(bench)["sms"] == 39
    assert bench.sets == ["admission.allowedEnv={CUDA_MPS_ACTIVE_THREAD_PERCENTAGE}"]
    assert [pod["env"] for pod in bench.applied] == [{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"}] * 2
    bench_module = sys.modules["chart_bench"]
    for sms, profiles in ((132, []), (39, [{"threadPercentage": 100}])):
        with pytest.raises(bench_module.Failed):
            suite.checks.own_threads(Recorded(sms, profiles))


class TwoGpus(Recorded):
    """A bench of two GPUs on which every step goes well, but for what a process sees."""

    def __init__(self, sees: dict[str, str]) -> None:
        super().__init__(132, [])
        self._sees = sees

    def gpus(self) -> list[dict[str, int]]:
        return [{"smCount": 132}, {"smCount": 132}]

    def neighbours(self) -> None:
        pass

    def cuda(self, *_: object) -> list[str]:
        return []

    def pod(self, name: str, *_: object, **__: Any) -> dict[str, Any]:
        return {"name": name}

    def start(self, *_: object) -> None:
        pass

    def gpu_of(self, name: str) -> str:
        return "GPU-b" if name in {"whole", "half-1"} else "GPU-a"

    def sees(self, name: str) -> list[str]:
        return [self._sees.get(name, self.gpu_of(name))]

    def events_of(self, *_: str) -> list[dict[str, int]]:
        return [{"sms": 132}]

    def identity(self, *_: str) -> dict[str, object]:
        return {}

    def until_ended(self, *_: str, seconds: float = 0) -> None:
        pass

    def healthy(self) -> bool:
        return True

    def unharmed(self, _: object) -> dict[str, float]:
        return {"whole": 1.0}

    def delete(self, *_: str) -> None:
        pass


def test_two_gpus_compares_what_processes_see_with_what_was_decided(suite: ModuleType) -> None:
    assert suite.checks.two_gpus(TwoGpus({}))["seen"] == {"one": ["GPU-a"], "two": ["GPU-a"], "whole": ["GPU-b"]}
    for name, wrong in (("one", "GPU-b"), ("whole", "GPU-a")):
        with pytest.raises(sys.modules["chart_bench"].Failed, match="other GPUs than their pods were given"):
            suite.checks.two_gpus(TwoGpus({name: wrong}))


class Throttling(Recorded):
    """A victim and its neighbour, which the loop stops for a part of the time, or does not."""

    def __init__(self, made: float, under_share: float, after: float) -> None:
        super().__init__(132, [{"a": 1}])
        self.made, self.under_share, self.after = made, under_share, after
        self.slowdowns: dict[str, float] = {}
        self.cluster = SimpleNamespace(kubectl=self._kubectl, get=lambda *_: {"status": {"profile": {"a": 1}}})

    def _kubectl(self, *_: str, stdin: str) -> None:
        body = json.loads(stdin)
        self.slowdowns[body["metadata"]["name"]] = body["spec"]["maxSlowdown"]

    def pod(self, name: str, *_: object, **__: Any) -> dict[str, Any]:
        return {"name": name}

    def start(self, *_: object) -> None:
        pass

    def delete(self, *_: str) -> None:
        pass

    def rate(self, name: str, *_: object) -> float:
        if name.startswith("alone") or name == "bad":
            return 100.0
        return 100.0 * (self.made if self.slowdowns["victim"] == 10.0 else self.after)

    def of_pod(self, metric: str, name: str) -> float:
        return self.under_share / self.slowdowns[name] if metric == "gpushare_pod_promise_ratio" else 0.5

    def reasons(self, _: str) -> set[str]:
        return set()


def test_a_throttle_is_shown_only_where_a_promise_was_broken_and_is_kept_again(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    clock = SimpleNamespace(
        time=lambda: now[0], monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    monkeypatch.setattr(suite.trouble, "time", clock)
    monkeypatch.setattr(sys.modules["livecluster"], "time", clock)
    failed = sys.modules["chart_bench"].Failed
    kept = suite.trouble.throttled(Throttling(made=0.45, under_share=0.75, after=0.62))
    assert kept["met"]
    assert 0.45 < kept["promise"] < 0.62
    with pytest.raises(failed, match="too little to break a promise"):
        suite.trouble.throttled(Throttling(made=0.71, under_share=0.75, after=0.75))
    with pytest.raises(failed, match="is not kept again"):
        suite.trouble.throttled(Throttling(made=0.45, under_share=0.75, after=0.50))


@pytest.mark.parametrize("program", ["cuda_tenant.py", "chart_twin_tenant.py"])
def test_a_swelling_tenant_touches_the_memory_that_it_takes_and_ends_at_its_most(program: str) -> None:
    script = f"""
import re, runpy
swell = runpy.run_path({str(GPU_TESTS / program)!r})["swell"]
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
before = peak()
swell(64)
print((peak() - before) >> 10)
"""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert 56 <= int(done.stdout) <= 200


class Swelling(Recorded):
    """A pod over its memory limit beside two others; in some rounds these fall."""

    def __init__(self, *, harmful: set[int], reason: str = "OOMKilled", told: bool = True) -> None:
        super().__init__(132, [])
        self.oom_kills = 3
        self.harmful, self.reason, self.told = harmful, reason, told
        self.lives = {"one": 0, "two": 0}
        self.limits: list[str] = []
        self.deleted: list[str] = []
        self.rounds = self.started = 0

    def neighbours(self) -> None:
        self.started += 1

    def identity(self, *_: str) -> dict[str, object]:
        return dict(self.lives)

    def cuda(self, mode: str, *_: object) -> list[str]:
        return [mode]

    def pod(self, name: str, command: list[str], *_: str, **more: Any) -> dict[str, Any]:
        if command == ["swell"]:
            self.limits.append(more["host_memory"])
        return {"name": name}

    def start(self, pod: dict[str, Any]) -> None:
        if pod["name"].startswith("oom") and self.rounds in self.harmful:
            self.lives["two"] += 1

    def until(self, _: str, event: str, seconds: float = 0) -> dict[str, Any]:
        return {"event": event, "t": 0.0}

    def until_ended(self, *_: str, seconds: float = 0) -> None:
        self.rounds += 1

    def ended(self, _: str) -> dict[str, Any]:
        return {"reason": self.reason, "exitCode": 137}

    def events_of(self, *_: str) -> list[dict[str, int]]:
        return [{"sms": 13}]

    def healthy(self) -> bool:
        return True

    def reasons(self, name: str) -> set[str]:
        return {"GpuFault"} if self.told and name == "two" else set()

    def delete(self, *names: str) -> None:
        self.deleted += names

    def unharmed(self, before: dict[str, object]) -> dict[str, float]:
        assert before == self.lives
        return dict.fromkeys(before, 1.0)


def test_an_oom_kill_says_how_often_neighbours_fell_and_begins_the_next_round_with_new_ones(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Swelling(harmful=set())
    found = suite.trouble.oom_killed(bench)
    assert (found["harmful"], found["met"], found["rates"]) == ("0 of 3", True, {"one": 1.0, "two": 1.0})
    assert bench.limits == ["1Gi"] * 3
    assert bench.started == 1
    bench = Swelling(harmful={1})
    found = suite.trouble.oom_killed(bench)
    assert [one["neighbours_fell"] for one in found["rounds"]] == [[], ["two"], []]
    assert (found["harmful"], found["met"]) == ("1 of 3", False)
    assert bench.started == 2
    assert {"one", "two", "next-0"} <= set(bench.deleted)
    failed = sys.modules["chart_bench"].Failed
    with pytest.raises(failed, match="was not killed for its memory"):
        suite.trouble.oom_killed(Swelling(harmful=set(), reason="Error"))
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(sys.modules["livecluster"], "time", clock)
    with pytest.raises(sys.modules["livecluster"].NotYet, match="an event of two"):
        suite.trouble.oom_killed(Swelling(harmful={0}, told=False))


def test_the_suite_needs_no_package_of_python_since_a_gpu_machine_may_have_none(tmp_path: Path) -> None:
    asked = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
runpy.run_path(sys.argv[1] + "/chart_suite.py")  # imports everything
from livecluster import Cluster, Namespace
space = Namespace(Cluster("there", "/bin/echo", "existing"), "image")
space.name = "here"
assert space.log("a") == "--kubeconfig=there -n here logs a\\n", "kubectl is asked"
assert space.log("a", tail=9) == "--kubeconfig=there -n here logs a --tail=9\\n"
space.cluster.program = sys.argv[2]
assert space.cluster.get("pods") == {"items": []}
"""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho '{\"items\": []}'\n")
    kubectl.chmod(0o755)
    done = subprocess.run(  # without site-packages, and without PYTHONPATH
        [sys.executable, "-S", "-E", "-c", asked, str(GPU_TESTS), str(kubectl)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-1000:]
