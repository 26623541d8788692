"""Write the table of a chaos run or a soak, for docs/measurements/hostile.md."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.chaos.auditor import Rule
from bench.chaos.plan import TRAITS, FaultKind
from bench.chaos.run import SETTLED_SECONDS, FaultOutcome
from bench.chaos.upgrade import UpgradeStage
from bench.chaos.usage import Growth

CHAOS_MARKS: Final = ("<!-- chaos: written by hack/chaos -->", "<!-- end of chaos -->")
SOAK_MARKS: Final = ("<!-- soak: written by hack/chaos -->", "<!-- end of soak -->")
UPGRADE_MARKS: Final = ("<!-- upgrade: written by hack/chaos -->", "<!-- end of upgrade -->")


def chaos_table(outcomes: Sequence[FaultOutcome], heading: str) -> str:
    """Return the Markdown of a run: a sentence with the counts, a row for each kind, and every broken rule."""
    made = [one for one in outcomes if not one.skipped]
    broken = Counter(rule for one in made for rule in one.rules)
    ended = sum(len(one.ended) for one in made)
    times = [one.settled_seconds for one in made if one.settled_seconds is not None]
    freeze = max((one.longest_freeze_seconds for one in made), default=0.0)
    watched = []
    if gaps := [one.longest_gap_seconds for one in made if one.longest_gap_seconds is not None]:
        unfound = sum(one.unwatched for one in made)
        watched = [f"Without a look at the freezers: {max(gaps):.1f} s at most; freezers not found: {unfound}."]
    waited = []
    if by_design := [one.waiting_by_design for one in made if one.waiting_by_design is not None]:
        beside = sum(count > 0 for count in by_design)
        most, of = f"{max(by_design)} at most", f"some after {beside} of {len(by_design)} faults"
        waited = [f"Pods that a promise kept waiting when a fault counted as settled: {most}, {of}."]
    full = _how_full(made)
    settled = f"a median of {_seconds(times, statistics.median)} s, at most {_seconds(times, max)} s"
    lines = [
        f"{heading}: {len(made)} faults.",
        "",
        f"Broken: {', '.join(f'{broken[rule]} {rule}' for rule in Rule)}.",
        "",
        f"Settled after {settled} (bar: {SETTLED_SECONDS:.0f} s).",
        f"Tenants that the faults themselves ended: {ended}.",
        f"The longest that a pod was seen frozen: {freeze:.1f} s.",
        *watched,
        *waited,
        *full,
        "",
        "| fault | times | ends by itself | tenants ended | settled: median, s | longest, s | broken |",
        "|---|---|---|---|---|---|---|",
    ]
    by_kind: dict[str, list[FaultOutcome]] = defaultdict(list)
    for one in made:
        by_kind[one.kind].append(one)
    for kind in FaultKind:
        if not (found := by_kind.get(kind)):
            continue
        took = [one.settled_seconds for one in found if one.settled_seconds is not None]
        gone = sum(len(one.ended) for one in found) or ""
        lines.append(
            f"| {TRAITS[kind].what} | {len(found)} | {TRAITS[kind].ends} | {gone} "
            f"| {_seconds(took, statistics.median)} | {_seconds(took, max)} "
            f"| {sum(bool(one.rules) for one in found) or ''} |"
        )
    if any(one.violations for one in made):
        lines += ["", "What was broken:", ""]
        lines += [line for one in made for line in _broken(one)]
    if skipped := Counter(f"{one.kind}: {one.skipped}" for one in outcomes if one.skipped):
        lines += ["", "Could not be made, and not counted:", ""]
        lines += [f"- {text} ({count})" for text, count in skipped.most_common(8)]
    return "\n".join(lines)


def soak_table(growths: Sequence[Growth], heading: str) -> str:
    """Return the Markdown of a soak: a row for each part."""
    lines = [
        f"{heading}.",
        "",
        "| part | processes | memory at first, MiB | at last, MiB | change | descriptors | threads | flat |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.role} | {one.processes} | {one.memory_first_mib:.1f} | {one.memory_last_mib:.1f} "
        f"| {one.memory_ratio - 1:+.1%} | {one.descriptors_first:.0f} to {one.descriptors_last:.0f} "
        f"| {one.threads_first:.0f} to {one.threads_last:.0f} | {'yes' if one.is_flat else 'no'} |"
        for one in growths
    ]
    return "\n".join(lines)


def upgrade_table(stages: Sequence[UpgradeStage], heading: str) -> str:
    """Return the Markdown of an upgrade under churn: a row for each stage, and every broken rule."""
    lines = [
        f"{heading}.",
        "",
        "| stage | seconds | pods created | gone | settled after, s | rules broken |",
        "|---|---|---|---|---|---|",
    ]
    for one in stages:
        settled = "not" if one.settled_seconds is None else f"{one.settled_seconds:.1f}"
        broken = Counter(text.partition(": ")[0] for text in one.violations)
        told = ", ".join(f"{count} {rule}" for rule, count in broken.items())
        lines.append(
            f"| {one.name} | {one.seconds:.0f} | {one.created} | {one.deleted} | {settled} | {told or 'none'} |"
        )
    broken_lines = [f"- {one.name}: {text[:300]}" for one in stages for text in one.violations]
    broken_lines += [
        f"- {one.name}, not settled: {'; '.join(one.waited_for)[:300]}" for one in stages if one.waited_for
    ]
    return "\n".join([*lines, *(["", *broken_lines] if broken_lines else [])])


def write(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace what stands between two marks of a page; add them at its end where they are missing."""
    before, mark, rest = page.read_text().partition(marks[0])
    after = rest.partition(marks[1])[2] if mark else "\n"
    page.write_text(f"{before if mark else before.rstrip() + chr(10) * 2}{marks[0]}\n{text}\n{marks[1]}{after}")


def _how_full(made: Sequence[FaultOutcome]) -> list[str]:
    """Return how full the GPUs were when faults counted as settled; nothing of older runs, which did not tell."""
    parts = []
    for name, what in (
        ("shares_ratio", "shares given"),
        ("memory_ratio", "memory given"),
        ("used_ratio", "memory allocated by clients"),
    ):
        if found := [value for one in made if (value := getattr(one, name)) is not None]:
            parts.append(f"{what} {statistics.median(found):.0%} in the median, {min(found):.0%} at least")
    if not parts:
        return []
    waiting = [one.waiting_for_room for one in made if one.waiting_for_room is not None]
    most = max(one.clients for one in made if one.clients is not None)
    parts.append(f"at most {most} clients of one GPU")
    return [
        f"How full the GPUs were when a fault counted as settled: {'; '.join(parts)}.",
        f"Pods that waited for room then: {statistics.median(waiting):.0f} in the median, {max(waiting)} at most.",
    ]


def _broken(one: FaultOutcome) -> list[str]:
    """Return a line for each rule that a fault broke, with the first of what was seen."""
    lines = []
    for rule, count in Counter(one.rules).items():
        first = next(text for text in one.violations if text.startswith(f"{rule}: "))
        more = f" (and {count - 1} more)" if count > 1 else ""
        lines.append(f"- fault {one.number} ({one.kind}): {first[:300]}{more}")
    return lines


def _seconds(times: Sequence[float], of: object) -> str:
    return f"{of(times):.1f}" if times and callable(of) else "-"
