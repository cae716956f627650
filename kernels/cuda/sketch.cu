// Count-Sketches. A stable sort of the blocks by column keeps the order of the elements in each column.
#include "stretches.h"

namespace grace {
namespace gpu {
namespace {

constexpr int kRadixBits = 4, kRadix = 1 << kRadixBits, kWords = kRadix / 4;  // four counts of 16 bits in a word

__device__ inline int digit_at(uint32_t key, int shift) { return int(key >> shift & (kRadix - 1)); }

// Counts each digit in every stretch. The counts are ordered by digit, then by stretch.
__global__ void radix_count_kernel(const uint32_t* keys, int64_t n, int shift, Shares shares, uint64_t* counts) {
    __shared__ uint32_t mine[kRadix];
    if (threadIdx.x < kRadix) mine[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        const int64_t first = tile * kTile;
        for (int64_t i = first + threadIdx.x; i < first + kTile && i < n; i += kThreads) {
            atomicAdd(&mine[digit_at(keys[i], shift)], 1u);
        }
    }
    __syncthreads();
    if (threadIdx.x < kRadix) counts[int64_t(threadIdx.x) * shares.count + blockIdx.x] = mine[threadIdx.x];
}

// Moves keys and numbers to the position of their digit. Entries with the same digit keep their order.
__global__ void radix_place_kernel(const uint32_t* keys, const uint32_t* numbers, int64_t n, int shift, Shares shares,
                                   const uint64_t* before, uint32_t* keys_out, uint32_t* numbers_out) {
    __shared__ uint64_t next[kRadix];
    if (threadIdx.x < kRadix) next[threadIdx.x] = before[int64_t(threadIdx.x) * shares.count + blockIdx.x];
    __syncthreads();
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        const int64_t group = tile * kThreads + threadIdx.x;
        const int count = 8 * group < n ? group_size(group, n) : 0;
        uint32_t mine[8];
        uint64_t at[kWords], total[kWords];
        for (int w = 0; w < kWords; ++w) at[w] = 0;
        for (int j = 0; j < count; ++j) {
            mine[j] = keys[8 * group + j];
            const int digit = digit_at(mine[j], shift);
            at[digit / 4] += uint64_t(1) << (16 * (digit % 4));
        }
        for (int w = 0; w < kWords; ++w) at[w] = joined_before(at[w], uint64_t(0), Added<uint64_t>(), &total[w]);
        for (int j = 0; j < count; ++j) {
            const int digit = digit_at(mine[j], shift), place = 16 * (digit % 4);
            const uint64_t to = next[digit] + (at[digit / 4] >> place & 0xFFFFu);
            keys_out[to] = mine[j];
            numbers_out[to] = numbers[8 * group + j];
            at[digit / 4] += uint64_t(1) << place;
        }
        __syncthreads();
        if (threadIdx.x < kRadix) next[threadIdx.x] += total[threadIdx.x / 4] >> (16 * (threadIdx.x % 4)) & 0xFFFFu;
        __syncthreads();
    }
}

// The index of the first of n ascending keys that is at least `key`.
__device__ inline int64_t first_of(const uint32_t* keys, int64_t n, uint32_t key) {
    int64_t low = 0, high = n;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (keys[middle] < key) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

}  // namespace

template <class T>
void count_sketch(const Stream& on, const T* x, int64_t n, int rows, int64_t columns, const RandomKey& key, T* out) {
    const int64_t blocks = divide_up(n, kSketchBlock);
    // Fewer stretches, because each has a count for every digit.
    const Shares shares = shares_of(blocks, kMostSorted);
    uint32_t* lists[4];
    for (uint32_t*& list : lists) list = scratch<uint32_t>(on, blocks);
    uint64_t* before = scratch<uint64_t>(on, kRadix * shares.count + 1);
    int bits = 1;
    while (bits < 32 && (columns / kSketchBlock - 1) >> bits != 0) ++bits;
    for (int row = 0; row < rows; ++row) {
        const SketchHash hash = hash_of_row(key, row, rows);
        uint32_t *keys = lists[0], *numbers = lists[1], *next_keys = lists[2], *next_numbers = lists[3];
        each(on, blocks, [=] __device__(int64_t block) {
            keys[block] = sketch_column(hash, uint64_t(block), uint32_t(columns)) / kSketchBlock;
            numbers[block] = uint32_t(block);
        });
        for (int shift = 0; shift < bits; shift += kRadixBits) {
            launch(on, shares.count, radix_count_kernel, keys, blocks, shift, shares, before);
            add_before(on, before, kRadix * shares.count);
            launch(on, shares.count, radix_place_kernel, keys, numbers, blocks, shift, shares, before, next_keys,
                   next_numbers);
            std::swap(keys, next_keys);
            std::swap(numbers, next_numbers);
        }
        const uint32_t *sorted = keys, *order = numbers;
        map(on, out + row * columns, columns, [=] __device__(int64_t column) {
            const uint32_t key = uint32_t(column / kSketchBlock);
            double sum = 0;
            for (int64_t at = first_of(sorted, blocks, key); at < blocks && sorted[at] == key; ++at) {
                const SketchPlace place = place_of(hash, order[at], uint32_t(columns));
                const uint32_t lane = uint32_t(column) ^ place.column;
                const int64_t i = int64_t(order[at]) * kSketchBlock + lane;
                if (i < n) sum += double(signed_by(place.signs, int(lane), x[i]));
            }
            return T(sum);
        });
    }
}

template <class T>
void sketch_estimate(const Stream& on, const T* sketch, int rows, int64_t columns, const RandomKey& key, T* out,
                     int64_t n) {
    SketchHash* hashes = scratch<SketchHash>(on, rows);
    const RandomKey mine = key;
    each(on, rows, [=] __device__(int64_t row) { hashes[row] = hash_of_row(mine, row, rows); });
    map(on, out, n, [=] __device__(int64_t i) {
        const auto value_of = [&](int row) {
            const SketchPlace place = place_of(hashes[row], uint64_t(i) / kSketchBlock, uint32_t(columns));
            const uint32_t lane = uint32_t(i % kSketchBlock);
            return ordered(signed_by(place.signs, int(lane), sketch[row * columns + (place.column ^ lane)]));
        };
        // The median: half of the other values are not larger. There are few rows, so their values stay in the cache.
        for (int row = 0; row < rows; ++row) {
            const auto value = value_of(row);
            int less = 0, equal = 0;
            for (int other = 0; other < rows; ++other) {
                const auto its = value_of(other);
                less += its < value ? 1 : 0;
                equal += its == value ? 1 : 0;
            }
            if (less <= rows / 2 && rows / 2 < less + equal) return finite_estimate(from_ordered<T>(value));
        }
        return T(0);
    });
}

#define GRACE_MAKE(T)                                                                                              \
    template void count_sketch<T>(const Stream&, const T*, int64_t, int, int64_t, const RandomKey&, T*);           \
    template void sketch_estimate<T>(const Stream&, const T*, int, int64_t, const RandomKey&, T*, int64_t);
GRACE_MAKE(float)
GRACE_MAKE(double)
#undef GRACE_MAKE

}  // namespace gpu
}  // namespace grace
