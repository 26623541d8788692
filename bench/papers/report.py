"""Tables and figure of what was measured; a paper's own numbers only where a source of them is at hand."""

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.papers.collecting import chosen_caps, file_of
from bench.papers.plan import Arrangement, Part, SetPlan, set_plans
from bench.papers.programs import BATCHES, CAPS, CROWD, CROWDS, DIFFERENT, SEVEN, batched, copy_of
from bench.papers.turnaround import ALONE, FILE, PAIRS, WAYS, figures, is_together
from bench.sharing.records import Record, Records
from gpushare.research.calibration.plan import Cell
from gpushare.research.dataset import Dataset, DatasetError, Run, parse

TABLE: Final = "papers.md"
FIGURE: Final = "papers.png"
NO_NUMBERS: Final = (
    "Neither paper's own numbers stand here: no source of them is at hand. The runs are of the same kind, on "
    "programs of ours."
)

Progress = tuple[float, ...]


def write_report(directory: Path) -> str:
    """Write tables and figure beside the raw results; return the tables."""
    data = read(directory)
    records = Records.open(directory, FILE)
    text = "\n".join([*_where(records), *_pan(directory, data), *_gilman(records)]) + "\n"
    (directory / TABLE).write_text(text)
    if data:
        with contextlib.suppress(ModuleNotFoundError):  # a GPU machine may lack matplotlib; the tables are there
            draw(directory, data, records)
    return text


def read(directory: Path) -> dict[Part, Dataset]:
    """Return the parts that hold something."""
    found = {}
    for part in Part:
        try:
            found[part] = parse(file_of(directory, part).read_bytes().splitlines())
        except (OSError, DatasetError):
            continue
    return found


def progress_of(data: Dataset | None, cells: Sequence[Cell]) -> Progress | None:
    """Return each one's mean progress over the runs of just these, relative to alone at 100%; None of none."""
    if data is None:
        return None
    wanted = sorted(cells)
    rows = []
    for run, progress in data.shared_runs():
        each = {(t.workload, t.thread_percentage): p for t, p in zip(run.tenants, progress, strict=True)}
        if sorted(each) == wanted:
            rows.append(tuple(each[cell] for cell in cells))
    return tuple(statistics.fmean(column) for column in zip(*rows, strict=True)) if rows else None


def arranged(data: Mapping[Part, Dataset], plan: SetPlan, arrangement: Arrangement) -> Progress | None:
    """Return the progress of a set under an arrangement."""
    if arrangement is Arrangement.FIFO:
        return (1.0 / len(plan.tenants),) * len(plan.tenants)  # of the time that all take, each has its part
    if arrangement is Arrangement.WITHOUT_MPS:
        return progress_of(data.get(Part.SLICING), plan.cells(Arrangement.UNCAPPED))
    part = Part.TOGETHER if "together" in plan.kind else Part.PAIRS
    return progress_of(data.get(part), plan.cells(arrangement)) if arrangement in plan.caps else None


def _where(records: Records) -> list[str]:
    sessions = list(records.of("session"))
    if not sessions:
        return ["Nothing was measured yet.", ""]
    first, last = sessions[0], sessions[-1]
    what = f"{first['gpu']}{' (simulated: the twin and made-up runs)' if first['simulated'] else ''}"
    commits = ", ".join(sorted({each["commit"] for each in sessions}))
    return [f"{what}, driver {last['driver']}, {len(sessions)} sessions, commits {commits}. {NO_NUMBERS}", ""]


def _pan(directory: Path, data: Mapping[Part, Dataset]) -> list[str]:
    plans = set_plans(chosen_caps(directory))
    lines = ["## Cautiously aggressive GPU space sharing (Pan 2021)", "", *_pipes(data.get(Part.ALONE))]
    arrangements = list(Arrangement)
    lines += [
        "Progress relative to alone on the whole GPU: the sum, and each one's. FIFO is 1 in sum by definition.",
        "",
        "| set | | " + " | ".join(each.value for each in arrangements) + " | caps of ours |",
        "|---" * (len(arrangements) + 3) + "|",
    ]
    for plan in plans:
        ours = "-".join(map(str, plan.caps[Arrangement.OURS])) if Arrangement.OURS in plan.caps else ""
        cells = [_sum_text(arranged(data, plan, each)) for each in arrangements]
        name = " + ".join(plan.tenants) if len(plan.tenants) == 2 else f"{len(plan.tenants)} of the seven"
        lines.append(f"| {name} | {plan.kind} | {' | '.join(cells)} | {ours} |")
    lines += ["", *_crowd(data.get(Part.CROWD)), *_batches(data.get(Part.BATCHES))]
    return lines


def _pipes(data: Dataset | None) -> list[str]:
    heads = (
        "SMs",
        "occupancy",
        "fp16 and its tensor pipe",
        "fp32",
        "fp64 and its tensor pipe",
        "any tensor",
        "DRAM",
    )
    lines = [f"| program alone, % | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in SEVEN:
        counters = data.solo_counters(name) if data is not None else None
        if counters is None:
            continue
        pipes = counters.pipes()
        values = [counters.sm_util, counters.sm_occupancy, pipes.get("fp16"), pipes.get("fp32")]
        values += [pipes.get("fp64"), counters.any_tensor_util, pipes.get("dram")]
        lines.append(f"| {name} | {' | '.join('' if v is None else f'{100 * v:.1f}' for v in values)} |")
    return [*lines, ""]


def _crowd(data: Dataset | None) -> list[str]:
    """Tell rates, not only what they are of the lone process's: one that waits for its host is a poor measure."""
    lines = [
        f"| processes of {CROWD} | iterations/s, all | each: least, mean, most | GPU used, % | sum / one alone |",
        "|---" * 5 + "|",
    ]
    for count in CROWDS:
        names = [copy_of(CROWD, number) for number in range(count)]
        alone = max((run.iterations_per_s[0] for run in _runs_of(data, names[:1])), default=None)
        for run in _runs_of(data, names):
            rates, busy = run.iterations_per_s, run.counters.graphics_util
            each = f"{min(rates):.0f}, {statistics.fmean(rates):.0f}, {max(rates):.0f}"
            ratio = f"{sum(rates) / alone:.2f}" if alone else ""
            shown = "" if busy is None else f"{100 * busy:.0f}"
            lines.append(f"| {count} | {sum(rates):,.0f} | {each} | {shown} | {ratio} |")
    return [*lines, ""]


def _runs_of(data: Dataset | None, names: Sequence[str]) -> list[Run]:
    """Return the runs of just these: copies of one program have no solo run each."""
    wanted = sorted(names)
    runs = data.runs if data is not None else ()
    return [run for run in runs if sorted(tenant.workload for tenant in run.tenants) == wanted]


def _batches(data: Dataset | None) -> list[str]:
    lines = [
        f"| slowdown alone at a thread percentage | {' | '.join(f'{cap}%' for cap in CAPS)} |",
        "|---" * (len(CAPS) + 1) + "|",
    ]
    for program, sizes in BATCHES.items():
        for batch in sizes:
            curve = data.cap_curve(batched(program, batch)) if data is not None else {}
            cells = [f"{1 / max(curve[cap], 1e-9):.2f}" if cap in curve else "" for cap in CAPS]
            lines.append(f"| {program}, batch {batch} | {' | '.join(cells)} |")
    return [*lines, ""]


def _gilman(records: Records) -> list[str]:
    lines = [
        "## Concurrency mechanisms under deep learning workloads (Gilman and Walls 2021)",
        "",
        "Turnaround of the inference's requests (Poisson arrivals at half of what it answers alone), ms; what the",
        "training makes of its rate alone; the device's SM activity while both work.",
        "",
        "| inference + training | way | mean | deviation | p50 | p99 | p99 / alone | training | SM activity |",
        "|---" * 9 + "|",
    ]
    made = list(records.of("run"))
    runs = [each for each in made if is_together(each)]
    for inference, training in PAIRS:
        for way in (ALONE, *WAYS):
            beside = "" if way is ALONE else training
            found = [r for r in runs if (r["way"], r["inference"], r["training"]) == (way.name, inference, beside)]
            lines += _turnaround_row(runs, found, (inference, training), way.title)
    good = {each["name"] for each in runs}
    if left_out := [each for each in made if each["name"] not in good]:
        names = sorted({way.title for way in WAYS for each in left_out if each["way"] == way.name})
        lines += ["", f"Left out: {len(left_out)} runs whose programs did not meet ({', '.join(names)})."]
    return [*lines, ""]


def _turnaround_row(
    runs: Sequence[Mapping[str, object]], found: Sequence[dict[str, object]], pair: tuple[str, str], title: str
) -> list[str]:
    alone = _mean([f for r in runs if (r["way"], r["inference"]) == ("alone", pair[0]) if (f := figures(dict(r)))])
    here = _mean([f for r in found if (f := figures(r))])
    if here is None:
        return []
    rates = [float(r["training_rate"]) for r in found if isinstance(r["training_rate"], float)]
    whole = [
        float(r["training_rate"])
        for r in runs
        if (r["way"], r["training"]) == ("alone", pair[1]) and isinstance(r["training_rate"], float)
    ]
    made = f"{statistics.fmean(rates) / statistics.fmean(whole):.2f}" if rates and whole else ""
    seen = [value for r in found if (value := _activity(r)) is not None]
    ratio = f"{here['p99'] / alone['p99']:.2f}" if alone else ""
    cells = [f"{here[name]:.2f}" for name in ("mean", "deviation", "p50", "p99")]
    share = f"{statistics.fmean(seen):.2f}" if seen else ""
    return [f"| {pair[0]} + {pair[1]} | {title} | {' | '.join(cells)} | {ratio} | {made} | {share} |"]


def _activity(line: Record) -> float | None:
    """Return the SM activity while all worked; None of a run whose counters' window was not chosen by that."""
    device = line["device"]
    return device.get("sm_util") if isinstance(device, dict) and "together_s" in line else None


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]} if rows else None


def _sum_text(progress: Progress | None) -> str:
    if progress is None:
        return ""
    return f"{sum(progress):.2f} ({', '.join(f'{each:.2f}' for each in progress)})"


def draw(directory: Path, data: Mapping[Part, Dataset], records: Records) -> None:
    """Draw sums by arrangement, pairs' kinds, thread percentages and turnaround."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    plans = set_plans(chosen_caps(directory))
    figure, axes = plt.subplots(1, 3, figsize=(18, 5))
    shown = list(Arrangement)
    groups: Sequence[tuple[str, Callable[[SetPlan], bool]]] = (
        ("different pipes", lambda plan: plan.tenants in DIFFERENT),
        ("same pipe", lambda plan: plan.kind == "same pipe"),
        ("3 to 7 together", lambda plan: len(plan.tenants) > 2),
    )
    for place, (_, belongs) in enumerate(groups):
        for at, arrangement in enumerate(shown):
            found = [p for plan in plans if belongs(plan) and (p := arranged(data, plan, arrangement))]
            if found:
                height = statistics.fmean(sum(each) for each in found)
                label = arrangement.value if place == 0 or arrangement is Arrangement.EQUAL else None
                axes[0].bar(place + 0.14 * (at - 2.5), height, width=0.13, color=f"C{at}", label=label)
    axes[0].set_xticks(range(len(groups)), [name for name, _ in groups])
    axes[0].set_title("summed progress, mean of the sets")
    axes[0].margins(y=0.3)  # room for the legend above the bars
    axes[0].legend(fontsize=8, loc="upper left", ncol=2)
    for program, sizes in BATCHES.items():
        for batch in sizes:
            curve = data[Part.BATCHES].cap_curve(batched(program, batch)) if Part.BATCHES in data else {}
            caps = sorted(curve)
            axes[1].plot(
                caps, [1 / max(curve[cap], 1e-9) for cap in caps], "o-", label=f"{program}, batch {batch}"
            )
    axes[1].set(xlabel="thread percentage", title="slowdown alone")
    axes[1].legend(fontsize=8)
    runs = [each for each in records.of("run") if is_together(each)]
    for at, way in enumerate((ALONE, *WAYS)):
        for place, (inference, _) in enumerate(PAIRS):
            rows = [f for r in runs if (r["way"], r["inference"]) == (way.name, inference) if (f := figures(r))]
            here = _mean(rows)
            if here is not None:
                x = place + 0.15 * (at - 2)
                label = way.title if place == 0 else None
                axes[2].bar(x, here["mean"], width=0.14, yerr=here["deviation"], color=f"C{at}", label=label)
                axes[2].plot([x], [here["p99"]], "kv", markersize=4)
    axes[2].set_xticks(range(len(PAIRS)), [inference for inference, _ in PAIRS], fontsize=8)
    axes[2].set(
        yscale="log", xlim=(-0.5, len(PAIRS) - 0.5), title="turnaround, ms: mean, deviation, p99 (triangle)"
    )
    if runs:
        axes[2].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(directory / FIGURE, dpi=80)
    plt.close(figure)
