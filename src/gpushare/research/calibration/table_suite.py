"""The ten programs of the complete table: none of them was used in fitting the interference model.

Six are whole applications with phases (data loading on the host, training, evaluation, checkpoints; bursts of
requests): see table_applications. An application's iteration is one round through all of its phases.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from gpushare.research.calibration import table_applications as applications
from gpushare.research.calibration.workload import Stage, Step, Workload


class _Block(nn.Module):
    """ConvNeXt's block (Liu et al. 2022): depthwise 7x7, norm, two linear layers; channels last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """Add what the block makes of the pictures."""
        mixed = self.norm(self.spatial(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        return x + self.down(nn.functional.gelu(self.up(mixed)))


def _convnext(stage: Stage) -> Step:
    batch, side = stage.size(48, 1), stage.size(224, 32)
    kind = torch.float32 if stage.device == "cpu" else torch.bfloat16
    stem = nn.Conv2d(3, 96, 4, 4).to(stage.device, kind)
    levels: list[tuple[Any, list[Any]]] = []
    for width, depth in ((96, 2), (192, 2), (384, 4)):
        merge = nn.Conv2d(width // 2, width, 2, 2) if width > 96 else nn.Identity()
        levels.append((merge.to(stage.device, kind), [_Block(width).to(stage.device, kind) for _ in range(depth)]))
    images = torch.randn(batch, 3, side, side, device=stage.device, dtype=kind)

    def step() -> None:
        with torch.inference_mode():
            x = stem(images)
            for merge, blocks in levels:
                x = merge(x).permute(0, 2, 3, 1).contiguous()
                for block in blocks:
                    x = block(x)
                x = x.permute(0, 3, 1, 2)
            x.mean((2, 3))

    return step


def _lattice_boltzmann(stage: Stage) -> Step:
    """Return D2Q9 with the single-relaxation-time collision: stream, moments, equilibrium, relax."""
    n = stage.size(1536, 16)
    moves = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]
    weights = [4 / 9, *[1 / 9] * 4, *[1 / 36] * 4]
    state = torch.stack([torch.full((n, n), weight, device=stage.device) for weight in weights])
    state += 0.001 * torch.rand_like(state)

    def step() -> None:
        for _ in range(5):
            for place, (dx, dy) in enumerate(moves):
                if dx or dy:
                    state[place].copy_(torch.roll(state[place], (dx, dy), (0, 1)))
            density = state.sum(0)
            across = (state[1] - state[3] + state[5] - state[6] - state[7] + state[8]) / density
            along = (state[2] - state[4] + state[5] + state[6] - state[7] - state[8]) / density
            square = 1.5 * (across * across + along * along)
            for place, (dx, dy) in enumerate(moves):
                flow = 3.0 * (dx * across + dy * along)
                rest = weights[place] * density * (1.0 + flow + 0.5 * flow * flow - square)
                state[place].lerp_(rest, 0.8)

    return step


def _conjugate_gradient(stage: Stage) -> Step:
    """Return Poisson's equation in 3D; the host reads both dot products of an iteration, as solvers do."""
    n = stage.size(224, 8)
    right = torch.randn(n, n, n, device=stage.device, dtype=torch.float64)

    def apply(x: Any) -> Any:
        y = 6.0 * x
        y[1:] -= x[:-1]
        y[:-1] -= x[1:]
        y[:, 1:] -= x[:, :-1]
        y[:, :-1] -= x[:, 1:]
        y[:, :, 1:] -= x[:, :, :-1]
        y[:, :, :-1] -= x[:, :, 1:]
        return y

    def step() -> None:
        x = torch.zeros_like(right)
        rest = right.clone()
        way = rest.clone()
        size = float((rest * rest).sum())
        for _ in range(6):
            seen = apply(way)
            length = size / float((way * seen).sum())
            x.add_(way, alpha=length)
            rest.add_(seen, alpha=-length)
            after = float((rest * rest).sum())
            way.mul_(after / size).add_(rest)
            size = after

    return step


def _refinement(stage: Stage) -> Step:
    """Return a linear system: factors in fp32, then iterative refinement of the answer in fp64."""
    n = stage.size(4096, 16)
    exact = torch.randn(n, n, device=stage.device, dtype=torch.float64)
    exact += n * torch.eye(n, device=stage.device, dtype=torch.float64)
    rough = exact.float()
    right = torch.randn(n, 8, device=stage.device, dtype=torch.float64)

    def step() -> None:
        factors, pivots, _ = torch.linalg.lu_factor_ex(rough)
        answer = torch.linalg.lu_solve(factors, pivots, right.float()).double()
        for _ in range(4):
            rest = right - exact @ answer
            answer += torch.linalg.lu_solve(factors, pivots, rest.float()).double()

    return step


def _app(name: str, build: Callable[[Stage], Step]) -> Workload:
    return Workload(name, build, in_flight=0)


_ALL: Final = (
    _app("wideresnet-app-bf16-b128", applications.pictures),
    _app("retrieval-app-fp16-bursts", applications.retrieval),
    Workload("lattice-boltzmann-fp32-1536", _lattice_boltzmann),
    _app("seq2seq-app-tf32-b96", applications.translation),
    Workload("convnext-infer-bf16-b48", _convnext),
    Workload("cg-fp64-poisson-224", _conjugate_gradient, in_flight=0),
    _app("ppo-app-fp32-e8192", applications.policy),
    _app("chat-app-bf16-b8", applications.chat),
    Workload("lu-refine-fp32-4096", _refinement),
    _app("unet3d-app-fp16-b2", applications.volumes),
)
TABLE: dict[str, Workload] = {each.name: each for each in _ALL}
