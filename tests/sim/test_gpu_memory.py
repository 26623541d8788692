"""A GPU's memory by its model's name: no model is taken for another whose name it contains."""

import pytest

from gpushare.sim.gpu_memory import gpu_memory_mib
from gpushare.twin.gpus import MODELS


@pytest.mark.parametrize(("name", "memory_mib"), [each[:2] for each in MODELS.values()])
def test_the_twins_gpus_have_the_memory_that_their_names_say(name: str, memory_mib: int) -> None:
    assert gpu_memory_mib(name) == memory_mib


@pytest.mark.parametrize(
    ("name", "memory_mib"),
    [
        ("NVIDIA A100 80GB PCIe", 81920),
        ("Tesla V100-SXM2-32GB", 32768),
        ("NVIDIA GH200 480GB", 97871),
        ("NVIDIA GH200 96GB", 98304),
        ("NVIDIA H100 NVL", 95830),
        ("NVIDIA H100", 81559),
        ("NVIDIA A100", None),
        ("NVIDIA GH200 144G HBM3e", None),
        ("NVIDIA GB200", None),
        ("X", None),
    ],
)
def test_a_name_that_does_not_say_it_is_not_guessed(name: str, memory_mib: int | None) -> None:
    assert gpu_memory_mib(name) == memory_mib
