// What the files of kernels/checked share. GRACE_KERNEL defines a kernel with its signature: "inputs; integers; numbers
// -> outputs". A kernel checks its arguments and chooses by dtype. The calls in Python must fit the signatures, and a
// test compares them.
//
// `T` is float32 or float64, the same for all arrays of a call; `a/b` is either dtype. An input in brackets may be
// missing, one with `...` is there once per rank, and one with `_` is changed in place. `key` is four integers: the bits
// of the 64-bit seed, step, stream and rank. Brackets after a dtype hold a length; `packed` is that of packed codes.
#pragma once

#include <algorithm>
#include <type_traits>

#include "grace/call.h"
#include "grace/gpu.h"
#include "grace/loops.h"
#include "grace/pool.h"

namespace grace {

// Enters a kernel in the table of `find` and `signatures` when the module is loaded.
struct Entry {
    Entry(const char* name, const char* signature, Kernel kernel);
};

// Begins the definition of a kernel. The body follows in braces and takes a Call& `call`.
#define GRACE_KERNEL(name, signature)                                \
    static void name##_kernel(Call& call);                           \
    static const Entry name##_entry(#name, signature, name##_kernel); \
    static void name##_kernel(Call& call)

// The random key whose four integers begin at index `first`.
inline RandomKey key_at(const Call& call, int first) {
    const uint64_t seed = static_cast<uint64_t>(call.integer(first));
    return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
            static_cast<uint32_t>(call.integer(first + 1)), static_cast<uint32_t>(call.integer(first + 2)),
            static_cast<uint32_t>(call.integer(first + 3))};
}

// True if an output of n elements should bypass the cache.
template <class T> bool is_large(int64_t n) { return n * static_cast<int64_t>(sizeof(T)) >= kAround; }

// Input and output of a sum over ranks.
template <class T> struct Target {
    const T* onto;
    T* out;
    bool around;
};

// Input 0 if it is consumed, otherwise a new output.
template <class T> Target<T> target_of(Call& call, bool has_onto, int64_t n) {
    if (has_onto) {
        T* out = call.consumed<T>(0, n);
        return {out, out, false};
    }
    return {nullptr, call.output<T>(n), is_large<T>(n)};
}

// Allocates the two outputs of a selection.
template <class T> gpu::Room<T> room_of(Call& call) {
    return [&call](int64_t count) {
        T* values = call.output<T>(count);
        return gpu::Found<T>{values, call.output<int32_t>(count)};
    };
}

// The bits of a code for the levels of input i; throws Error(value) unless there are 2, 4, 8 or 16 levels.
inline int level_bits(const Call& call, int i) {
    const int64_t count = call.input(i).size;
    int bits = 1;
    while (bits < kLevelBits && int64_t(1) << bits < count) ++bits;
    if (count != int64_t(1) << bits) {
        call.fail(Error::Kind::value, "expected 2, 4, 8 or 16 levels, received " + std::to_string(count));
    }
    return bits;
}

// Integer i as a number of ranks; throws Error(value) unless it is at least 1.
inline int ranks_at(const Call& call, int i) {
    const int64_t ranks = call.integer(i);
    if (ranks < 1 || ranks > 1 << 20) call.fail(Error::Kind::value, "expected at least one rank, received " + std::to_string(ranks));
    return static_cast<int>(ranks);
}

// Integer i as the number of elements in a bucket; throws Error(value) unless it is at least 1.
inline int64_t width_at(const Call& call, int i) {
    const int64_t width = call.integer(i);
    if (width < 1) {
        call.fail(Error::Kind::value, "expected a bucket of at least 1 element, received " + std::to_string(width));
    }
    return std::min(width, kMost);
}

// The required number of scales, -1 for any: an empty array may have a scale for the whole array, or none.
inline int64_t buckets_of(int64_t n, int64_t width) { return n == 0 ? -1 : divide_up(n, width); }

template <class T> using of_pointer = std::remove_pointer_t<T>;

}  // namespace grace
