// Products of a matrix and a few columns. Included by loops.inl.
//
// The order of every sum is the same for all instruction sets: lanes of 64 bytes, and within them the order of the
// elements.

namespace grace {
namespace GRACE_ISA {

template <class T> struct Lanes {
    static constexpr int count = 64 / int(sizeof(T));
    typedef T Vector __attribute__((vector_size(64)));
};

template <class T> GRACE_LOCAL void load_lanes(const T* x, typename Lanes<T>::Vector* out) {
    memcpy(out, x, sizeof(*out));
}

// The number of elements that are summed in T. Longer sums are accumulated in float64.
constexpr int64_t kSummed = 4096;

// totals[row][k] += sum_j a[row][j] b[k][j] over `length` columns, at most kSummed.
template <int rows, int r, class T>
GRACE_LOCAL void dots(const T* a, const T* b, int64_t stride, int64_t length, double (*totals)[4]) {
    using Vector = typename Lanes<T>::Vector;
    constexpr int lanes = Lanes<T>::count;
    Vector sums[rows][r] = {};
    const auto step = [&](const T* from, int64_t from_apart, const T* with, int64_t with_apart) {
        Vector factors[r];
        for (int k = 0; k < r; ++k) load_lanes(with + k * with_apart, &factors[k]);
        for (int row = 0; row < rows; ++row) {
            Vector x;
            load_lanes(from + row * from_apart, &x);
            for (int k = 0; k < r; ++k) sums[row][k] += x * factors[k];
        }
    };
    int64_t j = 0;
    for (; j + lanes <= length; j += lanes) step(a + j, stride, b + j, stride);
    if (j < length) {
        // Pad with zeros, which add nothing.
        alignas(64) T last_a[rows * lanes] = {}, last_b[r * lanes] = {};
        const size_t bytes = sizeof(T) * size_t(length - j);
        for (int row = 0; row < rows; ++row) memcpy(last_a + row * lanes, a + row * stride + j, bytes);
        for (int k = 0; k < r; ++k) memcpy(last_b + k * lanes, b + k * stride + j, bytes);
        step(last_a, lanes, last_b, lanes);
    }
    for (int row = 0; row < rows; ++row) {
        for (int k = 0; k < r; ++k) {
            alignas(64) T parts[lanes];
            memcpy(parts, &sums[row][k], sizeof(parts));
            for (int half = lanes / 2; half > 0; half /= 2) {
                for (int lane = 0; lane < half; ++lane) parts[lane] += parts[lane + half];
            }
            totals[row][k] += double(parts[0]);
        }
    }
}

// 1 to 4 columns, as a compile-time constant.
template <int r> struct Known {
    static constexpr int value = r;
};
template <class Body> GRACE_LOCAL void with_known(int r, Body body) {
    switch (r) {
        case 1: return body(Known<1>());
        case 2: return body(Known<2>());
        case 3: return body(Known<3>());
        default: return body(Known<4>());
    }
}

template <class T>
static void times(const T* a, const T* b, int64_t m, int r, int64_t begin, int64_t end, T* out) {
    for (int64_t i = begin; i < end; i += 4) {
        const int rows = int(lesser(4, end - i));
        for (int first = 0; first < r; first += 4) {
            double totals[4][4] = {};
            const int columns = int(lesser(4, r - first));
            with_known(columns, [&](auto known) {
                constexpr int here = decltype(known)::value;
                for (int64_t j = 0; j < m; j += kSummed) {
                    const int64_t length = lesser(kSummed, m - j);
                    const T *from = a + i * m + j, *with = b + first * m + j;
                    if (rows == 4) {
                        dots<4, here>(from, with, m, length, totals);
                    } else {
                        for (int row = 0; row < rows; ++row) {
                            dots<1, here>(from + row * m, with, m, length, totals + row);
                        }
                    }
                }
            });
            for (int row = 0; row < rows; ++row) {
                for (int k = 0; k < columns; ++k) out[(i + row) * r + first + k] = T(totals[row][k]);
            }
        }
    }
}

// sums[k][j] += sum over `rows` rows of a[row][j] b[row][k], for `length` columns.
template <int rows, int r, class T>
GRACE_LOCAL void add_rows(const T* a, int64_t m, const T* b, int64_t ranks, int64_t length, T* sums, int64_t stride) {
    using Vector = typename Lanes<T>::Vector;
    constexpr int lanes = Lanes<T>::count;
    int64_t j = 0;
    for (; j + lanes <= length; j += lanes) {
        Vector mine[r];
        for (int k = 0; k < r; ++k) load_lanes(sums + k * stride + j, &mine[k]);
        for (int row = 0; row < rows; ++row) {
            Vector x;
            load_lanes(a + row * m + j, &x);
            // The next rows: short pieces of rows far apart are no stream that the processor would read ahead.
            __builtin_prefetch(a + (row + rows) * m + j);
            for (int k = 0; k < r; ++k) mine[k] += x * b[row * ranks + k];
        }
        for (int k = 0; k < r; ++k) memcpy(sums + k * stride + j, &mine[k], sizeof(Vector));
    }
    for (; j < length; ++j) {
        for (int row = 0; row < rows; ++row) {
            for (int k = 0; k < r; ++k) sums[k * stride + j] += a[row * m + j] * b[row * ranks + k];
        }
    }
}

template <class T>
static void transposed_times(const T* a, const T* b, int64_t n, int64_t m, int r, int64_t begin, int64_t end, T* out) {
    constexpr int64_t most = 512;
    alignas(64) T sums[4 * most];
    alignas(64) double totals[4 * most];
    for (int64_t at = begin; at < end; at += most) {
        const int64_t length = lesser(most, end - at);
        for (int first = 0; first < r; first += 4) {
            const int columns = int(lesser(4, r - first));
            for (int64_t j = 0; j < 4 * most; ++j) totals[j] = 0.0;
            for (int64_t piece = 0; piece < n; piece += kSummed) {
                const int64_t last = lesser(piece + kSummed, n);
                for (int64_t j = 0; j < 4 * most; ++j) sums[j] = T(0);
                with_known(columns, [&](auto known) {
                    constexpr int here = decltype(known)::value;
                    int64_t i = piece;
                    for (; i + 8 <= last; i += 8) {
                        add_rows<8, here>(a + i * m + at, m, b + i * r + first, r, length, sums, most);
                    }
                    for (; i < last; ++i) {
                        add_rows<1, here>(a + i * m + at, m, b + i * r + first, r, length, sums, most);
                    }
                });
                for (int64_t j = 0; j < 4 * most; ++j) totals[j] += double(sums[j]);
            }
            for (int64_t j = 0; j < length; ++j) {
                for (int k = 0; k < columns; ++k) out[(at + j) * r + first + k] = T(totals[k * most + j]);
            }
        }
    }
}

// target[t] = sum_k columns[k m + t] row[k] for elements of a row of the product; subtracts them from `rest` unless that
// is null. `known` is r, or 0 for any r.
template <int known, class T>
GRACE_LOCAL void row_of_product(const T* row, const T* columns, int64_t m, int r, int64_t length, T* target, T* rest) {
    using Vector = typename Lanes<T>::Vector;
    constexpr int lanes = Lanes<T>::count;
    const int count = known > 0 ? known : r;
    int64_t t = 0;
    for (; t + lanes <= length; t += lanes) {
        Vector x, sum;
        load_lanes(columns + t, &x);
        sum = x * row[0];
        for (int k = 1; k < count; ++k) {
            load_lanes(columns + k * m + t, &x);
            sum += x * row[k];
        }
        memcpy(target + t, &sum, sizeof(sum));
        if (rest == nullptr) continue;
        fetch_ahead<lanes>(rest + t);
        load_lanes(rest + t, &x);
        x -= sum;
        memcpy(rest + t, &x, sizeof(x));
    }
    for (; t < length; ++t) {
        T sum = columns[t] * row[0];
        for (int k = 1; k < count; ++k) sum += columns[k * m + t] * row[k];
        target[t] = sum;
        if (rest != nullptr) rest[t] -= sum;
    }
}

template <class T>
static void times_transposed(const T* a, const T* b, int64_t m, int r, int64_t begin, int64_t end, T* out, T* x,
                             bool around) {
    in_blocks(out + begin, end - begin, around, [&](int64_t from, int64_t length, T* target) {
        for (int64_t done = 0; done < length;) {
            const int64_t at = begin + from + done, i = at / m, j = at % m, here = lesser(m - j, length - done);
            T* rest = x == nullptr ? nullptr : x + at;
            if (r == 4) {
                row_of_product<4>(a + i * r, b + j, m, r, here, target + done, rest);
            } else {
                row_of_product<0>(a + i * r, b + j, m, r, here, target + done, rest);
            }
            done += here;
        }
    });
}

}  // namespace GRACE_ISA
}  // namespace grace
