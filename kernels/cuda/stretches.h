// Passes whose number of results depends on the data: count the results per stretch of the array, sum the counts before
// each stretch, then write the results at these positions.
#pragma once

#include <algorithm>

#include "device.h"

namespace grace {
namespace gpu {

// The tiles of an array, divided into stretches. One block handles one stretch.
struct Shares {
    int64_t tiles, each, count;
};

static inline Shares shares_of(int64_t n, int64_t most = kMostStretches) {
    const int64_t tiles = divide_up(n, kTile), each = std::max<int64_t>(1, divide_up(tiles, most));
    return {tiles, each, divide_up(tiles, each)};
}

__device__ static inline int64_t first_tile(const Shares& shares) { return int64_t(blockIdx.x) * shares.each; }
__device__ static inline int64_t last_tile(const Shares& shares) {
    const int64_t last = first_tile(shares) + shares.each;
    return last < shares.tiles ? last : shares.tiles;
}

// The exclusive prefix sums of `n` values, with the total as one more element at the end. One block handles one list;
// the lists follow each other.
template <class V, class Join> __global__ void before_kernel(V* lists, int64_t n, V none, Join join) {
    V* values = lists + int64_t(blockIdx.x) * (n + 1);
    const int64_t each = (n + kThreads - 1) / kThreads, first = each * threadIdx.x;
    const int64_t end = first + each < n ? first + each : n;
    V mine = none, total;
    for (int64_t i = first; i < end; ++i) mine = join(mine, values[i]);
    V sum = joined_before(mine, none, join, &total);
    for (int64_t i = first; i < end; ++i) {
        const V here = values[i];
        values[i] = sum;
        sum = join(sum, here);
    }
    if (threadIdx.x == 0) values[n] = total;
}

// The sums before every stretch, for one or more lists.
static inline void add_before(const Stream& on, uint64_t* lists, int64_t n, int64_t count = 1) {
    launch(on, count, before_kernel<uint64_t, Added<uint64_t>>, lists, n, uint64_t(0), Added<uint64_t>());
}

}  // namespace gpu
}  // namespace grace
