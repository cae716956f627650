// An emulator that runs the GPU kernels on the CPU, for tests on machines without a GPU. It provides the subset of CUDA
// that the kernels use.
//
// The threads of a block are fibers. They run in turn until all wait at a barrier, or all threads of a warp wait at an
// exchange. A thread that does not arrive is an error, and so is an exchange of only a part of a warp. Blocks run one
// after the other. GRACE_EMULATED_ORDER (a number) shuffles the order of threads and blocks, to detect code that
// depends on it.
#pragma once

#include <stdint.h>
#include <string.h>

#include <cmath>
#include <functional>

#define __global__
#define __device__
#define __shared__ static

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1) : x(x), y(1), z(1) {}
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidDevice = 101 };
enum cudaMemcpyKind { cudaMemcpyDeviceToHost };
constexpr unsigned cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;
struct CUstream_st;
using cudaStream_t = CUstream_st*;
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
};
struct cudaFuncAttributes {};

extern dim3 blockIdx, threadIdx, gridDim;

namespace grace {
namespace emulator {

void run(unsigned blocks, unsigned threads, const std::function<void()>& body);
// Waits for all threads of the block, like __syncthreads.
void meet_block();
// Waits for all threads of the warp, like __syncwarp.
void meet_warp();
// The value of each thread of the block, for exchanges.
extern uint64_t slots[1024];

template <class V> V exchanged(V mine, unsigned lane) {
    static_assert(sizeof(V) <= sizeof(uint64_t), "at most 8 bytes are exchanged");
    memcpy(&slots[threadIdx.x], &mine, sizeof(V));
    meet_warp();
    V other;
    memcpy(&other, &slots[threadIdx.x / 32 * 32 + lane], sizeof(V));
    meet_warp();
    return other;
}

}  // namespace emulator
}  // namespace grace

inline void __syncthreads() { grace::emulator::meet_block(); }

inline int __syncthreads_or(int condition) {
    grace::emulator::slots[threadIdx.x] = condition != 0;
    grace::emulator::meet_block();
    int any = 0;
    for (unsigned t = 0; t < 256; ++t) any |= int(grace::emulator::slots[t]);
    grace::emulator::meet_block();
    return any;
}

template <class V> V __shfl_xor_sync(unsigned, V value, int step) {
    return grace::emulator::exchanged(value, (threadIdx.x % 32) ^ unsigned(step));
}

template <class V> V __shfl_up_sync(unsigned, V value, unsigned step) {
    const unsigned lane = threadIdx.x % 32;
    return grace::emulator::exchanged(value, lane < step ? lane : lane - step);
}

template <class V> V atomicAdd(V* to, V value) {
    const V before = *to;
    *to += value;
    return before;
}

template <class V> V atomicOr(V* to, V value) {
    const V before = *to;
    *to |= value;
    return before;
}

inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
    __extension__ using Wide = unsigned __int128;
    return uint64_t(Wide(a) * b >> 64);
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
    grace::emulator::run(config->gridDim.x, config->blockDim.x, [&] { kernel(arguments...); });
    return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    memcpy(to, from, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
    memset(to, value, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no such device"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
inline cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** made, size_t bytes, unsigned) {
    *made = ::operator new(bytes);
    return cudaSuccess;
}
template <class Function> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Function) { return cudaSuccess; }
