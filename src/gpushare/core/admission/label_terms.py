"""Index keys for labels and label selectors, so that few selectors have to be compared with a pod."""

from collections.abc import Iterator, Mapping

from gpushare.core.api import LabelSelector, SelectorOperator

# (label, value); (label, None) where any value matches; ANY where no label is required.
Term = tuple[str, str | None]
ANY: Term = ("", None)


def terms_of_labels(labels: Mapping[str, str]) -> Iterator[Term]:
    """Return every index key under which an object with these labels can be found."""
    yield ANY
    for key, value in labels.items():
        yield key, value
        yield key, None


def ways_to_file(selector: LabelSelector) -> list[tuple[Term, ...]]:
    """Return alternative index keys: matching labels contain at least one term of every alternative.

    A selector that requires no label (NotIn, DoesNotExist, or empty) has the single key ANY.
    """
    ways: list[tuple[Term, ...]] = [((key, value),) for key, value in selector.match_labels.items()]
    for wanted in selector.match_expressions:
        if wanted.operator is SelectorOperator.IN:
            ways.append(tuple((wanted.key, value) for value in dict.fromkeys(wanted.values)))
        elif wanted.operator is SelectorOperator.EXISTS:
            ways.append(((wanted.key, None),))
    return ways or [(ANY,)]
