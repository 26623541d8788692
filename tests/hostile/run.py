"""Run the test of every threat of docs/security.md and print the table of results.

    python tests/hostile/run.py [--write docs/measurements/hostile.md]
    GPUSHARE_REPORTS=DIR make test; python tests/hostile/run.py --reports DIR --write docs/measurements/hostile.md

Tests that need a cluster skip without one (KUBECONFIG, or hack/cluster up), and the table says so. With --reports
the results are those of a whole run of the suite, on the commit that is checked out.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from threats import ROOT, Threat, threats

BEGIN, END = "<!-- threats: written by tests/hostile/run.py -->", "<!-- end of threats -->"


def main() -> int:
    """Return how many threats are not known to be held; a test that did not run shows nothing."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--write", type=Path, help="replace the table in this page")
    parser.add_argument("--reports", type=Path, metavar="DIR", help="run nothing: read the JUnit reports in DIR")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.reports is None:
            report = Path(directory) / "junit.xml"
            ids = [threat.node_id for threat in threats()]
            subprocess.run(
                [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *ids], cwd=ROOT, check=False
            )
        cases = cases_of(options.reports or Path(directory))
    rows = [(threat, *result(threat, cases)) for threat in threats()]
    text = table(rows)
    print(text)
    if options.write:
        page = options.write.read_text()
        before, _, rest = page.partition(BEGIN)
        options.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return sum(outcome != "held" for _, outcome, _, _ in rows)


def cases_of(directory: Path) -> list[ET.Element]:
    """Return the test cases of all JUnit reports in a directory.

    Raises:
        SystemExit: it has none.
    """
    reports = sorted(directory.glob("*.xml"))
    if not reports:
        raise SystemExit(f"no JUnit reports (*.xml) in {directory}")
    return [case for report in reports for case in ET.parse(report).getroot().iter("testcase")]


def result(threat: Threat, cases: list[ET.Element]) -> tuple[str, int, float]:
    """Return held, not run, run in part or broken; how many cases of its test ran, and their seconds."""
    module = threat.path.removesuffix(".py").replace("/", ".")
    *classes, name = threat.test.split("::")
    where = ".".join((module, *classes))
    own = [
        case for case in cases if case.get("classname") == where and (case.get("name") or "").split("[")[0] == name
    ]
    ran = [case for case in own if case.find("skipped") is None]
    if not ran:
        return "not run", 0, 0.0
    is_broken = any(case.find(kind) is not None for case in ran for kind in ("failure", "error"))
    outcome = "broken" if is_broken else "held" if len(ran) == len(own) else "run in part"
    return outcome, len(ran), sum(float(case.get("time") or 0) for case in ran)


def table(rows: list[tuple[Threat, str, int, float]]) -> str:
    """Return the table as Markdown, with what it was run on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    count = {
        kind: sum(outcome == kind for _, outcome, _, _ in rows)
        for kind in ("held", "broken", "run in part", "not run")
    }
    machine = (
        f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    )
    in_pods = sum(threat.is_in_pod and outcome != "not run" for threat, outcome, _, _ in rows)
    summary = f"{count['held']} of {len(rows)} held, " + ", ".join(
        f"{count[kind]} {kind}"
        for kind in ("broken", "run in part", "not run")
        if count[kind] or kind != "run in part"
    )
    summary += f"; {in_pods} of these were tried in pods on a kubelet"
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, {machine}: {summary}.",
        "",
        "| row | threat | result | cases | seconds |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {threat.number or ''} | {threat.what} | {outcome} | {cases or ''} | {seconds:.1f} |"
        for threat, outcome, cases, seconds in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
