"""Dataclasses as Kubernetes objects: JSON with camelCase names, and the OpenAPI v3 schema.

A field made by `described` carries everything its schema needs, so that the Python type, the wire format, `kubectl
explain` and the API server's refusals cannot diverge.
"""

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_METADATA: Final = "kubernetes"
_INTEGER_FORMAT: Final = "int64"
T = TypeVar("T")

Json = dict[str, Any]
_Decoder = Callable[[object], Any]

# A writer replaces such a list or map as a whole; server-side apply does not merge it.
ATOMIC_LIST: Final[Json] = {"x-kubernetes-list-type": "atomic"}
ATOMIC_MAP: Final[Json] = {"x-kubernetes-map-type": "atomic"}


@dataclass(frozen=True, slots=True)
class CelRule:
    """One `x-kubernetes-validations` entry: a CEL expression, and the sentence that is shown when it is false."""

    rule: str
    message: str
    field_path: str | None = None

    def to_json(self) -> Json:
        """Return the entry as written in a schema."""
        entry: Json = {"rule": self.rule, "message": self.message}
        if self.field_path:
            entry["fieldPath"] = self.field_path
        return entry


@dataclass(frozen=True, slots=True)
class WireField:
    """The wire format of one dataclass field.

    Attributes:
        name: its JSON name; None means the camelCase of the Python name.
        description: what `kubectl explain` shows.
        keywords: further OpenAPI keywords of the value (minimum, pattern, x-kubernetes-list-type, ...).
        items: further keywords of a list's or map's elements.
        rules: CEL rules on the value.
        required: whether the API server refuses the object without it.
    """

    description: str
    name: str | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    items: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[CelRule, ...] = ()
    required: bool = False


def described(
    description: str,
    *,
    default: Any = MISSING,
    default_factory: Any = MISSING,
    name: str | None = None,
    rules: Iterable[CelRule] = (),
    items: Mapping[str, Any] | None = None,
    required: bool = False,
    **keywords: Any,
) -> Any:
    """Return a dataclass field with its wire name, its schema and its `kubectl explain` text."""
    wire = WireField(description, name, keywords, items or {}, tuple(rules), required)
    metadata = {_METADATA: wire}
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=metadata)
    if default is not MISSING:
        return field(default=default, metadata=metadata)
    return field(metadata=metadata)


def list_map(*keys: str) -> Json:
    """Return the keywords of a list that server-side apply merges by these keys."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


def to_json(value: Any, *, nulls: bool = False) -> Any:
    """Return a dataclass as JSON values; absent (None) fields are left out.

    Args:
        value: a dataclass, enum, mapping, tuple or scalar.
        nulls: write null for absent fields, so that a merge patch erases them; never inside lists, which a merge
            patch replaces as a whole.
    """
    if type(value) in _SCALARS:  # first, as most values are
        return value
    if isinstance(value, StrEnum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        out: Json = {}
        for wire_name, attribute, _ in _wire(type(value)):
            item = getattr(value, attribute)
            if item is not None:
                out[wire_name] = to_json(item, nulls=nulls)
            elif nulls:
                out[wire_name] = None
        return out
    if isinstance(value, Mapping):
        return {str(key): to_json(item, nulls=nulls) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


def from_json(cls: type[T], data: object) -> T:
    """Read a dataclass from JSON values; a field that is missing or of another type gets its default."""
    read: _Decoder = _dataclass_decoder(cast("Any", cls))
    return cast("T", read(data if isinstance(data, Mapping) else {}))


def openapi(cls: type) -> Json:
    """Return the structural schema of a dataclass whose fields were made by `described`."""
    properties: Json = {}
    required: list[str] = []
    for item in fields(cls):
        wire: WireField = item.metadata[_METADATA]
        name = wire.name or camel_case(item.name)
        properties[name] = _property(get_type_hints(cls)[item.name], wire)
        if wire.required:
            required.append(name)
    schema: Json = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    rules: tuple[CelRule, ...] = getattr(cls, "CEL_RULES", ())
    if rules:
        schema["x-kubernetes-validations"] = [rule.to_json() for rule in rules]
    return schema


def camel_case(name: str) -> str:
    """Return a name such as `thread_percentage` as `threadPercentage`."""
    head, *rest = name.split("_")
    return head + "".join(part.title() for part in rest)


@cache
def _wire(cls: Any) -> tuple[tuple[str, str, Any], ...]:
    hints = get_type_hints(cls)
    return tuple(
        (item.metadata[_METADATA].name or camel_case(item.name), item.name, _bare(hints[item.name]))
        for item in fields(cls)
    )


def _bare(hint: Any) -> Any:
    """Return a type hint without its `| None`."""
    if get_origin(hint) in (Union, types.UnionType):
        (bare,) = (part for part in get_args(hint) if part is not type(None))
        return bare
    return hint


@cache
def _decoder(hint: Any) -> _Decoder:
    """Return the function that reads a JSON value of this type; it returns None for a value of another type.

    Made once for each type: at its start the operator reads each of 10,000 GpuShares several times.
    """
    origin = get_origin(hint)
    if origin is tuple:
        return _tuple_decoder(get_args(hint)[0])
    if origin is not None:  # Mapping[str, X]
        return _mapping_decoder(get_args(hint)[1])
    if is_dataclass(hint):
        return _dataclass_decoder(cast("Any", hint))
    if issubclass(hint, StrEnum):
        return _enum_decoder(hint)
    return partial(_scalar, hint)


def _tuple_decoder(element: Any) -> _Decoder:
    decode = _decoder(element)

    def read(raw: object) -> Any:
        if not isinstance(raw, list | tuple):
            return None
        return tuple([item for part in raw if (item := decode(part)) is not None])

    return read


def _mapping_decoder(element: Any) -> _Decoder:
    decode = _decoder(element)

    def read(raw: object) -> Any:
        if not isinstance(raw, Mapping):
            return None
        return {str(key): item for key, part in raw.items() if (item := decode(part)) is not None}

    return read


@cache
def _dataclass_decoder(cls: Any) -> _Decoder:
    wire = [(name, attribute, _decoder(hint)) for name, attribute, hint in _wire(cls)]

    def read(raw: object) -> Any:
        if not isinstance(raw, Mapping):
            return None
        known: dict[str, Any] = {}
        for name, attribute, decode in wire:
            part = raw.get(name)
            if part is not None and (item := decode(part)) is not None:
                known[attribute] = item
        return cls(**known)

    return read


def _enum_decoder(hint: type[StrEnum]) -> _Decoder:
    members = {member.value: member for member in hint}

    def read(raw: object) -> Any:
        return members.get(raw) if isinstance(raw, str) else None

    return read


def _scalar(hint: type, raw: object) -> Any:
    if type(raw) is hint:
        return raw
    if hint is bool or isinstance(raw, bool):
        return None
    if hint is float and isinstance(raw, int | float):
        return float(raw)
    if hint is int and isinstance(raw, float) and raw.is_integer():
        return int(raw)
    return raw if isinstance(raw, hint) else None


_SCALARS: Final[dict[type, Json]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "format": _INTEGER_FORMAT},
    float: {"type": "number", "format": "double"},
}


def _property(hint: Any, wire: WireField) -> Json:
    schema = {"description": wire.description, **_type_schema(_bare(hint), wire.items), **wire.keywords}
    if wire.rules:
        own = schema.get("x-kubernetes-validations", [])
        schema["x-kubernetes-validations"] = [*own, *(rule.to_json() for rule in wire.rules)]
    return schema


def _type_schema(hint: Any, items: Mapping[str, Any]) -> Json:
    origin = get_origin(hint)
    if origin is tuple:
        return {"type": "array", "items": {**_type_schema(get_args(hint)[0], {}), **items}}
    if origin is not None:
        return {"type": "object", "additionalProperties": {**_type_schema(get_args(hint)[1], {}), **items}}
    if is_dataclass(hint):
        return openapi(hint)  # type: ignore[arg-type]  # is_dataclass also narrows to instances; hints are classes
    if issubclass(hint, StrEnum):
        return {"type": "string", "enum": [member.value for member in hint]}
    return dict(_SCALARS[hint])
