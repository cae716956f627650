// Functions for one element, or one block of random bits, shared by the CPU and CUDA.
//
// All functions have internal linkage, because they are compiled several times for different instruction sets of the
// CPU, and the linker must not merge them. Products and sums are rounded one by one. The build disables contraction
// into fused multiply-add, so that every framework and device gets the same bits.
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define GRACE_HD static __host__ __device__ __forceinline__
#define GRACE_MEMBER __host__ __device__ __forceinline__
#else
#define GRACE_HD static inline __attribute__((always_inline))
#define GRACE_MEMBER inline __attribute__((always_inline))
#endif

namespace grace {

template <class To, class From> GRACE_HD To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

template <class T> struct Format;
template <> struct Format<float> {
    using Word = uint32_t;
    using Signed = int32_t;
    static constexpr int exponent = 8, mantissa = 23;
};
template <> struct Format<double> {
    using Word = uint64_t;
    using Signed = int64_t;
    static constexpr int exponent = 11, mantissa = 52;
};

template <class T> GRACE_HD typename Format<T>::Word magnitude_bits(T x) {
    using Word = typename Format<T>::Word;
    return bits_as<Word>(x) & (~Word(0) >> 1);
}

template <class T> GRACE_HD T magnitude(T x) { return bits_as<T>(magnitude_bits(x)); }

// The bits of the largest magnitude that counts as finite, as MAX_MAGNITUDE in grace/core/spec.py: 2^104 for float and
// 2^512 for double.
template <class T> GRACE_HD constexpr typename Format<T>::Word largest_bits() {
    using Word = typename Format<T>::Word;
    constexpr int bias = (1 << (Format<T>::exponent - 1)) - 1, power = sizeof(T) == 4 ? 104 : 512;
    return Word(bias + power) << Format<T>::mantissa;
}

// --- two levels ------------------------------------------------------------------------------------------------------

// Sums over n elements: the number of high ones, their sum, and the sum of the others.
struct Sides {
    double count, high, low;
};

// The means of both sides, low first, 0 for an empty side. Or the mean magnitude, if high means 0 or more.
template <class T> GRACE_HD void means_of(const Sides& sides, int64_t n, T* means) {
    const double rest = double(n) - sides.count;
    means[0] = T(double(T(sides.low)) / (rest > 0 ? rest : 1.0));
    means[1] = T(double(T(sides.high)) / (sides.count > 0 ? sides.count : 1.0));
}
template <class T> GRACE_HD void mean_magnitude(const Sides& sides, int64_t n, T* mean) {
    *mean = T(sides.high - sides.low) / T(n > 0 ? n : 1);
}

// The decoded value of a bit: one of two levels, or plus or minus the only level.
template <class T> GRACE_HD T level_of(const T* levels, bool single, bool negate, bool bit) {
    const T level = single ? (bit ? levels[0] : -levels[0]) : levels[bit ? 1 : 0];
    return negate ? -level : level;
}

// --- random bits: Philox4x32-10 (Salmon et al., SC 2011) -------------------------------------------------------------

constexpr uint32_t kPhilox0 = 0xD2511F53u, kPhilox1 = 0xCD9E8D57u, kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;

// A stream of random words: the inputs of Philox except the block number.
struct RandomKey {
    uint32_t seed_low, seed_high, step, stream, rank;
};

GRACE_HD void philox(const RandomKey& key, uint32_t block, uint32_t out[4]) {
    uint32_t c0 = block, c1 = key.step, c2 = key.stream, c3 = key.rank, k0 = key.seed_low, k1 = key.seed_high;
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t(c0) * kPhilox0, p1 = uint64_t(c2) * kPhilox1;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c1 = uint32_t(p1);
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c3 = uint32_t(p0);
        k0 += kWeyl0;
        k1 += kWeyl1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

// A multiple of 2^-24 in [0, 1).
GRACE_HD float uniform(uint32_t word) { return float(int32_t(word >> 8)) * 5.9604644775390625e-8f; }

// --- stochastic levels -----------------------------------------------------------------------------------------------

// The level of x, in [-levels, levels], with mean levels * x / scale for a uniform u in [0, 1); 0 if the scale is 0.
template <class T> GRACE_HD int32_t level_of(T x, T scale, T levels, T u) {
    const T safe = scale > 0 ? scale : T(1);
    T size = magnitude(x) / safe * levels + u;
    size = size < levels ? size : levels;
    const int32_t level = scale > 0 ? int32_t(size) : 0;
    return x < 0 ? -level : level;
}

// floor(x / delta + u), after x is limited to the levels from -half to half - 1 times delta, plus half.
template <class T> GRACE_HD int32_t floor_code(T x, T delta, int32_t half, T u) {
    const T low = delta * T(-half), high = delta * T(half - 1);
    x = x < low ? low : x;
    x = x > high ? high : x;
    T steps = x / (delta > 0 ? delta : T(1));
    // Only NaN fails this.
    steps = magnitude(steps) <= T(half) ? steps : T(0);
    int32_t level = int32_t(steps);
    level -= T(level) > steps ? 1 : 0;
    level += u < steps - T(level) ? 1 : 0;
    level = level < half - 1 ? level : half - 1;
    return level + half;
}

template <class T> GRACE_HD T limited(T x, T limit) {
    x = x < -limit ? -limit : x;
    return x > limit ? limit : x;
}

// --- integers in lanes of a word -------------------------------------------------------------------------------------

// The word of integers in lanes, see grace/core/wire/lanes.py. In a sum of words, half a lane is added to each lane
// but the last, so that none is negative.
GRACE_HD uint32_t halves_of(int lanes) {
    const int bits = 32 / lanes;
    uint32_t word = 0;
    for (int lane = 0; lane < lanes - 1; ++lane) word |= 1u << (lane * bits + bits - 1);
    return word;
}

// An integer of a word to which these halves were added.
GRACE_HD int32_t lane_of(uint32_t word, int lane, int lanes) {
    const int bits = 32 / lanes;
    if (lane == lanes - 1) return int32_t(word) >> (lane * bits);
    return int32_t((word >> (lane * bits)) & ((1u << bits) - 1u)) - (int32_t(1) << (bits - 1));
}

// --- lists of levels -------------------------------------------------------------------------------------------------

// The most bits of a code, for 16 levels.
constexpr int kLevelBits = 4;

// The threshold between two levels, at `share` of their gap. It is at most the upper one, so that thresholds ascend.
template <class T> GRACE_HD T threshold_of(T low, T high, T share) {
    const T threshold = low + share * (high - low);
    return threshold < high ? threshold : high;
}

// The number of thresholds between the levels, times the scale, that x reaches.
template <class T> GRACE_HD uint32_t index_of_level(T x, const T* levels, int count, T scale, T share) {
    uint32_t index = 0;
    T low = levels[0] * scale;
    for (int j = 1; j < count; ++j) {
        const T high = levels[j] * scale;
        index += x >= threshold_of(low, high, share) ? 1u : 0u;
        low = high;
    }
    return index;
}

// --- levels fitted to a distribution, see grace/core/compressors/contrib/alq.py -----------------------------------------------
// Sizes are integers from 0 to kUnit, ascending, with the sums of the first 0, 1, 2, ... of them; all sums are exact.

constexpr double kUnit = 1 << 19;
constexpr int kSweeps = 6;
// The multipliers of exponential levels, in 64ths.
constexpr int kLeastMultiplier = 8, kMultipliers = 53;

// The number of ascending sizes that are at most x.
GRACE_HD int64_t count_upto(const double* sizes, int64_t n, double x) {
    int64_t low = 0, high = n;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (sizes[middle] <= x) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// The best level between two others; the level itself if there are no sizes.
GRACE_HD double best_between(const double* sizes, const double* sums, int64_t n, double level, double low,
                             double high) {
    const int64_t below = count_upto(sizes, n, low), upto = count_upto(sizes, n, high);
    if (upto <= below) return level;
    const double total = sums[upto] - sums[below] - low * double(upto - below);
    const int64_t rank = upto - int64_t(total / (high - low)) - 1;
    return sizes[rank < below ? below : rank < upto ? rank : upto - 1];
}

// Writes 0, s - 1 levels and kUnit. The search starts from the sizes with the indices `starts`.
GRACE_HD void free_levels(const double* sizes, const double* sums, int64_t n, const int32_t* starts, int s,
                          double* levels) {
    levels[0] = 0;
    levels[s] = kUnit;
    for (int j = 1; j < s; ++j) {
        const int64_t at = starts[j - 1] < 0 ? 0 : starts[j - 1] < n ? starts[j - 1] : n - 1;
        levels[j] = double(int64_t((sizes[at] + double(int64_t(kUnit) >> (s - j))) * 0.5));
    }
    for (int sweep = 0; sweep < kSweeps; ++sweep) {
        for (int first = 1; first <= 2; ++first) {
            for (int j = first; j < s; j += 2) {
                levels[j] = best_between(sizes, sums, n, levels[j], levels[j - 1], levels[j + 1]);
            }
        }
    }
}

// The same with levels whose ratios are equal; `squares` are the sums of the first 0, 1, 2, ... squares.
GRACE_HD void exponential_levels(const double* sizes, const double* sums, const double* squares, int64_t n, int s,
                                 double* levels) {
    double least = 0, best = 0;
    for (int trial = 0; trial <= kMultipliers; ++trial) {
        // After all trials, write the best.
        const bool last = trial == kMultipliers;
        const double multiplier = last ? best : double(trial + kLeastMultiplier) / 64;
        double power = kUnit, high = kUnit, variance = 0;
        int64_t upto = count_upto(sizes, n, high);
        for (int j = s; j > 0; --j) {
            power *= multiplier;
            const double low = j > 1 ? double(int64_t(power)) : 0;
            const int64_t below = count_upto(sizes, n, low);
            variance += (low + high) * (sums[upto] - sums[below]) - (squares[upto] - squares[below]) -
                        low * high * double(upto - below);
            if (last) levels[j] = high;
            high = low;
            upto = below;
        }
        if (trial == 0 || variance < least) {
            least = variance;
            best = multiplier;
        }
    }
    levels[0] = 0;
}

constexpr int kMostInner = 64;

// Either, with room for 2 (n + 1) sums.
GRACE_HD void fit_levels(const double* sizes, int64_t n, const int32_t* starts, int inner, bool exponential,
                         double* sums, double* levels) {
    double* squares = sums + n + 1;
    sums[0] = squares[0] = 0;
    for (int64_t i = 0; i < n; ++i) {
        sums[i + 1] = sums[i] + sizes[i];
        squares[i + 1] = squares[i] + sizes[i] * sizes[i];
    }
    if (exponential) {
        exponential_levels(sizes, sums, squares, n, inner + 1, levels);
    } else {
        free_levels(sizes, sums, n, starts, inner + 1, levels);
    }
}

// --- half precision --------------------------------------------------------------------------------------------------

// Rounds to bfloat16: nearest, ties to even. NaN stays NaN.
GRACE_HD uint16_t to_bfloat16(float x) {
    const uint32_t word = bits_as<uint32_t>(x);
    const uint32_t rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;
    const uint32_t nan = (word >> 16) | 0x40u;
    return uint16_t((word & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}

GRACE_HD float from_bfloat16(uint16_t half) { return bits_as<float>(uint32_t(half) << 16); }

// Rounds to float16: nearest, ties to even. Too large values become infinite, NaN stays NaN.
GRACE_HD uint16_t to_float16(float x) {
    const uint32_t word = bits_as<uint32_t>(x), sign = (word >> 16) & 0x8000u, size = word & 0x7FFFFFFFu;
    // Normal: rebase the exponent and round on bit 13.
    const uint32_t normal = (size - 0x38000000u + 0xFFFu + ((size >> 13) & 1u)) >> 13;
    // Below 2^-14: add a float whose last place is 2^-24, which rounds.
    const uint32_t small = bits_as<uint32_t>(bits_as<float>(size) + 0.5f) - 0x3F000000u;
    uint32_t half = size < 0x38800000u ? small : normal;
    half = size >= 0x477FF000u ? 0x7C00u : half;
    half = size > 0x7F800000u ? (0x7E00u | ((size >> 13) & 0x3FFu)) : half;
    return uint16_t(sign | half);
}

GRACE_HD float from_float16(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000u) << 16, size = half & 0x7FFFu;
    // The product with 2^112 is exact. It changes the bias of the exponent, and makes denormals normal.
    const float value = bits_as<float>(size << 13) * 5.192296858534828e33f;
    const uint32_t word = size >= 0x7C00u ? (size << 13) | 0x7F800000u : bits_as<uint32_t>(value);
    return bits_as<float>(word | sign);
}

// --- natural compression ---------------------------------------------------------------------------------------------

// The biased exponent after stochastic rounding. `word` is a random word.
template <class T> GRACE_HD int32_t natural_exponent(T x, uint32_t word) {
    using Word = typename Format<T>::Word;
    constexpr int mantissa = Format<T>::mantissa, random_bits = 24;
    constexpr int32_t largest = (1 << Format<T>::exponent) - 2;
    Word noise = Word(word >> 8);
    if constexpr (mantissa < random_bits) {
        noise >>= random_bits - mantissa;
    } else {
        // Add half a step, so that the probability is rounded to the nearest.
        noise = (noise << (mantissa - random_bits)) + (Word(1) << (mantissa - random_bits - 1));
    }
    const int32_t code = int32_t((magnitude_bits(x) + noise) >> mantissa);
    return code < largest ? code : largest;
}

// The reciprocal of the power of two with exponent `base` + 1, the smallest exponent that has a code.
template <class T> GRACE_HD T natural_inverse(int32_t base) {
    return bits_as<T>(typename Format<T>::Word((1 << Format<T>::exponent) - 3 - base) << Format<T>::mantissa);
}

// The code of x: one of the 127 exponents above `base`, or 0. `exponent` is the result of natural_exponent.
template <class T> GRACE_HD int32_t natural_clipped(T x, int32_t exponent, int32_t base, T inverse, uint32_t word) {
    const int32_t own = int32_t(magnitude_bits(x) >> Format<T>::mantissa);
    const T share = magnitude(x) * inverse;
    const int32_t up = T(uniform(word)) + share >= T(1) ? 1 : 0;
    return own > base ? exponent - base : up;
}

// The power of two with this exponent. A damaged payload may contain an exponent that is too large. `flip` = 1 negates.
template <class T> GRACE_HD T natural_value(uint32_t exponent, uint32_t flip) {
    using Word = typename Format<T>::Word;
    constexpr int mantissa = Format<T>::mantissa;
    return bits_as<T>((Word(exponent) << mantissa) ^ (Word(flip) << (mantissa + Format<T>::exponent)));
}

// --- powers of two in words, see grace/core/compressors/variance.py ---------------------------------------------------

// A word has 1 bit for the sign, 3 bits that count powers of two down from the largest, and 28 bits for the index.
constexpr int kIndexBits = 28, kSteps = 7;

// Whether x is sent in spite of its noise, the variance.
template <class T> GRACE_HD bool is_clear(T x, T noise, double alpha) {
    return double(x) * double(x) > double(noise) * alpha;
}

// The biased exponent of the nearest power of two, 0 for a denormal one. Half a mantissa carries from 1.5 powers on.
template <class T> GRACE_HD int32_t nearest_exponent(T x) {
    using Word = typename Format<T>::Word;
    constexpr int mantissa = Format<T>::mantissa;
    return int32_t((magnitude_bits(x) + (Word(1) << (mantissa - 1))) >> mantissa);
}

// The power of two with a biased exponent; 0 for the exponent 0.
template <class T> GRACE_HD T power_of(int32_t exponent) {
    return bits_as<T>(typename Format<T>::Word(exponent) << Format<T>::mantissa);
}

// The smallest magnitude that is sent if this exponent is the largest.
template <class T> GRACE_HD T least_sent(int32_t top) {
    using Word = typename Format<T>::Word;
    constexpr int mantissa = Format<T>::mantissa;
    const int32_t lowest = top > kSteps ? top - kSteps : 1;
    return bits_as<T>(Word((Word(lowest) << mantissa) - (Word(1) << (mantissa - 1))));
}

template <class T> GRACE_HD int32_t power_word(T x, int32_t index, int32_t top) {
    const uint32_t below = uint32_t(top - nearest_exponent(x)), sign = x < 0 ? 1u : 0u;
    return int32_t(sign << 31 | below << kIndexBits | uint32_t(index));
}

GRACE_HD int32_t index_of_word(int32_t word) { return word & ((int32_t(1) << kIndexBits) - 1); }

template <class T> GRACE_HD T value_of_word(int32_t word, T scale) {
    constexpr int32_t bias = (1 << (Format<T>::exponent - 1)) - 1;
    const T size = scale * power_of<T>(bias - int32_t(uint32_t(word) >> kIndexBits & uint32_t(kSteps)));
    return word < 0 ? -size : size;
}

// onto + x^2, with |x| at most `largest` and the sum in [0, limit].
template <class T> GRACE_HD T bounded_square_sum(T x, T onto, T largest, T limit) {
    const T bounded = limited(x, largest), sum = bounded * bounded + onto;
    return sum < 0 ? T(0) : sum > limit ? limit : sum;
}

// --- tables ----------------------------------------------------------------------------------------------------------

// The number of the 127 ascending edges that are at most `size`.
template <class T> GRACE_HD int32_t nearest(T size, const T* edges) {
    int32_t at = 0;
    for (int32_t step = 64; step > 0; step >>= 1) at += size >= edges[at + step - 1] ? step : 0;
    return at;
}

// The smallest magnitude whose rounded quotient by `scale` reaches an edge, NaN if none does. A comparison with it
// replaces the division.
template <class T> GRACE_HD T reaching(T edge, T scale) {
    using Word = typename Format<T>::Word;
    constexpr Word infinite = Word((Word(1) << Format<T>::exponent) - 1) << Format<T>::mantissa;
    const T guess = edge * scale;
    Word low = 0, high = infinite + 1;
    if (guess > 0 && magnitude_bits(guess) > 4 && magnitude_bits(guess) < infinite - 4) {
        const Word below = magnitude_bits(guess) - 4, above = magnitude_bits(guess) + 4;
        if (bits_as<T>(below) / scale < edge) low = below + 1;
        if (bits_as<T>(above) / scale >= edge) high = above;
    }
    while (low < high) {
        const Word middle = low + (high - low) / 2;
        if (bits_as<T>(middle) / scale >= edge) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return bits_as<T>(low);
}

// --- ternary digits --------------------------------------------------------------------------------------------------

// 0, 1, 2 for -1, 0, 1. If `half` is 0, both comparisons are true, which gives 1.
template <class T> GRACE_HD uint32_t digit_of(T x, T half) { return uint32_t(x >= half) + 1u - uint32_t(x <= -half); }

// --- precision by size -----------------------------------------------------------------------------------------------

// 0: nothing, 1: 8 bits, 2: 16 bits, 3: all bits.
template <class T> GRACE_HD uint32_t precision_tag(T x, T bound, T byte_end, T word_end) {
    const T size = magnitude(x);
    const uint32_t tag = 1u + uint32_t(size >= byte_end) + uint32_t(size >= word_end);
    return size < bound ? 0u : tag;
}

// --- keyed permutation (Feistel) -------------------------------------------------------------------------------------

struct Permutation {
    uint32_t keys[8];
    uint32_t low_mask, high_mask;
    int low;
};

GRACE_HD uint32_t mix(uint32_t value, uint32_t key) {
    uint32_t h = value * 0x9E3779B1u + key;
    h ^= h >> 16;
    h *= 0x85EBCA6Bu;
    h ^= h >> 13;
    h *= 0xC2B2AE35u;
    return h ^ (h >> 16);
}

GRACE_HD uint32_t permuted(const Permutation& p, uint32_t index) {
    uint32_t left = index & p.low_mask, right = index >> p.low;
    for (int r = 0; r < 8; r += 2) {
        left ^= mix(right, p.keys[r]) & p.low_mask;
        right ^= mix(left, p.keys[r + 1]) & p.high_mask;
    }
    return left + (right << p.low);
}

// --- random selection with the fewest elements, see grace/core/compressors/wangni.py ---------------------------------

// The probability of a magnitude is factor * size / largest, at most 1.
struct Odds {
    double largest, factor;
};
GRACE_HD Odds odds_of(const double* pair) { return {pair[0] > 0 ? pair[0] : 1.0, pair[1]}; }

template <class T> GRACE_HD double chance_of(T x, const Odds& odds) {
    return double(magnitude(x)) / odds.largest * odds.factor;
}

// Whether an element is drawn; with a chance of 1 it always is. Half a step of the random number is added, so that
// chances are rounded to the nearest multiple of 2^-24 and not up.
GRACE_HD bool is_drawn(double chance, uint32_t word) {
    return double(int32_t(word >> 8)) * 5.9604644775390625e-8 + 2.98023223876953125e-8 < chance;
}

// The smallest magnitude with a chance of 1, infinity if no finite one has it.
template <class T> GRACE_HD T certain_from(const Odds& odds) {
    using Word = typename Format<T>::Word;
    Word low = 0, high = Word((Word(1) << Format<T>::exponent) - 1) << Format<T>::mantissa;
    while (low < high) {
        const Word middle = low + (high - low) / 2;
        if (chance_of(bits_as<T>(middle), odds) >= 1) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return bits_as<T>(low);
}

// A power of two that brings numbers up to `largest` near 1, so that their squares neither overflow nor vanish. Squares
// of float fit double as they are.
template <class T> GRACE_HD T unit_of(T largest) {
    if (sizeof(T) == sizeof(float)) return T(1);
    constexpr int most = 1000;
    int power = int(uint64_t(magnitude_bits(largest)) >> Format<double>::mantissa) - 1023;
    power = power < -most ? -most : power > most ? most : power;
    return T(bits_as<double>(uint64_t(1023 - power) << Format<double>::mantissa));
}

// Sums over the elements whose chance is below 1: their number, their magnitudes, and the squares of these.
struct Uncertain {
    double number, sizes, squares;
};

// The sums in units of the largest magnitude, which is `largest` in the units of these sums.
GRACE_HD Uncertain in_largest(const Uncertain& sums, double largest) {
    return {sums.number, sums.sizes / largest, sums.squares / largest / largest};
}

// The next factor of Newton's method, at least the last one. The sums are those of in_largest; `squares` is that over
// all n elements, and a budget of 0 means that k elements are kept on average.
GRACE_HD double next_factor(const Uncertain& sums, double squares, int64_t n, int64_t k, double budget, double factor) {
    const bool by_number = budget == 0;
    const double above = by_number ? double(k) - (double(n) - sums.number) : sums.sizes;
    const double below = by_number ? sums.sizes : squares * budget + sums.squares;
    const double next = sums.sizes > 0 ? above / below : 0.0;
    return next > factor ? next : factor;
}

// The index of a drawn element, -1 - index for a negative one, and back.
template <class T> GRACE_HD int32_t signed_index(T x, int32_t index) { return x < 0 ? ~index : index; }
GRACE_HD int32_t plain_index(int32_t index) { return index < 0 ? ~index : index; }

// --- hashing (multiply-shift) ----------------------------------------------------------------------------------------

// The hash functions of one row of a sketch.
struct SketchHash {
    uint64_t bucket_factor, bucket_term, sign_factor, sign_term;
};

GRACE_HD uint32_t hashed(uint64_t item, uint64_t factor, uint64_t term) {
    return uint32_t((item * factor + term) >> 32);
}

// The i-th number for the hash functions: 64 bits from three words of a stream.
GRACE_HD uint64_t hash_number(const RandomKey& key, int64_t i) {
    uint32_t parts[3];
    for (int64_t j = 0; j < 3; ++j) {
        uint32_t random[4];
        philox(key, uint32_t((3 * i + j) / 4), random);
        parts[j] = random[(3 * i + j) % 4];
    }
    return uint64_t(parts[0] >> 8) << 40 ^ uint64_t(parts[1] >> 8) << 16 ^ parts[2] >> 16;
}

// The hash functions of a row, drawn as in `hash_words` of grace/core/ops/random.py: first the numbers for all buckets,
// then for all signs.
GRACE_HD SketchHash hash_of_row(const RandomKey& key, int64_t row, int64_t rows) {
    return {hash_number(key, 2 * row), hash_number(key, 2 * row + 1), hash_number(key, 2 * (rows + row)),
            hash_number(key, 2 * (rows + row) + 1)};
}

// A hash function of items: the upper half of factor * item + term, drawn as in `hash_functions` of
// grace/core/ops/random.py.
struct ItemHash {
    uint64_t factor, term;
};
GRACE_HD ItemHash hash_of_items(const RandomKey& key, int64_t i) {
    return {hash_number(key, 2 * i), hash_number(key, 2 * i + 1)};
}

// The bit of a filter of `bits` bits that a hash function sets for an item.
GRACE_HD uint32_t filter_place(const ItemHash& hash, uint64_t item, uint32_t bits) {
    return uint32_t(uint64_t(hashed(item, hash.factor, hash.term)) * bits >> 32);
}
GRACE_HD uint32_t bit_at(const uint8_t* data, uint32_t place) { return data[place / 8] >> place % 8 & 1u; }

// The share of a norm that an element has, in units of 2^-24; 0 for what is no share.
template <class T> GRACE_HD int64_t share_of(T x, T norm) {
    const T share = magnitude(x) / (norm > T(0) ? norm : T(1)) * T(1 << 24);
    return share < T(1 << 25) ? int64_t(share) : 0;
}

// A point from 0 to `reach`, below 2^32.
GRACE_HD int64_t point_of(uint32_t word, int64_t reach) { return int64_t(word >> 1) * reach >> 31; }

// The code of the vertex at a point: its place among the ends of a bucket's shares, of which there is a power of two,
// plus `width` if its element is negative. Of the elements, `length` lie in the array.
template <class T>
GRACE_HD int64_t vertex_at(int64_t point, const int64_t* ends, int64_t width, const T* x, int64_t length) {
    int64_t place = 0;
    for (int64_t half = width / 2; half > 0; half /= 2) place += ends[place + half - 1] <= point ? half : 0;
    return place < length && x[place] < T(0) ? place + width : place;
}

// A sketch hashes blocks of this many elements; see `count_sketch` in grace/core/ops/composites.py.
constexpr int kSketchBlock = 16;

// The position of a block in a row of a sketch: lane l is in column `column` ^ l. Bit l of `signs` is set if it is
// negated.
struct SketchPlace {
    uint32_t column, signs;
};

GRACE_HD uint32_t sketch_column(const SketchHash& hash, uint64_t block, uint32_t columns) {
    return uint32_t(uint64_t(hashed(block, hash.bucket_factor, hash.bucket_term)) * columns >> 32);
}

GRACE_HD SketchPlace place_of(const SketchHash& hash, uint64_t block, uint32_t columns) {
    return {sketch_column(hash, block, columns), hashed(block, hash.sign_factor, hash.sign_term) >> kSketchBlock};
}

// x with the sign of its lane.
template <class T> GRACE_HD T signed_by(uint32_t signs, int lane, T x) {
    using Word = typename Format<T>::Word;
    return bits_as<T>(bits_as<Word>(x) ^ (Word(signs >> lane & 1u) << (8 * sizeof(T) - 1)));
}

// --- rotations -------------------------------------------------------------------------------------------------------

// Limits of the length of a block. The lower one is what a block of random words has signs for.
constexpr int64_t kShortestRotation = 128, kRotation = 4096;

// The two streams of a rank's signs, of which one transform takes the first. The noise of its rounding comes from the
// stream before them.
struct RotationKey {
    RandomKey first, second;
    bool twice;
};
GRACE_HD RotationKey signs_of(const RandomKey& key, uint32_t rank, bool twice = true) {
    return {{key.seed_low, key.seed_high, key.step, key.stream + 1, rank},
            {key.seed_low, key.seed_high, key.step, key.stream + 2, rank},
            twice};
}

// How often coefficients in a frame are clipped and projected; see grace/core/compressors/contrib/kashin.py.
constexpr int kProjections = 4;

template <class T> GRACE_HD T clipped(T x, T bound) { return x < -bound ? -bound : x > bound ? bound : x; }

// The measurements of a block of `width` elements, one per `reduction` elements.
GRACE_HD int64_t measurements(int64_t width, int64_t reduction) { return width < reduction ? 1 : width / reduction; }

// What a round of `recover_sparse` takes from the round before it: the share of large elements, their variance, and that
// of the error of the noisy copy; and what follows for every element.
template <class T> struct Belief {
    T large, size, error;
    T kept, slope, odds, rest;
};

// exp(-t) for t from 0 on; see `_decayed` in grace/core/compressors/contrib/fedqcs.py.
template <class T> GRACE_HD T decayed(T t) {
    const T h = (t < T(60) ? t : T(60)) * T(0.00390625), square = h * h * T(1.0 / 12);
    T result = (T(1) - h * T(0.5) + square) / (T(1) + h * T(0.5) + square);
    for (int i = 0; i < 8; ++i) result = result * result;
    return result;
}

// The belief before the first round, from the sum of the squares of m measurements of `per` elements each.
template <class T> GRACE_HD Belief<T> first_belief(T squares, int64_t m, double per, double share, double noise) {
    const T energy = squares / T(m), above = energy - T(noise), least = energy * T(1e-3);
    const T variance = above > least ? above : least;
    return {T(share), variance / T(share), variance * T(per - 1) + T(noise * per), 0, 0, 0, 0};
}

template <class T> GRACE_HD Belief<T> with_factors(Belief<T> now) {
    const T both = now.size + now.error, ratio = both / now.error;
    T root = (ratio + T(1)) * T(0.5);
    for (int i = 0; i < 16; ++i) root = (root + ratio / root) * T(0.5);
    now.kept = now.size / both;
    now.slope = now.size / (both * now.error) * T(0.5);
    now.odds = (T(1) - now.large) / now.large * root;
    now.rest = now.kept * now.error;
    return now;
}

// An element of the noisy copy: the chance that it is large, its estimate, and the mean of its square.
template <class T> struct Guess {
    T chance, estimate, second;
};
template <class T> GRACE_HD Guess<T> guess_of(T copy, const Belief<T>& now) {
    const T chance = T(1) / (now.odds * decayed(copy * copy * now.slope) + T(1)), mean = copy * now.kept;
    return {chance, chance * mean, chance * (mean * mean + now.rest)};
}

// The belief after a round, from the sums of its chances, squares and spreads. `trust` is how much of the copy the
// estimates repeat; the error is that of the estimates without it.
template <class T>
GRACE_HD Belief<T> next_belief(Belief<T> now, T chances, T seconds, T spreads, int64_t width, T* trust) {
    const T part = spreads / T(width) / now.error, share = chances / T(width), size = seconds / chances;
    *trust = part < T(1e-4) ? T(1e-4) : part > T(0.95) ? T(0.95) : part;
    now.large = share < T(1e-4) ? T(1e-4) : share > T(0.9999) ? T(0.9999) : share;
    now.size = size > T(1e-6) ? size : T(1e-6);
    now.error = now.error * *trust / (T(1) - *trust);
    return now;
}

// The variance of the error of the next copy.
template <class T> GRACE_HD T next_error(T error, double per, double noise) {
    const T gain = error / (error + T(noise)) / T(per);
    return error * (T(1) - gain) / gain;
}

// |x|^2 / <y, q>, from the norm of x and the product of its rotation y with the rounded q; 0 if x is 0.
template <class T> GRACE_HD T fitted_scale(T norm, T product) { return product > 0 ? norm * (norm / product) : T(0); }

// Replaces the estimate of a sum that overflowed or is NaN.
template <class T> GRACE_HD T largest_estimate() { return sizeof(T) == sizeof(float) ? T(1e38) : T(1e307); }

template <class T> GRACE_HD T finite_estimate(T x) {
    return magnitude(x) < largest_estimate<T>() ? x : largest_estimate<T>();
}

// --- order -----------------------------------------------------------------------------------------------------------

// Floating-point numbers as integers of the same order. -0 equals 0, and NaN comes last.
template <class T> GRACE_HD typename Format<T>::Signed ordered(T x) {
    using Signed = typename Format<T>::Signed;
    constexpr Signed infinite = Signed((int64_t(1) << Format<T>::exponent) - 1) << Format<T>::mantissa;
    const Signed size = bits_as<Signed>(magnitude(x)), own = bits_as<Signed>(x);
    return own >= 0 || size == 0 || size > infinite ? size : ~size;
}

template <class T> GRACE_HD T from_ordered(typename Format<T>::Signed word) {
    using Word = typename Format<T>::Word;
    return bits_as<T>(word >= 0 ? Word(word) : Word(~word) | Word(1) << (8 * sizeof(T) - 1));
}

}  // namespace grace
