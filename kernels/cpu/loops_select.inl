// Selection of elements. Included by loops.inl.

#include "grace/vertices.h"

namespace grace {
namespace GRACE_ISA {

template <class T>
GRACE_LOCAL int64_t append(const T* x, uint64_t mask, int32_t first, int64_t count, Selected<T>* into) {
    const auto place = [&](int j) {
        into->values[count] = x[j];
        into->indices[count] = first + j;
    };
    // Few of 64 elements pass, and how many is hard to predict: the first two take no branch. Bit 0 replaces a missing
    // one, and what it places is overwritten or beyond the count.
    for (int i = 0; i < 2; ++i) {
        place(__builtin_ctzll(mask | (mask == 0)));
        count += mask != 0;
        mask &= mask - 1;
    }
    for (; mask != 0; mask &= mask - 1) {
        place(__builtin_ctzll(mask));
        ++count;
    }
    return count;
}

template <Test test, class T> GRACE_LOCAL uint64_t mask_up_to_64(const T* x, T bound, int64_t n) {
    return n >= 64 ? mask64<test>(x, bound) : mask_of<test>(x, bound, int(n));
}

template <Test test, class T>
GRACE_LOCAL void select_by(const T* x, T bound, bool nonzero, int32_t first, int64_t n, Selected<T>* into) {
    int64_t count = into->count;
    for (int64_t i = 0; i < n; i += 64) {
        const int64_t length = lesser(64, n - i);
        uint64_t mask = mask_up_to_64<test>(x + i, bound, length);
        if (nonzero) mask &= mask_up_to_64<Test::size_above>(x + i, T(0), length);
        count = append(x + i, mask, first + int32_t(i), count, into);
    }
    into->count = count;
}

template <class T>
GRACE_LOCAL void select_cached(const T* x, T bound, bool strict, bool nonzero, int32_t first, int64_t n,
                               Selected<T>* into) {
    if (strict) {
        select_by<Test::size_above>(x, bound, nonzero, first, n, into);
    } else {
        select_by<Test::size_at_least>(x, bound, nonzero, first, n, into);
    }
}

template <class T>
static void select(const T* x, T bound, bool strict, bool nonzero, int32_t first, int64_t n, Selected<T>* into) {
    for (int64_t at = 0; at < n; at += 64) {
        fetch_ahead<64>(x + at);
        select_cached(x + at, bound, strict, nonzero, first + int32_t(at), lesser(64, n - at), into);
    }
}

template <class T>
static bool sum_select(const T* x, T a, const T* y, T b, T* out, bool around, T bound, bool strict, int32_t first,
                       int64_t n, Selected<T>* into) {
    bool good = true;
    in_blocks(out, n, around, [&](int64_t at, int64_t length, T* target) {
        good &= weighted_sum(x + at, a, y + at, b, target, length, false);
        // The selection reads no memory: the next elements can arrive meanwhile.
        for (int64_t i = at; i < at + length; i += 64) {
            fetch_ahead<64>(x + i);
            fetch_ahead<64>(y + i);
        }
        select_cached(target, bound, strict, false, first + int32_t(at), length, into);
    });
    return good;
}

template <class T>
static void select_powers(const T* x, const T* noise, double alpha, T* most, int32_t first, int64_t n,
                          Selected<T>* into) {
    alignas(64) T kept[kBlock];
    for (int64_t at = 0; at < n; at += kBlock) {
        const int64_t length = lesser(kBlock, n - at);
        const T* clear = x + at;
        if (noise != nullptr) {
            for (int64_t i = 0; i < length; ++i) kept[i] = is_clear(x[at + i], noise[at + i], alpha) ? x[at + i] : T(0);
            clear = kept;
        }
        const T here = max_abs(clear, length);
        *most = magnitude_bits(here) > magnitude_bits(*most) ? here : *most;
        const T bound = least_sent<T>(nearest_exponent(*most));
        select_by<Test::size_at_least>(clear, bound, false, first + int32_t(at), length, into);
    }
}

// The sum in float64, in eight lanes.
template <class T> GRACE_LOCAL double sum_of(const T* x, int64_t n) {
    double sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; ++j) sums[j] += double(x[i + j]);
    }
    for (int j = 0; i < n; ++i, ++j) sums[j] += double(x[i]);
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

template <class T> static void moments(const T* x, T bound, int powers, double* sums, int64_t n) {
    // One step after the other over a block in the cache, because compilers vectorize each of them.
    alignas(64) T kept[kBlock], sizes[kBlock];
    for (int64_t at = 0; at < n; at += kBlock) {
        const int64_t length = lesser(kBlock, n - at);
        int64_t count = 0;
        for (int64_t i = 0; i < length; i += 64) {
            fetch_ahead<64>(x + at + i);
            count += __builtin_popcountll(mask_up_to_64<Test::size_at_least>(x + at + i, bound, length - i));
        }
        sums[0] += double(count);
        if (powers == 0) continue;
        for (int64_t i = 0; i < length; ++i) {
            const T size = magnitude(x[at + i]);
            sizes[i] = size >= bound ? size : T(0);
        }
        sums[1] += sum_of(sizes, length);
        if (powers == 1) continue;
        for (int64_t i = 0; i < length; ++i) kept[i] = x[at + i] > T(0) ? sizes[i] : T(0);
        sums[2] += sum_of(kept, length);
        sums[3] += sum_squares(sizes, length);
    }
}

template <class T>
static void moments_below(const T* x, T bound, T unit, int powers, double* sums, int64_t n) {
    alignas(64) T sizes[kBlock];
    for (int64_t at = 0; at < n; at += kBlock) {
        const int64_t length = lesser(kBlock, n - at);
        int64_t count = length;
        for (int64_t i = 0; i < length; i += 64) {
            fetch_ahead<64>(x + at + i);
            count -= __builtin_popcountll(mask_up_to_64<Test::size_at_least>(x + at + i, bound, length - i));
        }
        sums[0] += double(count);
        for (int64_t i = 0; i < length; ++i) {
            const T size = magnitude(x[at + i]);
            sizes[i] = size < bound ? size * unit : T(0);
        }
        sums[1] += sum_of(sizes, length);
        if (powers > 1) sums[2] += sum_squares(sizes, length);
    }
}

template <class T>
static void draw(const T* x, const Odds* odds, const RandomKey* key, int64_t begin, int64_t n, Selected<T>* into) {
    // A rough comparison finds the few elements that may be drawn, and the exact one decides on them.
    const T rough = T(odds->factor / odds->largest * 1.001), slack = T(1.1920928955078125e-7);
    alignas(64) uint32_t random[kBlock];
    alignas(64) T above[kBlock];
    int64_t count = into->count;
    // `begin` is a multiple of 4, so every block of random words starts at an element.
    for (int64_t at = begin; at < begin + n; at += kBlock) {
        const int64_t length = lesser(kBlock, begin + n - at);
        for (int64_t i = 0; i < length; i += 64) fetch_ahead<64>(x + at + i);
        words(*key, uint32_t(at / 4), (length + 3) / 4, random);
        for (int64_t i = 0; i < length; ++i) above[i] = magnitude(x[at + i]) * rough + (slack - T(uniform(random[i])));
        for (int64_t i = 0; i < length; i += 64) {
            uint64_t mask = mask_up_to_64<Test::at_least>(above + i, T(0), length - i);
            for (; mask != 0; mask &= mask - 1) {
                const int64_t j = i + __builtin_ctzll(mask);
                const T value = x[at + j];
                into->values[count] = value;
                into->indices[count] = int32_t(at + j);
                count += is_drawn(chance_of(value, *odds), random[j]) ? 1 : 0;
            }
        }
    }
    into->count = count;
}

template <class T>
static void drawn_entries(const int32_t* drawn, T scale, T* values, int32_t* indices, int64_t n) {
    for (int64_t i = 0; i < n; ++i) values[i] = drawn[i] < 0 ? -scale : scale;
    for (int64_t i = 0; i < n; ++i) indices[i] = plain_index(drawn[i]);
}

template <class T>
void draw_vertices(const T* x, const T* norms, const Vertices* by, int64_t* ends, int64_t* codes,
                          int64_t* masses, int64_t begin, int64_t end) {
    const int64_t width = by->width, samples = by->samples;
    const int shift = 32 - __builtin_ctzll(uint64_t(width)) - 1;
    // The random words from the vertex `first` on.
    alignas(64) uint32_t random[kBlock];
    int64_t first = -kBlock;
    for (int64_t bucket = begin; bucket < end; ++bucket) {
        const T* mine = x + bucket * width;
        const int64_t length = lesser(width, by->n - bucket * width);
        for (int64_t i = 0; i < length; ++i) ends[i] = share_of(mine[i], norms[bucket]);
        int64_t mass = 0;
        for (int64_t i = 0; i < length; ++i) ends[i] = mass += ends[i];
        for (int64_t i = length; i < width; ++i) ends[i] = mass;
        masses[bucket] = mass;
        const int64_t reach = mass < by->least ? by->least : mass;
        for (int64_t i = bucket * samples; i < (bucket + 1) * samples; ++i) {
            if (i - first >= kBlock) {
                first = i / 4 * 4;
                words(by->key, uint32_t(first / 4), kBlock / 4, random);
            }
            const int64_t point = point_of(random[i - first], reach);
            if (by->least > 0 && point >= mass) {
                uint32_t other[4];
                words(by->rest, uint32_t(i / 4), 1, other);
                codes[i] = int64_t(other[i % 4] >> shift);
            } else {
                codes[i] = vertex_at(point, ends, width, mine, length);
            }
        }
    }
}

template <class T>
void vertices_sum(const VertexCodes<T>* ranks, int count, const Vertices* by, const T* onto, T* out,
                         int32_t* counts, int64_t begin, int64_t end) {
    const int64_t width = by->width, samples = by->samples;
    for (int64_t bucket = begin; bucket < end; ++bucket) {
        const int64_t at = bucket * width, length = lesser(width, by->n - at);
        for (int r = 0; r < count; ++r) {
            memset(counts, 0, size_t(width) * sizeof(int32_t));
            const int64_t* codes = ranks[r].codes + bucket * samples;
            for (int64_t i = 0; i < samples; ++i) counts[codes[i] & (width - 1)] += (codes[i] & width) != 0 ? -1 : 1;
            const T scale = ranks[r].scales[bucket];
            const T* base = r > 0 ? out + at : onto == nullptr ? nullptr : onto + at;
            if (base == nullptr) {
                for (int64_t i = 0; i < length; ++i) out[at + i] = T(counts[i]) * scale;
            } else {
                for (int64_t i = 0; i < length; ++i) out[at + i] = base[i] + T(counts[i]) * scale;
            }
        }
    }
}

GRACE_MAKE_LOOP(draw_vertices)
GRACE_MAKE_LOOP(vertices_sum)

template <class T>
static void select_sides(const T* x, T high, T low, int32_t first, int64_t n, Selected<T>* into, int64_t* counts) {
    int64_t count = into->count;
    for (int64_t i = 0; i < n; i += 64) {
        fetch_ahead<64>(x + i);
        const uint64_t up = mask_up_to_64<Test::at_least>(x + i, high, n - i);
        const uint64_t down = mask_up_to_64<Test::at_most>(x + i, low, n - i);
        counts[0] += __builtin_popcountll(mask_up_to_64<Test::above>(x + i, T(0), n - i));
        counts[1] += __builtin_popcountll(mask_up_to_64<Test::below>(x + i, T(0), n - i));
        count = append(x + i, up | down, first + int32_t(i), count, into);
    }
    into->count = count;
}

}  // namespace GRACE_ISA
}  // namespace grace
