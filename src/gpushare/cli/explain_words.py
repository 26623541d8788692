"""The text of `gpushare explain`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from gpushare.cli.columns import Column, percent, ratio, show, whole_percent
from gpushare.cli.console import out
from gpushare.cli.targets import PodTarget, figures_of, reported_target, target_line
from gpushare.core.api import PodView
from gpushare.core.control import is_kept
from gpushare.core.placement import (
    GPU_MILLI,
    ExplainedGpu,
    ExplainedTenant,
    Explanation,
    Happening,
    KeptGpus,
    Placement,
    PlacementRequest,
    PlaceStanding,
    PodAccount,
)

SHOWN_REASONS: Final = 5  # -o json has all
SHOWN_EVENTS: Final = 12


@dataclass(frozen=True, slots=True)
class PodFacts:
    """Facts about one pod that decisions do not depend on.

    Attributes:
        waits_for: why it is not bound yet, as kube-scheduler or its gates say; empty once it is.
        target: its own target; None if it names none.
    """

    view: PodView
    gpu_names: Mapping[str, str]
    waits_for: str
    target: PodTarget | None = None


def headline(found: PodAccount, facts: PodFacts) -> str:
    """Say what the pod requests and where it is."""
    request, pod = found.request, f"Pod {found.request.pod_uid}"
    asks = f"{pod} asks for {_asked(request)}, class {request.job_class}"
    placed = found.placed
    if placed is None:
        return f"{asks}. It waits."
    cap = f", at most {placed.thread_percentage}% of the threads" if placed.thread_percentage else ""
    since = f" since {facts.view.decision.decided_at}" if facts.view.decision is not None else ""
    return f"{asks}. It is on {_gpu_list(placed, facts)}{since}, with {placed.memory_mib} MiB{cap}."


def why_there(found: Explanation, facts: PodFacts) -> list[str]:
    """Say how its place compares with the present decision."""
    fits = f"Of {_nodes(found.nodes)} {found.fits_on} {'fits' if found.fits_on == 1 else 'fit'}"
    how = f'(room, and every promise kept as far as it is known; policy "{found.policy}")'
    again = f"on {_gpu_list(found.now, facts)}" if isinstance(found.now, Placement) else str(found.now)
    now = again if isinstance(found.now, Placement) else f"refused: {again}"
    match found.standing:
        case PlaceStanding.BEST:
            return [f"{fits} {how}, and none ranks above its own."]
        case PlaceStanding.BETTER_ELSEWHERE:
            return [f"{fits} {how}; {found.better} would rank higher now. Nobody is moved only for that."]
        case PlaceStanding.NOT_NOW:
            return [f"{fits} {how}, its own is not among them: asked again now, it would be {now}."]
        case PlaceStanding.FITS:
            lines = [f"{fits} {how}: asked now, it would be {now}."]
        case PlaceStanding.WAITS:
            lines = [f"{again[:1].upper()}{again[1:]}."]
            if found.kept is not None:
                lines.append(_kept(found.kept, facts))
    return [*lines, *kubernetes_says(facts)]


def kubernetes_says(facts: PodFacts) -> list[str]:
    """Say why a pod waits, in kube-scheduler's words; nothing once it is bound."""
    return [f"Kubernetes says: {facts.waits_for}"] if facts.waits_for else []


def _kept(kept: KeptGpus, facts: PodFacts) -> str:
    """Say which GPUs are kept for a pod that has waited long, or is nominated to their node."""
    gpus = ", ".join(facts.gpu_names.get(uuid, uuid) for uuid in kept.gpu_uuids)
    leaving = ", ".join(sorted(kept.leaving))
    until = (
        f"until {leaving} {'has' if len(kept.leaving) == 1 else 'have'} left" if leaving else "for its next try"
    )
    others = "pods of no higher priority" if kept.is_nominated else "younger pods"
    return f"{gpus} is kept for it {until}: {others} that would delay it go elsewhere."


def verdicts(gpu: ExplainedGpu) -> list[str]:
    """Say what the table cannot show about one GPU's tenants."""
    lines = []
    missed = {
        each.pod: target for each in gpu.tenants if (target := _target(each)) is not None and target.is_missed
    }
    unknown = [each.pod for each in gpu.tenants if each.is_known is False]
    if unknown:
        lines.append(f"No profile yet: {', '.join(unknown)}; nothing is predicted, shares alone are counted.")
    phased = [each.pod for each in gpu.tenants if each.phases]
    if phased:
        work = "kinds of work in turn; promised and predicted is what the worst of them leaves."
        lines.append(f"{', '.join(phased)}: several {work}")
    for each in gpu.tenants:
        if each.seen is not None and is_kept(each.seen) is False:
            lines.append(
                f"{each.pod} makes {each.seen.progress_ratio:.2f}, promised are {each.seen.promise_ratio:.2f}."
            )
        if each.pod in missed and not each.is_subject:
            lines.append(target_line(each.pod, missed[each.pod]))
        in_force = each.seen.thread_percentage_in_force if each.seen is not None else None
        if in_force is not None and in_force != each.thread_percentage:
            lines.append(f"{each.pod} runs under {in_force}% of the threads until its next process.")
        if each.seen is not None and each.seen.throttle_ratio:
            part = f"{each.seen.throttle_ratio:.0%} of the time"
            what = "promise or target" if missed.keys() - {each.pod} else "promise"
            lines.append(f"{each.pod} is kept stopped {part}, for a neighbour's {what}.")
        if each.seen is not None and each.seen.retract:
            lines.append(f"{each.pod} is to be moved away: {each.seen.retract}")
    return lines


def elsewhere(found: Explanation) -> list[str]:
    """Say why it is not on the other nodes."""
    lines = []
    for each in found.elsewhere[:SHOWN_REASONS]:
        who = each.example if each.nodes == 1 else f"{each.nodes} nodes such as {each.example}"
        lines.append(f"{who}: {each.rejection}")
    if len(found.elsewhere) > SHOWN_REASONS:
        lines.append(f"and {len(found.elsewhere) - SHOWN_REASONS} more reasons (-o json has them)")
    return lines or ["every node that gpushare knows has room for it"]


def as_record(found: PodAccount, facts: PodFacts) -> dict[str, Any]:
    """Return one object for programs; without the decision made again, its fields are null."""
    kept = found.kept if isinstance(found, Explanation) else None
    if isinstance(found, Explanation):
        found = replace(found, kept=None)
    plain = replace(found, request=replace(found.request, known=None, unprofiled=None, rules=None))
    record: dict[str, Any] = dict.fromkeys(each.name for each in fields(Explanation)) | asdict(plain)
    if kept is not None:
        record["kept"] = {
            "node": kept.node,
            "gpus": list(kept.gpu_uuids),
            "leaving": sorted(kept.leaving),
            "waited_seconds": kept.waited_seconds,
            "is_nominated": kept.is_nominated,
        }
    for place in (record["placed"], record["now"]):
        if place is not None and place.get("probation") is not None:
            place["probation"] = {"until": place["probation"]["until"]}
        if place is not None and "memory_mib" in place:  # `now` may be a rejection
            place["memory_mib"] = place["memory_mib"] or None
    record["request"] = {
        "pod": found.request.pod_uid,
        "is_auto": found.request.is_auto,
        "share_percent": found.request.share_milli / GPU_MILLI * 100,
        "gpu_count": found.request.gpu_count,
        "memory_mib": found.request.memory_mib,
        "class": str(found.request.job_class),
        "workload": found.request.workload,
    }
    target = asdict(facts.target) if facts.target is not None else None
    return {**record, "waits_for": facts.waits_for, "target": target}


def _asked(request: PlacementRequest) -> str:
    return f'"auto", which is {_amount(request)}' if request.is_auto else _amount(request)


def _amount(request: PlacementRequest) -> str:
    if request.share_milli >= GPU_MILLI:
        return "1 GPU" if request.gpu_count == 1 else f"{request.gpu_count} GPUs"
    return f"{request.share_milli / GPU_MILLI:.0%} of a GPU"


def _gpu_list(placement: Placement, facts: PodFacts) -> str:
    return ", ".join(facts.gpu_names.get(uuid, f"{placement.node}/{uuid}") for uuid in placement.gpu_uuids)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _interval(tenant: ExplainedTenant) -> str | None:
    forecast = tenant.predicted
    return None if forecast is None else f"{forecast.progress:.2f} ({forecast.lower:.2f} to {forecast.upper:.2f})"


def _seen_progress(tenant: ExplainedTenant) -> str | None:
    if tenant.seen is None or tenant.seen.progress_ratio is None:
        return None
    error = tenant.seen.progress_error_ratio
    return f"{tenant.seen.progress_ratio:.2f}" + (f" +-{error:.2f}" if error is not None else "")


def _target(tenant: ExplainedTenant) -> PodTarget | None:
    """Return a tenant's own target as its node's agent reports it."""
    slo = tenant.seen.slo if tenant.seen is not None else None
    return None if slo is None else reported_target(slo)


def _target_figures(tenant: ExplainedTenant) -> str | None:
    return None if (target := _target(tenant)) is None else figures_of(target)


TENANT_COLUMNS: Final[tuple[Column[ExplainedTenant], ...]] = (
    Column("POD", lambda each: f"{each.pod}{' *' if each.is_subject else ''}"),
    Column("SHARE", lambda each: whole_percent(each.share_percent), rank=3, is_right=True),
    Column("CAP", lambda each: whole_percent(each.thread_percentage), rank=4, is_right=True),
    Column("PROMISED", lambda each: ratio(each.promise_ratio), is_right=True),
    Column("PREDICTED", _interval, rank=1, is_right=True),
    Column("SEEN", _seen_progress, is_right=True),
    Column(
        "STOPPED", lambda each: percent(each.seen.throttle_ratio if each.seen else None), rank=2, is_right=True
    ),
    Column("TARGET", _target_figures, rank=2, where_known=True),
)


def print_explanation(found: PodAccount, facts: PodFacts) -> None:
    """Print an explanation for people, section by section; sections of the decision made again only with it."""
    console = out()

    def section(lines: Sequence[str], title: str = "") -> None:
        if title:
            console.print(f"\n{title}", style="bold", highlight=False)
        for line in lines:
            console.print(line, highlight=False, markup=False)

    own = [target_line(found.request.pod_uid, facts.target)] if facts.target is not None else []
    opening = [headline(found, facts), *([found.profiling] if found.profiling else [])]
    section(opening if found.gpus else [*opening, *own])
    if isinstance(found, Explanation):
        section(why_there(found, facts), "Why there" if found.placed is not None else "Why it waits")
    elif facts.waits_for:
        section(kubernetes_says(facts), "Why it waits")
    for gpu in found.gpus:
        name = facts.gpu_names.get(gpu.uuid, gpu.uuid)
        section(
            [], f"On {name} ({gpu.model or 'model unknown'})" + ("" if found.placed else ", where it would go")
        )
        show(console, TENANT_COLUMNS, gpu.tenants)
        section([*(own if gpu is found.gpus[0] else []), *verdicts(gpu)])
    section(_story(found.done), "What was done")
    if isinstance(found, Explanation):
        section(elsewhere(found), "Why not elsewhere")


def _story(done: Sequence[Happening]) -> list[str]:
    lines = [
        f"{each.at or '-'}  {each.reason}{f' ({each.count} times)' if each.count > 1 else ''}: {each.note}"
        for each in done[-SHOWN_EVENTS:]
    ]
    return lines or ["Nothing was told of it (events are kept for an hour)."]
