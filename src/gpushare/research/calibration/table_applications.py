"""Whole PyTorch applications with phases, small enough that a round through all phases takes well below a second.

`_rounds` makes a program of its parts: one iteration runs every part once, from a random part on, so that programs
which are started together do not stay in step.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gpushare.research.calibration.suite import networks
from gpushare.research.calibration.workload import Stage, Step

WorkPart = Callable[[], Any]


def _rounds(*parts: WorkPart) -> Step:
    chance = random.Random(os.getpid())

    def step() -> None:
        first = chance.randrange(len(parts))
        for part in (*parts[first:], *parts[:first]):
            part()

    return step


def _checkpoint(model: nn.Module) -> WorkPart:
    """Make the part that copies the weights to the host in half precision and writes them to a file."""

    def save() -> None:
        state = {name: each.detach().to(torch.bfloat16).cpu() for name, each in model.state_dict().items()}
        with tempfile.TemporaryFile() as file:
            torch.save(state, file)

    return save


def pictures(stage: Stage) -> Step:
    """Train a wide ResNet: crops and flips on the host, steps in bf16, evaluation, a checkpoint."""
    batch = stage.size(128, 2)
    blocks = [networks.Residual(64, 128, 1, bottleneck=False)]
    for width, out in ((128, 256), (256, 512)):
        blocks += [
            networks.Residual(width, out, 2, bottleneck=False),
            networks.Residual(out, out, 1, bottleneck=False),
        ]
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)
    )
    model.to(stage.device).train()
    update = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    draw = np.random.default_rng(1)
    stored = draw.integers(0, 256, (1024, 3, 40, 40), dtype=np.uint8)
    labels = torch.randint(10, (batch,), device=stage.device)
    unseen = torch.randn(2 * batch, 3, 32, 32, device=stage.device)
    save = _checkpoint(model)

    def load() -> Any:
        top, left = draw.integers(0, 9, 2)
        chosen = stored[draw.integers(0, len(stored), batch), :, top : top + 32, left : left + 32]
        if draw.random() < 0.5:
            chosen = chosen[..., ::-1]
        return torch.from_numpy(np.ascontiguousarray(chosen)).to(stage.device).float().div_(255.0)

    def train() -> None:
        update.zero_grad(set_to_none=True)
        with torch.autocast(stage.device, torch.bfloat16):
            loss = functional.cross_entropy(model(load()), labels)
        loss.backward()
        update.step()

    def evaluate() -> None:
        with torch.no_grad(), torch.autocast(stage.device, torch.bfloat16):
            model(unseen).argmax(1).float().mean().item()

    return _rounds(*[train] * 5, evaluate, evaluate, save)


def translation(stage: Stage) -> Step:
    """Train an encoder and decoder on sentences of three lengths; validation, greedy decoding and a checkpoint."""
    torch.backends.cuda.matmul.allow_tf32 = True
    width, vocabulary, batch = stage.size(384, 32), stage.size(4000, 50), stage.size(96, 2)
    core = nn.Transformer(width, width // 32, 3, 3, 4 * width, dropout=0.0, batch_first=True)
    model = nn.ModuleList([nn.Embedding(vocabulary, width), core, nn.Linear(width, vocabulary)])
    model.to(stage.device).train()
    update = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lengths = [stage.size(length, 4) for length in (32, 48, 80)]
    sentences = {length: torch.randint(vocabulary, (batch, length), device=stage.device) for length in lengths}

    def logits(source: Any, target: Any) -> Any:
        embed, middle, head = model
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=stage.device)
        return head(middle(embed(source), embed(target), tgt_mask=mask))

    def loss(length: int) -> Any:
        tokens = sentences[length]
        return functional.cross_entropy(logits(tokens, tokens).flatten(0, 1), tokens.flatten())

    def train(length: int) -> WorkPart:
        def part() -> None:
            update.zero_grad(set_to_none=True)
            loss(length).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update.step()

        return part

    def validate() -> None:
        with torch.no_grad():
            loss(lengths[1]).item()

    def decode() -> None:
        source = sentences[lengths[0]][:16]
        target = source[:, :1]
        with torch.no_grad():
            for _ in range(3):
                target = torch.cat([target, logits(source, target)[:, -1:].argmax(-1)], 1)
        target.tolist()

    return _rounds(*[train(length) for length in lengths], validate, decode, _checkpoint(model[1].decoder))


def volumes(stage: Stage) -> Step:
    """Train a 3-D segmentation net: crops on the host, scaled fp16 steps, evaluation, checkpoint."""
    side, batch, width = stage.size(48, 8), stage.size(2, 1), stage.size(24, 2)

    def block(channels: int, out: int, stride: int = 1) -> Any:
        layers = []
        for taken, given, by in ((channels, out, stride), (out, out, 1)):
            layers += [nn.Conv3d(taken, given, 3, by, 1), nn.InstanceNorm3d(given, affine=True), nn.LeakyReLU()]
        return nn.Sequential(*layers)

    model = nn.ModuleList(
        [
            block(1, width),
            block(width, 2 * width, 2),
            block(2 * width, 4 * width, 2),
            block(6 * width, 2 * width),
            block(3 * width, width),
            nn.Conv3d(width, 2, 1),
        ]
    ).to(stage.device)
    update = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(stage.device)
    draw = np.random.default_rng(2)
    whole = draw.normal(size=(2 * side, 2 * side, 2 * side)).astype(np.float32)

    def load() -> Any:
        corners = draw.integers(0, side, (batch, 3))
        crops = np.stack([whole[x : x + side, y : y + side, z : z + side] for x, y, z in corners])
        return torch.from_numpy((crops - crops.mean()) / crops.std()).to(stage.device)[:, None]

    def forward(x: Any) -> Any:
        first, second, third, fourth, fifth, last = model
        a = first(x)
        b = second(a)
        c = functional.interpolate(third(b), scale_factor=2.0)
        b = functional.interpolate(fourth(torch.cat([c, b], 1)), scale_factor=2.0)
        return last(fifth(torch.cat([b, a], 1)))

    def train() -> None:
        x = load()
        update.zero_grad(set_to_none=True)
        with torch.autocast(stage.device, torch.float16):
            loss = functional.cross_entropy(forward(x), (x[:, 0] > 0.5).long())
        scaler.scale(loss).backward()
        scaler.step(update)
        scaler.update()

    def evaluate() -> None:
        x = load()
        with torch.no_grad(), torch.autocast(stage.device, torch.float16):
            guess = forward(x).argmax(1).float()
        (2.0 * (guess * (x[:, 0] > 0.5)).sum() / (guess.sum() + 1.0)).item()

    return _rounds(*[train] * 3, evaluate, evaluate, _checkpoint(model))


def policy(stage: Stage) -> Step:
    """Return reinforcement learning in a simulation: rollouts, two epochs of clipped updates, an evaluation."""
    count, wide, seen = stage.size(8192, 4), stage.size(512, 8), stage.size(48, 4)
    actor = nn.Sequential(nn.Linear(seen, wide), nn.ELU(), nn.Linear(wide, wide), nn.ELU(), nn.Linear(wide, 12))
    critic = nn.Sequential(nn.Linear(seen, wide), nn.ELU(), nn.Linear(wide, wide), nn.ELU(), nn.Linear(wide, 1))
    both = nn.ModuleList([actor, critic]).to(stage.device)
    update = torch.optim.Adam(both.parameters(), lr=3e-4)
    world = torch.randn(12, seen, device=stage.device)
    start = torch.randn(count, seen, device=stage.device)
    kept: dict[str, Any] = {}

    def move(state: Any, action: Any) -> tuple[Any, Any]:
        after = torch.tanh(0.9 * state + 0.1 * action @ world)
        return after, -after.square().mean(1)

    def rollout() -> None:
        states, actions, rewards = [], [], []
        state = start
        with torch.no_grad():
            for _ in range(10):
                action = actor(state)
                action = action + 0.3 * torch.randn_like(action)
                states.append(state)
                actions.append(action)
                state, reward = move(state, action)
                rewards.append(reward)
            value = critic(state)[:, 0]
            returns = []
            for reward in reversed(rewards):
                value = reward + 0.97 * value
                returns.append(value)
            kept["states"], kept["actions"] = torch.cat(states), torch.cat(actions)
            kept["returns"] = torch.cat(returns[::-1])
            kept["means"] = actor(kept["states"])

    def learn() -> None:
        for part in torch.randperm(10 * count, device=stage.device).chunk(3):
            state, action, goal = kept["states"][part], kept["actions"][part], kept["returns"][part]
            value = critic(state)[:, 0]
            gain = goal - value.detach()
            old = (action - kept["means"][part]).square().sum(1)
            ratio = torch.exp((old - (action - actor(state)).square().sum(1)).clamp(-5.0, 5.0))
            clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            update.zero_grad(set_to_none=True)
            ((value - goal).square().mean() - clipped.mean()).backward()
            nn.utils.clip_grad_norm_(both.parameters(), 1.0)
            update.step()

    def evaluate() -> None:
        state, total = start, torch.zeros(count, device=stage.device)
        with torch.no_grad():
            for _ in range(5):
                state, reward = move(state, actor(state))
                total += reward
        total.mean().item()

    rollout()
    return _rounds(rollout, learn, learn, evaluate)


def retrieval(stage: Stage) -> Step:
    """Return a search service: bursts of five requests, encoded and compared with an index, then 8 ms of quiet."""
    kind = torch.float32 if stage.device == "cpu" else torch.float16
    wide = stage.size(512, 32)
    model = networks.Transformer(stage.size(2048, 64), wide, wide // 64 or 1, stage.size(4, 1), causal=False)
    model.to(stage.device, kind).eval().requires_grad_(False)
    index = torch.randn(stage.size(256, 16), stage.size(400_000, 100), device=stage.device, dtype=kind)
    requests = [torch.randint(64, (stage.size(size, 1), 48)) for size in (1, 4, 16, 8, 2)]

    def serve(tokens: Any) -> WorkPart:
        def part() -> None:
            with torch.inference_mode():
                query = model(tokens.to(stage.device))[:, 0, : index.shape[0]]
                functional.normalize(query.float(), dim=1).to(kind).matmul(index).topk(10).indices.cpu()

        return part

    return _rounds(*[serve(tokens) for tokens in requests], lambda: time.sleep(0.008))


def chat(stage: Stage) -> Step:
    """Serve a language model: eight prompts, ten tokens each from a cache, 4 ms until the next."""
    kind = torch.float32 if stage.device == "cpu" else torch.bfloat16
    wide, depth, users = stage.size(1024, 32), stage.size(8, 1), stage.size(8, 2)
    heads, prompt, answers = wide // 32 // 2 or 1, stage.size(192, 8), 10
    layers = [
        [
            nn.Linear(taken, given, bias=False).to(stage.device, kind).requires_grad_(False)
            for taken, given in ((wide, 3 * wide), (wide, wide), (wide, 4 * wide), (4 * wide, wide))
        ]
        for _ in range(depth)
    ]
    words = torch.randn(stage.size(8000, 64), wide, device=stage.device, dtype=kind) * 0.02
    cache = torch.zeros(depth, 2, users, heads, prompt + answers, wide // heads, device=stage.device, dtype=kind)
    asked = torch.randint(len(words), (users, prompt))

    def forward(tokens: Any, at: int) -> Any:
        x = functional.embedding(tokens, words)
        length = tokens.shape[1]
        for (qkv, out, up, down), (keys, values) in zip(layers, cache, strict=True):
            q, k, v = (
                each.view(users, length, heads, -1).transpose(1, 2)
                for each in qkv(functional.layer_norm(x, (wide,))).split(wide, -1)
            )
            keys[:, :, at : at + length] = k
            values[:, :, at : at + length] = v
            seen = at + length
            mixed = functional.scaled_dot_product_attention(
                q, keys[:, :, :seen], values[:, :, :seen], is_causal=length > 1
            )
            x = x + out(mixed.transpose(1, 2).reshape(users, length, wide))
            x = x + down(functional.gelu(up(functional.layer_norm(x, (wide,)))))
        return (functional.layer_norm(x[:, -1:], (wide,)) @ words.t()).argmax(-1)

    def step() -> None:
        time.sleep(0.004)
        with torch.inference_mode():
            token = forward(asked.to(stage.device), 0)
            for place in range(answers - 1):
                token.tolist()
                token = forward(token, prompt + place)
            token.tolist()

    return step
