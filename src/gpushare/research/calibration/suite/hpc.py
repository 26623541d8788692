"""HPC kernels: matrix products in every precision, FFT, stencil, Monte Carlo, n-body, sparse, sort, streams."""

from collections.abc import Callable
from typing import Any, Final

import torch

from gpushare.research.calibration.suite import cuda_kernels
from gpushare.research.calibration.workload import Stage, Step, Workload


def _repeat(times: int, call: Step) -> Step:
    def step() -> None:
        for _ in range(times):
            call()

    return step


def _product(side: int, kind: Any, times: int, *, tf32: bool = False) -> Callable[[Stage], Step]:
    def build(stage: Stage) -> Step:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        n = stage.size(side, 16)
        a, b = (torch.randn(n, n, device=stage.device, dtype=kind) for _ in range(2))
        out = torch.empty_like(a)
        return _repeat(times, lambda: torch.mm(a, b, out=out))

    return build


def _product_int8(stage: Stage) -> Step:
    n = stage.size(8192, 32)
    a, b = (torch.randint(-8, 8, (n, n), device=stage.device, dtype=torch.int8) for _ in range(2))
    return _repeat(1, lambda: torch._int_mm(a, b.t()))  # noqa: SLF001 -- the only int8 product PyTorch offers


def _fft(stage: Stage) -> Step:
    x = torch.randn(
        stage.size(64, 2), stage.size(512, 8), stage.size(512, 8), device=stage.device, dtype=torch.complex64
    )
    return lambda: torch.fft.ifft2(torch.fft.fft2(x))


def _stencil(stage: Stage) -> Step:
    n = stage.size(320, 8)
    grid = torch.randn(n, n, n, device=stage.device, dtype=torch.float64)
    inner = slice(1, -1)

    def step() -> None:
        total = grid[2:, inner, inner] + grid[:-2, inner, inner]
        total += grid[inner, 2:, inner]
        total += grid[inner, :-2, inner]
        total += grid[inner, inner, 2:]
        total += grid[inner, inner, :-2]
        grid[inner, inner, inner] = total / 6.0

    return step


def _options(stage: Stage) -> Step:
    paths = stage.size(4_000_000, 100)

    def step() -> None:
        price = torch.full((paths,), 100.0, device=stage.device)
        for _ in range(8):
            price = price * torch.exp(0.2 * torch.randn(paths, device=stage.device) - 0.02)
        torch.relu(price - 100.0).mean()

    return step


def _sparse(stage: Stage) -> Step:
    n, entries = stage.size(200_000, 20), stage.size(4_000_000, 60)
    where = torch.randint(n, (2, entries), device=stage.device)
    matrix = torch.sparse_coo_tensor(where, torch.randn(entries, device=stage.device), (n, n)).coalesce()
    dense = torch.randn(n, 32, device=stage.device)
    compressed = matrix.to_sparse_csr()
    return lambda: torch.sparse.mm(compressed, dense)


def _sort(stage: Stage) -> Step:
    keys = torch.randint(2**31 - 1, (stage.size(16_000_000, 100),), device=stage.device, dtype=torch.int32)
    return lambda: torch.sort(keys)


def _stream(stage: Stage) -> Step:
    a = torch.randn(stage.size(2**27, 64), device=stage.device)
    b = torch.empty_like(a)
    return _repeat(4, lambda: b.copy_(a))


def _reduce(stage: Stage) -> Step:
    x = torch.randn(stage.size(8192, 8), stage.size(8192, 8), device=stage.device, dtype=torch.bfloat16)
    return lambda: torch.softmax(x, 1).sum()


def _cholesky(stage: Stage) -> Step:
    n = stage.size(1024, 8)
    x = torch.randn(stage.size(16, 2), n, n, device=stage.device, dtype=torch.float64)
    matrix = x @ x.mT + n * torch.eye(n, device=stage.device, dtype=torch.float64)
    return lambda: torch.linalg.cholesky_ex(matrix)


def _transpose(stage: Stage) -> Step:
    x = torch.randn(stage.size(8192, 8), stage.size(8192, 8), device=stage.device)
    out = torch.empty_like(x)
    return lambda: out.copy_(x.t())


def _scan(stage: Stage) -> Step:
    x = torch.randn(stage.size(2**26, 64), device=stage.device)
    out = torch.empty_like(x)
    return lambda: torch.cumsum(x, 0, out=out)


def _gather(stage: Stage) -> Step:
    table = torch.randn(stage.size(2**26, 64), device=stage.device)
    index = torch.randint(len(table), (stage.size(2**24, 32),), device=stage.device)
    out = torch.empty(len(index), device=stage.device)
    return lambda: torch.index_select(table, 0, index, out=out)


def _convolution(stage: Stage) -> Step:
    side = stage.size(64, 8)
    x = torch.randn(4, 16, side, side, side, device=stage.device)
    layer = torch.nn.Conv3d(16, 16, 3, padding=1).to(stage.device).requires_grad_(False)
    return lambda: layer(x)


WORKLOADS: Final = (
    Workload("gemm-fp32-4096", _product(4096, torch.float32, 1)),
    Workload("stream-fp32-512m", _stream),
    Workload("gemm-fp64-4096", _product(4096, torch.float64, 1)),
    Workload("fft2-fp32-64x512", _fft),
    Workload("nbody-fp32-64k", cuda_kernels.nbody, needs_cuda=True),
    Workload("gemm-fp16-8192", _product(8192, torch.float16, 1)),
    Workload("sort-int32-16m", _sort),
    Workload("stencil-fp64-320", _stencil),
    Workload("montecarlo-fp64-pi", cuda_kernels.pi_fp64, needs_cuda=True),
    Workload("hash-int32-1m", cuda_kernels.hashes, needs_cuda=True),
    Workload("gemm-tf32-2048", _product(2048, torch.float32, 4, tf32=True)),
    Workload("montecarlo-fp32-options", _options),
    Workload("spmm-fp32-4m", _sparse),
    Workload("softmax-bf16-8k", _reduce),
    Workload("gemm-int8-8192", _product_int8, needs_cuda=True),
    Workload("cholesky-fp64-1024x16", _cholesky),
    Workload("gemm-bf16-4096", _product(4096, torch.bfloat16, 2)),
    Workload("gemm-fp32-1024", _product(1024, torch.float32, 8)),
    Workload("gemm-fp64-1024", _product(1024, torch.float64, 8)),
    Workload("transpose-fp32-8k", _transpose),
    Workload("scan-fp32-64m", _scan),
    Workload("gather-fp32-16m", _gather),
    Workload("conv3d-tf32-64", _convolution),
)
