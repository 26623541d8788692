"""The self-test's probe on the twin: the same questions by the tenant's protocol."""

import json
import os
import sys

from gpushare.twin.contention import WORKLOADS
from gpushare.twin.mps.client import CudaError, NoMpsError, TwinContext


def main() -> None:
    """Wait to be told to start, then connect, look, and try an allocation."""
    sys.stdin.readline()
    asked_mib = int(sys.argv[1])
    try:
        context = TwinContext(os.environ, WORKLOADS["latency-probe"], 30.0)
        try:
            context.allocate(asked_mib)
            allocated = True
        except CudaError:
            allocated = False
        got = context.attached
        context.close()
        seen = {
            "sms": got.sm_count,
            "free_mib": got.limit_mib,
            "asked_mib": asked_mib,
            "allocated": allocated,
            "driver": "twin",
        }
    except (OSError, CudaError, NoMpsError) as error:
        seen = {"error": str(error)}
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
