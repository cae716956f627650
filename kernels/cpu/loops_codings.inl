// Powers of two, tables, ternary digits, numbers of several widths and leading bits. Included by loops.inl.

#include "grace/leading.h"

namespace grace {
namespace GRACE_ISA {

// out = factor (onto + sum over ranks of the values that decode(rank, at, length, values) writes), for elements at .. at
// + length - 1. Before, vectors(rank, at, length, base, target) adds the values of the first elements to `base`, which may
// be null, and returns their number, a multiple of 16. decode gets the rest.
template <class T, class Vectors, class Decode>
GRACE_LOCAL void sum_ranks(int ranks, const T* onto, T* out, int64_t begin, int64_t end, bool around, Vectors vectors,
                           Decode decode, T factor = T(1)) {
    in_blocks(out + begin, end - begin, around, [&](int64_t from, int64_t length, T* target) {
        const int64_t at = begin + from;
        for (int r = 0; r < ranks; ++r) {
            const T* base = r > 0 ? target : onto == nullptr ? nullptr : onto + at;
            const int64_t done = vectors(r, at, length, base, target), rest = length - done;
            if (rest == 0) continue;
            if (base == nullptr) {
                decode(r, at + done, rest, target + done);
                continue;
            }
            alignas(64) T values[kBlock];
            decode(r, at + done, rest, values);
            for (int64_t i = 0; i < rest; ++i) target[done + i] = base[done + i] + values[i];
        }
        scale(target, factor, length);
    });
}

// For decoders without vectors.
template <class T> struct NoVectors {
    GRACE_MEMBER int64_t operator()(int, int64_t, int64_t, const T*, T*) const { return 0; }
};

// --- powers of two ---------------------------------------------------------------------------------------------------

template <class T>
static bool natural_rises(const T* x, const RandomKey* key, int32_t exponent, int64_t begin, int64_t end) {
    alignas(64) uint32_t random[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t length = lesser(kBlock, end - at);
        if (int32_t(magnitude_bits(max_abs(x + at, length)) >> Format<T>::mantissa) < exponent) continue;
        words(*key, uint32_t(at / 4), (length + 3) / 4, random);
        int32_t most = 0;
        for (int64_t i = 0; i < length; ++i) {
            const int32_t mine = natural_exponent(x[at + i], random[i]);
            most = mine > most ? mine : most;
        }
        if (most > exponent) return true;
    }
    return false;
}

#if defined(__AVX512F__)
// Writes exponents and signs for groups of 64 elements, and the bits of the largest magnitude. Returns the number of
// these elements. Random words and elements are read side by side, so that neither waits for the other.
GRACE_LOCAL int64_t natural_groups(const float* x, const RandomKey& key, int64_t begin, int64_t end, uint8_t* low,
                                   uint8_t* high, uint32_t* largest) {
    const RandomStream stream(key);
    const __m512i size = _mm512_set1_epi32(INT32_MAX), highest = _mm512_set1_epi32(254);
    __m512i most = _mm512_setzero_si512();
    int64_t at = begin;
    for (; at + 64 <= end; at += 64, low += 64, high += 8) {
        fetch_ahead<64>(x + at);
        __m512i random[4];
        stream.draw(uint32_t(at / 4), random);
        uint64_t signs = 0;
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const __m512i word = _mm512_loadu_si512(x + at + 16 * j), own = _mm512_and_si512(word, size);
            most = _mm512_max_epu32(most, own);
            signs |= uint64_t(_mm512_movepi32_mask(word)) << (16 * j);
            const __m512i carried = _mm512_add_epi32(own, _mm512_srli_epi32(random[j], 9));
            store_integers(low + 16 * j, _mm512_min_epu32(_mm512_srli_epi32(carried, 23), highest));
        }
        store_mask(signs, high, 8);
    }
    *largest = _mm512_reduce_max_epu32(most);
    return at - begin;
}
#endif

template <class T>
static T natural_codes(const T* x, const RandomKey* key, int32_t base, int64_t begin, int64_t end, uint8_t* low,
                       uint8_t* high) {
    using Word = typename Format<T>::Word;
    Word most = 0;
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(float)) {
        if (base < 0) {
            const int64_t done = natural_groups(x, *key, begin, end, low, high, &most);
            begin += done;
            low += done;
            high += done / 8;
        }
    }
#endif
    constexpr int exponent = Format<T>::exponent, sign = exponent + Format<T>::mantissa;
    const T inverse = natural_inverse<T>(base < 0 ? 0 : base);
    alignas(64) uint32_t random[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t length = lesser(kBlock, end - at);
        words(*key, uint32_t(at / 4), (length + 3) / 4, random);
        const T* mine = x + at;
        const Word here = magnitude_bits(max_abs(mine, length));
        most = here > most ? here : most;
        uint8_t* codes = low + (at - begin);
        if (base >= 0) {
            for (int64_t i = 0; i < length; ++i) {
                const int32_t own = natural_exponent(mine[i], random[i]);
                const int32_t code = natural_clipped(mine[i], own, base, inverse, random[i]);
                codes[i] = uint8_t(uint32_t(code) | uint32_t(bits_as<Word>(mine[i]) >> sign) << 7);
            }
        } else if constexpr (exponent > 8) {
            alignas(64) uint8_t rest[kBlock];
            for (int64_t i = 0; i < length; ++i) {
                const int32_t code = natural_exponent(mine[i], random[i]);
                codes[i] = uint8_t(code);
                rest[i] = uint8_t(uint32_t(code) >> 8 | uint32_t(bits_as<Word>(mine[i]) >> sign) << (exponent - 8));
            }
            pack(rest, exponent - 7, length, high + (at - begin) / 8 * (exponent - 7));
        } else {
            for (int64_t i = 0; i < length; ++i) codes[i] = uint8_t(natural_exponent(mine[i], random[i]));
            uint8_t* signs = high + (at - begin) / 8;
            int64_t i = 0;
            for (; i + 64 <= length; i += 64) store_mask(signs64(mine + i), signs + i / 8, 8);
            for (uint8_t* byte = signs + i / 8; i < length; i += 8) {
                uint32_t bits = 0;
                for (int64_t j = 0; j < lesser(8, length - i); ++j) {
                    bits |= uint32_t(bits_as<Word>(mine[i + j]) >> sign) << j;
                }
                *byte++ = uint8_t(bits);
            }
        }
    }
    return bits_as<T>(most);
}

// Adds the values of whole vectors to `base`, which may be null. Returns their number.
template <class T>
GRACE_LOCAL int64_t natural_vectors(const Powers&, uint32_t, int64_t, int64_t, int64_t, const T*, T*) {
    return 0;
}
#if defined(__AVX512F__)
GRACE_LOCAL int64_t natural_vectors(const Powers& rank, uint32_t flip, int64_t n, int64_t at, int64_t length,
                                    const float* base, float* target) {
    const __m512i minus = _mm512_set1_epi32(INT32_MIN);
    const uint16_t flipped = flip != 0 ? 0xFFFF : 0;
    int64_t i = 0;
    for (; i + 16 <= length; i += 16) {
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rank.codes + at + i));
        uint16_t signs;
        memcpy(&signs, rank.codes + n + (at + i) / 8, sizeof(signs));
        const __m512i size = _mm512_slli_epi32(_mm512_cvtepu8_epi32(codes), 23);
        const __mmask16 negative = __mmask16(signs ^ flipped);
        const __m512 sent = _mm512_castsi512_ps(_mm512_mask_xor_epi32(size, negative, size, minus));
        _mm512_storeu_ps(target + i, base == nullptr ? sent : _mm512_add_ps(_mm512_loadu_ps(base + i), sent));
    }
    return i;
}
#endif

template <class T>
static void natural_sum(const Powers* ranks, int count, bool clipped, bool negate, int64_t n, const T* onto,
                        T factor, T* out, int64_t begin, int64_t end, bool around) {
    const uint32_t flip = negate ? 1 : 0;
    const auto vectors = [&](int r, int64_t at, int64_t length, const T* base, T* target) {
        return clipped ? 0 : natural_vectors(ranks[r], flip, n, at, length, base, target);
    };
    const auto decode = [&](int r, int64_t at, int64_t length, T* values) {
        const uint8_t *data = ranks[r].codes, *codes = data + at;
        if (clipped) {
            const uint32_t base = ranks[r].base;
            for (int64_t i = 0; i < length; ++i) {
                const uint32_t code = codes[i] & 127u;
                values[i] = natural_value<T>(code + (code > 0 ? base : 0u), uint32_t(codes[i] >> 7) ^ flip);
            }
        } else if constexpr (Format<T>::exponent > 8) {
            alignas(64) uint8_t rest[kBlock];
            unpack(data + n + at / 2, 4, length, rest);
            for (int64_t i = 0; i < length; ++i) {
                values[i] = natural_value<T>(codes[i] | (rest[i] & 7u) << 8, uint32_t(rest[i] >> 3) ^ flip);
            }
        } else {
            int64_t i = 0;
            for (; i + 32 <= length; i += 32) {
                const uint32_t signs = bits32(data + n, at + i, n);
                for (uint32_t j = 0; j < 32; ++j) {
                    values[i + j] = natural_value<T>(codes[i + j], (signs >> j & 1u) ^ flip);
                }
            }
            for (; i < length; ++i) {
                const uint32_t sign = uint32_t(data[n + (at + i) / 8]) >> ((at + i) % 8) & 1u;
                values[i] = natural_value<T>(codes[i], sign ^ flip);
            }
        }
    };
    sum_ranks(count, onto, out, begin, end, around, vectors, decode, factor);
}

// --- tables ----------------------------------------------------------------------------------------------------------

template <class T> static void table_codes(const T* x, const Edges<T>* table, int64_t n, uint8_t* codes) {
    using Signed = typename Format<T>::Signed;
    const Edges<T> edges = *table;
    int64_t i = 0;
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(float)) {
        const EdgeTree tree(edges.edges);
        for (; i + 64 <= n; i += 64) {
            fetch_ahead<64>(x + i);
            tree.codes64(x + i, codes + i);
        }
    }
#endif
    if (edges.cells > 0) {
        alignas(64) int32_t cells[kBlock];
        const Signed last = Signed(edges.cells - 1);
        for (; i < n; i += kBlock) {
            const int64_t length = lesser(kBlock, n - i);
            const T* mine = x + i;
            uint8_t* out = codes + i;
            for (int64_t j = 0; j < length; ++j) {
                Signed cell = (bits_as<Signed>(magnitude(mine[j])) >> edges.shift) - edges.lowest;
                cell = cell < 0 ? 0 : cell;
                cells[j] = int32_t(cell > last ? last : cell);
            }
            for (int64_t j = 0; j < length; ++j) {
                uint64_t cell = uint32_t(cells[j]);
                GRACE_ONE_BY_ONE(cell);
                // The bits of magnitudes have the same order as the magnitudes, with NaN last.
                const bool reached = Signed(magnitude_bits(mine[j])) >= bits_as<Signed>(edges.inside[cell]);
                out[j] = uint8_t(edges.below[cell] + uint32_t(reached));
            }
            for (int64_t j = 0; j < length; ++j) out[j] = uint8_t(out[j] | uint32_t(mine[j] < 0) << 7);
        }
        return;
    }
    for (; i < n; ++i) codes[i] = uint8_t(uint32_t(nearest(magnitude(x[i]), edges.edges)) | uint32_t(x[i] < 0) << 7);
}

template <class T>
static void table_codes_of_buckets(const T* x, const T* scales, int64_t width, const Edges<T>* edges, int64_t begin,
                                   int64_t end, uint8_t* codes) {
    alignas(64) T shares[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t length = lesser(kBlock, end - at);
        for (int64_t i = 0; i < length;) {
            const int64_t bucket = (at + i) / width, stop = lesser(length, (bucket + 1) * width - at);
            const T safe = scales[bucket] > 0 ? scales[bucket] : T(1);
            for (; i < stop; ++i) shares[i] = magnitude(x[at + i]) / safe;
        }
        table_codes(shares, edges, length, codes + at);
        // A share may vanish, so the sign is that of the element.
        for (int64_t i = 0; i < length; ++i) codes[at + i] = uint8_t(codes[at + i] | uint32_t(x[at + i] < 0) << 7);
    }
}

// Adds the numbers of whole vectors to `base`, which may be null. Returns their number.
template <class T> GRACE_LOCAL int64_t table_vectors(const uint8_t*, const T*, int64_t, const T*, T*) { return 0; }
#if defined(__AVX512F__)
GRACE_LOCAL int64_t table_vectors(const uint8_t* codes, const float* values, int64_t length, const float* base,
                                  float* target) {
    const Lookup lookup(values);
    int64_t i = 0;
    for (; i + 16 <= length; i += 16) {
        const __m512 found = lookup.of(codes + i);
        if (base != nullptr) fetch_ahead<16>(base + i);
        _mm512_storeu_ps(target + i, base == nullptr ? found : _mm512_add_ps(_mm512_loadu_ps(base + i), found));
    }
    return i;
}
#endif

template <class T>
static void table_sum(const uint8_t* const* codes, const T* values, int ranks, const T* onto, T* out, int64_t begin,
                      int64_t end, bool around) {
    const auto vectors = [&](int r, int64_t at, int64_t length, const T* base, T* target) {
        return table_vectors(codes[r] + at, values + 256 * r, length, base, target);
    };
    sum_ranks(ranks, onto, out, begin, end, around, vectors, [&](int r, int64_t at, int64_t length, T* decoded) {
        for (int64_t i = 0; i < length; ++i) {
            uint64_t code = codes[r][at + i];
            GRACE_ONE_BY_ONE(code);
            decoded[i] = values[256 * r + int64_t(code)];
        }
    });
}

template <class T>
static void table_sum_of_buckets(const Coded<T>* ranks, int count, int64_t width, const T* table, const T* onto, T* out,
                                 int64_t begin, int64_t end, bool around) {
    T both[256];
    for (int i = 0; i < 128; ++i) {
        both[i] = table[i];
        both[128 + i] = -table[i];
    }
#if defined(__AVX512F__)
    // The table stays in registers.
    struct None {};
    const auto lookup = [&] {
        if constexpr (sizeof(T) == sizeof(float)) {
            return Lookup(both);
        } else {
            return None{};
        }
    }();
#endif
    sum_ranks(count, onto, out, begin, end, around, NoVectors<T>(), [&](int r, int64_t at, int64_t length, T* decoded) {
        const uint8_t* from = ranks[r].codes + at;
        int64_t i = 0;
#if defined(__AVX512F__)
        if constexpr (sizeof(T) == sizeof(float)) {
            for (; i + 16 <= length; i += 16) _mm512_storeu_ps(decoded + i, lookup.of(from + i));
        }
#endif
        for (; i < length; ++i) {
            uint64_t code = from[i];
            GRACE_ONE_BY_ONE(code);
            decoded[i] = both[code];
        }
        for (i = 0; i < length;) {
            const int64_t bucket = (at + i) / width, stop = lesser(length, (bucket + 1) * width - at);
            const T scale = ranks[r].scales[bucket];
            for (; i < stop; ++i) decoded[i] = decoded[i] * scale;
        }
    });
}

// --- bins ------------------------------------------------------------------------------------------------------------

template <class T>
static void select_in_bins(const T* x, const T* gradient, const T* maxima, int64_t width, int64_t begin, int64_t n,
                           Selected<T>* into) {
    // Zeros take the place of the others. Compilers vectorize this step.
    alignas(64) T kept[kBlock];
    for (int64_t at = begin; at < begin + n; at += kBlock) {
        const int64_t length = lesser(kBlock, begin + n - at);
        for (int64_t i = 0; i < length; i += 64) {
            fetch_ahead<64>(x + at + i);
            fetch_ahead<64>(gradient + at + i);
        }
        for (int64_t i = 0; i < length;) {
            const int64_t bin = (at + i) / width, stop = lesser(length, (bin + 1) * width - at);
            const T most = maxima[bin];
            for (; i < stop; ++i) {
                const T own = x[at + i];
                kept[i] = magnitude(own + gradient[at + i]) >= most ? own : T(0);
            }
        }
        select_by<Test::size_above>(kept, T(0), false, int32_t(at), length, into);
    }
}

// --- ternary digits --------------------------------------------------------------------------------------------------

// The value of five bits (first element lowest) as ternary digits of a byte (first digit highest).
struct DigitSums {
    uint8_t of[32];
};

constexpr DigitSums digit_sums() {
    DigitSums sums{};
    for (int bits = 0; bits < 32; ++bits) {
        int sum = 0;
        for (int j = 0, power = 81; j < 5; ++j, power /= 3) sum += (bits >> j & 1) * power;
        sums.of[bits] = uint8_t(sum);
    }
    return sums;
}

template <class T> static void ternary_bytes(const T* x, T half, int64_t n, uint8_t* bytes) {
    static constexpr DigitSums sums = digit_sums();
    // 60 of 64 comparisons are used.
    for (int64_t i = 0; i < n; i += 60) {
        const int64_t left = n - i;
        const int rest = int(lesser(left, 60));
        uint64_t up = left >= 64 ? mask64<Test::at_least>(x + i, half) : mask_of<Test::at_least>(x + i, half, rest);
        uint64_t down = left >= 64 ? mask64<Test::at_most>(x + i, -half) : mask_of<Test::at_most>(x + i, -half, rest);
        for (int j = 0; j < rest; j += 5, up >>= 5, down >>= 5) {
            *bytes++ = uint8_t(121u + sums.of[up & 31] - sums.of[down & 31]);
        }
    }
}

template <class T>
static void ternary_sum(const uint8_t* const* bytes, const T* values, int ranks, const T* onto, T* out, int64_t begin,
                        int64_t end, bool around) {
    sum_ranks(ranks, onto, out, begin, end, around, NoVectors<T>(), [&](int r, int64_t at, int64_t length, T* decoded) {
        alignas(64) T buffer[kBlock + 16];
        const T* mine = values + 8 * 243 * r;
        const int64_t first = at / 5, last = (at + length + 4) / 5;
        T* to = buffer;
        // Write eight at a time; the next byte overwrites three of them.
        for (int64_t i = first; i < last; ++i, to += 5) memcpy(to, mine + 8 * bytes[r][i], 8 * sizeof(T));
        memcpy(decoded, buffer + (at - 5 * first), size_t(length) * sizeof(T));
    });
}

// --- numbers of several widths ---------------------------------------------------------------------------------------

// Gathers the even bits of a word.
GRACE_LOCAL uint64_t even_bits(uint64_t word) {
    word &= 0x5555555555555555u;
    word = (word | word >> 1) & 0x3333333333333333u;
    word = (word | word >> 2) & 0x0F0F0F0F0F0F0F0Fu;
    word = (word | word >> 4) & 0x00FF00FF00FF00FFu;
    word = (word | word >> 8) & 0x0000FFFF0000FFFFu;
    return (word | word >> 16) & 0xFFFFFFFFu;
}

// The inverse: puts zeros between 32 bits.
GRACE_LOCAL uint64_t spaced(uint64_t word) {
    word &= 0xFFFFFFFFu;
    word = (word | word << 16) & 0x0000FFFF0000FFFFu;
    word = (word | word << 8) & 0x00FF00FF00FF00FFu;
    word = (word | word << 4) & 0x0F0F0F0F0F0F0F0Fu;
    word = (word | word << 2) & 0x3333333333333333u;
    return (word | word << 1) & 0x5555555555555555u;
}

// Splits up to 64 packed tags into one mask per tag: bytes, words, full.
struct TagMasks {
    uint64_t of[3];
};

GRACE_LOCAL TagMasks tag_masks(const uint8_t* tags, int64_t n) {
    uint64_t packed[2] = {0, 0};
    if (n >= 64) {
        memcpy(packed, tags, 16);
    } else {
        for (int64_t j = 0; 4 * j < n; ++j) packed[j / 8] |= uint64_t(tags[j]) << (8 * (j % 8));
    }
    const uint64_t inside = n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1;
    const uint64_t low = (even_bits(packed[0]) | even_bits(packed[1]) << 32) & inside;
    const uint64_t high = (even_bits(packed[0] >> 1) | even_bits(packed[1] >> 1) << 32) & inside;
    return {{low & ~high, high & ~low, low & high}};
}

static void count_tags(const uint8_t* tags, int64_t n, int64_t* counts) {
    for (int64_t i = 0; i < n; i += 64) {
        const TagMasks masks = tag_masks(tags + i / 4, n - i);
        for (int t = 0; t < 3; ++t) counts[t + 1] += __builtin_popcountll(masks.of[t]);
    }
}

template <class T>
static void precision_tags(const T* x, T bound, T byte_end, T word_end, int64_t n, uint8_t* tags, int64_t* counts) {
    constexpr Test test = Test::size_at_least;
    for (int64_t i = 0; i < n; i += 64) {
        const uint64_t sent = mask_up_to_64<test>(x + i, bound, n - i);
        const uint64_t more = mask_up_to_64<test>(x + i, byte_end, n - i);
        const uint64_t most = mask_up_to_64<test>(x + i, word_end, n - i);
        // The tag 1 + more + most in binary.
        const uint64_t low = sent & ~(more ^ most), high = sent & (more | most);
        const uint64_t packed[2] = {spaced(low) | spaced(high) << 1, spaced(low >> 32) | spaced(high >> 32) << 1};
        for (int j = 0; j < 16 && i + 4 * j < n; ++j) tags[i / 4 + j] = uint8_t(packed[j / 8] >> (8 * (j % 8)));
        counts[1] += __builtin_popcountll(low & ~high);
        counts[2] += __builtin_popcountll(high & ~low);
        counts[3] += __builtin_popcountll(low & high);
    }
}

template <class T>
static void precision_split(const T* x, T scale, const uint8_t* tags, T byte_steps, T word_steps, int64_t n, T* full,
                            int16_t* words, int8_t* bytes) {
    alignas(64) T found[3][kBlock + 64];
    for (int64_t at = 0; at < n; at += kBlock) {
        const int64_t length = lesser(kBlock, n - at);
        int64_t counts[3] = {0, 0, 0};
        for (int64_t i = 0; i < length; i += 64) {
            const TagMasks masks = tag_masks(tags + (at + i) / 4, length - i);
            alignas(64) T last[64];
            const T* mine = x + at + i;
            if (length - i < 64) {
                for (int64_t j = 0; j < 64; ++j) last[j] = i + j < length ? mine[j] : T(0);
                mine = last;
            }
            for (int t = 0; t < 3; ++t) {
                if (masks.of[t] == 0) continue;
                compact64(mine, masks.of[t], found[t] + counts[t]);
                counts[t] += __builtin_popcountll(masks.of[t]);
            }
        }
        for (int64_t i = 0; i < counts[0]; ++i) bytes[i] = int8_t(int32_t(found[0][i] / scale * byte_steps));
        for (int64_t i = 0; i < counts[1]; ++i) words[i] = int16_t(int32_t(found[1][i] / scale * word_steps));
        for (int64_t i = 0; i < counts[2]; ++i) full[i] = found[2][i] / scale;
        bytes += counts[0];
        words += counts[1];
        full += counts[2];
    }
}

template <class T>
static void precision_sum(Widths<T>* ranks, int count, T byte_step, T word_step, const T* onto, T* out, int64_t n,
                          bool around) {
    const auto decode = [&](int r, int64_t at, int64_t length, T* values) {
        Widths<T>& mine = ranks[r];
        const T scale = *mine.scale;
        TagMasks masks[kBlock / 64];
        int64_t counts[3] = {0, 0, 0};
        for (int64_t i = 0; i < length; i += 64) {
            masks[i / 64] = tag_masks(mine.tags + (at + i) / 4, length - i);
            for (int t = 0; t < 3; ++t) counts[t] += __builtin_popcountll(masks[i / 64].of[t]);
        }
        alignas(64) T numbers[3][kBlock + 64];
        for (int64_t i = 0; i < counts[0]; ++i) numbers[0][i] = T(mine.bytes[i]) * byte_step * scale;
        for (int64_t i = 0; i < counts[1]; ++i) numbers[1][i] = T(mine.words[i]) * word_step * scale;
        for (int64_t i = 0; i < counts[2]; ++i) numbers[2][i] = mine.full[i] * scale;
        mine.bytes += counts[0];
        mine.words += counts[1];
        mine.full += counts[2];
        // Where nothing was sent, 0 times the scale has the sign of the scale.
        const T nothing = T(0) * scale;
        const T* next[3] = {numbers[0], numbers[1], numbers[2]};
        for (int64_t i = 0; i < length; i += 64) {
            alignas(64) T last[64];
            T* to = length - i < 64 ? last : values + i;
            for (int j = 0; j < 64; ++j) to[j] = nothing;
            for (int t = 0; t < 3; ++t) {
                if (masks[i / 64].of[t] == 0) continue;
                spread64(next[t], masks[i / 64].of[t], to);
                next[t] += __builtin_popcountll(masks[i / 64].of[t]);
            }
            if (to == last) memcpy(values + i, last, size_t(length - i) * sizeof(T));
        }
    };
    sum_ranks(count, onto, out, 0, n, around, NoVectors<T>(), decode);
}

// --- leading bits of blocks ------------------------------------------------------------------------------------------

// Appends the codes and bytes of n words of this width, a multiple of 4. The word before the first one is read.
template <int width> GRACE_LOCAL void leading_lists(const uint32_t* words, int64_t n, LeadingLists* into) {
    alignas(64) uint8_t sent[kBlock];
    for (int64_t at = 0; at < n; at += kBlock) {
        const int64_t length = lesser(kBlock, n - at);
        const uint32_t* mine = words + at;
        for (int64_t i = 0; i < length; ++i) sent[i] = uint8_t(leading_sent(mine[i] ^ mine[i - 1], width));
        for (int64_t i = 0; i < length; i += 4) {
            uint32_t byte = 0;
            for (int j = 0; j < 4; ++j) byte |= uint32_t(width - sent[i + j]) << (2 * j);
            *into->leads++ = uint8_t(byte);
        }
        for (int k = 0; k < width; ++k) {
            uint8_t* to = into->bytes[k];
            int64_t i = 0;
#if defined(__AVX512F__)
            for (; i + 16 <= length; i += 16) {
                const __m512i word = _mm512_srlv_epi32(_mm512_loadu_si512(mine + i), _mm512_set1_epi32(8 * k));
                const __m128i counts = _mm_load_si128(reinterpret_cast<const __m128i*>(sent + i));
                const __mmask16 chosen = _mm_cmpgt_epi8_mask(counts, _mm_set1_epi8(char(k)));
                const __m512i found = _mm512_maskz_compress_epi32(chosen, word);
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(found));
                to += __builtin_popcount(chosen);
            }
#endif
            for (; i < length; ++i) {
                *to = uint8_t(mine[i] >> (8 * k));
                to += sent[i] > k ? 1 : 0;
            }
            into->bytes[k] = to;
        }
    }
}

template <class T>
void leading_encode(const T* x, T scale, const LeadingForm* form, uint32_t* words, int64_t begin, int64_t end,
                    float* middles, uint8_t* lengths, LeadingLists* into) {
    const T safe = scale > 0 ? scale : T(1);
    const LeadingForm by = *form;
    ++words;
    for (int64_t block = begin; block < end; ++block) {
        const T* mine = x + block * by.block;
        const int64_t length = lesser(by.block, by.n - block * by.block);
        int32_t low = INT32_MAX, high = INT32_MIN;
        for (int64_t i = 0; i < length; ++i) {
            const int32_t place = ordered_bits(bits_as<int32_t>(float(mine[i] / safe)));
            words[i] = uint32_t(place);
            low = place < low ? place : low;
            high = place > high ? place : high;
        }
        const float middle = leading_middle(bits_as<float>(ordered_bits(low)), bits_as<float>(ordered_bits(high)));
        uint32_t most = 0;
        for (int64_t i = 0; i < length; ++i) {
            const float rest = leading_rest(bits_as<float>(ordered_bits(int32_t(words[i]))), middle);
            words[i] = bits_as<uint32_t>(rest);
            most = magnitude_bits(rest) > most ? magnitude_bits(rest) : most;
        }
        const int kept = leading_length(bits_as<float>(most), by), width = leading_width(kept);
        middles[block] = middle;
        lengths[block] = uint8_t(kept);
        if (kept == 0) continue;
        for (int64_t i = 0; i < length; ++i) words[i] >>= 32 - kept;
        for (int64_t i = length; i < by.block; ++i) words[i] = words[length - 1];
        // All bytes of the first word differ from this one.
        words[-1] = words[0] ^ (~0u >> (32 - 8 * width));
        if (width == 2) {
            leading_lists<2>(words, by.block, into);
        } else if (width == 3) {
            leading_lists<3>(words, by.block, into);
        } else {
            leading_lists<4>(words, by.block, into);
        }
    }
}

// The next n words of this width. A byte that is not sent is that of the last word that sends one.
template <int width>
GRACE_LOCAL void leading_words(const uint8_t* leads, const uint8_t* bytes, LeadingPlace* place, int64_t n,
                               uint32_t* words) {
    LeadingPlace here = *place;
    for (int64_t i = 0; i < n; ++i, ++here.codes) {
        const int sent = width - (leads[here.codes / 4] >> (2 * (here.codes % 4)) & 3);
        uint32_t word = 0;
        for (int k = 0; k < width; ++k) {
            here.bytes[k] += sent > k ? 1 : 0;
            // Only in a damaged payload no word has sent one.
            word |= (here.bytes[k] > 0 ? uint32_t(bytes[here.bytes[k] - 1]) : 0u) << (8 * k);
        }
        words[i] = word;
    }
    *place = here;
}

template <class T>
void leading_sum(const LeadingCodes<T>* ranks, LeadingPlace* places, int count, const LeadingForm* form, const T* onto,
                 T* out, int64_t begin, int64_t end, bool around) {
    const LeadingForm by = *form;
    const auto decode = [&](int r, int64_t at, int64_t length, T* values) {
        const LeadingCodes<T>& mine = ranks[r];
        const T scale = *mine.scale;
        alignas(64) uint32_t words[kBlock];
        for (int64_t i = 0; i < length;) {
            const int64_t block = (at + i) / by.block, n = lesser(length - i, (block + 1) * by.block - at - i);
            const int kept = int(lesser(mine.lengths[block], 32));
            const float middle = mine.middles[block];
            switch (leading_width(kept)) {
                case 1: leading_words<1>(mine.leads, mine.bytes, &places[r], n, words); break;
                case 2: leading_words<2>(mine.leads, mine.bytes, &places[r], n, words); break;
                case 3: leading_words<3>(mine.leads, mine.bytes, &places[r], n, words); break;
                case 4: leading_words<4>(mine.leads, mine.bytes, &places[r], n, words); break;
                default: memset(words, 0, size_t(n) * sizeof(uint32_t));
            }
            for (int64_t j = 0; j < n; ++j) values[i + j] = T(leading_value(words[j], kept, middle)) * scale;
            i += n;
        }
    };
    sum_ranks(count, onto, out, begin * by.block, lesser(end * by.block, by.n), around, NoVectors<T>(), decode);
}

GRACE_MAKE_LOOP(leading_encode)
GRACE_MAKE_LOOP(leading_sum)

}  // namespace GRACE_ISA
}  // namespace grace
