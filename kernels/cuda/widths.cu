// Codes of variable length: ternary digits with runs of zeros, numbers of 0, 8, 16 or all bits, and leading bits.
#include "grace/leading.h"
#include "ranks.h"
#include "stretches.h"

namespace grace {
namespace gpu {
namespace {

// The byte format of 3LC, as in grace/core/compressors/threelc.py.
constexpr int kDigits = 5, kLongestRun = 14;
constexpr uint32_t kZeroByte = 121, kFirstRun = 243;

// Five digits, the first one highest. Elements beyond the end are zeros.
template <class T> struct TernaryByte {
    const T* x;
    const T* scale;
    int64_t n;
    __device__ uint8_t operator()(int64_t byte) const {
        const T half = *scale * T(0.5);
        uint32_t digits = 0;
        for (int j = 0; j < kDigits; ++j) {
            const int64_t i = byte * kDigits + j;
            digits = 3 * digits + (i < n ? digit_of(x[i], half) : 1u);
        }
        return uint8_t(digits);
    }
};

// The index of the last byte of every stretch that is not all zeros, -1 if there is none.
__global__ void last_kernel(const uint8_t* bytes, int64_t n, Shares shares, int64_t* lasts) {
    int64_t mine = -1;
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        const int64_t group = tile * kThreads + threadIdx.x;
        for (int64_t i = 8 * group; i < 8 * group + 8 && i < n; ++i) mine = bytes[i] != kZeroByte ? i : mine;
    }
    mine = joined(mine, Larger<int64_t>());
    if (threadIdx.x == 0) lasts[blockIdx.x] = mine;
}

// Marks the bytes that begin a code, as bits per group. These are all bytes except those within a run. A run of zeros
// begins after the last other byte, and again every 14 bytes.
__global__ void begins_kernel(const uint8_t* bytes, int64_t n, Shares shares, const int64_t* lasts, uint8_t* begins,
                              uint64_t* counts) {
    int64_t last = lasts[blockIdx.x];
    uint64_t count = 0;
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        const int64_t group = tile * kThreads + threadIdx.x;
        int64_t mine = -1, total;
        for (int64_t i = 8 * group; i < 8 * group + 8 && i < n; ++i) mine = bytes[i] != kZeroByte ? i : mine;
        int64_t before = joined_before(mine, int64_t(-1), Larger<int64_t>(), &total);
        before = before > last ? before : last;
        uint32_t bits = 0;
        for (int64_t i = 8 * group; i < 8 * group + 8 && i < n; ++i) {
            const bool other = bytes[i] != kZeroByte;
            bits |= uint32_t(other || (i - before - 1) % kLongestRun == 0) << (i - 8 * group);
            before = other ? i : before;
        }
        if (8 * group < n) begins[group] = uint8_t(bits);
        count += uint64_t(__popc(bits));
        last = total > last ? total : last;
    }
    count = joined(count, Added<uint64_t>());
    if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

__global__ void runs_kernel(const uint8_t* bytes, int64_t n, Shares shares, const uint8_t* begins,
                            const uint64_t* before, uint8_t* codes) {
    uint64_t at = before[blockIdx.x];
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        const int64_t group = tile * kThreads + threadIdx.x;
        const uint32_t bits = 8 * group < n ? begins[group] : 0u;
        uint32_t total;
        uint64_t to = at + joined_before(uint32_t(__popc(bits)), 0u, Added<uint32_t>(), &total);
        for (uint32_t left = bits; left != 0; left &= left - 1) {
            const int64_t i = 8 * group + __ffs(int(left)) - 1;
            int run = 0;
            while (run < kLongestRun && i + run < n && bytes[i + run] == kZeroByte) ++run;
            codes[to++] = uint8_t(run > 1 ? kFirstRun - 2 + uint32_t(run) : bytes[i]);
        }
        at += total;
    }
}

__device__ inline uint32_t run_of(uint8_t code) { return code >= kFirstRun ? code - (kFirstRun - 2) : 1u; }

__global__ void run_lengths_kernel(const uint8_t* codes, int64_t n, Shares shares, uint64_t* counts) {
    uint64_t count = 0;
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        const int64_t group = tile * kThreads + threadIdx.x;
        for (int64_t i = 8 * group; i < 8 * group + 8 && i < n; ++i) count += run_of(codes[i]);
    }
    count = joined(count, Added<uint64_t>());
    if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

// Writes the bytes that are not runs into `size` bytes of zeros.
__global__ void decode_kernel(const uint8_t* codes, int64_t n, Shares shares, const uint64_t* before, uint8_t* bytes,
                              uint64_t size) {
    uint64_t at = before[blockIdx.x];
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        const int64_t group = tile * kThreads + threadIdx.x;
        uint32_t mine = 0, total;
        for (int64_t i = 8 * group; i < 8 * group + 8 && i < n; ++i) mine += run_of(codes[i]);
        uint64_t to = at + joined_before(mine, 0u, Added<uint32_t>(), &total);
        for (int64_t i = 8 * group; i < 8 * group + 8 && i < n; ++i) {
            if (codes[i] < kFirstRun && to < size) bytes[to] = codes[i];
            to += run_of(codes[i]);
        }
        at += total;
    }
}

template <class T> struct TernaryValue {
    __device__ T operator()(const Coded<T>& rank, int64_t i) const {
        const int digit = int(i % kDigits);
        const uint32_t power = digit == 0 ? 81u : digit == 1 ? 27u : digit == 2 ? 9u : digit == 3 ? 3u : 1u;
        return T(int(rank.codes[i / kDigits] / power % 3u) - 1) * *rank.scales;
    }
};

// The counts of the tags 1, 2 and 3.
struct Three {
    uint64_t of[3];
};
struct AddThree {
    __device__ Three operator()(const Three& a, const Three& b) const {
        return {{a.of[0] + b.of[0], a.of[1] + b.of[1], a.of[2] + b.of[2]}};
    }
};

__device__ inline void count_tags(uint32_t tags, Three* counts) {
    const uint32_t low = tags & 0x5555u, high = tags >> 1 & 0x5555u;
    counts->of[0] += uint64_t(__popc(low & ~high));
    counts->of[1] += uint64_t(__popc(high & ~low));
    counts->of[2] += uint64_t(__popc(low & high));
}

// Reads the tags of a group, 0 beyond the end.
__device__ inline uint32_t load_tags(const uint8_t* tags, int64_t group, int64_t n) {
    if (8 * group >= n) return 0;
    const int count = group_size(group, n);
    uint32_t word = tags[2 * group];
    if (count > 4) word |= uint32_t(tags[2 * group + 1]) << 8;
    return count < 8 ? word & ((1u << (2 * count)) - 1u) : word;
}

// The positions in the three lists, for a thread that iterates over the elements of its group.
struct Places {
    uint64_t of[3];
};

__device__ inline Places places_before(uint32_t tags, const Three& before, Three* total) {
    Three mine = {{0, 0, 0}};
    count_tags(tags, &mine);
    // There are at most 2048 of each in a tile.
    uint64_t all;
    const uint64_t packed = joined_before(mine.of[0] | mine.of[1] << 16 | mine.of[2] << 32, uint64_t(0),
                                          Added<uint64_t>(), &all);
    Places places;
    for (int t = 0; t < 3; ++t) {
        places.of[t] = before.of[t] + (packed >> (16 * t) & 0xFFFFu);
        total->of[t] = before.of[t] + (all >> (16 * t) & 0xFFFFu);
    }
    return places;
}

__device__ inline Three before_stretch(const uint64_t* lists, int64_t count) {
    const int64_t s = blockIdx.x;
    return {{lists[s], lists[s + count + 1], lists[s + 2 * (count + 1)]}};
}

__device__ inline void store_counts(const Three& mine, uint64_t* lists, int64_t count) {
    const Three all = joined(mine, AddThree());
    if (threadIdx.x != 0) return;
    for (int t = 0; t < 3; ++t) lists[blockIdx.x + t * (count + 1)] = all.of[t];
}

template <class T>
__global__ void tags_kernel(const T* x, const T* scale, int64_t n, T bound, T byte_end, T word_end, Shares shares,
                            uint8_t* tags, uint64_t* lists) {
    const T safe = *scale > 0 ? *scale : T(1);
    Three counts = {{0, 0, 0}};
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        const int64_t group = tile * kThreads + threadIdx.x;
        if (8 * group >= n) break;
        const int count = group_size(group, n);
        T found[8];
        load_group(x, group, count, found);
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j < count) word |= precision_tag(found[j] / safe, bound, byte_end, word_end) << (2 * j);
        }
        store_bytes(tags + 2 * group, word, (count + 3) / 4);
        count_tags(word, &counts);
    }
    store_counts(counts, lists, shares.count);
}

__global__ void count_kernel(const uint8_t* tags, int64_t n, Shares shares, uint64_t* lists) {
    Three counts = {{0, 0, 0}};
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        count_tags(load_tags(tags, tile * kThreads + threadIdx.x, n), &counts);
    }
    store_counts(counts, lists, shares.count);
}

template <class T>
__global__ void split_kernel(const T* x, const T* scale, int64_t n, T byte_steps, T word_steps, Shares shares,
                             const uint8_t* tags, const uint64_t* lists, Split<T> out) {
    const T safe = *scale > 0 ? *scale : T(1);
    Three before = before_stretch(lists, shares.count);
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        const int64_t group = tile * kThreads + threadIdx.x;
        const uint32_t word = load_tags(tags, group, n);
        Places at = places_before(word, before, &before);
        if (8 * group < n) store_bytes(out.tags + 2 * group, word, (group_size(group, n) + 3) / 4);
        for (int j = 0; j < 8; ++j) {
            const uint32_t tag = word >> (2 * j) & 3u;
            if (tag == 0) continue;
            const T value = x[8 * group + j] / safe;
            if (tag == 1) out.bytes[at.of[0]++] = int8_t(int32_t(value * byte_steps));
            if (tag == 2) out.words[at.of[1]++] = int16_t(int32_t(value * word_steps));
            if (tag == 3) out.full[at.of[2]++] = value;
        }
    }
}

template <class T>
__global__ void unite_kernel(WidthCodes<T> rank, int64_t n, T byte_step, T word_step, Shares shares,
                             const uint64_t* lists, const T* onto, T* out) {
    Three before = before_stretch(lists, shares.count);
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        const int64_t group = tile * kThreads + threadIdx.x;
        const uint32_t word = load_tags(rank.lists.tags, group, n);
        Places at = places_before(word, before, &before);
        for (int j = 0; j < 8 && 8 * group + j < n; ++j) {
            const int64_t i = 8 * group + j;
            T value = 0;
            const uint32_t tag = word >> (2 * j) & 3u;
            if (tag != 0) {
                const uint64_t from = at.of[tag - 1]++;
                if (from < uint64_t(rank.counts[tag - 1])) {
                    value = tag == 1   ? T(rank.lists.bytes[from]) * byte_step
                            : tag == 2 ? T(rank.lists.words[from]) * word_step
                                       : rank.lists.full[from];
                }
            }
            value *= *rank.lists.scale;
            out[i] = onto == nullptr ? value : onto[i] + value;
        }
    }
}

// The number of bytes of each place and, last, of packed codes, as for Three.
constexpr int kLists = kPlanes + 1;
struct Five {
    uint64_t of[kLists];
};
struct AddFive {
    __device__ Five operator()(const Five& a, const Five& b) const {
        Five sum;
        for (int k = 0; k < kLists; ++k) sum.of[k] = a.of[k] + b.of[k];
        return sum;
    }
};

// The numbers before this thread in its block, and those of the whole block. There are at most 2048 of each.
__device__ inline Five five_before(const Five& mine, Five* total) {
    uint64_t packed = 0, all;
    for (int k = 0; k < kLists; ++k) packed |= mine.of[k] << (12 * k);
    packed = joined_before(packed, uint64_t(0), Added<uint64_t>(), &all);
    Five before;
    for (int k = 0; k < kLists; ++k) {
        before.of[k] = packed >> (12 * k) & 0xFFFu;
        total->of[k] = all >> (12 * k) & 0xFFFu;
    }
    return before;
}

__device__ inline Five lists_before(const uint64_t* lists, int64_t count) {
    Five before;
    for (int k = 0; k < kLists; ++k) before.of[k] = lists[blockIdx.x + k * (count + 1)];
    return before;
}

// Stores the counts of lists `first` to `end` - 1.
__device__ inline void store_five(const Five& mine, uint64_t* lists, int64_t count, int first, int end) {
    const Five all = joined(mine, AddFive());
    if (threadIdx.x != 0) return;
    for (int k = first; k < end; ++k) lists[blockIdx.x + k * (count + 1)] = all.of[k];
}

template <class T> __device__ inline float leading_share(const T* x, const T* scale, int64_t i) {
    return float(x[i] / (*scale > 0 ? *scale : T(1)));
}

// One warp finds the middle and the length of a block.
template <class T>
__global__ void blocks_kernel(const T* x, const T* scale, LeadingForm form, float* middles, uint8_t* lengths) {
    const int lane = int(threadIdx.x % kWarp);
    const int64_t warps = int64_t(gridDim.x) * (kThreads / kWarp);
    // The bound is the same for all threads of a warp, so they leave the loop together.
    for (int64_t block = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp; block < form.blocks(); block += warps) {
        const int64_t first = block * form.block, end = first + form.block < form.n ? first + form.block : form.n;
        int32_t low = INT32_MAX, high = INT32_MIN;
        for (int64_t i = first + lane; i < end; i += kWarp) {
            const int32_t place = ordered_bits(bits_as<int32_t>(leading_share(x, scale, i)));
            low = place < low ? place : low;
            high = place > high ? place : high;
        }
        for (int step = kWarp / 2; step > 0; step /= 2) {
            const int32_t lower = __shfl_xor_sync(kAll, low, step), higher = __shfl_xor_sync(kAll, high, step);
            low = lower < low ? lower : low;
            high = higher > high ? higher : high;
        }
        const float middle = leading_middle(bits_as<float>(ordered_bits(low)), bits_as<float>(ordered_bits(high)));
        uint32_t most = 0;
        for (int64_t i = first + lane; i < end; i += kWarp) {
            const uint32_t size = magnitude_bits(leading_rest(leading_share(x, scale, i), middle));
            most = size > most ? size : most;
        }
        for (int step = kWarp / 2; step > 0; step /= 2) {
            const uint32_t other = __shfl_xor_sync(kAll, most, step);
            most = other > most ? other : most;
        }
        if (lane != 0) continue;
        middles[block] = middle;
        lengths[block] = uint8_t(leading_length(bits_as<float>(most), form));
    }
}

// The words of a group of 8 elements and how many bytes each sends. `quads` is the number of bytes of packed codes, 0 to
// 2, and `leads` has these bytes.
struct LeadingGroup {
    uint32_t words[8], leads, quads;
    int sent[8];
};

template <class T> struct LeadingSource {
    const T *x, *scale;
    const float* middles;
    const uint8_t* lengths;
    LeadingForm form;
    Divisor by;

    __device__ uint32_t word(int64_t i, int64_t block) const {
        const float y = leading_share(x, scale, i < form.n ? i : form.n - 1);
        return bits_as<uint32_t>(leading_rest(y, middles[block])) >> (32 - lengths[block]);
    }
    __device__ LeadingGroup group(int64_t group) const {
        LeadingGroup made = {};
        for (int half = 0; half < 2; ++half) {
            const int64_t first = 8 * group + 4 * half;
            if (first >= form.filled()) break;
            const int64_t block = quotient(first, by);
            const int width = leading_width(lengths[block]);
            if (width == 0) continue;
            uint32_t before = first > block * form.block ? word(first - 1, block) : 0u, codes = 0;
            for (int j = 0; j < 4; ++j) {
                const uint32_t here = word(first + j, block);
                const int sent = first + j == block * form.block ? width : leading_sent(here ^ before, width);
                codes |= uint32_t(width - sent) << (2 * j);
                made.words[4 * half + j] = before = here;
                made.sent[4 * half + j] = sent;
            }
            made.leads |= codes << (8 * made.quads++);
        }
        return made;
    }
};

__device__ inline Five counts_of(const LeadingGroup& group) {
    Five counts = {};
    for (int j = 0; j < 8; ++j) {
        for (int k = 0; k < kPlanes; ++k) counts.of[k] += group.sent[j] > k ? 1u : 0u;
    }
    counts.of[kPlanes] = group.quads;
    return counts;
}

template <class T> __global__ void leading_counts_kernel(LeadingSource<T> from, Shares shares, uint64_t* lists) {
    Five counts = {};
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        counts = AddFive()(counts, counts_of(from.group(tile * kThreads + threadIdx.x)));
    }
    store_five(counts, lists, shares.count, 0, kLists);
}

// The starts of the lists of bytes, one for each place, in the list of all bytes.
__device__ inline void starts_of(const uint64_t* lists, int64_t count, uint64_t starts[kPlanes]) {
    uint64_t start = 0;
    for (int k = 0; k < kPlanes; ++k) {
        starts[k] = start;
        start += lists[count + k * (count + 1)];
    }
}

template <class T>
__global__ void leading_write_kernel(LeadingSource<T> from, Shares shares, const uint64_t* lists, LeadingRoom out) {
    Five before = lists_before(lists, shares.count);
    uint64_t starts[kPlanes];
    starts_of(lists, shares.count, starts);
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        const LeadingGroup group = from.group(tile * kThreads + threadIdx.x);
        Five total;
        const Five at = AddFive()(before, five_before(counts_of(group), &total));
        before = AddFive()(before, total);
        for (uint32_t q = 0; q < group.quads; ++q) out.leads[at.of[kPlanes] + q] = uint8_t(group.leads >> (8 * q));
        for (int k = 0; k < kPlanes; ++k) {
            uint64_t to = starts[k] + at.of[k];
            for (int j = 0; j < 8; ++j) {
                if (group.sent[j] > k) out.bytes[to++] = uint8_t(group.words[j] >> (8 * k));
            }
        }
    }
}

// What a payload says of the 8 elements of a group.
template <class T> struct LeadingTarget {
    LeadingCodes<T> rank;
    LeadingForm form;
    Divisor by;

    __device__ int kept(int64_t block) const { return rank.lengths[block] < 32 ? rank.lengths[block] : 32; }
    // The number of bytes of packed codes.
    __device__ uint32_t quads(int64_t group) const {
        uint32_t quads = 0;
        for (int64_t i = 8 * group; i < 8 * group + 8 && i < form.filled(); i += 4) {
            quads += rank.lengths[quotient(i, by)] > 0 ? 1u : 0u;
        }
        return quads;
    }
    // Their codes begin at byte `quad`. Those that are missing are 0.
    __device__ void read(int64_t group, uint64_t quad, int sent[8]) const {
        for (int half = 0; half < 2; ++half) {
            const int64_t first = 8 * group + 4 * half;
            const int width = first < form.filled() ? leading_width(kept(quotient(first, by))) : 0;
            uint32_t codes = 0;
            if (width > 0) {
                codes = quad < uint64_t(rank.count) ? rank.leads[quad] : 0u;
                ++quad;
            }
            for (int j = 0; j < 4; ++j) {
                const int mine = width - int(codes >> (2 * j) & 3u);
                sent[4 * half + j] = mine < 0 ? 0 : mine;
            }
        }
    }
};

template <class T> __global__ void quads_kernel(LeadingTarget<T> from, Shares shares, uint64_t* lists) {
    Five counts = {};
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        counts.of[kPlanes] += from.quads(tile * kThreads + threadIdx.x);
    }
    store_five(counts, lists, shares.count, kPlanes, kLists);
}

template <class T> __global__ void sent_kernel(LeadingTarget<T> from, Shares shares, uint64_t* lists) {
    uint64_t quad = lists[blockIdx.x + kPlanes * (shares.count + 1)];
    Five counts = {};
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        const int64_t group = tile * kThreads + threadIdx.x;
        uint32_t total;
        int sent[8];
        from.read(group, quad + joined_before(from.quads(group), 0u, Added<uint32_t>(), &total), sent);
        quad += total;
        for (int j = 0; j < 8; ++j) {
            for (int k = 0; k < kPlanes; ++k) counts.of[k] += sent[j] > k ? 1u : 0u;
        }
    }
    store_five(counts, lists, shares.count, 0, kPlanes);
}

template <class T>
__global__ void leading_sum_kernel(LeadingTarget<T> from, Shares shares, const uint64_t* lists, const T* onto, T* out) {
    Five before = lists_before(lists, shares.count);
    uint64_t starts[kPlanes];
    starts_of(lists, shares.count, starts);
    const uint64_t size = uint64_t(from.rank.size);
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        const int64_t group = tile * kThreads + threadIdx.x;
        uint32_t quads;
        int sent[8];
        from.read(group, before.of[kPlanes] + joined_before(from.quads(group), 0u, Added<uint32_t>(), &quads), sent);
        Five mine = {}, total;
        for (int j = 0; j < 8; ++j) {
            for (int k = 0; k < kPlanes; ++k) mine.of[k] += sent[j] > k ? 1u : 0u;
        }
        Five at = AddFive()(before, five_before(mine, &total));
        before = AddFive()(before, total);
        before.of[kPlanes] += quads;
        for (int j = 0; j < 8 && 8 * group + j < from.form.n; ++j) {
            const int64_t i = 8 * group + j, block = quotient(i, from.by);
            const int kept = from.kept(block);
            uint32_t word = 0;
            for (int k = 0; k < leading_width(kept); ++k) {
                at.of[k] += sent[j] > k ? 1u : 0u;
                // A byte that is not sent is that of the last element that sends one.
                const uint64_t next = starts[k] + at.of[k];
                if (next > 0 && next <= size) word |= uint32_t(from.rank.bytes[next - 1]) << (8 * k);
            }
            const T value = T(leading_value(word, kept, from.rank.middles[block])) * *from.rank.scale;
            out[i] = onto == nullptr ? value : onto[i] + value;
        }
    }
}

}  // namespace

template <class T>
void ternary_encode(const Stream& on, const T* x, const T* scale, int64_t n,
                    const std::function<uint8_t*(int64_t count)>& room) {
    const int64_t size = divide_up(n, kDigits);
    const Shares shares = shares_of(size);
    uint8_t *bytes = scratch<uint8_t>(on, size), *begins = scratch<uint8_t>(on, divide_up(size, 8));
    int64_t* lasts = scratch<int64_t>(on, shares.count + 1);
    uint64_t* before = scratch<uint64_t>(on, shares.count + 1);
    map(on, bytes, size, TernaryByte<T>{x, scale, n});
    launch(on, shares.count, last_kernel, bytes, size, shares, lasts);
    launch(on, 1, before_kernel<int64_t, Larger<int64_t>>, lasts, shares.count, int64_t(-1), Larger<int64_t>());
    launch(on, shares.count, begins_kernel, bytes, size, shares, lasts, begins, before);
    add_before(on, before, shares.count);
    uint8_t* codes = room(static_cast<int64_t>(fetched(on, before + shares.count)));
    launch(on, shares.count, runs_kernel, bytes, size, shares, begins, before, codes);
}

template <class T>
void ternary_sum(const Stream& on, const std::vector<TernaryCodes<T>>& ranks, const T* onto, T* out, int64_t n) {
    const int64_t size = divide_up(n, kDigits);
    int* fault = on.fault;
    std::vector<Coded<T>> decoded;
    for (const TernaryCodes<T>& rank : ranks) {
        const Shares shares = shares_of(rank.count);
        uint8_t* bytes = scratch<uint8_t>(on, size);
        uint64_t* before = scratch<uint64_t>(on, shares.count + 1);
        const uint64_t* total = before + shares.count;
        if (size > 0) check(cudaMemsetAsync(bytes, kZeroByte, static_cast<size_t>(size), on.handle), "digits of zeros");
        launch(on, shares.count, run_lengths_kernel, rank.codes, rank.count, shares, before);
        add_before(on, before, shares.count);
        each(on, 1, [=] __device__(int64_t) {
            if (*total != uint64_t(size)) note_fault(fault);
        });
        launch(on, shares.count, decode_kernel, rank.codes, rank.count, shares, before, bytes, uint64_t(size));
        decoded.push_back({bytes, rank.scale});
    }
    sum_parts(on, decoded, onto, out, n, TernaryValue<T>());
}

template <class T>
void precision_encode(const Stream& on, const T* x, const T* scale, T bound, T byte_end, T word_end, T byte_steps,
                      T word_steps, int64_t n,
                      const std::function<Split<T>(int64_t full, int64_t words, int64_t bytes)>& room) {
    const Shares shares = shares_of(n);
    const int64_t count = shares.count;
    uint8_t* tags = scratch<uint8_t>(on, packed_size(n, 2));
    uint64_t* lists = scratch<uint64_t>(on, 3 * (count + 1));
    Three* totals = scratch<Three>(on, 1);
    launch(on, count, tags_kernel<T>, x, scale, n, bound, byte_end, word_end, shares, tags, lists);
    add_before(on, lists, count, 3);
    each(on, 3, [=] __device__(int64_t t) { totals->of[t] = lists[count + t * (count + 1)]; });
    const Three found = fetched(on, totals);
    const Split<T> out = room(static_cast<int64_t>(found.of[2]), static_cast<int64_t>(found.of[1]),
                              static_cast<int64_t>(found.of[0]));
    launch(on, count, split_kernel<T>, x, scale, n, byte_steps, word_steps, shares, tags, lists, out);
}

template <class T>
void precision_sum(const Stream& on, const std::vector<WidthCodes<T>>& ranks, T byte_step, T word_step, const T* onto,
                   T* out, int64_t n) {
    const Shares shares = shares_of(n);
    const int64_t count = shares.count;
    int* fault = on.fault;
    uint64_t* lists = scratch<uint64_t>(on, 3 * (count + 1));
    for (size_t r = 0; r < ranks.size(); ++r) {
        const WidthCodes<T> rank = ranks[r];
        launch(on, count, count_kernel, rank.lists.tags, n, shares, lists);
        add_before(on, lists, count, 3);
        each(on, 3, [=] __device__(int64_t t) {
            if (lists[count + t * (count + 1)] != uint64_t(rank.counts[t])) note_fault(fault);
        });
        launch(on, count, unite_kernel<T>, rank, n, byte_step, word_step, shares, lists, r > 0 ? out : onto, out);
    }
}

template <class T>
void leading_encode(const Stream& on, const T* x, const T* scale, const LeadingForm& form, float* middles,
                    uint8_t* lengths, const std::function<LeadingRoom(int64_t leads, int64_t bytes)>& room) {
    const LeadingSource<T> from{x, scale, middles, lengths, form, divisor(form.block)};
    const Shares shares = shares_of(form.filled());
    const int64_t count = shares.count;
    uint64_t* lists = scratch<uint64_t>(on, kLists * (count + 1));
    Five* totals = scratch<Five>(on, 1);
    launch(on, blocks_for(form.blocks(), kThreads / kWarp), blocks_kernel<T>, x, scale, form, middles, lengths);
    launch(on, count, leading_counts_kernel<T>, from, shares, lists);
    add_before(on, lists, count, kLists);
    each(on, kLists, [=] __device__(int64_t k) { totals->of[k] = lists[count + k * (count + 1)]; });
    const Five found = fetched(on, totals);
    uint64_t bytes = 0;
    for (int k = 0; k < kPlanes; ++k) bytes += found.of[k];
    const LeadingRoom out = room(static_cast<int64_t>(found.of[kPlanes]), static_cast<int64_t>(bytes));
    launch(on, count, leading_write_kernel<T>, from, shares, lists, out);
}

template <class T>
void leading_sum(const Stream& on, const std::vector<LeadingCodes<T>>& ranks, const LeadingForm& form, const T* onto,
                 T* out) {
    const Shares shares = shares_of(form.filled());
    const int64_t count = shares.count;
    int* fault = on.fault;
    uint64_t* lists = scratch<uint64_t>(on, kLists * (count + 1));
    uint64_t* quads = lists + kPlanes * (count + 1);
    for (size_t r = 0; r < ranks.size(); ++r) {
        const LeadingTarget<T> from{ranks[r], form, divisor(form.block)};
        launch(on, count, quads_kernel<T>, from, shares, lists);
        add_before(on, quads, count);
        launch(on, count, sent_kernel<T>, from, shares, lists);
        add_before(on, lists, count, kPlanes);
        each(on, 1, [=] __device__(int64_t) {
            uint64_t bytes = 0;
            for (int k = 0; k < kPlanes; ++k) bytes += lists[count + k * (count + 1)];
            if (quads[count] != uint64_t(from.rank.count) || bytes != uint64_t(from.rank.size)) note_fault(fault);
        });
        launch(on, count, leading_sum_kernel<T>, from, shares, lists, r > 0 ? out : onto, out);
    }
}

#define GRACE_MAKE(T)                                                                                                  \
    template void ternary_encode<T>(const Stream&, const T*, const T*, int64_t, const std::function<uint8_t*(int64_t)>&); \
    template void ternary_sum<T>(const Stream&, const std::vector<TernaryCodes<T>>&, const T*, T*, int64_t);            \
    template void precision_encode<T>(const Stream&, const T*, const T*, T, T, T, T, T, int64_t,                                 \
                                      const std::function<Split<T>(int64_t, int64_t, int64_t)>&);                      \
    template void precision_sum<T>(const Stream&, const std::vector<WidthCodes<T>>&, T, T, const T*, T*, int64_t);      \
    template void leading_encode<T>(const Stream&, const T*, const T*, const LeadingForm&, float*, uint8_t*,            \
                                    const std::function<LeadingRoom(int64_t, int64_t)>&);                                \
    template void leading_sum<T>(const Stream&, const std::vector<LeadingCodes<T>>&, const LeadingForm&, const T*, T*);
GRACE_MAKE(float)
GRACE_MAKE(double)
#undef GRACE_MAKE

}  // namespace gpu
}  // namespace grace
