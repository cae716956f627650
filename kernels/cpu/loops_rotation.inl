// Rotations in blocks: random signs and a Hadamard transform, twice or once. Included by loops.inl.

namespace grace {
namespace GRACE_ISA {

#if defined(__AVX512F__)
constexpr int kRegister = 64;
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

// A register of numbers.
template <class T> struct Register {
    static constexpr int count = kRegister / int(sizeof(T));
    typedef T Values __attribute__((vector_size(kRegister)));
    typedef typename Format<T>::Signed Words __attribute__((vector_size(kRegister)));
};

template <class T> GRACE_LOCAL typename Register<T>::Values load_lanes(const T* from) {
    typename Register<T>::Values values;
    memcpy(&values, from, kRegister);
    return values;
}
template <class T> GRACE_LOCAL void store_lanes(T* to, typename Register<T>::Values values) {
    memcpy(to, &values, kRegister);
}

#if defined(__AVX512F__)
// The stage below in two instructions. The products with 1 and -1 are exact, so that the sums are rounded alike.
template <int distance> GRACE_LOCAL __m512 stage_of_floats(__m512 values) {
    constexpr auto sign = [](int i) { return (i & distance) != 0 ? -1.0f : 1.0f; };
    const __m512 signs = _mm512_setr_ps(sign(0), sign(1), sign(2), sign(3), sign(4), sign(5), sign(6), sign(7), sign(8),
                                        sign(9), sign(10), sign(11), sign(12), sign(13), sign(14), sign(15));
    __m512 partners;
    if constexpr (distance == 1) partners = _mm512_permute_ps(values, _MM_PERM_CDAB);
    if constexpr (distance == 2) partners = _mm512_permute_ps(values, _MM_PERM_BADC);
    if constexpr (distance == 4) partners = _mm512_shuffle_f32x4(values, values, _MM_PERM_CDAB);
    if constexpr (distance == 8) partners = _mm512_shuffle_f32x4(values, values, _MM_PERM_BADC);
    return _mm512_fmadd_ps(values, signs, partners);
}
#endif

// One stage of the transform between the lanes of a register: a + b and a - b for lanes at this distance.
template <int distance, class T>
GRACE_LOCAL typename Register<T>::Values stage_within(typename Register<T>::Values values) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(float)) return stage_of_floats<distance>(values);
#endif
    using Signed = typename Format<T>::Signed;
    typename Register<T>::Words partner, flip;
    for (int i = 0; i < Register<T>::count; ++i) {
        partner[i] = i ^ distance;
        flip[i] = (i & distance) != 0 ? Signed(typename Format<T>::Word(1) << (8 * sizeof(T) - 1)) : Signed(0);
    }
    const auto own = reinterpret_cast<typename Register<T>::Values>(reinterpret_cast<typename Register<T>::Words>(values) ^ flip);
    return __builtin_shuffle(values, partner) + own;
}

// Stages between registers: a + b and a - b for registers at distance 1, then 2 and so on up to `stages` of them.
template <int stages, class Values> GRACE_LOCAL void stages_between(Values* values) {
#pragma GCC unroll 4
    for (int distance = 1; distance < 1 << stages; distance *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < 1 << stages; ++i) {
            if ((i & distance) != 0) continue;
            const Values a = values[i], b = values[i + distance];
            values[i] = a + b;
            values[i + distance] = a - b;
        }
    }
}

// The stages of the transform for elements at `distance`, 2 distance and so on, `stages` of them. Elements that meet in
// these stages stay in registers, which saves traffic with the cache. store(i, values) takes the results from i on.
template <int stages, class T, class Store>
GRACE_LOCAL void transform_stages(const T* x, int64_t n, int64_t distance, Store store) {
    constexpr int count = 1 << stages, lanes = Register<T>::count;
    for (int64_t from = 0; from < n; from += count * distance) {
        for (int64_t i = from; i < from + distance; i += lanes) {
            typename Register<T>::Values values[count];
#pragma GCC unroll 16
            for (int j = 0; j < count; ++j) values[j] = load_lanes(x + i + j * distance);
            stages_between<stages>(values);
#pragma GCC unroll 16
            for (int j = 0; j < count; ++j) store(i + j * distance, values[j]);
        }
    }
}

// The first stages of the transform: those within 2^stages neighbouring registers. load(i) returns the elements from i
// on.
template <int stages, class T, class Load> GRACE_LOCAL void transform_neighbours(Load load, T* x, int64_t n) {
    constexpr int count = 1 << stages, lanes = Register<T>::count;
    for (int64_t from = 0; from < n; from += count * lanes) {
        typename Register<T>::Values values[count];
#pragma GCC unroll 16
        for (int j = 0; j < count; ++j) {
            auto one = stage_within<1, T>(load(from + j * lanes));
            if constexpr (lanes > 2) one = stage_within<2, T>(one);
            if constexpr (lanes > 4) one = stage_within<4, T>(one);
            if constexpr (lanes > 8) one = stage_within<8, T>(one);
            values[j] = one;
        }
        stages_between<stages>(values);
#pragma GCC unroll 16
        for (int j = 0; j < count; ++j) store_lanes(x + from + j * lanes, values[j]);
    }
}

// As many stages at a time as there are registers for, and the number of elements within which these are the first.
constexpr int kStages = kRegister == 64 ? 4 : 3;
template <class T> constexpr int64_t kNeighbours = int64_t(Register<T>::count) << kStages;

// The stages from `distance` on, which is less than n. The last ones give their results to `store`, the others to x.
template <class T, class Store> GRACE_LOCAL void transform_rest(T* x, int64_t n, int64_t distance, Store store) {
    const auto keep = [&](int64_t i, typename Register<T>::Values values) { store_lanes(x + i, values); };
    while (distance < n) {
        const int stages = (distance << kStages) <= n ? kStages : 4 * distance <= n ? 2 : 1;
        const bool last = (distance << stages) == n;
        if (stages == kStages) {
            last ? transform_stages<kStages>(x, n, distance, store) : transform_stages<kStages>(x, n, distance, keep);
        } else if (stages == 2) {
            last ? transform_stages<2>(x, n, distance, store) : transform_stages<2>(x, n, distance, keep);
        } else {
            last ? transform_stages<1>(x, n, distance, store) : transform_stages<1>(x, n, distance, keep);
        }
        distance <<= stages;
    }
}

// The Hadamard transform in place, without a factor. Its stages go from neighbours to the farthest elements. n is a
// power of two, at least 8.
template <class T> static void hadamard(T* x, int64_t n) {
    constexpr int lanes = Register<T>::count;
    if (n < lanes) {
        for (int64_t distance = 1; distance < n; distance *= 2) {
            for (int64_t i = 0; i < n; ++i) {
                if ((i & distance) != 0) continue;
                const T a = x[i], b = x[i + distance];
                x[i] = a + b;
                x[i + distance] = a - b;
            }
        }
        return;
    }
    const auto load = [&](int64_t i) { return load_lanes(x + i); };
    const bool many = kNeighbours<T> <= n;
    many ? transform_neighbours<kStages>(load, x, n) : transform_neighbours<0>(load, x, n);
    transform_rest(x, n, many ? kNeighbours<T> : lanes,
                   [&](int64_t i, typename Register<T>::Values values) { store_lanes(x + i, values); });
}

// Handles the elements that fill whole words of signs. Returns their number.
template <class T>
GRACE_LOCAL int64_t flip_vectors(const uint32_t*, const T*, T, const T*, T*, int64_t) {
    return 0;
}
#if defined(__AVX512F__)
GRACE_LOCAL int64_t flip_vectors(const uint32_t* signs, const float* x, float factor, const float* base, float* out,
                                 int64_t n) {
    const __m512 by = _mm512_set1_ps(factor), minus = _mm512_set1_ps(-0.0f);
    int64_t i = 0;
    for (; i < n / 32 * 32; i += 16) {
        const __mmask16 mask = __mmask16(signs[i / 32] >> (i % 32));
        const __m512 value = _mm512_loadu_ps(x + i);
        const __m512 sent = _mm512_mul_ps(_mm512_mask_xor_ps(value, mask, value, minus), by);
        _mm512_storeu_ps(out + i, base == nullptr ? sent : _mm512_add_ps(_mm512_loadu_ps(base + i), sent));
    }
    return i;
}
#endif

// out = base + factor x, with random signs of x; without a base, out = factor x. `first` is the number of the first
// element, a multiple of 128. Bit i % 32 of word i / 32 of the stream negates element i.
template <class T>
GRACE_LOCAL void flip_signs(const RandomKey& key, int64_t first, const T* x, T factor, const T* base, T* out,
                            int64_t n) {
    alignas(64) uint32_t signs[kRotation / 32];
    words(key, uint32_t(first / 128), (n + 127) / 128, signs);
    for (int64_t i = flip_vectors(signs, x, factor, base, out, n); i < n; i += 32) {
        const uint32_t word = signs[i / 32];
        const int count = int(lesser(32, n - i));
        if (base == nullptr && count == 32) {
            for (int j = 0; j < 32; ++j) out[i + j] = signed_by(word, j, x[i + j]) * factor;
        } else if (count == 32) {
            for (int j = 0; j < 32; ++j) out[i + j] = base[i + j] + signed_by(word, j, x[i + j]) * factor;
        } else {
            for (int j = 0; j < count; ++j) {
                const T value = signed_by(word, j, x[i + j]) * factor;
                out[i + j] = base == nullptr ? value : base[i + j] + value;
            }
        }
    }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Entries of a table of 16 numbers, of which 2^bits count.
template <int bits> GRACE_LOCAL __m256 look_up8(const float* table, __m256i at) {
    const __m256 lower = _mm256_permutevar8x32_ps(_mm256_load_ps(table), at);
    if constexpr (bits <= 3) return lower;
    const __m256 upper = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), at);
    return _mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
}

// 1 - u for the numbers u of random words; see `uniform`.
GRACE_LOCAL __m256 share_of(__m256i words) {
    const __m256 drawn = _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 8));
    return _mm256_sub_ps(_mm256_set1_ps(1), _mm256_mul_ps(drawn, _mm256_set1_ps(5.9604644775390625e-8f)));
}
#endif

// out[i] = levels[codes[i]], for 2^bits levels.
template <int bits, class T> GRACE_LOCAL void look_up(const T* levels, const uint8_t* codes, T* out, int64_t n) {
    int64_t i = 0;
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(float)) {
        alignas(64) float all[16] = {};
        memcpy(all, levels, sizeof(float) << bits);
        const __m512 table = _mm512_load_ps(all);
        for (; i + 16 <= n; i += 16) {
            const __m512i at = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
            _mm512_storeu_ps(out + i, _mm512_permutexvar_ps(at, table));
        }
    }
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == sizeof(float)) {
        alignas(32) float all[16] = {};
        memcpy(all, levels, sizeof(float) << bits);
        for (; i + 8 <= n; i += 8) {
            const __m256i at = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
            _mm256_storeu_ps(out + i, look_up8<bits>(all, at));
        }
    }
#endif
    for (; i < n; ++i) out[i] = levels[codes[i]];
}

#if defined(__AVX512F__)
// The codes of 16 elements in the low bits of lanes, with other codes above them.
template <int bits> GRACE_LOCAL __m512i packed_codes16(const uint8_t* data) {
    static_assert(bits == 1 || bits == 2 || bits == 4, "16 codes fill words");
    if constexpr (bits == 4) {
        const __m512i low = _mm512_broadcastd_epi32(_mm_loadu_si32(data));
        const __m512i both = _mm512_mask_broadcastd_epi32(low, 0xFF00, _mm_loadu_si32(data + 4));
        return _mm512_srlv_epi32(both, _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28));
    } else {
        uint32_t word = 0;
        memcpy(&word, data, 2 * bits);
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return _mm512_srlv_epi32(_mm512_set1_epi32(int32_t(word)), bits == 1 ? lane : _mm512_slli_epi32(lane, 1));
    }
}

// A look-up reads four bits of a code, so the levels repeat.
template <int bits> GRACE_LOCAL __m512 repeated_levels(const float* levels) {
    alignas(64) float all[16];
    for (int i = 0; i < 16; ++i) all[i] = levels[i % (1 << bits)];
    return _mm512_load_ps(all);
}
#endif

// out[i] = levels[code i], for packed codes.
template <int bits, class T> GRACE_LOCAL void look_up_packed(const T* levels, const uint8_t* data, T* out, int64_t n) {
    alignas(64) uint8_t codes[kBlock];
    int64_t done = 0;
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(float) && bits != 3) {
        const __m512 table = repeated_levels<bits>(levels);
        for (; done + 16 <= n; done += 16) {
            _mm512_storeu_ps(out + done, _mm512_permutexvar_ps(packed_codes16<bits>(data + done / 8 * bits), table));
        }
    }
#endif
    for (int64_t length; done < n; done += length) {
        length = lesser(kBlock, n - done);
        unpack(data + done / 8 * bits, bits, length, codes);
        look_up<bits>(levels, codes, out + done, length);
    }
}

template <class T> GRACE_LOCAL double sum_products(const T* x, const T* y, int64_t n) {
    double sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int64_t i = 0; i < n; i += 8) {
        for (int j = 0; j < 8; ++j) sums[j] += double(x[i + j] * y[i + j]);
    }
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

#if defined(__AVX512F__)
// Adds these sums for four parts of kBlock elements and the levels of their codes. They run side by side, because each
// addition of a sum waits for the one before.
template <int bits>
GRACE_LOCAL void add_products_of_parts(const float* x, const float* levels, const uint8_t* codes, double* product) {
    const __m512 table = repeated_levels<bits>(levels);
    __m512d sums[4] = {_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd()};
    for (int64_t i = 0; i < kBlock; i += 16) {
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) {
            const int64_t at = part * kBlock + i;
            const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + at)));
            const __m512 both = _mm512_mul_ps(_mm512_loadu_ps(x + at), _mm512_permutexvar_ps(code, table));
            const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(both), 1));
            sums[part] = _mm512_add_pd(sums[part], _mm512_cvtps_pd(_mm512_castps512_ps256(both)));
            sums[part] = _mm512_add_pd(sums[part], _mm512_cvtps_pd(upper));
        }
    }
    for (const __m512d& sum : sums) {
        double lane[8];
        _mm512_storeu_pd(lane, sum);
        *product += ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
    }
}
#endif

// The number of thresholds that each element reaches: see threshold_of. Without noise, they are in the middle.
template <int bits, bool noisy, class T>
GRACE_LOCAL void count_thresholds(const T* x, const T* levels, T reach, const uint32_t* noise, uint8_t* codes,
                                  int64_t n) {
    constexpr int count = 1 << bits;
    int64_t i = 0;
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(float)) {
        // In registers, because a bucket may have a few elements only.
        const __mmask16 used = __mmask16((1u << count) - 2);
        const __m512 scale = _mm512_set1_ps(reach);
        const __m512 lows = _mm512_mul_ps(_mm512_maskz_expandloadu_ps(used, levels), scale);
        const __m512 highs = _mm512_mul_ps(_mm512_maskz_expandloadu_ps(used, levels + 1), scale);
        const __m512 gaps = _mm512_sub_ps(highs, lows);
        const __m512 half_way = _mm512_add_ps(lows, _mm512_mul_ps(_mm512_set1_ps(0.5f), gaps));
        const __m512 ascending = noisy ? highs : _mm512_min_ps(half_way, highs);
        for (; i + 16 <= n; i += 16) {
            fetch_ahead<16>(x + i);
            const __m512 value = _mm512_loadu_ps(x + i);
            // Thresholds ascend, so a search in halves finds how many are reached. With noise, it first finds the
            // levels that are reached: so are the thresholds below them, and perhaps one more.
            __m512i code = _mm512_setzero_si512();
            for (int half = count / 2; half > 0; half /= 2) {
                const __m512i at = _mm512_or_si512(code, _mm512_set1_epi32(half));
                const __mmask16 reached = _mm512_cmp_ps_mask(value, _mm512_permutexvar_ps(at, ascending), _CMP_GE_OQ);
                code = _mm512_mask_mov_epi32(code, reached, at);
            }
            if (noisy) {
                const __m512 word = _mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_loadu_si512(noise + i), 8));
                const __m512 drawn = _mm512_mul_ps(word, _mm512_set1_ps(5.9604644775390625e-8f));
                const __m512 share = _mm512_sub_ps(_mm512_set1_ps(1), drawn);
                const __m512i at = _mm512_add_epi32(code, _mm512_set1_epi32(1));
                const __m512 part = _mm512_mul_ps(share, _mm512_permutexvar_ps(at, gaps));
                const __m512 threshold = _mm512_min_ps(_mm512_add_ps(_mm512_permutexvar_ps(at, lows), part),
                                                       _mm512_permutexvar_ps(at, highs));
                const __mmask16 more = _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(count)) &
                                       _mm512_cmp_ps_mask(value, threshold, _CMP_GE_OQ);
                code = _mm512_mask_mov_epi32(code, more, at);
            }
            _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(code));
        }
        if (i == n) return;
    }
#endif
    // Threshold j, from 1 on, lies between the levels j - 1 and j.
    alignas(64) T low[16] = {}, high[16] = {}, middle[16] = {};
    for (int j = 1; j < count; ++j) {
        low[j] = levels[j - 1] * reach;
        high[j] = levels[j] * reach;
        middle[j] = threshold_of(low[j], high[j], T(0.5));
    }
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(float)) {
        // The same search. Step s halves the thresholds 2^s times: its table has the middle of each part.
        alignas(32) float middles[bits][8] = {};
        for (int step = 0; step < bits; ++step) {
            const int half = count >> (step + 1);
            for (int j = 0; j < 1 << step; ++j) middles[step][j] = (noisy ? high : middle)[(2 * j + 1) * half];
        }
        for (; i + 32 <= n; i += 32) {
            __m256i found[4];
            for (int v = 0; v < 4; ++v) {
                const __m256 value = _mm256_loadu_ps(x + i + 8 * v);
                __m256i code = _mm256_setzero_si256();
                for (int step = 0; step < bits; ++step) {
                    const __m256 at = _mm256_permutevar8x32_ps(_mm256_load_ps(middles[step]), code);
                    const __m256i reached = _mm256_castps_si256(_mm256_cmp_ps(value, at, _CMP_GE_OQ));
                    code = _mm256_sub_epi32(_mm256_add_epi32(code, code), reached);
                }
                if (noisy) {
                    const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(noise + i + 8 * v));
                    const __m256 share = share_of(word);
                    const __m256i next = _mm256_sub_epi32(code, _mm256_set1_epi32(-1));
                    const __m256 upper = look_up8<bits>(high, next), lower = look_up8<bits>(low, next);
                    const __m256 part = _mm256_mul_ps(share, _mm256_sub_ps(upper, lower));
                    const __m256 threshold = _mm256_min_ps(_mm256_add_ps(lower, part), upper);
                    const __m256i more = _mm256_and_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), next),
                        _mm256_castps_si256(_mm256_cmp_ps(value, threshold, _CMP_GE_OQ)));
                    code = _mm256_sub_epi32(code, more);
                }
                found[v] = code;
            }
            const __m256i words = _mm256_packus_epi16(_mm256_packs_epi32(found[0], found[1]),
                                                      _mm256_packs_epi32(found[2], found[3]));
            // Packing works within halves of a register.
            const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), _mm256_permutevar8x32_epi32(words, order));
        }
    }
#endif
    for (; i < n; ++i) {
        const T share = noisy ? T(1) - T(uniform(noise[i])) : T(0.5);
        int32_t code = 0;
        for (int j = 1; j < count; ++j) {
            code += x[i] >= (noisy ? threshold_of(low[j], high[j], share) : middle[j]) ? 1 : 0;
        }
        codes[i] = uint8_t(code);
    }
}

template <int bits, class T>
GRACE_LOCAL void round_to_levels(const T* x, const T* levels, T reach, const uint32_t* noise, uint8_t* codes,
                                 int64_t n) {
    if (noise == nullptr) {
        count_thresholds<bits, false>(x, levels, reach, noise, codes, n);
    } else {
        count_thresholds<bits, true>(x, levels, reach, noise, codes, n);
    }
}

template <int bits, class T>
static void level_codes_by(const T* x, const T* scales, int64_t width, const T* levels, const RandomKey* noise,
                           int64_t begin, int64_t end, uint8_t* codes) {
    alignas(64) uint32_t random[kBlock];
    // `begin` is a multiple of 4, so every block of random words starts at an element.
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t length = lesser(kBlock, end - at);
        if (noise != nullptr) words(*noise, uint32_t(at / 4), (length + 3) / 4, random);
        for (int64_t i = 0; i < length;) {
            const int64_t bucket = (at + i) / width, stop = lesser(length, (bucket + 1) * width - at);
            round_to_levels<bits>(x + at + i, levels, scales[bucket], noise == nullptr ? nullptr : random + i,
                                  codes + (at - begin) + i, stop - i);
            i = stop;
        }
    }
}

template <class T>
static void level_codes(const T* x, const T* scales, int64_t width, const T* levels, int bits, const RandomKey* noise,
                        int64_t begin, int64_t end, uint8_t* codes) {
    switch (bits) {
        case 1: return level_codes_by<1>(x, scales, width, levels, noise, begin, end, codes);
        case 2: return level_codes_by<2>(x, scales, width, levels, noise, begin, end, codes);
        case 3: return level_codes_by<3>(x, scales, width, levels, noise, begin, end, codes);
        default: return level_codes_by<4>(x, scales, width, levels, noise, begin, end, codes);
    }
}

#if defined(__AVX512F__)
// Rounds to the nearest of 16 levels times a scale, as `count_thresholds` does.
struct Rounding {
    __m512 ascending, fourth, eighth, twelfth;

    Rounding(const float* levels, float scale) {
        const __mmask16 used = 0xFFFE;
        const __m512 by = _mm512_set1_ps(scale), highs = _mm512_mul_ps(_mm512_maskz_loadu_ps(used, levels), by);
        const __m512 lows = _mm512_mul_ps(_mm512_maskz_expandloadu_ps(used, levels), by);
        const __m512 half_way = _mm512_add_ps(lows, _mm512_mul_ps(_mm512_set1_ps(0.5f), _mm512_sub_ps(highs, lows)));
        ascending = _mm512_min_ps(half_way, highs);
        const auto threshold = [&](int at) { return _mm512_permutexvar_ps(_mm512_set1_epi32(at), ascending); };
        fourth = threshold(4), eighth = threshold(8), twelfth = threshold(12);
    }

    // A search in halves. The first two need no look-up.
    GRACE_MEMBER __m512i codes(__m512 values) const {
        const __mmask16 upper = _mm512_cmp_ps_mask(values, eighth, _CMP_GE_OQ);
        const __m512 middle = _mm512_mask_blend_ps(upper, fourth, twelfth);
        __m512i code = _mm512_maskz_mov_epi32(upper, _mm512_set1_epi32(8));
        code = _mm512_mask_or_epi32(code, _mm512_cmp_ps_mask(values, middle, _CMP_GE_OQ), code, _mm512_set1_epi32(4));
#pragma GCC unroll 2
        for (int half = 2; half > 0; half /= 2) {
            const __m512i at = _mm512_or_si512(code, _mm512_set1_epi32(half));
            const __m512 here = _mm512_permutexvar_ps(at, ascending);
            code = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(values, here, _CMP_GE_OQ), at);
        }
        return code;
    }
};

// Packs 16 codes of four bits.
GRACE_LOCAL void store_nibbles(uint8_t* to, __m512i codes) {
    // Two codes of neighbours, in the low byte of 64 bits.
    const __m512i pairs = _mm512_or_si512(codes, _mm512_srli_epi64(codes, 28));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm512_cvtepi64_epi8(pairs));
}

// Writes the sum of a bucket of whole registers; returns its largest magnitude.
GRACE_LOCAL float add_bucket(const float* x, float a, const float* y, float b, int64_t width, float* sums) {
    const __m512i size = _mm512_set1_epi32(INT32_MAX);
    const __m512 by = _mm512_set1_ps(a), with = _mm512_set1_ps(b);
    const bool plain = a == 1 && b == 1;
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < width; i += 16) {
        fetch_ahead<16>(x + i);
        fetch_ahead<16>(y + i);
        const __m512 first = _mm512_loadu_ps(x + i), second = _mm512_loadu_ps(y + i);
        const __m512 sum = plain ? _mm512_add_ps(first, second)
                                 : _mm512_add_ps(_mm512_mul_ps(first, by), _mm512_mul_ps(second, with));
        _mm512_storeu_ps(sums + i, sum);
        most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(sum), size));
    }
    return bits_as<float>(_mm512_reduce_max_epu32(most));
}

// Rounds a bucket, and leaves the rest.
GRACE_LOCAL void round_bucket(float* sums, float norm, const float* levels, int64_t width, uint8_t* codes) {
    const Rounding rounding(levels, norm);
    const __m512 table = _mm512_loadu_ps(levels), minus = _mm512_set1_ps(-norm);
    for (int64_t i = 0; i < width; i += 16) {
        const __m512 sum = _mm512_loadu_ps(sums + i);
        const __m512i found = rounding.codes(sum);
        const __m512 sent = _mm512_mul_ps(_mm512_permutexvar_ps(found, table), minus);
        _mm512_storeu_ps(sums + i, _mm512_add_ps(sum, sent));
        store_nibbles(codes + i / 2, found);
    }
}

// Packs the codes of parts of `length` elements, and adds `sum_products` of each part with the levels of its codes. The
// parts run side by side, because each addition of a sum waits for the one before.
template <int parts>
GRACE_LOCAL void round_parts(const float* x, const Rounding& rounding, const float* levels, int64_t length,
                             uint8_t* codes, double* product) {
    const __m512 table = _mm512_loadu_ps(levels);
    __m512d sums[parts];
    for (__m512d& sum : sums) sum = _mm512_setzero_pd();
    for (int64_t i = 0; i < length; i += 16) {
#pragma GCC unroll 4
        for (int part = 0; part < parts; ++part) {
            const int64_t at = part * length + i;
            const __m512 values = _mm512_loadu_ps(x + at);
            const __m512i found = rounding.codes(values);
            store_nibbles(codes + at / 2, found);
            const __m512 both = _mm512_mul_ps(values, _mm512_permutexvar_ps(found, table));
            const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(both), 1));
            sums[part] = _mm512_add_pd(sums[part], _mm512_cvtps_pd(_mm512_castps512_ps256(both)));
            sums[part] = _mm512_add_pd(sums[part], _mm512_cvtps_pd(upper));
        }
    }
    for (const __m512d& sum : sums) {
        double lane[8];
        _mm512_storeu_pd(lane, sum);
        *product += ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
    }
}
#endif

template <int bits, class T>
static void sum_round_by(const T* x, T a, const T* y, T b, int64_t width, const T* levels, T* out, T* norms,
                         uint8_t* codes, int64_t begin, int64_t end, bool around) {
    alignas(64) T held[kRotation], values[kBlock];
    alignas(64) uint8_t found[kRotation];
    const int64_t unit = round_unit(width), step = unit < kBlock ? kBlock / unit * unit : unit;
    for (int64_t at = begin; at < end; at += step) {
        const int64_t length = lesser(step, end - at);
        T* target = around ? held : out + at;
#if defined(__AVX512F__)
        if constexpr (bits == 4 && sizeof(T) == sizeof(float)) {
            if (width % 16 == 0 && length % width == 0) {
                // What a bucket waits for is computed while others are.
                T* of_block = norms + at / width;
                for (int64_t i = 0; i < length; i += width) {
                    of_block[i / width] = add_bucket(x + at + i, a, y + at + i, b, width, target + i);
                }
                for (int64_t i = 0; i < length; i += width) {
                    round_bucket(target + i, of_block[i / width], levels, width, codes + (at + i) / 2);
                }
                if (around) write_around(out + at, held, length * int64_t(sizeof(T)));
                continue;
            }
        }
#endif
        weighted_sum(x + at, a, y + at, b, target, length, false);
        for (int64_t i = 0; i < length; i += 64) {
            fetch_ahead<64>(x + at + i);
            fetch_ahead<64>(y + at + i);
        }
        for (int64_t i = 0; i < length; i += width) {
            const int64_t count = lesser(width, length - i);
            const T norm = norms[(at + i) / width] = max_abs(target + i, count);
            round_to_levels<bits>(target + i, levels, norm, nullptr, found + i, count);
            look_up<bits>(levels, found + i, values, count);
            for (int64_t j = 0; j < count; ++j) target[i + j] += values[j] * -norm;
        }
        pack(found, bits, length, codes + at / 8 * bits);
        if (around) write_around(out + at, held, length * int64_t(sizeof(T)));
    }
    if (around) settle();
}

template <class T>
static void sum_round(const T* x, T a, const T* y, T b, int64_t width, const T* levels, int bits, T* out, T* norms,
                      uint8_t* codes, int64_t begin, int64_t end, bool around) {
    switch (bits) {
        case 1: return sum_round_by<1>(x, a, y, b, width, levels, out, norms, codes, begin, end, around);
        case 2: return sum_round_by<2>(x, a, y, b, width, levels, out, norms, codes, begin, end, around);
        case 3: return sum_round_by<3>(x, a, y, b, width, levels, out, norms, codes, begin, end, around);
        default: return sum_round_by<4>(x, a, y, b, width, levels, out, norms, codes, begin, end, around);
    }
}

template <int bits, class T>
static void levels_sum_by(const Listed<T>* ranks, int count, int64_t width, const T* onto, T* out, int64_t begin,
                          int64_t end, bool around) {
    in_blocks(out + begin, end - begin, around, [&](int64_t from, int64_t length, T* target) {
        alignas(64) T values[kBlock];
        const int64_t at = begin + from;
        for (int r = 0; r < count; ++r) {
            const T* base = r > 0 ? target : onto == nullptr ? nullptr : onto + at;
            // `at` is a multiple of 8, so the codes begin at a byte.
            look_up_packed<bits>(ranks[r].levels, ranks[r].codes + at / 8 * bits, values, length);
            for (int64_t i = 0; i < length;) {
                const int64_t bucket = (at + i) / width, stop = lesser(length, (bucket + 1) * width - at);
                const T scale = ranks[r].scales[bucket];
                if (base == nullptr) {
                    for (int64_t j = i; j < stop; ++j) target[j] = values[j] * scale;
                } else {
                    for (int64_t j = i; j < stop; ++j) target[j] = base[j] + values[j] * scale;
                }
                i = stop;
            }
        }
    });
}

template <class T>
static void levels_sum(const Listed<T>* ranks, int count, int64_t width, int bits, const T* onto, T* out, int64_t begin,
                       int64_t end, bool around) {
    switch (bits) {
        case 1: return levels_sum_by<1>(ranks, count, width, onto, out, begin, end, around);
        case 2: return levels_sum_by<2>(ranks, count, width, onto, out, begin, end, around);
        case 3: return levels_sum_by<3>(ranks, count, width, onto, out, begin, end, around);
        default: return levels_sum_by<4>(ranks, count, width, onto, out, begin, end, around);
    }
}

#if defined(__AVX512F__)
// Random signs of a block, as masks.
struct Signs {
    alignas(64) uint16_t masks[kRotation / 16];

    Signs(const RandomKey& key, int64_t first, int64_t n) {
        alignas(64) uint32_t drawn[kRotation / 32];
        words(key, uint32_t(first / 128), (n + 127) / 128, drawn);
        memcpy(masks, drawn, size_t(n / 8));
    }
    GRACE_MEMBER __m512 of(__m512 values, int64_t i) const {
        return _mm512_mask_xor_ps(values, masks[i / 16], values, _mm512_set1_ps(-0.0f));
    }
};

// H D' H of a block of at least kNeighbours floats, whose elements from i on load(i) returns, with the factor `unit` on
// what D' negates; or H of it, by one transform. `held` has room for the block. The passes that change signs are those
// that load and store.
template <class Load, class Store>
GRACE_LOCAL void turn(Load load, const RotationKey& key, int64_t first, float unit, int64_t width, float* held,
                      Store store) {
    constexpr int64_t near = kNeighbours<float>;
    transform_neighbours<kStages>(load, held, width);
    if (key.twice) {
        const Signs second(key.second, first, width);
        const __m512 by = _mm512_set1_ps(unit);
        const auto keep = [&](int64_t i, __m512 values) { _mm512_storeu_ps(held + i, values); };
        const auto again = [&](int64_t i) { return _mm512_mul_ps(second.of(_mm512_loadu_ps(held + i), i), by); };
        transform_rest(held, width, near, keep);
        transform_neighbours<kStages>(again, held, width);
    }
    if (width == near) {
        for (int64_t i = 0; i < width; i += 16) store(i, _mm512_loadu_ps(held + i));
    } else {
        transform_rest(held, width, near, store);
    }
}
#endif

// H D' H y of a whole block, in place, with the factor `unit` on what D' negates; or H y, by one transform.
template <class T> GRACE_LOCAL void turn(const RotationKey& key, int64_t first, T unit, int64_t width, T* y) {
    hadamard(y, width);
    if (!key.twice) return;
    flip_signs<T>(key.second, first, y, unit, nullptr, y, width);
    hadamard(y, width);
}

// y = H D' H D x / d of a block, with zeros from `length` on; or H D x, by one transform.
template <class T>
GRACE_LOCAL void rotate_block(const T* x, const RotationKey& key, int64_t first, int64_t length, int64_t width, T* y) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(float)) {
        if (length == width && width >= kNeighbours<T>) {
            const Signs signs(key.first, first, width);
            const auto load = [&](int64_t i) { return signs.of(_mm512_loadu_ps(x + i), i); };
            const auto store = [&](int64_t i, __m512 values) { _mm512_storeu_ps(y + i, values); };
            return turn(load, key, first, 1.0f / float(width), width, y, store);
        }
    }
#endif
    flip_signs<T>(key.first, first, x, T(1), nullptr, y, length);
    for (int64_t i = length; i < width; ++i) y[i] = T(0);
    turn(key, first, T(1) / T(width), width, y);
}

// The inverse of `rotate_block` with two transforms on a whole block, in place.
template <class T> GRACE_LOCAL void rotate_back(const RotationKey& key, int64_t first, int64_t width, T* y) {
    turn(key, first, T(1) / T(width), width, y);
    flip_signs<T>(key.first, first, y, T(1), nullptr, y, width);
}

template <class T>
static void rotate(const T* x, const Rotation<T>* by, bool back, T* out, int64_t begin, int64_t end) {
    alignas(64) T held[kRotation];
    for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * by->block, width = by->width(block), length = lesser(width, by->n - first);
        if (!back) {
            rotate_block(x + first, by->key, first, length, width, held);
        } else {
            memcpy(held, x + first, size_t(length) * sizeof(T));
            for (int64_t i = length; i < width; ++i) held[i] = T(0);
            rotate_back(by->key, first, width, held);
        }
        memcpy(out + first, held, size_t(width) * sizeof(T));
    }
}

template <class T>
static void spread_in_frame(const T* x, const T* norms, const Frame* frame, T* out, int64_t begin, int64_t end) {
    alignas(64) T rest[kRotation], found[kRotation], sums[kRotation];
    const int64_t size = frame->block, width = frame->width;
    for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * size, length = lesser(width, frame->n - block * width);
        memcpy(rest, x + block * width, size_t(length) * sizeof(T));
        for (int64_t i = length; i < size; ++i) rest[i] = T(0);
        T bound = norms[block] * T(1 / __builtin_sqrt(double(size)));
        for (int64_t i = 0; i < size; ++i) sums[i] = T(0);
        for (int projection = 0; projection < kProjections; ++projection, bound *= T(0.5)) {
            rotate_block(rest, frame->key, first, size, size, found);
            for (int64_t i = 0; i < size; ++i) found[i] = clipped(found[i], bound);
            for (int64_t i = 0; i < size; ++i) sums[i] += found[i];
            rotate_back(frame->key, first, size, found);
            for (int64_t i = 0; i < width; ++i) rest[i] -= found[i];
        }
        rotate_block(rest, frame->key, first, size, size, found);
        for (int64_t i = 0; i < size; ++i) out[first + i] = sums[i] + found[i];
    }
}

template <class T>
static void project_from_frame(const T* coefficients, const Frame* frame, T* out, int64_t begin, int64_t end) {
    alignas(64) T held[kRotation];
    for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * frame->block;
        memcpy(held, coefficients + first, size_t(frame->block) * sizeof(T));
        rotate_back(frame->key, first, frame->block, held);
        memcpy(out + block * frame->width, held, size_t(frame->width) * sizeof(T));
    }
}

template <class T>
static void recover_sparse(const T* z, const Rotation<T>* by, int64_t reduction, int rounds, double share, double noise,
                           T* out, int64_t begin, int64_t end) {
    alignas(64) T copy[kRotation], found[kRotation], held[kRotation], chances[kBlock], seconds[kBlock], spreads[kBlock];
    for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * by->block, width = by->width(block), m = measurements(width, reduction);
        const double per = double(width) / double(m);
        const T* mine = z + block * measurements(by->block, reduction);
        double squares = 0;
        for (int64_t at = 0; at < m; at += kBlock) {
            const int64_t length = lesser(kBlock, m - at);
            for (int64_t i = 0; i < length; ++i) seconds[i] = mine[at + i] * mine[at + i];
            squares += sum_of(seconds, length);
        }
        Belief<T> now = first_belief(T(squares), m, per, share, noise);
        memcpy(held, mine, size_t(m) * sizeof(T));
        for (int64_t i = m; i < width; ++i) held[i] = T(0);
        rotate_back(by->key, first, width, held);
        for (int64_t i = 0; i < width; ++i) copy[i] = held[i] * T(per);
        for (int round = 1;; ++round) {
            now = with_factors(now);
            double sums[3] = {0, 0, 0};
            for (int64_t at = 0; at < width; at += kBlock) {
                const int64_t length = lesser(kBlock, width - at);
                for (int64_t i = 0; i < length; ++i) {
                    const Guess<T> guess = guess_of(copy[at + i], now);
                    found[at + i] = guess.estimate;
                    chances[i] = guess.chance;
                    seconds[i] = guess.second;
                    spreads[i] = guess.second - guess.estimate * guess.estimate;
                }
                sums[0] += sum_of(chances, length);
                sums[1] += sum_of(seconds, length);
                sums[2] += sum_of(spreads, length);
            }
            if (round == rounds) break;
            T trust;
            now = next_belief(now, T(sums[0]), T(sums[1]), T(sums[2]), width, &trust);
            // Without the part of the copy that the estimates only repeat.
            for (int64_t i = 0; i < width; ++i) found[i] = (found[i] - copy[i] * trust) / (T(1) - trust);
            rotate_block(found, by->key, first, width, width, held);
            for (int64_t i = 0; i < m; ++i) held[i] = mine[i] - held[i];
            for (int64_t i = m; i < width; ++i) held[i] = T(0);
            rotate_back(by->key, first, width, held);
            for (int64_t i = 0; i < width; ++i) copy[i] = found[i] + held[i] * T(per);
            now.error = next_error(now.error, per, noise);
        }
        memcpy(out + first, found, size_t(lesser(width, by->n - first)) * sizeof(T));
    }
}

template <int bits, class T>
static void rotated_codes_by(const T* x, const Rotation<T>* by, bool fit, const RandomKey* noise, uint8_t* out,
                             T* scales, int64_t begin, int64_t end) {
    alignas(64) T rotated[kRotation], values[kBlock];
    alignas(64) uint32_t random[kRotation];
    alignas(64) uint8_t codes[kRotation];
    double squares[2];
    T largest = 0;
    bool paired = false;
    for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * by->block, width = by->width(block), length = lesser(width, by->n - first);
        // The norms of two whole blocks side by side, because each addition of a sum waits for the one before.
        const int place = int((block - begin) % 2);
        if (place == 0) paired = fit && block + 1 < end && first + 2 * width <= by->n;
        if (!paired) {
            squares[place] = fit ? sum_squares(x + first, length) : 0;
            largest = max_abs(x + first, length);
        } else if (place == 0) {
            norms_of_parts(x + first, width, squares, &largest);
        }
        rotate_block(x + first, by->key, first, length, width, rotated);
        const T norm = T(__builtin_sqrt(squares[place]));
        const bool twice = by->key.twice;
        const T root = twice ? T(1 / __builtin_sqrt(double(width))) : T(1);
        const T reach = fit ? norm * root : max_abs(rotated, width);
        // Elements that count as infinite show in the scale. `largest` may be that of the other block of a pair.
        const bool shown = magnitude_bits(largest) > largest_bits<T>() &&
                           magnitude_bits(max_abs(x + first, length)) > largest_bits<T>();
        // The elements of the next block arrive while this one is rounded.
        for (int64_t i = 0; i < width; i += 64) fetch<64>(x + first + width + i);
        if (noise != nullptr) words(*noise, uint32_t(first / 4), (width + 3) / 4, random);
        double product = 0;
        int64_t i = 0;
#if defined(__AVX512F__)
        if constexpr (sizeof(T) == sizeof(float) && bits == 4) {
            if (fit && noise == nullptr) {
                const Rounding rounding(by->levels, reach);
                uint8_t* mine = out + first / 2;
                for (; i + 4 * kBlock <= width; i += 4 * kBlock) {
                    round_parts<4>(rotated + i, rounding, by->levels, kBlock, mine + i / 2, &product);
                }
                for (int64_t some; i < width / 16 * 16; i += some) {
                    some = lesser(kBlock, width - i);
                    round_parts<1>(rotated + i, rounding, by->levels, some, mine + i / 2, &product);
                }
            }
        }
#endif
        if (i == 0) {
            round_to_levels<bits>(rotated, by->levels, reach, noise == nullptr ? nullptr : random, codes, width);
            pack(codes, bits, width, out + first / 8 * bits);
        }
        if (shown) scales[block] = T(__builtin_nan(""));
        if (shown) continue;
        if (!fit) {
            scales[block] = reach / T(width);
            continue;
        }
#if defined(__AVX512F__)
        if constexpr (sizeof(T) == sizeof(float)) {
            for (; i + 4 * kBlock <= width; i += 4 * kBlock) {
                add_products_of_parts<bits>(rotated + i, by->levels, codes + i, &product);
            }
        }
#endif
        for (; i < width; i += kBlock) {
            const int64_t some = lesser(kBlock, width - i);
            look_up<bits>(by->levels, codes + i, values, some);
            product += sum_products(rotated + i, values, some);
        }
        scales[block] = fitted_scale(norm, T(product)) / (twice ? T(width) : T(1));
    }
}

template <class T>
static void rotated_codes(const T* x, const Rotation<T>* by, bool fit, const RandomKey* noise, uint8_t* codes,
                          T* scales, int64_t begin, int64_t end) {
    switch (by->bits) {
        case 1: return rotated_codes_by<1>(x, by, fit, noise, codes, scales, begin, end);
        case 2: return rotated_codes_by<2>(x, by, fit, noise, codes, scales, begin, end);
        case 3: return rotated_codes_by<3>(x, by, fit, noise, codes, scales, begin, end);
        default: return rotated_codes_by<4>(x, by, fit, noise, codes, scales, begin, end);
    }
}

template <int bits, class T>
static void rotated_sum_by(const Coded<T>* ranks, const RotationKey* keys, int count, const Rotation<T>* by,
                           const T* onto, T* out, int64_t begin, int64_t end, bool around) {
    alignas(64) T total[kRotation], values[kRotation];
    for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * by->block, width = by->width(block), length = lesser(width, by->n - first);
        T* target = around ? total : out + first;
        for (int r = 0; r < count; ++r) {
#if defined(__AVX512F__)
            if constexpr (sizeof(T) == sizeof(float) && bits != 3) {
                if (length == width && width >= kNeighbours<T>) {
                    const T* base = r > 0 ? target : onto == nullptr ? nullptr : onto + first;
                    const uint8_t* codes = ranks[r].codes + first / 8 * bits;
                    const Signs signs(keys[r].first, first, width);
                    const __m512 table = repeated_levels<bits>(by->levels), scale = _mm512_set1_ps(ranks[r].scales[block]);
                    const auto load = [&](int64_t i) {
                        return _mm512_permutexvar_ps(packed_codes16<bits>(codes + i / 8 * bits), table);
                    };
                    const auto store = [&](int64_t i, __m512 found) {
                        const __m512 sent = _mm512_mul_ps(signs.of(found, i), scale);
                        _mm512_storeu_ps(target + i,
                                         base == nullptr ? sent : _mm512_add_ps(_mm512_loadu_ps(base + i), sent));
                    };
                    turn(load, keys[r], first, 1.0f, width, values, store);
                    continue;
                }
            }
#endif
            look_up_packed<bits>(by->levels, ranks[r].codes + first / 8 * bits, values, width);
            turn(keys[r], first, T(1), width, values);
            const T* base = r > 0 ? target : onto == nullptr ? nullptr : onto + first;
            flip_signs(keys[r].first, first, values, ranks[r].scales[block], base, target, length);
        }
        if (around) write_around(out + first, total, length * int64_t(sizeof(T)));
    }
    if (around) settle();
}

template <class T>
static void rotated_sum(const Coded<T>* ranks, const RotationKey* keys, int count, const Rotation<T>* by, const T* onto,
                        T* out, int64_t begin, int64_t end, bool around) {
    switch (by->bits) {
        case 1: return rotated_sum_by<1>(ranks, keys, count, by, onto, out, begin, end, around);
        case 2: return rotated_sum_by<2>(ranks, keys, count, by, onto, out, begin, end, around);
        case 3: return rotated_sum_by<3>(ranks, keys, count, by, onto, out, begin, end, around);
        default: return rotated_sum_by<4>(ranks, keys, count, by, onto, out, begin, end, around);
    }
}

// The sum over ranks of scale q, for the codes of a block, rotated back once.
template <int bits, class T>
static void shared_rotated_sum_by(const Coded<T>* ranks, int count, const Rotation<T>* by, const T* onto, T* out,
                                  int64_t begin, int64_t end, bool around) {
    alignas(64) T total[kRotation], values[kRotation];
    for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * by->block, width = by->width(block), length = lesser(width, by->n - first);
        const int64_t start = first / 8 * bits;
        T* target = around ? total : out + first;
        const T* base = onto == nullptr ? nullptr : onto + first;
        bool turned = false;
#if defined(__AVX512F__)
        if constexpr (sizeof(T) == sizeof(float) && bits != 3) {
            turned = length == width && width >= kNeighbours<T>;
            if (turned) {
                const Signs signs(by->key.first, first, width);
                const __m512 table = repeated_levels<bits>(by->levels);
                const auto sent = [&](int r, int64_t i) {
                    const __m512i codes = packed_codes16<bits>(ranks[r].codes + start + i / 8 * bits);
                    return _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), _mm512_set1_ps(ranks[r].scales[block]));
                };
                const auto load = [&](int64_t i) {
                    __m512 sum = sent(0, i);
                    for (int r = 1; r < count; ++r) sum = _mm512_add_ps(sum, sent(r, i));
                    return sum;
                };
                const auto store = [&](int64_t i, __m512 found) {
                    const __m512 mine = signs.of(found, i);
                    _mm512_storeu_ps(target + i,
                                     base == nullptr ? mine : _mm512_add_ps(_mm512_loadu_ps(base + i), mine));
                };
                turn(load, by->key, first, 1.0f, width, values, store);
            }
        }
#endif
        if (!turned) {
            T row[kBlock];
            for (int64_t at = 0; at < width; at += kBlock) {
                const int64_t some = lesser(kBlock, width - at);
                for (int r = 0; r < count; ++r) {
                    const T scale = ranks[r].scales[block];
                    look_up_packed<bits>(by->levels, ranks[r].codes + start + at / 8 * bits, row, some);
                    for (int64_t i = 0; i < some; ++i) {
                        values[at + i] = r == 0 ? row[i] * scale : values[at + i] + row[i] * scale;
                    }
                }
            }
            turn(by->key, first, T(1), width, values);
            flip_signs<T>(by->key.first, first, values, T(1), base, target, length);
        }
        if (around) write_around(out + first, total, length * int64_t(sizeof(T)));
    }
    if (around) settle();
}

template <class T>
static void shared_rotated_sum(const Coded<T>* ranks, int count, const Rotation<T>* by, const T* onto, T* out,
                               int64_t begin, int64_t end, bool around) {
    switch (by->bits) {
        case 1: return shared_rotated_sum_by<1>(ranks, count, by, onto, out, begin, end, around);
        case 2: return shared_rotated_sum_by<2>(ranks, count, by, onto, out, begin, end, around);
        case 3: return shared_rotated_sum_by<3>(ranks, count, by, onto, out, begin, end, around);
        default: return shared_rotated_sum_by<4>(ranks, count, by, onto, out, begin, end, around);
    }
}

}  // namespace GRACE_ISA
}  // namespace grace
