"""Colocation dataset v1: what is read, what is skipped, what is refused."""

import json

import pytest

from gpushare.research.dataset import SCHEMA, Dataset, DatasetError, Mechanism, Skipped, parse

HEADER = {"schema": "gpushare.io/colocation/v1", "gpu_model": "NVIDIA H200", "driver": "580", "mechanism": "mps"}


def run(*tenants: tuple[str, int, float], device: dict[str, object] | None = None, **extra: object) -> str:
    return json.dumps(
        {
            "tenants": [{"workload": name, "thread_percentage": cap} for name, cap, _ in tenants],
            "iterations_per_s": [rate for _, _, rate in tenants],
            "device": {"sm_util": 0.5, "fp32_util": 0.25} if device is None else device,
            "window_s": 1.5,
            "memory_mib": [100 for _ in tenants],
            **extra,
        }
    )


def dataset(*runs: str) -> Dataset:
    return parse([json.dumps(HEADER), *runs])


def test_reads_solo_rates_cap_curves_and_progress() -> None:
    data = dataset(
        run(("a", 100, 10.0)),
        run(("a", 100, 12.0)),
        run(("a", 50, 8.8)),
        run(("b", 100, 4.0)),
        "",
        run(("a", 50, 5.5), ("b", 50, 3.0)),
    )
    assert (data.gpu_model, data.mechanism) == ("NVIDIA H200", Mechanism.MPS)
    assert data.solo_rate("a") == pytest.approx(11.0)
    assert data.cap_curve("a") == {50: pytest.approx(0.8), 100: 1.0}
    [(shared, progress)] = data.shared_runs()
    assert progress == (pytest.approx(0.5), pytest.approx(0.75))
    assert shared.line == 7
    assert data.notes() == ()


def test_counters_keep_what_was_not_measured_absent() -> None:
    data = dataset(run(("a", 100, 1.0), device={"sm_util": 0.5}), run(("a", 100, 1.0), device={"sm_util": 0.7}))
    counters = data.solo_counters("a")
    assert counters is not None
    assert counters.as_dict() == {"sm_util": pytest.approx(0.6)}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (run(("a", 100, 0.0)), Skipped.RATE),
        (run(("a", 0, 1.0)), Skipped.PERCENTAGE),
        (run(("a", 100, 1.0), device={"sm_util": -0.1}), Skipped.COUNTER),
        (run(("a", 100, 1.0), memory_mib=[1, 2]), Skipped.LENGTHS),
        (run(("a", 100, 1.0)).replace('"device"', '"devise"'), Skipped.BAD_FIELD),
        (run(("a", 100, 1.0), iterations_per_s=["fast"]), Skipped.BAD_FIELD),
        ("[]", Skipped.BAD_FIELD),
        (run(("a", 100, 1.0), window_s=float("nan")), Skipped.BAD_FIELD),
        (run(("a", 100, 1.0), window_s=-1.0), Skipped.BAD_FIELD),
        (run(("a", 100, 1.0), memory_mib=[-5]), Skipped.BAD_FIELD),
        (run(("a", 100, 1.0)).replace("1.0", "NaN"), Skipped.RATE),
    ],
)
def test_a_senseless_run_is_skipped_and_counted(line: str, why: Skipped) -> None:
    data = dataset(line, run(("b", 100, 1.0)))
    assert data.skipped == {why: 1}
    assert [r.tenants[0].workload for r in data.runs] == ["b"]
    assert data.notes() == (f"1 run skipped: {why}",)


def test_missing_solo_runs_and_unknown_fields_are_said() -> None:
    data = dataset(run(("a", 100, 1.0), note="x"), run(("a", 50, 1.0), ("ghost", 50, 1.0)))
    assert list(data.shared_runs()) == []
    assert data.notes() == (f"1 run noted: {Skipped.UNKNOWN_FIELD}", f"1 run skipped: {Skipped.NO_SOLO}")


def test_rates_of_another_unit_are_noted() -> None:
    data = dataset(
        run(("a", 100, 1.0)),
        run(("b", 100, 1.0)),
        run(("a", 50, 900.0), ("b", 50, 0.5)),
        run(("a", 50, 1.2), ("b", 50, 1.0)),
    )
    assert data.notes() == (f"1 run noted: {Skipped.FASTER}",)


@pytest.mark.parametrize(
    ("lines", "where", "message"),
    [
        ([], 1, "is empty"),
        ([json.dumps({**HEADER, "schema": "gpushare.io/colocation/v2"})], 1, "not supported"),
        ([json.dumps({**HEADER, "mechanism": "magic"})], 1, "magic"),
        ([json.dumps(HEADER), '{"tenants": ['], 2, "is not JSON"),
        ([json.dumps(HEADER).encode(), b"\xff"], 2, "UTF-8"),
        ([json.dumps(HEADER), "[" * 200_000], 2, "is not a dataset's JSON"),
        ([json.dumps(HEADER), "1" * 5_000], 2, "is not a dataset's JSON"),
    ],
)
def test_an_unreadable_dataset_is_refused_with_its_place(lines: list[str], where: int, message: str) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        parse(lines)
    assert caught.value.line == where


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_byte_order_mark_before_the_header_is_not_minded(as_bytes: bool) -> None:
    lines = ["\ufeff" + json.dumps(HEADER), run(("a", 100, 10.0))]
    assert parse([line.encode() for line in lines] if as_bytes else lines).solo_rate("a") == 10.0


def test_progress_is_relative_to_the_solo_runs_of_the_same_session() -> None:
    """A program that its host paces is as fast as that host: sessions must not be mixed."""
    lines = [json.dumps({"schema": SCHEMA, "gpu_model": "G", "driver": "1", "mechanism": "mps"})]

    def run(session: str, rates: dict[str, float], cap: int = 100) -> None:
        tenants = [{"workload": name, "thread_percentage": cap} for name in rates]
        lines.append(
            json.dumps(
                {"tenants": tenants, "iterations_per_s": list(rates.values()), "device": {}, "session": session}
            )
        )

    for session, speed in (("slow", 1.0), ("fast", 2.0)):
        run(session, {"a": 10 * speed})
        run(session, {"a": 6 * speed}, 50)
        run(session, {"b": 4.0})
        run(session, {"a": 5 * speed, "b": 1.0})
    run("other", {"a": 5.0, "b": 1.0})
    data = parse(lines)
    assert [progress for _, progress in data.shared_runs()] == [(0.5, 0.25)] * 2
    assert data.cap_curve("a") == {50: 0.6, 100: 1.0}
    assert data.notes() == (f"1 run skipped: {Skipped.NO_SOLO}",)
