// The list of kernels, with inputs, integers, numbers and outputs of each. The kernels check their arguments and choose
// by dtype; the loops are in grace/loops.h.
//
// `T` is float32 or float64, the dtype of the first floating-point input. A random key is four integers: the bits of
// the 64-bit seed, step, stream and rank.
#pragma once

#include <algorithm>
#include <type_traits>

#include "grace/call.h"
#include "grace/gpu.h"
#include "grace/loops.h"
#include "grace/pool.h"

namespace grace {

#define GRACE_KERNELS(X)                                                                                       \
    X(weighted_sum)   /* x, y; ; a, b -> a x + b y */                                                            \
    X(finite_sum)     /* the same, and uint8[1]: whether all of it is finite */                                  \
    X(max_abs)        /* x -> T[1] */                                                                            \
    X(norm_max)       /* x -> T[1], added in float64; T[1] */                                                      \
    X(finite)         /* x -> uint8[1] */                                                                        \
    X(half)           /* x float32; brain -> float16 or bfloat16 */                                              \
    X(wide)           /* float16 or bfloat16 -> float32 */                                                       \
    X(half_sum)       /* x; rows; factor -> x's dtype[x / rows] */                                               \
    X(words)          /* ; n, key -> int64[n] */                                                                 \
    X(uniform)        /* ; n, key -> float32[n] */                                                               \
    X(sample)         /* ; n, k, key -> int32[k] */                                                              \
    X(pack)           /* codes uint8 or int64; bits -> uint8 */                                                  \
    X(unpack)         /* uint8; bits, n -> int64[n] */                                                           \
    X(binarize)       /* x; ; threshold -> bits */                                                               \
    X(binarize_means) /* x; single; threshold -> bits, T[2], or T[1]: the mean magnitude */                      \
    X(binary_sum)     /* [onto], bits..., levels...; ranks, n, single, negate, has_onto -> T[n] */               \
    X(binarize_columns) /* x; columns; threshold -> bits, T[2 columns]: all low means, all high means */          \
    X(column_sum)     /* [onto], bits..., levels...; ranks, n, columns, negate, has_onto -> T[n] */              \
    X(majority)       /* bits...; n, wide (0: float32, 1: float64) -> T[n] */                                    \
    X(bucket_norms)   /* x; width, largest -> T[buckets] */                                                      \
    X(quantize_packed) /* x, scales, [limit]; width, levels, bits, key -> uint8 */                               \
    X(dequantize_sum) /* [onto], codes..., scales...; ranks, width, levels, bits, n, has_onto -> T[n] */         \
    X(select)         /* x, bound; strict, nonzero -> T[m], int32[m] */                                          \
    X(top)            /* x; k -> T[k], int32[k] */                                                               \
    X(top_bound)      /* x; k -> T[1] */                                                                         \
    X(gather)         /* x, indices -> T[m] */                                                                   \
    X(put)            /* x consumed, indices; ; value -> x */                                                    \
    X(scatter_add)    /* x consumed, indices, values -> x */                                                     \
    X(sparse_sum)     /* [onto], values..., indices...; ranks, n, has_onto -> T[n] */                            \
    X(natural_encode) /* x; clipped, key -> codes uint8, base int32[1] */                                        \
    X(natural_sum)    /* [onto], codes..., bases...; ranks, n, wide, clipped, negate, has_onto -> T[n] */        \
    X(table_encode)   /* x, scale, table T[128] -> uint8[n] */                                                   \
    X(table_sum)      /* [onto], codes..., scales..., table; ranks, n, has_onto -> T[n] */                       \
    X(ternary_encode) /* x, scale -> uint8[m] */                                                                 \
    X(ternary_sum)    /* [onto], codes..., scales...; ranks, n, has_onto -> T[n] */                              \
    X(precision_encode) /* x; m, h; bound -> T[], int16[], int8[], tags */                                       \
    X(precision_sum)  /* [onto], full..., words..., bytes..., tags...; ranks, m, h, n, negate, has_onto -> T[n] */ \
    X(top_of_sides)   /* x; ; ratio -> means T[2], positive int32[p], negative int32[q] */                       \
    X(thin_product)   /* a, b; n, m, r, transpose_a, transpose_b -> T[n r], T[m r] or T[n m] */                     \
    X(orthogonalize)  /* a; rows, columns -> T[rows columns] */                                                  \
    X(count_sketch)   /* x; rows, columns, key -> T[rows columns] */                                             \
    X(sketch_estimate) /* sketch; n, rows, columns, key -> T[n] */

#define GRACE_DECLARE(name) void name##_kernel(Call& call);
GRACE_KERNELS(GRACE_DECLARE)
#undef GRACE_DECLARE

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

// Integer i as a number of ranks; throws Error(value) unless it is at least 1.
inline int ranks_at(const Call& call, int i) {
    const int64_t ranks = call.integer(i);
    if (ranks < 1 || ranks > 1 << 20) call.fail(Error::Kind::value, "expected at least one rank, received " + std::to_string(ranks));
    return static_cast<int>(ranks);
}

template <class T> using of_pointer = std::remove_pointer_t<T>;

}  // namespace grace
