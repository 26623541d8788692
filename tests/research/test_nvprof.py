"""nvprof's CSV output: the time-weighted mean over all GPU activities, as worked out by hand for the fixtures."""

from pathlib import Path

import pytest

from gpushare.research.nvprof import NvprofError, parse_level, parse_metrics, parse_summary, utilization

DATA = Path(__file__).parent / "data"
GEMM = "void gemm<float, int=8>(float*, int, float const *)"


def lines(name: str) -> list[str]:
    return (DATA / name).read_text().splitlines()


def test_golden() -> None:
    found = utilization(parse_summary(lines("nvprof_summary.csv")), parse_metrics(lines("nvprof_metrics.csv")))
    assert found.gpu_seconds == pytest.approx(0.8)
    assert found.kernel_seconds == pytest.approx(0.7)
    # (10 x 400 ms + 2 x 200 ms) / 800 ms of all activities = level 5.5; 5 x 200 ms / 800 ms = 1.25
    assert found.pipes == {"fp32": pytest.approx(0.55), "fp16": pytest.approx(0.125)}
    assert found.coverage == {"fp32": pytest.approx(6 / 7), "fp16": pytest.approx(6 / 7)}
    assert found.without_metrics == ("unmeasured_kernel(int)",)


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("Idle (0)", 0),
        ("Low (2)", 2),
        ("Mid (5)", 5),
        ("High (8)", 8),
        ("Max (10)", 10),
        ("7", 7),
        (" Low (1) ", 1),
    ],
)
def test_levels(text: str, level: float) -> None:
    assert parse_level(text) == level


@pytest.mark.parametrize("text", ["", "Low", "Max (11)", "-1", "95.2%", "Low (x)"])
def test_what_is_no_level(text: str) -> None:
    with pytest.raises(ValueError, match="not a level"):
        parse_level(text)


@pytest.mark.parametrize(("unit", "seconds"), [("s", 2.0), ("ms", 2e-3), ("us", 2e-6), ("ns", 2e-9)])
def test_the_units_row_is_respected(unit: str, seconds: float) -> None:
    table = [
        '"Type","Time(%)","Time","Calls","Avg","Min","Max","Name"',
        f",%,{unit},,us,us,us,",
        '"GPU activities",100.0,2.0,1,2.0,2.0,2.0,"k"',
    ]
    assert parse_summary(table) == {"k": pytest.approx(seconds)}


def test_the_older_format_whose_api_calls_have_the_same_header() -> None:
    table = [
        "==1== Profiling result:",
        '"Time(%)","Time","Calls","Avg","Min","Max","Name"',
        "%,ms,,ms,ms,ms,",
        '100.0,3.0,1,3.0,3.0,3.0,"k"',
        "",
        "==1== API calls:",
        '"Time(%)","Time","Calls","Avg","Min","Max","Name"',
        "%,ms,,ms,ms,ms,",
        '100.0,900.0,1,9,9,9,"cudaFree"',
    ]
    assert parse_summary(table) == {"k": pytest.approx(0.003)}


def test_a_trace_is_summed_by_name() -> None:
    table = [
        '"Start","Duration","Grid X","Device","Name"',
        "s,us,,,",
        '0.1,10.0,1,"V100","k(int) [115]"',
        '0.2,30.0,1,"V100","k(int) [116]"',
        '0.3,5.0,,"V100","[CUDA memset]"',
    ]
    assert parse_summary(table) == {"k(int)": pytest.approx(40e-6), "[CUDA memset]": pytest.approx(5e-6)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("400.000000", "lots"), "line 7: Time: 'lots' is not a number"),
        ((",%,ms,,ms,us,ms,", ""), "units row"),
        (('"Type","Time(%)"', '"Kind","Portion"'), None),
        (('"[CUDA memset]"', '"[CUDA memset]","x"'), "line 11: 9 cells where the header has 8"),
        (('"Calls"', '"Count"'), "no table of GPU activities"),
    ],
)
def test_a_broken_summary_is_refused_with_its_line(change: tuple[str, str], message: str | None) -> None:
    table = [line.replace(*change) for line in lines("nvprof_summary.csv")]
    if message is None:
        assert sum(parse_summary(table).values()) == pytest.approx(5.8)  # no types: nothing tells API calls apart
        return
    with pytest.raises(NvprofError, match=message.replace("(", r"\(")):
        parse_summary(table)


def test_broken_metrics_are_refused_with_their_line() -> None:
    table = [
        line.replace('"Max (10)"\n', "").replace("Mid (5)", "Mid (50)") for line in lines("nvprof_metrics.csv")
    ]
    with pytest.raises(NvprofError, match="line 11: Avg"):
        parse_metrics(table)
    with pytest.raises(NvprofError, match="no utilisation metric"):
        parse_metrics([])
