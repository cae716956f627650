// Signs and levels: quantizers, and the packing of bits. Each thread handles 8 elements, which give whole bytes.
#include <algorithm>

#include "grace/sums.h"
#include "ranks.h"

namespace grace {
namespace gpu {
namespace {

// One rank's share of an element.
template <class T> struct BinaryValue {
    bool single, negate;
    __device__ T operator()(const Coded<T>& rank, int64_t i) const {
        return level_of(rank.scales, single, negate, code_at(rank.codes, 1, i) != 0);
    }
};
template <class T> struct ColumnValue {
    Divisor columns;
    bool negate;
    __device__ T operator()(const Coded<T>& rank, int64_t i) const {
        const int64_t width = int64_t(columns.number), column = i - quotient(i, columns) * width;
        const T level = rank.scales[code_at(rank.codes, 1, i) != 0 ? width + column : column];
        return negate ? -level : level;
    }
};
template <class T> struct LevelValue {
    Divisor width;
    int levels, bits;
    int64_t n;
    __device__ T operator()(const Coded<T>& rank, int64_t i) const {
        const T unit = rank.scales[quotient(i, width)] / T(levels);
        return T(int(load_code(rank.codes, bits, i, n)) - levels) * unit;
    }
};

template <class T> struct ListedValue {
    Divisor width;
    int bits;
    __device__ T operator()(const Listed<T>& rank, int64_t i) const {
        return rank.levels[code_at(rank.codes, bits, i)] * rank.scales[quotient(i, width)];
    }
};

// Adds the votes of some ranks to those of earlier ranks. The votes are whole numbers below 2^24 in `out`.
template <class T> struct Votes {
    Ranks<const uint8_t*> some;
    const T* out;
    bool begins, ends;
    __device__ T operator()(int64_t i) const {
        int votes = begins ? 0 : int(out[i]);
        for (int r = 0; r < some.count; ++r) votes += 2 * int(code_at(some.parts[r], 1, i)) - 1;
        return T(ends ? int(votes > 0) - int(votes < 0) : votes);
    }
};

struct JoinSides {
    __device__ Sides operator()(const Sides& a, const Sides& b) const {
        return {a.count + b.count, a.high + b.high, a.low + b.low};
    }
};

// The bits of a group: element >= threshold.
template <class T> __device__ inline uint8_t byte_of(const T found[8], T threshold, int count) {
    uint32_t byte = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) byte |= uint32_t(j < count && found[j] >= threshold) << j;
    return uint8_t(byte);
}

template <class T> __device__ inline void add_to_side(Sides* sides, T value, T threshold) {
    const bool above = value >= threshold;
    sides->count += above ? 1.0 : 0.0;
    sides->high += double(above ? value : T(0));
    sides->low += double(above ? T(0) : value);
}

// The means of columns, from the sums of their stretches.
template <class T>
void means_of_columns(const Stream& on, const Sides* found, int64_t rows, int64_t columns, int64_t stretches, T* means) {
    each(on, columns, [=] __device__(int64_t column) {
        Sides sides{0, 0, 0};
        for (int64_t s = 0; s < stretches; ++s) sides = JoinSides()(sides, found[s * columns + column]);
        T pair[2];
        means_of(sides, rows, pair);
        means[column] = pair[0];
        means[columns + column] = pair[1];
    });
}

// The threads of a warp that are in the same 8 columns, and the groups of 8 columns that it reads of each row.
constexpr int kRowsOfWarp = 8, kGroupsOfWarp = int(kWarp) / kRowsOfWarp;

// One warp adds up a stretch of rows. `across` is the number of groups in a row.
template <class T, class Source>
__global__ void columns_kernel(Source source, T threshold, int64_t rows, int64_t across, int64_t length,
                               int64_t stretches, uint8_t* bits, Sides* found) {
    const int lane = int(threadIdx.x % kWarp);
    const int64_t wide = (across + kGroupsOfWarp - 1) / kGroupsOfWarp, warps = int64_t(gridDim.x) * (kThreads / kWarp);
    // The bound is the same for all threads of a warp, so they leave the loop together.
    for (int64_t w = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp; w < wide * stretches; w += warps) {
        const int64_t stretch = w / wide, first = stretch * length;
        const int64_t end = first + length < rows ? first + length : rows;
        const int64_t group = w % wide * kGroupsOfWarp + lane % kGroupsOfWarp;
        Sides sides[8] = {};
        for (int64_t row = first + lane / kGroupsOfWarp; group < across && row < end; row += kRowsOfWarp) {
            T values[8];
            source(row * across + group, 8, values);
            bits[row * across + group] = byte_of(values, threshold, 8);
#pragma unroll
            for (int j = 0; j < 8; ++j) add_to_side(&sides[j], values[j], threshold);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            for (int far = int(kWarp) / 2; far >= kGroupsOfWarp; far /= 2) {
                const Sides other{__shfl_xor_sync(kAll, sides[j].count, far), __shfl_xor_sync(kAll, sides[j].high, far),
                                  __shfl_xor_sync(kAll, sides[j].low, far)};
                sides[j] = JoinSides()(sides[j], other);
            }
            if (lane < kGroupsOfWarp && group < across) found[(stretch * across + group) * 8 + j] = sides[j];
        }
    }
}

// The bits and the means of the columns of what a source reads. The number of columns is a multiple of 8.
template <class T, class Source>
void signs_of_columns(const Stream& on, Source source, T threshold, int64_t columns, uint8_t* bits, T* means, int64_t n) {
    const int64_t rows = n / columns, across = columns / 8, wide = divide_up(across, kGroupsOfWarp);
    const int64_t most = divide_up(2 * kMostParts, wide), least = 8 * kRowsOfWarp;
    const int64_t length = std::max<int64_t>(least, divide_up(rows, most)), stretches = divide_up(rows, length);
    Sides* found = scratch<Sides>(on, stretches * columns);
    launch(on, blocks_for(wide * stretches, kThreads / kWarp), columns_kernel<T, Source>, source, threshold, rows, across,
           length, stretches, bits, found);
    means_of_columns(on, found, rows, columns, stretches, means);
}

// The bits and means of what a source reads.
template <class T, class Source>
void signs_and_means(const Stream& on, Source source, T threshold, bool single, uint8_t* bits, T* means, int64_t n) {
    reduce(
        on, divide_up(n, 8), Sides{0, 0, 0},
        [=] __device__(int64_t group) {
            const int count = group_size(group, n);
            T found[8];
            source(group, count, found);
            bits[group] = byte_of(found, threshold, count);
            Sides sides{0, 0, 0};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                if (j < count) add_to_side(&sides, found[j], threshold);
            }
            return sides;
        },
        JoinSides(),
        [=] __device__(const Sides& sides) {
            single ? mean_magnitude(sides, n, means) : means_of(sides, n, means);
        });
}

// The terms of a bucket's norm, and its last step.
template <class T> struct SumOfSquares {
    using Value = double;
    __device__ static double term(T x) { return double(x) * double(x); }
    __device__ static double join(double a, double b) { return a + b; }
    __device__ double operator()(double a, double b) const { return a + b; }
    __device__ static T finish(double sum) { return T(sqrt(sum)); }
};
template <class T> struct Largest {
    using Value = typename Format<T>::Word;
    __device__ static Value term(T x) { return magnitude_bits(x); }
    __device__ static Value join(Value a, Value b) { return b > a ? b : a; }
    __device__ Value operator()(Value a, Value b) const { return b > a ? b : a; }
    __device__ static T finish(Value most) { return bits_as<T>(most); }
};

// One warp computes one value for each stretch of `length` elements of every bucket. The last stretch of a bucket may
// be shorter, and so may the last bucket.
template <class T, class Kind>
__global__ void stretch_kernel(const T* x, int64_t n, int64_t width, int64_t length, int64_t stretches, int64_t all,
                               typename Kind::Value* found) {
    using Value = typename Kind::Value;
    const int lane = int(threadIdx.x % kWarp);
    const int64_t warps = int64_t(gridDim.x) * (kThreads / kWarp);
    // The bound is the same for all threads of a warp, so they leave the loop together.
    for (int64_t s = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp; s < all; s += warps) {
        const int64_t bucket = s / stretches, first = bucket * width + s % stretches * length;
        int64_t end = first + length;
        if (end > (bucket + 1) * width) end = (bucket + 1) * width;
        if (end > n) end = n;
        Value mine = 0;
#pragma unroll 4
        for (int64_t i = first + lane; i < end; i += kWarp) mine = Kind::join(mine, Kind::term(x[i]));
        for (int step = kWarp / 2; step > 0; step /= 2) mine = Kind::join(mine, __shfl_xor_sync(kAll, mine, step));
        if (lane == 0) found[s] = mine;
    }
}

// One block computes the norm of a bucket from its stretches.
template <class T, class Kind>
__global__ void bucket_kernel(const typename Kind::Value* found, int64_t stretches, int64_t buckets, T* norms) {
    for (int64_t bucket = blockIdx.x; bucket < buckets; bucket += gridDim.x) {
        typename Kind::Value mine = 0;
        for (int64_t s = threadIdx.x; s < stretches; s += kThreads) mine = Kind::join(mine, found[bucket * stretches + s]);
        mine = joined(mine, Kind());
        if (threadIdx.x == 0) norms[bucket] = Kind::finish(mine);
    }
}

template <class T, class Kind>
void norms_by(const Stream& on, const T* x, int64_t n, int64_t width, T* norms) {
    using Value = typename Kind::Value;
    const int64_t buckets = divide_up(n, width), reached = width < n ? width : n;
    const int64_t length = std::max(kStretch, divide_up(reached, 8192));
    const int64_t stretches = divide_up(reached, length), all = buckets * stretches;
    Value* found = scratch<Value>(on, all);
    launch(on, blocks_for(all, kThreads / kWarp), stretch_kernel<T, Kind>, x, n, width, length, stretches, all, found);
    if (stretches > 32) {
        launch(on, blocks_for(buckets, 1), bucket_kernel<T, Kind>, found, stretches, buckets, norms);
        return;
    }
    map(on, norms, buckets, [=] __device__(int64_t bucket) {
        Value sum = found[bucket * stretches];
        for (int64_t s = 1; s < stretches; ++s) sum = Kind::join(sum, found[bucket * stretches + s]);
        return Kind::finish(sum);
    });
}

// Joins the values of `lanes` neighbouring threads, a power of two up to the block. The result is in all of them. All
// threads must take part.
template <class Kind> __device__ typename Kind::Value over_lanes(typename Kind::Value mine, int lanes) {
    __shared__ typename Kind::Value warps[kThreads / kWarp];
    for (int far = lanes < int(kWarp) ? lanes / 2 : int(kWarp) / 2; far > 0; far /= 2) {
        mine = Kind::join(mine, __shfl_xor_sync(kAll, mine, far));
    }
    if (lanes <= int(kWarp)) return mine;
    __syncthreads();
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = mine;
    __syncthreads();
    const int several = lanes / int(kWarp), first = int(threadIdx.x / kWarp) / several * several;
    mine = warps[first];
    for (int w = 1; w < several; ++w) mine = Kind::join(mine, warps[first + w]);
    return mine;
}

// True if neighbouring threads of a block, 8 elements each, can hold a bucket.
bool fits_threads(int64_t width) { return width >= 8 && width <= kTile && (width & (width - 1)) == 0; }

// The source of random shares; without a key they are 0.5.
struct Noise {
    bool given;
    RandomKey key;
};
Noise noise_of(const RandomKey* key) { return key == nullptr ? Noise{false, RandomKey()} : Noise{true, *key}; }

// The uniform numbers of the 8 elements of a group.
template <class T> __device__ void draw_shares(const Noise& noise, int64_t group, T share[8]) {
    uint32_t random[8];
    if (noise.given) {
        philox(noise.key, uint32_t(2 * group), random);
        philox(noise.key, uint32_t(2 * group + 1), random + 4);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) share[j] = noise.given ? T(grace::uniform(random[j])) : T(0.5);
}

// The levels of the 8 elements of a group, plus `levels`.
template <class T>
__device__ void levels_of(const T* x, const T* scales, const Divisor& width, int levels, const T* limit,
                          const Noise& noise, int64_t group, int count, uint32_t codes[8]) {
    T found[8], share[8];
    load_group(x, group, count, found);
    draw_shares(noise, group, share);
    const T most = limit == nullptr ? T(0) : *limit;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const T value = limit == nullptr ? found[j] : limited(found[j], most);
        // Elements beyond the end have no bucket.
        const T scale = j < count ? scales[quotient(8 * group + j, width)] : T(0);
        const int32_t level = level_of(value, scale, T(levels), share[j]);
        codes[j] = j < count ? uint32_t(level + levels) : 0u;
    }
}

// The norms and codes of buckets of 8 * `lanes` elements, which fit the threads of a block.
template <class T, class Kind>
__global__ void bucket_codes_kernel(const T* x, int lanes, int levels, int bits, Noise noise, uint8_t* codes, T* norms,
                                    int64_t n) {
    const int64_t groups = (n + 7) / 8, step = int64_t(gridDim.x) * kThreads;
    for (int64_t from = int64_t(blockIdx.x) * kThreads; from < groups; from += step) {
        const int64_t group = from + threadIdx.x;
        const int count = group < groups ? group_size(group, n) : 0;
        T found[8], share[8];
        load_group(x, group, count, found);
        typename Kind::Value mine = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) mine = Kind::join(mine, Kind::term(found[j]));
        const T norm = Kind::finish(over_lanes<Kind>(mine, lanes));
        if (count == 0) continue;
        if (group % lanes == 0) norms[group / lanes] = norm;
        draw_shares(noise, group, share);
        uint32_t made[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            made[j] = j < count ? uint32_t(level_of(found[j], norm, T(levels), share[j]) + levels) : 0u;
        }
        store_codes(made, bits, group, count, n, codes);
    }
}

// Does sum_round for buckets of 8 * `lanes` elements, which fit the threads of a block.
template <class T>
__global__ void sum_round_kernel(WeightedSum<T> source, int lanes, const T* levels, int bits, uint8_t* codes, T* norms,
                                 int64_t n) {
    const int64_t groups = (n + 7) / 8, step = int64_t(gridDim.x) * kThreads;
    for (int64_t from = int64_t(blockIdx.x) * kThreads; from < groups; from += step) {
        const int64_t group = from + threadIdx.x;
        const int count = group < groups ? group_size(group, n) : 0;
        T sum[8];
        source.read(group, count, sum);
        typename Largest<T>::Value most = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) most = Largest<T>::join(most, Largest<T>::term(sum[j]));
        const T norm = Largest<T>::finish(over_lanes<Largest<T>>(most, lanes));
        if (count == 0) continue;
        check_group(sum, count, source.good);
        if (group % lanes == 0) norms[group / lanes] = norm;
        uint32_t found[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            found[j] = j < count ? index_of_level(sum[j], levels, 1 << bits, norm, T(0.5)) : 0u;
            sum[j] += levels[found[j]] * -norm;
        }
        store_codes(found, bits, group, count, n, codes);
        store_group(sum, group, count, source.out);
    }
}

}  // namespace

template <class Code> void pack(const Stream& on, const Code* codes, int bits, uint8_t* out, int64_t n) {
    each(on, divide_up(n, 8), [=] __device__(int64_t group) {
        const int count = group_size(group, n);
        Code found[8];
        load_group(codes, group, count, found);
        uint32_t low[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) low[j] = uint32_t(found[j]) & 0xFFFFu;
        store_codes(low, bits, group, count, n, out);
    });
}

void unpack(const Stream& on, const uint8_t* data, int bits, int64_t* out, int64_t n) {
    map(on, out, n, [=] __device__(int64_t i) { return int64_t(load_code(data, bits, i, n)); });
}

template <class T> void binarize(const Stream& on, const T* x, T threshold, uint8_t* bits, int64_t n) {
    each(on, divide_up(n, 8), [=] __device__(int64_t group) {
        const int count = group_size(group, n);
        T found[8];
        load_group(x, group, count, found);
        bits[group] = byte_of(found, threshold, count);
    });
}

template <class T>
void binarize_finite(const Stream& on, const T* x, T threshold, uint8_t* bits, uint8_t* good, int64_t n) {
    set_good(on, good);
    each(on, divide_up(n, 8), [=] __device__(int64_t group) {
        const int count = group_size(group, n);
        T found[8];
        load_group(x, group, count, found);
        bits[group] = byte_of(found, threshold, count);
        check_group(found, count, good);
    });
}

template <class T>
void binarize_means(const Stream& on, const T* x, T threshold, bool single, uint8_t* bits, T* means, int64_t n) {
    signs_and_means(on, Elements<T>{x}, threshold, single, bits, means, n);
}

template <class T>
void sum_sign_mean(const Stream& on, const T* x, T a, const T* y, T b, T* out, uint8_t* good, uint8_t* bits, T* mean,
                   int64_t n) {
    set_good(on, good);
    signs_and_means(on, WeightedSum<T>{x, a, y, b, out, good}, T(0), true, bits, mean, n);
}

template <class T>
void binary_sum(const Stream& on, const std::vector<Coded<T>>& ranks, bool single, bool negate, const T* onto, T factor,
                T* out, int64_t n) {
    sum_parts(on, ranks, onto, out, n, BinaryValue<T>{single, negate}, factor);
}

template <class T>
void binarize_columns(const Stream& on, const T* x, T threshold, int64_t columns, uint8_t* bits, T* means, int64_t n) {
    if (columns % 8 == 0) {
        signs_of_columns(on, Elements<T>{x}, threshold, columns, bits, means, n);
        return;
    }
    binarize(on, x, threshold, bits, n);
    // Neighbouring threads sum neighbouring columns. A column is divided so that there are enough threads.
    const int64_t rows = n / columns, most = divide_up(kMostParts * kThreads, columns);
    const int64_t length = std::max<int64_t>(8, divide_up(rows, most)), stretches = divide_up(rows, length);
    Sides* found = scratch<Sides>(on, stretches * columns);
    const Divisor by = divisor(columns);
    each(on, stretches * columns, [=] __device__(int64_t i) {
        const int64_t stretch = quotient(i, by), column = i - stretch * columns;
        const int64_t first = stretch * length, end = first + length < rows ? first + length : rows;
        Sides sides{0, 0, 0};
#pragma unroll 4
        for (int64_t row = first; row < end; ++row) add_to_side(&sides, x[row * columns + column], threshold);
        found[i] = sides;
    });
    means_of_columns(on, found, rows, columns, stretches, means);
}

template <class T>
void sum_columns(const Stream& on, const T* x, T a, const T* y, T b, T* out, T threshold, int64_t columns,
                 uint8_t* bits, T* means, uint8_t* good, int64_t n) {
    const WeightedSum<T> sum{x, a, y, b, out, good};
    if (columns == 1) {
        set_good(on, good);
        signs_and_means(on, sum, threshold, false, bits, means, n);
    } else if (columns % 8 == 0) {
        set_good(on, good);
        signs_of_columns(on, sum, threshold, columns, bits, means, n);
    } else {
        finite_sum(on, x, a, y, b, out, n, good);
        binarize_columns(on, out, threshold, columns, bits, means, n);
    }
}

template <class T>
void column_sum(const Stream& on, const std::vector<Coded<T>>& ranks, int64_t columns, bool negate, const T* onto,
                T* out, int64_t n) {
    sum_parts(on, ranks, onto, out, n, ColumnValue<T>{divisor(columns), negate});
}

template <class T> void majority(const Stream& on, const std::vector<const uint8_t*>& bits, T* out, int64_t n) {
    in_turns(bits, [&](const Ranks<const uint8_t*>& some, bool begins, bool ends) {
        map(on, out, n, Votes<T>{some, out, begins, ends});
    });
}

template <class T>
void bucket_norms(const Stream& on, const T* x, int64_t n, int64_t width, bool largest, T* norms) {
    if (largest) {
        norms_by<T, Largest<T>>(on, x, n, width, norms);
    } else {
        norms_by<T, SumOfSquares<T>>(on, x, n, width, norms);
    }
}

template <class T>
void quantize_packed(const Stream& on, const T* x, const T* scales, int64_t width, int levels, int bits,
                     const T* limit, const RandomKey* key, uint8_t* out, int64_t n) {
    const Divisor by = divisor(width);
    const Noise noise = noise_of(key);
    each(on, divide_up(n, 8), [=] __device__(int64_t group) {
        const int count = group_size(group, n);
        uint32_t codes[8];
        levels_of(x, scales, by, levels, limit, noise, group, count, codes);
        store_codes(codes, bits, group, count, n, out);
    });
}

template <class T>
void bucket_quantize(const Stream& on, const T* x, int64_t width, bool largest, int levels, int bits,
                     const RandomKey* key, uint8_t* out, T* norms, int64_t n) {
    if (fits_threads(width)) {
        launch(on, blocks_for(divide_up(n, 8), kThreads),
               largest ? bucket_codes_kernel<T, Largest<T>> : bucket_codes_kernel<T, SumOfSquares<T>>, x,
               int(width / 8), levels, bits, noise_of(key), out, norms, n);
        return;
    }
    bucket_norms(on, x, n, width, largest, norms);
    quantize_packed(on, x, norms, width, levels, bits, static_cast<const T*>(nullptr), key, out, n);
}

template <class T>
void floor_packed(const Stream& on, const T* x, const T* delta, int bits, const RandomKey& key, uint8_t* out, int64_t n) {
    const Noise noise = noise_of(&key);
    each(on, divide_up(n, 8), [=] __device__(int64_t group) {
        const int count = group_size(group, n);
        T found[8], share[8];
        load_group(x, group, count, found);
        draw_shares(noise, group, share);
        uint32_t codes[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            codes[j] = j < count ? uint32_t(floor_code(found[j], *delta, int32_t(1) << (bits - 1), share[j])) : 0u;
        }
        store_codes(codes, bits, group, count, n, out);
    });
}

template <class T>
void dequantize_sum(const Stream& on, const std::vector<Coded<T>>& ranks, int64_t width, int levels, int bits,
                    const T* onto, T* out, int64_t n) {
    sum_parts(on, ranks, onto, out, n, LevelValue<T>{divisor(width), levels, bits, n});
}

template <class T>
void round_packed(const Stream& on, const T* x, const T* scales, int64_t width, const T* levels, int bits,
                  const RandomKey* key, uint8_t* out, int64_t n) {
    const Divisor by = divisor(width);
    const Noise noise = noise_of(key);
    each(on, divide_up(n, 8), [=] __device__(int64_t group) {
        const int count = group_size(group, n);
        T found[8], share[8];
        load_group(x, group, count, found);
        draw_shares(noise, group, share);
        uint32_t codes[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            // Elements beyond the end have no bucket.
            const T scale = j < count ? scales[quotient(8 * group + j, by)] : T(0);
            codes[j] = j < count ? index_of_level(found[j], levels, 1 << bits, scale, T(1) - share[j]) : 0u;
        }
        store_codes(codes, bits, group, count, n, out);
    });
}

template <class T>
void sum_round(const Stream& on, const T* x, T a, const T* y, T b, int64_t width, const T* levels, int bits, T* out,
               uint8_t* codes, T* norms, uint8_t* good, int64_t n) {
    const WeightedSum<T> sum{x, a, y, b, out, good};
    if (fits_threads(width)) {
        set_good(on, good);
        launch(on, blocks_for(divide_up(n, 8), kThreads), sum_round_kernel<T>, sum, int(width / 8), levels, bits, codes,
               norms, n);
        return;
    }
    finite_sum(on, x, a, y, b, out, n, good);
    bucket_norms(on, out, n, width, true, norms);
    round_packed(on, out, norms, width, levels, bits, nullptr, codes, n);
    const ListedValue<T> value{divisor(width), bits};
    const Listed<T> sent{codes, norms, levels};
    map(on, out, n, [=] __device__(int64_t i) { return out[i] - value(sent, i); });
}

template <class T>
void levels_sum(const Stream& on, const std::vector<Listed<T>>& ranks, int64_t width, int bits, const T* onto, T* out,
                int64_t n) {
    sum_parts(on, ranks, onto, out, n, ListedValue<T>{divisor(width), bits});
}

void best_levels(const Stream& on, const double* sizes, int64_t n, const int32_t* starts, int inner, bool exponential,
                 double* levels) {
    // A few thousand sizes, and each level depends on others: one thread.
    double* sums = scratch<double>(on, 2 * (n + 1));
    each(on, 1, [=] __device__(int64_t) { fit_levels(sizes, n, starts, inner, exponential, sums, levels); });
}

template <class T, class Code>
void to_integers(const Stream& on, const T* x, const T* scale, T most, const RandomKey* key, Code* out, int64_t n) {
    const Noise noise = noise_of(key);
    each(on, divide_up(n, 8), [=] __device__(int64_t group) {
        const int count = group_size(group, n);
        T found[8], share[8];
        load_group(x, group, count, found);
        draw_shares(noise, group, share);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j < count) out[8 * group + j] = Code(level_of(found[j], *scale, most, share[j]));
        }
    });
}

template <class T, class Code>
void from_integers(const Stream& on, const Code* codes, const T* scale, T most, const T* onto, T* out, int64_t n) {
    map(on, out, n, [=] __device__(int64_t i) {
        const T value = T(codes[i]) * (*scale / most);
        return onto == nullptr ? value : onto[i] + value;
    });
}

template <class Code>
void pack_lanes(const Stream& on, const Code* x, int64_t n, int lanes, int32_t* words, int64_t count) {
    const int bits = 32 / lanes;
    map(on, words, count, [=] __device__(int64_t i) {
        uint32_t word = uint32_t(int32_t(x[i]));
        for (int lane = 1; lane < lanes; ++lane) {
            const int64_t from = lane * count + i;
            if (from < n) word += uint32_t(int32_t(x[from])) << (lane * bits);
        }
        return int32_t(word);
    });
}

template <class Code>
void unpack_lanes(const Stream& on, const int32_t* words, int64_t count, int lanes, Code* out, int64_t n) {
    const uint32_t halves = halves_of(lanes);
    const Divisor by = divisor(count < 1 ? 1 : count);
    map(on, out, n, [=] __device__(int64_t i) {
        const int64_t lane = quotient(i, by);
        return Code(lane_of(uint32_t(words[i - lane * count]) + halves, int(lane), lanes));
    });
}

#define GRACE_MAKE(T)                                                                                                 \
    template void binarize<T>(const Stream&, const T*, T, uint8_t*, int64_t);                                         \
    template void binarize_finite<T>(const Stream&, const T*, T, uint8_t*, uint8_t*, int64_t);                        \
    template void binarize_means<T>(const Stream&, const T*, T, bool, uint8_t*, T*, int64_t);                         \
    template void sum_sign_mean<T>(const Stream&, const T*, T, const T*, T, T*, uint8_t*, uint8_t*, T*, int64_t);      \
    template void binary_sum<T>(const Stream&, const std::vector<Coded<T>>&, bool, bool, const T*, T, T*, int64_t);    \
    template void binarize_columns<T>(const Stream&, const T*, T, int64_t, uint8_t*, T*, int64_t);                     \
    template void sum_columns<T>(const Stream&, const T*, T, const T*, T, T*, T, int64_t, uint8_t*, T*, uint8_t*,     \
                                 int64_t);                                                                            \
    template void column_sum<T>(const Stream&, const std::vector<Coded<T>>&, int64_t, bool, const T*, T*, int64_t);    \
    template void majority<T>(const Stream&, const std::vector<const uint8_t*>&, T*, int64_t);                        \
    template void bucket_norms<T>(const Stream&, const T*, int64_t, int64_t, bool, T*);                               \
    template void quantize_packed<T>(const Stream&, const T*, const T*, int64_t, int, int, const T*, const RandomKey*, \
                                     uint8_t*, int64_t);                                                              \
    template void bucket_quantize<T>(const Stream&, const T*, int64_t, bool, int, int, const RandomKey*, uint8_t*, T*, \
                                     int64_t);                                                                        \
    template void floor_packed<T>(const Stream&, const T*, const T*, int, const RandomKey&, uint8_t*, int64_t);       \
    template void dequantize_sum<T>(const Stream&, const std::vector<Coded<T>>&, int64_t, int, int, const T*, T*, int64_t); \
    template void round_packed<T>(const Stream&, const T*, const T*, int64_t, const T*, int, const RandomKey*,        \
                                  uint8_t*, int64_t);                                                                 \
    template void sum_round<T>(const Stream&, const T*, T, const T*, T, int64_t, const T*, int, T*, uint8_t*, T*,      \
                               uint8_t*, int64_t);                                                                    \
    template void levels_sum<T>(const Stream&, const std::vector<Listed<T>>&, int64_t, int, const T*, T*, int64_t);
GRACE_MAKE(float)
GRACE_MAKE(double)
#undef GRACE_MAKE
#define GRACE_MAKE(Code)                                                                                           \
    template void to_integers<float, Code>(const Stream&, const float*, const float*, float, const RandomKey*,     \
                                           Code*, int64_t);                                                        \
    template void to_integers<double, Code>(const Stream&, const double*, const double*, double, const RandomKey*, \
                                            Code*, int64_t);                                                       \
    template void from_integers<float, Code>(const Stream&, const Code*, const float*, float, const float*,        \
                                             float*, int64_t);                                                     \
    template void from_integers<double, Code>(const Stream&, const Code*, const double*, double, const double*,    \
                                              double*, int64_t);                                                   \
    template void pack_lanes<Code>(const Stream&, const Code*, int64_t, int, int32_t*, int64_t);                   \
    template void unpack_lanes<Code>(const Stream&, const int32_t*, int64_t, int, Code*, int64_t);
GRACE_MAKE(int8_t)
GRACE_MAKE(int16_t)
GRACE_MAKE(int32_t)
#undef GRACE_MAKE
template void pack<uint8_t>(const Stream&, const uint8_t*, int, uint8_t*, int64_t);
template void pack<int64_t>(const Stream&, const int64_t*, int, uint8_t*, int64_t);

}  // namespace gpu
}  // namespace grace
