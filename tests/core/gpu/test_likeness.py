"""What of one GPU's measurements may be said of another."""

import pytest

from gpushare.core.gpu import FITTED_ON, calibration_warning, interval_widening
from gpushare.data import default_model


def test_the_name_is_that_of_the_shipped_model() -> None:
    assert default_model().gpu_model == FITTED_ON


@pytest.mark.parametrize(
    ("model", "widening"),
    [
        ("NVIDIA H200", 1.0),
        ("NVIDIA H200 NVL", 1.0),
        ("H200", 1.0),
        ("NVIDIA H100 80GB HBM3", 1.25),
        ("NVIDIA GH200 480GB", 1.25),
        ("NVIDIA H20", 1.25),  # its name is the beginning of another's
        ("NVIDIA A100-SXM4-80GB", 1.75),
        ("NVIDIA L4", 1.75),
        ("Tesla T4", 1.75),
    ],
)
def test_intervals_are_wider_the_less_a_gpu_is_like_the_fitted_one(model: str, widening: float) -> None:
    assert interval_widening(model) == widening
    assert default_model().for_gpu(model).widening == widening


def test_a_node_is_told_which_of_its_gpus_no_model_was_fitted_on() -> None:
    assert calibration_warning([]) == ""
    assert calibration_warning(["NVIDIA H200", ""]) == ""
    told = calibration_warning(["NVIDIA L4", "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA L4"])
    assert "NVIDIA H100 80GB HBM3 (1.25 times as wide), NVIDIA L4 (1.75 times as wide)" in told
    assert told.startswith("predictions were fitted on NVIDIA H200")
