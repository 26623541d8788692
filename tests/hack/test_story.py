"""The demo's story tells what the cluster says, in sentences, and ends an act only when it has happened."""

import io
import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from devcluster.demo import further_commands, next_things
from rich.console import Console
from rich.text import Text
from story.acts import ACTS, BACKUP, ETL, FIRST, RANK
from story.moment import Moment, StoryEvent, look
from story.picture import svg
from story.recording import record
from story.screen import Screen
from story.sentences import of_event

from gpushare.cli.access import Seen
from gpushare.core.api import GpuNode, GpuShare

ROOT = Path(__file__).resolve().parents[2]
SAMPLES, SITE_RECORDING = ROOT / "hack" / "demo", ROOT / "docs" / "guide" / "demo.cast"
SPACE = "demo"
Json = dict[str, Any]


def pod(program: str, gpu: int, *, phase: str = "Running", leaving: bool = False, number: int = 0) -> Json:
    annotations = {
        "gpushare.io/fraction": "0.35",
        "gpushare.io/gpu": f"GPU-{gpu}",
        "gpushare.io/thread-percentage": "35",
        "gpushare.io/memory-limit": "0=16384M",
        "gpushare.io/decided-at": "2026-11-22T12:00:00Z",
    }
    name = f"{program}-6f7d9-{number}"
    metadata: Json = {"name": name, "namespace": SPACE, "uid": f"uid-{name}", "annotations": annotations}
    metadata["labels"] = {"app": program}
    if leaving:
        metadata["deletionTimestamp"] = "2026-11-22T12:01:00Z"
    limits = {"limits": {"gpushare.io/share": "35"}}
    spec = {"nodeName": "node-a", "containers": [{"name": "tenant", "resources": limits}]}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase}}


def node(*tenants: tuple[Json, float, float, float | None]) -> GpuNode:
    """A GpuNode with the pods' progress, promise and throttle."""
    gpus: list[Json] = [
        {"uuid": f"GPU-{index}", "index": index, "model": "NVIDIA H200", "memoryMiB": 143771, "tenants": []}
        for index in range(2)
    ]
    for each, progress, promise, throttle in tenants:
        metadata = each["metadata"]
        told = {"podUid": metadata["uid"], "namespace": SPACE, "pod": metadata["name"], "share": 35}
        told |= {"progress": progress, "promise": promise, "threadPercentage": 35}
        if throttle is not None:
            told["throttle"] = throttle
        gpus[int(metadata["annotations"]["gpushare.io/gpu"][-1])]["tenants"].append(told)
    return GpuNode.from_object({"metadata": {"name": "node-a"}, "status": {"gpus": gpus}})


def share(program: str, **status: Any) -> GpuShare:
    metadata = {"name": f"deployment-{program}", "namespace": SPACE, "uid": f"uid-share-{program}"}
    return GpuShare.from_object({"metadata": metadata, "spec": {}, "status": status})


def moment(
    *tenants: tuple[Json, float, float, float | None],
    shares: tuple[GpuShare, ...] = (),
    events: tuple[Json, ...] = (),
) -> Moment:
    seen = Seen(tuple(each for each, *_ in tenants), (node(*tenants),), shares)
    return look(seen, events, {}, SPACE)


def event(reason: str, about: Json, note: str, *, kind: str = "Pod") -> Json:
    regarding = {"kind": kind, "name": about["metadata"]["name"]}
    name = f"{reason}.{about['metadata']['name']}".lower()
    return {
        "metadata": {"name": name},
        "eventTime": "2026-11-22T12:00:30.000000Z",
        "reason": reason,
        "note": note,
        "regarding": regarding,
    }


def until(what: str, now: Moment) -> str | None:
    (act,) = (act for act in ACTS if act.what == what)
    return act.until(now)


def test_every_manifest_that_an_act_applies_is_there_and_makes_the_pods_of_the_story() -> None:
    programs: set[str] = set()
    for act in ACTS:
        if act.applies:
            for each in yaml.safe_load_all((SAMPLES / act.applies).read_text()):
                if each["kind"] == "Deployment":
                    programs.add(each["spec"]["template"]["metadata"]["labels"]["app"])
    assert programs == {*FIRST, ETL, BACKUP, RANK}


def test_an_event_becomes_a_sentence_with_programs_for_pods() -> None:
    train, etl = pod("train", 0), pod("etl", 0)
    note = (
        "runs 92% of the time, before 100%; pod train-6f7d9-0 makes 0.27 +- 0.05 of its progress alone, 0.38 are "
        "promised; it makes 0.45 +- 0.05 of its progress alone, 0.39 are promised"
    )
    now = moment(
        (train, 0.27, 0.38, None),
        (etl, 0.45, 0.39, None),
        events=(
            event("Throttled", etl, note),
            event("Scheduled", etl, "assigned to node-a"),
            event("Retracted", {"metadata": {"name": "deployment-etl"}}, "left", kind="GpuShare"),
        ),
    )
    sentence = "Throttle: etl runs 92% of the time, before 100%; train makes 0.27 +- 0.05 of its speed alone, "
    assert [of_event(each) for each in now.told] == [None, f"{sentence}0.38 are promised."]


@pytest.mark.parametrize(
    ("reason", "note", "sentence"),
    [
        (
            "PromiseBroken",
            "makes 0.23 +- 0.05 of its progress alone, 0.38 are promised",
            "Broken promise: etl makes 0.23 +- 0.05 of its speed alone, 0.38 are promised.",
        ),
        (
            "RetractionAsked",
            "is the newest tenant that can leave: train makes 0.29, and no throttle would keep the promise",
            "Asked to leave: etl came last: train makes 0.29, and no throttle would keep the promise.",
        ),
        (
            "Retracted",
            "evicted so that its neighbours keep their promises: train makes 0.29",
            "Retraction: etl is evicted so that its neighbours keep their promises: train makes 0.29.",
        ),
        ("Pulled", "image is there", None),
    ],
)
def test_events_are_told_in_words_of_the_story(reason: str, note: str, sentence: str | None) -> None:
    assert of_event(StoryEvent("one", "2026-11-22T12:00:30Z", reason, "etl", note)) == sentence


def test_two_pods_are_packed_once_they_share_a_gpu_and_keep_their_promises() -> None:
    what = "two pods on one GPU that keep their promises"
    train, recommend = pod("train", 0), pod("recommend", 0)
    assert until(what, moment((train, 0.54, 0.38, None))) is None
    assert until(what, moment((train, 0.54, 0.38, None), (pod("recommend", 1), 0.87, 0.67, None))) is None
    assert until(what, moment((train, 0.3, 0.38, None), (recommend, 0.87, 0.67, None))) is None
    packed = until(what, moment((train, 0.54, 0.38, None), (recommend, 0.87, 0.67, None)))
    assert packed is not None
    assert "GPU 0" in packed
    assert "train makes 0.54 (0.38 promised)" in packed
    assert "together 1.41 of" in packed


def test_a_retracted_pod_counts_as_elsewhere_once_it_runs_on_another_gpu_and_that_is_recorded() -> None:
    what = "etl on another GPU"
    train = (pod("train", 0), 0.54, 0.38, None)
    record = {"neighbours": ["demo/deployment-train"], "at": "2026-11-22T12:01:00Z", "podUid": "uid-etl-6f7d9-0"}
    intended = share("etl", retractions=[record])
    done = share("etl", retractions=[{**record, "until": "2026-11-22T12:06:00Z"}])
    old, new = (pod("etl", 0, leaving=True), 0.4, 0.39, None), (pod("etl", 1, number=1), 1.0, 0.39, None)
    assert until(what, moment(train, old, shares=(done,))) is None
    assert until(what, moment(train, old, new, shares=(intended,))) is None
    elsewhere = until(what, moment(train, old, new, shares=(done,)))
    assert elsewhere is not None
    assert "on GPU 1" in elsewhere
    assert "12:06 UTC" in elsewhere


def test_promises_count_as_kept_again_once_the_retracted_pod_has_ended() -> None:
    what = "promises that are kept again"
    first = (pod("train", 0), 0.54, 0.38, None), (pod("recommend", 0), 0.87, 0.67, None)
    old, new = (pod("etl", 0, leaving=True), 0.4, 0.39, None), (pod("etl", 1, number=1), 1.0, 0.39, None)
    assert until(what, moment(*first, old, new)) is None
    kept = until(what, moment(*first, new))
    assert kept is not None
    assert kept.startswith("Kept again: train makes 0.54")


def test_the_last_act_waits_for_a_throttle_under_which_everybody_keeps_a_promise() -> None:
    what = "every promise kept by a throttle"
    first = ((pod("train", 0), 0.42, 0.38, None), (pod("recommend", 0), 0.71, 0.67, None))
    assert until(what, moment(*first, (pod("backup", 0), 0.24, 0.2, None))) is None
    assert until(what, moment(*first, (pod("backup", 0), 0.14, 0.2, 0.5))) is None
    kept = until(what, moment(*first, (pod("backup", 0), 0.24, 0.2, 0.5)))
    assert kept is not None
    assert "stands still 50% of the time" in kept
    assert "together 1.37 of one GPU" in kept


def shown(console: Console) -> str:
    now = moment((pod("train", 0), 0.2, 0.38, None))
    with Screen(console) as screen:
        screen.say("Broken promise: train makes 0.20 of its speed alone, 0.38 are promised.")
        screen.show(now)
        screen.show(now)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_pipe_gets_the_sentences_as_lines_and_the_table_once_at_the_end() -> None:
    text = shown(Console(file=io.StringIO(), width=100))
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0].endswith("s  Broken promise: train makes 0.20 of its speed alone, 0.38 are promised.")
    assert [line.split()[0] for line in lines[1:]] == ["POD", "train-6f7d9-0"]
    assert lines[2].split()[-3:] == ["0.38", "0.20", "-"]


def test_a_dumb_terminal_gets_lines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    text = shown(Console(file=io.StringIO(), width=100, force_terminal=True))
    assert "\x1b[1A" not in text
    assert text.count("POD") == 1


def test_a_terminal_gets_the_table_live_below_the_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    text = shown(Console(file=io.StringIO(), width=60, force_terminal=True))
    assert "\x1b[31mtrain-6f7d9-0" in text, "red below its promise"
    assert "Broken promise:" in text


def test_a_picture_shows_the_lines_and_loads_nothing() -> None:
    text = svg([Text("Throttle: etl", "yellow"), Text("POD  GPU", "bold")], width=60, title="make demo")
    assert text.startswith("<svg")
    assert "Throttle:&#160;etl" in text
    assert "url(http" not in text
    assert "@font-face" not in text


def test_what_the_demo_prints_at_its_end_is_of_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/e2e/test_story.py runs it."""
    monkeypatch.setattr("devcluster.tools.kubectl", lambda: Path("/bin/kubectl"))
    commands = [command for command, _ in further_commands(Path("/k"), "other")]
    printed = next_things(Path("/k"), "other")
    assert all(f"  {command}" in printed for command in commands)
    assert "gpushare-demo" not in printed
    assert sum("-n other " in command for command in commands) == 5
    script = "\n".join(commands)
    assert subprocess.run(["bash", "-n", "-c", script], capture_output=True, check=False).stderr == b""


def test_a_recording_is_asciinemas_format_and_holds_what_was_shown(tmp_path: Path) -> None:
    recording = tmp_path / "demo.cast"
    program = "import sys, time; print('one', flush=True); time.sleep(0.05); print('zwölf', sys.stdout.isatty())"
    assert record(recording, [sys.executable, "-c", program]) == 0
    first, *entries = [json.loads(line) for line in recording.read_text().splitlines()]
    assert (first["version"], first["width"] >= 80, first["height"] >= 24) == (2, True, True)
    assert {kind for _, kind, _ in entries} == {"o"}
    times = [seconds for seconds, _, _ in entries]
    assert times == sorted(times)
    assert "".join(text for _, _, text in entries) == "one\r\nzwölf True\r\n"


def test_a_story_that_ended_early_is_not_recorded(tmp_path: Path) -> None:
    recording = tmp_path / "demo.cast"
    assert record(recording, [sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert not recording.exists()


def test_the_recording_on_the_site_is_small_and_shows_every_part_of_the_story() -> None:
    recording = SITE_RECORDING.read_text()
    assert len(recording) < 200_000, "it is loaded with its page"
    first, *entries = [json.loads(line) for line in recording.splitlines()]
    assert first["version"] == 2
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "".join(text for _, _, text in entries))
    assert "Profiled in place:" in text
    assert "Throttle:" in text
    openings = ["Packed", "Broken promise", "Asked to leave", "Retraction"]
    openings += ["Placed elsewhere", "Kept by a throttle", "What sharing gains now"]
    at = [text.find(f"{opening}:") for opening in openings]
    assert min(at) >= 0, dict(zip(openings, at, strict=True))
    assert at == sorted(at)
    assert entries[-1][0] < 180, "within three minutes"
    day = datetime.fromtimestamp(first["timestamp"], UTC).date()
    assert f"(`make demo-record`, {day}, commit " in SITE_RECORDING.with_suffix(".md").read_text()
