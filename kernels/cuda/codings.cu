// Powers of two and tables of 128 magnitudes.
#include "ranks.h"

namespace grace {
namespace gpu {
namespace {

constexpr int kEdges = 127;

// The random words of the elements of a group.
__device__ inline void group_words(const RandomKey& key, int64_t group, uint32_t random[8]) {
    philox(key, uint32_t(2 * group), random);
    philox(key, uint32_t(2 * group + 1), random + 4);
}

template <class T> __device__ inline uint32_t sign_of(T x) {
    return uint32_t(bits_as<typename Format<T>::Word>(x) >> (Format<T>::exponent + Format<T>::mantissa));
}

// The largest rounded exponent, and the largest magnitude as a word.
template <class T> struct Reach {
    int32_t exponent;
    typename Format<T>::Word size;
};
template <class T> struct JoinReaches {
    __device__ Reach<T> operator()(const Reach<T>& a, const Reach<T>& b) const {
        return {b.exponent > a.exponent ? b.exponent : a.exponent, b.size > a.size ? b.size : a.size};
    }
};

// The exponent and sign of one rank's element.
template <class T> struct NaturalValue {
    int64_t n;
    bool clipped;
    uint32_t flip;
    __device__ T operator()(const NaturalCodes& rank, int64_t i) const {
        if (clipped) {
            const uint32_t code = rank.codes[i] & 127u;
            return natural_value<T>(code + (code > 0 ? uint32_t(*rank.base) : 0u), uint32_t(rank.codes[i] >> 7) ^ flip);
        }
        constexpr int exponent = Format<T>::exponent;
        const uint32_t code = load_code(rank.codes, exponent + 1, i, n);
        return natural_value<T>(code & ((1u << exponent) - 1u), (code >> exponent) ^ flip);
    }
};

template <class T> struct TableValue {
    const T* table;
    Divisor width;
    __device__ T operator()(const Coded<T>& rank, int64_t i) const {
        const uint32_t code = rank.codes[i];
        const T size = table[code & 127u] * rank.scales[quotient(i, width)];
        return code > 127u ? -size : size;
    }
};

}  // namespace

template <class T>
void natural_encode(const Stream& on, const T* x, bool clipped, const RandomKey& key, uint8_t* codes, int32_t* base,
                    T* most, int64_t n) {
    const RandomKey mine = key;
    // The first pass finds the largest exponent and magnitude. Exponents that need no base are written at once.
    reduce(
        on, divide_up(n, 8), Reach<T>{0, 0},
        [=] __device__(int64_t group) {
            const int count = group_size(group, n);
            T found[8];
            load_group(x, group, count, found);
            uint32_t random[8], made[8];
            group_words(mine, group, random);
            Reach<T> reach{0, 0};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int32_t exponent = j < count ? natural_exponent(found[j], random[j]) : 0;
                reach = JoinReaches<T>()(reach, {exponent, magnitude_bits(found[j])});
                made[j] = j < count ? uint32_t(exponent) | sign_of(found[j]) << Format<T>::exponent : 0u;
            }
            if (!clipped) store_codes(made, Format<T>::exponent + 1, group, count, n, codes);
            return reach;
        },
        JoinReaches<T>(),
        [=] __device__(const Reach<T>& reach) {
            *base = clipped && reach.exponent > 127 ? reach.exponent - 127 : 0;
            *most = bits_as<T>(reach.size);
        });
    if (!clipped) return;
    each(on, divide_up(n, 8), [=] __device__(int64_t group) {
        const int count = group_size(group, n);
        T found[8];
        load_group(x, group, count, found);
        uint32_t random[8], made[8];
        group_words(mine, group, random);
        const int32_t above = *base;
        const T inverse = natural_inverse<T>(above);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int32_t exponent = natural_exponent(found[j], random[j]);
            made[j] = uint32_t(natural_clipped(found[j], exponent, above, inverse, random[j])) | sign_of(found[j]) << 7;
        }
        store_codes(made, 8, group, count, n, codes);
    });
}

template <class T>
void natural_sum(const Stream& on, const std::vector<NaturalCodes>& ranks, bool clipped, bool negate, const T* onto,
                 T factor, T* out, int64_t n) {
    sum_parts(on, ranks, onto, out, n, NaturalValue<T>{n, clipped, negate ? 1u : 0u}, factor);
}

template <class T>
void table_encode(const Stream& on, const T* x, const T* scales, int64_t width, const T* table, uint8_t* codes,
                  int64_t n) {
    // One scale moves the edges; several divide the elements.
    const bool single = width >= n;
    const Divisor by = divisor(width);
    T* edges = scratch<T>(on, kEdges);
    each(on, kEdges, [=] __device__(int64_t i) {
        const T safe = single && *scales > 0 ? *scales : T(1);
        edges[i] = reaching((table[i] + table[i + 1]) * T(0.5), safe);
    });
    each(on, divide_up(n, 8), [=] __device__(int64_t group) {
        const int count = group_size(group, n);
        T found[8];
        load_group(x, group, count, found);
        uint32_t made[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            // Elements beyond the end have no bucket.
            const T scale = single || j >= count ? T(1) : scales[quotient(8 * group + j, by)];
            const T share = single ? magnitude(found[j]) : magnitude(found[j]) / (scale > 0 ? scale : T(1));
            made[j] = uint32_t(nearest(share, edges)) | (found[j] < 0 ? 128u : 0u);
        }
        store_codes(made, 8, group, count, n, codes);
    });
}

template <class T>
void table_sum(const Stream& on, const std::vector<Coded<T>>& ranks, int64_t width, const T* table, const T* onto,
               T* out, int64_t n) {
    sum_parts(on, ranks, onto, out, n, TableValue<T>{table, divisor(width)});
}

#define GRACE_MAKE(T)                                                                                              \
    template void natural_encode<T>(const Stream&, const T*, bool, const RandomKey&, uint8_t*, int32_t*, T*,       \
                                    int64_t);                                                                      \
    template void natural_sum<T>(const Stream&, const std::vector<NaturalCodes>&, bool, bool, const T*, T, T*, int64_t); \
    template void table_encode<T>(const Stream&, const T*, const T*, int64_t, const T*, uint8_t*, int64_t);        \
    template void table_sum<T>(const Stream&, const std::vector<Coded<T>>&, int64_t, const T*, const T*, T*, int64_t);
GRACE_MAKE(float)
GRACE_MAKE(double)
#undef GRACE_MAKE

}  // namespace gpu
}  // namespace grace
