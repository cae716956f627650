// The bodies of grace/loops.h, compiled once per instruction set with GRACE_ISA defined as its name.

#include <stddef.h>

#include "grace/loops.h"
#include "simd.h"

namespace grace {
namespace GRACE_ISA {

constexpr int64_t kBlock = 1024;  // elements that stay in the first cache between two passes

GRACE_LOCAL int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// Runs body(begin, length, target) over blocks of an output; the target is the output itself, or a buffer that is then
// written around the cache.
template <class T, class Body> GRACE_LOCAL void in_blocks(T* out, int64_t n, bool around, Body body) {
    alignas(64) T buffer[kBlock];
    for (int64_t at = 0; at < n; at += kBlock) {
        const int64_t length = lesser(kBlock, n - at);
        body(at, length, around ? buffer : out + at);
        if (around) write_around(out + at, buffer, length * int64_t(sizeof(T)));
    }
    if (around) settle();
}

template <class T>
static void weighted_sum(const T* x, T a, const T* y, T b, T* out, int64_t n, bool around) {
    const bool plain = a == T(1) && b == T(1);
    in_blocks(out, n, around, [&](int64_t at, int64_t length, T* target) {
        if (plain) {
            for (int64_t i = 0; i < length; ++i) target[i] = x[at + i] + y[at + i];
        } else {
            for (int64_t i = 0; i < length; ++i) target[i] = x[at + i] * a + y[at + i] * b;
        }
    });
}

template <class T> static T max_abs(const T* x, int64_t n) {
    // As integers: the order is the same, and there is no NaN to care for.
    using Word = typename Format<T>::Word;
    Word most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const Word word = magnitude_bits(x[i]);
        most = word > most ? word : most;
    }
    return bits_as<T>(most);
}

template <class T> static bool finite(const T* x, int64_t n) {
    return magnitude_bits(max_abs(x, n)) < magnitude_bits(bits_as<T>(
               typename Format<T>::Word(((typename Format<T>::Word(1) << Format<T>::exponent) - 1)) << Format<T>::mantissa));
}

template <class T> static double sum_squares(const T* x, int64_t n) {
    double sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; ++j) sums[j] += double(x[i + j]) * double(x[i + j]);
    }
    for (int j = 0; i < n; ++i, ++j) sums[j] += double(x[i]) * double(x[i]);
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

template <class T> static void fill(T* out, T value, int64_t n, bool around) {
    if (!around) {
        for (int64_t i = 0; i < n; ++i) out[i] = value;
        return;
    }
    alignas(64) T buffer[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) buffer[i] = value;
    for (int64_t at = 0; at < n; at += kBlock) {
        write_around(out + at, buffer, lesser(kBlock, n - at) * int64_t(sizeof(T)));
    }
    settle();
}

template <class T> static void copy(const T* x, T* out, int64_t n, bool around) {
    if (around) {
        write_around(out, x, n * int64_t(sizeof(T)));
        settle();
    } else {
        memcpy(out, x, size_t(n) * sizeof(T));
    }
}

// --- bits ------------------------------------------------------------------------------------------------------------------

GRACE_LOCAL void store_mask(uint64_t mask, uint8_t* bits, int64_t bytes) {
    for (int64_t j = 0; j < bytes; ++j) bits[j] = uint8_t(mask >> (8 * j));
}

template <class T> static void binarize(const T* x, T threshold, uint8_t* bits, int64_t n) {
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) store_mask(mask64<Test::at_least>(x + i, threshold), bits + i / 8, 8);
    const int rest = int(n - i);
    if (rest > 0) store_mask(mask_of<Test::at_least>(x + i, threshold, rest), bits + i / 8, (rest + 7) / 8);
}

template <class T> struct Eight {
    typedef T Values __attribute__((vector_size(8 * sizeof(T))));
    typedef typename Format<T>::Signed Words __attribute__((vector_size(8 * sizeof(T))));
};
typedef double EightDoubles __attribute__((vector_size(64)));

template <class T> static void binarize_sums(const T* x, T threshold, uint8_t* bits, double* sums, int64_t n) {
    using Values = typename Eight<T>::Values;
    using Words = typename Eight<T>::Words;
    // Two of each, so that one sum need not wait for the last.
    EightDoubles high[2] = {}, low[2] = {};
    int64_t count = 0, i = 0;
    for (; i + 64 <= n; i += 64) {
        const uint64_t mask = mask64<Test::at_least>(x + i, threshold);
        store_mask(mask, bits + i / 8, 8);
        count += __builtin_popcountll(mask);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            Values value;
            memcpy(&value, x + i + 8 * j, sizeof(value));
            const Words above = value >= threshold;
            high[j % 2] += __builtin_convertvector((Values)((Words)value & above), EightDoubles);
            low[j % 2] += __builtin_convertvector((Values)((Words)value & ~above), EightDoubles);
        }
    }
    const int rest = int(n - i);
    if (rest > 0) {
        const uint64_t mask = mask_of<Test::at_least>(x + i, threshold, rest);
        store_mask(mask, bits + i / 8, (rest + 7) / 8);
        count += __builtin_popcountll(mask);
        for (int j = 0; j < rest; ++j) (mask >> j & 1 ? high : low)[0][j % 8] += double(x[i + j]);
    }
    sums[0] += double(count);
    for (int l = 0; l < 8; ++l) {
        sums[1] += high[0][l] + high[1][l];
        sums[2] += low[0][l] + low[1][l];
    }
}

// 32 bits as they lie in memory, of which only those of n elements are read.
GRACE_LOCAL uint32_t bits32(const uint8_t* bits, int64_t at, int64_t n) {
    uint32_t word = 0;
    const int64_t bytes = lesser(4, (n - at + 7) / 8);
    for (int64_t j = 0; j < bytes; ++j) word |= uint32_t(bits[at / 8 + j]) << (8 * j);
    return word;
}

template <class T>
static void binary_sum(const uint8_t* const* bits, const T* levels, int ranks, const T* onto, T* out, int64_t n,
                       bool around) {
    using Word = typename Format<T>::Word;
    in_blocks(out, n, around, [&](int64_t at, int64_t length, T* target) {
        for (int r = 0; r < ranks; ++r) {
            const Word low = bits_as<Word>(levels[2 * r]), differ = low ^ bits_as<Word>(levels[2 * r + 1]);
            const T* base = r > 0 ? target : onto == nullptr ? nullptr : onto + at;
            for (int64_t i = 0; i < length; i += 32) {
                alignas(64) T value[32];
                const uint32_t word = bits32(bits[r], at + i, n);
                for (uint32_t j = 0; j < 32; ++j) {
                    value[j] = bits_as<T>(low ^ (differ & (Word(0) - Word(word >> j & 1u))));
                }
                const int64_t here = lesser(32, length - i);
                if (here == 32) {
                    if (base == nullptr) {
                        for (int j = 0; j < 32; ++j) target[i + j] = value[j];
                    } else {
                        for (int j = 0; j < 32; ++j) target[i + j] = base[i + j] + value[j];
                    }
                } else {
                    for (int64_t j = 0; j < here; ++j) target[i + j] = base == nullptr ? value[j] : base[i + j] + value[j];
                }
            }
        }
    });
}

template <class T>
static void majority(const uint8_t* const* bits, int ranks, T* out, int64_t n, bool around) {
    in_blocks(out, n, around, [&](int64_t at, int64_t length, T* target) {
        for (int64_t i = 0; i < length; i += 32) {
            int32_t votes[32];
            for (int j = 0; j < 32; ++j) votes[j] = -ranks;
            for (int r = 0; r < ranks; ++r) {
                const uint32_t word = bits32(bits[r], at + i, n);
                for (uint32_t j = 0; j < 32; ++j) votes[j] += int32_t(word >> j & 1u) * 2;
            }
            const int64_t here = lesser(32, length - i);
            if (here == 32) {
                for (int j = 0; j < 32; ++j) target[i + j] = T((votes[j] > 0) - (votes[j] < 0));
            } else {
                for (int64_t j = 0; j < here; ++j) target[i + j] = T((votes[j] > 0) - (votes[j] < 0));
            }
        }
    });
}

// --- packing ---------------------------------------------------------------------------------------------------------------

// Eight codes of `bits` bits, one per byte, as one word; and back.
GRACE_LOCAL uint64_t gathered(uint64_t codes, int bits) {
#if defined(__BMI2__)
    return _pext_u64(codes, 0x0101010101010101u * ((1u << bits) - 1));
#else
    uint64_t word = 0;
    for (int j = 0; j < 8; ++j) word |= (codes >> (8 * j) & 255) << (bits * j);
    return word;
#endif
}

GRACE_LOCAL uint64_t spread(uint64_t word, int bits) {
#if defined(__BMI2__)
    return _pdep_u64(word, 0x0101010101010101u * ((1u << bits) - 1));
#else
    uint64_t codes = 0;
    for (int j = 0; j < 8; ++j) codes |= (word >> (bits * j) & ((1u << bits) - 1)) << (8 * j);
    return codes;
#endif
}

// The first `bytes` (at most 8) bytes at `from`, little end first; and back.
GRACE_LOCAL uint64_t load_bytes(const uint8_t* from, int64_t bytes) {
    uint64_t word = 0;
    for (int64_t j = 0; j < bytes; ++j) word |= uint64_t(from[j]) << (8 * j);
    return word;
}

GRACE_LOCAL void store_bytes(uint64_t word, uint8_t* to, int64_t bytes) {
    for (int64_t j = 0; j < bytes; ++j) to[j] = uint8_t(word >> (8 * j));
}

template <int bits> GRACE_LOCAL void pack_by(const uint8_t* codes, int64_t n, uint8_t* out) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8, out += bits) {
        uint64_t word;
        memcpy(&word, codes + i, 8);
        store_bytes(gathered(word, bits), out, bits);
    }
    if (i < n) store_bytes(gathered(load_bytes(codes + i, n - i), bits), out, ((n - i) * bits + 7) / 8);
}

template <int bits> GRACE_LOCAL void unpack_by(const uint8_t* data, int64_t n, uint8_t* codes) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8, data += bits) {
        const uint64_t word = spread(load_bytes(data, bits), bits);
        memcpy(codes + i, &word, 8);
    }
    if (i < n) store_bytes(spread(load_bytes(data, ((n - i) * bits + 7) / 8), bits), codes + i, n - i);
}

static void pack(const uint8_t* codes, int bits, int64_t n, uint8_t* out) {
    switch (bits) {
        case 1: return pack_by<1>(codes, n, out);
        case 2: return pack_by<2>(codes, n, out);
        case 3: return pack_by<3>(codes, n, out);
        case 4: return pack_by<4>(codes, n, out);
        case 5: return pack_by<5>(codes, n, out);
        case 6: return pack_by<6>(codes, n, out);
        case 7: return pack_by<7>(codes, n, out);
        default: memcpy(out, codes, size_t(n));
    }
}

static void unpack(const uint8_t* data, int bits, int64_t n, uint8_t* codes) {
    switch (bits) {
        case 1: return unpack_by<1>(data, n, codes);
        case 2: return unpack_by<2>(data, n, codes);
        case 3: return unpack_by<3>(data, n, codes);
        case 4: return unpack_by<4>(data, n, codes);
        case 5: return unpack_by<5>(data, n, codes);
        case 6: return unpack_by<6>(data, n, codes);
        case 7: return unpack_by<7>(data, n, codes);
        default: memcpy(codes, data, size_t(n));
    }
}

// --- stochastic levels -----------------------------------------------------------------------------------------------------

template <class T>
static void bucket_norms(const T* x, int64_t n, int64_t width, bool largest, T* norms, int64_t begin, int64_t end) {
    for (int64_t bucket = begin; bucket < end; ++bucket) {
        const int64_t first = bucket * width, length = lesser(width, n - first);
        norms[bucket] = largest ? max_abs(x + first, length) : T(__builtin_sqrt(sum_squares(x + first, length)));
    }
}

template <class T, class Code>
static void levels_into(const T* x, const T* scales, int64_t width, T levels, const T* limit, const RandomKey* key,
                        int64_t begin, int64_t end, Code* codes) {
    alignas(64) uint32_t random[kBlock];
    const int32_t shift = int32_t(levels);
    // `begin` is a multiple of 4, so every block of random words starts with an element.
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t length = lesser(kBlock, end - at);
        words(*key, uint32_t(at / 4), (length + 3) / 4, random);
        for (int64_t i = 0; i < length;) {
            const int64_t bucket = (at + i) / width, stop = lesser(length, (bucket + 1) * width - at);
            const T scale = scales[bucket];
            const T* mine = x + at;
            Code* out = codes + (at - begin);
            if (limit == nullptr) {
                for (int64_t j = i; j < stop; ++j) {
                    out[j] = Code(level_of(mine[j], scale, levels, T(uniform(random[j]))) + shift);
                }
            } else {
                const T most = *limit;
                for (int64_t j = i; j < stop; ++j) {
                    out[j] = Code(level_of(limited(mine[j], most), scale, levels, T(uniform(random[j]))) + shift);
                }
            }
            i = stop;
        }
    }
}

template <class T>
static void dequantize_sum(const Coded<T>* ranks, int count, int64_t width, int levels, int bits, int64_t n,
                           const T* onto, T* out, int64_t begin, int64_t end, bool around) {
    in_blocks(out + begin, end - begin, around, [&](int64_t from, int64_t length, T* target) {
        const int64_t at = begin + from;
        for (int r = 0; r < count; ++r) {
            alignas(64) uint8_t low[kBlock], high[kBlock];
            const T* base = r > 0 ? target : onto == nullptr ? nullptr : onto + at;
            // `at` is a multiple of 8: codes begin with a byte.
            const uint8_t* data = ranks[r].codes;
            if (bits > 8) {
                memcpy(low, data + at, size_t(length));
                unpack(data + n + at / 8 * (bits - 8), bits - 8, length, high);
            } else {
                unpack(data + at / 8 * bits, bits, length, low);
            }
            for (int64_t i = 0; i < length;) {
                const int64_t bucket = (at + i) / width, stop = lesser(length, (bucket + 1) * width - at);
                const T unit = ranks[r].scales[bucket] / T(levels);
                if (bits > 8) {
                    for (int64_t j = i; j < stop; ++j) {
                        const T value = T(int32_t(low[j] | uint32_t(high[j]) << 8) - levels) * unit;
                        target[j] = base == nullptr ? value : base[j] + value;
                    }
                } else if (base == nullptr) {
                    for (int64_t j = i; j < stop; ++j) target[j] = T(int32_t(low[j]) - levels) * unit;
                } else {
                    for (int64_t j = i; j < stop; ++j) target[j] = base[j] + T(int32_t(low[j]) - levels) * unit;
                }
                i = stop;
            }
        }
    });
}

// --- selection -------------------------------------------------------------------------------------------------------------

template <Test test, class T>
GRACE_LOCAL void select_by(const T* x, T bound, bool nonzero, int32_t first, int64_t n, Selected<T>* into) {
    int64_t count = into->count;
    for (int64_t i = 0; i < n; i += 64) {
        const int64_t length = lesser(64, n - i);
        uint64_t mask = length == 64 ? mask64<test>(x + i, bound) : mask_of<test>(x + i, bound, int(length));
        if (nonzero) mask &= length == 64 ? mask64<Test::size_above>(x + i, T(0)) : mask_of<Test::size_above>(x + i, T(0), int(length));
        for (; mask != 0; mask &= mask - 1) {
            const int j = __builtin_ctzll(mask);
            into->values[count] = x[i + j];
            into->indices[count] = first + int32_t(i) + j;
            ++count;
        }
    }
    into->count = count;
}

template <class T>
static void select(const T* x, T bound, bool strict, bool nonzero, int32_t first, int64_t n, Selected<T>* into) {
    if (strict) {
        select_by<Test::size_above>(x, bound, nonzero, first, n, into);
    } else {
        select_by<Test::size_at_least>(x, bound, nonzero, first, n, into);
    }
}

// --- half precision --------------------------------------------------------------------------------------------------------

template <class T> static void to_half(const T* x, bool brain, uint16_t* out, int64_t n, bool around) {
    in_blocks(out, n, around, [&](int64_t at, int64_t length, uint16_t* target) {
        int64_t i = 0;
        if (brain) {
            for (; i < length; ++i) target[i] = to_bfloat16(float(x[at + i]));
            return;
        }
#if defined(__AVX512F__) || defined(__F16C__)
        if (sizeof(T) == sizeof(float)) {
            const float* from = reinterpret_cast<const float*>(x) + at;
            for (; i + 8 <= length; i += 8) {
                _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
            }
        }
#endif
        for (; i < length; ++i) target[i] = to_float16(float(x[at + i]));
    });
}

template <class T> static void from_half(const uint16_t* x, bool brain, T* out, int64_t n, bool around) {
    in_blocks(out, n, around, [&](int64_t at, int64_t length, T* target) {
        if (brain) {
            for (int64_t i = 0; i < length; ++i) target[i] = T(from_bfloat16(x[at + i]));
            return;
        }
        int64_t i = 0;
#if defined(__AVX512F__) || defined(__F16C__)
        if (sizeof(T) == sizeof(float)) {
            float* to = reinterpret_cast<float*>(target);
            for (; i + 8 <= length; i += 8) {
                _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + at + i))));
            }
        }
#endif
        for (; i < length; ++i) target[i] = T(from_float16(x[at + i]));
    });
}

// --- random numbers --------------------------------------------------------------------------------------------------------

static void stream_words(const RandomKey* key, uint32_t first, int64_t blocks, uint32_t* out) {
    words(*key, first, blocks, out);
}

static void uniforms(const RandomKey* key, int64_t begin, int64_t end, float* out) {
    alignas(64) uint32_t random[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t length = lesser(kBlock, end - at);
        words(*key, uint32_t(at / 4), (length + 3) / 4, random);
        for (int64_t i = 0; i < length; ++i) out[at - begin + i] = uniform(random[i]);
    }
}

static void sample(const Permutation* permutation, uint32_t n, int64_t begin, int64_t end, int32_t* out) {
    const Permutation p = *permutation;
    alignas(64) uint32_t found[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t length = lesser(kBlock, end - at);
        for (int64_t i = 0; i < length; ++i) found[i] = permuted(p, uint32_t(at + i));
        for (int64_t i = 0; i < length; ++i) {
            while (found[i] >= n) found[i] = permuted(p, found[i]);
            out[at - begin + i] = int32_t(found[i]);
        }
    }
}

#include "loops_codings.inl"

}  // namespace GRACE_ISA

#define GRACE_JOIN(a, b) a##b
#define GRACE_NAME(a, b) GRACE_JOIN(a, b)

template <class T> static constexpr Loops<T> make_loops() {
    using namespace GRACE_ISA;
    return {weighted_sum<T>,
            max_abs<T>,
            finite<T>,
            sum_squares<T>,
            fill<T>,
            copy<T>,
            binarize<T>,
            binarize_sums<T>,
            binary_sum<T>,
            majority<T>,
            bucket_norms<T>,
            levels_into<T, uint8_t>,
            levels_into<T, uint16_t>,
            dequantize_sum<T>,
            select<T>,
            to_half<T>,
            from_half<T>,
            natural_rises<T>,
            natural_codes<T>,
            natural_sum<T>,
            table_codes<T>,
            table_sum<T>,
            ternary_bytes<T>,
            ternary_sum<T>,
            precision_tags<T>,
            precision_split<T>,
            precision_sum<T>};
}

extern const Loops<float> GRACE_NAME(float_loops_, GRACE_ISA);
extern const Loops<double> GRACE_NAME(double_loops_, GRACE_ISA);
extern const IntegerLoops GRACE_NAME(integer_loops_, GRACE_ISA);
const Loops<float> GRACE_NAME(float_loops_, GRACE_ISA) = make_loops<float>();
const Loops<double> GRACE_NAME(double_loops_, GRACE_ISA) = make_loops<double>();
const IntegerLoops GRACE_NAME(integer_loops_, GRACE_ISA) = {
    GRACE_ISA::stream_words, GRACE_ISA::uniforms, GRACE_ISA::sample, GRACE_ISA::pack, GRACE_ISA::unpack,
    GRACE_ISA::count_tags};

}  // namespace grace
