// Sums, norms, conversions and random numbers.
#include <cmath>

#include "grace/kernels.h"
#include "grace/sums.h"

namespace grace {
namespace {

// Returns whether the check of every piece of an array of n elements is true.
uint8_t all_good(const Scratch<uint8_t>& pieces, int64_t n) {
    uint8_t all = 1;
    for (int64_t i = 0; i < divide_up(n, kPiece); ++i) all &= pieces[i];
    return all;
}

// The permutation of a sample of k of n elements. Its round keys come from separate streams, as in
// grace/core/ops/random.py.
Permutation permutation_of(const Call& call, int64_t n, int64_t k, RandomKey key) {
    if (k > n || n > INT32_MAX) {
        call.fail(Error::Kind::value, "expected k <= n < 2^31, received k = " + std::to_string(k) +
                                          " and n = " + std::to_string(n));
    }
    key.stream += 1u << 16;
    uint32_t random[8];
    integer_loops().words(&key, 0, 2, random);
    int bits = 2;
    while (bits < 31 && (int64_t(1) << bits) < n) ++bits;
    Permutation permutation;
    std::copy(random, random + 8, permutation.keys);
    permutation.low = bits / 2;
    permutation.low_mask = (1u << permutation.low) - 1;
    permutation.high_mask = (1u << (bits - permutation.low)) - 1;
    return permutation;
}

}  // namespace

GRACE_KERNEL(weighted_sum, "x T, y T; ; a, b -> T[x]") {
    call.expect(2, 0, 2);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T *x = call.input<T>(0), *y = call.input<T>(1, n);
        const T a = static_cast<T>(call.number(0)), b = static_cast<T>(call.number(1));
        T* out = call.output<T>(n);
        GRACE_GPU(call, weighted_sum, x, a, y, b, out, n);
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            loops<T>().weighted_sum(x + begin, a, y + begin, b, out + begin, end - begin, is_large<T>(n));
        });
    });
}

GRACE_KERNEL(finite_sum, "x T, y T; ; a, b -> T[x], uint8[1]") {
    call.expect(2, 0, 2);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T *x = call.input<T>(0), *y = call.input<T>(1, n);
        const T a = static_cast<T>(call.number(0)), b = static_cast<T>(call.number(1));
        T* out = call.output<T>(n);
        uint8_t* good = call.verdict();
        GRACE_GPU(call, finite_sum, x, a, y, b, out, n, good);
        Scratch<uint8_t> each(divide_up(n, kPiece));
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            each[begin / kPiece] =
                loops<T>().weighted_sum(x + begin, a, y + begin, b, out + begin, end - begin, is_large<T>(n));
        });
        *good = all_good(each, n);
    });
}

GRACE_KERNEL(momentum_sum, "u T, g T, v T; ; m -> T[u], T[u], uint8[1]") {
    call.expect(3, 0, 1);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T *u = call.input<T>(0), *g = call.input<T>(1, n), *v = call.input<T>(2, n);
        const T m = static_cast<T>(call.number(0));
        T* momentum = call.output<T>(n);
        T* out = call.output<T>(n);
        uint8_t* good = call.verdict();
        GRACE_GPU(call, momentum_sum, u, m, g, v, momentum, out, good, n);
        Scratch<uint8_t> each(divide_up(n, kPiece));
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            each[begin / kPiece] = loops<T>().momentum_sum(u + begin, m, g + begin, v + begin, momentum + begin,
                                                           out + begin, end - begin, is_large<T>(n));
        });
        *good = all_good(each, n);
    });
}

GRACE_KERNEL(limited_sum, "x T, y T, z T; ; a, b, limit -> T[x]") {
    call.expect(3, 0, 3);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T *x = call.input<T>(0), *y = call.input<T>(1, n), *z = call.input<T>(2, n);
        const T a = static_cast<T>(call.number(0)), b = static_cast<T>(call.number(1));
        const T limit = static_cast<T>(call.number(2));
        T* out = call.output<T>(n);
        GRACE_GPU(call, limited_sum, x, a, y, b, z, limit, out, n);
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            loops<T>().limited_sum(x + begin, a, y + begin, b, z + begin, limit, out + begin, end - begin,
                                   is_large<T>(n));
        });
    });
}

GRACE_KERNEL(masked_sum, "x T, y T, z T; ; a, b -> T[x], T[x]") {
    call.expect(3, 0, 2);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T *x = call.input<T>(0), *y = call.input<T>(1, n), *z = call.input<T>(2, n);
        const T a = static_cast<T>(call.number(0)), b = static_cast<T>(call.number(1));
        T* sum = call.output<T>(n);
        T* kept = call.output<T>(n);
        GRACE_GPU(call, masked_sum, x, a, y, b, z, sum, kept, n);
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            loops<T>().masked_sum(x + begin, a, y + begin, b, z + begin, sum + begin, kept + begin, end - begin,
                                  is_large<T>(n));
        });
    });
}

GRACE_KERNEL(square_sum, "x T, onto T; ; largest -> T[x]") {
    call.expect(2, 0, 1);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T *x = call.input<T>(0), *onto = call.input<T>(1, n);
        const T largest = static_cast<T>(call.number(0)), limit = T(2) * largest * largest;
        T* out = call.output<T>(n);
        GRACE_GPU(call, square_sum, x, onto, largest, limit, out, n);
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            loops<T>().square_sum(x + begin, onto + begin, largest, limit, out + begin, end - begin, is_large<T>(n));
        });
    });
}

GRACE_KERNEL(max_abs, "x T -> T[1]") {
    call.expect(1, 0, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T* x = call.input<T>(0);
        T* out = call.output<T>(1);
        GRACE_GPU(call, max_abs, x, n, out);
        Scratch<T> most(divide_up(n, kPiece));
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            most[begin / kPiece] = loops<T>().max_abs(x + begin, end - begin);
        });
        *out = loops<T>().max_abs(most.data(), divide_up(n, kPiece));
    });
}

GRACE_KERNEL(norm_max, "x T -> T[1], T[1]") {
    call.expect(1, 0, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T* x = call.input<T>(0);
        T* out = call.output<T>(1);
        T* most = call.output<T>(1);
        GRACE_GPU(call, norm_max, x, n, out, most);
        Scratch<double> squares(divide_up(n, kPiece));
        Scratch<T> largest(divide_up(n, kPiece));
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            squares[begin / kPiece] = loops<T>().norm_max(x + begin, end - begin, &largest[begin / kPiece]);
        });
        *most = loops<T>().max_abs(largest.data(), divide_up(n, kPiece));
        double sum = 0;
        for (int64_t i = 0; i < divide_up(n, kPiece); ++i) sum += squares[i];
        *out = static_cast<T>(std::sqrt(sum));
    });
}

GRACE_KERNEL(finite, "x T -> uint8[1]") {
    call.expect(1, 0, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T* x = call.input<T>(0);
        uint8_t* out = call.verdict();
        GRACE_GPU(call, finite, x, n, out);
        Scratch<uint8_t> good(divide_up(n, kPiece));
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            good[begin / kPiece] = loops<T>().finite(x + begin, end - begin);
        });
        *out = all_good(good, n);
    });
}

GRACE_KERNEL(half, "x float32; brain -> float16/bfloat16[x]") {
    call.expect(1, 1, 0);
    const int64_t n = call.input(0).size;
    const float* x = call.input<float>(0);
    const bool brain = call.integer(0) != 0;
    uint16_t* out = static_cast<uint16_t*>(call.allocate(brain ? DType::bfloat16 : DType::float16, n));
    GRACE_GPU(call, half, x, brain, out, n);
    over_pieces(call, n, [&](int64_t begin, int64_t end) {
        loops<float>().to_half(x + begin, brain, out + begin, end - begin, is_large<uint16_t>(n));
    });
}

// Input 0, whose elements must have 16 bits.
static const uint16_t* halves_of(const Call& call, int i = 0) {
    const Array& x = call.input(i);
    if (x.dtype != DType::float16 && x.dtype != DType::bfloat16) {
        call.fail(Error::Kind::type, std::string("expected float16 or bfloat16, received ") + name_of(x.dtype));
    }
    return static_cast<const uint16_t*>(x.data);
}

GRACE_KERNEL(wide, "x float16/bfloat16 -> float32[x]") {
    call.expect(1, 0, 0);
    const Array& x = call.input(0);
    const uint16_t* from = halves_of(call);
    float* out = call.output<float>(x.size);
    GRACE_GPU(call, wide, from, x.dtype == DType::bfloat16, out, x.size);
    over_pieces(call, x.size, [&](int64_t begin, int64_t end) {
        loops<float>().from_half(from + begin, x.dtype == DType::bfloat16, out + begin, end - begin,
                                 is_large<float>(x.size));
    });
}

GRACE_KERNEL(half_sum, "rows float16/bfloat16...; ; factor -> float16/bfloat16[rows]") {
    if (call.inputs() < 1) call.fail(Error::Kind::value, "expected at least one row, received none");
    call.expect(call.inputs(), 0, 1);
    const Array& first = call.input(0);
    const int64_t n = first.size;
    std::vector<const uint16_t*> rows;
    for (int r = 0; r < call.inputs(); ++r) {
        rows.push_back(halves_of(call, r));
        if (call.input(r).dtype != first.dtype) {
            call.fail(Error::Kind::type, std::string("expected rows of ") + name_of(first.dtype) + ", received " +
                                             name_of(call.input(r).dtype));
        }
        if (call.input(r).size != n) {
            call.fail(Error::Kind::payload, "expected rows of " + std::to_string(n) + " elements, received " +
                                                std::to_string(call.input(r).size));
        }
    }
    const float factor = static_cast<float>(call.number(0));
    const bool brain = first.dtype == DType::bfloat16;
    uint16_t* out = static_cast<uint16_t*>(call.allocate(first.dtype, n));
    GRACE_GPU(call, half_sum, rows, brain, factor, out, n);
    over_pieces(call, n, [&](int64_t begin, int64_t end) {
        loops<float>().half_sum(rows.data(), call.inputs(), begin, brain, factor, out + begin, end - begin,
                                is_large<uint16_t>(n));
    });
}

GRACE_KERNEL(words, "; n, key -> int64[n]") {
    call.expect(0, 5, 0);
    const int64_t n = call.length(0);
    const RandomKey key = key_at(call, 1);
    int64_t* out = call.output<int64_t>(n);
    GRACE_GPU(call, words, key, out, n);
    over_pieces(call, n, [&](int64_t begin, int64_t end) {
        uint32_t random[256];
        for (int64_t at = begin; at < end; at += 256) {
            const int64_t length = std::min<int64_t>(256, end - at);
            integer_loops().words(&key, static_cast<uint32_t>(at / 4), divide_up(length, 4), random);
            std::copy(random, random + length, out + at);
        }
    });
}

GRACE_KERNEL(uniform, "; n, key -> float32[n]") {
    call.expect(0, 5, 0);
    const int64_t n = call.length(0);
    const RandomKey key = key_at(call, 1);
    float* out = call.output<float>(n);
    GRACE_GPU(call, uniform, key, out, n);
    over_pieces(call, n, [&](int64_t begin, int64_t end) { integer_loops().uniform(&key, begin, end, out + begin); });
}

GRACE_KERNEL(sample, "; n, k, key -> int32[k]") {
    call.expect(0, 6, 0);
    const int64_t n = call.length(0), k = call.length(1);
    const Permutation permutation = permutation_of(call, n, k, key_at(call, 2));
    int32_t* out = call.output<int32_t>(k);
    GRACE_GPU(call, sample, permutation, static_cast<uint32_t>(n), out, k);
    over_pieces(call, k, [&](int64_t begin, int64_t end) {
        integer_loops().sample(&permutation, static_cast<uint32_t>(n), begin, end, out + begin);
    });
}

GRACE_KERNEL(sum_sample, "x T, y T; k, key; a, b -> T[x], T[k], int32[k], uint8[1]") {
    call.expect(2, 5, 2);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, k = call.length(0);
        const T *x = call.input<T>(0), *y = call.input<T>(1, n);
        const T a = static_cast<T>(call.number(0)), b = static_cast<T>(call.number(1));
        const Permutation permutation = permutation_of(call, n, k, key_at(call, 1));
        T* out = call.output<T>(n);
        T* values = call.output<T>(k);
        int32_t* indices = call.output<int32_t>(k);
        uint8_t* good = call.verdict();
        GRACE_GPU(call, sum_sample, x, a, y, b, permutation, out, values, indices, good, n, k);
        Scratch<uint8_t> each(divide_up(n, kPiece));
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            each[begin / kPiece] =
                loops<T>().weighted_sum(x + begin, a, y + begin, b, out + begin, end - begin, is_large<T>(n));
        });
        over_pieces(call, k, [&](int64_t begin, int64_t end) {
            integer_loops().sample(&permutation, static_cast<uint32_t>(n), begin, end, indices + begin);
            constexpr int64_t ahead = 24;  // prefetch distance for memory that is read out of order
            for (int64_t i = begin; i < end; ++i) {
                __builtin_prefetch(out + indices[std::min(i + ahead, end - 1)], 1);
                values[i] = out[indices[i]];
                out[indices[i]] = T(0);
            }
        });
        *good = all_good(each, n);
    });
}

}  // namespace grace
