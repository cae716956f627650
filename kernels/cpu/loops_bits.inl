// Bits, and codes of 1 to 8 bits. Included by loops.inl.

namespace grace {
namespace GRACE_ISA {

// --- bits ------------------------------------------------------------------------------------------------------------

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

// Bits and sums of 64 elements; returns the bits.
template <class T>
GRACE_LOCAL uint64_t sums64(const T* x, T threshold, EightDoubles* high, EightDoubles* low) {
    using Values = typename Eight<T>::Values;
    using Words = typename Eight<T>::Words;
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        Values value;
        memcpy(&value, x + 8 * j, sizeof(value));
        const Words above = value >= threshold;
        high[j % 2] += __builtin_convertvector((Values)((Words)value & above), EightDoubles);
        low[j % 2] += __builtin_convertvector((Values)((Words)value & ~above), EightDoubles);
    }
    return mask64<Test::at_least>(x, threshold);
}
#if defined(__AVX512F__)
GRACE_LOCAL uint64_t sums64(const float* x, float threshold, EightDoubles* high, EightDoubles* low) {
    const __m512 edge = _mm512_set1_ps(threshold);
    uint64_t mask = 0;
#pragma GCC unroll 4
    for (int j = 0; j < 64; j += 16) {
        const __mmask16 here = _mm512_cmp_ps_mask(_mm512_loadu_ps(x + j), edge, _CMP_GE_OQ);
        mask |= uint64_t(here) << j;
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m512d value = _mm512_cvtps_pd(_mm256_loadu_ps(x + j + 8 * half));
            const __mmask8 above = __mmask8(here >> (8 * half)), below = __mmask8(~above);
            high[half] = (EightDoubles)_mm512_mask_add_pd((__m512d)high[half], above, (__m512d)high[half], value);
            low[half] = (EightDoubles)_mm512_mask_add_pd((__m512d)low[half], below, (__m512d)low[half], value);
        }
    }
    return mask;
}
#endif

// The bits of an array, and the sums of both sides, which are added in the same order however the array is divided into
// blocks of whole 64 elements.
template <class T> struct SideSums {
    // Two accumulators each, to shorten the dependency chain.
    EightDoubles high[2] = {}, low[2] = {};
    int64_t count = 0;

    // Runs beside(i) before the 64 elements from i on.
    template <class Beside> GRACE_MEMBER void add(const T* x, T threshold, uint8_t* bits, int64_t n, Beside beside) {
        int64_t i = 0;
        for (; i + 64 <= n; i += 64) {
            beside(i);
            const uint64_t mask = sums64(x + i, threshold, high, low);
            store_mask(mask, bits + i / 8, 8);
            count += __builtin_popcountll(mask);
        }
        const int rest = int(n - i);
        if (rest > 0) {
            const uint64_t mask = mask_of<Test::at_least>(x + i, threshold, rest);
            store_mask(mask, bits + i / 8, (rest + 7) / 8);
            count += __builtin_popcountll(mask);
            for (int j = 0; j < rest; ++j) {
                // As one expression, GCC 12 with -fsanitize=undefined uses a wrong lane.
                EightDoubles& side = (mask >> j & 1) != 0 ? high[0] : low[0];
                side[j % 8] += double(x[i + j]);
            }
        }
    }
    GRACE_MEMBER void add_to(double* sums) const {
        sums[0] += double(count);
        for (int l = 0; l < 8; ++l) {
            sums[1] += high[0][l] + high[1][l];
            sums[2] += low[0][l] + low[1][l];
        }
    }
};

template <class T> static void binarize_sums(const T* x, T threshold, uint8_t* bits, double* sums, int64_t n) {
    SideSums<T> sides;
    sides.add(x, threshold, bits, n, [x](int64_t i) { fetch_ahead<64>(x + i); });
    sides.add_to(sums);
}

template <class T>
static bool sum_signs(const T* x, T a, const T* y, T b, T* out, bool around, uint8_t* bits, double* sums, int64_t n) {
    SideSums<T> sides;
    bool good = true;
    in_blocks(out, n, around, [&](int64_t at, int64_t length, T* target) {
        good &= weighted_sum(x + at, a, y + at, b, target, length, false);
        sides.add(target, T(0), bits + at / 8, length, [=](int64_t i) {
            fetch_ahead<64>(x + at + i);
            fetch_ahead<64>(y + at + i);
        });
    });
    sides.add_to(sums);
    return good;
}

// 32 bits in memory order. Only the bits of n elements are read.
GRACE_LOCAL uint32_t bits32(const uint8_t* bits, int64_t at, int64_t n) {
    uint32_t word = 0;
    const int64_t bytes = lesser(4, (n - at + 7) / 8);
    for (int64_t j = 0; j < bytes; ++j) word |= uint32_t(bits[at / 8 + j]) << (8 * j);
    return word;
}

// Handles the elements of a block that fill whole vectors. Returns their number.
#if defined(__AVX512F__)
GRACE_LOCAL int64_t binary_vectors(const uint8_t* const* bits, const float* levels, int ranks, const float* base,
                                   float* target, int64_t at, int64_t length) {
    int64_t i = 0;
    for (; i + 16 <= length; i += 16) {
        const auto carried = [&](int r) {
            uint16_t mask;
            memcpy(&mask, bits[r] + (at + i) / 8, sizeof(mask));
            return _mm512_mask_blend_ps(mask, _mm512_set1_ps(levels[2 * r]), _mm512_set1_ps(levels[2 * r + 1]));
        };
        __m512 sum = base == nullptr ? carried(0) : _mm512_add_ps(_mm512_loadu_ps(base + i), carried(0));
        for (int r = 1; r < ranks; ++r) sum = _mm512_add_ps(sum, carried(r));
        _mm512_storeu_ps(target + i, sum);
    }
    return i;
}
GRACE_LOCAL int64_t binary_vectors(const uint8_t* const*, const double*, int, const double*, double*, int64_t, int64_t) {
    return 0;
}
#else
template <class T>
GRACE_LOCAL int64_t binary_vectors(const uint8_t* const*, const T*, int, const T*, T*, int64_t, int64_t) {
    return 0;
}
#endif

// Writes base + value, or value without a base, for up to 32 elements from element i of a block on.
template <class T>
GRACE_LOCAL void add_values(const T* value, const T* base, T* target, int64_t i, int64_t length) {
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

template <class T>
static void binary_sum(const uint8_t* const* bits, const T* levels, int ranks, const T* onto, T factor, T* out,
                       int64_t n, bool around) {
    using Word = typename Format<T>::Word;
    in_blocks(out, n, around, [&](int64_t at, int64_t length, T* target) {
        const T* from = onto == nullptr ? nullptr : onto + at;
        const int64_t done = binary_vectors(bits, levels, ranks, from, target, at, length);
        for (int r = 0; r < ranks; ++r) {
            const Word low = bits_as<Word>(levels[2 * r]), differ = low ^ bits_as<Word>(levels[2 * r + 1]);
            const T* base = r > 0 ? target : from;
            for (int64_t i = done; i < length; i += 32) {
                alignas(64) T value[32];
                const uint32_t word = bits32(bits[r], at + i, n);
                for (uint32_t j = 0; j < 32; ++j) {
                    value[j] = bits_as<T>(low ^ (differ & (Word(0) - Word(word >> j & 1u))));
                }
                add_values(value, base, target, i, length);
            }
        }
        scale(target, factor, length);
    });
}

// Adds the elements of some columns to their sums, in the order of the rows. Returns the number of columns.
template <class T>
GRACE_LOCAL int64_t add_columns(const T* x, int64_t stride, int64_t rows, int64_t, T threshold, double* count,
                                double* high, double* low) {
    using Values = typename Eight<T>::Values;
    using Words = typename Eight<T>::Words;
    EightDoubles sum, above_sum, below_sum;
    memcpy(&sum, count, sizeof(sum));
    memcpy(&above_sum, high, sizeof(sum));
    memcpy(&below_sum, low, sizeof(sum));
    Words counted = {};
    for (int64_t r = 0; r < rows; ++r) {
        Values value;
        memcpy(&value, x + r * stride, sizeof(value));
        const Words above = value >= threshold;
        counted -= above;
        above_sum += __builtin_convertvector((Values)((Words)value & above), EightDoubles);
        below_sum += __builtin_convertvector((Values)((Words)value & ~above), EightDoubles);
    }
    sum += __builtin_convertvector(counted, EightDoubles);
    memcpy(count, &sum, sizeof(sum));
    memcpy(high, &above_sum, sizeof(sum));
    memcpy(low, &below_sum, sizeof(sum));
    return 8;
}
#if defined(__AVX512F__)
// Whole cache lines, `groups` times 8 columns: rows whose lines share a set of the cache would displace each other.
template <int groups>
GRACE_LOCAL int64_t add_groups(const float* x, int64_t stride, int64_t rows, float threshold, double* count,
                               double* high, double* low) {
    const __m512d one = _mm512_set1_pd(1.0), edge = _mm512_set1_pd(double(threshold));
    __m512d sum[groups], above_sum[groups], below_sum[groups];
#pragma GCC unroll 2
    for (int g = 0; g < groups; ++g) {
        sum[g] = _mm512_loadu_pd(count + 8 * g);
        above_sum[g] = _mm512_loadu_pd(high + 8 * g);
        below_sum[g] = _mm512_loadu_pd(low + 8 * g);
    }
    for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 2
        for (int g = 0; g < groups; ++g) {
            const __m512d value = _mm512_cvtps_pd(_mm256_loadu_ps(x + r * stride + 8 * g));
            const __mmask8 above = _mm512_cmp_pd_mask(value, edge, _CMP_GE_OQ);
            sum[g] = _mm512_mask_add_pd(sum[g], above, sum[g], one);
            above_sum[g] = _mm512_mask_add_pd(above_sum[g], above, above_sum[g], value);
            below_sum[g] = _mm512_mask_add_pd(below_sum[g], __mmask8(~above), below_sum[g], value);
        }
    }
#pragma GCC unroll 2
    for (int g = 0; g < groups; ++g) {
        _mm512_storeu_pd(count + 8 * g, sum[g]);
        _mm512_storeu_pd(high + 8 * g, above_sum[g]);
        _mm512_storeu_pd(low + 8 * g, below_sum[g]);
    }
    return 8 * groups;
}
GRACE_LOCAL int64_t add_columns(const float* x, int64_t stride, int64_t rows, int64_t left, float threshold,
                                double* count, double* high, double* low) {
    return left >= 16 ? add_groups<2>(x, stride, rows, threshold, count, high, low)
                      : add_groups<1>(x, stride, rows, threshold, count, high, low);
}
#endif

template <class T>
static void binarize_columns(const T* x, T threshold, uint8_t* bits, int64_t n, const Tile* tile, double* sums) {
    const int64_t columns = tile->columns, width = tile->end - tile->begin;
    double *count = sums, *high = sums + columns, *low = sums + 2 * columns;
    for (int64_t j = 0; j < width; ++j) count[j] = high[j] = low[j] = 0;
    // Eight rows at once: the second pass reads them from the cache, and each sum is loaded and stored once for them.
    for (int64_t first = tile->first; first < tile->last; first += 8) {
        const int64_t rows = lesser(8, tile->last - first);
        if (width == columns) {
            binarize(x + first * columns, threshold, bits + first * columns / 8, rows * columns);
        } else {
            for (int64_t row = first; row < first + rows; ++row) {
                // From one whole byte to another: a byte that two tiles share belongs to the one it ends in.
                const int64_t from = (row * columns + tile->begin + 7) / 8 * 8;
                const int64_t to = lesser(n, (row * columns + tile->end + 7) / 8 * 8);
                if (from < to) binarize(x + from, threshold, bits + from / 8, to - from);
            }
        }
        const T* at = x + first * columns + tile->begin;
        // In short rows, the processor itself fetches the next rows in time.
        const int64_t ahead = columns < kBlock ? 0 : lesser(16, tile->last - first);
        int64_t j = 0;
        while (j + 8 <= width) {
            if (j * int64_t(sizeof(T)) % 64 == 0) {
                for (int64_t r = 8; r < ahead; ++r) __builtin_prefetch(at + r * columns + j);
            }
            j += add_columns(at + j, columns, rows, width - j, threshold, count + j, high + j, low + j);
        }
        for (; j < width; ++j) {
            for (int64_t r = 0; r < rows; ++r) {
                const T value = at[r * columns + j];
                const bool above = value >= threshold;
                count[j] += above ? 1.0 : 0.0;
                (above ? high : low)[j] += double(value);
            }
        }
    }
}

// Handles the elements of a block that fill whole vectors. Returns their number.
#if defined(__AVX512F__)
GRACE_LOCAL int64_t column_vectors(const uint8_t* const* bits, const float* const* levels, int64_t column, int ranks,
                                   const float* base, float* target, int64_t at, int64_t length) {
    int64_t i = 0;
    for (; i + 16 <= length; i += 16) {
        const auto carried = [&](int r) {
            uint16_t mask;
            memcpy(&mask, bits[r] + (at + i) / 8, sizeof(mask));
            return _mm512_mask_blend_ps(mask, _mm512_loadu_ps(levels[2 * r] + column + i),
                                        _mm512_loadu_ps(levels[2 * r + 1] + column + i));
        };
        // The levels, which begin again with every row, keep the processor from seeing this stream.
        if (base != nullptr) __builtin_prefetch(base + i + kBlock, 1);
        __m512 sum = base == nullptr ? carried(0) : _mm512_add_ps(_mm512_loadu_ps(base + i), carried(0));
        for (int r = 1; r < ranks; ++r) sum = _mm512_add_ps(sum, carried(r));
        _mm512_storeu_ps(target + i, sum);
    }
    return i;
}
GRACE_LOCAL int64_t column_vectors(const uint8_t* const*, const double* const*, int64_t, int, const double*, double*,
                                   int64_t, int64_t) {
    return 0;
}
#else
template <class T>
GRACE_LOCAL int64_t column_vectors(const uint8_t* const*, const T* const*, int64_t, int, const T*, T*, int64_t, int64_t) {
    return 0;
}
#endif

template <class T>
static void column_sum(const uint8_t* const* bits, const T* const* levels, int64_t columns, int ranks, int64_t n,
                       const T* onto, T* out, int64_t begin, int64_t end, bool around) {
    using Word = typename Format<T>::Word;
    in_blocks(out + begin, end - begin, around, [&](int64_t from, int64_t length, T* target) {
        const int64_t at = begin + from, column = at % columns;
        const T* start = onto == nullptr ? nullptr : onto + at;
        const int64_t done = column_vectors(bits, levels, column, ranks, start, target, at, length);
        for (int r = 0; r < ranks; ++r) {
            const T *low = levels[2 * r] + column, *high = levels[2 * r + 1] + column;
            const T* base = r > 0 ? target : start;
            for (int64_t i = done; i < length; i += 32) {
                alignas(64) T value[32];
                const uint32_t word = bits32(bits[r], at + i, n);
                for (uint32_t j = 0; j < 32; ++j) {
                    const Word zero = bits_as<Word>(low[i + j]), differ = zero ^ bits_as<Word>(high[i + j]);
                    value[j] = bits_as<T>(zero ^ (differ & (Word(0) - Word(word >> j & 1u))));
                }
                add_values(value, base, target, i, length);
            }
        }
    });
}

template <class T>
static void majority(const uint8_t* const* bits, int ranks, T* out, int64_t n, bool around) {
    if (ranks <= 2) {
        // The sum of votes of 1 or 1/2.
        const T vote = T(1) / T(ranks), levels[4] = {-vote, vote, -vote, vote};
        return binary_sum(bits, levels, ranks, static_cast<const T*>(nullptr), T(1), out, n, around);
    }
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

// --- packing ---------------------------------------------------------------------------------------------------------

// Packs eight codes of `bits` bits, one per byte, into one word, and back.
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

// Reads the first `bytes` (at most 8) bytes at `from`, in little-endian order, and writes them back.
GRACE_LOCAL uint64_t load_bytes(const uint8_t* from, int64_t bytes) {
    uint64_t word = 0;
    for (int64_t j = 0; j < bytes; ++j) word |= uint64_t(from[j]) << (8 * j);
    return word;
}

GRACE_LOCAL void store_bytes(uint64_t word, uint8_t* to, int64_t bytes) {
    for (int64_t j = 0; j < bytes; ++j) to[j] = uint8_t(word >> (8 * j));
}

// Packs 64 codes of 2 or 4 bits at a time, and back. Return the number of codes.
#if defined(__AVX512BW__)
template <int bits> GRACE_LOCAL int64_t pack_vectors(const uint8_t* codes, int64_t n, uint8_t* out) {
    if constexpr (bits != 2 && bits != 4) return 0;
    const __m512i mask = _mm512_set1_epi8((1 << bits) - 1), pairs = _mm512_set1_epi16(1 | 1 << (8 + bits));
    int64_t i = 0;
    for (; i + 64 <= n; i += 64, out += 8 * bits) {
        // The products put one code of a pair above the other, and then one pair above the other.
        const __m512i two = _mm512_maddubs_epi16(_mm512_and_si512(_mm512_loadu_si512(codes + i), mask), pairs);
        if constexpr (bits == 4) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi16_epi8(two));
        } else {
            const __m512i four = _mm512_madd_epi16(two, _mm512_set1_epi32(1 | 1 << 20));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(four));
        }
    }
    return i;
}

template <int bits> GRACE_LOCAL int64_t unpack_vectors(const uint8_t* data, int64_t n, uint8_t* codes) {
    if constexpr (bits != 2 && bits != 4) return 0;
    int64_t i = 0;
    for (; i + 64 <= n; i += 64, data += 8 * bits) {
        __m512i all;
        if constexpr (bits == 4) {
            const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data)));
            all = _mm512_or_si512(bytes, _mm512_slli_epi16(bytes, 4));
        } else {
            const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
            const __m512i halves = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
            all = _mm512_or_si512(halves, _mm512_slli_epi32(halves, 6));
        }
        _mm512_storeu_si512(codes + i, _mm512_and_si512(all, _mm512_set1_epi8((1 << bits) - 1)));
    }
    return i;
}
#else
template <int bits> GRACE_LOCAL int64_t pack_vectors(const uint8_t*, int64_t, uint8_t*) { return 0; }
template <int bits> GRACE_LOCAL int64_t unpack_vectors(const uint8_t*, int64_t, uint8_t*) { return 0; }
#endif

template <int bits> GRACE_LOCAL void pack_by(const uint8_t* codes, int64_t n, uint8_t* out) {
    int64_t i = pack_vectors<bits>(codes, n, out);
    out += i / 8 * bits;
    for (; i + 8 <= n; i += 8, out += bits) {
        uint64_t word;
        memcpy(&word, codes + i, 8);
        store_bytes(gathered(word, bits), out, bits);
    }
    if (i < n) store_bytes(gathered(load_bytes(codes + i, n - i), bits), out, ((n - i) * bits + 7) / 8);
}

template <int bits> GRACE_LOCAL void unpack_by(const uint8_t* data, int64_t n, uint8_t* codes) {
    int64_t i = unpack_vectors<bits>(data, n, codes);
    data += i / 8 * bits;
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

// --- integers in lanes of a word -------------------------------------------------------------------------------------

template <class Code>
static void pack_lanes(const Code* x, int64_t n, int lanes, int64_t begin, int64_t end, int32_t* words) {
    const int64_t count = (n + lanes - 1) / lanes;
    const int bits = 32 / lanes;
    alignas(64) uint32_t word[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t length = lesser(kBlock, end - at);
        for (int64_t i = 0; i < length; ++i) word[i] = uint32_t(int32_t(x[at + i]));
        for (int lane = 1; lane < lanes; ++lane) {
            // The last lanes may have no integers for the last words.
            const int64_t first = lane * count + at, there = lesser(length, n - first);
            const int shift = lane * bits;
            for (int64_t i = 0; i < there; ++i) word[i] += uint32_t(int32_t(x[first + i])) << shift;
        }
        memcpy(words + at, word, size_t(length) * sizeof(int32_t));
    }
}

template <class Code>
static void unpack_lanes(const int32_t* words, int64_t n, int lanes, int64_t begin, int64_t end, Code* out) {
    const int64_t count = (n + lanes - 1) / lanes;
    const uint32_t halves = halves_of(lanes);
    alignas(64) uint32_t word[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t length = lesser(kBlock, end - at);
        for (int64_t i = 0; i < length; ++i) word[i] = uint32_t(words[at + i]) + halves;
        for (int lane = 0; lane < lanes; ++lane) {
            const int64_t first = lane * count + at, there = lesser(length, n - first);
            for (int64_t i = 0; i < there; ++i) out[first + i] = Code(lane_of(word[i], lane, lanes));
        }
    }
}

}  // namespace GRACE_ISA
}  // namespace grace
