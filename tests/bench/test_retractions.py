"""Why jobs were retracted: causes, and an account that agrees with the simulator's."""

import re

import pytest
from bench.retractions import Cause, Slack, report


@pytest.mark.parametrize(
    ("slack", "lasting", "kept", "cause"),
    [
        (Slack(0.1, 0.1, 0.1), True, False, Cause.LASTING),
        (Slack(0.1, 0.1, 0.1), False, True, Cause.KEPT),
        (Slack(-0.1, 0.1, 0.1), False, False, Cause.UNKEEPABLE),
        (Slack(0.1, -0.1, 0.1), False, False, Cause.PROMISE),
        (Slack(0.1, 0.1, -0.1), False, False, Cause.INFERENCE),
        (Slack(0.1, 0.1, 0.1), False, False, Cause.BELIEF),
    ],
)
def test_a_cause_is_what_first_turns_a_slack_into_a_lack(slack, lasting, kept, cause):
    assert slack.cause(is_lasting=lasting, is_seen_kept=kept) is cause


@pytest.mark.compute
def test_every_retraction_is_accounted_for():
    lines = report(3, 3.0, 50, 4, verbose=True)
    summary = next(line for line in lines if line.startswith("seed"))
    retracted, needless = map(int, re.search(r"(\d+) of 50 retracted, (\d+) needless", summary).groups())
    assert retracted >= 1
    counts = [re.match(r" *(\d+) (needless|needed)", line) for line in lines[lines.index(summary) + 1 :]]
    assert sum(int(count[1]) for count in counts) == retracted
    assert sum(int(count[1]) for count in counts if count[2] == "needless") == needless
    assert lines.index(summary) == retracted
