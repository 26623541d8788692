"""`gpushare plan` and `sim cluster` without a cluster: what tables and snapshots lack is told, never guessed."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from gpushare.cli import root
from gpushare.data import H200_COLOCATION

NODES = "sn,cpu_milli,memory_mib,gpu,model\na,64000,262144,2,H200\n"
NODES_WITH_MEMORY = "sn,cpu_milli,memory_mib,gpu,model,gpu_memory_mib\na,64000,262144,2,H200,143771\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_memory_mib\nx,1000,1024,1,250,{memory}\n"
POD = """
apiVersion: v1
kind: Pod
metadata: {{name: first, annotations: {{gpushare.io/fraction: "0.25"{memory}}}}}
spec: {{containers: [{{name: main}}]}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "sized.csv").write_text(NODES_WITH_MEMORY)
    return tmp_path


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["gpushare", *map(str, words)])
    try:
        root.main()
        code: Any = 0
    except SystemExit as stop:
        code = stop.code or 0
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("command", [("plan",), ("sim", "cluster")])
def test_pods_that_name_memory_need_nodes_that_say_how_much_they_have(
    command: tuple[str, ...], folder: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Such pods fitted nowhere: "the freest with enough share has 0 MiB free"."""
    (folder / "pods.csv").write_text(PODS.format(memory=8192))
    code, out, err = call(monkeypatch, capsys, *command, "--pods", "pods.csv", "--nodes", "nodes.csv")
    assert (code, out) == (2, "")
    assert err == (
        "gpushare: nodes.csv: pod x asks for 8192 MiB of GPU memory, and how much the GPUs of node a have is not "
        "given: add the column gpu_memory_mib, the memory of one GPU in MiB\n"
    )
    code, _, _ = call(monkeypatch, capsys, *command, "--pods", "pods.csv", "--nodes", "sized.csv", "--json")
    assert code == 0
    (folder / "pods.csv").write_text(PODS.format(memory=""))
    code, _, _ = call(monkeypatch, capsys, *command, "--pods", "pods.csv", "--nodes", "nodes.csv", "--json")
    assert code == 0


def test_where_the_memory_of_a_gpu_is_not_known_neither_is_the_pods(
    folder: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Before: 0, as if the pod might use none."""
    (folder / "first.yaml").write_text(POD.format(memory=""))
    words = ["plan", "--json", "--pods", "first.yaml", "--nodes"]
    code, out, _ = call(monkeypatch, capsys, *words, "nodes.csv")
    assert (code, json.loads(out)["pods"][0]["memory_mib"]) == (0, None)
    code, out, _ = call(monkeypatch, capsys, *words, "sized.csv")
    assert (code, json.loads(out)["pods"][0]["memory_mib"] > 0) == (0, True)


def test_a_manifest_that_names_memory_needs_it_too(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    (folder / "first.yaml").write_text(POD.format(memory=", gpushare.io/memory: 8Gi"))
    words = ["plan", "--json", "--pods", "first.yaml", "--nodes"]
    code, out, err = call(monkeypatch, capsys, *words, "nodes.csv")
    assert (code, out) == (2, "")
    assert "pod default/first asks for 8192 MiB of GPU memory" in err
    code, out, _ = call(monkeypatch, capsys, *words, "sized.csv")
    assert (code, json.loads(out)["pods"][0]["memory_mib"]) == (0, 8192)


def test_a_plan_warns_of_what_kubectl_apply_would_warn_of(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    words = ["plan", "--json", "--pods", "first.yaml", "--nodes", "nodes.csv"]
    (folder / "first.yaml").write_text(POD.format(memory=", gpushare.io/memroy: 8Gi"))
    code, _, err = call(monkeypatch, capsys, *words)
    meant = "means nothing to gpushare; did you mean gpushare.io/"
    assert (code, err) == (0, f"pod first: annotation gpushare.io/memroy {meant}memory?\n")
    (folder / "first.yaml").write_text(POD.format(memory="").replace("fraction", "fracton"))
    code, _, err = call(monkeypatch, capsys, *words)
    assert code == 2
    assert err.splitlines()[0] == f"pod first: annotation gpushare.io/fracton {meant}fraction?"
    assert "first.yaml holds no pod with the annotation gpushare.io/fraction" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "a document is not a Kubernetes object: it has no kind"),
        (
            POD.format(memory="").replace("[{name: main}]", "5"),
            "a field has not the form that a pod's has (Value after * must be an iterable, not int)",
        ),
    ],
)
def test_what_is_no_pod_is_told_so(folder: Path, monkeypatch: Any, capsys: Any, text: str, says: str) -> None:
    """Before: "an object of kind None has no name", and the words of Python alone."""
    (folder / "first.yaml").write_text(text)
    code, out, err = call(monkeypatch, capsys, "plan", "--pods", "first.yaml", "--nodes", "nodes.csv")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_a_program_that_the_profiles_lack_is_told_with_those_that_they_have(monkeypatch: Any, capsys: Any) -> None:
    """Before: "nope has no solo run at 100%"."""
    with resources.as_file(resources.files("gpushare.data") / H200_COLOCATION) as dataset:
        code, out, err = call(monkeypatch, capsys, "model", "advise", "--profiles", dataset, "nope")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith('gpushare: the profiles have no program "nope", only ')
    assert "resnet50-infer-fp16-b32" in err


def test_a_table_is_known_by_its_ending_in_capitals_too(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    (folder / "PODS.CSV").write_text(PODS.format(memory=""))
    code, _, err = call(monkeypatch, capsys, "plan", "--json", "--pods", "PODS.CSV", "--nodes", "nodes.csv")
    assert (code, err) == (0, "")


@pytest.mark.parametrize("command", ["plan", "report"])
@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("{}", 'is not what gpushare snapshot writes: "settings" is missing; take it again'),
        ("[]", "is not what gpushare snapshot writes: it is no JSON object; take it again"),
        ('{"settings": {}, "secrets": []}', 'is not what gpushare snapshot writes: "secrets" is not known'),
        ("{", "is not what gpushare snapshot writes: Expecting property name"),
        (None, "snap holds no cluster.json: name a folder that gpushare snapshot wrote (its --output)"),
    ],
)
def test_what_is_no_snapshot_is_told_without_our_own_names(
    folder: Path, monkeypatch: Any, capsys: Any, command: str, written: str | None, says: str
) -> None:
    (folder / "snap").mkdir()
    if written is not None:
        (folder / "snap" / "cluster.json").write_text(written)
    (folder / "pods.csv").write_text(PODS.format(memory=""))
    words = ("--pods", "pods.csv") if command == "plan" else ("-o", "page.html")
    code, out, err = call(monkeypatch, capsys, command, "--snapshot", "snap", *words)
    assert (code, out) == (2, "")
    assert says in err
    assert "Objects" not in err


@pytest.mark.parametrize(("name", "why"), [("nodes.csv", "holds no cluster.json"), ("x" * 300, "cannot be read")])
def test_a_snapshots_folder_that_cannot_be_asked_is_one_sentence(
    folder: Path, monkeypatch: Any, capsys: Any, name: str, why: str
) -> None:
    """The second fails as a folder does that may not be entered, which root may always enter."""
    (folder / "pods.csv").write_text(PODS.format(memory=""))
    code, out, err = call(monkeypatch, capsys, "plan", "--snapshot", name, "--pods", "pods.csv")
    assert (code, out) == (2, "")
    assert why in err
