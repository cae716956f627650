// Functions on raw pointers for the CPU: one table per floating type, compiled for several instruction sets.
//
// All of them work on a piece of an array, so that callers can share an array out to threads. `around` says that the
// output is large and nobody reads it soon: it is then written around the cache.
#pragma once

#include <stdint.h>

#include "grace/element.h"

namespace grace {

constexpr int64_t kBlock = 1024;  // elements that stay in the first cache between two passes

// Growing lists of what a pass selected.
template <class T> struct Selected {
    T* values;
    int32_t* indices;
    int64_t count;
};

// One rank's coded array and its scales, as a merging pass sees them.
template <class T> struct Coded {
    const uint8_t* codes;
    const T* scales;
};

// A list of elements of an array, as a sparsifier sends it.
template <class T> struct Entries {
    const T* values;
    const int32_t* indices;
    int64_t count;
};

// One rank's natural codes, and what its exponents lie above.
struct Powers {
    const uint8_t* codes;
    uint32_t base;
};

// 127 ascending edges, and what finds a magnitude's place among them without a search: cells of numbers with equal
// upper bits, `lowest` those of the first. A cell holds at most one edge, `inside`, NaN if none, after `below` others.
// Without cells there is a search.
template <class T> struct Edges {
    const T* edges;
    int64_t cells;
    typename Format<T>::Signed lowest;
    int shift;
    const uint8_t* below;
    const T* inside;
};

// One rank's tags and numbers of all, 16 and 8 bits, from a piece on.
template <class T> struct Widths {
    const uint8_t* tags;
    const T* full;
    const int16_t* words;
    const int8_t* bytes;
};

template <class T> struct Loops {
    // Whether all sums are finite.
    bool (*weighted_sum)(const T* x, T a, const T* y, T b, T* out, int64_t n, bool around);
    T (*max_abs)(const T* x, int64_t n);
    bool (*finite)(const T* x, int64_t n);
    double (*sum_squares)(const T* x, int64_t n);
    void (*fill)(T* out, T value, int64_t n, bool around);
    void (*copy)(const T* x, T* out, int64_t n, bool around);

    // Bits of x >= threshold; n of the last piece only may be no multiple of 8.
    void (*binarize)(const T* x, T threshold, uint8_t* bits, int64_t n);
    // Besides: sums[0] += how many, sums[1] += their sum, sums[2] += the sum of the others.
    void (*binarize_sums)(const T* x, T threshold, uint8_t* bits, double* sums, int64_t n);
    // out = onto + sum over ranks of levels[2 r + bit]; onto may be out or null. bits[r] begin at the piece.
    void (*binary_sum)(const uint8_t* const* bits, const T* levels, int ranks, const T* onto, T* out, int64_t n,
                       bool around);
    void (*majority)(const uint8_t* const* bits, int ranks, T* out, int64_t n, bool around);

    // Elements begin .. end - 1 of the whole x.
    void (*bucket_norms)(const T* x, int64_t n, int64_t width, bool largest, T* norms, int64_t begin, int64_t end);
    // Codes level + levels of elements begin .. end - 1 into 8 or 16 bit integers.
    void (*levels8)(const T* x, const T* scales, int64_t width, T levels, const T* limit, const RandomKey* key,
                    int64_t begin, int64_t end, uint8_t* codes);
    void (*levels16)(const T* x, const T* scales, int64_t width, T levels, const T* limit, const RandomKey* key,
                     int64_t begin, int64_t end, uint16_t* codes);
    // out = onto + sum over ranks of (code - levels) * (scale / levels), elements begin .. end - 1 of all arrays.
    void (*dequantize_sum)(const Coded<T>* ranks, int count, int64_t width, int levels, int bits, int64_t n,
                           const T* onto, T* out, int64_t begin, int64_t end, bool around);

    // Appends what passes; there is room for n more.
    void (*select)(const T* x, T bound, bool strict, bool nonzero, int32_t first, int64_t n, Selected<T>* into);

    // Appends what is at least `high` or at most `low`; counts[0] += how many are above 0, counts[1] += below 0.
    void (*select_sides)(const T* x, T high, T low, int32_t first, int64_t n, Selected<T>* into, int64_t* counts);

    void (*to_half)(const T* x, bool brain, uint16_t* out, int64_t n, bool around);
    void (*from_half)(const uint16_t* x, bool brain, T* out, int64_t n, bool around);
    // out = sum over rows of factor * x[stride * row], added in T and rounded once.
    void (*half_sum)(const uint16_t* x, int64_t stride, int64_t rows, bool brain, T factor, uint16_t* out, int64_t n,
                     bool around);

    // Whether an element begin .. end - 1, none of which has a larger exponent, is rounded to a larger one.
    bool (*natural_rises)(const T* x, const RandomKey* key, int32_t exponent, int64_t begin, int64_t end);
    // Codes of elements begin .. end - 1: eight bits each above a base, or (base -1) the low eight bits of each and,
    // packed, the sign and the other bits. Both outputs begin at `begin`.
    void (*natural_codes)(const T* x, const RandomKey* key, int32_t base, int64_t begin, int64_t end, uint8_t* low,
                          uint8_t* high);
    void (*natural_sum)(const Powers* ranks, int count, bool clipped, bool negate, int64_t n, const T* onto, T* out,
                        int64_t begin, int64_t end, bool around);
    // How many edges are at most |x|, + 128 if x < 0.
    void (*table_codes)(const T* x, const Edges<T>* edges, int64_t n, uint8_t* codes);
    // out = onto + sum over ranks of values[256 r + code].
    void (*table_sum)(const uint8_t* const* codes, const T* values, int ranks, const T* onto, T* out, int64_t begin,
                      int64_t end, bool around);
    // Five ternary digits per byte, the end filled up with zeros.
    void (*ternary_bytes)(const T* x, T half, int64_t n, uint8_t* bytes);
    // out = onto + sum over ranks of the five numbers at values[8 (243 r + byte)].
    void (*ternary_sum)(const uint8_t* const* bytes, const T* values, int ranks, const T* onto, T* out, int64_t begin,
                        int64_t end, bool around);
    // Tags of n elements, packed, n a multiple of 64 but for the last piece; counts[t] += how many have tag t > 0.
    void (*precision_tags)(const T* x, T bound, T byte_end, T word_end, int64_t n, uint8_t* tags, int64_t* counts);
    void (*precision_split)(const T* x, const uint8_t* tags, T byte_steps, T word_steps, int64_t n, T* full,
                            int16_t* words, int8_t* bytes);
    // Adds to onto, which is out, or to zeros, and moves the lists of numbers on behind what it took.
    void (*precision_sum)(Widths<T>* ranks, int count, T byte_step, T word_step, bool negate, const T* onto, T* out,
                          int64_t n, bool around);

    // Of a b, a having rows of m and b being given by its r columns, the rows begin .. end - 1.
    void (*times)(const T* a, const T* b, int64_t m, int r, int64_t begin, int64_t end, T* out);
    // Of the transpose of a times b, a having n rows of m and b n rows of r, the rows begin .. end - 1.
    void (*transposed_times)(const T* a, const T* b, int64_t n, int64_t m, int r, int64_t begin, int64_t end, T* out);
    // Of a times the transpose of b, a having rows of r and b given by its r columns of m, elements begin .. end - 1.
    void (*times_transposed)(const T* a, const T* b, int64_t m, int r, int64_t begin, int64_t end, T* out, bool around);

    // Adds every element to the bucket of its hash, in their order.
    void (*sketch_row)(const T* x, const SketchHash* hash, uint32_t columns, int64_t n, double* sums);
    // Medians over the rows for elements begin .. end - 1, the first of a block; `places` and `found` have room
    // for a block per row.
    void (*sketch_medians)(const T* sketch, const SketchHash* hashes, int rows, uint32_t columns, int64_t begin,
                           int64_t end, SketchPlace* places, typename Format<T>::Signed* found, T* out, bool around);
};

struct IntegerLoops {
    void (*words)(const RandomKey* key, uint32_t first, int64_t blocks, uint32_t* out);
    void (*uniform)(const RandomKey* key, int64_t begin, int64_t end, float* out);
    // Images of begin .. end - 1, each walked along its cycle until it is below n.
    void (*sample)(const Permutation* permutation, uint32_t n, int64_t begin, int64_t end, int32_t* out);
    // `bits` (1 to 8) of each code, n a multiple of 8 but for the last piece.
    void (*pack)(const uint8_t* codes, int bits, int64_t n, uint8_t* out);
    void (*unpack)(const uint8_t* data, int bits, int64_t n, uint8_t* codes);
    // counts[t] += how many of n packed tags of two bits are t > 0.
    void (*count_tags)(const uint8_t* tags, int64_t n, int64_t* counts);
};

// The tables for this processor: the best instruction set it has, or the one that GRACE_ISA names
// (baseline, avx2, avx512).
template <class T> const Loops<T>& loops();
const IntegerLoops& integer_loops();
// The name of that instruction set.
const char* isa();

// Bytes of n packed codes of 1 to 16 bits.
static inline int64_t packed_size(int64_t n, int bits) {
    return bits > 8 ? n + packed_size(n, bits - 8) : (n * bits + 7) / 8;
}

// Outputs from this size on are written around the cache: they would not fit it together with what is read.
constexpr int64_t kAround = 4 << 20;

}  // namespace grace
