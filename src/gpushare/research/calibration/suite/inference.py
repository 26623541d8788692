"""Inference: batches, single requests, decoding from a cache."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from gpushare.research.calibration.suite import networks
from gpushare.research.calibration.workload import Stage, Step, Workload

_KINDS: Final = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _forward(stage: Stage, model: Any, precision: str, *inputs: Any) -> Step:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    kind = torch.float32 if stage.device == "cpu" else _KINDS[precision]
    model = model.to(stage.device, kind).eval().requires_grad_(False)
    ready = [each.to(kind) if each.is_floating_point() else each for each in inputs]

    def step() -> None:
        with torch.inference_mode():
            model(*ready)

    return step


def _cnn(make: Callable[[], Any], batch: int, side: int, precision: str) -> Callable[[Stage], Step]:
    def build(stage: Stage) -> Step:
        images = torch.randn(
            stage.size(batch, 1), 3, stage.size(side, 32), stage.size(side, 32), device=stage.device
        )
        return _forward(stage, make(), precision, images)

    return build


def _transformer(width: int, depth: int, batch: int, length: int, precision: str) -> Callable[[Stage], Step]:
    def build(stage: Stage) -> Step:
        wide = stage.size(width, 32)
        tokens = torch.randint(100, (stage.size(batch, 1), stage.size(length, 8)), device=stage.device)
        model = networks.Transformer(
            stage.size(4000, 100), wide, wide // 64 or 1, stage.size(depth, 1), causal=False
        )
        return _forward(stage, model, precision, tokens)

    return build


def _vision(stage: Stage) -> Step:
    wide = stage.size(768, 32)
    patches = torch.randn(stage.size(64, 1), stage.size(197, 8), wide, device=stage.device)
    model = networks.Transformer(stage.size(1000, 100), wide, wide // 64 or 1, stage.size(6, 1), causal=False)
    return _forward(stage, model, "tf32", patches)


class _Decoder(nn.Module):
    """One token a step for each sequence: attention over a cache and matrix-vector-like products."""

    def __init__(self, width: int, depth: int, batch: int, cached: int, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.Linear(width, 3 * width),
                    nn.Linear(width, width),
                    nn.Linear(width, 4 * width),
                    nn.Linear(4 * width, width),
                ]
            )
            for _ in range(depth)
        )
        heads = width // 64 or 1
        self.heads = heads
        self.register_buffer("cache", torch.randn(depth, 2, batch, heads, cached, width // heads, device=device))

    def forward(self, x: Any) -> Any:
        """Map a hidden state (batch, 1, width) to the next one."""
        batch, _, width = x.shape
        for (qkv, out, up, down), (keys, values) in zip(self.layers, self.cache, strict=True):
            q = qkv(x)[..., :width].view(batch, 1, self.heads, -1).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(q, keys, values)
            x = x + out(mixed.transpose(1, 2).reshape(batch, 1, width))
            x = x + down(nn.functional.gelu(up(x)))
        return x


def _decode(stage: Stage) -> Step:
    wide, batch = stage.size(2048, 32), stage.size(16, 1)
    model = _Decoder(wide, stage.size(12, 1), batch, stage.size(512, 8), stage.device)
    return _forward(stage, model, "bf16", torch.randn(batch, 1, wide, device=stage.device))


def _attention(stage: Stage) -> Step:
    shape = (stage.size(4, 1), stage.size(16, 2), stage.size(4096, 16), 64)
    kind = torch.float32 if stage.device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(shape, device=stage.device, dtype=kind) for _ in range(3))

    def step() -> None:
        for _ in range(4):
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return step


def _recommend(stage: Stage) -> Step:
    batch, rows, tables = stage.size(16384, 8), stage.size(500_000, 50), stage.size(8, 2)
    model = networks.Recommender(tables, rows, stage.size(64, 8), sparse=False)
    return _forward(
        stage,
        model,
        "fp16",
        torch.randn(batch, 13, device=stage.device),
        torch.randint(rows, (tables, batch, 16), device=stage.device),
    )


def _recurrent(stage: Stage) -> Step:
    tokens = torch.randint(1000, (stage.size(32, 2), stage.size(48, 4)), device=stage.device)
    return _forward(stage, networks.Recurrent(nn.GRU, 1000, stage.size(1024, 16), 2), "fp32", tokens)


def _denoise(stage: Stage) -> Step:
    latents = torch.randn(stage.size(8, 1), 4, stage.size(64, 8), stage.size(64, 8), device=stage.device)
    return _forward(stage, networks.UNet(stage.size(96, 8)), "fp16", latents)


def _long_memory(stage: Stage) -> Step:
    tokens = torch.randint(1000, (stage.size(128, 2), stage.size(48, 4)), device=stage.device)
    return _forward(stage, networks.Recurrent(nn.LSTM, 1000, stage.size(512, 16), 2), "fp16", tokens)


def _look_up(stage: Stage) -> Step:
    rows = stage.size(2_000_000, 50)
    model = nn.EmbeddingBag(rows, stage.size(128, 8), mode="sum")
    return _forward(stage, model, "fp32", torch.randint(rows, (stage.size(65536, 4), 32), device=stage.device))


WORKLOADS: Final = (
    Workload("resnet50-infer-fp16-b32", _cnn(networks.resnet50, 32, 224, "fp16")),
    Workload("bert-infer-fp16-b1", _transformer(768, 12, 1, 64, "fp16"), in_flight=0),
    Workload("gpt-decode-bf16-b16", _decode),
    Workload("vit-infer-tf32-b64", _vision),
    Workload("resnet18-infer-fp32-b1", _cnn(networks.resnet18, 1, 224, "fp32"), in_flight=0),
    Workload("unet-infer-fp16-b8", _denoise),
    Workload("gru-infer-fp32-b32", _recurrent),
    Workload("dlrm-infer-fp16-b16384", _recommend),
    Workload("attention-infer-bf16-4k", _attention),
    Workload("bert-infer-fp32-b16", _transformer(768, 4, 16, 128, "fp32")),
    Workload("resnet18-infer-fp16-b64", _cnn(networks.resnet18, 64, 224, "fp16")),
    Workload("bert-infer-bf16-b4x1024", _transformer(1024, 8, 4, 1024, "bf16")),
    Workload("lstm-infer-fp16-b128", _long_memory),
    Workload("mobilenet-infer-fp16-b1", _cnn(networks.mobilenet, 1, 224, "fp16"), in_flight=0),
    Workload("embedding-infer-fp32-b65536", _look_up),
)
