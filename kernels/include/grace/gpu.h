// Functions on device pointers for a GPU, the counterpart of grace/loops.h. Each works on a whole array, on the
// caller's stream, and returns before the work is done.
//
// If the length of a result depends on the data, the host needs it to allocate the result. Such functions wait for the
// stream once, and their comments say so. The caller provides all memory. Values that the host does not know (a bound,
// levels, scales) stay on the device. If an index from a payload is out of range, the entry is skipped and a word in
// host memory is set (see Stream::fault). The number of blocks depends only on the length, so that sums are equal on
// every device.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "grace/loops.h"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace grace {
namespace gpu {

// The place of the work: stream, memory and fault word.
struct Stream {
    CUstream_st* handle;
    // Allocates device memory that nobody else uses before the current work on the stream is done.
    std::function<void*(int64_t bytes)> scratch;
    // A word in host memory that kernels set if they find an index out of range; see fault_word.
    int* fault;
};

// Makes a device current, and restores the previous one at the end of the scope.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device);
    ~DeviceGuard();
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int before_;
};

// The fault word of a device, in page-locked host memory that kernels can write. It costs nothing without a fault, and
// the host can read it at any time without waiting for the device. The first call allocates it.
int* fault_word(int device);
// True if the driver knows the device and this build has code for it.
bool serves(int device);

// The outputs of a selection, and a function that allocates them when their length is known.
template <class T> struct Found {
    T* values;
    int32_t* indices;
};
template <class T> using Room = std::function<Found<T>(int64_t count)>;
// The elements that are certain, and the signed indices of those that are drawn.
template <class T> struct Drawn {
    T* values;
    int32_t *indices, *drawn;
};
template <class T> struct Tops {
    T* means;
    int32_t *positive, *negative;
};
struct Signs {
    int32_t *positive, *negative;
};
template <class T> struct Split {
    T* full;
    int16_t* words;
    int8_t* bytes;
    uint8_t* tags;
};

// The coded arrays of one rank. All of them, scales included, are on the device.
struct NaturalCodes {
    const uint8_t* codes;
    const int32_t* base;
};
template <class T> struct TernaryCodes {
    const uint8_t* codes;
    int64_t count;
    const T* scale;
};
// The numbers of each width (8 bits, 16 bits, all bits), and their counts.
template <class T> struct WidthCodes {
    Widths<T> lists;
    int64_t counts[3];
};

template <class T> void weighted_sum(const Stream& on, const T* x, T a, const T* y, T b, T* out, int64_t n);
template <class T>
void finite_sum(const Stream& on, const T* x, T a, const T* y, T b, T* out, int64_t n, uint8_t* good);
template <class T>
void momentum_sum(const Stream& on, const T* u, T m, const T* g, const T* v, T* momentum, T* out, uint8_t* good,
                  int64_t n);
template <class T>
void limited_sum(const Stream& on, const T* x, T a, const T* y, T b, const T* z, T limit, T* out, int64_t n);
template <class T>
void masked_sum(const Stream& on, const T* x, T a, const T* y, T b, const T* z, T* sum, T* kept, int64_t n);
template <class T>
void square_sum(const Stream& on, const T* x, const T* onto, T largest, T limit, T* out, int64_t n);
template <class T> void max_abs(const Stream& on, const T* x, int64_t n, T* out);
template <class T> void norm(const Stream& on, const T* x, int64_t n, T* out);
template <class T> void norm_max(const Stream& on, const T* x, int64_t n, T* out, T* most);
template <class T> void finite(const Stream& on, const T* x, int64_t n, uint8_t* out);
void half(const Stream& on, const float* x, bool brain, uint16_t* out, int64_t n);
void wide(const Stream& on, const uint16_t* x, bool brain, float* out, int64_t n);
void half_sum(const Stream& on, const std::vector<const uint16_t*>& rows, bool brain, float factor, uint16_t* out,
              int64_t n);
void words(const Stream& on, const RandomKey& key, int64_t* out, int64_t n);
void uniform(const Stream& on, const RandomKey& key, float* out, int64_t n);
void sample(const Stream& on, const Permutation& permutation, uint32_t n, int32_t* out, int64_t k);

// Code: uint8_t or int64_t.
template <class Code> void pack(const Stream& on, const Code* codes, int bits, uint8_t* out, int64_t n);
void unpack(const Stream& on, const uint8_t* data, int bits, int64_t* out, int64_t n);
template <class T> void binarize(const Stream& on, const T* x, T threshold, uint8_t* bits, int64_t n);
template <class T>
void binarize_finite(const Stream& on, const T* x, T threshold, uint8_t* bits, uint8_t* good, int64_t n);
// `means` has two elements, or one if `single`: the mean magnitude.
template <class T>
void binarize_means(const Stream& on, const T* x, T threshold, bool single, uint8_t* bits, T* means, int64_t n);
// The signs and the mean magnitude of a weighted sum of x and y, which is also the output `out`.
template <class T>
void sum_sign_mean(const Stream& on, const T* x, T a, const T* y, T b, T* out, uint8_t* good, uint8_t* bits, T* mean,
                   int64_t n);
// Coded::scales holds the two levels of the rank, or one if `single`. `onto` may be `out` or null.
template <class T>
void binary_sum(const Stream& on, const std::vector<Coded<T>>& ranks, bool single, bool negate, const T* onto, T factor,
                T* out, int64_t n);
// `means` has the low means of all columns, then the high means, as Coded::scales of column_sum.
template <class T>
void binarize_columns(const Stream& on, const T* x, T threshold, int64_t columns, uint8_t* bits, T* means, int64_t n);
template <class T>
void column_sum(const Stream& on, const std::vector<Coded<T>>& ranks, int64_t columns, bool negate, const T* onto,
                T* out, int64_t n);
template <class T> void majority(const Stream& on, const std::vector<const uint8_t*>& bits, T* out, int64_t n);
template <class T>
void bucket_norms(const Stream& on, const T* x, int64_t n, int64_t width, bool largest, T* norms);
// Rounds to the nearest level if `noise` is null.
template <class T>
void quantize_packed(const Stream& on, const T* x, const T* scales, int64_t width, int levels, int bits,
                     const T* limit, const RandomKey* noise, uint8_t* out, int64_t n);
template <class T>
void floor_packed(const Stream& on, const T* x, const T* delta, int bits, const RandomKey& key, uint8_t* out, int64_t n);
template <class T>
void dequantize_sum(const Stream& on, const std::vector<Coded<T>>& ranks, int64_t width, int levels, int bits,
                    const T* onto, T* out, int64_t n);
// Rounds to the nearest level if `noise` is null.
template <class T>
void round_packed(const Stream& on, const T* x, const T* scales, int64_t width, const T* levels, int bits,
                  const RandomKey* noise, uint8_t* out, int64_t n);
// The norms of buckets, and the codes of their elements by them.
template <class T>
void bucket_quantize(const Stream& on, const T* x, int64_t width, bool largest, int levels, int bits,
                     const RandomKey* key, uint8_t* out, T* norms, int64_t n);
// What rounding leaves of a x + b y, which is rounded to 2^bits levels times the largest magnitude of each bucket.
template <class T>
void sum_round(const Stream& on, const T* x, T a, const T* y, T b, int64_t width, const T* levels, int bits, T* out,
               uint8_t* codes, T* norms, uint8_t* good, int64_t n);
template <class T>
void levels_sum(const Stream& on, const std::vector<Listed<T>>& ranks, int64_t width, int bits, const T* onto, T* out,
                int64_t n);

// 0, `inner` levels and the unit, for n ascending sizes; see free_levels and exponential_levels.
void best_levels(const Stream& on, const double* sizes, int64_t n, const int32_t* starts, int inner, bool exponential,
                 double* levels);
// Code: int8_t, int16_t or int32_t. Rounds to the nearest level if `noise` is null.
template <class T, class Code>
void to_integers(const Stream& on, const T* x, const T* scale, T most, const RandomKey* noise, Code* out, int64_t n);
template <class T, class Code>
void from_integers(const Stream& on, const Code* codes, const T* scale, T most, const T* onto, T* out, int64_t n);
template <class Code>
void pack_lanes(const Stream& on, const Code* x, int64_t n, int lanes, int32_t* words, int64_t count);
template <class Code>
void unpack_lanes(const Stream& on, const int32_t* words, int64_t count, int lanes, Code* out, int64_t n);

// Waits for the stream.
template <class T>
void select(const Stream& on, const T* x, const T* bound, bool strict, bool nonzero, int64_t n, const Room<T>& room);
// The number of magnitudes >= *bound; out: their sum (from `powers` 1 on), the sum of the positive ones, and their
// Euclidean norm (from 2 on), or zeros.
template <class T>
void moments(const Stream& on, const T* x, const T* bound, int powers, int64_t n, int64_t* number, T* out);
// Waits for the stream. `noise` may be null.
template <class T>
void power_words(const Stream& on, const T* x, const T* noise, double alpha, T* scale, int64_t n,
                 const std::function<int32_t*(int64_t count)>& room);
// Waits for the stream in every round of its search.
template <class T> void keep_odds(const Stream& on, const T* x, int64_t k, double budget, double* out, int64_t n);
// Waits for the stream.
template <class T>
void draw_kept(const Stream& on, const T* x, const double* pair, const RandomKey& key, int64_t n,
               const std::function<Drawn<T>(int64_t certain, int64_t drawn)>& room);
template <class T>
void drawn_entries(const Stream& on, const int32_t* drawn, const T* scale, T* values, int32_t* indices, int64_t count);
// The k largest magnitudes, 0 <= k <= n < 2^31, sorted by index. Of equal magnitudes, the lower index comes first.
template <class T> void top(const Stream& on, const T* x, int64_t n, int64_t k, T* values, int32_t* indices);
// A selection from a weighted sum of x and y, which is also the output `out`. `sum_select` waits for the stream.
template <class T>
void sum_top(const Stream& on, const T* x, T a, const T* y, T b, T* out, uint8_t* good, int64_t n, int64_t k, T* values,
             int32_t* indices);
template <class T>
void sum_select(const Stream& on, const T* x, T a, const T* y, T b, T* out, const T* bound, bool strict, int64_t n,
                const Room<T>& room, const std::function<uint8_t*()>& good);
// The smallest of the k largest magnitudes, 1 <= k.
template <class T> void top_bound(const Stream& on, const T* x, int64_t n, int64_t k, T* out);
// Selects the kept(count) largest elements of each sign. Their means are summed in float64. Waits for the stream.
template <class T>
void top_of_sides(const Stream& on, const T* x, int64_t n, const std::function<int64_t(int64_t)>& kept,
                  const std::function<Tops<T>(int64_t positive, int64_t negative)>& room);
// The elements that are not 0 and have |x + gradient| >= the maximum of their bin, by sign. Waits for the stream.
template <class T>
void select_in_bins(const Stream& on, const T* x, const T* gradient, const T* maxima, int64_t width, int64_t n,
                    const std::function<Signs(int64_t positive, int64_t negative)>& room);
template <class T>
void gather(const Stream& on, const T* x, int64_t n, const int32_t* indices, T* out, int64_t count);
template <class T>
void put(const Stream& on, T* x, int64_t n, const int32_t* indices, T value, int64_t count);
// The indices of one list must be distinct; otherwise the sums at repeated indices are wrong.
template <class T> void scatter_add(const Stream& on, T* x, int64_t n, const Entries<T>& list);
template <class T> void power_fade(const Stream& on, T* x, const int32_t* words, T factor, int64_t count, int64_t n);
// The same limits as for scatter_add.
template <class T>
void power_sum(const Stream& on, const std::vector<PowerWords<T>>& lists, const T* onto, T* out, int64_t n);
template <class T>
void sparse_sum(const Stream& on, const std::vector<Entries<T>>& lists, const T* onto, T* out, int64_t n);

template <class T> void spread_in_frame(const Stream& on, const T* x, const T* norms, const Frame& frame, T* out);
template <class T> void project_from_frame(const Stream& on, const T* coefficients, const Frame& frame, T* out);
template <class T>
void largest_of_blocks(const Stream& on, const T* x, int64_t block, int64_t kept, int64_t last, T* out, int64_t n);
template <class T>
void recover_sparse(const Stream& on, const T* z, const Rotation<T>& by, int64_t reduction, int rounds, double share,
                    double noise, T* out);
template <class T> void rotate(const Stream& on, const T* x, const Rotation<T>& by, bool back, T* out);
template <class T>
void rotated_encode(const Stream& on, const T* x, const Rotation<T>& by, bool fit, const RandomKey* noise,
                    uint8_t* codes, T* scales);
template <class T>
void rotated_sum(const Stream& on, const std::vector<Coded<T>>& ranks, const std::vector<const int32_t*>& salts,
                 const RandomKey& key, const Rotation<T>& by, const T* onto, T* out);
template <class T>
void shared_rotated_sum(const Stream& on, const std::vector<Coded<T>>& ranks, const Rotation<T>& by, const T* onto,
                        T* out);

template <class T>
void natural_encode(const Stream& on, const T* x, bool clipped, const RandomKey& key, uint8_t* codes, int32_t* base,
                    T* most, int64_t n);
template <class T>
void natural_sum(const Stream& on, const std::vector<NaturalCodes>& ranks, bool clipped, bool negate, const T* onto,
                 T factor, T* out, int64_t n);
template <class T>
void table_encode(const Stream& on, const T* x, const T* scales, int64_t width, const T* table, uint8_t* codes,
                  int64_t n);
template <class T>
void table_sum(const Stream& on, const std::vector<Coded<T>>& ranks, int64_t width, const T* table, const T* onto,
               T* out, int64_t n);
// Waits for the stream.
template <class T>
void ternary_encode(const Stream& on, const T* x, const T* scale, int64_t n,
                    const std::function<uint8_t*(int64_t count)>& room);
// Codes with a wrong number of digits set the fault word and count as zeros.
template <class T>
void ternary_sum(const Stream& on, const std::vector<TernaryCodes<T>>& ranks, const T* onto, T* out, int64_t n);
// Waits for the stream. Numbers of 8 and 16 bits are multiples of 1 / byte_steps and 1 / word_steps.
template <class T>
void precision_encode(const Stream& on, const T* x, const T* scale, T bound, T byte_end, T word_end, T byte_steps,
                      T word_steps, int64_t n,
                      const std::function<Split<T>(int64_t full, int64_t words, int64_t bytes)>& room);
// Lists that do not match their tags set the fault word. Missing numbers count as zeros.
template <class T>
void precision_sum(const Stream& on, const std::vector<WidthCodes<T>>& ranks, T byte_step, T word_step, const T* onto,
                   T* out, int64_t n);
// For at most 2^32 elements. One thread adds the elements of a bucket, in their order.
template <class T>
void count_sketch(const Stream& on, const T* x, int64_t n, int rows, int64_t columns, const RandomKey& key, T* out);
template <class T>
void sketch_estimate(const Stream& on, const T* sketch, int rows, int64_t columns, const RandomKey& key, T* out, int64_t n);
// The items 0 .. n - 1 that a Bloom filter reports. Waits for the stream.
void filter_positions(const Stream& on, const uint8_t* filter, int64_t bits, int count, const RandomKey& key, int64_t n,
                      const std::function<int32_t*(int64_t reported)>& room);
template <class T> void orthogonalize(const Stream& on, const T* a, int64_t rows, int64_t columns, T* out);

}  // namespace gpu
}  // namespace grace

// Used in a checked kernel after its checks: on a GPU, calls gpu::name with these arguments and returns.
#ifdef GRACE_CUDA
#define GRACE_GPU(call, name, ...) \
    if ((call).gpu() != nullptr) return gpu::name(*(call).gpu(), __VA_ARGS__)
#else
#define GRACE_GPU(call, name, ...) static_cast<void>(0)
#endif
