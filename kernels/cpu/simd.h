// Vector operations that compilers do not generate themselves, for the instruction set that this file is compiled for.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "grace/element.h"

#define GRACE_LOCAL static inline __attribute__((always_inline))

namespace grace {
namespace GRACE_ISA {

// --- 64 comparisons as 64 bits ---------------------------------------------------------------------------------------

enum class Test { at_least, above, at_most, below, size_at_least, size_above };

template <Test test, class T> GRACE_LOCAL bool passes(T x, T bound) {
    if (test == Test::at_least) return x >= bound;
    if (test == Test::above) return x > bound;
    if (test == Test::at_most) return x <= bound;
    if (test == Test::below) return x < bound;
    return test == Test::size_at_least ? magnitude(x) >= bound : magnitude(x) > bound;
}

#if defined(__AVX__)
template <Test test> constexpr int predicate() {
    if (test == Test::at_most) return _CMP_LE_OQ;
    if (test == Test::below) return _CMP_LT_OQ;
    return test == Test::above || test == Test::size_above ? _CMP_GT_OQ : _CMP_GE_OQ;
}
#endif

#if defined(__AVX512F__)
template <Test test> GRACE_LOCAL uint64_t mask64(const float* x, float bound) {
    const __m512 edge = _mm512_set1_ps(bound);
    uint64_t mask = 0;
    for (int j = 0; j < 4; ++j) {
        __m512 v = _mm512_loadu_ps(x + 16 * j);
        if (test >= Test::size_at_least) v = _mm512_abs_ps(v);
        const uint64_t m = _mm512_cmp_ps_mask(v, edge, predicate<test>());
        mask |= m << (16 * j);
    }
    return mask;
}
template <Test test> GRACE_LOCAL uint64_t mask64(const double* x, double bound) {
    const __m512d edge = _mm512_set1_pd(bound);
    uint64_t mask = 0;
    for (int j = 0; j < 8; ++j) {
        __m512d v = _mm512_loadu_pd(x + 8 * j);
        if (test >= Test::size_at_least) v = _mm512_abs_pd(v);
        const uint64_t m = _mm512_cmp_pd_mask(v, edge, predicate<test>());
        mask |= m << (8 * j);
    }
    return mask;
}
#elif defined(__AVX2__)
template <Test test> GRACE_LOCAL uint64_t mask64(const float* x, float bound) {
    const __m256 edge = _mm256_set1_ps(bound), positive = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    uint64_t mask = 0;
    for (int j = 0; j < 8; ++j) {
        __m256 v = _mm256_loadu_ps(x + 8 * j);
        if (test >= Test::size_at_least) v = _mm256_and_ps(v, positive);
        const __m256 m = _mm256_cmp_ps(v, edge, predicate<test>());
        mask |= uint64_t(uint32_t(_mm256_movemask_ps(m))) << (8 * j);
    }
    return mask;
}
template <Test test> GRACE_LOCAL uint64_t mask64(const double* x, double bound) {
    const __m256d edge = _mm256_set1_pd(bound), positive = _mm256_castsi256_pd(_mm256_set1_epi64x(INT64_MAX));
    uint64_t mask = 0;
    for (int j = 0; j < 16; ++j) {
        __m256d v = _mm256_loadu_pd(x + 4 * j);
        if (test >= Test::size_at_least) v = _mm256_and_pd(v, positive);
        const __m256d m = _mm256_cmp_pd(v, edge, predicate<test>());
        mask |= uint64_t(uint32_t(_mm256_movemask_pd(m))) << (4 * j);
    }
    return mask;
}
#elif defined(__SSE2__)
template <Test test> GRACE_LOCAL uint64_t mask64(const float* x, float bound) {
    const __m128 edge = _mm_set1_ps(bound), positive = _mm_castsi128_ps(_mm_set1_epi32(0x7FFFFFFF));
    uint64_t mask = 0;
    for (int j = 0; j < 16; ++j) {
        __m128 v = _mm_loadu_ps(x + 4 * j);
        if (test >= Test::size_at_least) v = _mm_and_ps(v, positive);
        __m128 m;
        if (test == Test::at_most) {
            m = _mm_cmple_ps(v, edge);
        } else if (test == Test::below) {
            m = _mm_cmplt_ps(v, edge);
        } else {
            m = test == Test::above || test == Test::size_above ? _mm_cmpgt_ps(v, edge) : _mm_cmpge_ps(v, edge);
        }
        mask |= uint64_t(uint32_t(_mm_movemask_ps(m))) << (4 * j);
    }
    return mask;
}
#endif

// The generic version: one by one.
template <Test test, class T> GRACE_LOCAL uint64_t mask_of(const T* x, T bound, int n) {
    uint64_t mask = 0;
    for (int j = 0; j < n; ++j) mask |= uint64_t(passes<test>(x[j], bound)) << j;
    return mask;
}
#if !defined(__SSE2__)
template <Test test, class T> GRACE_LOCAL uint64_t mask64(const T* x, T bound) { return mask_of<test>(x, bound, 64); }
#elif !defined(__AVX2__)
template <Test test> GRACE_LOCAL uint64_t mask64(const double* x, double bound) { return mask_of<test>(x, bound, 64); }
#endif

// The sign bits of 64 numbers, zeros included.
GRACE_LOCAL uint64_t signs64(const float* x) {
    uint64_t mask = 0;
#if defined(__AVX2__)
    for (int j = 0; j < 8; ++j) mask |= uint64_t(uint32_t(_mm256_movemask_ps(_mm256_loadu_ps(x + 8 * j)))) << (8 * j);
#elif defined(__SSE2__)
    for (int j = 0; j < 16; ++j) mask |= uint64_t(uint32_t(_mm_movemask_ps(_mm_loadu_ps(x + 4 * j)))) << (4 * j);
#else
    for (int j = 0; j < 64; ++j) mask |= uint64_t(bits_as<uint32_t>(x[j]) >> 31) << j;
#endif
    return mask;
}

// Writes those of 64 numbers whose bit is set, one after the other. It may write up to 16 more numbers.
template <class T> GRACE_LOCAL void compact64(const T* x, uint64_t mask, T* out) {
    for (; mask != 0; mask &= mask - 1) *out++ = x[__builtin_ctzll(mask)];
}

// The inverse: puts the next number of a list at each of 64 positions whose bit is set. It may read up to 16 more
// numbers.
template <class T> GRACE_LOCAL void spread64(const T* list, uint64_t mask, T* out) {
    for (; mask != 0; mask &= mask - 1) out[__builtin_ctzll(mask)] = *list++;
}

#if defined(__AVX512F__)
GRACE_LOCAL void compact64(const float* x, uint64_t mask, float* out) {
    for (int j = 0; j < 64; j += 16) {
        const __mmask16 here = __mmask16(mask >> j);
        _mm512_storeu_ps(out, _mm512_maskz_compress_ps(here, _mm512_loadu_ps(x + j)));
        out += __builtin_popcount(here);
    }
}
GRACE_LOCAL void spread64(const float* list, uint64_t mask, float* out) {
    for (int j = 0; j < 64; j += 16) {
        const __mmask16 here = __mmask16(mask >> j);
        _mm512_storeu_ps(out + j, _mm512_mask_expand_ps(_mm512_loadu_ps(out + j), here, _mm512_loadu_ps(list)));
        list += __builtin_popcount(here);
    }
}
#endif

// --- tables of 128 numbers -------------------------------------------------------------------------------------------

// Prevents the vectorization of a loop with table lookups, because single loads are faster than gather instructions.
#if defined(__GNUC__)
#define GRACE_ONE_BY_ONE(index) __asm__("" : "+r"(index))
#else
#define GRACE_ONE_BY_ONE(index)
#endif

#if defined(__AVX512F__)
// The edges as a search tree whose levels are in registers. The search finds a position with its bits reversed: the
// highest bit is lowest.
struct EdgeTree {
    __m512 level[5], next[2], last[4];

    explicit EdgeTree(const float* edges) {
        alignas(64) float nodes[64];
        for (int depth = 0; depth < 7; ++depth) {
            for (int node = 0; node < 64; ++node) {
                int at = 0;
                for (int bit = 0; bit < depth; ++bit) at += (node >> bit & 1) << (6 - bit);
                nodes[node] = edges[at + (1 << (6 - depth)) - 1];
            }
            if (depth < 5) level[depth] = _mm512_load_ps(nodes);
            for (int j = 0; j < 2 && depth == 5; ++j) next[j] = _mm512_load_ps(nodes + 16 * j);
            for (int j = 0; j < 4 && depth == 6; ++j) last[j] = _mm512_load_ps(nodes + 16 * j);
        }
    }

    // The positions of 16 magnitudes among the edges, with their seven bits reversed.
    __m512i reversed(__m512 size) const {
        __m512i at = _mm512_setzero_si512();
#pragma GCC unroll 5
        for (int depth = 0; depth < 5; ++depth) {
            const __m512 edge = depth == 0 ? level[0] : _mm512_permutexvar_ps(at, level[depth]);
            const __mmask16 reached = _mm512_cmp_ps_mask(size, edge, _CMP_GE_OQ);
            at = _mm512_mask_or_epi32(at, reached, at, _mm512_set1_epi32(1 << depth));
        }
        __mmask16 reached = _mm512_cmp_ps_mask(size, _mm512_permutex2var_ps(next[0], at, next[1]), _CMP_GE_OQ);
        at = _mm512_mask_or_epi32(at, reached, at, _mm512_set1_epi32(32));
        const __m512 low = _mm512_permutex2var_ps(last[0], at, last[1]);
        const __m512 high = _mm512_permutex2var_ps(last[2], at, last[3]);
        reached = _mm512_cmp_ps_mask(size, _mm512_mask_blend_ps(reached, low, high), _CMP_GE_OQ);
        return _mm512_mask_or_epi32(at, reached, at, _mm512_set1_epi32(64));
    }

    // The codes of 64 numbers.
    void codes64(const float* x, uint8_t* out) const {
        __m128i found[4];
        uint64_t negative = 0;
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const __m512 v = _mm512_loadu_ps(x + 16 * j);
            negative |= uint64_t(_mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_LT_OQ)) << (16 * j);
            found[j] = _mm512_cvtepi32_epi8(reversed(_mm512_abs_ps(v)));
        }
        const __m256i half = _mm256_inserti128_si256(_mm256_castsi128_si256(found[0]), found[1], 1);
        const __m256i rest = _mm256_inserti128_si256(_mm256_castsi128_si256(found[2]), found[3], 1);
        const __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(half), rest, 1);
        // Reverse the bits: bit 0 becomes bit 6.
        const __m512i back =
            _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15));
        const __m512i four = _mm512_set1_epi8(15);
        const __m512i low = _mm512_shuffle_epi8(back, _mm512_and_si512(all, four));
        const __m512i high = _mm512_shuffle_epi8(back, _mm512_and_si512(_mm512_srli_epi16(all, 4), four));
        const __m512i code = _mm512_or_si512(_mm512_slli_epi16(low, 3), _mm512_srli_epi16(high, 1));
        _mm512_storeu_si512(out, _mm512_or_si512(code, _mm512_maskz_set1_epi8(negative, char(-128))));
    }
};

// 128 numbers in registers.
struct Lookup {
    __m512 part[8];

    explicit Lookup(const float* numbers) {
        for (int j = 0; j < 8; ++j) part[j] = _mm512_loadu_ps(numbers + 16 * j);
    }
    // The numbers of 16 codes, negated if the code is 128 or more.
    __m512 of(const uint8_t* codes) const {
        const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
        const __mmask16 upper = _mm512_test_epi32_mask(code, _mm512_set1_epi32(32));
        const __mmask16 second = _mm512_test_epi32_mask(code, _mm512_set1_epi32(64));
        const __m512 a = _mm512_mask_blend_ps(upper, _mm512_permutex2var_ps(part[0], code, part[1]),
                                              _mm512_permutex2var_ps(part[2], code, part[3]));
        const __m512 b = _mm512_mask_blend_ps(upper, _mm512_permutex2var_ps(part[4], code, part[5]),
                                              _mm512_permutex2var_ps(part[6], code, part[7]));
        const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(code, 7), 31);
        return _mm512_xor_ps(_mm512_mask_blend_ps(second, a, b), _mm512_castsi512_ps(sign));
    }
};
#endif

// --- reads from memory -----------------------------------------------------------------------------------------------

// Fetches the cache lines of `count` elements from x on.
template <int count, class T> GRACE_LOCAL void fetch(const T* x) {
#pragma GCC unroll 8
    for (int i = 0; i < count; i += 64 / int(sizeof(T))) __builtin_prefetch(x + i);
}

// The same a page after x. A loop that computes much between its reads waits for memory otherwise, because the
// processor looks only a few hundred instructions ahead.
template <int count, class T> GRACE_LOCAL void fetch_ahead(const T* x) { fetch<count>(x + 4096 / int(sizeof(T))); }

// --- random words ----------------------------------------------------------------------------------------------------

#if defined(__AVX2__)
// What Philox computes alike for all blocks of a stream: the keys of its rounds, and most of the first two rounds, in
// which only one product each depends on the number of the block.
struct SharedRounds {
    uint32_t keys[2][10], first2, second0, second2, second3;

    explicit SharedRounds(const RandomKey& key) {
        for (uint32_t round = 0; round < 10; ++round) {
            keys[0][round] = key.seed_low + round * kWeyl0;
            keys[1][round] = key.seed_high + round * kWeyl1;
        }
        const uint64_t p1 = uint64_t(key.stream) * kPhilox1;
        const uint64_t p0 = uint64_t(uint32_t(p1 >> 32) ^ key.step ^ keys[0][0]) * kPhilox0;
        first2 = key.rank ^ keys[1][0];
        second0 = uint32_t(p1) ^ keys[0][1];
        second2 = uint32_t(p0 >> 32) ^ keys[1][1];
        second3 = uint32_t(p0);
    }
};
#endif

// The words of a stream, in groups of blocks. A lane of 64 bits holds one word of one block in its lower half. No
// product reads the upper half. Two groups of blocks run interleaved, because each round depends on the previous one.
#if defined(__AVX512F__)
struct RandomStream {
    static constexpr int64_t blocks = 16;
    __m512i k0[10], k1[10], first2, second0, second2, second3;

    explicit RandomStream(const RandomKey& key) {
        const SharedRounds shared(key);
        for (int round = 0; round < 10; ++round) {
            k0[round] = _mm512_set1_epi64(shared.keys[0][round]);
            k1[round] = _mm512_set1_epi64(shared.keys[1][round]);
        }
        first2 = _mm512_set1_epi64(shared.first2);
        second0 = _mm512_set1_epi64(shared.second0);
        second2 = _mm512_set1_epi64(shared.second2);
        second3 = _mm512_set1_epi64(shared.second3);
    }

    // 64 words, those of the blocks first .. first + 15.
    GRACE_MEMBER void draw(uint32_t first, __m512i out[4]) const {
        const __m512i m0 = _mm512_set1_epi64(kPhilox0), m1 = _mm512_set1_epi64(kPhilox1);
        __m512i c0[2], c1[2], c2[2], c3[2];
#pragma GCC unroll 2
        for (int g = 0; g < 2; ++g) {
            const __m512i block =
                _mm512_add_epi64(_mm512_set1_epi64(int64_t(first) + 8 * g), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
            const __m512i p0 = _mm512_mul_epu32(block, m0);
            const __m512i p1 = _mm512_mul_epu32(_mm512_xor_si512(_mm512_srli_epi64(p0, 32), first2), m1);
            c0[g] = _mm512_xor_si512(_mm512_srli_epi64(p1, 32), second0);
            c1[g] = p1;
            c2[g] = _mm512_xor_si512(p0, second2);
            c3[g] = second3;
        }
#pragma GCC unroll 8
        for (int round = 2; round < 10; ++round) {
#pragma GCC unroll 2
            for (int g = 0; g < 2; ++g) {
                const __m512i p0 = _mm512_mul_epu32(c0[g], m0), p1 = _mm512_mul_epu32(c2[g], m1);
                // 0x96 is the exclusive or of three operands.
                c0[g] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1[g], k0[round], 0x96);
                c2[g] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3[g], k1[round], 0x96);
                c1[g] = p1;
                c3[g] = p0;
            }
        }
        const __m512i even = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
        const __m512i odd = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
#pragma GCC unroll 2
        for (int g = 0; g < 2; ++g) {
            const __m512i a = _mm512_mask_shuffle_epi32(c0[g], 0xAAAA, c1[g], _MM_PERM_CCAA);
            const __m512i c = _mm512_mask_shuffle_epi32(c2[g], 0xAAAA, c3[g], _MM_PERM_CCAA);
            out[2 * g] = _mm512_permutex2var_epi64(a, even, c);
            out[2 * g + 1] = _mm512_permutex2var_epi64(a, odd, c);
        }
    }

    void write(uint32_t first, uint32_t* out) const {
        __m512i made[4];
        draw(first, made);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) _mm512_storeu_si512(out + 16 * j, made[j]);
    }
};

// The numbers of `uniform` for 16 words.
GRACE_LOCAL __m512 uniforms16(__m512i words) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(words, 8)), _mm512_set1_ps(5.9604644775390625e-8f));
}
#elif defined(__AVX2__)
struct RandomStream {
    static constexpr int64_t blocks = 8;
    __m256i k0[10], k1[10], first2, second0, second2, second3;

    explicit RandomStream(const RandomKey& key) {
        const SharedRounds shared(key);
        for (int round = 0; round < 10; ++round) {
            k0[round] = _mm256_set1_epi64x(shared.keys[0][round]);
            k1[round] = _mm256_set1_epi64x(shared.keys[1][round]);
        }
        first2 = _mm256_set1_epi64x(shared.first2);
        second0 = _mm256_set1_epi64x(shared.second0);
        second2 = _mm256_set1_epi64x(shared.second2);
        second3 = _mm256_set1_epi64x(shared.second3);
    }

    void write(uint32_t first, uint32_t* out) const {
        const __m256i m0 = _mm256_set1_epi64x(kPhilox0), m1 = _mm256_set1_epi64x(kPhilox1);
        __m256i c0[2], c1[2], c2[2], c3[2];
#pragma GCC unroll 2
        for (int g = 0; g < 2; ++g) {
            const __m256i block =
                _mm256_add_epi64(_mm256_set1_epi64x(int64_t(first) + 4 * g), _mm256_setr_epi64x(0, 1, 2, 3));
            const __m256i p0 = _mm256_mul_epu32(block, m0);
            const __m256i p1 = _mm256_mul_epu32(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), first2), m1);
            c0[g] = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), second0);
            c1[g] = p1;
            c2[g] = _mm256_xor_si256(p0, second2);
            c3[g] = second3;
        }
#pragma GCC unroll 8
        for (int round = 2; round < 10; ++round) {
#pragma GCC unroll 2
            for (int g = 0; g < 2; ++g) {
                const __m256i p0 = _mm256_mul_epu32(c0[g], m0), p1 = _mm256_mul_epu32(c2[g], m1);
                c0[g] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1[g]), k0[round]);
                c2[g] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3[g]), k1[round]);
                c1[g] = p1;
                c3[g] = p0;
            }
        }
#pragma GCC unroll 2
        for (int g = 0; g < 2; ++g) {
            const __m256i a = _mm256_blend_epi32(c0[g], _mm256_slli_epi64(c1[g], 32), 0xAA);
            const __m256i c = _mm256_blend_epi32(c2[g], _mm256_slli_epi64(c3[g], 32), 0xAA);
            const __m256i low = _mm256_unpacklo_epi64(a, c), high = _mm256_unpackhi_epi64(a, c);
            __m256i* to = reinterpret_cast<__m256i*>(out + 16 * g);
            _mm256_storeu_si256(to, _mm256_permute2x128_si256(low, high, 0x20));
            _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(low, high, 0x31));
        }
    }
};
#endif

// Words 4 first .. 4 (first + blocks) - 1 of a stream.
GRACE_LOCAL void words(const RandomKey& key, uint32_t first, int64_t blocks, uint32_t* out) {
    int64_t done = 0;
#if defined(__AVX2__)
    done = blocks / RandomStream::blocks * RandomStream::blocks;
    if (done > 0) {
        const RandomStream stream(key);
        for (int64_t b = 0; b < done; b += RandomStream::blocks) stream.write(uint32_t(first + b), out + 4 * b);
    }
#endif
    for (int64_t b = done; b < blocks; ++b) philox(key, uint32_t(first + b), out + 4 * b);
}

// --- quotients -------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
// Divides many magnitudes by one number, faster than the instruction that divides. From 2^-60 on, the quotient is that
// of the instruction. Smaller ones have a relative error below 2^-20, and one that overflows becomes NaN.
struct Quotient {
    __m512 by, inverse;

    // Without these limits, the remainders below would not be exact.
    static bool serves(float by) { return by >= 0x1p-40f && by <= 0x1p60f; }
    explicit Quotient(float number) : by(_mm512_set1_ps(number)), inverse(_mm512_set1_ps(1.0f / number)) {}

    GRACE_MEMBER __m512 of(__m512 x) const {
        const __m512 guess = _mm512_mul_ps(x, inverse);
        // The error is below one unit in the last place. From there, and with the rounded inverse, one more remainder
        // gives the rounded quotient (Markstein, 1990).
        const __m512 near = _mm512_fmadd_ps(_mm512_fnmadd_ps(guess, by, x), inverse, guess);
        return _mm512_fmadd_ps(_mm512_fnmadd_ps(near, by, x), inverse, near);
    }
};
#endif

// --- stores that bypass the cache ------------------------------------------------------------------------------------

// Copies to memory that is not read soon. Ordinary stores would read every cache line before they fill it.
GRACE_LOCAL void write_around(void* to, const void* from, int64_t bytes) {
    char* out = static_cast<char*>(to);
    const char* in = static_cast<const char*>(from);
#if defined(__SSE2__)
    const int64_t head = int64_t(-reinterpret_cast<uintptr_t>(out) & 63);
    if (bytes < head + 64) {
        memcpy(out, in, size_t(bytes));
        return;
    }
    memcpy(out, in, size_t(head));
    int64_t at = head;
    for (; at + 64 <= bytes; at += 64) {
#if defined(__AVX512F__)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out + at), _mm512_loadu_si512(in + at));
#elif defined(__AVX2__)
        for (int j = 0; j < 64; j += 32) {
            _mm256_stream_si256(reinterpret_cast<__m256i*>(out + at + j),
                                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + at + j)));
        }
#else
        for (int j = 0; j < 64; j += 16) {
            _mm_stream_si128(reinterpret_cast<__m128i*>(out + at + j),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + at + j)));
        }
#endif
    }
    memcpy(out + at, in + at, size_t(bytes - at));
#else
    memcpy(out, in, size_t(bytes));
#endif
}

// Makes these stores visible to other threads.
GRACE_LOCAL void settle() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace GRACE_ISA
}  // namespace grace
