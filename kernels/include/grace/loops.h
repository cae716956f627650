// Functions on raw pointers for the CPU: one table per floating type, compiled for several instruction sets.
//
// Each function works on a piece of an array, so that callers can divide an array among threads. `around` means that
// the output is large and not read soon. Such output bypasses the cache.
#pragma once

#include <stdint.h>

#include "grace/element.h"

namespace grace {

constexpr int64_t kBlock = 1024;  // elements that stay in the first-level cache between two passes

constexpr int64_t kBeyond = kBlock + 32;  // elements after the first of a block, up to whole groups of 32

// Rows first .. last - 1 and columns begin .. end - 1 of a matrix. `first` is a multiple of 8, so that its bits begin at
// a byte.
struct Tile {
    int64_t columns, first, last, begin, end;
};

// Growing lists of the elements that a pass selects.
template <class T> struct Selected {
    T* values;
    int32_t* indices;
    int64_t count;
};

// The coded array and scales of one rank, as input of a merging pass.
template <class T> struct Coded {
    const uint8_t* codes;
    const T* scales;
};

// The same, and the levels that the rank's codes count.
template <class T> struct Listed {
    const uint8_t* codes;
    const T* scales;
    const T* levels;
};

// A rotation of n elements in blocks, and the levels that the rotated elements are rounded to. The last block may be
// shorter; zeros fill it up to `tail` elements, a power of two.
template <class T> struct Rotation {
    int64_t n, block, tail;
    const T* levels;
    int bits;
    RotationKey key;

    GRACE_MEMBER int64_t blocks() const { return n / block + (tail > 0 ? 1 : 0); }
    GRACE_MEMBER int64_t coded() const { return n / block * block + tail; }
    GRACE_MEMBER int64_t width(int64_t i) const { return i < n / block ? block : tail; }
};

// A frame of `block` vectors for every `width` of n elements: the coefficients of x are a rotation of x, filled up with
// zeros, and they represent the first elements of the inverse rotation. `width` is at most half of `block`.
struct Frame {
    int64_t n, block, width;
    RotationKey key;

    GRACE_MEMBER int64_t blocks() const { return (n + width - 1) / width; }
};

// A list of elements of an array, as a sparsifier sends it.
template <class T> struct Entries {
    const T* values;
    const int32_t* indices;
    int64_t count;
};

// The words of one rank, see power_word.
template <class T> struct PowerWords {
    const int32_t* words;
    const T* scale;
    int64_t count;
};

// The natural codes of one rank, and the base of its exponents.
struct Powers {
    const uint8_t* codes;
    uint32_t base;
};

// 127 ascending edges, and cells that find the position of a magnitude among them without a search. A cell contains the
// numbers with equal upper bits; `lowest` are the bits of the first cell. It contains at most one edge, `inside` (NaN
// if none), and `below` edges come before it. Without cells, the edges are searched.
template <class T> struct Edges {
    const T* edges;
    int64_t cells;
    typename Format<T>::Signed lowest;
    int shift;
    const uint8_t* below;
    const T* inside;
};

// The tags of one rank and its numbers with all, 16 and 8 bits, from the start of a piece, and the factor on them.
template <class T> struct Widths {
    const uint8_t* tags;
    const T* full;
    const int16_t* words;
    const int8_t* bytes;
    const T* scale;
};

template <class T> struct Loops {
    // Returns whether all sums are finite.
    bool (*weighted_sum)(const T* x, T a, const T* y, T b, T* out, int64_t n, bool around);
    // momentum = m u + g, and out = v + momentum. Returns whether all of `out` is finite.
    bool (*momentum_sum)(const T* u, T m, const T* g, const T* v, T* momentum, T* out, int64_t n, bool around);
    // out = a x + b y z, within [-limit, limit].
    void (*limited_sum)(const T* x, T a, const T* y, T b, const T* z, T limit, T* out, int64_t n, bool around);
    // kept = y where z > 0, else 0; sum = a x + b kept.
    void (*masked_sum)(const T* x, T a, const T* y, T b, const T* z, T* sum, T* kept, int64_t n, bool around);
    T (*max_abs)(const T* x, int64_t n);
    bool (*finite)(const T* x, int64_t n);
    // Returns the sum of squares.
    double (*norm_max)(const T* x, int64_t n, T* largest);
    // out = onto + x^2, see bounded_square_sum.
    void (*square_sum)(const T* x, const T* onto, T largest, T limit, T* out, int64_t n, bool around);
    void (*fill)(T* out, T value, int64_t n, bool around);
    // A series of copies around the cache ends with a call of `settle`.
    void (*copy)(const T* x, T* out, int64_t n, bool around);

    // Bits of x >= threshold. n must be a multiple of 8, except for the last piece.
    void (*binarize)(const T* x, T threshold, uint8_t* bits, int64_t n);
    // Also: sums[0] += number of set bits, sums[1] += sum of their elements, sums[2] += sum of the others.
    void (*binarize_sums)(const T* x, T threshold, uint8_t* bits, double* sums, int64_t n);
    // The same of out = a x + b y, with the threshold 0. Returns whether all sums are finite.
    bool (*sum_signs)(const T* x, T a, const T* y, T b, T* out, bool around, uint8_t* bits, double* sums, int64_t n);
    // out = factor (onto + sum over ranks of levels[2 r + bit]). onto may be out or null. bits[r] point to the start of
    // the piece.
    void (*binary_sum)(const uint8_t* const* bits, const T* levels, int ranks, const T* onto, T factor, T* out,
                       int64_t n, bool around);
    // The bits of a tile of the whole matrix x, which has n elements. For column j of the tile, sets sums[j] to the number
    // of set bits, sums[columns + j] to the sum of their elements, and sums[2 columns + j] to the sum of the others.
    void (*binarize_columns)(const T* x, T threshold, uint8_t* bits, int64_t n, const Tile* tile, double* sums);
    // out = onto + sum over ranks of levels[2 r + bit][column], elements begin .. end - 1 of all arrays. The levels of the
    // columns repeat, up to kBeyond elements after those of one row.
    void (*column_sum)(const uint8_t* const* bits, const T* const* levels, int64_t columns, int ranks, int64_t n,
                       const T* onto, T* out, int64_t begin, int64_t end, bool around);
    void (*majority)(const uint8_t* const* bits, int ranks, T* out, int64_t n, bool around);

    // Elements begin .. end - 1 of the whole x.
    void (*bucket_norms)(const T* x, int64_t n, int64_t width, bool largest, T* norms, int64_t begin, int64_t end);
    // Writes the codes (level + levels) of elements begin .. end - 1 as integers of 8 or 16 bits. Without noise, an
    // element is rounded to the nearest level.
    void (*levels8)(const T* x, const T* scales, int64_t width, T levels, const T* limit, const RandomKey* noise,
                    int64_t begin, int64_t end, uint8_t* codes);
    void (*levels16)(const T* x, const T* scales, int64_t width, T levels, const T* limit, const RandomKey* noise,
                     int64_t begin, int64_t end, uint16_t* codes);
    // Writes the codes of elements begin .. end - 1, see floor_code, as integers of 8 or 16 bits.
    void (*floors8)(const T* x, T delta, int32_t half, const RandomKey* key, int64_t begin, int64_t end, uint8_t* codes);
    void (*floors16)(const T* x, T delta, int32_t half, const RandomKey* key, int64_t begin, int64_t end,
                     uint16_t* codes);
    // out = onto + sum over ranks of (code - levels) * (scale / levels), elements begin .. end - 1 of all arrays.
    void (*dequantize_sum)(const Coded<T>* ranks, int count, int64_t width, int levels, int bits, int64_t n,
                           const T* onto, T* out, int64_t begin, int64_t end, bool around);

    // The levels from -most to most of elements begin .. end - 1 by one scale, as integers of 8, 16 or 32 bits. Without
    // noise, an element is rounded to the nearest level.
    void (*to_integers8)(const T* x, T scale, T most, const RandomKey* noise, int64_t begin, int64_t end, int8_t* out);
    void (*to_integers16)(const T* x, T scale, T most, const RandomKey* noise, int64_t begin, int64_t end, int16_t* out);
    void (*to_integers32)(const T* x, T scale, T most, const RandomKey* noise, int64_t begin, int64_t end, int32_t* out);
    // out = onto + code * unit. onto may be out or null.
    void (*from_integers8)(const int8_t* codes, T unit, const T* onto, T* out, int64_t n, bool around);
    void (*from_integers16)(const int16_t* codes, T unit, const T* onto, T* out, int64_t n, bool around);
    void (*from_integers32)(const int32_t* codes, T unit, const T* onto, T* out, int64_t n, bool around);

    // The codes of elements begin .. end - 1, rounded to 2^bits levels times the scales of their buckets; without noise,
    // to the nearest one.
    void (*level_codes)(const T* x, const T* scales, int64_t width, const T* levels, int bits, const RandomKey* noise,
                        int64_t begin, int64_t end, uint8_t* codes);
    // Rounds a x + b y to 2^bits levels times the largest magnitude of each bucket. Writes what is left to `out`, and the
    // packed codes and the magnitudes. `begin` is a multiple of round_unit(width).
    void (*sum_round)(const T* x, T a, const T* y, T b, int64_t width, const T* levels, int bits, T* out, T* norms,
                      uint8_t* codes, int64_t begin, int64_t end, bool around);
    // out = onto + sum over ranks of levels[code] * scale, elements begin .. end - 1 of all arrays.
    void (*levels_sum)(const Listed<T>* ranks, int count, int64_t width, int bits, const T* onto, T* out, int64_t begin,
                       int64_t end, bool around);

    // Rotates blocks begin .. end - 1 of x, filled up with zeros, or `back` applies the inverse.
    void (*rotate)(const T* x, const Rotation<T>* by, bool back, T* out, int64_t begin, int64_t end);
    // The coefficients of blocks begin .. end - 1, see `spread_in_frame` in grace/core/compressors/contrib/kashin.py.
    void (*spread_in_frame)(const T* x, const T* norms, const Frame* frame, T* out, int64_t begin, int64_t end);
    // What the coefficients of blocks begin .. end - 1 represent.
    void (*project_from_frame)(const T* coefficients, const Frame* frame, T* out, int64_t begin, int64_t end);
    // Estimates the elements of blocks begin .. end - 1 from the first measurements of each, one per `reduction` elements;
    // see `recover_sparse` in grace/core/compressors/contrib/fedqcs.py.
    void (*recover_sparse)(const T* z, const Rotation<T>* by, int64_t reduction, int rounds, double share, double noise,
                           T* out, int64_t begin, int64_t end);
    // Rotates blocks begin .. end - 1, and writes their codes and scales.
    void (*rotated_codes)(const T* x, const Rotation<T>* by, bool fit, const RandomKey* noise, uint8_t* codes, T* scales,
                          int64_t begin, int64_t end);
    // out = onto + sum over ranks of the decoded blocks begin .. end - 1, rotated back by the key of each rank.
    void (*rotated_sum)(const Coded<T>* ranks, const RotationKey* keys, int count, const Rotation<T>* by, const T* onto,
                        T* out, int64_t begin, int64_t end, bool around);
    // The same with one rotation of all ranks, for which the sum is rotated back once.
    void (*shared_rotated_sum)(const Coded<T>* ranks, int count, const Rotation<T>* by, const T* onto, T* out,
                               int64_t begin, int64_t end, bool around);

    // Appends the selected elements. The lists have room for n + 1 more.
    void (*select)(const T* x, T bound, bool strict, bool nonzero, int32_t first, int64_t n, Selected<T>* into);
    // The same from out = a x + b y. Returns whether all sums are finite.
    bool (*sum_select)(const T* x, T a, const T* y, T b, T* out, bool around, T bound, bool strict, int32_t first,
                       int64_t n, Selected<T>* into);

    // Appends the elements that are clear (all of them without noise) and large enough to be sent beside *most, the
    // largest magnitude that is clear so far, and updates *most.
    void (*select_powers)(const T* x, const T* noise, double alpha, T* most, int32_t first, int64_t n,
                          Selected<T>* into);

    // Of the elements with a magnitude >= bound: sums[0] += their number, from `powers` 1 on sums[1] += the sum of their
    // magnitudes, from 2 on sums[2] += the sum of the positive ones and sums[3] += the sum of their squares.
    void (*moments)(const T* x, T bound, int powers, double* sums, int64_t n);

    // Of the elements with a magnitude < bound: sums[0] += their number, sums[1] += the sum of their magnitudes, and if
    // `powers` is 2 sums[2] += that of the squares; all magnitudes are first multiplied by unit.
    void (*moments_below)(const T* x, T bound, T unit, int powers, double* sums, int64_t n);
    // Appends the elements from `begin` on that are certain or drawn. The lists have room for n more.
    void (*draw)(const T* x, const Odds* odds, const RandomKey* key, int64_t begin, int64_t n, Selected<T>* into);
    // The values of magnitude `scale` and the indices of drawn elements, which are indices with a sign.
    void (*drawn_entries)(const int32_t* drawn, T scale, T* values, int32_t* indices, int64_t n);

    // Appends elements >= high or <= low. counts[0] += number of elements above 0, counts[1] += number below 0.
    void (*select_sides)(const T* x, T high, T low, int32_t first, int64_t n, Selected<T>* into, int64_t* counts);

    // Appends the elements begin .. begin + n - 1 of x that are not 0 and have |x + gradient| >= the maximum of their bin.
    void (*select_in_bins)(const T* x, const T* gradient, const T* maxima, int64_t width, int64_t begin, int64_t n,
                           Selected<T>* into);

    void (*to_half)(const T* x, bool brain, uint16_t* out, int64_t n, bool around);
    void (*from_half)(const uint16_t* x, bool brain, T* out, int64_t n, bool around);
    // out = sum over rows of factor * rows[row][from + i], summed in T and rounded once.
    void (*half_sum)(const uint16_t* const* rows, int64_t count, int64_t from, bool brain, T factor, uint16_t* out,
                     int64_t n, bool around);

    // Returns whether any element begin .. end - 1 is rounded to a larger exponent. No element has a larger one itself.
    bool (*natural_rises)(const T* x, const RandomKey* key, int32_t exponent, int64_t begin, int64_t end);
    // Codes of elements begin .. end - 1: eight bits each, relative to a base. With base -1: the low eight bits of each
    // code, and packed the sign and the other bits. Both outputs begin at `begin`. Returns the largest magnitude.
    T (*natural_codes)(const T* x, const RandomKey* key, int32_t base, int64_t begin, int64_t end, uint8_t* low,
                       uint8_t* high);
    void (*natural_sum)(const Powers* ranks, int count, bool clipped, bool negate, int64_t n, const T* onto,
                        T factor, T* out, int64_t begin, int64_t end, bool around);
    // The number of edges that are at most |x|, plus 128 if x < 0.
    void (*table_codes)(const T* x, const Edges<T>* edges, int64_t n, uint8_t* codes);
    // The same for elements begin .. end - 1, divided by the scales of their buckets.
    void (*table_codes_of_buckets)(const T* x, const T* scales, int64_t width, const Edges<T>* edges, int64_t begin,
                                   int64_t end, uint8_t* codes);
    // out = onto + sum over ranks of values[256 r + code].
    void (*table_sum)(const uint8_t* const* codes, const T* values, int ranks, const T* onto, T* out, int64_t begin,
                      int64_t end, bool around);
    // out = onto + sum over ranks of +-table[code] times the scale of the bucket.
    void (*table_sum_of_buckets)(const Coded<T>* ranks, int count, int64_t width, const T* table, const T* onto, T* out,
                                 int64_t begin, int64_t end, bool around);
    // Five ternary digits per byte, padded with zeros.
    void (*ternary_bytes)(const T* x, T half, int64_t n, uint8_t* bytes);
    // out = onto + sum over ranks of the five numbers at values[8 (243 r + byte)].
    void (*ternary_sum)(const uint8_t* const* bytes, const T* values, int ranks, const T* onto, T* out, int64_t begin,
                        int64_t end, bool around);
    // Packed tags of n elements; n is a multiple of 64 except for the last piece. counts[t] += number with tag t > 0.
    void (*precision_tags)(const T* x, T bound, T byte_end, T word_end, int64_t n, uint8_t* tags, int64_t* counts);
    // The numbers of elements with a tag, all divided by the scale.
    void (*precision_split)(const T* x, T scale, const uint8_t* tags, T byte_steps, T word_steps, int64_t n, T* full,
                            int16_t* words, int8_t* bytes);
    // out = onto + sum over ranks of the numbers, 0 where there is none, times the scale. onto may be out or null. Advances
    // the lists of numbers.
    void (*precision_sum)(Widths<T>* ranks, int count, T byte_step, T word_step, const T* onto, T* out, int64_t n,
                          bool around);

    // a b, rows begin .. end - 1. a has rows of length m; b is given by its r columns.
    void (*times)(const T* a, const T* b, int64_t m, int r, int64_t begin, int64_t end, T* out);
    // a^T b, rows begin .. end - 1. a has n rows of length m, b has n rows of length r.
    void (*transposed_times)(const T* a, const T* b, int64_t n, int64_t m, int r, int64_t begin, int64_t end, T* out);
    // a b^T, elements begin .. end - 1. a has rows of length r; b is given by its r columns of length m. Subtracts the
    // product from x unless that is null.
    void (*times_transposed)(const T* a, const T* b, int64_t m, int r, int64_t begin, int64_t end, T* out, T* x,
                             bool around);

    // Adds every element to the bucket of its hash, in their order.
    void (*sketch_row)(const T* x, const SketchHash* hash, uint32_t columns, int64_t n, double* sums);
    // Medians over the rows for elements begin .. end - 1; `begin` is the start of a block. `places` and `found` have
    // room for one block per row.
    void (*sketch_medians)(const T* sketch, const SketchHash* hashes, int rows, uint32_t columns, int64_t begin,
                           int64_t end, SketchPlace* places, typename Format<T>::Signed* found, T* out, bool around);
};

struct IntegerLoops {
    void (*words)(const RandomKey* key, uint32_t first, int64_t blocks, uint32_t* out);
    void (*uniform)(const RandomKey* key, int64_t begin, int64_t end, float* out);
    // The permuted values of begin .. end - 1: each follows its cycle until it is below n.
    void (*sample)(const Permutation* permutation, uint32_t n, int64_t begin, int64_t end, int32_t* out);
    // `bits` (1 to 8) of each code; n is a multiple of 8 except for the last piece.
    void (*pack)(const uint8_t* codes, int bits, int64_t n, uint8_t* out);
    void (*unpack)(const uint8_t* data, int bits, int64_t n, uint8_t* codes);
    // Words begin .. end - 1 of n integers in lanes.
    void (*pack_lanes8)(const int8_t* x, int64_t n, int lanes, int64_t begin, int64_t end, int32_t* words);
    void (*pack_lanes16)(const int16_t* x, int64_t n, int lanes, int64_t begin, int64_t end, int32_t* words);
    void (*pack_lanes32)(const int32_t* x, int64_t n, int lanes, int64_t begin, int64_t end, int32_t* words);
    // The integers in words begin .. end - 1. `out` holds all n.
    void (*unpack_lanes8)(const int32_t* words, int64_t n, int lanes, int64_t begin, int64_t end, int8_t* out);
    void (*unpack_lanes16)(const int32_t* words, int64_t n, int lanes, int64_t begin, int64_t end, int16_t* out);
    void (*unpack_lanes32)(const int32_t* words, int64_t n, int lanes, int64_t begin, int64_t end, int32_t* out);
    // Sets the bits in `marks` of the items begin .. end - 1 that a Bloom filter reports, and clears those of the others;
    // returns how many it reports. `begin` is a multiple of 8, and `marks` begins there.
    int64_t (*filter_marks)(const uint8_t* filter, uint32_t bits, const ItemHash* hashes, int count, int64_t begin,
                            int64_t end, uint8_t* marks);
    // counts[t] += number of tags equal to t > 0, of n packed tags of two bits.
    void (*count_tags)(const uint8_t* tags, int64_t n, int64_t* counts);
    // Makes what this thread has copied around the cache visible to other threads.
    void (*settle)();
};

// The tables for this processor: for its best instruction set, or for the one in GRACE_ISA (baseline, avx2, avx512).
template <class T> const Loops<T>& loops();
const IntegerLoops& integer_loops();
// The name of that instruction set.
const char* isa();

// Whole buckets whose codes fill bytes.
inline int64_t round_unit(int64_t width) { return width % 8 == 0 ? width : 8 * width; }
// The longest buckets that are rounded right after their norm: a unit of any width stays in the first-level cache.
constexpr int64_t kRoundWidth = 512;

// Loops of one method need no slot in these tables: a header of their own declares them. GRACE_LOOP declares a template
// of the type T for every instruction set. A file of kernels/cpu defines it and ends with GRACE_MAKE_LOOP(name), which
// compiles it for float and double. GRACE_BEST(name<T>) is the one for this processor.
#if defined(__x86_64__)
#define GRACE_LOOP(...)                                \
    namespace baseline { template <class T> __VA_ARGS__; } \
    namespace avx2 { template <class T> __VA_ARGS__; }     \
    namespace avx512 { template <class T> __VA_ARGS__; }
#define GRACE_BEST(loop) best_of(baseline::loop, avx2::loop, avx512::loop)
#else
#define GRACE_LOOP(...) \
    namespace baseline { template <class T> __VA_ARGS__; }
#define GRACE_BEST(loop) best_of(baseline::loop)
#endif
#define GRACE_MAKE_LOOP(name)                    \
    template decltype(name<float>) name<float>; \
    template decltype(name<double>) name<double>;

// The place of that instruction set among baseline, avx2 and avx512.
int isa_index();
template <class Loop, class... Others> Loop* best_of(Loop* baseline, Others*... newer) {
    Loop* const all[] = {baseline, newer...};
    return all[isa_index()];
}

// The size in bytes of n packed codes of 1 to 16 bits.
static inline int64_t packed_size(int64_t n, int bits) {
    return bits > 8 ? n + packed_size(n, bits - 8) : (n * bits + 7) / 8;
}

// Outputs of this size or more bypass the cache, because they do not fit it together with the inputs. The build with
// sanitizers has a smaller size, so that its tests need no long arrays.
#ifndef GRACE_AROUND
#define GRACE_AROUND (4 << 20)
#endif
constexpr int64_t kAround = GRACE_AROUND;

}  // namespace grace
