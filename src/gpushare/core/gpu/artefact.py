"""The interference model's file: checks that it is complete and plausible; without numpy, for the agent."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

ARTEFACT: Final = "gpushare.io/interference-model"
ARTEFACT_VERSION: Final = 4
CHECKSUM: Final = "checksum"
SHORTFALLS: Final = "shortfalls"  # optional: artefacts of before 2026-12 lack it
_FIELDS: Final = frozenset(
    {"gpu_model", "provenance", "mean", "scale", "members", "errors", "fill", "baselines", "capacity"}
)
# The shapes of version 4; another law, or other units, get another version (a test compares them with the law's
# own).
_FEATURES, _CAP_FEATURES, _PROBE_FEATURES, _OUTPUTS = 53, 10, 12, 15
_ERRORS: Final = (8, 2, 4, 6, 2)
_SHORTFALLS: Final = (8, 2, 5, 6)
_BASELINES: Final[Mapping[str, int]] = {"kace": 15, "additive": 28}
_CAPACITIES: Final = ("dram_bw_util",)
# Far beyond any fit: the shipped model's largest weight is 1.5, its largest mean 3.1, its largest error 0.7.
_MOST: Final = 1000.0
_LEAST_SCALE: Final = 1e-6
_MOST_ERROR: Final = 2.0
_MEND: Final = "copy it anew, or fit it again with gpushare model fit"


class ArtefactError(Exception):
    """A model artefact cannot be used; one sentence."""


def artefact_from_json(text: str) -> Mapping[str, Any]:
    """Return the fields of an artefact that passes every check.

    Raises:
        ArtefactError: not an artefact, of another version, or damaged.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = error if text.strip() else "it is empty"
        raise ArtefactError(f"the model artefact is damaged ({what}): {_MEND}") from None
    if problem := artefact_problem(value):
        raise ArtefactError(problem)
    return dict(value)


def artefact_problem(value: object) -> str:
    """Return a sentence on why a file's content cannot be used as a model; empty if it can."""
    if not isinstance(value, Mapping) or "artefact" not in value:
        return "the model artefact is damaged (it does not say that it is one)"
    if value["artefact"] != ARTEFACT:
        return "this file is not an interference model"
    version = value.get("version")
    if not isinstance(version, int):
        return "the model artefact is damaged (its version is no number)"
    if version > ARTEFACT_VERSION:
        return (
            f"the model is of artefact version {version}, this gpushare reads up to {ARTEFACT_VERSION}; "
            "upgrade gpushare"
        )
    if version < ARTEFACT_VERSION:
        return (
            f"the model is of artefact version {version}, whose law this gpushare no longer computes; fit it "
            "again with gpushare model fit"
        )
    if damage := _damage(value):
        return f"the model artefact is damaged ({damage}): {_MEND}"
    return ""


def checksum(value: Mapping[str, Any]) -> str:
    """Return the checksum of all fields except the checksum itself, independent of the file's layout."""
    content = _plain({name: each for name, each in value.items() if name != CHECKSUM})
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _damage(value: Mapping[str, Any]) -> str:
    if missing := sorted(_FIELDS - value.keys()):
        return f"it lacks {', '.join(missing)}"
    if not isinstance(value["gpu_model"], str):
        return "its GPU model is no name"
    if not isinstance(value["provenance"], Mapping):
        return "its provenance is no object"
    if wrong := [name for name, is_right in _numbers_by_field(value).items() if not is_right]:
        return f"{', '.join(wrong)}: not of the shape, or with numbers out of the range, that a model has"
    # Old artefacts have no checksum.
    if CHECKSUM in value and value[CHECKSUM] != checksum(value):
        return "its content is not what its checksum was made of"
    return ""


def _numbers_by_field(value: Mapping[str, Any]) -> dict[str, bool]:
    """Return for each numeric field whether its numbers are present, in shape and in range."""
    fill, baselines, capacity, members = (value[name] for name in ("fill", "baselines", "capacity", "members"))
    probed = _FEATURES - _PROBE_FEATURES
    return {
        "mean": _is_array(value["mean"], (_FEATURES,)),
        "scale": _is_array(value["scale"], (_FEATURES,), least=_LEAST_SCALE),
        "members": isinstance(members, list) and bool(members) and all(map(_is_member, members)),
        "errors": _is_array(value["errors"], _ERRORS, least=-_MOST_ERROR, most=_MOST_ERROR),
        SHORTFALLS: SHORTFALLS not in value
        or _is_array(value[SHORTFALLS], _SHORTFALLS, least=-_MOST_ERROR, most=0.0),
        "fill": isinstance(fill, Mapping)
        and _is_array(fill.get("caps"), (1 + probed - _CAP_FEATURES, _CAP_FEATURES))
        and _is_array(fill.get("probes"), (1 + probed, _PROBE_FEATURES)),
        "baselines": isinstance(baselines, Mapping)
        and all(_is_array(baselines.get(name), (length,)) for name, length in _BASELINES.items()),
        "capacity": isinstance(capacity, Mapping)
        and all(_is_array(capacity.get(name), (), least=1e-6, most=1.0) for name in _CAPACITIES),
    }


def _is_member(member: object) -> bool:
    """Return whether these are parameters of the law, with any number of hidden units."""
    if not isinstance(member, Mapping) or not isinstance(member.get("b1"), list) or not member["b1"]:
        return False
    hidden = len(member["b1"])
    shapes = {"w1": (_FEATURES, hidden), "b1": (hidden,), "w2": (hidden, _OUTPUTS), "b2": (_OUTPUTS,)}
    return member.keys() == shapes.keys() and all(_is_array(member[name], shape) for name, shape in shapes.items())


def _is_array(value: object, shape: tuple[int, ...], *, least: float = -_MOST, most: float = _MOST) -> bool:
    """Return whether these are nested lists of that shape with numbers in that range; NaN is never in range."""
    if not shape:
        return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    return (
        isinstance(value, list)
        and len(value) == shape[0]
        and all(_is_array(each, shape[1:], least=least, most=most) for each in value)
    )


def _plain(value: Any) -> Any:
    """Return the same content with every number a float, because 1 and 1.0 are the same number in JSON."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**53 else str(value)
    return value
