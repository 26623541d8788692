"""Networks of the suite, in the shapes of the well-known models, written small."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def _norm_conv(channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> Any:
    return nn.Sequential(
        nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(out)
    )


class Residual(nn.Module):
    """A residual block: basic (two 3x3) or bottleneck (1x1, 3x3, 1x1 with four times the channels)."""

    def __init__(self, channels: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        out = width * 4 if bottleneck else width
        if bottleneck:
            self.body = nn.Sequential(
                _norm_conv(channels, width, 1),
                nn.ReLU(),
                _norm_conv(width, width, 3, stride),
                nn.ReLU(),
                _norm_conv(width, out, 1),
            )
        else:
            self.body = nn.Sequential(_norm_conv(channels, width, 3, stride), nn.ReLU(), _norm_conv(width, out, 3))
        self.skip = nn.Identity() if stride == 1 and channels == out else _norm_conv(channels, out, 1, stride)

    def forward(self, x: Any) -> Any:
        """Add the skip connection to the body."""
        return functional.relu(self.body(x) + self.skip(x))


def resnet(depths: tuple[int, ...], *, bottleneck: bool, cifar: bool = False, classes: int = 1000) -> Any:
    """Return a ResNet (He et al. 2016): 18 is (2, 2, 2, 2) basic, 50 is (3, 4, 6, 3) bottleneck."""
    stem = [_norm_conv(3, 64, 3)] if cifar else [_norm_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    layers: list[Any] = [*stem, nn.ReLU()]
    channels = 64
    for stage, depth in enumerate(depths):
        for block in range(depth):
            width = 64 * 2**stage
            layers.append(Residual(channels, width, 2 if stage and not block else 1, bottleneck=bottleneck))
            channels = width * 4 if bottleneck else width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def resnet18() -> Any:
    """Return ResNet-18 for ImageNet's classes."""
    return resnet((2, 2, 2, 2), bottleneck=False)


def resnet18_cifar() -> Any:
    """Return ResNet-18 for CIFAR's small pictures."""
    return resnet((2, 2, 2, 2), bottleneck=False, cifar=True, classes=10)


def resnet50() -> Any:
    """Return ResNet-50 for ImageNet's classes."""
    return resnet((3, 4, 6, 3), bottleneck=True)


def mobilenet(classes: int = 1000) -> Any:
    """Return depthwise separable convolutions in the shape of MobileNet v1 (Howard et al. 2017)."""
    layers: list[Any] = [_norm_conv(3, 32, 3, 2), nn.ReLU()]
    channels = 32
    for out, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2)):
        layers += [
            _norm_conv(channels, channels, 3, stride, groups=channels),
            nn.ReLU(),
            _norm_conv(channels, out, 1),
            nn.ReLU(),
        ]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def vgg(classes: int = 1000) -> Any:
    """Return plain 3x3 convolutions in the shape of VGG-16 (Simonyan and Zisserman 2015) with one linear layer."""
    layers: list[Any] = []
    channels = 3
    for out, depth in ((64, 2), (128, 2), (256, 3), (512, 3)):
        for _ in range(depth):
            layers += [_norm_conv(channels, out, 3), nn.ReLU()]
            channels = out
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def generator(width: int) -> Any:
    """Return a generator of noise (batch, 128, 1, 1) to pictures of 64 x 64, as DCGAN's (Radford et al. 2016)."""
    layers: list[Any] = [nn.ConvTranspose2d(128, 8 * width, 4), nn.BatchNorm2d(8 * width), nn.ReLU()]
    for factor in (4, 2, 1):
        layers += [
            nn.ConvTranspose2d(2 * factor * width, factor * width, 4, 2, 1),
            nn.BatchNorm2d(factor * width),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())


class Transformer(nn.Module):
    """Encoder or decoder stack over tokens with a tied-size head, in the shape of BERT or GPT."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int, *, causal: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)
        self.heads = heads
        self.causal = causal

    def forward(self, tokens: Any) -> Any:
        """Map tokens (batch, length) to logits (batch, length, vocabulary); float input skips the embedding."""
        x = tokens if tokens.is_floating_point() else self.embed(tokens)
        batch, length, width = x.shape
        for layer in self.layers:
            q, k, v = (
                part.view(batch, length, self.heads, -1).transpose(1, 2)
                for part in layer["qkv"](layer["norm1"](x)).split(width, -1)
            )
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            x = x + layer["out"](mixed.transpose(1, 2).reshape(batch, length, width))
            x = x + layer["down"](functional.gelu(layer["up"](layer["norm2"](x))))
        return self.head(x)


class Recurrent(nn.Module):
    """Embedding, a recurrent stack and a head over the last state."""

    def __init__(self, kind: Any, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.core = kind(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Any) -> Any:
        """Map tokens (batch, length) to logits (batch, vocabulary)."""
        return self.head(self.core(self.embed(tokens))[0][:, -1])


class Recommender(nn.Module):
    """Embedding bags and a multilayer perceptron, in the shape of DLRM (Naumov et al. 2019)."""

    def __init__(self, tables: int, rows: int, width: int, *, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(width * (tables + 1), 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, dense: Any, indices: Any) -> Any:
        """Map dense features (batch, 13) and indices (tables, batch, bag) to a click logit (batch, 1)."""
        looked_up = [table(index) for table, index in zip(self.tables, indices, strict=True)]
        return self.top(torch.cat([self.bottom(dense), *looked_up], 1))


class UNet(nn.Module):
    """A small diffusion U-Net: two levels down, attention in the middle, two up."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def block(channels: int, out: int, stride: int = 1) -> Any:
            groups = min(8, out)
            return nn.Sequential(
                nn.Conv2d(channels, out, 3, stride, 1),
                nn.GroupNorm(groups, out),
                nn.SiLU(),
                nn.Conv2d(out, out, 3, 1, 1),
                nn.GroupNorm(groups, out),
                nn.SiLU(),
            )

        self.down1, self.down2, self.middle = (
            block(4, width),
            block(width, 2 * width, 2),
            block(2 * width, 4 * width, 2),
        )
        self.attention = nn.MultiheadAttention(4 * width, 4, batch_first=True)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.out = nn.Conv2d(width, 4, 1)

    def forward(self, x: Any) -> Any:
        """Map noisy latents (batch, 4, height, width) to predicted noise of the same shape."""
        a = self.down1(x)
        b = self.down2(a)
        c = self.middle(b)
        flat = c.flatten(2).transpose(1, 2)
        c = c + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).reshape(c.shape)
        b = self.up2(torch.cat([functional.interpolate(c, scale_factor=2.0), b], 1))
        return self.out(self.up1(torch.cat([functional.interpolate(b, scale_factor=2.0), a], 1)))
