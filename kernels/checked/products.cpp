// Products with matrices of few columns.
#include "grace/kernels.h"

namespace grace {
namespace {

// The columns of a matrix b with r columns, one after the other.
template <class T> void transpose(const T* b, int64_t n, int64_t r, T* out) {
    for (int64_t k = 0; k < r; ++k) {
        for (int64_t i = 0; i < n; ++i) out[k * n + i] = b[i * r + k];
    }
}

// a b; a has n rows of m, b has m rows of r.
template <class T> void times_kernel(Call& call, const T* a, const T* b, int64_t n, int64_t m, int64_t r) {
    T* out = call.output<T>(n * r);
    Scratch<T> columns(m * r);
    transpose(b, m, r, columns.data());
    // Pieces of whole rows. Four rows are read together.
    const int64_t rows = divide_up(divide_up(kPiece, m), 4) * 4;
    call.parallel(divide_up(n, rows), [&](int64_t task) {
        const int64_t begin = task * rows, end = std::min(n, begin + rows);
        loops<T>().times(a, columns.data(), m, static_cast<int>(r), begin, end, out);
    });
}

// The transpose of a times b; a has n rows of m, b has n rows of r.
template <class T> void transposed_times_kernel(Call& call, const T* a, const T* b, int64_t n, int64_t m, int64_t r) {
    T* out = call.output<T>(m * r);
    constexpr int64_t width = 512;
    call.parallel(divide_up(m, width), [&](int64_t task) {
        const int64_t begin = task * width, end = std::min(m, begin + width);
        loops<T>().transposed_times(a, b, n, m, static_cast<int>(r), begin, end, out);
    });
}

// a times the transpose of b; a has n rows of r, b has m rows of r. Subtracts the product from x unless that is null.
template <class T>
void times_transposed_kernel(Call& call, const T* a, const T* b, int64_t n, int64_t m, int64_t r, T* x) {
    T* out = call.output<T>(n * m);
    Scratch<T> columns(m * r);
    transpose(b, m, r, columns.data());
    const bool around = is_large<T>(n * m);
    over_pieces(call, n * m, [&](int64_t begin, int64_t end) {
        loops<T>().times_transposed(a, columns.data(), m, static_cast<int>(r), begin, end, out, x, around);
    });
}

// The sides n and m and the columns r of a product, from the first three integers.
struct Sides {
    int64_t n, m, r;
};

// `possible` is false if both matrices are transposed.
Sides sides_of(const Call& call, bool possible = true) {
    const Sides sides = {call.length(0), call.length(1), call.length(2)};
    if (!possible || call.gpu() != nullptr || sides.r < 1 || sides.r > 16 || sides.m < 1 || sides.n > kMost / sides.m) {
        call.fail(Error::Kind::value, "expected matrices in main memory, one of them at most transposed, with 1 to 16 "
                                      "columns, received n = " + std::to_string(sides.n) + ", m = " +
                                      std::to_string(sides.m) + ", r = " + std::to_string(sides.r));
    }
    return sides;
}

}  // namespace

void thin_product_kernel(Call& call) {
    call.expect(2, 5, 0);
    const bool first = call.integer(3) != 0, second = call.integer(4) != 0;
    const auto [n, m, r] = sides_of(call, !(first && second));
    dispatch(call, call.input(0), [&, n = n, m = m, r = r](auto* type) {
        using T = of_pointer<decltype(type)>;
        const T* a = call.input<T>(0, second ? n * r : n * m);
        const T* b = call.input<T>(1, first ? n * r : m * r);
        if (second) {
            times_transposed_kernel<T>(call, a, b, n, m, r, nullptr);
        } else {
            (first ? transposed_times_kernel<T> : times_kernel<T>)(call, a, b, n, m, r);
        }
    });
}

void sub_product_kernel(Call& call) {
    call.expect(3, 3, 0);
    const auto [n, m, r] = sides_of(call);
    dispatch(call, call.input(0), [&, n = n, m = m, r = r](auto* type) {
        using T = of_pointer<decltype(type)>;
        T* x = call.consumed<T>(0, n * m);
        times_transposed_kernel<T>(call, call.input<T>(1, n * r), call.input<T>(2, m * r), n, m, r, x);
    });
}

}  // namespace grace
