"""What the agent's loop acted by, second by second, from its log (`gpushare.core.control.explain`)."""

import re
from collections.abc import Mapping
from typing import Any

LINE = re.compile(r"step on GPU (\S+): (at=.*)$", re.MULTILINE)
WORDS = ("pod", "rule", "loosening", "duties")


def steps_of(log: str, names: Mapping[str, str], begin: float, end: float) -> list[dict[str, Any]]:
    """Return the steps between two times of the agent's clock, with `at` counted from the first.

    Args:
        names: of the pods, by uid; in the steps they stand in the uid's place.
    """
    found = []
    for _, line in LINE.findall(log):
        of_gpu, *of_tenants = [_figures(part) for part in line.split("; ")]
        if begin <= of_gpu["at"] <= end:
            duties = [each.rsplit(":", 1) for each in (of_gpu["duties"] or "").split(",") if each]
            found.append(
                {
                    **of_gpu,
                    "at": round(of_gpu["at"] - begin, 2),
                    "duties": {names.get(uid, uid): float(duty) for uid, duty in duties},
                    "tenants": [{**each, "pod": names.get(each["pod"], each["pod"])} for each in of_tenants],
                }
            )
    return found


def _figures(part: str) -> dict[str, Any]:
    pairs = [each.split("=", 1) for each in part.split()]
    return {key: _value(key, text) for key, text in pairs}


def _value(key: str, text: str) -> Any:
    if text == "-":
        return None
    if key == "broken":
        return text == "yes"
    return text if key in WORDS else float(text)
