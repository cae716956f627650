// The bodies of grace/loops.h, compiled once per instruction set with GRACE_ISA defined as its name.

#include <stddef.h>

#include "grace/loops.h"
#include "simd.h"

namespace grace {
namespace GRACE_ISA {

GRACE_LOCAL int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// Elements that are written at once around the cache: long bursts of such stores delay concurrent reads.
template <class T> constexpr int64_t kBurst = 1024 / int64_t(sizeof(T));

// Runs body(begin, length, target) over blocks of an output. The target is the output itself, or a buffer that is then
// copied to the output with stores that bypass the cache.
template <class T, class Body> GRACE_LOCAL void in_blocks(T* out, int64_t n, bool around, Body body) {
    alignas(64) T buffer[kBurst<T>];
    if (around) {
        for (int64_t at = 0; at < n; at += kBurst<T>) {
            const int64_t length = lesser(kBurst<T>, n - at);
            body(at, length, buffer);
            write_around(out + at, buffer, length * int64_t(sizeof(T)));
        }
        settle();
    } else {
        for (int64_t at = 0; at < n; at += kBlock) body(at, lesser(kBlock, n - at), out + at);
    }
}

template <class T> GRACE_LOCAL void scale(T* x, T factor, int64_t n) {
    if (factor == T(1)) return;
    for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

template <class T>
static bool weighted_sum(const T* x, T a, const T* y, T b, T* out, int64_t n, bool around) {
    using Word = typename Format<T>::Word;
    const bool plain = a == T(1) && b == T(1);
    Word most = 0;
    const auto place = [&](T* target, int64_t i, T sum) {
        target[i] = sum;
        const Word word = magnitude_bits(sum);
        most = word > most ? word : most;
    };
    in_blocks(out, n, around, [&](int64_t at, int64_t length, T* target) {
        if (plain) {
            for (int64_t i = 0; i < length; ++i) place(target, i, x[at + i] + y[at + i]);
        } else {
            for (int64_t i = 0; i < length; ++i) place(target, i, x[at + i] * a + y[at + i] * b);
        }
    });
    return most <= largest_bits<T>();
}

template <class T> static void copy(const T* x, T* out, int64_t n, bool around) {
    if (around) {
        write_around(out, x, n * int64_t(sizeof(T)));
    } else {
        memcpy(out, x, size_t(n) * sizeof(T));
    }
}

template <class T>
static bool momentum_sum(const T* u, T m, const T* g, const T* v, T* momentum, T* out, int64_t n, bool around) {
    using Word = typename Format<T>::Word;
    alignas(64) T fresh[kBurst<T>], sum[kBurst<T>];
    Word most = 0;
    for (int64_t at = 0; at < n; at += kBurst<T>) {
        const int64_t length = lesser(kBurst<T>, n - at);
        for (int64_t i = 0; i < length; ++i) {
            fresh[i] = u[at + i] * m + g[at + i];
            sum[i] = v[at + i] + fresh[i];
            const Word word = magnitude_bits(sum[i]);
            most = word > most ? word : most;
        }
        copy(fresh, momentum + at, length, around);
        copy(sum, out + at, length, around);
    }
    settle();
    return most <= largest_bits<T>();
}

template <class T>
static void limited_sum(const T* x, T a, const T* y, T b, const T* z, T limit, T* out, int64_t n, bool around) {
    in_blocks(out, n, around, [&](int64_t at, int64_t length, T* target) {
        for (int64_t i = 0; i < length; ++i) {
            target[i] = limited(x[at + i] * a + y[at + i] * z[at + i] * b, limit);
        }
    });
}

template <class T>
static void masked_sum(const T* x, T a, const T* y, T b, const T* z, T* sum, T* kept, int64_t n, bool around) {
    alignas(64) T total[kBurst<T>], rest[kBurst<T>];
    for (int64_t at = 0; at < n; at += kBurst<T>) {
        const int64_t length = lesser(kBurst<T>, n - at);
        for (int64_t i = 0; i < length; ++i) {
            rest[i] = z[at + i] > 0 ? y[at + i] : T(0);
            total[i] = x[at + i] * a + rest[i] * b;
        }
        copy(total, sum + at, length, around);
        copy(rest, kept + at, length, around);
    }
    settle();
}

template <class T> static T max_abs(const T* x, int64_t n) {
    // Compare as integers: the order is the same, and NaN needs no special case.
    using Word = typename Format<T>::Word;
    Word most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const Word word = magnitude_bits(x[i]);
        most = word > most ? word : most;
    }
    return bits_as<T>(most);
}

template <class T> static bool finite(const T* x, int64_t n) {
    return magnitude_bits(max_abs(x, n)) <= largest_bits<T>();
}

template <class T> static double sum_squares(const T* x, int64_t n) {
    double sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; ++j) sums[j] += double(x[i + j]) * double(x[i + j]);
    }
    for (int64_t j = 0; j < n % 8; ++j) sums[j] += double(x[i + j]) * double(x[i + j]);
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

// The sums of two neighbouring parts side by side, because each addition of a sum waits for the one before.
template <class T> static void norms_of_parts(const T* x, int64_t n, double* squares, T* largest) {
    squares[0] = sum_squares(x, n);
    squares[1] = sum_squares(x + n, n);
    *largest = max_abs(x, 2 * n);
}
#if defined(__AVX512F__)
static void norms_of_parts(const float* x, int64_t n, double* squares, float* largest) {
    const __m512i size = _mm512_set1_epi32(INT32_MAX);
    __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    __m512i most[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t i = 0; i < n; i += 16) {
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
            const float* mine = x + part * n + i;
            fetch_ahead<16>(mine);
            most[part] = _mm512_max_epu32(most[part], _mm512_and_si512(_mm512_loadu_si512(mine), size));
#pragma GCC unroll 2
            for (int j = 0; j < 16; j += 8) {
                const __m512d wide = _mm512_cvtps_pd(_mm256_loadu_ps(mine + j));
                sums[part] = _mm512_add_pd(sums[part], _mm512_mul_pd(wide, wide));
            }
        }
    }
    for (int part = 0; part < 2; ++part) {
        double lane[8];
        _mm512_storeu_pd(lane, sums[part]);
        squares[part] = ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
    }
    *largest = bits_as<float>(_mm512_reduce_max_epu32(_mm512_max_epu32(most[0], most[1])));
}
#endif

// The sum of squares, added part by part, and the largest magnitude.
template <class T> static double norm_max(const T* x, int64_t n, T* largest) {
    constexpr int64_t part = 4096;
    double sum = 0;
    T most = 0;
    for (int64_t at = 0; at < n;) {
        const int64_t length = n - at < 2 * part ? lesser(part, n - at) : 2 * part;
        T here;
        if (length == 2 * part) {
            double squares[2];
            norms_of_parts(x + at, part, squares, &here);
            sum += squares[0];
            sum += squares[1];
        } else {
            sum += sum_squares(x + at, length);
            here = max_abs(x + at, length);
        }
        // Compare bits: in their order, NaN comes last.
        most = magnitude_bits(here) > magnitude_bits(most) ? here : most;
        at += length;
    }
    *largest = most;
    return sum;
}

template <class T>
static void square_sum(const T* x, const T* onto, T largest, T limit, T* out, int64_t n, bool around) {
    in_blocks(out, n, around, [&](int64_t at, int64_t length, T* target) {
        for (int64_t i = 0; i < length; ++i) target[i] = bounded_square_sum(x[at + i], onto[at + i], largest, limit);
    });
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

}  // namespace GRACE_ISA
}  // namespace grace

#include "loops_bits.inl"

namespace grace {
namespace GRACE_ISA {

// --- stochastic levels -----------------------------------------------------------------------------------------------

template <class T>
static void bucket_norms(const T* x, int64_t n, int64_t width, bool largest, T* norms, int64_t begin, int64_t end) {
    for (int64_t bucket = begin; bucket < end; ++bucket) {
        const int64_t first = bucket * width, length = lesser(width, n - first);
        norms[bucket] = largest ? max_abs(x + first, length) : T(__builtin_sqrt(sum_squares(x + first, length)));
    }
}

#if defined(__AVX512F__)
GRACE_LOCAL void store_integers(uint8_t* to, __m512i integers) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(integers));
}
GRACE_LOCAL void store_integers(uint16_t* to, __m512i integers) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(integers));
}
GRACE_LOCAL void store_integers(int8_t* to, __m512i integers) {
    store_integers(reinterpret_cast<uint8_t*>(to), integers);
}
GRACE_LOCAL void store_integers(int16_t* to, __m512i integers) {
    store_integers(reinterpret_cast<uint16_t*>(to), integers);
}
GRACE_LOCAL void store_integers(int32_t* to, __m512i integers) { _mm512_storeu_si512(to, integers); }

// Writes level_of plus `shift` for groups of 64 elements, the first of which is element `first` for the noise. Returns
// the number of these elements. Random words and elements are read side by side, so that neither waits for the other.
template <bool noisy, class Code>
GRACE_LOCAL int64_t level_groups(const float* x, int64_t n, float scale, float levels, float limit,
                                 const RandomStream* noise, int64_t first, int32_t shift, Code* out) {
    if (!Quotient::serves(scale) || !(limit >= 0)) return 0;
    const Quotient by(scale);
    const __m512 most = _mm512_set1_ps(levels), bound = _mm512_set1_ps(limit);
    const __m512i zero = _mm512_setzero_si512(), added = _mm512_set1_epi32(shift);
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        fetch_ahead<64>(x + i);
        __m512i random[4];
        if constexpr (noisy) noise->draw(uint32_t((first + i) / 4), random);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const __m512 value = _mm512_loadu_ps(x + i + 16 * j);
            __m512 share = _mm512_set1_ps(0.5f);
            if constexpr (noisy) share = uniforms16(random[j]);
            const __m512 steps = by.of(_mm512_min_ps(_mm512_abs_ps(value), bound));
            const __m512 size = _mm512_min_ps(_mm512_add_ps(_mm512_mul_ps(steps, most), share), most);
            const __m512i level = _mm512_cvttps_epi32(size);
            const __mmask16 negative = _mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_LT_OQ);
            const __m512i own = _mm512_mask_sub_epi32(level, negative, zero, level);
            store_integers(out + i + 16 * j, _mm512_add_epi32(own, added));
        }
    }
    return i;
}

// The same for buckets, as far as each begins and ends with a group. Returns the number of elements.
template <bool noisy, class Code>
static int64_t levels_of_groups(const float* x, const float* scales, int64_t width, float levels, const float* limit,
                                const RandomKey* noise, int64_t begin, int64_t end, int32_t shift, Code* codes) {
    if (width % 64 != 0 && begin / width != (end - 1) / width) return 0;
    const RandomStream stream(noisy ? *noise : RandomKey{});
    const float bound = limit == nullptr ? __builtin_inff() : *limit;
    int64_t at = begin, done = 1;
    for (; at < end && done > 0; at += done) {
        const int64_t bucket = at / width, stop = lesser(end, (bucket + 1) * width);
        done = level_groups<noisy>(x + at, stop - at, scales[bucket], levels, bound, &stream, at, shift,
                                   codes + (at - begin));
    }
    return at - begin;
}
#endif

template <bool noisy, class T, class Code>
static void levels_by(const T* x, const T* scales, int64_t width, T levels, const T* limit, const RandomKey* noise,
                      int64_t begin, int64_t end, Code* codes) {
    alignas(64) uint32_t random[kBlock];
    const int32_t shift = int32_t(levels);
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(float)) {
        const int64_t done = levels_of_groups<noisy>(x, scales, width, levels, limit, noise, begin, end, shift, codes);
        begin += done;
        codes += done;
    }
#endif
    const auto share = [&](int64_t j) { return noisy ? T(uniform(random[j])) : T(0.5); };
    // `begin` is a multiple of 4, so every block of random words starts at an element.
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t length = lesser(kBlock, end - at);
        if (noisy) words(*noise, uint32_t(at / 4), (length + 3) / 4, random);
        for (int64_t i = 0; i < length;) {
            const int64_t bucket = (at + i) / width, stop = lesser(length, (bucket + 1) * width - at);
            const T scale = scales[bucket];
            const T* mine = x + at;
            Code* out = codes + (at - begin);
            if (limit == nullptr) {
                for (int64_t j = i; j < stop; ++j) out[j] = Code(level_of(mine[j], scale, levels, share(j)) + shift);
            } else {
                const T most = *limit;
                for (int64_t j = i; j < stop; ++j) {
                    out[j] = Code(level_of(limited(mine[j], most), scale, levels, share(j)) + shift);
                }
            }
            i = stop;
        }
    }
}

// Rounds to the nearest level if `noise` is null.
template <class T, class Code>
static void levels_into(const T* x, const T* scales, int64_t width, T levels, const T* limit, const RandomKey* noise,
                        int64_t begin, int64_t end, Code* codes) {
    if (noise == nullptr) {
        levels_by<false>(x, scales, width, levels, limit, noise, begin, end, codes);
    } else {
        levels_by<true>(x, scales, width, levels, limit, noise, begin, end, codes);
    }
}

template <class T, class Code>
static void floors(const T* x, T delta, int32_t half, const RandomKey* key, int64_t begin, int64_t end, Code* codes) {
    alignas(64) uint32_t random[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t length = lesser(kBlock, end - at);
        words(*key, uint32_t(at / 4), (length + 3) / 4, random);
        for (int64_t j = 0; j < length; ++j) {
            codes[at - begin + j] = Code(floor_code(x[at + j], delta, half, T(uniform(random[j]))));
        }
    }
}

template <bool noisy, class T, class Code>
GRACE_LOCAL void integers_by(const T* x, T scale, T most, const RandomKey* noise, int64_t begin, int64_t end, Code* out) {
    alignas(64) uint32_t random[kBlock];
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(float)) {
        const int64_t done = levels_of_groups<noisy>(x, &scale, end, most, nullptr, noise, begin, end, 0, out);
        begin += done;
        out += done;
    }
#endif
    const auto share = [&](int64_t j) { return noisy ? T(uniform(random[j])) : T(0.5); };
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t length = lesser(kBlock, end - at);
        if (noisy) words(*noise, uint32_t(at / 4), (length + 3) / 4, random);
        for (int64_t j = 0; j < length; ++j) out[at - begin + j] = Code(level_of(x[at + j], scale, most, share(j)));
    }
}

template <class T, class Code>
static void to_integers(const T* x, T scale, T most, const RandomKey* noise, int64_t begin, int64_t end, Code* out) {
    if (noise == nullptr) {
        integers_by<false>(x, scale, most, noise, begin, end, out);
    } else {
        integers_by<true>(x, scale, most, noise, begin, end, out);
    }
}

template <class T, class Code>
static void from_integers(const Code* codes, T unit, const T* onto, T* out, int64_t n, bool around) {
    in_blocks(out, n, around, [&](int64_t at, int64_t length, T* target) {
        if (onto == nullptr) {
            for (int64_t i = 0; i < length; ++i) target[i] = T(codes[at + i]) * unit;
        } else {
            for (int64_t i = 0; i < length; ++i) target[i] = onto[at + i] + T(codes[at + i]) * unit;
        }
    });
}

constexpr int kTableRanks = 4;  // the tables of this many ranks fit the cache

// Handles the elements of a block that fill whole vectors: a rank's four values of 2-bit codes are in a register.
// Returns their number.
template <class T>
GRACE_LOCAL int64_t two_bit_vectors(const Coded<T>*, const T (*)[16], int, const T*, T*, int64_t, int64_t) {
    return 0;
}
#if defined(__AVX512F__)
GRACE_LOCAL int64_t two_bit_vectors(const Coded<float>* ranks, const float (*values)[16], int count, const float* onto,
                                    float* target, int64_t at, int64_t length) {
    const __m512i shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    int64_t i = 0;
    for (; i + 16 <= length; i += 16) {
        const auto decoded = [&](int r) {
            int32_t codes;
            memcpy(&codes, ranks[r].codes + (at + i) / 4, sizeof(codes));
            const __m512i code = _mm512_srlv_epi32(_mm512_set1_epi32(codes), shifts);
            return _mm512_permutexvar_ps(code, _mm512_load_ps(values[r]));
        };
        __m512 sum = decoded(0);
        if (onto != nullptr) sum = _mm512_add_ps(_mm512_loadu_ps(onto + at + i), sum);
        for (int r = 1; r < count; ++r) sum = _mm512_add_ps(sum, decoded(r));
        _mm512_storeu_ps(target + i, sum);
    }
    return i;
}
#endif

// The same for 2-bit codes in one bucket: four values per byte, from one table per rank.
template <class T>
static void dequantize_bytes(const Coded<T>* ranks, int count, int64_t bucket, int levels, const T* onto,
                             T* out, int64_t begin, int64_t end, bool around) {
    typedef T Four __attribute__((vector_size(4 * sizeof(T))));
    alignas(64) T values[kTableRanks][4 * 256], repeated[kTableRanks][16];
    for (int r = 0; r < count; ++r) {
        const T unit = ranks[r].scales[bucket] / T(levels);
        for (int i = 0; i < 16; ++i) repeated[r][i] = T(i % 4 - levels) * unit;
        for (int i = 0; i < 4 * 256; ++i) values[r][i] = repeated[r][i / 4 >> (i % 4 * 2) & 3];
    }
    in_blocks(out + begin, end - begin, around, [&](int64_t from, int64_t length, T* target) {
        const int64_t at = begin + from;
        int64_t i = two_bit_vectors(ranks, repeated, count, onto, target, at, length);
        for (; i + 4 <= length; i += 4) {
            Four sum, value;
            memcpy(&sum, values[0] + 4 * ranks[0].codes[(at + i) / 4], sizeof(sum));
            if (onto != nullptr) {
                memcpy(&value, onto + at + i, sizeof(value));
                sum = value + sum;
            }
            for (int r = 1; r < count; ++r) {
                memcpy(&value, values[r] + 4 * ranks[r].codes[(at + i) / 4], sizeof(value));
                sum = sum + value;
            }
            memcpy(target + i, &sum, sizeof(sum));
        }
        for (; i < length; ++i) {
            const int64_t place = (at + i) % 4;
            T sum = values[0][4 * ranks[0].codes[(at + i) / 4] + place];
            if (onto != nullptr) sum = onto[at + i] + sum;
            for (int r = 1; r < count; ++r) sum = sum + values[r][4 * ranks[r].codes[(at + i) / 4] + place];
            target[i] = sum;
        }
    });
}

template <class T>
static void dequantize_sum(const Coded<T>* ranks, int count, int64_t width, int levels, int bits, int64_t n,
                           const T* onto, T* out, int64_t begin, int64_t end, bool around) {
    if (bits == 2 && count <= kTableRanks && begin / width == (end - 1) / width) {
        return dequantize_bytes(ranks, count, begin / width, levels, onto, out, begin, end, around);
    }
    in_blocks(out + begin, end - begin, around, [&](int64_t from, int64_t length, T* target) {
        const int64_t at = begin + from;
        for (int r = 0; r < count; ++r) {
            alignas(64) uint8_t low[kBlock], high[kBlock];
            const T* base = r > 0 ? target : onto == nullptr ? nullptr : onto + at;
            // `at` is a multiple of 8, so the codes begin at a byte.
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

// --- half precision --------------------------------------------------------------------------------------------------

template <class T> GRACE_LOCAL void narrow(const T* x, bool brain, uint16_t* out, int64_t n) {
    int64_t i = 0;
    if (brain) {
        for (; i < n; ++i) out[i] = to_bfloat16(float(x[i]));
        return;
    }
#if defined(__AVX512F__) || defined(__F16C__)
    if (sizeof(T) == sizeof(float)) {
        const float* from = reinterpret_cast<const float*>(x);
        for (; i + 8 <= n; i += 8) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
        }
    }
#endif
    for (; i < n; ++i) out[i] = to_float16(float(x[i]));
}

template <class T> GRACE_LOCAL void widen(const uint16_t* x, bool brain, T* out, int64_t n) {
    int64_t i = 0;
    if (brain) {
        for (; i < n; ++i) out[i] = T(from_bfloat16(x[i]));
        return;
    }
#if defined(__AVX512F__) || defined(__F16C__)
    if (sizeof(T) == sizeof(float)) {
        float* to = reinterpret_cast<float*>(out);
        for (; i + 8 <= n; i += 8) {
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
        }
    }
#endif
    for (; i < n; ++i) out[i] = T(from_float16(x[i]));
}

template <class T> static void to_half(const T* x, bool brain, uint16_t* out, int64_t n, bool around) {
    in_blocks(out, n, around, [&](int64_t at, int64_t length, uint16_t* target) {
        narrow(x + at, brain, target, length);
    });
}

template <class T> static void from_half(const uint16_t* x, bool brain, T* out, int64_t n, bool around) {
    in_blocks(out, n, around, [&](int64_t at, int64_t length, T* target) { widen(x + at, brain, target, length); });
}

template <class T>
static void half_sum(const uint16_t* const* rows, int64_t count, int64_t from, bool brain, T factor, uint16_t* out,
                     int64_t n, bool around) {
    in_blocks(out, n, around, [&](int64_t at, int64_t length, uint16_t* target) {
        alignas(64) T total[kBlock], row[kBlock];
        widen(rows[0] + from + at, brain, total, length);
        for (int64_t i = 0; i < length; ++i) total[i] *= factor;
        for (int64_t r = 1; r < count; ++r) {
            widen(rows[r] + from + at, brain, row, length);
            for (int64_t i = 0; i < length; ++i) total[i] += row[i] * factor;
        }
        narrow(total, brain, target, length);
    });
}

// --- random numbers --------------------------------------------------------------------------------------------------

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

// The same as `permuted` for many indices. Each round takes all of them, because its products wait for those of the
// round before.
GRACE_LOCAL void permute(const Permutation& p, uint32_t* indices, int64_t n) {
    alignas(64) uint32_t left[kBlock], right[kBlock];
    for (int64_t i = 0; i < n; ++i) {
        left[i] = indices[i] & p.low_mask;
        right[i] = indices[i] >> p.low;
    }
    for (int r = 0; r < 8; r += 2) {
        for (int64_t i = 0; i < n; ++i) left[i] ^= mix(right[i], p.keys[r]) & p.low_mask;
        for (int64_t i = 0; i < n; ++i) right[i] ^= mix(left[i], p.keys[r + 1]) & p.high_mask;
    }
    for (int64_t i = 0; i < n; ++i) indices[i] = left[i] + (right[i] << p.low);
}

static void sample(const Permutation* permutation, uint32_t n, int64_t begin, int64_t end, int32_t* out) {
    const Permutation p = *permutation;
    alignas(64) uint32_t found[kBlock];
    int32_t places[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
        int64_t left = lesser(kBlock, end - at);
        for (int64_t i = 0; i < left; ++i) {
            found[i] = uint32_t(at + i);
            places[i] = int32_t(i);
        }
        // What lies beyond the range, up to half of all, is permuted again.
        while (left > 0) {
            permute(p, found, left);
            int64_t beyond = 0;
            for (int64_t i = 0; i < left; ++i) {
                const uint32_t here = found[i];
                out[at - begin + places[i]] = int32_t(here);
                found[beyond] = here;
                places[beyond] = places[i];
                beyond += here >= n ? 1 : 0;
            }
            left = beyond;
        }
    }
}

}  // namespace GRACE_ISA
}  // namespace grace

#include "loops_select.inl"
#include "loops_codings.inl"
#include "loops_products.inl"
#include "loops_sketch.inl"
#include "loops_rotation.inl"

namespace grace {

#define GRACE_JOIN(a, b) a##b
#define GRACE_NAME(a, b) GRACE_JOIN(a, b)

template <class T> static constexpr Loops<T> make_loops() {
    using namespace GRACE_ISA;
    return {weighted_sum<T>,
            momentum_sum<T>,
            limited_sum<T>,
            masked_sum<T>,
            max_abs<T>,
            finite<T>,
            norm_max<T>,
            square_sum<T>,
            fill<T>,
            copy<T>,
            binarize<T>,
            binarize_sums<T>,
            sum_signs<T>,
            binary_sum<T>,
            binarize_columns<T>,
            column_sum<T>,
            majority<T>,
            bucket_norms<T>,
            levels_into<T, uint8_t>,
            levels_into<T, uint16_t>,
            floors<T, uint8_t>,
            floors<T, uint16_t>,
            dequantize_sum<T>,
            to_integers<T, int8_t>,
            to_integers<T, int16_t>,
            to_integers<T, int32_t>,
            from_integers<T, int8_t>,
            from_integers<T, int16_t>,
            from_integers<T, int32_t>,
            level_codes<T>,
            sum_round<T>,
            levels_sum<T>,
            rotate<T>,
            spread_in_frame<T>,
            project_from_frame<T>,
            recover_sparse<T>,
            rotated_codes<T>,
            rotated_sum<T>,
            shared_rotated_sum<T>,
            select<T>,
            sum_select<T>,
            select_powers<T>,
            moments<T>,
            moments_below<T>,
            draw<T>,
            drawn_entries<T>,
            select_sides<T>,
            select_in_bins<T>,
            to_half<T>,
            from_half<T>,
            half_sum<T>,
            natural_rises<T>,
            natural_codes<T>,
            natural_sum<T>,
            table_codes<T>,
            table_codes_of_buckets<T>,
            table_sum<T>,
            table_sum_of_buckets<T>,
            ternary_bytes<T>,
            ternary_sum<T>,
            precision_tags<T>,
            precision_split<T>,
            precision_sum<T>,
            times<T>,
            transposed_times<T>,
            times_transposed<T>,
            sketch_row<T>,
            sketch_medians<T>};
}

extern const Loops<float> GRACE_NAME(float_loops_, GRACE_ISA);
extern const Loops<double> GRACE_NAME(double_loops_, GRACE_ISA);
extern const IntegerLoops GRACE_NAME(integer_loops_, GRACE_ISA);
const Loops<float> GRACE_NAME(float_loops_, GRACE_ISA) = make_loops<float>();
const Loops<double> GRACE_NAME(double_loops_, GRACE_ISA) = make_loops<double>();
const IntegerLoops GRACE_NAME(integer_loops_, GRACE_ISA) = {
    GRACE_ISA::stream_words, GRACE_ISA::uniforms, GRACE_ISA::sample, GRACE_ISA::pack, GRACE_ISA::unpack,
    GRACE_ISA::pack_lanes<int8_t>, GRACE_ISA::pack_lanes<int16_t>, GRACE_ISA::pack_lanes<int32_t>,
    GRACE_ISA::unpack_lanes<int8_t>, GRACE_ISA::unpack_lanes<int16_t>, GRACE_ISA::unpack_lanes<int32_t>,
    GRACE_ISA::filter_marks, GRACE_ISA::count_tags, GRACE_ISA::settle};

}  // namespace grace
