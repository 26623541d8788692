"""What stands beside a test that waited in vain: one line on the machine, kubelet and the GPUs' gates.

It needs no package, as livecluster.py does not: a GPU machine may have none.
"""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

RECENT_SECONDS = 180.0
KLOG = re.compile(r"^[WEI](\d{4} \d\d:\d\d:\d\d)")  # of the local time, without a year
BROKEN_WATCH = re.compile(r"reflector.go.*(?:err=|[Ff]ailed)")
LENGTH = 300
TAIL_BYTES = 200_000


def surroundings(kubelet_log: Path | None = None, gpus: Path = Path("/run/gpushare")) -> str:
    """Say how busy the machine is, kubelet's last broken watch if it is recent, and the state of each gate."""
    state = Path(os.environ.get("GPUSHARE_STATE", "/var/lib/gpushare-dev"))
    found = [f"load {os.getloadavg()[0]:.1f}", *_broken_watch(kubelet_log or state / "log" / "kubelet.log")]
    for path in sorted(gpus.glob("GPU-*/gate.json")):
        try:
            found.append(_gate(json.loads(path.read_bytes())))
        except (OSError, ValueError, KeyError):
            found.append(f"{path.parent.name}: no status")
    return "; ".join(found)


def _gate(status: dict[str, Any]) -> str:
    """Return one gate's state, the pods of its clients, who waits at it and its last fault."""
    pods = [(one.get("pod_uid") or "?")[:8] for one in status.get("clients") or []]
    text = f"gate of {status['gpu_uuid']} {status['state']} {time.time() - status['written_at']:.0f} s ago"
    text += f", clients {' '.join(pods) or 'none'}"
    waiting = [f"{(one.get('pod_uid') or '?')[:8]} {one['reason']}" for one in status.get("held") or []]
    text += f", waiting {' '.join(waiting)}" if waiting else ""
    if status.get("last_fault_at"):
        by, reached = (status.get("last_fault_by") or "nobody")[:8], len(status.get("last_fault_pods") or [])
        text += f", fault {time.time() - status['last_fault_at']:.0f} s ago by {by}, {reached} pods: "
        text += str(status.get("last_fault"))[:LENGTH]
    return text


def _broken_watch(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    now = time.time()
    for line in reversed(lines):
        stamp = KLOG.match(line)
        if stamp is None:
            continue
        age = now - time.mktime(time.strptime(f"{time.localtime(now).tm_year}{stamp[1]}", "%Y%m%d %H:%M:%S"))
        if age > RECENT_SECONDS:
            return []
        if BROKEN_WATCH.search(line):
            return [f"kubelet {age:.0f} s ago: {line[30 : 30 + LENGTH]}"]
    return []
