import json
import sys

import pytest

from gpushare.cli import main


def run(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["gpushare", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.fixture
def tables(tmp_path):
    """Eight workloads of two families on one GPU, all pairs; two large ones do not fit together."""
    names = [f"{family} (batch size {2**size})" for family in ("A", "B") for size in range(4)]
    solo = ["gpu,workload,steps_per_s", *(f"v100,{name},10" for name in names)]
    rows = []
    for index, name in enumerate(names):
        for other, partner in enumerate(names[index:], index):
            rate = 0.0 if index + other > 12 else 5 + 0.2 * (index + other)
            rows.append(f"v100,{name},{partner},{rate},{rate}")
    (tmp_path / "solo.csv").write_text("\n".join(solo) + "\n")
    (tmp_path / "pairs.csv").write_text(
        "\n".join(["gpu,workload_a,workload_b,steps_per_s_a,steps_per_s_b", *rows]) + "\n"
    )
    return ["--solo", tmp_path / "solo.csv", "--pairs", tmp_path / "pairs.csv"]


@pytest.mark.slow
@pytest.mark.compute
def test_evaluate_prints_every_predictor_of_the_protocol_with_its_spread(monkeypatch, capsys, tables):
    asked = ["--gpu", "v100", "--protocol", "leave-pairs-out", "--repeats", "2", "--json"]
    assert run(monkeypatch, "pairs", "evaluate", *tables, *asked) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["gpu"], answer["repeats"], answer["gate"]) == ("v100", 2, 1.1)
    by_name = {result["predictor"]: result for result in answer["results"]}
    assert set(by_name) == {"gaussian-process", "additive", "linear-solo", "constant", "random"}
    ours, random = by_name["gaussian-process"], by_name["random"]
    assert ours["mean_absolute_error"] < random["mean_absolute_error"] / 4
    assert random["spread"]["mean_absolute_error"] > 0
    assert ours["pairs"] == 36
    assert ours["pairs_fitting"] < 36


@pytest.mark.slow
@pytest.mark.compute
def test_evaluate_twice_with_one_seed_gives_the_same(monkeypatch, capsys, tables):
    shown, pairs_only = [], ["--protocol", "leave-pairs-out"]
    for _ in range(2):
        assert run(monkeypatch, "pairs", "evaluate", *tables, "--gpu", "v100", "--seed", "3", *pairs_only) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "(all)" in shown[0]


def test_a_gpu_that_is_not_in_the_table_is_named(monkeypatch, capsys, tables):
    assert run(monkeypatch, "pairs", "evaluate", *tables, "--gpu", "k80") == 2
    assert 'no rows for GPU "k80"; the table has v100' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.compute
def test_without_the_extra_that_matchings_need_it_is_named(monkeypatch, capsys, tables):
    monkeypatch.setitem(sys.modules, "networkx", None)  # as if it were not installed
    assert run(monkeypatch, "pairs", "evaluate", *tables, "--gpu", "v100", "--protocol", "leave-pairs-out") == 2
    assert capsys.readouterr().err.endswith(
        'this command needs networkx: pip install ".[fit]" in gpushare\'s repository\n'
    )
