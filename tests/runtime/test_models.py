"""The agent believes the artefacts that extender and operator take, and no others."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from gpushare import data
from gpushare.core.gpu import ARTEFACT_VERSION
from gpushare.data import H200_MODEL, default_model
from gpushare.runtime.models import MODELS_VARIABLE, fitted_on

L4 = "NVIDIA L4"
SHIPPED: dict[str, Any] = json.loads((files(data) / H200_MODEL).read_text())


def without(field: str) -> Callable[[dict[str, Any]], Any]:
    return lambda value: {name: each for name, each in value.items() if name != field}


def having(**fields: object) -> Callable[[dict[str, Any]], Any]:
    return lambda value: value | fields


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
        (lambda value: [value], False),
        (lambda _value: "text", False),
        *((without(field), False) for field in SHIPPED),
    ],
)
def test_what_the_agent_says_models_were_fitted_on_is_what_predicts(
    change: Callable[[dict[str, Any]], Any],
    is_taken: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "l4.json").write_text(json.dumps(change(SHIPPED | {"gpu_model": L4})))
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path))
    default_model.cache_clear()
    try:
        used = tuple(each.gpu_model for each in default_model().others)
    finally:
        default_model.cache_clear()
    caplog.clear()
    assert fitted_on(str(tmp_path)) == used == ((L4,) if is_taken else ())
    assert ("l4.json cannot be used" in caplog.text) is not is_taken
