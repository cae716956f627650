// Selection of elements, and operations at a list of indices.
//
// A selection marks elements by bits, computes the number of marks before every stretch of the array, and then writes
// values and indices to their positions. x is read once, the marks are written and read once.
#include "grace/vertices.h"
#include "ranks.h"
#include "stretches.h"

namespace grace {
namespace gpu {
namespace {

constexpr int kDigit = 11;  // bits per step of the search for a magnitude
constexpr int kBins = 1 << kDigit;
constexpr int kPerThread = kBins / kThreads;

// Two counts below 2^31 in one number: the elements that pass, and the tied elements.
__device__ inline uint64_t counts_of(uint32_t passed, uint32_t tied) { return uint64_t(passed) | uint64_t(tied) << 32; }

// What `moments` finds in a part of an array.
struct Above {
    int64_t number;
    double sizes, positive, squares;
};
struct JoinAbove {
    __device__ Above operator()(const Above& a, const Above& b) const {
        return {a.number + b.number, a.sizes + b.sizes, a.positive + b.positive, a.squares + b.squares};
    }
};

// The state of the search for odds.
template <class T> struct OddsSearch {
    T unit, bound;
    double squares;
    bool goes_on;
};
struct JoinUncertain {
    __device__ Uncertain operator()(const Uncertain& a, const Uncertain& b) const {
        return {a.number + b.number, a.sizes + b.sizes, a.squares + b.squares};
    }
};

// The marks, as bits per group: the elements that pass, and the tied ones, of which only the first pass (`tied`, may be
// null).
struct Marks {
    uint8_t *passed, *tied;
    uint64_t* before;  // the counts before every stretch, and at the end the totals
};

enum Mark { kLeft = 0, kPassed = 1, kTied = 2 };

// The elements that are certain or drawn, with zeros in place of all others, which have a smaller magnitude.
template <class T> struct DrawnElements {
    const T* x;
    const double* pair;
    RandomKey key;
    __device__ void operator()(int64_t group, int count, T found[8]) const {
        uint32_t random[8];
        philox(key, uint32_t(2 * group), random);
        philox(key, uint32_t(2 * group + 1), random + 4);
        load_group(x, group, count, found);
        const Odds odds = odds_of(pair);
#pragma unroll
        for (int j = 0; j < 8; ++j) found[j] = is_drawn(chance_of(found[j], odds), random[j]) ? found[j] : T(0);
    }
};
// The elements that reach the maximum of their bin if the gradient is added, with zeros in place of all others.
template <class T> struct ReachedElements {
    const T *x, *gradient, *maxima;
    Divisor width;
    __device__ void operator()(int64_t group, int count, T found[8]) const {
        T more[8];
        load_group(x, group, count, found);
        load_group(gradient, group, count, more);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            // Elements beyond the end have no bin.
            const bool reached = j < count && magnitude(found[j] + more[j]) >= maxima[quotient(8 * group + j, width)];
            found[j] = reached ? found[j] : T(0);
        }
    }
};
// The clear elements, with zeros in place of all others.
template <class T> struct ClearElements {
    const T *x, *noise;
    double alpha;
    __device__ void operator()(int64_t group, int count, T found[8]) const {
        load_group(x, group, count, found);
        if (noise == nullptr) return;
        T variance[8];
        load_group(noise, group, count, variance);
#pragma unroll
        for (int j = 0; j < 8; ++j) found[j] = is_clear(found[j], variance[j], alpha) ? found[j] : T(0);
    }
};
// Of a group of items 1 for those that a Bloom filter reports.
struct FilterItems {
    const uint8_t* filter;
    uint32_t bits;
    const ItemHash* hashes;
    int count;
    __device__ bool reports(uint64_t item) const {
        for (int i = 0; i < count; ++i) {
            if (bit_at(filter, filter_place(hashes[i], item, bits)) == 0) return false;
        }
        return true;
    }
    __device__ void operator()(int64_t group, int size, uint8_t found[8]) const {
#pragma unroll
        for (int j = 0; j < 8; ++j) found[j] = uint8_t(j < size && reports(uint64_t(8 * group + j)));
    }
};
struct IsReported {
    __device__ int operator()(uint8_t found) const { return found != 0 ? kPassed : kLeft; }
};
template <class T> struct IsSent {
    const int32_t* top;
    __device__ int operator()(T x) const { return magnitude(x) >= least_sent<T>(*top) ? kPassed : kLeft; }
};

template <class T> struct IsSigned {
    __device__ int operator()(T x) const { return x > T(0) ? kPassed : x < T(0) ? kTied : kLeft; }
};

template <class T> struct IsCertain {
    const T* bound;
    __device__ int operator()(T x) const { return magnitude(x) >= *bound ? kPassed : x != T(0) ? kTied : kLeft; }
};

// Marks elements by test(element), after source(group, count, elements) has read the elements of a group.
template <class T, class Source, class Test>
__global__ void mark_kernel(Source source, int64_t n, Shares shares, Test test, Marks marks) {
    const int64_t first = first_tile(shares), last = last_tile(shares);
    uint64_t counts = 0;
    for (int64_t tile = first; tile < last; ++tile) {
        const int64_t group = tile * kThreads + threadIdx.x;
        if (8 * group >= n) break;
        const int count = group_size(group, n);
        T found[8];
        source(group, count, found);
        uint32_t passed = 0, tied = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int mark = j < count ? test(found[j]) : kLeft;
            passed |= uint32_t(mark == kPassed) << j;
            tied |= uint32_t(mark == kTied) << j;
        }
        marks.passed[group] = uint8_t(passed);
        if (marks.tied != nullptr) marks.tied[group] = uint8_t(tied);
        counts += counts_of(uint32_t(__popc(passed)), uint32_t(__popc(tied)));
    }
    counts = joined(counts, Added<uint64_t>());
    if (threadIdx.x == 0) marks.before[blockIdx.x] = counts;
}

// Writes the values and indices of the marked elements in order.
template <class T> struct WriteFound {
    const T* x;
    Found<T> out;
    __device__ void operator()(bool, int64_t passed, int64_t tied, int64_t i) const {
        out.values[passed + tied] = x[i];
        out.indices[passed + tied] = int32_t(i);
    }
};

// Writes two lists, of the elements that pass and of the tied ones.
template <class T> struct WriteDrawn {
    const T* x;
    Drawn<T> out;
    __device__ void operator()(bool is_tied, int64_t passed, int64_t tied, int64_t i) const {
        if (is_tied) {
            out.drawn[tied] = signed_index(x[i], int32_t(i));
        } else {
            out.values[passed] = x[i];
            out.indices[passed] = int32_t(i);
        }
    }
};

struct WriteSigns {
    Signs out;
    __device__ void operator()(bool is_tied, int64_t passed, int64_t tied, int64_t i) const {
        if (is_tied) {
            out.negative[tied] = int32_t(i);
        } else {
            out.positive[passed] = int32_t(i);
        }
    }
};

struct WriteIndex {
    int32_t* indices;
    __device__ void operator()(bool, int64_t passed, int64_t, int64_t i) const { indices[passed] = int32_t(i); }
};

template <class T> struct WriteWords {
    const T* x;
    const int32_t* top;
    int32_t* words;
    __device__ void operator()(bool, int64_t passed, int64_t, int64_t i) const {
        words[passed] = power_word(x[i], int32_t(i), *top);
    }
};

// Runs write(is tied, marked before, tied before, index) for the marked elements, and the first *ties of the tied ones,
// or all of them.
template <class Write>
__global__ void compact_kernel(int64_t n, Shares shares, Marks marks, const int64_t* ties, Write write) {
    const int64_t most = ties == nullptr ? INT64_MAX : *ties;
    const int64_t first = first_tile(shares), last = last_tile(shares);
    int64_t passed_before = int64_t(marks.before[blockIdx.x] & 0xFFFFFFFFu);
    int64_t tied_before = int64_t(marks.before[blockIdx.x] >> 32);
    for (int64_t tile = first; tile < last; ++tile) {
        const int64_t group = tile * kThreads + threadIdx.x;
        const bool inside = 8 * group < n;
        const uint32_t passed = inside ? marks.passed[group] : 0u;
        const uint32_t tied = inside && marks.tied != nullptr ? marks.tied[group] : 0u;
        if (!__syncthreads_or(int(passed | tied))) continue;
        // At most 2048 of each in a tile, so one number holds both counts.
        const uint32_t mine = uint32_t(__popc(passed)) | uint32_t(__popc(tied)) << 16;
        uint32_t total;
        const uint32_t before = joined_before(mine, 0u, Added<uint32_t>(), &total);
        int64_t at = passed_before + (before & 0xFFFFu), tie = tied_before + (before >> 16);
        for (uint32_t left = passed | tied; left != 0; left &= left - 1) {
            const int j = __ffs(int(left)) - 1;
            const bool is_tied = (tied >> j & 1u) != 0;
            if (!is_tied || tie < most) write(is_tied, at, tie < most ? tie : most, 8 * group + j);
            is_tied ? ++tie : ++at;
        }
        passed_before += total & 0xFFFFu;
        tied_before += total >> 16;
    }
}

// Marks without their sums before every stretch.
template <class T, class Source, class Test>
Marks marked(const Stream& on, Source source, int64_t n, const Shares& shares, bool ties, Test test) {
    const int64_t groups = divide_up(n, 8);
    const Marks marks{scratch<uint8_t>(on, groups), ties ? scratch<uint8_t>(on, groups) : nullptr,
                      scratch<uint64_t>(on, shares.count + 1)};
    launch(on, shares.count, mark_kernel<T, Source, Test>, source, n, shares, test, marks);
    return marks;
}

template <class T, class Source, class Test>
Marks mark(const Stream& on, Source source, int64_t n, const Shares& shares, bool ties, Test test) {
    const Marks marks = marked<T>(on, source, n, shares, ties, test);
    add_before(on, marks.before, shares.count);
    return marks;
}

template <class T> struct Exceeds {
    const T* bound;
    bool strict, nonzero;
    __device__ int operator()(T x) const {
        const T size = magnitude(x);
        const bool passes = strict ? size > *bound : size >= *bound;
        return passes && (!nonzero || size > T(0)) ? kPassed : kLeft;
    }
};

// The state of the search for the k-th largest magnitude: the upper bits that are known, and its rank among the
// magnitudes with these bits.
struct Search {
    uint64_t known;
    int64_t rank;
};

// The sign of the elements to search: 1, -1, or 0 for all.
template <class T> __device__ inline bool is_of(T x, int sign) { return sign == 0 || (sign > 0 ? x > 0 : x < 0); }

// Elements whose upper bits are larger than the known ones pass, and those with the known bits are tied.
template <class T> struct AgainstFound {
    const Search* search;
    int sign, shift;
    __device__ int operator()(T x) const {
        if (!is_of(x, sign)) return kLeft;
        const uint64_t size = uint64_t(magnitude_bits(x)) >> shift, bound = search->known >> shift;
        return size > bound ? kPassed : size == bound ? kTied : kLeft;
    }
};

// Counts of each digit, which a block adds up before it adds them to those of all blocks.
struct Bins {
    uint32_t* mine;  // of the block
    int shift, bits;

    __device__ void clear() const {
        for (int b = int(threadIdx.x); b < kBins; b += kThreads) mine[b] = 0;
        __syncthreads();
    }
    __device__ void count(uint64_t size) const {
        atomicAdd(&mine[(size >> shift) & ((uint64_t(1) << bits) - 1)], 1u);
    }
    __device__ void add_to(uint32_t* all) const {
        __syncthreads();
        for (int b = int(threadIdx.x); b < kBins; b += kThreads) {
            if (mine[b] != 0) atomicAdd(&all[b], mine[b]);
        }
    }
};

// Counts the first digit of the magnitudes of what a source reads.
template <class T, class Source>
__global__ void first_digit_kernel(Source source, int64_t n, int sign, int shift, int bits, uint32_t* all) {
    __shared__ uint32_t mine[kBins];
    const Bins bins{mine, shift, bits};
    bins.clear();
    for (int64_t group = int64_t(blockIdx.x) * kThreads + threadIdx.x; 8 * group < n;
         group += int64_t(gridDim.x) * kThreads) {
        const int count = group_size(group, n);
        T found[8];
        source(group, count, found);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j < count && is_of(found[j], sign)) bins.count(magnitude_bits(found[j]));
        }
    }
    bins.add_to(all);
}

// Counts a further digit. Only tied elements can have the known upper bits.
template <class T>
__global__ void next_digit_kernel(const T* x, int64_t n, const uint8_t* tied, int shift, int bits, const Search* search,
                                  uint32_t* all) {
    __shared__ uint32_t mine[kBins];
    const Bins bins{mine, shift, bits};
    bins.clear();
    const uint64_t known = search->known >> (shift + bits);
    for (int64_t group = int64_t(blockIdx.x) * kThreads + threadIdx.x; 8 * group < n;
         group += int64_t(gridDim.x) * kThreads) {
        for (uint32_t left = tied[group]; left != 0; left &= left - 1) {
            const uint64_t size = magnitude_bits(x[8 * group + __ffs(int(left)) - 1]);
            if (size >> (shift + bits) == known) bins.count(size);
        }
    }
    bins.add_to(all);
}

// Divides the elements that were tied by their first digit into those that pass, those that are tied by all digits and
// the others, and counts the marks.
template <class T>
__global__ void settle_kernel(const T* x, int64_t n, Shares shares, AgainstFound<T> test, Marks marks) {
    uint64_t counts = 0;
    for (int64_t tile = first_tile(shares); tile < last_tile(shares); ++tile) {
        const int64_t group = tile * kThreads + threadIdx.x;
        if (8 * group >= n) break;
        uint32_t passed = marks.passed[group], tied = 0;
        for (uint32_t left = marks.tied[group]; left != 0; left &= left - 1) {
            const int j = __ffs(int(left)) - 1, mark = test(x[8 * group + j]);
            passed |= uint32_t(mark == kPassed) << j;
            tied |= uint32_t(mark == kTied) << j;
        }
        marks.passed[group] = uint8_t(passed);
        marks.tied[group] = uint8_t(tied);
        counts += counts_of(uint32_t(__popc(passed)), uint32_t(__popc(tied)));
    }
    counts = joined(counts, Added<uint64_t>());
    if (threadIdx.x == 0) marks.before[blockIdx.x] = counts;
}

// Finds the digit at the wanted rank. One block; thread 0 has the largest digits.
__global__ void digit_kernel(const uint32_t* bins, int shift, Search* search) {
    const int64_t rank = search->rank;
    const int top = kBins - 1 - kPerThread * int(threadIdx.x);
    uint32_t mine = 0, total;
    for (int j = 0; j < kPerThread; ++j) mine += bins[top - j];
    int64_t before = joined_before(mine, 0u, Added<uint32_t>(), &total);
    if (before >= rank || rank > before + mine) return;
    int digit = top;
    while (rank > before + bins[digit]) before += bins[digit--];
    search->known |= uint64_t(digit) << shift;
    search->rank = rank - before;
}

__device__ inline bool inside(int32_t index, int64_t n, int* fault) {
    const bool good = index >= 0 && index < n;
    if (!good) note_fault(fault);
    return good;
}

// The k largest magnitudes among the elements of a sign, of the array x that the source reads. There are at least k > 0
// of them. The array is read twice: for the first digit of the k-th magnitude, and to mark the elements by it. After
// that only those tied by it are read.
template <class T, class Source>
void largest(const Stream& on, Source source, const T* x, int64_t n, int sign, int64_t k, T* values, int32_t* indices) {
    Search* search = scratch<Search>(on, 1);
    each(on, 1, [=] __device__(int64_t) { *search = Search{0, k}; });
    uint32_t* bins = scratch<uint32_t>(on, kBins);
    const Shares shares = shares_of(n);
    const int64_t blocks = std::min(kMostParts, divide_up(n, kTile));
    Marks marks{};
    for (int high = int(sizeof(T)) * 8 - 1; high > 0;) {
        const bool first = marks.passed == nullptr;
        const int bits = std::min(kDigit, high), shift = high - bits;
        check(cudaMemsetAsync(bins, 0, kBins * sizeof(uint32_t), on.handle), "zeros");
        if (first) {
            launch(on, blocks, first_digit_kernel<T, Source>, source, n, sign, shift, bits, bins);
        } else {
            launch(on, blocks, next_digit_kernel<T>, x, n, marks.tied, shift, bits, search, bins);
        }
        launch(on, 1, digit_kernel, bins, shift, search);
        if (first) marks = marked<T>(on, Elements<T>{x}, n, shares, true, AgainstFound<T>{search, sign, shift});
        high = shift;
    }
    launch(on, shares.count, settle_kernel<T>, x, n, shares, AgainstFound<T>{search, sign, 0}, marks);
    add_before(on, marks.before, shares.count);
    const WriteFound<T> write{x, {values, indices}};
    launch(on, shares.count, compact_kernel<WriteFound<T>>, n, shares, marks, &search->rank, write);
}

// All elements.
template <class T> void take_all(const Stream& on, const T* x, int64_t n, T* values, int32_t* indices) {
    each(on, n, [=] __device__(int64_t i) {
        values[i] = x[i];
        indices[i] = int32_t(i);
    });
}

// The elements that a source reads and a test passes, of the array x. Waits for the stream.
template <class T, class Source, class Test>
void select_from(const Stream& on, Source source, const T* x, Test test, int64_t n, const Room<T>& room) {
    const Shares shares = shares_of(n);
    const Marks marks = mark<T>(on, source, n, shares, false, test);
    const int64_t count = int64_t(fetched(on, marks.before + shares.count) & 0xFFFFFFFFu);
    const WriteFound<T> write{x, room(count)};
    if (count == 0) return;
    launch(on, shares.count, compact_kernel<WriteFound<T>>, n, shares, marks, nullptr, write);
}

}  // namespace

template <class T>
void select(const Stream& on, const T* x, const T* bound, bool strict, bool nonzero, int64_t n, const Room<T>& room) {
    select_from(on, Elements<T>{x}, x, Exceeds<T>{bound, strict, nonzero}, n, room);
}

template <class T>
void sum_select(const Stream& on, const T* x, T a, const T* y, T b, T* out, const T* bound, bool strict, int64_t n,
                const Room<T>& room, const std::function<uint8_t*()>& good) {
    // The result follows those whose lengths depend on the data.
    uint8_t* all = scratch<uint8_t>(on, 1);
    set_good(on, all);
    select_from(on, WeightedSum<T>{x, a, y, b, out, all}, out, Exceeds<T>{bound, strict, false}, n, room);
    uint8_t* to = good();
    each(on, 1, [=] __device__(int64_t) { *to = *all; });
}

template <class T>
void power_words(const Stream& on, const T* x, const T* noise, double alpha, T* scale, int64_t n,
                 const std::function<int32_t*(int64_t count)>& room) {
    using Word = typename Format<T>::Word;
    const ClearElements<T> clear{x, noise, alpha};
    int32_t* top = scratch<int32_t>(on, 1);
    reduce(
        on, divide_up(n, 8), Word(0),
        [=] __device__(int64_t group) {
            T found[8];
            clear(group, group_size(group, n), found);
            Word most = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) most = Larger<Word>()(most, magnitude_bits(found[j]));
            return most;
        },
        Larger<Word>(),
        [=] __device__(Word most) {
            *top = nearest_exponent(bits_as<T>(most));
            *scale = power_of<T>(*top);
        });
    const Shares shares = shares_of(n);
    const Marks marks = mark<T>(on, clear, n, shares, false, IsSent<T>{top});
    const int64_t count = int64_t(fetched(on, marks.before + shares.count) & 0xFFFFFFFFu);
    const WriteWords<T> write{x, top, room(count)};
    if (count == 0) return;
    launch(on, shares.count, compact_kernel<WriteWords<T>>, n, shares, marks, nullptr, write);
}

void filter_positions(const Stream& on, const uint8_t* filter, int64_t bits, int count, const RandomKey& key, int64_t n,
                      const std::function<int32_t*(int64_t reported)>& room) {
    ItemHash* hashes = scratch<ItemHash>(on, count);
    const RandomKey mine = key;
    each(on, count, [=] __device__(int64_t i) { hashes[i] = hash_of_items(mine, i); });
    const Shares shares = shares_of(n);
    const FilterItems items{filter, uint32_t(bits), hashes, count};
    const Marks marks = mark<uint8_t>(on, items, n, shares, false, IsReported{});
    const int64_t found = int64_t(fetched(on, marks.before + shares.count) & 0xFFFFFFFFu);
    const WriteIndex write{room(found)};
    if (found == 0) return;
    launch(on, shares.count, compact_kernel<WriteIndex>, n, shares, marks, nullptr, write);
}

template <class T> void keep_odds(const Stream& on, const T* x, int64_t k, double budget, double* out, int64_t n) {
    OddsSearch<T>* search = scratch<OddsSearch<T>>(on, 1);
    T* most = scratch<T>(on, 1);
    max_abs(on, x, n, most);
    each(on, 1, [=] __device__(int64_t) {
        out[0] = double(*most);
        out[1] = 0;
        *search = {unit_of(*most), T(0), 0.0, false};
    });
    for (bool first = true, goes_on = true; goes_on; first = false) {
        each(on, 1, [=] __device__(int64_t) { search->bound = certain_from<T>(odds_of(out)); });
        reduce(
            on, divide_up(n, 8), Uncertain{0, 0, 0},
            [=] __device__(int64_t group) {
                const int count = group_size(group, n);
                T found[8];
                load_group(x, group, count, found);
                const T bound = search->bound, unit = search->unit;
                Uncertain sums{0, 0, 0};
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const double size = double(magnitude(found[j]) * unit);
                    if (j < count && magnitude(found[j]) < bound) sums = JoinUncertain()(sums, {1, size, size * size});
                }
                return sums;
            },
            JoinUncertain(),
            [=] __device__(const Uncertain& all) {
                const Uncertain sums = in_largest(all, odds_of(out).largest * double(search->unit));
                if (first) search->squares = sums.squares;
                const double next = next_factor(sums, search->squares, n, k, budget, out[1]);
                search->goes_on = next > out[1];
                out[1] = next;
            });
        goes_on = fetched(on, &search->goes_on);
    }
}

template <class T>
void draw_kept(const Stream& on, const T* x, const double* pair, const RandomKey& key, int64_t n,
               const std::function<Drawn<T>(int64_t certain, int64_t drawn)>& room) {
    const Shares shares = shares_of(n);
    T* bound = scratch<T>(on, 1);
    each(on, 1, [=] __device__(int64_t) { *bound = certain_from<T>(odds_of(pair)); });
    const Marks marks = mark<T>(on, DrawnElements<T>{x, pair, key}, n, shares, true, IsCertain<T>{bound});
    const uint64_t counts = fetched(on, marks.before + shares.count);
    const WriteDrawn<T> write{x, room(static_cast<int64_t>(counts & 0xFFFFFFFFu), static_cast<int64_t>(counts >> 32))};
    if (counts == 0) return;
    launch(on, shares.count, compact_kernel<WriteDrawn<T>>, n, shares, marks, nullptr, write);
}

template <class T>
void drawn_entries(const Stream& on, const int32_t* drawn, const T* scale, T* values, int32_t* indices, int64_t count) {
    map(on, values, count, [=] __device__(int64_t i) { return drawn[i] < 0 ? -*scale : *scale; });
    map(on, indices, count, [=] __device__(int64_t i) { return plain_index(drawn[i]); });
}

// One thread adds up a bucket; then every vertex has its own.
template <class T>
void draw_vertices(const Stream& on, const T* x, const T* norms, const Vertices& by, int64_t* codes, int64_t* masses) {
    const int64_t buckets = divide_up(by.n, by.width);
    const int shift = 32 - __builtin_ctzll(uint64_t(by.width)) - 1;
    const Vertices mine = by;
    int64_t* ends = scratch<int64_t>(on, buckets * by.width);
    each(on, buckets, [=] __device__(int64_t bucket) {
        int64_t mass = 0;
        for (int64_t i = bucket * mine.width; i < (bucket + 1) * mine.width; ++i) {
            ends[i] = mass += i < mine.n ? share_of(x[i], norms[bucket]) : 0;
        }
        masses[bucket] = mass;
    });
    map(on, codes, buckets * by.samples, [=] __device__(int64_t i) {
        const int64_t bucket = i / mine.samples, from = bucket * mine.width, mass = masses[bucket];
        const int64_t left = mine.n - from, length = left < mine.width ? left : mine.width;
        uint32_t random[4];
        philox(mine.key, uint32_t(i / 4), random);
        const int64_t point = point_of(random[i % 4], mass < mine.least ? mine.least : mass);
        if (mine.least > 0 && point >= mass) {
            philox(mine.rest, uint32_t(i / 4), random);
            return int64_t(random[i % 4] >> shift);
        }
        return vertex_at(point, ends + from, mine.width, x + from, length);
    });
}

template <class T> struct VertexValue {
    int64_t width, samples;
    __device__ T operator()(const VertexCodes<T>& rank, int64_t i) const {
        const int64_t bucket = i / width, place = i % width;
        const int64_t* codes = rank.codes + bucket * samples;
        int32_t count = 0;
        for (int64_t j = 0; j < samples; ++j) {
            if ((codes[j] & (width - 1)) == place) count += (codes[j] & width) != 0 ? -1 : 1;
        }
        return T(count) * rank.scales[bucket];
    }
};

template <class T>
void vertices_sum(const Stream& on, const std::vector<VertexCodes<T>>& ranks, const Vertices& by, const T* onto, T* out) {
    sum_parts(on, ranks, onto, out, by.n, VertexValue<T>{by.width, by.samples});
}

template <class T> void top(const Stream& on, const T* x, int64_t n, int64_t k, T* values, int32_t* indices) {
    if (k == 0) return;
    if (k == n) {
        take_all(on, x, n, values, indices);
    } else {
        largest(on, Elements<T>{x}, x, n, 0, k, values, indices);
    }
}

template <class T>
void sum_top(const Stream& on, const T* x, T a, const T* y, T b, T* out, uint8_t* good, int64_t n, int64_t k, T* values,
             int32_t* indices) {
    if (k == 0 || k == n) {
        finite_sum(on, x, a, y, b, out, n, good);
        if (k > 0) take_all(on, out, n, values, indices);
        return;
    }
    set_good(on, good);
    largest(on, WeightedSum<T>{x, a, y, b, out, good}, out, n, 0, k, values, indices);
}

template <class T> void top_bound(const Stream& on, const T* x, int64_t n, int64_t k, T* out) {
    T* values = scratch<T>(on, k);
    top(on, x, n, k, values, scratch<int32_t>(on, k));
    using Word = typename Format<T>::Word;
    reduce(
        on, k, Word(0), [=] __device__(int64_t i) { return Word(~magnitude_bits(values[i])); }, Larger<Word>(),
        [=] __device__(Word most) { *out = bits_as<T>(Word(~most)); });
}

template <class T>
void moments(const Stream& on, const T* x, const T* bound, int powers, int64_t n, int64_t* number, T* out) {
    reduce(
        on, divide_up(n, 8), Above{0, 0, 0, 0},
        [=] __device__(int64_t group) {
            const int count = group_size(group, n);
            T found[8];
            load_group(x, group, count, found);
            const T edge = *bound;
            Above sums{0, 0, 0, 0};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const double size = double(magnitude(found[j]));
                if (j < count && magnitude(found[j]) >= edge) {
                    sums = JoinAbove()(sums, {1, size, found[j] > T(0) ? size : 0.0, size * size});
                }
            }
            return sums;
        },
        JoinAbove(),
        [=] __device__(const Above& sums) {
            *number = sums.number;
            out[0] = powers > 0 ? T(sums.sizes) : T(0);
            out[1] = powers > 1 ? T(sums.positive) : T(0);
            out[2] = powers > 1 ? T(sqrt(sums.squares)) : T(0);
        });
}

template <class T>
void top_of_sides(const Stream& on, const T* x, int64_t n, const std::function<int64_t(int64_t)>& kept,
                  const std::function<Tops<T>(int64_t, int64_t)>& room) {
    uint64_t* counts = scratch<uint64_t>(on, 1);
    reduce(
        on, divide_up(n, 8), uint64_t(0),
        [=] __device__(int64_t group) {
            T found[8];
            load_group(x, group, group_size(group, n), found);
            uint64_t sum = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) sum += counts_of(found[j] > 0 ? 1u : 0u, found[j] < 0 ? 1u : 0u);
            return sum;
        },
        Added<uint64_t>(), [=] __device__(uint64_t sum) { *counts = sum; });
    const uint64_t both = fetched(on, counts);
    const int64_t k[2] = {kept(static_cast<int64_t>(both & 0xFFFFFFFFu)), kept(static_cast<int64_t>(both >> 32))};
    const Tops<T> out = room(k[0], k[1]);
    for (int side = 0; side < 2; ++side) {
        const int64_t count = k[side];
        T *mean = out.means + side, *values = scratch<T>(on, count);
        if (count > 0) largest(on, Elements<T>{x}, x, n, side == 0 ? 1 : -1, count, values, side == 0 ? out.positive : out.negative);
        reduce(
            on, count, 0.0, [=] __device__(int64_t i) { return double(values[i]); }, Added<double>(),
            [=] __device__(double sum) { *mean = count > 0 ? T(sum / double(count)) : T(0); });
    }
}

template <class T>
void select_in_bins(const Stream& on, const T* x, const T* gradient, const T* maxima, int64_t width, int64_t n,
                    const std::function<Signs(int64_t, int64_t)>& room) {
    const Shares shares = shares_of(n);
    const ReachedElements<T> reached{x, gradient, maxima, divisor(width)};
    const Marks marks = mark<T>(on, reached, n, shares, true, IsSigned<T>());
    const uint64_t counts = fetched(on, marks.before + shares.count);
    const WriteSigns write{room(static_cast<int64_t>(counts & 0xFFFFFFFFu), static_cast<int64_t>(counts >> 32))};
    if (counts == 0) return;
    launch(on, shares.count, compact_kernel<WriteSigns>, n, shares, marks, nullptr, write);
}

template <class T>
void gather(const Stream& on, const T* x, int64_t n, const int32_t* indices, T* out, int64_t count) {
    int* fault = on.fault;
    map(on, out, count, [=] __device__(int64_t i) {
        const int32_t index = indices[i];
        return inside(index, n, fault) ? x[index] : T(0);
    });
}

template <class T>
void put(const Stream& on, T* x, int64_t n, const int32_t* indices, T value, int64_t count) {
    int* fault = on.fault;
    each(on, count, [=] __device__(int64_t i) {
        const int32_t index = indices[i];
        if (inside(index, n, fault)) x[index] = value;
    });
}

template <class T> void scatter_add(const Stream& on, T* x, int64_t n, const Entries<T>& list) {
    int* fault = on.fault;
    const Entries<T> mine = list;
    each(on, mine.count, [=] __device__(int64_t i) {
        const int32_t index = mine.indices[i];
        if (inside(index, n, fault)) x[index] += mine.values[i];
    });
}

template <class T>
void sparse_sum(const Stream& on, const std::vector<Entries<T>>& lists, const T* onto, T* out, int64_t n) {
    if (onto == nullptr && n > 0) check(cudaMemsetAsync(out, 0, sizeof(T) * static_cast<size_t>(n), on.handle), "zeros");
    for (size_t r = 0; r < lists.size(); ++r) {
        if (r > 0 || onto != nullptr) {
            scatter_add(on, out, n, lists[r]);
            continue;
        }
        // The first values are added to zeros, which need not be read.
        int* fault = on.fault;
        const Entries<T> mine = lists[r];
        each(on, mine.count, [=] __device__(int64_t i) {
            const int32_t index = mine.indices[i];
            if (inside(index, n, fault)) out[index] = T(0) + mine.values[i];
        });
    }
}

template <class T> void power_fade(const Stream& on, T* x, const int32_t* words, T factor, int64_t count, int64_t n) {
    int* fault = on.fault;
    if (factor != T(1)) map(on, x, n, [=] __device__(int64_t i) { return x[i] * factor; });
    each(on, count, [=] __device__(int64_t i) {
        const int32_t index = index_of_word(words[i]);
        if (inside(index, n, fault)) x[index] = T(0);
    });
}

template <class T>
void power_sum(const Stream& on, const std::vector<PowerWords<T>>& lists, const T* onto, T* out, int64_t n) {
    int* fault = on.fault;
    if (onto == nullptr && n > 0) check(cudaMemsetAsync(out, 0, sizeof(T) * static_cast<size_t>(n), on.handle), "zeros");
    for (const PowerWords<T>& list : lists) {
        const PowerWords<T> mine = list;
        each(on, mine.count, [=] __device__(int64_t i) {
            const int32_t index = index_of_word(mine.words[i]);
            if (inside(index, n, fault)) out[index] += value_of_word(mine.words[i], *mine.scale);
        });
    }
}

#define GRACE_MAKE(T)                                                                                    \
    template void select<T>(const Stream&, const T*, const T*, bool, bool, int64_t, const Room<T>&);     \
    template void power_words<T>(const Stream&, const T*, const T*, double, T*, int64_t,                 \
                                 const std::function<int32_t*(int64_t)>&);                              \
    template void power_fade<T>(const Stream&, T*, const int32_t*, T, int64_t, int64_t);                 \
    template void power_sum<T>(const Stream&, const std::vector<PowerWords<T>>&, const T*, T*, int64_t); \
    template void keep_odds<T>(const Stream&, const T*, int64_t, double, double*, int64_t);              \
    template void draw_kept<T>(const Stream&, const T*, const double*, const RandomKey&, int64_t,        \
                               const std::function<Drawn<T>(int64_t, int64_t)>&);                        \
    template void drawn_entries<T>(const Stream&, const int32_t*, const T*, T*, int32_t*, int64_t);      \
    template void draw_vertices<T>(const Stream&, const T*, const T*, const Vertices&, int64_t*, int64_t*); \
    template void vertices_sum<T>(const Stream&, const std::vector<VertexCodes<T>>&, const Vertices&, const T*, T*); \
    template void sum_select<T>(const Stream&, const T*, T, const T*, T, T*, const T*, bool, int64_t,    \
                                const Room<T>&, const std::function<uint8_t*()>&);                       \
    template void top<T>(const Stream&, const T*, int64_t, int64_t, T*, int32_t*);                       \
    template void sum_top<T>(const Stream&, const T*, T, const T*, T, T*, uint8_t*, int64_t, int64_t, T*, int32_t*); \
    template void top_bound<T>(const Stream&, const T*, int64_t, int64_t, T*);                          \
    template void moments<T>(const Stream&, const T*, const T*, int, int64_t, int64_t*, T*);              \
    template void top_of_sides<T>(const Stream&, const T*, int64_t, const std::function<int64_t(int64_t)>&, \
                                  const std::function<Tops<T>(int64_t, int64_t)>&);                      \
    template void select_in_bins<T>(const Stream&, const T*, const T*, const T*, int64_t, int64_t,       \
                                    const std::function<Signs(int64_t, int64_t)>&);                      \
    template void gather<T>(const Stream&, const T*, int64_t, const int32_t*, T*, int64_t);              \
    template void put<T>(const Stream&, T*, int64_t, const int32_t*, T, int64_t);                        \
    template void scatter_add<T>(const Stream&, T*, int64_t, const Entries<T>&);                            \
    template void sparse_sum<T>(const Stream&, const std::vector<Entries<T>>&, const T*, T*, int64_t);
GRACE_MAKE(float)
GRACE_MAKE(double)
#undef GRACE_MAKE

}  // namespace gpu
}  // namespace grace
