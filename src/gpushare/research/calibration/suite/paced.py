"""Programs that the host paces: tiny kernels, waiting for requests, preparing data, moving it over the bus."""

import time
from typing import Any, Final

import torch
from torch import nn

from gpushare.research.calibration.suite import cuda_kernels, networks
from gpushare.research.calibration.workload import Stage, Step, Workload


def _synchronise(stage: Stage) -> None:
    if stage.device == "cuda":
        torch.cuda.synchronize()


def _tiny_kernels(stage: Stage) -> Step:
    x = torch.randn(64, 64, device=stage.device)

    def step() -> None:
        y = x
        for _ in range(50):
            y = torch.tanh(y + 1.0)

    return step


def _rollouts(stage: Stage) -> Step:
    policy = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
    policy = policy.to(stage.device).requires_grad_(False)
    state = torch.randn(64, 32, device=stage.device)
    mix = torch.randn(8, 32, device=stage.device)

    def step() -> None:
        seen: Any = state
        for _ in range(4):
            seen = torch.tanh(seen + policy(seen) @ mix)
        seen.sum().item()

    return step


def _requests(stage: Stage, seconds: float, batch: int) -> Step:
    model = networks.resnet((3, 4, 6, 3), bottleneck=True).to(stage.device).eval().requires_grad_(False)
    images = torch.randn(stage.size(batch, 1), 3, stage.size(224, 32), stage.size(224, 32), device=stage.device)
    due = time.monotonic()

    def step() -> None:
        nonlocal due
        due = max(due + seconds, time.monotonic() - seconds)
        time.sleep(max(0.0, due - time.monotonic()))
        with torch.inference_mode():
            model(images)
        _synchronise(stage)

    return step


def _loader(stage: Stage) -> Step:
    wide = stage.size(2048, 16)
    model = nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, wide)).to(stage.device)
    update = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(stage.size(2048, 4), wide, device=stage.device)

    def step() -> None:
        prepared = time.monotonic() + 0.004
        while time.monotonic() < prepared:
            pass  # a data loader that keeps its core busy
        update.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        update.step()

    return step


def _transfer(stage: Stage) -> Step:
    count = stage.size(16_000_000, 100)
    pinned = torch.randn(count, pin_memory=stage.device == "cuda")
    on_device = torch.empty(count, device=stage.device)

    def step() -> None:
        on_device.copy_(pinned, non_blocking=True)
        on_device.mul_(1.5).add_(1.0).sum()

    return step


def _small_products(stage: Stage) -> Step:
    a = torch.randn(512, 512, device=stage.device, dtype=torch.bfloat16)

    def step() -> None:
        y = a
        for _ in range(40):
            y = y @ a

    return step


WORKLOADS: Final = (
    Workload("tiny-kernels-fp32", _tiny_kernels),
    Workload("serve-resnet50-fp32-20ms", lambda stage: _requests(stage, 0.020, 8), in_flight=0),
    Workload("rollout-mlp-fp32-b64", _rollouts, in_flight=0),
    Workload("loader-mlp-train-fp32-b2048", _loader),
    Workload("chase-fp32-40blocks", cuda_kernels.chase, needs_cuda=True),
    Workload("transfer-fp32-64m", _transfer),
    Workload("gemm-bf16-512x40", _small_products),
)
