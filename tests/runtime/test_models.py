"""The agent believes the artefacts that extender and operator take, and no others."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from gpushare import data
from gpushare.core.gpu import ARTEFACT_VERSION, CHECKSUM, SHORTFALLS, checksum
from gpushare.data import H200_MODEL, default_model
from gpushare.runtime.models import MODELS_VARIABLE, fitted_on

L4 = "NVIDIA L4"
SHIPPED: dict[str, Any] = json.loads((files(data) / H200_MODEL).read_text())


def without(field: str) -> Callable[[dict[str, Any]], Any]:
    return lambda value: {name: each for name, each in value.items() if name != field}


def having(**fields: object) -> Callable[[dict[str, Any]], Any]:
    return lambda value: value | fields


def putting(number: object, *path: str | int) -> Callable[[dict[str, Any]], Any]:
    """Put one number at a place of the artefact."""

    def put(value: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(value)
        inner: Any = changed
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = number
        return changed

    return put


NUMBERS: tuple[tuple[str | int, ...], ...] = (
    ("mean", 0),
    ("scale", 3),
    ("members", 0, "w1", 2, 5),
    ("members", 2, "b2", 0),
    ("errors", 7, 1, 3, 5, 1),
    ("shortfalls", 7, 1, 4, 5),
    ("fill", "caps", 0, 0),
    ("fill", "probes", 41, 11),
    ("baselines", "kace", 1),
    ("capacity", "dram_bw_util"),
)


def signed(value: Any) -> Any:
    return value | {CHECKSUM: checksum(value)} if isinstance(value, dict) else value


def unsigned(value: Any) -> Any:
    return without(CHECKSUM)(value) if isinstance(value, dict) else value


def fitted_and_used(
    content: object, folder: Path, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the agent says models were fitted on, and the GPUs whose models predict."""
    (folder / "l4.json").write_text(content if isinstance(content, str) else json.dumps(content))
    patch.setenv(MODELS_VARIABLE, str(folder))
    default_model.cache_clear()
    try:
        used = tuple(each.gpu_model for each in default_model().others)
    finally:
        default_model.cache_clear()
    assert ("l4.json cannot be used" in caplog.text) is (not used)
    caplog.clear()
    models = fitted_on(str(folder))
    assert ("l4.json cannot be used" in caplog.text) is (not models)
    return models, used


@pytest.mark.parametrize("finish", [signed, unsigned], ids=["with-checksum", "from-before-the-checksum"])
@pytest.mark.parametrize(
    ("change", "is_taken"),
    [
        (having(), True),
        (having(note="of the second rack"), True),
        (having(version=ARTEFACT_VERSION - 1), False),
        (having(version=ARTEFACT_VERSION + 1), False),
        (having(version=str(ARTEFACT_VERSION)), False),
        (having(version=None), False),
        (having(artefact="gpushare.io/other"), False),
        (having(gpu_model=3), False),
        (having(members=[]), False),
        (having(errors=[]), False),
        (having(capacity={}), False),
        (having(baselines=[]), False),
        (having(provenance=None), False),
        (lambda value: [value], False),
        (lambda _value: "text", False),
        (lambda _value: "", False),
        (lambda _value: "[" * 100_000, False),
        (having(shortfalls=[]), False),
        (without(SHORTFALLS), True),
        *((without(field), False) for field in SHIPPED if field not in {CHECKSUM, SHORTFALLS}),
        *((putting(math.nan, *path), False) for path in NUMBERS),
        *((putting(1e9, *path), False) for path in NUMBERS),
        *((putting(-math.inf, *path), False) for path in NUMBERS),
        *((putting("0.5", *path), False) for path in NUMBERS),
        (putting(10**400, "mean", 0), False),
        (putting(0.0, "scale", 0), False),
        (putting([0.5], "members", 0, "w1", 0), False),
    ],
)
def test_what_the_agent_says_models_were_fitted_on_is_what_predicts(
    change: Callable[[dict[str, Any]], Any],
    is_taken: bool,
    finish: Callable[[Any], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    models, used = fitted_and_used(finish(change(SHIPPED | {"gpu_model": L4})), tmp_path, monkeypatch, caplog)
    assert models == used == ((L4,) if is_taken else ())


def test_a_number_that_is_damaged_within_its_range_is_told_by_the_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = signed(SHIPPED | {"gpu_model": L4})
    for path in NUMBERS:
        damaged = putting(0.123, *path)(whole)
        assert fitted_and_used(damaged, tmp_path, monkeypatch, caplog) == ((), ()), path
    fitted_and_used(damaged, tmp_path, monkeypatch, caplog)
    assert "its content is not what its checksum was made of" in caplog.text
    assert "gpushare model fit" in caplog.text


def test_a_file_that_was_only_laid_out_anew_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A ConfigMap ends it with a line, and jq writes 1.0 as 1 and sorts the fields."""
    whole = signed(putting(1.0, "mean", 0)(SHIPPED | {"gpu_model": L4}))
    other = json.dumps(putting(1, "mean", 0)(whole), indent=2, sort_keys=True) + "\n\n"
    assert fitted_and_used(other, tmp_path, monkeypatch, caplog) == ((L4,), (L4,))


def test_a_folder_that_is_missing_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before: a mistyped $GPUSHARE_MODELS left the shipped model in use without a word."""
    assert fitted_on("") == fitted_on(str(tmp_path)) == ()
    assert caplog.text == ""
    assert fitted_on(str(tmp_path / "none")) == ()
    assert f"there is no folder {tmp_path / 'none'} to read interference models from" in caplog.text
