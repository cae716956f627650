// Building blocks of the GPU kernels: launches, and passes over an array.
//
// A pass is a template. Its parameter is an operation on an element, on a group of 8 elements (whole bytes of packed
// codes), or on the terms of a sum. Indices have 64 bits. Loops stride over the grid, so any number of blocks works.
#pragma once

#ifdef GRACE_EMULATED
#include "emulator.h"
#else
#include <cuda_runtime.h>
#endif

#include <cstdint>
#include <string>
#include <type_traits>

#include "grace/call.h"
#include "grace/gpu.h"

namespace grace {
namespace gpu {

constexpr int kThreads = 256;
constexpr unsigned kWarp = 32, kAll = 0xFFFFFFFFu;

// The division of work. The emulator uses small values, so that small arrays run the same code paths as large ones.
#ifdef GRACE_EMULATED
constexpr int kRanks = 2;
constexpr int64_t kMostBlocks = 5, kMostParts = 3, kMostStretches = 3, kMostSorted = 2, kStretch = 64;
#else
constexpr int kRanks = 64;  // the number of ranks whose pointers are arguments of one kernel
constexpr int64_t kMostBlocks = 1 << 16, kMostParts = 1024, kMostStretches = 4096, kMostSorted = 512, kStretch = 4096;
#endif

static inline void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) throw Error(Error::Kind::device, std::string(what) + ": " + cudaGetErrorString(status));
}

// Launches a kernel with kThreads threads per block. With 0 blocks it does nothing.
template <class... Parameters, class... Arguments>
static void launch(const Stream& on, int64_t blocks, void (*kernel)(Parameters...), const Arguments&... arguments) {
    if (blocks == 0) return;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(kThreads);
    config.stream = on.handle;
    check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "launch of a kernel");
}

template <class V> static V* scratch(const Stream& on, int64_t n) {
    return static_cast<V*>(on.scratch(n * static_cast<int64_t>(sizeof(V))));
}

// Copies from the device and waits for the stream. No other function waits.
template <class V> static V fetched(const Stream& on, const V* from) {
    V value;
    check(cudaMemcpyAsync(&value, from, sizeof(V), cudaMemcpyDeviceToHost, on.handle), "copy from the device");
    check(cudaStreamSynchronize(on.handle), "waiting for the stream");
    return value;
}

static inline int64_t blocks_for(int64_t n, int64_t each) {
    const int64_t blocks = divide_up(n, each);
    return blocks < kMostBlocks ? blocks : kMostBlocks;
}

// --- division
// ------------------------------------------------------------------------------------------------------------

// Division by a number that is known before the kernel starts: one product instead of about a hundred instructions.
struct Divisor {
    uint64_t number, magic;
};

static inline Divisor divisor(int64_t number) {
    // floor(2^64 / number) + 1. This is exact for dividends and divisors below 2^32 (Lemire, Kaser and Kurz, 2019).
    const uint64_t d = static_cast<uint64_t>(number);
    return {d, d > 1 && d >> 32 == 0 ? ~uint64_t(0) / d + 1 : 0};
}

__device__ static inline int64_t quotient(int64_t i, const Divisor& by) {
    if (by.magic != 0 && i >> 32 == 0) return int64_t(__umul64hi(uint64_t(i), by.magic));
    return i / int64_t(by.number);
}

// --- faults
// --------------------------------------------------------------------------------------------------------------

// Sets the fault word: a payload is damaged. The host checks it.
__device__ static inline void note_fault(int* fault) { *static_cast<volatile int*>(fault) = 1; }

// --- elements
// ------------------------------------------------------------------------------------------------------------

constexpr int kAtOnce = 4;  // elements per thread that are read concurrently

template <class V, class Body> __global__ void map_kernel(V* out, int64_t n, Body body) {
    constexpr int64_t tile = int64_t(kThreads) * kAtOnce;
    for (int64_t from = int64_t(blockIdx.x) * tile; from < n; from += int64_t(gridDim.x) * tile) {
        const int64_t first = from + threadIdx.x;
        if (from + tile <= n) {
            V found[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) found[j] = body(first + j * kThreads);
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) out[first + j * kThreads] = found[j];
        } else {
            for (int64_t i = first; i < n; i += kThreads) out[i] = body(i);
        }
    }
}

// out[i] = body(i). The body may read no element of `out` except i.
template <class V, class Body> static void map(const Stream& on, V* out, int64_t n, Body body) {
    launch(on, blocks_for(n, int64_t(kThreads) * kAtOnce), map_kernel<V, Body>, out, n, body);
}

template <class Body> __global__ void each_kernel(int64_t n, Body body) {
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += int64_t(gridDim.x) * kThreads) body(i);
}

// Runs body(i) for 0 <= i < n, in any order.
template <class Body> static void each(const Stream& on, int64_t n, Body body) {
    launch(on, blocks_for(n, kThreads), each_kernel<Body>, n, body);
}

// --- groups of 8 elements
// ------------------------------------------------------------------------------------------------

__device__ static inline int group_size(int64_t group, int64_t n) {
    const int64_t left = n - 8 * group;
    return left < 8 ? int(left) : 8;
}

// Reads the elements of a group, with zeros beyond the end. Uses wide reads if the address allows it.
template <class V> __device__ static inline void load_group(const V* x, int64_t group, int count, V found[8]) {
    const V* from = x + 8 * group;
    if (count == 8 && sizeof(V) >= 4 && (reinterpret_cast<uintptr_t>(x) & 15) == 0) {
        constexpr int wide = sizeof(V) >= 4 ? int(sizeof(V)) / 2 : 1;
        uint4 parts[wide];
#pragma unroll
        for (int j = 0; j < wide; ++j) parts[j] = reinterpret_cast<const uint4*>(from)[j];
        memcpy(found, parts, sizeof(V) >= 4 ? 8 * sizeof(V) : 0);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) found[j] = j < count ? from[j] : V(0);
}

// Writes the elements of a group, in wide stores if the address allows it.
template <class T> __device__ static inline void store_group(const T found[8], int64_t group, int count, T* x) {
    T* to = x + 8 * group;
    if (count == 8 && (reinterpret_cast<uintptr_t>(x) & 15) == 0) {
        constexpr int wide = int(sizeof(T)) / 2;
        uint4 parts[wide];
        memcpy(parts, found, 8 * sizeof(T));
#pragma unroll
        for (int j = 0; j < wide; ++j) reinterpret_cast<uint4*>(to)[j] = parts[j];
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (j < count) to[j] = found[j];
    }
}

constexpr int64_t kTile = int64_t(kThreads) * 8;  // elements that a block handles at once

// A source of groups: the elements of an array.
template <class T> struct Elements {
    const T* x;
    __device__ void operator()(int64_t group, int count, T found[8]) const { load_group(x, group, count, found); }
};

// Clears a flag of the device if an element does not count as finite. Threads that clear it write the same value.
template <class T> __device__ static inline void check_group(const T found[8], int count, uint8_t* good) {
    bool all = true;
#pragma unroll
    for (int j = 0; j < 8; ++j) all = all && (j >= count || magnitude_bits(found[j]) <= largest_bits<T>());
    if (!all) *static_cast<volatile uint8_t*>(good) = 0;
}

// A source of groups: the weighted sum of two arrays, which is also written and checked.
template <class T> struct WeightedSum {
    const T* x;
    T a;
    const T* y;
    T b;
    T* out;
    uint8_t* good;
    __device__ void read(int64_t group, int count, T found[8]) const {
        T first[8], second[8];
        load_group(x, group, count, first);
        load_group(y, group, count, second);
#pragma unroll
        for (int j = 0; j < 8; ++j) found[j] = first[j] * a + second[j] * b;
    }
    __device__ void operator()(int64_t group, int count, T found[8]) const {
        read(group, count, found);
        store_group(found, group, count, out);
        check_group(found, count, good);
    }
};

// Sets a flag of the device, before passes that may clear it.
static inline void set_good(const Stream& on, uint8_t* good) {
    check(cudaMemsetAsync(good, 1, 1, on.handle), "a flag");
}

// Writes the first bytes of a word, in one store if the address allows it.
__device__ static inline void store_bytes(uint8_t* to, uint64_t word, int bytes) {
    const bool aligned = (reinterpret_cast<uintptr_t>(to) & uintptr_t(bytes - 1)) == 0;
    if (bytes == 8 && aligned) {
        *reinterpret_cast<uint64_t*>(to) = word;
    } else if (bytes == 4 && aligned) {
        *reinterpret_cast<uint32_t*>(to) = uint32_t(word);
    } else if (bytes == 2 && aligned) {
        *reinterpret_cast<uint16_t*>(to) = uint16_t(word);
    } else {
        for (int j = 0; j < bytes; ++j) to[j] = uint8_t(word >> (8 * j));
    }
}

// Packs eight codes of 1 to 8 bits, the first one lowest.
__device__ static inline uint64_t packed_word(const uint32_t codes[8], int bits) {
    uint64_t word = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) word |= uint64_t(codes[j]) << (bits * j);
    return word;
}

// Reads code i of 1 to 8 bits. It reads only bytes that contain the code.
__device__ static inline uint32_t code_at(const uint8_t* data, int bits, int64_t i) {
    const int64_t first = i * bits;
    const uint8_t* from = data + (first >> 3);
    const int shift = int(first & 7);
    uint32_t word = from[0];
    if (shift + bits > 8) word |= uint32_t(from[1]) << 8;
    return (word >> shift) & ((1u << bits) - 1u);
}

// Writes the codes of a group to their position. The codes of elements beyond the end are 0.
__device__ static inline void store_codes(const uint32_t codes[8], int bits, int64_t group, int count, int64_t n, uint8_t* out) {
    if (bits > 8) {
        uint32_t low[8], high[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            low[j] = codes[j] & 0xFFu;
            high[j] = codes[j] >> 8;
        }
        store_bytes(out + 8 * group, packed_word(low, 8), count);
        const int rest = bits - 8;
        store_bytes(out + n + group * rest, packed_word(high, rest), (count * rest + 7) / 8);
    } else {
        store_bytes(out + group * bits, packed_word(codes, bits), (count * bits + 7) / 8);
    }
}

__device__ static inline uint32_t load_code(const uint8_t* data, int bits, int64_t i, int64_t n) {
    return bits > 8 ? data[i] | code_at(data + n, bits - 8, i) << 8 : code_at(data, bits, i);
}

// --- sums and other reductions
// -------------------------------------------------------------------------------------------

// Joins the values of all threads of a block. The result is in thread 0.
template <class V, class Join> __device__ static V joined(V mine, Join join) {
    __shared__ V held[kThreads];
    __syncthreads();
    held[threadIdx.x] = mine;
    for (unsigned half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) held[threadIdx.x] = join(held[threadIdx.x], held[threadIdx.x + half]);
    }
    return threadIdx.x == 0 ? held[0] : mine;
}

template <class V, class Term, class Join>
__global__ void terms_kernel(int64_t n, V* parts, V none, Term term, Join join) {
    V mine = none;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += int64_t(gridDim.x) * kThreads) {
        mine = join(mine, term(i));
    }
    mine = joined(mine, join);
    if (threadIdx.x == 0) parts[blockIdx.x] = mine;
}

template <class V, class Join, class Finish>
__global__ void finish_kernel(const V* parts, int64_t n, V none, Join join, Finish finish) {
    V mine = none;
    for (int64_t i = threadIdx.x; i < n; i += kThreads) mine = join(mine, parts[i]);
    mine = joined(mine, join);
    if (threadIdx.x == 0) finish(mine);
}

// Calls finish(term(0) joined with ... term(n - 1)) in one thread. The order depends only on n. A term may write.
template <class V, class Term, class Join, class Finish>
static void reduce(const Stream& on, int64_t n, V none, Term term, Join join, Finish finish) {
    int64_t blocks = divide_up(n, int64_t(kThreads) * 4);
    blocks = blocks < 1 ? 1 : blocks < kMostParts ? blocks : kMostParts;
    V* parts = scratch<V>(on, blocks);
    launch(on, blocks, terms_kernel<V, Term, Join>, n, parts, none, term, join);
    launch(on, 1, finish_kernel<V, Join, Finish>, parts, blocks, none, join, finish);
}

// Joins the values of the threads before this one in the block. `total` is the join of all. All threads must take part.
template <class V, class Join> __device__ static V joined_before(V mine, V none, Join join, V* total) {
    __shared__ V warps[kThreads / kWarp];
    const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    V up_to = mine;
    for (unsigned step = 1; step < kWarp; step *= 2) {
        const V other = __shfl_up_sync(kAll, up_to, step);
        if (lane >= step) up_to = join(other, up_to);
    }
    const V inside = __shfl_up_sync(kAll, up_to, 1u);
    __syncthreads();
    if (lane == kWarp - 1) warps[warp] = up_to;
    __syncthreads();
    V before = none, all = none;
    for (unsigned w = 0; w < kThreads / kWarp; ++w) {
        if (w < warp) before = join(before, warps[w]);
        all = join(all, warps[w]);
    }
    *total = all;
    return lane == 0 ? before : join(before, inside);
}

template <class V> struct Added {
    __device__ V operator()(V a, V b) const { return a + b; }
};
template <class V> struct Larger {
    __device__ V operator()(V a, V b) const { return b > a ? b : a; }
};

}  // namespace gpu
}  // namespace grace
