"""A PyTorch pod that says what it sees and how fast it goes: `python torch_tenant.py PROGRAM SECONDS [--env A=B]`.

PROGRAM is one of programs.py, beside this file. One JSON line an event, a rate each second.
"""

import argparse
import os
import time

from cuda_tenant import limits, say


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--env", action="append", default=[])
    options = parser.parse_args()
    began = time.time()
    say("start", uid=os.getuid())
    os.environ.update(setting.split("=", 1) for setting in options.env)

    import torch
    from programs import PROGRAMS

    say("imported", seconds=round(time.time() - began, 2))
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    say(
        "context",
        name=properties.name,
        sms=properties.multi_processor_count,
        free_mib=free >> 20,
        total_mib=total >> 20,
        told=limits(),
    )
    step = PROGRAMS[options.program]()
    step()
    torch.cuda.synchronize()
    say("kernel", seconds=round(time.time() - began, 2))
    count = total_count = 0
    begin = last = time.time()
    while (now := time.time()) - begin < options.seconds:
        step()
        count, total_count = count + 1, total_count + 1
        if total_count % 4 == 0:  # a full launch queue would hide the rate
            torch.cuda.synchronize()
        if now - last >= 1:
            torch.cuda.synchronize()
            now = time.time()
            say("rate", per_s=round(count / (now - last), 3), total=total_count)
            count, last = 0, now
    say("end", total=total_count)


if __name__ == "__main__":
    main()
