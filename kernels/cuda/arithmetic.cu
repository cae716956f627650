// Sums, norms, conversions and random numbers.
#include "grace/sums.h"
#include "ranks.h"

namespace grace {
namespace gpu {
namespace {

template <class T> using WordOf = typename Format<T>::Word;

// The largest magnitude of n elements, as a word, by groups.
template <class T> struct GroupLargest {
    const T* x;
    int64_t n;
    __device__ WordOf<T> operator()(int64_t group) const {
        T found[8];
        load_group(x, group, group_size(group, n), found);
        WordOf<T> most = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) most = Larger<WordOf<T>>()(most, magnitude_bits(found[j]));
        return most;
    }
};

// The sum of squares, and the largest magnitude as a word.
template <class T> struct Size {
    double squares;
    WordOf<T> most;
};
template <class T> struct JoinSizes {
    __device__ Size<T> operator()(const Size<T>& a, const Size<T>& b) const {
        return {a.squares + b.squares, b.most > a.most ? b.most : a.most};
    }
};

}  // namespace

template <class T> void weighted_sum(const Stream& on, const T* x, T a, const T* y, T b, T* out, int64_t n) {
    map(on, out, n, [=] __device__(int64_t i) { return x[i] * a + y[i] * b; });
}

template <class T>
void limited_sum(const Stream& on, const T* x, T a, const T* y, T b, const T* z, T limit, T* out, int64_t n) {
    map(on, out, n, [=] __device__(int64_t i) { return limited(x[i] * a + y[i] * z[i] * b, limit); });
}

template <class T>
void masked_sum(const Stream& on, const T* x, T a, const T* y, T b, const T* z, T* sum, T* kept, int64_t n) {
    each(on, n, [=] __device__(int64_t i) {
        const T rest = z[i] > 0 ? y[i] : T(0);
        kept[i] = rest;
        sum[i] = x[i] * a + rest * b;
    });
}

template <class T>
void square_sum(const Stream& on, const T* x, const T* onto, T largest, T limit, T* out, int64_t n) {
    map(on, out, n, [=] __device__(int64_t i) { return bounded_square_sum(x[i], onto[i], largest, limit); });
}

template <class T> void max_abs(const Stream& on, const T* x, int64_t n, T* out) {
    reduce(on, divide_up(n, 8), WordOf<T>(0), GroupLargest<T>{x, n}, Larger<WordOf<T>>(),
           [=] __device__(WordOf<T> most) { *out = bits_as<T>(most); });
}

template <class T> void finite(const Stream& on, const T* x, int64_t n, uint8_t* out) {
    set_good(on, out);
    each(on, divide_up(n, 8), [=] __device__(int64_t group) {
        const int count = group_size(group, n);
        T found[8];
        load_group(x, group, count, found);
        check_group(found, count, out);
    });
}

template <class T>
void finite_sum(const Stream& on, const T* x, T a, const T* y, T b, T* out, int64_t n, uint8_t* good) {
    set_good(on, good);
    const WeightedSum<T> sum{x, a, y, b, out, good};
    each(on, divide_up(n, 8), [=] __device__(int64_t group) {
        T found[8];
        sum(group, group_size(group, n), found);
    });
}

template <class T>
void momentum_sum(const Stream& on, const T* u, T m, const T* g, const T* v, T* momentum, T* out, uint8_t* good,
                  int64_t n) {
    set_good(on, good);
    each(on, divide_up(n, 8), [=] __device__(int64_t group) {
        const int count = group_size(group, n);
        T old[8], gradient[8], before[8], sum[8];
        load_group(u, group, count, old);
        load_group(g, group, count, gradient);
        load_group(v, group, count, before);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            old[j] = old[j] * m + gradient[j];
            sum[j] = before[j] + old[j];
        }
        store_group(old, group, count, momentum);
        store_group(sum, group, count, out);
        check_group(sum, count, good);
    });
}

template <class T> void norm(const Stream& on, const T* x, int64_t n, T* out) {
    reduce(
        on, divide_up(n, 8), 0.0,
        [=] __device__(int64_t group) {
            T found[8];
            load_group(x, group, group_size(group, n), found);
            double sum = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) sum += double(found[j]) * double(found[j]);
            return sum;
        },
        Added<double>(), [=] __device__(double sum) { *out = T(sqrt(sum)); });
}

template <class T> void norm_max(const Stream& on, const T* x, int64_t n, T* out, T* most) {
    reduce(
        on, divide_up(n, 8), Size<T>{0, 0},
        [=] __device__(int64_t group) {
            T found[8];
            load_group(x, group, group_size(group, n), found);
            Size<T> size{0, 0};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                size = JoinSizes<T>()(size, {double(found[j]) * double(found[j]), magnitude_bits(found[j])});
            }
            return size;
        },
        JoinSizes<T>(),
        [=] __device__(const Size<T>& size) {
            *out = T(sqrt(size.squares));
            *most = bits_as<T>(size.most);
        });
}

void half(const Stream& on, const float* x, bool brain, uint16_t* out, int64_t n) {
    if (brain) {
        map(on, out, n, [=] __device__(int64_t i) { return to_bfloat16(x[i]); });
    } else {
        map(on, out, n, [=] __device__(int64_t i) { return to_float16(x[i]); });
    }
}

void wide(const Stream& on, const uint16_t* x, bool brain, float* out, int64_t n) {
    if (brain) {
        map(on, out, n, [=] __device__(int64_t i) { return from_bfloat16(x[i]); });
    } else {
        map(on, out, n, [=] __device__(int64_t i) { return from_float16(x[i]); });
    }
}

void half_sum(const Stream& on, const std::vector<const uint16_t*>& rows, bool brain, float factor, uint16_t* out,
              int64_t n) {
    float* totals = rows.size() > kRanks ? scratch<float>(on, n) : nullptr;
    in_turns(rows, [&](const Ranks<const uint16_t*>& some, bool begins, bool ends) {
        each(on, n, [=] __device__(int64_t i) {
            float total = begins ? 0 : totals[i];
            for (int r = 0; r < some.count; ++r) {
                const uint16_t half = some.parts[r][i];
                const float value = (brain ? from_bfloat16(half) : from_float16(half)) * factor;
                // Start with the first row instead of zero, because 0 + -0 would lose the sign.
                total = begins && r == 0 ? value : total + value;
            }
            if (ends) {
                out[i] = brain ? to_bfloat16(total) : to_float16(total);
            } else {
                totals[i] = total;
            }
        });
    });
}

void words(const Stream& on, const RandomKey& key, int64_t* out, int64_t n) {
    const RandomKey mine = key;
    each(on, divide_up(n, 4), [=] __device__(int64_t block) {
        uint32_t random[4];
        philox(mine, uint32_t(block), random);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (4 * block + j < n) out[4 * block + j] = int64_t(random[j]);
        }
    });
}

void uniform(const Stream& on, const RandomKey& key, float* out, int64_t n) {
    const RandomKey mine = key;
    each(on, divide_up(n, 4), [=] __device__(int64_t block) {
        uint32_t random[4];
        philox(mine, uint32_t(block), random);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (4 * block + j < n) out[4 * block + j] = grace::uniform(random[j]);
        }
    });
}

void sample(const Stream& on, const Permutation& permutation, uint32_t n, int32_t* out, int64_t k) {
    const Permutation mine = permutation;
    map(on, out, k, [=] __device__(int64_t i) { return int32_t(sampled(mine, n, uint32_t(i))); });
}

// The sample is marked, one bit per element. The pass that adds the arrays finds the places of the marked elements by
// the inverse of the permutation.
template <class T>
void sum_sample(const Stream& on, const T* x, T a, const T* y, T b, const Permutation& permutation, T* out, T* values,
                int32_t* indices, uint8_t* good, int64_t n, int64_t k) {
    const Permutation mine = permutation;
    const int64_t words = divide_up(n, 32);
    uint32_t* marks = scratch<uint32_t>(on, words);
    set_good(on, good);
    if (n == 0) return;
    check(cudaMemsetAsync(marks, 0, static_cast<size_t>(words) * sizeof(uint32_t), on.handle), "zeros");
    each(on, k, [=] __device__(int64_t i) {
        const uint32_t index = sampled(mine, uint32_t(n), uint32_t(i));
        indices[i] = int32_t(index);
        atomicOr(&marks[index / 32], 1u << index % 32);
    });
    const WeightedSum<T> sum{x, a, y, b, out, good};
    each(on, divide_up(n, 8), [=] __device__(int64_t group) {
        const int count = group_size(group, n);
        T found[8];
        sum.read(group, count, found);
        check_group(found, count, good);
        const uint32_t marked = marks[group / 4] >> (group % 4 * 8) & 255u;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if ((marked >> j & 1u) == 0) continue;
            values[place_in_sample(mine, uint32_t(n), uint32_t(8 * group + j))] = found[j];
            found[j] = T(0);
        }
        store_group(found, group, count, out);
    });
}

#define GRACE_MAKE(T)                                                                          \
    template void weighted_sum<T>(const Stream&, const T*, T, const T*, T, T*, int64_t);       \
    template void finite_sum<T>(const Stream&, const T*, T, const T*, T, T*, int64_t, uint8_t*); \
    template void momentum_sum<T>(const Stream&, const T*, T, const T*, const T*, T*, T*, uint8_t*, int64_t); \
    template void sum_sample<T>(const Stream&, const T*, T, const T*, T, const Permutation&, T*, T*, int32_t*, uint8_t*, \
                                int64_t, int64_t);                                               \
    template void limited_sum<T>(const Stream&, const T*, T, const T*, T, const T*, T, T*, int64_t); \
    template void masked_sum<T>(const Stream&, const T*, T, const T*, T, const T*, T*, T*, int64_t); \
    template void square_sum<T>(const Stream&, const T*, const T*, T, T, T*, int64_t);           \
    template void max_abs<T>(const Stream&, const T*, int64_t, T*);                            \
    template void finite<T>(const Stream&, const T*, int64_t, uint8_t*);                       \
    template void norm<T>(const Stream&, const T*, int64_t, T*);                                \
    template void norm_max<T>(const Stream&, const T*, int64_t, T*, T*);
GRACE_MAKE(float)
GRACE_MAKE(double)
#undef GRACE_MAKE

}  // namespace gpu
}  // namespace grace
