"""Programs written as CUDA C, compiled by CuPy at start: the compute-bound ones PyTorch's operators lack."""

from collections.abc import Callable
from typing import Any, Final

import torch

from gpushare.research.calibration.workload import Stage, Step

_SOURCE: Final = r"""
extern "C" __global__ void nbody(const float4* p, float4* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; __shared__ float4 tile[256];
  float4 me = p[i]; float ax = 0, ay = 0, az = 0;
  for (int t = 0; t < n; t += 256) {
    tile[threadIdx.x] = p[t + threadIdx.x]; __syncthreads();
    #pragma unroll 8
    for (int j = 0; j < 256; ++j) {
      float dx = tile[j].x - me.x, dy = tile[j].y - me.y, dz = tile[j].z - me.z;
      float r = rsqrtf(dx * dx + dy * dy + dz * dz + 1e-3f), f = r * r * r;
      ax += dx * f; ay += dy * f; az += dz * f;
    }
    __syncthreads();
  }
  out[i] = make_float4(ax, ay, az, 0);
}
extern "C" __global__ void pi_fp64(double* out, int rounds) {
  unsigned s = blockIdx.x * blockDim.x + threadIdx.x + 1; double hits = 0;
  for (int i = 0; i < rounds; ++i) {
    s = s * 1664525u + 1013904223u; double x = s * 2.3283064365386963e-10;
    s = s * 1664525u + 1013904223u; double y = s * 2.3283064365386963e-10;
    double d = fma(x, x, y * y); hits += fma(d, -0.25, 1.0) * d;
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = hits;
}
extern "C" __global__ void hashes(unsigned* data, int rounds) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; unsigned h = data[i];
  for (int r = 0; r < rounds; ++r) {
    h ^= h >> 16; h *= 0x85ebca6bu; h ^= h >> 13; h *= 0xc2b2ae35u; h ^= h >> 16; h += r;
  }
  data[i] = h;
}
extern "C" __global__ void chase(float* data, int rounds) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; float x = data[i];
  for (int r = 0; r < rounds; ++r) x = __sinf(x) * 1.0001f + 0.5f;
  data[i] = x;
}
extern "C" __global__ void spin(float* out, int rounds) {
  float x = threadIdx.x * 1e-3f, y = x + 1.0f;
  for (int r = 0; r < rounds; ++r) { x = fmaf(x, 0.999f, 0.1f); y = fmaf(y, 0.998f, 0.2f); }
  out[blockIdx.x * blockDim.x + threadIdx.x] = x + y;
}
"""


def _kernel(name: str, blocks: int, threads: int, arguments: Callable[[], tuple[Any, ...]]) -> Step:
    """Return a launcher on PyTorch's current stream."""
    import cupy  # noqa: PLC0415 -- only the CUDA machine has it

    kernel = cupy.RawKernel(_SOURCE, name)
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
    ready = tuple(cupy.asarray(each) if isinstance(each, torch.Tensor) else each for each in arguments())

    def step() -> None:
        with stream:
            kernel((blocks,), (threads,), ready)

    return step


def nbody(stage: Stage) -> Step:
    """Return all pairs of 65,536 bodies: fp32 arithmetic out of shared memory."""
    n = stage.size(65536, 256)
    bodies = torch.rand(n, 4, device=stage.device)
    return _kernel("nbody", n // 256, 256, lambda: (bodies, torch.empty_like(bodies), _int32(n)))


def pi_fp64(stage: Stage) -> Step:
    """Return a Monte Carlo integral on the plain fp64 pipe."""
    out = torch.zeros(132 * 8 * 256, device=stage.device, dtype=torch.float64)
    return _kernel("pi_fp64", 132 * 8, 256, lambda: (out, _int32(10_000)))


def hashes(stage: Stage) -> Step:
    """Return a million mixes of 32-bit integers at full occupancy."""
    data = torch.arange(2**20, device=stage.device, dtype=torch.int32)
    return _kernel("hashes", 2**20 // 256, 256, lambda: (data, _int32(1000)))


def chase(stage: Stage) -> Step:
    """Return 40 small blocks with a long chain of dependent operations.

    They leave most of the GPU idle, and a cap does not slow them.
    """
    data = torch.rand(40 * 128, device=stage.device)
    return _kernel("chase", 40, 128, lambda: (data, _int32(20_000)))


def spin(blocks: int, threads: int, rounds: int, launches: int) -> Callable[[Stage], Step]:
    """Return chains of fp32 multiply-adds on registers alone: kernels of any width and length."""

    def build(stage: Stage) -> Step:
        out = torch.zeros(blocks * threads, device=stage.device)
        once = _kernel("spin", blocks, threads, lambda: (out, _int32(rounds)))

        def step() -> None:
            for _ in range(launches):
                once()

        return step

    return build


def _int32(value: int) -> Any:
    import numpy as np  # noqa: PLC0415 -- CuPy takes scalars by NumPy's type

    return np.int32(value)
