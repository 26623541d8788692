"""Labels as an index files them: so that selectors look at few pods, and pods at few selectors."""

from collections.abc import Iterator, Mapping

from gpushare.core.api import LabelSelector, SelectorOperator

# A label with its value; without one where any value will do; ANY where no label is asked for.
Term = tuple[str, str | None]
ANY: Term = ("", None)


def terms_of_labels(labels: Mapping[str, str]) -> Iterator[Term]:
    """Return every term that an object with these labels can be found by."""
    yield ANY
    for key, value in labels.items():
        yield key, value
        yield key, None


def ways_to_file(selector: LabelSelector) -> list[tuple[Term, ...]]:
    """Return the ways to file a selector; what it matches has one of the terms, in each of the ways.

    Selectors that ask for no label (NotIn, DoesNotExist, or nothing at all) can be filed under ANY only.
    """
    ways: list[tuple[Term, ...]] = [((key, value),) for key, value in selector.match_labels.items()]
    for wanted in selector.match_expressions:
        if wanted.operator is SelectorOperator.IN:
            ways.append(tuple((wanted.key, value) for value in dict.fromkeys(wanted.values)))
        elif wanted.operator is SelectorOperator.EXISTS:
            ways.append(((wanted.key, None),))
    return ways or [(ANY,)]
