"""The page of the chart's values has each value's own words."""

import generate_values_doc

TEXT = """
agent:
  # A second container.
  standby:
    enabled: true
    # Enough to wait.
    requests: {cpu: 5m}
  # What its container may do.
  securityContext:
    runAsUser: 0
"""


def test_a_comment_inside_a_value_is_not_the_next_values() -> None:
    found = {each.path: each.description for each in generate_values_doc.values(TEXT)}
    assert found == {"agent.standby": "A second container.", "agent.securityContext": "What its container may do."}
