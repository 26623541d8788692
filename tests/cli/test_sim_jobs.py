import json
from importlib import resources

import pytest

from gpushare.cli import main as command
from gpushare.data import H200_COLOCATION
from gpushare.sim.job_catalog import POLICIES


def gpushare(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["gpushare", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        command()
    return int(stopped.value.code or 0)


@pytest.fixture
def gavel(data_directory):
    folder = data_directory / "gavel"
    return ["--colocation", folder / "pairs.csv", "--solo", folder / "solo.csv", "--gpu", "p100"]


@pytest.fixture
def trace(monkeypatch, gavel, tmp_path):
    path = tmp_path / "trace.csv"
    assert gpushare(monkeypatch, "sim", "trace", *gavel, "--jobs", 12, "--interarrival", 5, "-o", path) == 0
    return path


def test_a_trace_that_goes_to_a_dash_is_standard_output(monkeypatch, gavel, trace, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert gpushare(monkeypatch, "sim", "trace", *gavel, "--jobs", 12, "--interarrival", 5, "-o", "-") == 0
    assert capsys.readouterr() == (trace.read_text(), "")
    assert [each.name for each in tmp_path.iterdir()] == [trace.name]


@pytest.mark.parametrize(
    "words",
    [("compare", "-o", "-"), ("jobs", "--policy", "mps-uncapped", "--report", "-")],
    ids=["compare", "jobs"],
)
def test_a_page_that_goes_to_a_dash_is_alone_on_standard_output(
    monkeypatch, gavel, trace, capsys, tmp_path, words
):
    monkeypatch.chdir(tmp_path)
    where = (*gavel, "--trace", trace, "--gpus", 3)
    assert gpushare(monkeypatch, "sim", *words, *where, "--json") == 2
    assert "both write to standard output" in capsys.readouterr().err
    assert gpushare(monkeypatch, "sim", *words, *where) == 0
    page, told = capsys.readouterr()
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert "mps-uncapped" in told
    assert [each.name for each in tmp_path.iterdir()] == [trace.name]


def test_one_policy_prints_json(monkeypatch, gavel, trace, capsys):
    code = gpushare(
        monkeypatch, "sim", "jobs", *gavel, "--trace", trace, "--gpus", 3, "--policy", "fifo", "--json"
    )
    assert code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["policy"] == "fifo"
    assert printed["jobs"] == 12
    assert printed["throughput_ratio"] == pytest.approx(1.0)


def test_one_policys_simulation_gets_the_page_of_a_cluster(monkeypatch, gavel, trace, capsys, tmp_path):
    page = tmp_path / "page.html"
    where = ("--trace", trace, "--gpus", 3, "--policy", "mps-uncapped", "--report", page, "--json")
    assert gpushare(monkeypatch, "sim", "jobs", *gavel, *where) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == "mps-uncapped"
    text = page.read_text()
    assert "trace.csv under mps-uncapped, simulated" in text
    assert "1970" not in text
    assert len(text) < 1_500_000


def test_a_policy_that_places_nothing_has_no_such_page(monkeypatch, gavel, trace, capsys, tmp_path):
    where = ("--trace", trace, "--gpus", 3, "--policy", "gavel", "--report", tmp_path / "page.html")
    assert gpushare(monkeypatch, "sim", "jobs", *gavel, *where) == 2
    assert "splits time itself" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.slow
@pytest.mark.compute
def test_compare_runs_every_policy_that_the_data_allows_and_writes_one_page(
    monkeypatch, gavel, trace, tmp_path, capsys
):
    page = tmp_path / "report.html"
    code = gpushare(monkeypatch, "sim", "compare", *gavel, "--trace", trace, "--gpus", 3, "-o", page, "--json")
    assert code == 0
    ran = {each["policy"] for each in json.loads(capsys.readouterr().out)["results"]}
    assert ran == set(POLICIES) - {"mig", "mps-equal", "gpushare"}
    text = page.read_text()
    assert text.count("<svg role=") == 3
    assert "//" not in text
    assert len(text) < 1_500_000


@pytest.fixture
def large(tmp_path):
    """A job too large for every MIG slice of an H200 and a small one, with the data of both."""

    def run(workload: str, cap: int, rate: float, memory_mib: int) -> dict:
        tenants = [{"workload": workload, "thread_percentage": cap}]
        measured = {"iterations_per_s": [rate], "device": {"sm_util": 0.5}, "window_s": 1.5}
        return {"tenants": tenants, **measured, "memory_mib": [memory_mib]}

    header = {"schema": "gpushare.io/colocation/v1", "gpu_model": "NVIDIA H200", "driver": "1", "mechanism": "mps"}
    runs = [run(name, cap, cap / 10, mib) for name, mib in (("a", 100_000), ("b", 800)) for cap in (50, 100)]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (header, *runs)))
    (tmp_path / "large.csv").write_text("job,workload,submit_seconds,solo_seconds\n1,a,0,60\n2,b,0,60\n")
    return ["--colocation", tmp_path / "runs.jsonl", "--trace", tmp_path / "large.csv", "--gpus", 2]


def test_a_policy_that_cannot_run_one_job_is_left_out_of_a_comparison(monkeypatch, large, tmp_path, capsys):
    monkeypatch.setattr("gpushare.cli.sim_jobs.POLICIES", {name: POLICIES[name] for name in ("mig", "fifo")})
    assert gpushare(monkeypatch, "sim", "compare", *large, "-o", tmp_path / "page.html", "--json") == 0
    printed = capsys.readouterr()
    assert [each["policy"] for each in json.loads(printed.out)["results"]] == ["fifo"]
    assert 'left out: policy mig leaves 1 jobs waiting for ever, the first is "1"' in " ".join(printed.err.split())
    assert gpushare(monkeypatch, "sim", "jobs", *large, "--policy", "mig") == 2


def test_the_memory_of_a_gpu_model_that_does_not_say_it_is_asked_for(monkeypatch, large, tmp_path, capsys):
    data, fifo = tmp_path / "runs.jsonl", (*large, "--policy", "fifo")
    data.write_text(data.read_text().replace("NVIDIA H200", "NVIDIA X1"))
    assert gpushare(monkeypatch, "sim", "jobs", *fifo) == 2
    assert 'its GPU model, "NVIDIA X1", does not say how much memory it has: give --gpu-memory-mib' in (
        capsys.readouterr().err
    )
    assert gpushare(monkeypatch, "sim", "jobs", *fifo, "--gpu-memory-mib", 99_999) == 2
    assert "needs 100000 MiB, a GPU has 99999 MiB" in capsys.readouterr().err
    assert gpushare(monkeypatch, "sim", "jobs", *fifo, "--gpu-memory-mib", 100_000) == 0
    assert gpushare(monkeypatch, "sim", "trace", *large[:2], "-o", tmp_path / "drawn.csv") == 0


def test_a_comparison_refuses_a_trace_that_no_policy_can_run(monkeypatch, large, tmp_path, capsys):
    (tmp_path / "large.csv").write_text("job,workload,submit_seconds,solo_seconds\n1,absent,0,60\n")
    assert gpushare(monkeypatch, "sim", "compare", *large, "-o", tmp_path / "page.html") == 2
    assert 'workload "absent" is absent from the colocation data' in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--policy", ""], "say which policy, by --policy: one of fifo,"),
        (["--report", "absent/page.html"], "absent/page.html: cannot be written: there is no folder absent"),
        (["--policy", "magic"], 'policy "magic" is not known; there are fifo,'),
        (["--policy", "mig"], "policy mig needs a colocation dataset with capped solo runs"),
        (
            ["--gpu-memory-mib", "16384"],
            "pairs.csv: a table of pairs says itself what fits: leave out --gpu-memory",
        ),
        (["--gpu", "a100"], 'no rows for GPU "a100"; the table has k80, p100, v100'),
        (["--trace", "missing.csv"], "missing.csv: cannot be read: No such file or directory"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(monkeypatch, gavel, trace, capsys, change, message):
    arguments = [*gavel, "--trace", trace, "--gpus", 3, "--policy", "fifo", *change]
    assert gpushare(monkeypatch, "sim", "jobs", *arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,w,1e308,10,", 'column submit_seconds: "1e308" is not between 0 and 1e+09'),
        ("a,w,0,nan,", 'column solo_seconds: "nan" is not between 0.001 and 1e+09'),
        ("a,w,0,10,1e6", 'column max_slowdown: "1e6" is not between 1 and 1000'),
        (f"{'a' * 200_000},w,0,10,", "is not CSV (field larger than field limit"),
    ],
)
def test_a_trace_that_nobody_can_mean_is_refused_at_its_line(monkeypatch, gavel, capsys, tmp_path, row, message):
    path = tmp_path / "odd.csv"
    path.write_text(f"job,workload,submit_seconds,solo_seconds,max_slowdown\n{row}\n")
    assert gpushare(monkeypatch, "sim", "jobs", *gavel, "--trace", path, "--policy", "fifo") == 2
    err = capsys.readouterr().err
    assert f"{path}: line 2" in err
    assert message in err


@pytest.mark.parametrize("option", ["--length", "--interarrival"])
@pytest.mark.parametrize("value", ["inf", "nan", "1e308"])
def test_no_trace_is_drawn_that_could_not_be_read(monkeypatch, gavel, tmp_path, option, value):
    assert gpushare(monkeypatch, "sim", "trace", *gavel, option, value, "-o", tmp_path / "trace.csv") == 2
    assert list(tmp_path.iterdir()) == []


def test_the_longest_trace_that_is_drawn_can_be_read(monkeypatch, gavel, tmp_path, capsys):
    path = tmp_path / "trace.csv"
    longest = ("--length", 1e7, "--interarrival", 1e7, "--jobs", 40)
    assert gpushare(monkeypatch, "sim", "trace", *gavel, *longest, "-o", path) == 0
    assert gpushare(monkeypatch, "sim", "jobs", *gavel, "--trace", path, "--policy", "fifo") == 0
    assert "40 jobs" in capsys.readouterr().out


def test_an_output_that_cannot_be_written_leaves_nothing(monkeypatch, gavel, tmp_path, capsys):
    target = tmp_path / "absent" / "trace.csv"
    assert gpushare(monkeypatch, "sim", "trace", *gavel, "-o", target) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_judged_on_every_load_and_seed(monkeypatch, capsys):
    small = (
        "--truth",
        "table",
        "--jobs",
        12,
        "--gpus",
        2,
        "--load",
        1,
        "--load",
        2,
        "--seeds",
        2,
        "--processes",
        1,
    )
    assert gpushare(monkeypatch, "sim", "jobs", *small, "--policy", "exclusive, hard-caps", "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["load"], row["seed"], row["policy"]) for row in rows] == [
        (load, seed, policy) for load in (1, 2) for seed in (0, 1) for policy in ("exclusive", "hard-caps")
    ]
    assert all(row["late_ratio"] == 0.0 for row in rows if row["policy"] == "exclusive")
    assert gpushare(monkeypatch, "sim", "jobs", *small, "--policy", "exclusive") == 0
    assert "load 2, 2 seeds" in capsys.readouterr().out


def test_a_table_without_programs_is_a_sentence(monkeypatch, tmp_path, capsys):
    """Before: "this is a defect", from a process of the simulation."""
    table = tmp_path / "table.jsonl"
    table.write_text(
        '{"schema": "gpushare.io/colocation/v1", "gpu_model": "X", "driver": "1", "mechanism": "mps"}\n'
    )
    assert gpushare(monkeypatch, "sim", "jobs", "--truth", "table", "--table", table) == 2
    assert "table.jsonl: the table has no program alone on the whole GPU" in capsys.readouterr().err


def test_the_table_takes_no_colocation_data_and_knows_its_programs_and_policies(monkeypatch, trace, capsys):
    assert gpushare(monkeypatch, "sim", "jobs", "--truth", "table", "--colocation", trace) == 2
    assert "give no colocation data" in capsys.readouterr().err
    one = ("--truth", "table", "--trace", trace, "--seeds", 1, "--processes", 1, "--policy", "exclusive")
    assert gpushare(monkeypatch, "sim", "jobs", *one) == 2
    assert "the table has no program" in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert gpushare(monkeypatch, "sim", "jobs", "--truth", "table", "--policy", "gavel") == 2
    assert 'policy "gavel" is not known' in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert gpushare(monkeypatch, "sim", "jobs") == 2


@pytest.mark.parametrize(
    "words", [("--slowdown-headroom", 0.25), ("--load", 2), ("--seeds", 10), ("--table", "t")]
)
def test_options_of_a_table_are_refused_for_a_trace(monkeypatch, gavel, trace, capsys, words):
    """Before: taken in silence, so that a headroom seemed to change nothing."""
    one = ("--trace", trace, "--policy", "fifo")
    assert gpushare(monkeypatch, "sim", "jobs", *gavel, *one, *words) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert f"{words[0]} is for --truth table alone: give that, or leave it out" in printed.err


@pytest.mark.parametrize("words", [("--gpu", "p100"), ("--solo", "solo.csv")])
@pytest.mark.parametrize("command", ["jobs", "trace"])
def test_options_of_pairs_are_refused_for_a_dataset(monkeypatch, trace, capsys, tmp_path, words, command):
    """Before: taken in silence, so that figures of an H200 seemed to be a P100's."""
    more = ("--trace", trace, "--policy", "fifo") if command == "jobs" else ("-o", tmp_path / "drawn.csv")
    with resources.as_file(resources.files("gpushare.data") / H200_COLOCATION) as dataset:
        assert gpushare(monkeypatch, "sim", command, "--colocation", dataset, *more, *words) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert f"{words[0]} is for a table of pairs (.csv), and this is none: leave it out" in printed.err
