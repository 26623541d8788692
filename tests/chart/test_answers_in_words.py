"""What the first screens of the dashboards say: every value of every panel there is words.

No Grafana runs here: `shown` is a copy of its rules.
"""

from typing import Any

import pytest
from boards import BOARDS

Json = dict[str, Any]
PANELS: dict[tuple[str, str], Json] = {
    (name, panel["title"]): panel for name, board in BOARDS.items() for panel in board["panels"][1:9]
}


def shown(panel: Json, value: float) -> tuple[str, str]:
    """Text and colour by Grafana's rules as we know them: the value's mapping, else the number with its unit."""
    defaults = panel["fieldConfig"]["defaults"]
    for mapping in defaults.get("mappings", []):
        options = mapping["options"]
        if mapping["type"] == "value":
            found = options.get(f"{value:g}")
        else:
            found = options["result"] if options["from"] <= value <= options["to"] else None
        if found is not None:
            return found["text"], found["color"]
    steps = defaults["thresholds"]["steps"]
    colour = [step["color"] for step in steps if step.get("value") is None or value >= step["value"]][-1]
    kind, _, words = defaults["unit"].partition(":")
    assert kind == "suffix", f"{panel['title']}: {value:g} would be a bare figure"
    return f"{value:g}{words}", colour


# Each question: what is said to which values, and in which colour where it has a meaning.
SAID: dict[str, dict[str, list[tuple[float, str, str]]]] = {
    "gpushare": {
        "How many GPUs are there?": [(1, "1 GPU", "text"), (64, "64 GPUs", "text")],
        "How many are in use?": [(0, "None", "text"), (48, "48 in use", "text")],
        "What does a used GPU do?": [(1.36, "1.36 × one pod alone", "text")],
        "How many GPUs does sharing spare?": [(8.5, "8.5 GPUs spared", "text")],
        "Is every promise kept?": [
            (0, "Yes", "green"),
            (1, "1 pod below its promise", "red"),
            (3, "3 pods below their promise", "red"),
        ],
        "Is anyone held back?": [
            (0, "No", "green"),
            (1, "1 pod throttled", "text"),
            (2, "2 pods throttled", "text"),
        ],
        "Does anyone wait for a GPU?": [
            (0, "No", "green"),
            (1, "1 pod waits", "text"),
            (9, "9 pods wait", "text"),
        ],
        "Is every GPU healthy?": [
            (0, "Yes", "green"),
            (1, "1 GPU unhealthy", "red"),
            (2, "2 GPUs unhealthy", "red"),
        ],
    },
    "gpushare-node": {
        "Do the GPUs take tenants?": [(0, "Yes, all", "green"), (1, "1 does not", "red"), (2, "2 do not", "red")],
        "Does MPS run?": [
            (0, "Yes, on all", "green"),
            (1, "1 GPU without MPS", "red"),
            (2, "2 GPUs without MPS", "red"),
        ],
        "Do limits bind?": [
            (0, "Yes", "green"),
            (1, "1 GPU without limits", "red"),
            (2, "2 GPUs without limits", "red"),
        ],
        "Does anyone run outside MPS?": [
            (0, "No", "green"),
            (1, "1 process does", "red"),
            (2, "2 processes do", "red"),
        ],
        "How much is given away?": [(0, "Nothing", "text"), (75, "75 % of the GPUs", "text")],
        "How busy are the SMs?": [(0, "Idle", "text"), (81, "81 % of the time", "text")],
        "How many pods share them?": [(0, "None", "text"), (1, "1 pod", "text"), (4, "4 pods", "text")],
        "Does anyone wait at the gate?": [
            (0, "No", "green"),
            (1, "1 process waits", "text"),
            (2, "2 processes wait", "text"),
        ],
    },
    "gpushare-workload": {
        "Do my pods run?": [(0, "Yes, all", "green"), (1, "1 pod waits", "text"), (2, "2 pods wait", "text")],
        "Do they get what was promised?": [
            (100, "Yes", "green"),
            (250, "Yes", "green"),
            (79, "79 % of it, the worst pod", "red"),
        ],
        "How much slower than alone?": [(1.4, "1.4 × as long as alone", "text")],
        "Are they held back?": [
            (0, "No", "green"),
            (1, "1 pod throttled", "text"),
            (2, "2 pods throttled", "text"),
        ],
        "What do they ask for?": [(1, "1 GPU", "text"), (2.5, "2.5 GPUs", "text")],
        "What would suit one pod?": [(45, "45 % of a GPU", "text")],
        "Is their memory enough?": [
            (0, "Yes", "green"),
            (60, "Yes", "green"),
            (85, "85 % of the limit is used", "green"),
            (97, "97 % of the limit is used", "red"),
        ],
        "Who shares their GPUs?": [
            (0, "Nobody", "green"),
            (1, "1 neighbour", "text"),
            (3, "3 neighbours", "text"),
        ],
    },
    "gpushare-control": {
        "Are annotated pods scheduled?": [
            (0, "No: no extender is ready", "red"),
            (1, "Yes", "green"),
            (2, "Yes", "green"),
        ],
        "How many pods wait?": [(0, "None", "green"), (1, "1 pod waits", "text"), (7, "7 pods wait", "text")],
        "Can new pods start on every node?": [
            (0, "Yes", "green"),
            (1, "1 node cannot", "red"),
            (2, "2 nodes cannot", "red"),
        ],
        "Does every driver answer?": [
            (0, "Yes", "green"),
            (1, "1 driver does not", "red"),
            (2, "2 drivers do not", "red"),
        ],
        "Is anything broken seen?": [
            (0, "No", "green"),
            (1, "1 broken object", "red"),
            (2, "2 broken objects", "red"),
        ],
        "Does the operator keep up?": [(0, "Yes", "green"), (40, "Yes", "green"), (1500, "1500 keys wait", "red")],
        "How many pods does it know?": [(0, "None", "text"), (1, "1 pod", "text"), (30, "30 pods", "text")],
        "How many hold room on a GPU?": [(0, "None", "text"), (1, "1 pod", "text"), (30, "30 pods", "text")],
    },
}


@pytest.mark.parametrize(("board", "question"), PANELS)
def test_every_answer_is_in_words(board: str, question: str) -> None:
    panel = PANELS[board, question]
    for value, text, colour in SAID[board][question]:
        assert shown(panel, value) == (text, colour), value
    assert panel["fieldConfig"]["defaults"]["noValue"] == "nothing is known: no data"


def test_a_question_for_yes_or_no_gets_one_where_all_is_well() -> None:
    asked = [key for key in PANELS if key[1].split()[0] in ("Is", "Are", "Do", "Does", "Can")]
    assert len(asked) == 18
    answers = {key: {text.split(",")[0] for _, text, _ in SAID[key[0]][key[1]]} for key in asked}
    assert [key for key, words in answers.items() if not words & {"Yes", "No"}] == []


def test_a_bare_figure_would_be_found() -> None:
    panel = PANELS["gpushare", "Is every promise kept?"]
    bare = {"title": "x", "fieldConfig": {"defaults": panel["fieldConfig"]["defaults"] | {"unit": "percentunit"}}}
    with pytest.raises(AssertionError, match="would be a bare figure"):
        shown(bare, 3)
