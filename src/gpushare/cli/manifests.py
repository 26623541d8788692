"""Pods from manifests that users would apply: pods, lists of them, and the templates of workloads."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from gpushare.cli.errors import UsageError
from gpushare.cli.files import read_text
from gpushare.core.admission import warnings
from gpushare.core.api import Rejection, names, parse_quantity
from gpushare.core.placement import PlacementRequest

_MOST_PODS: Final = 100_000


def read_manifests(
    path: Path,
    request_of: Callable[[Mapping[str, Any]], PlacementRequest | Rejection],
    warn: Callable[[str], None] = lambda _: None,
) -> list[PlacementRequest]:
    """Return the requests of the pods with our annotation in a YAML or JSON file.

    Args:
        request_of: returns what a pod object requests on the cluster of the plan.
        warn: gets what `kubectl apply` would warn of, such as a misspelt annotation.

    Raises:
        UsageError: the file is not YAML, an annotation or quantity is wrong, or no pod asks for a share.
    """
    found: list[PlacementRequest] = []
    try:
        documents = [document for document in yaml.safe_load_all(read_text(path)) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{path}{where}: is not YAML: {error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path}: is not YAML: {error}") from error
    for document in documents:
        for pod in _pods(path, document):
            annotations = pod["metadata"].get("annotations") or {}
            if isinstance(annotations, Mapping) and names.FRACTION not in annotations:
                _warn_of(pod, annotations, warn)
                continue
            try:
                _check_annotations(annotations)
                _check_amounts(pod["spec"])
                _check_texts(pod["spec"])
                request = request_of(pod)
            except KeyError as error:
                raise UsageError(
                    f"{path}: pod {pod['metadata']['name']} lacks the required field {error}"
                ) from error
            except (TypeError, AttributeError) as error:
                raise UsageError(
                    f"{path}: pod {pod['metadata']['name']}: a field has not the form that a pod's has ({error}); "
                    "kubectl apply --dry-run=server says which"
                ) from error
            except (ValueError, OverflowError) as error:
                raise UsageError(f"{path}: pod {pod['metadata']['name']}: {error}") from error
            if isinstance(request, Rejection):
                raise UsageError(f"{path}: pod {pod['metadata']['name']}: {request}")
            _warn_of(pod, annotations, warn)
            found.append(request)
    if not found:
        raise UsageError(f"{path} holds no pod with the annotation {names.FRACTION}")
    return found


def _warn_of(pod: Mapping[str, Any], annotations: Mapping[str, Any], warn: Callable[[str], None]) -> None:
    if any(str(name).startswith(f"{names.GROUP}/") for name in annotations):
        for warning in warnings(dict(pod)):
            warn(f"pod {pod['metadata']['name']}: {warning}")


def _check_annotations(annotations: Any) -> None:
    """Refuse annotations that are not text, such as an unquoted 0.5, as the API server does.

    Raises:
        ValueError: one is not text, or they are no mapping.
    """
    if not isinstance(annotations, Mapping):
        raise ValueError("its annotations are no mapping")
    for name, value in annotations.items():
        if value is not None and not isinstance(value, str):
            raise ValueError(f"annotation {name}: {value!r} is not text: write it in quotes")


def _check_amounts(spec: Mapping[str, Any]) -> None:
    """Refuse negative requests, which the API server refuses, so that no other code checks for them.

    Raises:
        ValueError: an amount is negative, or not a quantity.
    """
    for asks in (spec, *(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for amounts in (asks.get("resources") or {}).values():
            for resource, amount in amounts.items() if isinstance(amounts, Mapping) else ():
                try:
                    is_negative = parse_quantity(amount) < 0
                except ValueError as error:
                    raise ValueError(f"{resource}: {error}") from error
                if is_negative:
                    raise ValueError(f"{resource}: {amount!r} is negative")


def _check_texts(spec: Mapping[str, Any]) -> None:
    """Refuse labels and taints that are not text, such as an unquoted `true`, as the API server does.

    Raises:
        ValueError: one is not text.
    """
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    expressions = [
        each
        for term in affinity.get("nodeSelectorTerms") or ()
        for kind in ("matchExpressions", "matchFields")
        for each in term.get(kind) or ()
    ]
    texts = [
        *(("nodeSelector", value) for value in (spec.get("nodeSelector") or {}).values()),
        *(("nodeAffinity", value) for each in expressions for value in (each["key"], each["operator"])),
        *(("nodeAffinity", value) for each in expressions for value in each.get("values") or ()),
        *(
            ("tolerations", value)
            for each in spec.get("tolerations") or ()
            for key, value in each.items()
            if key != "tolerationSeconds" and value is not None
        ),
    ]
    for where, value in texts:
        if not isinstance(value, str):
            raise ValueError(f"{where}: {value!r} is not text: write it in quotes")


def _pods(path: Path, document: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the pods that a document describes."""
    if not isinstance(document, Mapping):
        raise UsageError(f"{path}: a document is not a Kubernetes object")
    if str(document.get("kind", "")).endswith("List") and isinstance(document.get("items"), list):
        for item in document["items"]:
            yield from _pods(path, item)
        return
    if not isinstance(document.get("kind"), str):
        raise UsageError(f"{path}: a document is not a Kubernetes object: it has no kind")
    metadata, spec = document.get("metadata"), document.get("spec")
    if not isinstance(metadata, Mapping) or not isinstance(
        metadata.get("name") or metadata.get("generateName"), str
    ):
        raise UsageError(f"{path}: an object of kind {document.get('kind')} has no name")
    if not isinstance(spec, Mapping):
        return
    name, namespace = metadata.get("name") or metadata["generateName"], metadata.get("namespace")
    if document.get("kind") == "Pod":
        yield {"metadata": {**metadata, "name": name}, "spec": spec}
        return
    if isinstance(spec.get("jobTemplate"), Mapping):
        spec = spec["jobTemplate"].get("spec")
        if not isinstance(spec, Mapping):
            return
    template = spec.get("template")
    if not isinstance(template, Mapping):
        return
    count = _count(path, f"{document.get('kind')} {name}", spec)
    inner = template.get("metadata") or {}
    if not isinstance(inner, Mapping):
        raise UsageError(f"{path}: the template of {document.get('kind')} {name} has metadata that is no object")
    for index in range(count):
        yield {
            "metadata": {**inner, "name": f"{name}-{index}", "namespace": namespace},
            "spec": template.get("spec") or {},
        }


def _count(path: Path, asker: str, spec: Mapping[str, Any]) -> int:
    """Return how many pods a workload has at once; null is the same as absent, as for the API server.

    A Job has no more at once than its `completions`, whatever its `parallelism`.

    Raises:
        UsageError: the number is none, or larger than any cluster.
    """
    if spec.get("replicas") is not None:
        asked = [spec["replicas"]]
    else:
        asked = [1 if spec.get("parallelism") is None else spec["parallelism"]]
        asked += [] if spec.get("completions") is None else [spec["completions"]]
    for number in asked:
        if not isinstance(number, int) or number < 0:
            raise UsageError(f"{path}: {asker} asks for {number!r} replicas")
    count: int = min(asked)
    if count > _MOST_PODS:
        raise UsageError(f"{path}: {asker} asks for {count} replicas")
    return count
