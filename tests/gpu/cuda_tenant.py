"""A CUDA tenant by the driver's API alone (ctypes and PTX): runs in any image with Python, nothing to compile.

    python cuda_tenant.py MODE SECONDS [MIB] [--env NAME=VALUE ...]

MODE run: MIB, then kernels; fill: 64 MiB at a time until refused, then kernels; long: one kernel of SECONDS;
fault: access memory that is not there after a third of SECONDS; swell: kernels, and soon ever more of the host's
memory beside them, until its container's limit ends it. One JSON line an event. --env sets variables
where no admission sees them: in the program itself, before CUDA starts.
"""

import argparse
import ctypes
import json
import os
import sys
import threading
import time
import uuid

PTX = b"""
.version 6.5
.target sm_70
.address_size 64
.visible .entry work(.param .u64 out, .param .u64 rounds)
{
    .reg .pred %p<3>;
    .reg .f32 %f<2>;
    .reg .b32 %r<2>;
    .reg .b64 %d<4>;
    ld.param.u64 %d0, [out];
    ld.param.u64 %d1, [rounds];
    mov.u32 %r0, %tid.x;
    cvt.rn.f32.u32 %f0, %r0;
    mov.u64 %d2, 0;
again:
    fma.rn.f32 %f0, %f0, 0f3F800347, 0f3F000000;
    add.u64 %d2, %d2, 1;
    setp.lt.u64 %p0, %d2, %d1;
    @%p0 bra again;
    setp.neu.f32 %p1, %f0, 0f4640E6B7;
    @%p1 bra done;
    st.global.f32 [%d0], %f0;
done:
    ret;
}
.visible .entry spin(.param .u64 out, .param .u64 cycles)
{
    .reg .pred %p<2>;
    .reg .b64 %d<5>;
    ld.param.u64 %d0, [cycles];
    mov.u64 %d1, %clock64;
wait:
    mov.u64 %d2, %clock64;
    sub.u64 %d3, %d2, %d1;
    setp.lt.u64 %p0, %d3, %d0;
    @%p0 bra wait;
    ret;
}
.visible .entry illegal(.param .u64 out, .param .u64 cycles)
{
    .reg .b64 %d<2>;
    .reg .b32 %r<2>;
    mov.u64 %d0, 16;
    mov.u32 %r0, 1;
    st.volatile.global.u32 [%d0], %r0;
    ret;
}
\0"""
SM_COUNT, CLOCK_KHZ, OUT_OF_MEMORY = 16, 13, 2  # CUdevice_attribute, CUresult
FALLBACK_KHZ = 1_500_000
SWELL_AFTER_SECONDS, STEP_MIB, MOST_HOST_MIB = 1.5, 16, 4096


def say(event: str, **more: object) -> None:
    print(json.dumps({"t": round(time.time(), 3), "pid": os.getpid(), "event": event, **more}), flush=True)


def limits() -> dict[str, str]:
    """What this container is told of its limits (docs/adr/0250)."""
    return {
        key: value for key, value in os.environ.items() if key.startswith(("GPUSHARE_MEMORY", "GPUSHARE_THREAD"))
    }


class Cuda:
    """One context on GPU 0."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self._device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(self._device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        """Call the driver; an error other than a refused allocation is said, and ends the program."""
        code = getattr(self._lib, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(code, ctypes.byref(text))
            say("error", what=name, code=code, error=(text.value or b"").decode())
            sys.exit(1)

    def attribute(self, number: int) -> int:
        found = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(found), number, self._device)
        return found.value

    def gpus(self) -> list[str]:
        """The UUIDs of all GPUs that this process sees, as NVML writes them."""
        number, found = ctypes.c_int(), []
        self.call("cuDeviceGetCount", ctypes.byref(number))
        for ordinal in range(number.value):
            device, octets = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            self.call("cuDeviceGet", ctypes.byref(device), ordinal)
            self.call("cuDeviceGetUuid", ctypes.byref(octets), device)
            found.append(f"GPU-{uuid.UUID(bytes=bytes(octets))}")
        return found

    def memory_mib(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value >> 20, total.value >> 20

    def allocate(self, size: int) -> "ctypes.c_uint64 | None":
        """Allocate and touch; None where it is refused."""
        place = ctypes.c_uint64()
        code = self._lib.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(size))
        if code == OUT_OF_MEMORY:
            return None
        if code:
            self.call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
        self.call("cuMemsetD8_v2", place, 1, ctypes.c_size_t(size))
        return place

    def load(self) -> None:
        self._module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(self._module), PTX)
        self._kernels = {}
        for name in ("work", "spin", "illegal"):
            self._kernels[name] = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(self._kernels[name]), self._module, name.encode())

    def launch(self, name: str, blocks: int, threads: int, out: ctypes.c_uint64, argument: int) -> None:
        """Launch a kernel and wait for its end."""
        second = ctypes.c_uint64(argument)
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(out), ctypes.addressof(second))
        self.call("cuLaunchKernel", self._kernels[name], blocks, 1, 1, threads, 1, 1, 0, None, pointers, None)
        self.call("cuCtxSynchronize")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("run", "fill", "long", "fault", "swell"))
    parser.add_argument("seconds", type=float)
    parser.add_argument("mib", type=int, nargs="?", default=0)
    parser.add_argument("--env", action="append", default=[])
    options = parser.parse_args()
    say("start", uid=os.getuid())
    os.environ.update(setting.split("=", 1) for setting in options.env)
    began = time.time()
    cuda = Cuda()
    sms = cuda.attribute(SM_COUNT)
    free, total = cuda.memory_mib()
    taken = round(time.time() - began, 3)
    gpus, told = cuda.gpus(), limits()
    say("context", start_s=taken, sms=sms, free_mib=free, total_mib=total, told=told, gpus=gpus)
    out = cuda.allocate(4096)
    if out is None:
        say("error", what="first allocation", code=OUT_OF_MEMORY, error="out of memory")
        sys.exit(1)
    cuda.load()
    _allocate(cuda, options.mode, options.mib)
    if options.mode == "long":
        say("long")
        cuda.launch("spin", sms, 32, out, int(options.seconds * (cuda.attribute(CLOCK_KHZ) or FALLBACK_KHZ) * 1e3))
    _run(cuda, options.mode, options.seconds, sms, out)
    say("end")


def _allocate(cuda: Cuda, mode: str, mib: int) -> None:
    if mode == "fill":
        filled = 0
        while cuda.allocate(64 << 20) is not None:
            filled += 64
        say("filled", mib=filled)
    elif mib:
        say("alloc", mib=mib, ok=cuda.allocate(mib << 20) is not None)


def _run(cuda: Cuda, mode: str, seconds: float, sms: int, out: ctypes.c_uint64) -> None:
    begin = last = time.time()
    launches = total = 0
    is_swelling = False
    while (now := time.time()) - begin < seconds:
        cuda.launch("work", sms, 256, out, 20000)
        launches, total = launches + 1, total + 1
        if total == 1:
            say("kernel")
        if mode == "fault" and now - begin > seconds / 3:
            say("faulting")
            cuda.launch("illegal", 1, 1, out, 0)
        if mode == "swell" and now - begin > SWELL_AFTER_SECONDS and not is_swelling:
            say("swelling")
            is_swelling = True
            threading.Thread(target=swell, daemon=True).start()  # kernels go on meanwhile
        if now - last > 0.5:
            say("rate", per_s=round(launches / (now - last), 1), total=total)
            launches, last = 0, now


def swell(most_mib: int = MOST_HOST_MIB) -> None:
    """Take host memory and touch it until the kernel ends this process, or there is so much of it."""
    taken = []
    while len(taken) * STEP_MIB < most_mib:
        taken.append(b"x" * (STEP_MIB << 20))
        time.sleep(0.01)


if __name__ == "__main__":
    main()
