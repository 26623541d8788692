"""Pages of the site that are held to what they describe."""

import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml
from exposed import full, one_workload
from installed import lacking
from prometheus_client.registry import Collector

from gpushare.core.admission import Defaults
from gpushare.core.api import clients_of
from gpushare.core.control import SLO_TROUBLES
from gpushare.core.progress import promise_of
from gpushare.exporter import DeviceFigures, NodeCollector, NodeFigures, TenantFigures
from gpushare.mps.layout import GpuDirectory, write_status
from gpushare.mps.observe import GateCollector
from gpushare.mps.status import GateState, GateStatus, RefuseReason, ThrottleStatus
from gpushare.research.dataset import parse
from gpushare_operator.workloads import WorkloadCollector

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SVG = "{http://www.w3.org/2000/svg}"
PICTURES = sorted((DOCS / "guide" / "pictures").glob("*.svg"))


def _pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for each in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from _pages(each)


def test_every_page_but_decisions_and_measurements_is_in_the_menu() -> None:
    written = {str(page.relative_to(DOCS)) for folder in ("", "guide") for page in (DOCS / folder).glob("*.md")}
    menu = [line for line in (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].splitlines() if line.strip()]
    listed = list(_pages(yaml.safe_load("\n".join(menu))))
    assert sorted(listed) == sorted(written)


def test_the_first_page_leads_to_every_page_of_the_guide() -> None:
    first = (DOCS / "index.md").read_text()
    assert [page.name for page in (DOCS / "guide").glob("*.md") if f"(guide/{page.name})" not in first] == []
    assert "(security.md)" in first


def _luminance(colour: str) -> float:
    digits = colour.removeprefix("#")
    wide = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    parts = [int(wide[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _fills(rules: str) -> dict[str, str]:
    return dict(re.findall(r"(text|\.\w+)\{[^}]*?fill:(#\w+)", rules))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_says_what_it_shows_loads_nothing_and_is_readable_light_and_dark(picture: Path) -> None:
    text = picture.read_text()
    assert len(text) < 6_000
    assert not re.search(r"url\(|@import|@font-face|<image|<script|href", text)
    root = ET.fromstring(text)
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert title.text
    assert description is not None
    assert len(description.text or "") > 60
    light, _, dark = text.partition("@media (prefers-color-scheme:dark)")
    assert dark
    for rules in (light, dark):
        fills = _fills(rules)
        for ink in ("text", ".s"):
            assert _contrast(fills[ink], fills[".card"]) >= 4.5, (picture.name, ink)
        for bar in (".a", ".b", ".c"):
            assert _contrast(fills[".on"], fills[bar]) >= 4.5, (picture.name, bar)


def test_every_picture_is_on_the_page_with_a_sentence_of_its_own() -> None:
    page = (DOCS / "guide" / "concepts.md").read_text()
    shown = dict(re.findall(r"!\[([^\]]{30,})\]\(pictures/(\w+)\.svg\)", page))
    assert sorted(shown.values()) == [picture.stem for picture in PICTURES]
    assert len(PICTURES) == 5


def _words_of(picture: str) -> str:
    root = ET.fromstring((DOCS / "guide" / "pictures" / f"{picture}.svg").read_text())
    return " ".join(each.text or "" for each in root.iter())


def test_the_promises_of_the_picture_are_the_datasets() -> None:
    measured = parse((ROOT / "src/gpushare/data/h200-colocation.jsonl").read_bytes().splitlines())
    page, picture = (DOCS / "guide" / "concepts.md").read_text(), _words_of("promise")
    for workload in ("bert-infer-fp32-b16", "resnet50-train-bf16-b64", "serve-resnet50-fp32-20ms"):
        alone = measured.cap_curve(workload)[25]
        promised = promise_of(alone, 25, Defaults().max_slowdown_ratio)
        assert f"alone under a cap of 25%: {alone:.2f}; promised: {promised:.2f}" in picture
        assert f"{promised:.2f}" in page


@pytest.mark.parametrize(
    ("picture", "fact", "figures"),
    [
        ("counters", 22, ("96%", "73%", "28%")),
        ("throttle", 27, ("84.5", "42", "127", "159")),
        ("cap", 7, ("66", "32", "132")),
    ],
)
def test_the_figures_of_the_pictures_are_measured_facts(picture: str, fact: int, figures: tuple[str, ...]) -> None:
    found = re.search(
        rf"^{fact}\. (.*?)(?=^\d+\. |^## )", (DOCS / "facts.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert found
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]\d)", found[1]), (fact, figure)
        assert figure in _words_of(picture)


def _count(collector: Collector) -> int:
    return sum(len(family.samples) for family in collector.collect())


def _agent_series(gpus: int, pods: int, **chosen: Any) -> int:
    pipes = dict.fromkeys(("fp16", "fp32", "fp64", "int8", "integer", "dram"), 0.5)
    refused = dict.fromkeys(RefuseReason, 0)  # counters of trouble begin at 0
    devices = tuple(
        full(
            DeviceFigures,
            uuid=f"GPU-{n}",
            mps_state="Active",
            pipes=pipes,
            waiting_connections={},
            refused=refused,
            mismatches={},
        )
        for n in range(gpus)
    )
    tenants = tuple(
        full(TenantFigures, gpu_uuid="GPU-0", pod_uid=f"p{n}", pipes=pipes, trouble="", **chosen)
        for n in range(pods)
    )
    figures = full(
        NodeFigures, devices=devices, tenants=tenants, errors={}, slo_failures=dict.fromkeys(SLO_TROUBLES, 0)
    )
    return _count(NodeCollector(lambda: figures))


def _host_series(folder: Path) -> int:
    gpu = GpuDirectory.of(folder, "GPU-0")
    gpu.create()
    write_status(gpu, GateStatus("GPU-0", GateState.ACTIVE, time.time(), throttle=ThrottleStatus(beat=1.0)))
    kept: Any = SimpleNamespace(gpu=gpu, restarts=0, is_running=True)
    return _count(GateCollector([kept]))


def test_the_series_of_the_sizing_page_are_counted(tmp_path: Path) -> None:
    latency = dict.fromkeys(("slo_target_seconds", "slo_measured_seconds"))
    rate = dict.fromkeys(("slo_target_per_second", "slo_measured_per_second"))
    node = _agent_series(0, 0)
    gpu_of_agent = _agent_series(1, 0) - node
    gpu_of_host = _host_series(tmp_path)
    pod_of_agent = _agent_series(1, 1, **latency, **rate, is_slo_met=None) - _agent_series(1, 0)
    with_target = _agent_series(1, 1, **rate) - _agent_series(1, 0)
    assert with_target == _agent_series(1, 1, **latency) - _agent_series(1, 0), "of either kind"
    operator = {family.name: len(family.samples) for family in WorkloadCollector(one_workload()).collect()}
    pod_of_operator = operator.pop("gpushare_workload_pod_info")
    # Its one pod waits; others of the same GpuShare may be placed, which is one series more.
    share = sum(operator.values()) + 1
    page = (DOCS / "guide" / "sizing.md").read_text()
    of_agent = f"{pod_of_agent} of the agent on its node, {pod_of_operator} of the operator"
    of_pod = f"{of_agent}; {with_target - pod_of_agent} more with a target of its own"
    for row in (
        f"| node | {node} |",
        f"| GPU | {gpu_of_agent + gpu_of_host} | {gpu_of_agent} of the agent, {gpu_of_host} of the MPS host |",
        f"| pod | {pod_of_agent + pod_of_operator} | {of_pod} |",
        f"| GpuShare | {share} at most |",
    ):
        assert row in page, row
    nodes, gpus, pods, shares = 100, 800, 3200, 300
    in_all = (
        nodes * node
        + gpus * (gpu_of_agent + gpu_of_host)
        + pods * (pod_of_agent + pod_of_operator)
        + shares * share
    )
    assert f"about {round(in_all, -4):,} series" in page


def test_the_sizing_page_has_the_charts_requests_and_limits() -> None:
    values = yaml.safe_load((ROOT / "helm" / "gpushare" / "values.yaml").read_text())
    page = (DOCS / "guide" / "sizing.md").read_text()
    for part, name in {
        "agent": "agent",
        "mps": "MPS host",
        "extender": "extender",
        "scheduler": "kube-scheduler",
        "operator": "operator",
        "admission": "admission",
    }.items():
        requests, limits = values[part]["resources"]["requests"], values[part]["resources"]["limits"]
        cell = f"{requests['cpu']}, {requests['memory']}; limit {limits['memory']}"
        assert re.search(rf"^\| {name}[^|]*\| {cell} \|", page, re.MULTILINE), (part, cell)
    assert f"| {values['mps']['maxClientsPerPod']} | `mps.maxClientsPerPod` |" in page
    assert f"| {values['policy']['gpuMemoryReserveMiB']} MiB | `policy.gpuMemoryReserveMiB` |" in page
    assert f"| {values['admission']['maxSelectors']:,} | `admission.maxSelectors` |" in page
    assert f"| {values['policy']['retractionsPerMinute']} | `policy.retractionsPerMinute` |" in page
    assert f"`podMonitor.interval` is {values['podMonitor']['interval']}" in page


def test_the_page_on_ones_own_cluster_says_of_each_whether_it_was_tried() -> None:
    page = (DOCS / "guide" / "own-cluster.md").read_text()
    state = dict(re.findall(r"^\| ([^|]+) \| ([^|]*tried[^|]*) \|$", page, re.MULTILINE))
    assert len(state) == 7
    untried = [text for where, text in state.items() if where.startswith(("kind", "NVIDIA's GPU operator"))]
    assert len(untried) == 3
    assert all(text.startswith("**not tried**") for text in untried)
    assert "but cannot get kind's node image" in state["kind, with simulated GPUs"]
    for section in ("kind, with simulated GPUs", "NVIDIA's GPU operator"):
        assert page.partition(f"\n## {section}\n\n")[2].startswith("Not tried."), section
    cited = {int(number) for found in re.findall(r" \[(\d(?:, \d)*)\]", page) for number in found.split(", ")}
    listed = {int(number) for number in re.findall(r"^(\d)\. ", page.partition("\n## Sources\n")[2], re.MULTILINE)}
    assert cited == listed


def test_the_clients_of_a_share_are_told_by_an_example() -> None:
    """Before: "48% of its percentage"."""
    example = f"{clients_of(25)} at 25%"
    for page in ("gate.md", "guide/sizing.md", "values.md"):
        text = " ".join((DOCS / page).read_text().split())
        assert re.search(rf"its share of (?:them|the 48), rounded down[ ,:].*{example}", text), page


def test_what_the_gate_adds_to_a_start_is_the_same_on_both_pages() -> None:
    """Before: 0.03 to 0.05 s in the answer to "What does it cost?", which the newer sessions are below."""
    (gate,) = re.findall(r"the gate adds to a start \((0\.\d+ to 0\.\d+ s) in", (DOCS / "gate.md").read_text())
    (told,) = re.findall(
        r"A start of a CUDA program takes (.*?) longer", (DOCS / "guide/questions.md").read_text()
    )
    assert told == gate


def test_the_nodes_to_share_are_chosen_as_the_page_says() -> None:
    helm = Path(os.environ.get("GPUSHARE_CACHE") or Path.home() / ".cache" / "gpushare") / "bin" / "helm"
    if not helm.exists():
        lacking("helm", "no helm: hack/cluster tools builds it")
    page = (DOCS / "guide" / "own-cluster.md").read_text()
    upgrade = re.search(r"^helm upgrade (.*?[^\\])$", page, re.MULTILINE | re.DOTALL)
    assert upgrade
    words = [word for word in shlex.split(upgrade[1].replace("\\\n", " ")) if word != "--reset-then-reuse-values"]
    done = subprocess.run(
        [str(helm), "template", *words, "--set", "image.repository=x", "--kube-version", "1.35.4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    on_nodes = [each for each in yaml.safe_load_all(done.stdout) if each and each["kind"] == "DaemonSet"]
    assert len(on_nodes) == 2
    for each in on_nodes:
        assert each["spec"]["template"]["spec"]["nodeSelector"]["gpushare.io/gpus"] == "true"
