"""Small real programs for one GPU: `python tests/gpu/programs.py NAME SECONDS [--rate-file F]`.

Prints the number of iterations and their rate at the end, or at SIGTERM; with --rate-file, writes time and count
four times a second. With --serve it says "ready" when warm, runs for as long as each number on standard input
says, answers with `COUNT SECONDS`, and ends with its input.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

Step = Callable[[], None]


def _product(dtype: torch.dtype, size: int) -> Step:
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    return lambda: _discard(torch.matmul(a, b))


def _discard(_: object) -> None:
    return None


def fp64_product() -> Step:
    return _product(torch.float64, 4096)


def fp32_product() -> Step:
    torch.backends.cuda.matmul.allow_tf32 = False
    return _product(torch.float32, 4096)


def fp16_product() -> Step:
    return _product(torch.float16, 8192)


def int8_product() -> Step:
    a, b = (torch.randint(-8, 8, (4096, 4096), device="cuda", dtype=torch.int8) for _ in range(2))
    return lambda: _discard(torch._int_mm(a, b.t()))


def _train(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, half: bool) -> Step:
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

    return step


def _cnn(width: int) -> nn.Module:
    def block(c_in: int, c_out: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1), nn.BatchNorm2d(c_out), nn.ReLU())

    return nn.Sequential(
        block(3, width),
        block(width, width),
        nn.MaxPool2d(2),
        block(width, 2 * width),
        block(2 * width, 2 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def cnn_train_fp32() -> Step:
    torch.backends.cudnn.allow_tf32 = False
    return _train(
        _cnn(64), torch.randn(256, 3, 32, 32, device="cuda"), torch.randint(10, (256,)).cuda(), half=False
    )


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


def transformer_train_bf16() -> Step:
    return _train(_Encoder(), torch.randn(32, 256, 512, device="cuda"), torch.randint(10, (32,)).cuda(), half=True)


def cnn_inference_b1() -> Step:
    model, image = _cnn(64).cuda().eval(), torch.randn(1, 3, 224, 224, device="cuda")

    def step() -> None:
        with torch.inference_mode():
            model(image).argmax().item()

    return step


def memory_stream() -> Step:
    a, b = (torch.randn(256 * 2**20 // 4, device="cuda") for _ in range(2))
    return lambda: _discard(a.add_(b, alpha=1e-6))


def fft() -> Step:
    signal = torch.randn(64, 2**18, device="cuda", dtype=torch.complex64)
    return lambda: _discard(torch.fft.fft(signal))


def sort_integers() -> Step:
    keys = torch.randint(2**31 - 1, (2**24,), device="cuda", dtype=torch.int32)
    return lambda: _discard(torch.sort(keys))


def tiny() -> Step:
    x = torch.randn(256, device="cuda")

    def step() -> None:
        x.mul_(1.0001).sum().item()
        time.sleep(0.001)

    return step


PROGRAMS: dict[str, Callable[[], Step]] = {
    f.__name__: f
    for f in (
        fp64_product,
        fp32_product,
        fp16_product,
        int8_product,
        cnn_train_fp32,
        transformer_train_bf16,
        cnn_inference_b1,
        memory_stream,
        fft,
        sort_integers,
        tiny,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(PROGRAMS))
    parser.add_argument("seconds", type=float, nargs="?", default=0.0)
    parser.add_argument("--rate-file", type=Path)
    parser.add_argument("--serve", action="store_true")
    read = parser.parse_args()
    if not read.serve:
        signal.signal(signal.SIGTERM, lambda number, _: _ending.append(number))
    step = PROGRAMS[read.name]()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    if read.serve:
        print("ready", flush=True)
        for line in sys.stdin:
            print(*run(step, float(line)), flush=True)
        return
    count, seconds = run(step, read.seconds, read.rate_file)
    print(f"{read.name}: {count} iterations, {count / seconds:.2f}/s", flush=True)


_ending: list[int] = []  # the signal that asked for the end


def run(step: Step, duration: float, rate_file: Path | None = None) -> tuple[int, float]:
    """Iterations and the seconds that they took."""
    started = reported = time.monotonic()
    count = 0
    while (now := time.monotonic()) - started < duration and not _ending:
        step()
        count += 1
        if count % 20 == 0:  # a full launch queue would hide the rate
            torch.cuda.synchronize()
        if rate_file and now - reported >= 0.25:
            rate_file.write_text(f"{now} {count}\n")
            reported = now
    torch.cuda.synchronize()
    return count, time.monotonic() - started


if __name__ == "__main__":
    main()
