// Products with matrices of few columns, and bases of their columns.
#include <atomic>
#include <cmath>

#include "grace/kernels.h"
#include "pairwise.h"

namespace grace {
namespace {

// The columns of a matrix b with r columns, one after the other.
template <class T> void transpose(const T* b, int64_t n, int64_t r, T* out) {
    for (int64_t k = 0; k < r; ++k) {
        for (int64_t i = 0; i < n; ++i) out[k * n + i] = b[i * r + k];
    }
}

// The number of rows that are read together.
constexpr int64_t kRows = 4;

// Runs body(begin, end) over pieces of whole rows of m elements.
template <class Body> void over_rows(Call& call, int64_t n, int64_t m, Body body) {
    const int64_t rows = divide_up(divide_up(kPiece, m), kRows) * kRows;
    call.parallel(divide_up(n, rows), [&](int64_t task) { body(task * rows, std::min(n, (task + 1) * rows)); });
}

// a b; a has n rows of m, b has m rows of r.
template <class T> void times_kernel(Call& call, const T* a, const T* b, int64_t n, int64_t m, int64_t r) {
    T* out = call.output<T>(n * r);
    Scratch<T> columns(m * r);
    transpose(b, m, r, columns.data());
    over_rows(call, n, m, [&](int64_t begin, int64_t end) {
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

// Orthonormal columns with the span of those of a; dependent columns become zero.
template <class T> void orthonormal(const T* a, int64_t rows, int64_t columns, T* out) {
    Scratch<T> transposed(rows * columns);
    Scratch<double> products(rows);
    // NumPy converts float32 to float64 in pieces of this length before it adds.
    const int64_t piece = sizeof(T) == sizeof(float) ? 8192 : std::max<int64_t>(1, rows);
    const auto sum = [&](auto product) {
        double total = 0;
        for (int64_t at = 0; at < rows; at += piece) {
            const int64_t length = std::min(piece, rows - at);
            for (int64_t i = 0; i < length; ++i) products[i] = static_cast<double>(product(at + i));
            total += pairwise_sum(products.data(), length);
        }
        return total;
    };
    const auto norm = [&](const T* x) {
        for (int64_t i = 0; i < rows; ++i) products[i] = static_cast<double>(x[i]) * static_cast<double>(x[i]);
        return static_cast<T>(std::sqrt(pairwise_sum(products.data(), rows)));
    };
    for (int64_t j = 0; j < columns; ++j) {
        T* column = &transposed[j * rows];
        for (int64_t i = 0; i < rows; ++i) column[i] = a[i * columns + j];
        // Products of denormals would lose their few bits.
        const T largest = loops<T>().max_abs(column, rows), divisor = largest > 0 ? largest : T(1);
        for (int64_t i = 0; i < rows; ++i) column[i] /= divisor;
        const T original = norm(column);
        for (int64_t other = 0; other < 2 * j; ++other) {
            const T* before = &transposed[other % j * rows];
            const T share = static_cast<T>(sum([&](int64_t i) { return before[i] * column[i]; }));
            for (int64_t i = 0; i < rows; ++i) column[i] -= before[i] * share;
        }
        // The rest of a linearly dependent column is rounding noise. Normalizing it would give a random direction.
        const T length = norm(column);
        const bool independent = length > static_cast<T>(1e-6) * original;
        for (int64_t i = 0; i < rows; ++i) column[i] = independent ? column[i] / length : T(0);
    }
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) out[i * columns + j] = transposed[j * rows + i];
    }
}

// The columns of q divided by their lengths. Returns whether none of them is zero; those that are stay so.
template <class T> bool unit_columns(const T* q, int64_t rows, int64_t columns, T* out) {
    std::vector<double> squares(static_cast<size_t>(columns), 0.0);
    if (columns == 1) {
        // In NumPy's order, as in the general case.
        Scratch<double> products(rows);
        for (int64_t i = 0; i < rows; ++i) products[i] = static_cast<double>(q[i]) * static_cast<double>(q[i]);
        squares[0] = pairwise_sum(products.data(), rows);
    } else {
        for (int64_t i = 0; i < rows; ++i) {
            for (int64_t j = 0; j < columns; ++j) {
                const double x = static_cast<double>(q[i * columns + j]);
                squares[j] += x * x;
            }
        }
    }
    bool whole = true;
    std::vector<T> lengths;
    for (const double square : squares) {
        const T length = static_cast<T>(std::sqrt(square));
        whole &= length != 0;
        lengths.push_back(length != 0 ? length : T(1));
    }
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) out[i * columns + j] = q[i * columns + j] / lengths[j];
    }
    return whole;
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

GRACE_KERNEL(thin_product, "a T, b T; n, m, r, transpose_a, transpose_b -> T") {
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

GRACE_KERNEL(sub_product, "x_ T, a T, b T; n, m, r -> x_, T[x]") {
    call.expect(3, 3, 0);
    const auto [n, m, r] = sides_of(call);
    dispatch(call, call.input(0), [&, n = n, m = m, r = r](auto* type) {
        using T = of_pointer<decltype(type)>;
        T* x = call.consumed<T>(0, n * m);
        times_transposed_kernel<T>(call, call.input<T>(1, n * r), call.input<T>(2, m * r), n, m, r, x);
    });
}

GRACE_KERNEL(power_product, "x T, q T; n, m, r -> T[n r], uint8[1]") {
    call.expect(2, 3, 0);
    const auto [n, m, r] = sides_of(call);
    dispatch(call, call.input(0), [&, n = n, m = m, r = r](auto* type) {
        using T = of_pointer<decltype(type)>;
        const T *x = call.input<T>(0, n * m), *q = call.input<T>(1, m * r);
        Scratch<T> units(m * r);
        const bool whole = unit_columns(q, m, r, units.data());
        times_kernel<T>(call, x, units.data(), n, m, r);
        *call.verdict() = whole;
    });
}

GRACE_KERNEL(sum_power_product, "x T, y T, q T; n, m, r -> T[x], T[n r], uint8[1]") {
    call.expect(3, 3, 0);
    const auto [n, m, r] = sides_of(call);
    dispatch(call, call.input(0), [&, n = n, m = m, r = r](auto* type) {
        using T = of_pointer<decltype(type)>;
        const T *x = call.input<T>(0, n * m), *y = call.input<T>(1, n * m), *q = call.input<T>(2, m * r);
        T *sum = call.output<T>(n * m), *out = call.output<T>(n * r);
        uint8_t* good = call.verdict();
        Scratch<T> units(m * r), columns(m * r);
        const bool whole = unit_columns(q, m, r, units.data());
        transpose(units.data(), m, r, columns.data());
        std::atomic<bool> finite(true);
        over_rows(call, n, m, [&, m = m, r = r](int64_t begin, int64_t end) {
            // A few rows at once, so that the product finds them in the cache.
            for (int64_t i = begin; i < end; i += kRows) {
                const int64_t last = std::min(i + kRows, end), at = i * m, length = (last - i) * m;
                if (!loops<T>().weighted_sum(x + at, T(1), y + at, T(1), sum + at, length, false)) finite = false;
                loops<T>().times(sum, columns.data(), m, static_cast<int>(r), i, last, out);
            }
        });
        *good = whole && finite;
    });
}

GRACE_KERNEL(project, "x T, p T; n, m, r -> T[p], T[m r]") {
    call.expect(2, 3, 0);
    const auto [n, m, r] = sides_of(call);
    dispatch(call, call.input(0), [&, n = n, m = m, r = r](auto* type) {
        using T = of_pointer<decltype(type)>;
        const T *x = call.input<T>(0, n * m), *p = call.input<T>(1, n * r);
        T* basis = call.output<T>(n * r);
        orthonormal(p, n, r, basis);
        transposed_times_kernel<T>(call, x, basis, n, m, r);
    });
}

GRACE_KERNEL(orthogonalize, "a T; rows, columns -> T[rows columns]") {
    call.expect(1, 2, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t rows = call.length(0), columns = call.length(1);
        // The product of two lengths may overflow int64.
        if (columns > 0 && rows > kMost / columns) {
            call.fail(Error::Kind::value, "expected a matrix of at most " + std::to_string(kMost) +
                                              " elements, received " + std::to_string(rows) + " x " +
                                              std::to_string(columns));
        }
        const T* a = call.input<T>(0, rows * columns);
        T* out = call.output<T>(rows * columns);
        GRACE_GPU(call, orthogonalize, a, rows, columns, out);
        orthonormal(a, rows, columns, out);
    });
}

}  // namespace grace
