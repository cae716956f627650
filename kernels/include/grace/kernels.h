// The list of kernels, with the signature of each: "inputs; integers; numbers -> outputs". The kernels check their
// arguments and choose by dtype; the loops are in grace/loops.h. Python declares the same signatures, and a test compares
// them.
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

#define GRACE_KERNELS(X)                                                                                                              \
    X(weighted_sum, "x T, y T; ; a, b -> T[x]")                                                                                       \
    X(momentum_sum, "u T, g T, v T; ; m -> T[u], T[u], uint8[1]")                                                                     \
    X(finite_sum, "x T, y T; ; a, b -> T[x], uint8[1]")                                                                               \
    X(square_sum, "x T, onto T; ; largest -> T[x]")                                                                                   \
    X(max_abs, "x T -> T[1]")                                                                                                         \
    X(norm_max, "x T -> T[1], T[1]")                                                                                                  \
    X(finite, "x T -> uint8[1]")                                                                                                      \
    X(half, "x float32; brain -> float16/bfloat16[x]")                                                                                \
    X(wide, "x float16/bfloat16 -> float32[x]")                                                                                       \
    X(half_sum, "rows float16/bfloat16...; ; factor -> float16/bfloat16[rows]")                                                       \
    X(words, "; n, key -> int64[n]")                                                                                                  \
    X(uniform, "; n, key -> float32[n]")                                                                                              \
    X(sample, "; n, k, key -> int32[k]")                                                                                              \
    X(pack, "codes uint8/int64; bits -> uint8[packed]")                                                                               \
    X(unpack, "codes uint8; bits, n -> int64[n]")                                                                                     \
    X(select, "x T, bound T; strict, nonzero -> T[m], int32[m]")                                                                      \
    X(moments, "x T, bound T; powers -> int64[1], T[3]")                                                                                  \
    X(keep_odds, "x T; k; budget -> float64[2]")                                                                                      \
    X(draw_kept, "x T, odds float64; key -> T[certain], int32[certain], int32[drawn]")                                                \
    X(drawn_entries, "signed int32, scale T -> T[signed], int32[signed]")                                                             \
    X(draw_vertices, "x T, norms T; width, samples, least, key -> int64[vertices], int64[norms]")                                     \
    X(vertices_sum, "[onto_ T], codes int64..., scales T...; ranks, width, samples, n, has_onto -> T[n]")                             \
    X(sum_top, "x T, y T; k; a, b -> T[x], T[k], int32[k], uint8[1]")                                                                 \
    X(sum_select, "x T, y T, bound T; strict; a, b -> T[x], T[m], int32[m], uint8[1]")                                                \
    X(top, "x T; k -> T[k], int32[k]")                                                                                                \
    X(top_bound, "x T; k -> T[1]")                                                                                                    \
    X(gather, "x T, indices int32 -> T[indices]")                                                                                     \
    X(put, "x_ T, indices int32; ; value -> x_")                                                                                      \
    X(scatter_add, "x_ T, indices int32, values T -> x_")                                                                             \
    X(sparse_sum, "[onto_ T], values T..., indices int32...; ranks, n, has_onto -> T[n]")                                             \
    X(thin_product, "a T, b T; n, m, r, transpose_a, transpose_b -> T")                                                               \
    X(sub_product, "x_ T, a T, b T; n, m, r -> x_, T[x]")                                                                             \
    X(power_product, "x T, q T; n, m, r -> T[n r], uint8[1]")                                                                         \
    X(project, "x T, p T; n, m, r -> T[p], T[m r]")                                                                                   \
    X(binarize, "x T; ; threshold -> uint8[packed]")                                                                                  \
    X(binarize_finite, "x T; ; threshold -> uint8[packed], uint8[1]")                                                                 \
    X(binarize_means, "x T; single; threshold -> uint8[packed], T[2 - single]")                                                       \
    X(binarize_columns, "x T; columns; threshold -> uint8[packed], T[2 columns]")                                                     \
    X(sum_sign_mean, "x T, y T; ; a, b -> T[x], uint8[packed], T[1], uint8[1]")                                                       \
    X(binary_sum, "[onto_ T], bits uint8..., levels T...; ranks, n, single, negate, has_onto; factor -> T[n]")                        \
    X(column_sum, "[onto_ T], bits uint8..., levels T...; ranks, n, columns, negate, has_onto -> T[n]")                               \
    X(majority, "bits uint8...; n, wide -> T[n]")                                                                                     \
    X(bucket_norms, "x T; width, largest -> T[buckets]")                                                                              \
    X(quantize_packed, "x T, scales T, [limit T]; width, levels, bits, stochastic, key -> uint8[packed]")                             \
    X(floor_packed, "x T, delta T; width, key -> uint8[packed]")                                                                      \
    X(dequantize_sum, "[onto_ T], codes uint8..., scales T...; ranks, width, levels, bits, n, has_onto -> T[n]")                      \
    X(round_packed, "x T, scales T, levels T; width, stochastic, key -> uint8[packed]")                                              \
    X(levels_sum, "[onto_ T], codes uint8..., scales T..., levels T...; ranks, width, n, has_onto -> T[n]")                          \
    X(to_integers, "x T, scale T; most, bits, stochastic, key -> int8/int16/int32[x]")                                                \
    X(from_integers, "[onto_ T], codes int8/int16/int32, scale T; most, has_onto -> T[codes]")                                        \
    X(pack_lanes, "x int8/int16/int32; lanes -> int32[words]")                                                                        \
    X(unpack_lanes, "word int32; lanes, n -> int8/int16/int32[n]")                                                                    \
    X(best_levels, "sizes float64, starts int32; exponential -> float64[starts + 2]")                                                 \
    X(rotate, "x T; block, back, key -> T[rotated]")                                                                                  \
    X(spread_in_frame, "x T, norms T; block, redundancy, key -> T[coefficients]")                                                     \
    X(project_from_frame, "coefficients T; block, redundancy, key -> T[elements]")                                                    \
    X(largest_of_blocks, "x T; block, kept, last -> T[x]")                                                                            \
    X(recover_sparse, "z T; n, block, reduction, rounds, key; share, noise -> T[n]")                                                  \
    X(rotated_encode, "x T, levels T; block, fit, stochastic, key -> uint8[packed], T[blocks]")                                       \
    X(rotated_sum, "[onto_ T], codes uint8..., scales T..., salts int32..., levels T; ranks, block, n, key, has_onto -> T[n]")        \
    X(natural_encode, "x T; clipped, key -> uint8[packed], int32[1], T[1]")                                                           \
    X(natural_sum, "[onto_ T], codes uint8..., bases int32...; ranks, n, wide, clipped, negate, has_onto; factor -> T[n]")            \
    X(power_words, "x T, [noise T]; ; alpha -> T[1], int32[m]")                                                                       \
    X(power_sum, "[onto_ T], words int32..., scales T...; ranks, n, has_onto -> T[n]")                                                \
    X(power_fade, "x_ T, words int32; ; factor -> x_")                                                                                \
    X(table_encode, "x T, scales T, table T; width -> uint8[x]")                                                                      \
    X(table_sum, "[onto_ T], codes uint8..., scales T..., table T; ranks, width, n, has_onto -> T[n]")                                \
    X(ternary_encode, "x T, scale T -> uint8[m]")                                                                                     \
    X(ternary_sum, "[onto_ T], codes uint8..., scales T...; ranks, n, has_onto -> T[n]")                                              \
    X(precision_encode, "x T, scale T; m, h; bound -> T[], int16[], int8[], uint8[packed]")                                           \
    X(precision_sum, "[onto_ T], full T..., words int16..., bytes int8..., tags uint8..., scales T...; ranks, m, h, n, has_onto -> T[n]") \
    X(top_of_sides, "x T; ; ratio -> T[2], int32[p], int32[q]")                                                                       \
    X(select_in_bins, "x T, gradient T, maxima T; width -> int32[positive], int32[negative]")                                         \
    X(orthogonalize, "a T; rows, columns -> T[rows columns]")                                                                         \
    X(count_sketch, "x T; rows, columns, key -> T[rows columns]")                                                                     \
    X(sketch_estimate, "sketch T; n, rows, columns, key -> T[n]")                                                                     \
    X(filter_positions, "data uint8; bits, hashes, n, key -> int32[reported]")                                                        \
    X(gap_facts, "indices int32; low -> int64[2]")                                                                                    \
    X(encode_gaps, "indices int32; low, unary -> uint8[m]")                                                                           \
    X(decode_gaps, "data uint8; low, unary, k -> int32[k]")                                                                           \
    X(huffman_encode, "data uint8; bits -> uint8[m]")                                                                                 \
    X(huffman_decode, "coded uint8; bits, n -> uint8[n]")                                                                             \
    X(rans_encode, "data uint8; bits -> uint8[m]")                                                                                    \
    X(rans_decode, "coded uint8; bits, n -> uint8[n]")                                                                                \
    X(run_length_encode, "data uint8 -> uint8[m]")                                                                                    \
    X(run_length_decode, "coded uint8; n -> uint8[n]")                                                                                \
    X(bitshuffle_encode, "data uint8; bits -> uint8[m]")                                                                              \
    X(bitshuffle_decode, "coded uint8; bits, n -> uint8[n]")

#define GRACE_DECLARE(name, signature) void name##_kernel(Call& call);
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
