"""What a person sees of a report: Chromium opens it, wide and narrow, light and dark, on screen and on paper."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from browser import DESK, PHONE, chromium, looking_at
from fakecluster import busy_node, pod_object
from histories import BEGIN, UNTIL, prometheus_with_history
from playwright.sync_api import Browser

from gpushare.cli.report.jobs_page import render_jobs
from gpushare.cli.report.usage import Tenancy, UsageHistory
from gpushare.cli.report.usage_page import render_usage
from gpushare.sim.job_report import report
from gpushare.sim.jobs import JobResult, Outcome, Span

pytestmark = pytest.mark.slow
MINUTES = 120
SHOWN = ("light", "dark")
GAVEL = Path(__file__).resolve().parents[1] / "data" / "gavel"
A4_PRINTED = 718  # CSS pixels: 210 mm at 96 for an inch, less Chromium's margins of 1 cm
LONG = "recommend" * 7  # 63 characters and no place to break it, as long as a label may be


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def _tenancy(team: str, name: str, share: float, progress: float, promise: float, *, since: int) -> Tenancy:
    present = np.where(np.arange(MINUTES) >= since, 1.0, np.nan)
    return Tenancy(
        namespace=team,
        pod=f"{name}-0",
        workload=name,
        gpu_uuid="GPU-a",
        share_ratio=share * present,
        progress_ratio=progress * present,
        progress_error_ratio=0.02 * present,
        promise_ratio=promise * present,
        broken_ratio=np.full(MINUTES, np.nan),
        throttle_ratio=np.where(np.arange(MINUTES) > 100, 0.2, np.nan),
        busiest_ratio=0.5 * present,
        clients=np.ones(MINUTES),
    )


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every section, and names that try to break out of it."""
    history = UsageHistory(
        source="a test",
        times=1763640000 + 60.0 * np.arange(MINUTES),
        step_seconds=60.0,
        gpus=np.full(MINUTES, 4.0),
        healthy=np.full(MINUTES, 4.0),
        tenancies=(
            _tenancy("research", "resnet-train", 0.5, 0.6, 0.7, since=0),
            _tenancy("shop", "<script>alert(1)</script>", 0.3, 0.9, 0.5, since=30),
            _tenancy("shop", LONG, 0.2, 0.3, 0.2, since=60),
        ),
        requested_gpus={("research", "resnet-train"): np.full(MINUTES, 1.0)},
        recommended={("research", "resnet-train"): 0.8, ("shop", LONG): 0.1},
        expected={("research", "resnet-train"): (0.5, 0.95)},
        retractions=2.0,
        notes=("A note about what is missing.",),
    )
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(render_usage(history))
    return file


def _outcome(policy: str, slowdown: float) -> Outcome:
    jobs = tuple(
        JobResult(
            f"j{n}", f"workload-{n % 3}", 60.0 * n, 60.0 * n + 600 * slowdown, 600.0, 600 * slowdown, 30.0, 0
        )
        for n in range(20)
    )
    spans = tuple(Span(60.0 * n, 60.0 * (n + 1), 3.0, 2.0 + n % 3, 1) for n in range(30))
    return Outcome(policy, 4, jobs, spans)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulator's page of six policies."""
    slowdowns = {"fifo": 2.0, "time-slicing": 2.5, "gavel": 1.1, "kace": 1.5, "mig": 1.7, "gpushare": 1.05}
    outcomes = [_outcome(policy, slowdown) for policy, slowdown in slowdowns.items()]
    reports = [report(outcome) for outcome in outcomes]
    file = tmp_path_factory.mktemp("page") / "compare.html"
    file.write_text(render_jobs(outcomes, reports, trace="t.csv", colocation="c.jsonl", gpus=4, seed=0))
    return file


def _gpushare(*arguments: object) -> None:
    """Run a command as typed, in a process of its own: playwright's event loop runs in this one."""
    program = [sys.executable, "-c", "from gpushare.cli import main; main()"]
    done = subprocess.run([*program, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def of_prometheus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `gpushare report` writes of a real Prometheus."""
    folder = tmp_path_factory.mktemp("prometheus")
    running = prometheus_with_history(folder)
    try:
        _gpushare(
            *("report", "--prometheus", running.url, "--since", "2h", "--until", UNTIL),
            *("--points", MINUTES, "-o", folder / "page.html"),
        )
    finally:
        running.stop()
    return folder / "page.html"


@pytest.fixture(scope="module")
def of_a_snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `gpushare report` writes of a snapshot: one moment, so without plots."""
    folder = tmp_path_factory.mktemp("snapshot")
    pods = [
        pod_object("serve-7c9f8d6b5-xk2lp", "u1", gpu="GPU-0"),
        pod_object("train-5d4c-p9", "u2", gpu="GPU-0", share=50),
        pod_object("lab", "u3", namespace="research", gpu="GPU-1", share=10),
        pod_object("late", "u4", share=60),
    ]
    objects = {"settings": None, "gpunodes": [busy_node()], "pods": pods, "read_at": float(BEGIN)}
    (folder / "cluster.json").write_text(json.dumps(objects))
    _gpushare("report", "--snapshot", folder, "-o", folder / "page.html")
    return folder / "page.html"


@pytest.fixture(scope="module")
def of_jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `gpushare sim jobs --report` writes of a dozen jobs."""
    folder = tmp_path_factory.mktemp("jobs")
    data = ("--colocation", GAVEL / "pairs.csv", "--solo", GAVEL / "solo.csv", "--gpu", "p100")
    trace, page = folder / "trace.csv", folder / "page.html"
    _gpushare("sim", "trace", *data, "--jobs", 12, "--interarrival", 5, "-o", trace)
    where = ("--trace", trace, "--gpus", 3, "--policy", "mps-uncapped", "--report", page)
    _gpushare("sim", "jobs", *data, *where)
    return page


WITH_PLOTS = ["page_file", "compared", "of_prometheus", "of_jobs"]


@pytest.fixture(params=[*WITH_PLOTS, "of_a_snapshot"])
def any_page(request: pytest.FixtureRequest) -> Path:
    """The report of a cluster and the simulator's, drawn from made figures and by the commands themselves."""
    file: Path = request.getfixturevalue(request.param)
    return file


@pytest.fixture(params=WITH_PLOTS)
def plotted_page(request: pytest.FixtureRequest) -> Path:
    """Each of them that has plots."""
    file: Path = request.getfixturevalue(request.param)
    return file


@pytest.mark.parametrize("scheme", SHOWN)
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_page_opens_without_trouble_and_fits(
    browser: Browser, any_page: Path, width: int, scheme: str
) -> None:
    with looking_at(browser, any_page, width=width, scheme=scheme) as look:
        assert look.trouble == []
        assert [url for url in look.requested if not url.startswith(("file:", "data:"))] == []
        assert look.width() <= width
        smallest = look.page.evaluate(
            "Math.min(...[...document.querySelectorAll('body *')].filter(e => e.childNodes.length &&"
            " e.innerText && !['SCRIPT', 'STYLE'].includes(e.tagName))"
            ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
        )
        assert smallest >= 12  # pixels; what a phone shows has to be readable


@pytest.mark.parametrize("scheme", SHOWN)
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_axe_finds_nothing_wrong(browser: Browser, any_page: Path, width: int, scheme: str) -> None:
    with looking_at(browser, any_page, width=width, scheme=scheme) as look:
        assert look.violations() == []


def test_axe_would_find_it(browser: Browser, page_file: Path, tmp_path: Path) -> None:
    """Else the test above would prove nothing."""
    bad = tmp_path / "bad.html"
    bad.write_text(page_file.read_text().replace("--soft:#4d5866", "--soft:#d0d0d0"))
    with looking_at(browser, bad) as look:
        assert any(found.startswith("color-contrast:") for found in look.violations())


@pytest.mark.parametrize(
    ("style", "why"),
    [
        ("td.n{color:#d0d0d0}", "partially obscured by another element"),  # in columns that are pushed out of view
        ("td.n{color:#d0d0d0}", "too short"),
        ("td{background:linear-gradient(#fff,#fff)}", "due to a background gradient"),
    ],
)
def test_a_contrast_that_axe_leaves_open_would_be_found(
    browser: Browser, compared: Path, tmp_path: Path, style: str, why: str
) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(compared.read_text().replace("</style>", f"{style}</style>"))
    with looking_at(browser, bad, width=PHONE) as look:
        found = [each for each in look.violations() if each.startswith("color-contrast left open:")]
    assert any(why in each for each in found), found


def test_light_and_dark_are_two_pages(browser: Browser, page_file: Path) -> None:
    grounds = {}
    for scheme in SHOWN:
        with looking_at(browser, page_file, scheme=scheme) as look:
            grounds[scheme] = look.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert grounds == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 31)"}


def test_the_first_screen_answers(browser: Browser, page_file: Path) -> None:
    with looking_at(browser, page_file) as look:
        questions = look.page.locator("dl.answers dt").all_inner_texts()
        found = dict(zip(questions, look.page.locator("dl.answers dd").all_inner_texts(), strict=True))
        assert found["How many GPUs were in use?"].startswith("1.0 of 4.0")
        assert found["Was anyone moved away?"].startswith("2 times")
        first = look.page.locator("dl.answers").bounding_box()
        assert first is not None
        assert first["y"] < 300


def test_lines_are_drawn_in_colours_of_their_own_and_named(browser: Browser, page_file: Path) -> None:
    with looking_at(browser, page_file) as look:
        figure = look.page.locator("figure").first
        drawn = figure.locator("svg path:not(.grid)")
        boxes = drawn.evaluate_all("paths => paths.map(p => p.getBoundingClientRect().width)")
        assert len(boxes) == 4
        assert min(boxes) > 500  # they reach over the plot
        strokes = drawn.evaluate_all("paths => paths.map(p => getComputedStyle(p).stroke)")
        marks = figure.locator(".legend i").evaluate_all("is => is.map(i => getComputedStyle(i).borderTopColor)")
        assert len(set(strokes)) == 4
        assert set(strokes) == set(marks)
        assert figure.locator("svg").get_attribute("aria-label")


def _lab(colour: str) -> tuple[float, float, float]:
    """A colour such as rgb(1, 2, 3) in CIE L*a*b* (D65), where distances are about as eyes see them."""
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (int(number) / 255 for number in re.findall(r"[0-9]+", colour)[:3])
    ]
    to_xyz = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1094, 0.8728))  # white is 1, 1, 1
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (sum(part * by for part, by in zip(linear, row, strict=True)) for row in to_xyz)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", SHOWN)
def test_no_two_lines_of_a_plot_are_of_like_colours(browser: Browser, plotted_page: Path, scheme: str) -> None:
    """The blue and violet that a reader took for one were 31 apart in the light, 28 in the dark."""
    with looking_at(browser, plotted_page, scheme=scheme) as look:
        marks = look.page.locator(".legend").evaluate_all(
            "all => all.map(one => [...one.querySelectorAll('i')].map(i => getComputedStyle(i).borderTopColor))"
        )
    assert max(map(len, marks)) >= 3
    for colours in marks:
        for one, other in combinations(colours, 2):
            assert math.dist(_lab(one), _lab(other)) >= 40, (one, other)


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_no_tick_lies_on_a_plots_title(browser: Browser, plotted_page: Path, width: int) -> None:
    with looking_at(browser, plotted_page, width=width) as look:
        titles = look.page.locator("figcaption").evaluate_all(
            "all => all.map(t => t.getBoundingClientRect().bottom)"
        )
        tops = look.page.locator("figure .y").evaluate_all(
            "all => all.map(y => Math.min(...[...y.children].map(tick => tick.getBoundingClientRect().top)))"
        )
    assert tops
    assert all(top >= title for title, top in zip(titles, tops, strict=True))


def test_ours_the_best_and_the_usual_policies_stand_out_and_the_others_are_grey(
    browser: Browser, compared: Path
) -> None:
    with looking_at(browser, compared) as look:
        figure = look.page.locator("figure").first
        strokes = figure.locator("svg path:not(.grid)").evaluate_all(
            "ps => ps.map(p => getComputedStyle(p).stroke)"
        )
        grey = "rgb(154, 164, 177)"
        assert strokes[:2] == [grey, grey]  # behind the others
        assert len({*strokes[2:]} - {grey}) == len(strokes[2:]) == 4
        entries = figure.locator(".legend li").all_inner_texts()
        assert [entry.strip() for entry in entries] == [
            "fifo",
            "time-slicing",
            "gavel",
            "gpushare",
            "others: kace, mig",
        ]


def test_a_table_sorts_by_the_head_that_is_pressed(browser: Browser, page_file: Path) -> None:
    with looking_at(browser, page_file) as look:
        table = look.page.locator("table", has_text="Showback by workload")
        head = table.locator("th", has_text="given, GPU-hours")

        def given() -> list[float]:
            at = table.locator("th").all_inner_texts().index(head.inner_text())
            return [float(row) for row in table.locator(f"tbody td:nth-child({at + 1})").all_inner_texts()]

        head.locator("button").click()
        assert given() == sorted(given(), reverse=True)
        assert head.get_attribute("aria-sort") == "descending"
        head.locator("button").press("Enter")  # by keyboard too
        assert given() == sorted(given())
        assert len(given()) == 3
        assert head.get_attribute("aria-sort") == "ascending"


def test_every_table_of_the_simulators_page_sorts_by_every_head(browser: Browser, compared: Path) -> None:
    def as_number(word: str, unknown: float) -> float:
        return unknown if word == "–" else float(word.rstrip("%"))

    with looking_at(browser, compared) as look:
        tables = look.page.locator("table")
        assert tables.locator("caption").all_inner_texts() == ["Figures of every policy", "Workloads"]
        for table in tables.all():
            rows = table.locator("tbody tr")
            before = sorted(rows.all_inner_texts())
            for column, head in enumerate(table.locator("th").all(), 1):
                for order, last in (("descending", -math.inf), ("ascending", math.inf)):
                    head.locator("button").click()
                    assert head.get_attribute("aria-sort") == order
                    assert table.locator("th[aria-sort]").count() == 1
                    words = rows.locator(f"td:nth-child({column})").all_inner_texts()
                    found = words if column == 1 else [as_number(word, last) for word in words]
                    assert found == sorted(found, reverse=order == "descending"), head.inner_text()
            assert sorted(rows.all_inner_texts()) == before, "whole rows were moved"


def test_names_are_words_and_no_markup(browser: Browser, page_file: Path) -> None:
    with looking_at(browser, page_file) as look:
        assert "shop/<script>alert(1)</script>" in look.page.locator("body").inner_text()


def test_the_page_of_a_snapshot_has_its_tables_and_no_plot(browser: Browser, of_a_snapshot: Path) -> None:
    with looking_at(browser, of_a_snapshot) as look:
        assert look.page.locator("figure, svg").count() == 0
        text = look.page.locator("body").inner_text()
        assert "A snapshot is one moment" in text
        assert "shop/serve-7c9f8d6b5-xk2lp" in text


def test_it_prints_light_with_its_plots_whole_and_no_wider_than_the_paper(
    browser: Browser, any_page: Path, request: pytest.FixtureRequest
) -> None:
    """A page that is printed cannot be pushed sideways: what is wider than it is lost."""
    with looking_at(browser, any_page, width=A4_PRINTED, scheme="dark") as look:
        look.page.emulate_media(media="print")
        assert look.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        breaks = look.page.locator("figure").evaluate_all("fs => fs.map(f => getComputedStyle(f).breakInside)")
        of_plots = {"figure", ".plot"} if breaks else set()
        assert set(breaks) == ({"avoid"} if of_plots else set())
        assert bool(of_plots) is ("of_a_snapshot" not in request.node.name)
        assert look.width() <= A4_PRINTED
        for what in {".wide", "table"} | of_plots:
            widths = look.page.locator(what).evaluate_all(
                "found => found.map(e => [e.scrollWidth, e.clientWidth])"
            )
            assert widths
            assert [(needed, visible) for needed, visible in widths if needed > visible] == [], what
        printed = look.page.pdf(format="A4")
    assert printed.startswith(b"%PDF")
    assert len(printed) > 10_000
