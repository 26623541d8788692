"""Every way to file a selector finds whatever the selector matches."""

from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.admission.label_terms import ANY, terms_of_labels, ways_to_file
from gpushare.core.api.meta import LabelRequirement, LabelSelector, SelectorOperator

KEYS, VALUES = st.sampled_from(["app", "tier", "zone"]), st.sampled_from(["x", "y", "z"])
SELECTORS = st.builds(
    LabelSelector,
    match_labels=st.dictionaries(KEYS, VALUES),
    match_expressions=st.lists(
        st.builds(
            LabelRequirement,
            key=KEYS,
            operator=st.sampled_from(list(SelectorOperator)),
            values=st.lists(VALUES, min_size=1, max_size=3).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
)


@given(SELECTORS, st.dictionaries(KEYS, VALUES))
def test_what_a_selector_matches_is_found_in_each_way(selector, labels):
    terms = set(terms_of_labels(labels))
    ways = ways_to_file(selector)
    assert ways
    if selector.matches(labels):
        assert all(terms & set(way) for way in ways)


def test_the_ways_of_each_operator():
    def way(operator, *values):
        return ways_to_file(LabelSelector(match_expressions=(LabelRequirement("app", operator, values),)))

    assert ways_to_file(LabelSelector(match_labels={"app": "web"})) == [(("app", "web"),)]
    assert way(SelectorOperator.IN, "x", "y", "x") == [(("app", "x"), ("app", "y"))]
    assert way(SelectorOperator.EXISTS) == [(("app", None),)]
    assert way(SelectorOperator.NOT_IN, "x") == way(SelectorOperator.DOES_NOT_EXIST) == [(ANY,)]
