// A CUDA tenant for gate_suite.py: says what it sees, one JSON line an event, and does what the suite asks for.
//
// usage: gate_tenant MODE SECONDS MIB
//   MODE  run    allocate MIB (one refused allocation is an event, not the end), launch kernels for SECONDS
//         fill   allocate in steps of 64 MiB until refused, then as run
//         late   allocate nothing; MIB after a third of SECONDS
//         long   one kernel that runs for SECONDS, for being killed in the middle of it
//         contexts  two further contexts, each asks for MIB; then the rate of one alone and of all three together
//         fault  access memory that is not there after a third of SECONDS
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>
#include <cuda.h>
#include <cuda_runtime.h>
#include <unistd.h>

static double now() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}
#define SAY(...) do { printf("{\"t\":%.3f,\"pid\":%d,", now(), (int)getpid()); printf(__VA_ARGS__); printf("}\n"); fflush(stdout); } while (0)
static void check(cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    SAY("\"event\":\"error\",\"what\":\"%s\",\"error\":\"%s\",\"code\":%d", what, cudaGetErrorString(status), (int)status);
    exit(1);
}
__global__ void work(float *data, int rounds) {
    float x = threadIdx.x;
    for (int i = 0; i < rounds; i++) x = x * 1.0001f + 0.5f;
    if (x == 12345.678f) data[0] = x;
}
__global__ void spin(long long cycles) { long long start = clock64(); while (clock64() - start < cycles) {} }
__global__ void illegal() { *(volatile int *)0x10 = 1; }

static bool allocate(size_t mib) {
    void *p = nullptr;
    cudaError_t status = cudaMalloc(&p, mib << 20);
    if (status == cudaSuccess) status = cudaMemset(p, 1, mib << 20);
    SAY("\"event\":\"alloc\",\"mib\":%zu,\"ok\":%s,\"error\":\"%s\"", mib, status == cudaSuccess ? "true" : "false",
        status == cudaSuccess ? "" : cudaGetErrorString(status));
    if (status != cudaSuccess) cudaGetLastError();
    return status == cudaSuccess;
}

extern "C" CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device);

// Launches a second, of grids that fill every SM a context may have, in all of these contexts at once.
static double rate_of(const std::vector<CUcontext> &contexts, double seconds) {
    std::atomic<long> launches(0);
    std::vector<std::thread> threads;
    for (CUcontext context : contexts)
        threads.emplace_back([&launches, context, seconds] {
            cuCtxSetCurrent(context);
            double start = now();
            while (now() - start < seconds) {
                work<<<1056, 256>>>(nullptr, 20000);
                if (cudaDeviceSynchronize() != cudaSuccess) return;
                launches++;
            }
        });
    for (std::thread &thread : threads) thread.join();
    return launches.load() / seconds;
}

// Further contexts in this process, as many as go: what each of them may have.
static void contexts(int wanted, size_t mib) {
    CUcontext first = nullptr;
    cuCtxGetCurrent(&first);
    std::vector<CUcontext> all(1, first);
    for (int n = 1; n <= wanted; n++) {
        CUcontext context; CUdeviceptr memory;
        CUresult made = cuCtxCreate_v2(&context, 0, 0), got = CUDA_ERROR_UNKNOWN;
        CUexecAffinityParam affinity; memset(&affinity, 0, sizeof affinity);
        if (made == CUDA_SUCCESS) {
            all.push_back(context);
            cuCtxGetExecAffinity(&affinity, CU_EXEC_AFFINITY_TYPE_SM_COUNT);
            got = cuMemAlloc(&memory, mib << 20);
            if (got == CUDA_SUCCESS) { cuMemsetD8(memory, 1, mib << 20); cuCtxSynchronize(); }
        }
        SAY("\"event\":\"further\",\"number\":%d,\"made\":%d,\"affinity_sms\":%d,\"allocated\":%d", n, (int)made,
            made == CUDA_SUCCESS ? (int)affinity.param.smCount.val : -1, (int)got);
    }
    SAY("\"event\":\"contexts\"");
    rate_of(all, 0.2);  // loads the kernel everywhere
    double alone = rate_of(std::vector<CUcontext>(1, first), 1.5), together = rate_of(all, 1.5);
    SAY("\"event\":\"together\",\"contexts\":%zu,\"one_per_s\":%.1f,\"all_per_s\":%.1f", all.size(), alone, together);
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "run";
    double seconds = argc > 2 ? atof(argv[2]) : 5;
    size_t mib = argc > 3 ? atoll(argv[3]) : 0;
    double t0 = now();
    SAY("\"event\":\"start\",\"uid\":%d", (int)getuid());
    check(cudaFree(0), "context");
    double cost = now() - t0;
    int sms = 0; size_t free_bytes = 0, total = 0;
    check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "SM count");
    CUexecAffinityParam affinity; memset(&affinity, 0, sizeof affinity);
    int affine = cuCtxGetExecAffinity(&affinity, CU_EXEC_AFFINITY_TYPE_SM_COUNT) == CUDA_SUCCESS
                     ? (int)affinity.param.smCount.val : -1;
    check(cudaMemGetInfo(&free_bytes, &total), "memory");
    SAY("\"event\":\"context\",\"start_s\":%.3f,\"sms\":%d,\"affinity_sms\":%d,\"free_mib\":%zu,\"total_mib\":%zu",
        cost, sms, affine, free_bytes >> 20, total >> 20);
    float *data; check(cudaMalloc((void **)&data, 4096), "first allocation");
    if (!strcmp(mode, "fill")) {
        size_t sum = 0;
        for (void *p; cudaMalloc(&p, (size_t)64 << 20) == cudaSuccess; sum += 64) cudaMemset(p, 1, 64 << 20);
        cudaGetLastError();
        SAY("\"event\":\"filled\",\"mib\":%zu", sum);
    } else if (mib && strcmp(mode, "late")) {
        allocate(mib);
    }
    if (!strcmp(mode, "contexts")) {
        contexts(2, mib);
        sleep((unsigned)seconds);
        return 0;
    }
    if (!strcmp(mode, "long")) {
        int khz = 0; cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0);
        SAY("\"event\":\"long\"");
        spin<<<sms, 32>>>((long long)(seconds * (khz ? khz : 1500000) * 1e3));
        check(cudaDeviceSynchronize(), "long kernel");
    }
    double start = now(), last = start; long launches = 0; bool done = false;
    while (now() - start < seconds) {
        work<<<sms, 256>>>(data, 20000);
        check(cudaGetLastError(), "launch");
        check(cudaDeviceSynchronize(), "synchronize");
        launches++;
        double t = now();
        if (!done && t - start > seconds / 3) {
            done = true;
            if (!strcmp(mode, "late")) allocate(mib);
            if (!strcmp(mode, "fault")) { SAY("\"event\":\"faulting\""); illegal<<<1, 1>>>(); check(cudaDeviceSynchronize(), "illegal access"); }
        }
        if (t - last > 0.5) { SAY("\"event\":\"rate\",\"per_s\":%.1f", launches / (t - last)); launches = 0; last = t; }
    }
    SAY("\"event\":\"end\"");
    return 0;
}
