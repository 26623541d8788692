"""Every block of code in the README, the guide and its neighbours is run or read, or listed with the reason."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from blocks import (
    COMMANDS,
    NOT_COMMANDS,
    READ_BY,
    ROOT,
    Block,
    Way,
    blocks,
    commands,
    how,
    sorted_as,
    words,
)
from fakecluster import HttpApiServer, pod_object
from histories import UNTIL, prometheus_with_history
from installed import lacking
from prometheus_client import CollectorRegistry, Counter, generate_latest
from realprometheus import Prometheus

from gpushare.core.admission import AdmissionPolicy, Knowledge, is_ours, mutate
from gpushare.core.api import PodSeries, RateSlo, Rejection, parse_slo
from gpushare.core.control import CounterReading
from gpushare.kube import GPUSHARES, NODES, PODS
from gpushare_deviceplugin.slo_sources import parse_counter

Call = Callable[..., tuple[int, str, str]]
LANGUAGES = {"sh", "text", "yaml", "toml", "json", "python", "asciinema-player"}


def sites(way: Way) -> list[object]:
    return [pytest.param(block, command, id=f"{block.place}:{command}") for block, command in commands(way)]


@pytest.mark.parametrize("block", [pytest.param(block, id=block.place) for block in blocks()])
def test_every_block_names_its_language_and_is_sorted(block: Block) -> None:
    assert block.language in LANGUAGES, (
        f"{block.place}: name the language of the block, one of {sorted(LANGUAGES)}"
    )
    if block.language == "sh":
        lines = [command for found, command in commands() if found == block]
        unsorted = [command for command in lines if how(command) is None]
        assert lines
        assert not unsorted, f"{block.place}: say in tests/support/blocks.py how these are run, or why not"
    elif block.language == "yaml" and all("kind" in each for each in yaml.safe_load_all(block.text)):
        pass  # tests/cli/test_guide.py and tests/operator/test_blocks_on_api_server.py take every object
    else:
        assert sorted_as(block), f"{block.place}: say in tests/support/blocks.py which test reads it, or why none"


def test_nothing_is_sorted_that_no_page_has() -> None:
    found = [command for _, command in commands()]
    known = list(blocks())
    firsts = [next(begins for begins, _ in COMMANDS if command.startswith(begins)) for command in found]
    assert set(firsts) == {begins for begins, _ in COMMANDS}
    for page, begins in {**NOT_COMMANDS, **READ_BY}:
        assert any(block.page == page and block.text.lstrip().startswith(begins) for block in known), begins
    for test in set(READ_BY.values()):
        assert (ROOT / test).is_file()
    assert not set(NOT_COMMANDS) & set(READ_BY)


def test_what_is_said_not_to_be_run_names_tests_and_targets_that_exist() -> None:
    reasons = [way for _, way in COMMANDS if isinstance(way, str)]
    for path in re.findall(r"(?:tests|hack|docs)/[\w./]*\w", " ".join(reasons)):
        assert (ROOT / path).exists(), path
    for target in ("demo", "test"):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.fixture
def described(busy: HttpApiServer) -> HttpApiServer:
    """The busy cluster with what the pages name besides."""
    busy.put(
        NODES,
        {
            "metadata": {"name": "node-a"},
            "status": {"allocatable": {"cpu": "64", "memory": "256Gi", "gpushare.io/share": "200"}},
        },
    )
    busy.put(GPUSHARES, {"metadata": {"name": "web", "namespace": "shop", "uid": "s"}})
    busy.put(PODS, pod_object("first", "u-first", gpu="GPU-1", share=25))  # the pod that the first hour makes
    return busy


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize(("block", "command"), sites(Way.PLUGIN))
def test_every_command_of_the_plugin_answers(call: Call, block: Block, command: str) -> None:
    # "POD" stands for the name that the reader fills in
    code, out, err = call(*("first" if word == "POD" else word for word in words(command)[2:]))
    assert (code, bool(out)) == (0, True), (block.place, err)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of few jobs of the catalogue that the shipped dataset measured."""
    path = tmp_path_factory.mktemp("trace") / "T.csv"
    dataset = ROOT / "src" / "gpushare" / "data" / "h200-colocation.jsonl"
    where = ["--colocation", str(dataset), "--jobs", "6", "--interarrival", "5", "-o", str(path)]
    program = "from gpushare.cli import main; main()"
    subprocess.run(
        [sys.executable, "-c", program, "sim", "trace", *where], check=True, timeout=250, env=_environment()
    )
    return path


def _write_pairs(folder: Path) -> None:
    """Six workloads of two families, alone and all pairs of them."""
    names = [f"{family} (batch size {2**size})" for family in ("A", "B") for size in range(3)]
    solo = ["gpu,workload,steps_per_s", *(f"p100,{name},10" for name in names)]
    rows = [
        f"p100,{name},{partner},{5 + 0.2 * (first + second)},{5 + 0.2 * (first + second)}"
        for first, name in enumerate(names)
        for second, partner in enumerate(names[first:], first)
    ]
    (folder / "S.csv").write_text("\n".join(solo) + "\n")
    heads = "gpu,workload_a,workload_b,steps_per_s_a,steps_per_s_b"
    (folder / "PAIRS.csv").write_text("\n".join([heads, *rows]) + "\n")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


@pytest.fixture
def files(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small files of the names that the pages use."""
    folder = tmp_path / "files"
    (folder / "here").mkdir(parents=True)
    (folder / "N.csv").write_text(
        "sn,cpu_milli,memory_mib,gpu,model\na,64000,262144,2,P100\nb,64000,262144,2,T4\n"
    )
    columns = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec"
    (folder / "P.csv").write_text(f"{columns}\nx,1000,1024,1,600,\ny,1000,1024,1,600,T4\n")
    _write_pairs(folder)
    shutil.copy(trace, folder / "T.csv")
    shutil.copy(ROOT / "src" / "gpushare" / "data" / "h200-colocation.jsonl", folder / "D.jsonl")
    pod = next(block.text for block in blocks("yaml") if block.page.endswith("first-hour.md"))
    (folder / "pods.yaml").write_text(pod)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.slow
@pytest.mark.compute
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("described")
@pytest.mark.parametrize(("block", "command"), sites(Way.FILES))
def test_every_command_on_files_runs(call: Call, files: Path, block: Block, command: str) -> None:
    given = words(command)[1:]
    before = {path.name for path in files.iterdir()}
    code, out, err = call(*given)
    assert code == 0, (block.place, err)
    assert out or {path.name for path in files.iterdir()} - before or list((files / "here").iterdir())


def test_the_readme_says_which_files_its_names_in_capitals_stand_for() -> None:
    """Before: none was named, and P.csv stood for pods and for pairs."""
    blocks_and_text = (ROOT / "README.md").read_text().split("```")
    typed, prose = ("".join(blocks_and_text[at::2]) for at in (1, 0))
    named = re.findall(r"--?([a-z]+) ([A-Z]+\.(?:csv|jsonl))\b", typed)
    assert len(named) >= 6
    assert [name for _, name in named if f"`{name}`" not in prose and f" {name}`" not in prose] == []
    assert {option for option, name in named if name == "P.csv"} == {"pods"}
    assert re.search(
        r'`sim compare` and `pairs evaluate` need the extra `fit`\s+\(`pip install "\.\[fit\]"`\)', prose
    )


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    running = prometheus_with_history(tmp_path_factory.mktemp("prometheus"))
    yield running
    running.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("block", "command"), sites(Way.PROMETHEUS))
def test_every_report_from_prometheus_is_a_page(
    prometheus: Prometheus, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: Block, command: str
) -> None:
    """Of a week in which it was there for two hours."""
    monkeypatch.chdir(tmp_path)
    given = [prometheus.url if word.startswith("http://") else word for word in words(command)[1:]]
    code, _, err = call(*given, "--until", UNTIL)
    assert code == 0, (block.place, err)
    (page,) = tmp_path.glob("*.html")
    assert "team-train/train-job" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("block", "command"), [*sites(Way.BASH), *sites(Way.FISH)])
def test_every_line_for_a_shell_is_taken_by_it(block: Block, command: str, tmp_path: Path) -> None:
    shell = "fish" if how(command) is Way.FISH else "bash"
    if (program := shutil.which(shell)) is None:
        lacking(shell, f"no {shell}: hack/cluster test-programs installs it")
    installed = tmp_path / ".krew"
    (installed / "bin").mkdir(parents=True)
    stored = installed / "store" / "gpushare" / "v0.1.0" / "kubectl_complete-gpushare"
    stored.parent.mkdir(parents=True)
    stored.touch()
    ours = tmp_path / "bin" / "gpushare"
    ours.parent.mkdir()
    ours.write_text(f"#!{sys.executable}\nfrom gpushare.cli import main; main()\n")
    ours.chmod(0o755)
    environment = {**_environment(), "HOME": str(tmp_path), "PATH": f"{ours.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [program, "-c", command], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), block.place
    if command.startswith("ln "):
        assert (installed / "bin" / stored.name).resolve() == stored


def _of(page: str, begins: str) -> Block:
    return next(block for block in blocks() if block.page == page and block.text.startswith(begins))


@pytest.mark.parametrize("page", ["README.md", "docs/design.md"])
def test_the_annotations_that_a_page_lists_are_accepted(page: str) -> None:
    """Those of a target are comments, since they are for the other class than the one shown."""
    text = _of(page, "metadata:").text
    found = yaml.safe_load(text)["metadata"]["annotations"]
    lines = [line.strip("# ") for line in text.splitlines() if "# gpushare.io" in line]
    slo = dict(re.split(r":\s+", line.split("  ")[0], maxsplit=1) for line in lines)
    assert {"gpushare.io/slo", "gpushare.io/slo-from"} == set(slo)
    for annotations in (found, {**found, **slo, "gpushare.io/class": "latency"}):
        _must_be_accepted(annotations)


def test_the_targets_of_the_page_on_gpushares_are_accepted() -> None:
    read = yaml.safe_load(_of("docs/gpushares.md", "metadata:").text)["metadata"]["annotations"]
    _must_be_accepted(read)
    asked = yaml.safe_load(_of("docs/gpushares.md", "gpushare.io/slo-query:").text)
    _must_be_accepted({name: value for name, value in read.items() if name != "gpushare.io/slo-from"} | asked)


def _must_be_accepted(annotations: dict[str, str]) -> None:
    containers = [{"name": name} for name in ("main", annotations.get("gpushare.io/container", "side"))]
    pod = {"metadata": {"name": "x", "annotations": annotations}, "spec": {"containers": containers}}
    assert is_ours(pod)
    refused = mutate(pod, AdmissionPolicy(), Knowledge())
    assert not isinstance(refused, Rejection), refused


def test_the_target_of_the_page_about_slow_pods_is_accepted() -> None:
    pairs = [line.split(": ", 1) for line in _of("docs/guide/slow.md", "gpushare.io/slo:").text.splitlines()]
    _must_be_accepted({"gpushare.io/fraction": "0.25", "gpushare.io/class": "latency", **dict(pairs)})


def test_the_rate_of_the_page_on_gpushares_is_accepted() -> None:
    rate = yaml.safe_load(_of("docs/gpushares.md", "gpushare.io/slo: rate>20").text)
    _must_be_accepted({"gpushare.io/fraction": "0.25", **rate})


def test_the_job_that_reports_its_steps_is_accepted_and_names_the_counter_that_its_program_serves() -> None:
    job = yaml.safe_load(_of("docs/guide/slow.md", "apiVersion: batch/v1").text)
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    _must_be_accepted(annotations)
    target = parse_slo(annotations)
    assert isinstance(target, RateSlo)
    assert isinstance(target.source, PodSeries)
    calls = {
        call.func.id: call.args[0]
        for call in ast.walk(ast.parse(_of("docs/guide/slow.md", "import torch").text))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    name, port = ast.literal_eval(calls["Counter"]), ast.literal_eval(calls["start_http_server"])
    registry = CollectorRegistry()
    Counter(name, "As the program makes it.", registry=registry).inc(3)
    assert parse_counter(generate_latest(registry), target.source) == CounterReading(3.0)
    assert port == target.source.port


def test_settings_and_programs_in_other_languages_are_read() -> None:
    (toml,) = blocks("toml")
    assert tomllib.loads(toml.text) == {"accept-nvidia-visible-devices-envvar-when-unprivileged": False}
    for block in blocks("python"):
        compile(block.text, block.place, "exec")
    for block in blocks("asciinema-player"):
        recording = json.loads(block.text)["file"]
        assert (ROOT / block.page).parent.joinpath(recording.removeprefix("../")).is_file()


def test_commands_are_found_at_all() -> None:
    count = {way: sum(1 for _ in commands(way)) for way in Way}
    assert all(count.values()), count
    assert count[Way.PLUGIN] >= 9
    assert count[Way.CLUSTER] >= 15
    assert all(shlex.join(words(command)) for _, command in commands())
