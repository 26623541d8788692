"""Training loops: forward, backward and optimiser on random data."""

import itertools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from gpushare.research.calibration.suite import networks
from gpushare.research.calibration.workload import Stage, Step, Workload


def _loop(
    stage: Stage, model: Any, loss: Callable[[Any], Any], *, precision: str = "fp32", optimiser: Any = None
) -> Step:
    """Return one optimiser step per call; bf16 and fp16 by autocast, tf32 by the matrix units' mode."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    model.to(stage.device).train()
    update = (optimiser or torch.optim.AdamW)(model.parameters(), lr=1e-4)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)

    def step() -> None:
        update.zero_grad(set_to_none=True)
        with torch.autocast(stage.device, kind or torch.bfloat16, enabled=kind is not None):
            value = loss(model)
        value.backward()
        update.step()

    return step


def _images(stage: Stage, batch: int, side: int) -> tuple[Any, Any]:
    batch, side = stage.size(batch, 2), stage.size(side, 32)
    return (
        torch.randn(batch, 3, side, side, device=stage.device),
        torch.randint(10, (batch,), device=stage.device),
    )


def _cnn(make: Callable[[], Any], batch: int, side: int, precision: str) -> Callable[[Stage], Step]:
    def build(stage: Stage) -> Step:
        images, labels = _images(stage, batch, side)
        model = make()
        if precision in ("bf16", "fp16"):
            model, images = (
                model.to(memory_format=torch.channels_last),
                images.to(memory_format=torch.channels_last),
            )
        return _loop(
            stage,
            model,
            lambda m: functional.cross_entropy(m(images), labels),
            precision=precision,
            optimiser=torch.optim.SGD,
        )

    return build


def _language(
    width: int, depth: int, batch: int, length: int, precision: str, *, causal: bool
) -> Callable[[Stage], Step]:
    def build(stage: Stage) -> Step:
        vocabulary, wide = stage.size(8000, 100), stage.size(width, 32)
        tokens = torch.randint(vocabulary, (stage.size(batch, 2), stage.size(length, 8)), device=stage.device)
        model = networks.Transformer(vocabulary, wide, wide // 64 or 1, stage.size(depth, 1), causal=causal)
        return _loop(
            stage,
            model,
            lambda m: functional.cross_entropy(m(tokens).flatten(0, 1), tokens.flatten()),
            precision=precision,
        )

    return build


def _recurrent(kind: Any, batch: int, width: int) -> Callable[[Stage], Step]:
    def build(stage: Stage) -> Step:
        tokens = torch.randint(1000, (stage.size(batch, 2), stage.size(64, 4)), device=stage.device)
        model = networks.Recurrent(kind, 1000, stage.size(width, 16), 2)
        return _loop(stage, model, lambda m: functional.cross_entropy(m(tokens), tokens[:, 0]))

    return build


def _recommender(stage: Stage) -> Step:
    batch, rows, tables = stage.size(4096, 8), stage.size(200_000, 50), stage.size(8, 2)
    dense = torch.randn(batch, 13, device=stage.device)
    indices = torch.randint(rows, (tables, batch, 16), device=stage.device)
    model = networks.Recommender(tables, rows, stage.size(64, 8), sparse=False)
    return _loop(stage, model, lambda m: m(dense, indices).square().mean(), optimiser=torch.optim.SGD)


def _diffusion(stage: Stage) -> Step:
    latents = torch.randn(stage.size(32, 2), 4, stage.size(64, 8), stage.size(64, 8), device=stage.device)
    return _loop(
        stage, networks.UNet(stage.size(64, 8)), lambda m: (m(latents) - latents).square().mean(), precision="bf16"
    )


def _graph(stage: Stage) -> Step:
    nodes, edges, width = stage.size(100_000, 50), stage.size(1_000_000, 200), stage.size(64, 8)
    features = torch.randn(nodes, width, device=stage.device)
    source, target = torch.randint(nodes, (2, edges), device=stage.device)
    model = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])

    def loss(layers: Any) -> Any:
        x = features
        for layer in layers:
            x = functional.relu(layer(torch.zeros_like(x).index_add_(0, target, x[source])))
        return x.square().mean()

    return _loop(stage, model, loss)


def _perceptron(stage: Stage) -> Step:
    wide = stage.size(4096, 16)
    x = torch.randn(stage.size(1024, 4), wide, device=stage.device)
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(wide, wide), nn.ReLU())])
    return _loop(stage, model, lambda m: m(x).square().mean(), precision="fp16", optimiser=torch.optim.SGD)


def _autoencoder(stage: Stage) -> Step:
    wide = stage.size(4096, 16)
    x = torch.randn(stage.size(512, 4), wide, device=stage.device)
    sizes = (wide, stage.size(1024, 8), stage.size(128, 4), stage.size(1024, 8), wide)
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    return _loop(stage, model, lambda m: (m(x) - x).square().mean(), precision="tf32")


def _pictures(stage: Stage) -> Step:
    noise = torch.randn(stage.size(64, 2), 128, 1, 1, device=stage.device)
    return _loop(stage, networks.generator(stage.size(64, 4)), lambda m: m(noise).square().mean())


def at_batch(program: str, batch: int) -> Workload:
    """Return one of two training programs at another batch size than its usual one."""
    build = {
        "resnet50-train-fp32": _cnn(networks.resnet50, batch, 128, "fp32"),
        "bert-train-bf16": _language(768, 6, batch, 128, "bf16", causal=False),
    }[program]
    return Workload(f"{program}-b{batch}", build)


WORKLOADS: Final = (
    Workload("resnet50-train-fp32-b32", _cnn(networks.resnet50, 32, 128, "fp32")),
    Workload("gpt-train-tf32-b8", _language(768, 6, 8, 256, "tf32", causal=True)),
    Workload("lstm-train-fp32-b64", _recurrent(nn.LSTM, 64, 512)),
    Workload("resnet18-cifar-train-fp32-b128", _cnn(networks.resnet18_cifar, 128, 32, "fp32")),
    Workload("dlrm-train-fp32-b4096", _recommender),
    Workload("bert-train-bf16-b16", _language(768, 6, 16, 128, "bf16", causal=False)),
    Workload("unet-train-bf16-b32", _diffusion),
    Workload("gcn-train-fp32-1medges", _graph),
    Workload("resnet50-train-bf16-b64", _cnn(networks.resnet50, 64, 160, "bf16")),
    Workload("mobilenet-train-tf32-b64", _cnn(networks.mobilenet, 64, 160, "tf32")),
    Workload("mlp-train-fp16-b1024", _perceptron),
    Workload("vgg-train-bf16-b32", _cnn(networks.vgg, 32, 112, "bf16")),
    Workload("gpt-train-bf16-b4", _language(1024, 4, 4, 512, "bf16", causal=True)),
    Workload("autoencoder-train-tf32-b512", _autoencoder),
    Workload("dcgan-train-fp32-b64", _pictures),
)
