"""python -m bench COMMAND

admission|awkward|first-pod|gate|hami|heap|imports|knowledge|latency|learning|live-loop|loop|losses|operator|papers|retractions|
sharing|throughput|tuning|turns
"""

import sys
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "hack"))  # devcluster: the tools of a control plane

# Imported one by one: a GPU machine lacks the dependencies of the others.
COMMANDS = {
    "admission": "bench.admission",
    "awkward": "bench.awkward",
    "first-pod": "bench.first_pod",
    "gate": "bench.gate",
    "hami": "bench.hami",
    "heap": "bench.heap",
    "imports": "bench.imports",
    "knowledge": "bench.knowledge",
    "latency": "bench.latency",
    "learning": "bench.learning",
    "live-loop": "bench.live_loop",
    "loop": "bench.loop",
    "losses": "bench.losses",
    "operator": "bench.operator",
    "papers": "bench.papers.command",
    "retractions": "bench.retractions",
    "sharing": "bench.sharing.command",
    "throughput": "bench.throughput",
    "tuning": "bench.tuning",
    "turns": "bench.turns",
}

if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
    sys.exit(__doc__)
import_module(COMMANDS[sys.argv[1]]).main(sys.argv[2:])
