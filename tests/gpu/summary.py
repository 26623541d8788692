"""The suites' JSON files as the tables of docs/measurements/agent-h200.md.

    python3 tests/gpu/summary.py DIR                                           # prints them
    python3 tests/gpu/summary.py DIR --write docs/measurements/agent-h200.md   # puts them in place there

A table whose JSON file is not in DIR stays as it is.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PIPES = ("fp16", "fp32", "fp64", "int8", "integer", "dram")
THREADS = 6  # of one name whose own times are shown, the dearest
MAPPINGS = 12
MEMORY_SECONDS = 60.0  # between two rows of the agent's memory


def profile_lines(profiles: Sequence[dict[str, Any]]) -> list[str]:
    """One row a program; the figures are means over the time in use, where the file has it."""
    if not profiles:
        return []
    head = ["program", "in use, of s", "NVML", *PIPES, "SM activity"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for each in profiles:
        if "error" in each:
            lines.append(f"| {each['name']} | failed" + " |" * len(head[1:]))
            continue
        window = f"{each['active_seconds']:.1f} of" if "active_seconds" in each else "all of"
        figures = [each["nvml_utilization"], *(each["pipes"].get(pipe) for pipe in PIPES), each["sm_activity"]]
        cells = " | ".join("-" if value is None else f"{value:.1%}" for value in figures)
        lines.append(f"| {each['name']} | {window} {each['seconds']:.1f} | {cells} |")
    return lines


def agent_lines(agent: dict[str, Any]) -> list[str]:
    """The agent's cost, its memory over time and by mapping, and inferred beside measured progress."""
    if "cpu_percent_of_one_core" not in agent:
        return [str(agent["error"])] if "error" in agent else []
    lines = [
        f"Agent with {agent.get('tenants', 'its')} tenants over {agent['minutes']:.1f} minutes, at most",
        f"{agent['resident_mib_max']:.1f} MiB resident, {agent['cpu_percent_of_one_core']:.2f}% of one core.",
    ]
    if agent.get("memory"):
        lines += [
            f"Python {agent['python']}, {agent['cores']} cores, huge pages: {agent['huge_pages']}.",
            "",
            "| seconds | resident MiB | proportional | anonymous | in huge pages | threads |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {m['seconds']:.0f} | {m['Rss']} | {m['Pss']} | {m['Anonymous']} | {m['AnonHugePages']} "
            f"| {m['threads']:.0f} |"
            for m in _thinned(agent["memory"])
        ]
        lines += ["", "| mapping | number | resident MiB | anonymous |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {n:.0f} | {rss} | {anon} |" for name, n, rss, anon in agent.get("mappings", [])[:MAPPINGS]
        ]
        if agent.get("thread_times"):
            lines += ["", "| threads | ms of a core, a second | wake-ups a second | each |", "|---|---|---|---|"]
            lines += [
                f"| {len(row['each_ms'])} {name} | {row['ms']} | {row['switches']} | "
                f"{', '.join(map(str, row['each_ms'][:THREADS]))} |"
                for name, row in agent["thread_times"].items()
            ]
        if agent.get("threads"):
            lines += ["", "Threads: " + ", ".join(f"{n} {name}" for name, n in agent["threads"].items()) + "."]
        lines += ["", f"Modules loaded beside the standard library: {', '.join(agent.get('modules', []))}."]
    both = {
        program: each
        for program, each in agent.get("progress", {}).items()
        if each["inferred"] is not None and each["measured"] is not None
    }
    if both:
        sd = {
            t["pod"].replace("-", "_"): t.get("progressError")
            for g in agent.get("gpunode", [])
            for t in g["tenants"]
        }
        lines += ["", "| tenant | progress inferred | its stated sd | measured |", "|---|---|---|---|"]
        lines += [
            f"| {program} | {each['inferred']:.2f} | {sd.get(program) or '-'} | {each['measured']:.2f} |"
            for program, each in both.items()
        ]
    return lines


def _thinned(memory: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """The first and the last row, and one about every MEMORY_SECONDS between."""
    kept = list(memory[:1])
    for row in memory[1:-1]:
        if row["seconds"] - kept[-1]["seconds"] >= MEMORY_SECONDS:
            kept.append(row)
    return [*kept, *memory[1:][-1:]]


def progress_lines(progress: dict[str, Any]) -> list[str]:
    """Error of the inferred progress by number of tenants."""
    if "scores" not in progress:
        return []
    sets, programs = len(progress["sets"]), len(progress["programs"])
    lines = [
        f"{sets} sets of {programs} programs, {progress['set_seconds']:.0f} s each, seed {progress['seed']}.",
        "",
        "| tenants | mean absolute error | bar | median | 90th percentile | tenants scored | unknown |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, score in progress["scores"].items():
        figures = " | ".join(f"{score[key]:.3f}" if key in score else "-" for key in ("median", "p90"))
        error = f"{score['mae']:.3f}" if "mae" in score else "-"
        lines.append(f"| {size} | {error} | {score['bar']} | {figures} | {score['n']} | {score['unknown']} |")
    return lines


def fault_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """gate_suite's steps: what held, and the run of faults with the agent beside it."""
    lines = ["| step | held | seconds | what was seen |", "|---|---|---|---|"]
    for row in rows:
        seen = row.get("error") or json.dumps(row.get("details", ""), default=str)
        lines.append(f"| {row['step']} | {'yes' if row['ok'] else 'no'} | {row['seconds']} | {seen[:400]} |")
    return lines


def put(text: str, section: str, lines: Sequence[str]) -> str:
    """The text with what stands between a section's two marks replaced."""
    body = "\n".join(lines)
    marks = rf"(<!-- {section} -->\n).*?(<!-- end of {section} -->)"
    found, count = re.subn(marks, lambda m: f"{m[1]}{body}\n{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{count} places for {section}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--write", type=Path)
    read = parser.parse_args()
    for name, lines_of in (
        ("profiles", profile_lines),
        ("agent", agent_lines),
        ("progress", progress_lines),
        ("gate_suite", fault_lines),
    ):
        path = read.directory / f"{name}.json"
        if not path.exists():
            continue
        lines = lines_of(json.loads(path.read_text()))
        if read.write:
            read.write.write_text(put(read.write.read_text(), name, lines))
        else:
            print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    main()
