"""What people see of a cluster: each screen as it stands in screens/, wide and on a terminal of 40 columns."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from fakecluster import HttpApiServer, check_screen, pod_object

from gpushare.cli.access import Seen
from gpushare.cli.pod_rows import SortKey
from gpushare.cli.top_screen import Quit, ScreenLine, View, pressed, screen
from gpushare.core.api import GpuNode, names
from gpushare.kube import CONFIGMAPS, GPUNODES, GPUSHARES, NODES, PODS

Call = Callable[..., tuple[int, str, str]]


def seen_of(cluster: HttpApiServer, **more: Any) -> Seen:
    nodes = tuple(GpuNode.from_object(each) for each in cluster.store.objects(GPUNODES).values())
    return Seen(tuple(cluster.store.objects(PODS).values()), nodes, (), **more)


def text_of(lines: list[ScreenLine]) -> str:
    return "".join(f"{line.text}\n" for line in lines)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_live_table_fits_every_terminal(busy: HttpApiServer, width: int) -> None:
    lines = screen(seen_of(busy), View(), width, 10)
    assert len(lines) == 10
    assert max(len(line.text) for line in lines) <= width
    check_screen(f"top-{width}", text_of(lines))


def test_a_terminal_of_three_lines_still_shows_a_pod(busy: HttpApiServer) -> None:
    lines = screen(seen_of(busy), View(SortKey.BROKEN), 40, 4)
    assert [line.text.split()[0] for line in lines][:3] == ["4", "POD", "serve-7c9f8d6b5-xk2lp"]


def test_keys_sort_scroll_hold_and_leave(busy: HttpApiServer) -> None:
    def first(view: View) -> str:
        return screen(seen_of(busy), view, 200, 24)[2].text.split()[1]

    view = View()
    found = {}
    for key in "gnpsmb":
        after = pressed(view, key)
        assert isinstance(after, View)
        found[key] = first(after)
    assert found == {
        "g": "serve-7c9f8d6b5-xk2lp",
        "n": "lab",
        "p": "train-5d4c-p9",
        "s": "late",
        "m": "train-5d4c-p9",
        "b": "serve-7c9f8d6b5-xk2lp",
    }
    back = pressed(pressed(view, "n"), "r")  # type: ignore[arg-type]
    assert isinstance(back, View)
    assert first(back) == "train-5d4c-p9"
    down = pressed(view, "j")
    assert isinstance(down, View)
    assert (down.top, pressed(down, "k")) == (1, view)
    assert screen(seen_of(busy), down, 200, 5)[2].text.split()[1] == "train-5d4c-p9"
    paused = pressed(view, " ")
    assert isinstance(paused, View)
    assert screen(seen_of(busy), paused, 80, 9)[-1].text == "held: space goes on"
    assert pressed(view, "q") is Quit.QUIT
    assert pressed(view, "?") == view


def test_trouble_and_notes_take_the_last_line(busy: HttpApiServer) -> None:
    seen = seen_of(busy, notes=("you may not read GpuNodes",))
    assert screen(seen, View(), 80, 9)[-1].text == "you may not read GpuNodes"
    assert screen(seen, View(), 20, 9, trouble="8 s old: the API server is in trouble")[-1].text == (
        "8 s old: the API ser"
    )


def test_an_empty_cluster_says_so(cluster: HttpApiServer) -> None:
    assert screen(seen_of(cluster), View(), 40, 5)[1].text == "no pod shares a GPU yet"


@pytest.mark.parametrize("words", ["top", "pods", "pods -o wide", "gpus", "gpus -o wide", "gain", "gain -o wide"])
def test_each_command_prints_its_table_into_a_pipe_without_colours(
    busy: HttpApiServer, call: Call, words: str
) -> None:
    code, out, err = call(*words.split())
    assert (code, "\x1b" in out + err) == (0, False)
    check_screen(words.replace(" ", ""), out + "".join(f"stderr: {line}\n" for line in err.splitlines()))


@pytest.mark.parametrize("words", ["top --once", "pods", "gpus", "gain", "gain -o wide"])
def test_forty_columns_are_enough(busy: HttpApiServer, narrow: Call, words: str) -> None:
    code, out, err = narrow(*words.split())
    assert code == 0
    check_screen(f"{words.replace(' ', '')}-40", out + "".join(f"stderr: {line}\n" for line in err.splitlines()))


def test_long_names_keep_both_their_ends_at_forty_columns(busy: HttpApiServer, narrow: Call) -> None:
    name = "recommender-of-the-shop-serving-7c9f8d6b5-xk2lp"
    busy.put(PODS, pod_object(name, "u9", gpu="GPU-1", share=10))
    for command in ("pods", "top --once"):
        (line,) = [line for line in narrow(*command.split())[1].splitlines() if line.startswith("recomm")]
        assert "~" in line
        assert line.split()[0].endswith("-xk2lp")


@pytest.mark.parametrize(
    "command",
    ["top", "pods", "gpus", "gain", "explain serve-7c9f8d6b5-xk2lp", "explain late", "profile show"],
)
def test_json_and_yaml_say_the_same(busy: HttpApiServer, call: Call, command: str) -> None:
    busy.put(
        NODES,
        {
            "metadata": {"name": "node-a"},
            "status": {"allocatable": {"cpu": "64", "memory": "256Gi", "gpushare.io/share": "100"}},
        },
    )
    profile = {"gpuModel": "NVIDIA H200", "counters": {"sm_util": 0.73}, "memoryPeakMiB": 9000}
    metadata = {"name": "deployment-serve", "namespace": "shop", "uid": "s1"}
    busy.put(GPUSHARES, {"metadata": metadata, "status": {"phase": "Sharing", "profile": profile}})
    _, as_json, _ = call(*command.split(), "-o", "json")
    code, as_yaml, err = call(*command.split(), "-o", "yaml")
    assert code == 0, err
    found = json.loads(as_json)
    assert found
    assert yaml.safe_load(as_yaml) == found
    assert as_yaml != as_json


def test_top_json_is_a_list_of_pods_with_what_was_promised(busy: HttpApiServer, call: Call) -> None:
    _, out, _ = call("top", "--json", "--sort", "broken")
    first = json.loads(out)[0]
    assert (first["pod"], first["promise_ratio"], first["progress_ratio"]) == ("serve-7c9f8d6b5-xk2lp", 0.91, 0.72)


def test_one_namespace_alone(busy: HttpApiServer, call: Call) -> None:
    assert [row["pod"] for row in json.loads(call("pods", "-n", "research", "-o", "json")[1])] == ["lab"]
    gain = json.loads(call("gain", "-n", "research", "-o", "json")[1])
    assert [each["namespace"] for each in gain["by_namespace"]] == ["research"]
    assert (gain["used_gpus"], gain["per_gpu"]) == (1, None)


def test_an_older_release_is_noted_and_shown_as_far_as_it_goes(busy: HttpApiServer, call: Call) -> None:
    labels = {"gpushare.io/settings": "true", "app.kubernetes.io/version": "0.0.9"}
    busy.put(CONFIGMAPS, {"metadata": {"name": "s", "namespace": "gpushare-system", "labels": labels}, "data": {}})
    code, out, err = call("top")
    assert code == 0
    assert "serve-7c9f8d6b5-xk2lp" in out
    assert "the cluster runs gpushare 0.0.9" in err


def test_without_rights_to_gpunodes_the_gpushares_tell(busy: HttpApiServer, call: Call) -> None:
    placement = {"podUid": "u1", "pod": "serve", "node": "node-a", "promise": 0.9, "progress": 0.7}
    share = {"metadata": {"name": "web", "namespace": "shop", "uid": "s"}, "status": {"placements": [placement]}}
    busy.put(GPUSHARES, share)
    busy.forbidden = {"/gpunodes"}
    code, out, err = call("top", "-o", "json", "--sort", "progress")
    first = json.loads(out)[0]
    assert (code, first["gpu"], first["progress_ratio"]) == (0, "node-a/GPU-0", 0.7)
    assert "ClusterRole gpushare-view" in err
    code, out, err = call("gpus")
    assert (code, out) == (4, "")
    assert "ask for the rights of the ClusterRole gpushare-view" in err


def test_a_gpu_that_an_agent_cannot_read_is_named(cluster: HttpApiServer, call: Call) -> None:
    """Before: the node had one GPU less, or none, and no word on why."""
    lost = {
        "type": "DevicesReady",
        "status": "False",
        "reason": "UnreadableGpu",
        "message": "GPU 3 cannot be read",
    }
    fine = {"type": "CountersReady", "status": "False", "reason": "NoCounters", "message": "no GPM"}
    cluster.put(GPUNODES, {"metadata": {"name": "node-a"}, "status": {"conditions": [lost, fine]}})
    code, out, err = call("gpus")
    assert (code, out, err.splitlines()[0]) == (3, "", "node-a: GPU 3 cannot be read")
    assert "no node has a GPU" in err


def test_memory_that_is_not_known_is_null_and_a_dash(cluster: HttpApiServer, call: Call) -> None:
    """Before: 0, and a GPU of 0Mi."""
    offered = {"cpu": "64", "memory": "256Gi", names.SHARE_RESOURCE: "100"}
    cluster.put(NODES, {"metadata": {"name": "a"}, "status": {"allocatable": offered}})
    cluster.put(GPUNODES, {"metadata": {"name": "a"}, "status": {"gpus": [{"uuid": "GPU-0", "index": 0}]}})
    cluster.put(PODS, pod_object("late", "u1"))
    assert [row["memory_mib"] for row in json.loads(call("gpus", "-o", "json")[1])] == [None]
    assert "0Mi" not in call("gpus", "-o", "wide")[1]
    code, told, err = call("explain", "late", "-o", "json")
    assert code == 0, err
    assert json.loads(told)["now"]["memory_mib"] is None


def test_without_rights_to_every_namespace_the_contexts_own_is_shown(busy: HttpApiServer, call: Call) -> None:
    busy.forbidden = {"v1/pods"}
    code, out, err = call("pods", "-o", "json")
    assert (code, {row["namespace"] for row in json.loads(out)}) == (0, {"shop"})
    assert "so this is shop alone" in err
    busy.forbidden = {"/pods"}
    assert call("pods")[0] == 4


def test_no_cluster_is_a_sentence(
    cluster: HttpApiServer, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    cluster.broken = True
    code, _, err = call("top")
    assert (code, "the API server is in trouble: etcd is away" in err) == (5, True)
    code, _, err = call("top", "--context", "nowhere")
    assert (code, err.count("\n")) == (5, 1)
    for text, says in (("a: [", "is not a kubeconfig"), ("- 1", "is not a kubeconfig"), (None, "there is no ")):
        path = tmp_path / "other"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        monkeypatch.setenv("KUBECONFIG", str(path))
        code, out, err = call("top")
        assert (code, out, err.count("\n")) == (5, "", 1)
        assert says in err


@pytest.mark.parametrize(
    "command", [("pods",), ("top", "--once"), ("gain",), ("profile", "show"), ("explain", "web")]
)
@pytest.mark.parametrize("namespace", ["", "..", "a/b", "A B"])
def test_what_is_no_name_of_a_namespace_is_told_so(
    cluster: HttpApiServer, call: Call, command: tuple[str, ...], namespace: str
) -> None:
    """Before: `-n "$NS"` without an NS showed every namespace, or none."""
    code, out, err = call(*command, "-n", namespace)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f'"{namespace}" is no name of a namespace' in err


def test_a_server_that_is_not_there_is_a_sentence(cluster: HttpApiServer, call: Call, tmp_path: Any) -> None:
    path = tmp_path / "away"
    path.write_text(cluster.kubeconfig.read_text().replace("127.0.0.1", "127.0.0.1:1/x"))
    code, _, err = call("gpus", "--kubeconfig", path)
    assert (code, err.count("\n")) == (5, 1)
    assert "is this the right cluster (--context), and is it up?" in err


def test_a_defect_is_a_sentence_unless_asked_for(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare.cli.root.build", lambda used: 1 / 0)
    code, _, err = call("top")
    assert (code, err.startswith("gpushare: this is a defect: ZeroDivisionError")) == (70, True)
    monkeypatch.setenv("GPUSHARE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        call("top")


def test_profiles_of_workloads(busy: HttpApiServer, call: Call, narrow: Call) -> None:
    profile = {
        "gpuModel": "NVIDIA H200",
        "counters": {"sm_util": 0.73, "fp32_util": 0.28, "dram_bw_util": 0.2, "hmma_tensor_util": 0.1},
        "memoryPeakMiB": 9000,
        "takenAt": "2026-11-22T11:00:00Z",
    }
    learned = [{"gpuModel": "NVIDIA H200", "sensitivity": -0.05, "pressure": 0.02, "windows": 40}]
    status = {
        "phase": "Sharing",
        "profile": profile,
        "recommendedFraction": "0.45",
        "promise": 0.6,
        "learned": learned,
        "placements": [{"podUid": "u1", "pod": "serve-7c9f8d6b5-xk2lp"}],
    }
    metadata = {"name": "deployment-serve", "namespace": "shop", "uid": "s1"}
    busy.put(GPUSHARES, {"metadata": metadata, "status": status})
    busy.put(GPUSHARES, {"metadata": {"name": "deployment-new", "namespace": "shop", "uid": "s2"}})
    code, out, _ = call("profile", "show")
    assert code == 0
    check_screen("profile-show", out)
    assert narrow("profile", "show", "deployment-serve")[0] == 0
    check_screen("profile-show-40", narrow("profile", "show")[1])
    (one,) = json.loads(call("profile", "show", "serve-7c9f8d6b5-xk2lp", "-o", "json")[1])
    assert (one["name"], one["profile"]["counters"]["sm_util"], one["learned"]) == (
        "deployment-serve",
        0.73,
        learned,
    )
    assert "other work" not in out
    phase = {"counters": {"sm_util": 0.45, "hmma_tensor_util": 0.3}, "timeRatio": 0.3, "reading": "InPlace"}
    profile["phases"] = [{**phase, "threadPercentage": 50, "windowSeconds": 12.0}]
    busy.put(GPUSHARES, {"metadata": metadata, "status": status})
    out = " ".join(call("profile", "show", "deployment-serve")[1].split())
    assert (
        "shop/deployment-serve does other work for 30% of its time: SM 45%, FP16 30% "
        "(read in place under 50% of the threads)"
    ) in out
    (one,) = json.loads(call("profile", "show", "deployment-serve", "-o", "json")[1])
    assert one["profile"]["phases"][0]["timeRatio"] == 0.3
    code, _, err = call("profile", "show", "nobody")
    assert (code, 'gpushare profile show" lists them' in err) == (3, True)
