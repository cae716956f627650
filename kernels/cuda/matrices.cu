// Small matrices.
#include "device.h"

namespace grace {
namespace gpu {

// Gram-Schmidt, twice per column. Every sum is computed in float64 and rounded once.
template <class T> void orthogonalize(const Stream& on, const T* a, int64_t rows, int64_t columns, T* out) {
    T* transposed = scratch<T>(on, rows * columns);
    T* numbers = scratch<T>(on, 4);
    T *largest = numbers, *original = numbers + 1, *share = numbers + 2, *length = numbers + 3;
    for (int64_t j = 0; j < columns; ++j) {
        T* column = transposed + j * rows;
        map(on, column, rows, [=] __device__(int64_t i) { return a[i * columns + j]; });
        max_abs(on, column, rows, largest);
        // Products of denormals would lose their few bits.
        map(on, column, rows, [=] __device__(int64_t i) { return column[i] / (*largest > 0 ? *largest : T(1)); });
        norm(on, column, rows, original);
        for (int64_t other = 0; other < 2 * j; ++other) {
            const T* before = transposed + other % j * rows;
            reduce(
                on, rows, 0.0, [=] __device__(int64_t i) { return double(T(before[i] * column[i])); }, Added<double>(),
                [=] __device__(double sum) { *share = T(sum); });
            map(on, column, rows, [=] __device__(int64_t i) { return column[i] - before[i] * *share; });
        }
        norm(on, column, rows, length);
        map(on, column, rows, [=] __device__(int64_t i) {
            // The rest of a linearly dependent column is rounding noise. Normalizing it would give a random direction.
            const bool independent = *length > T(1e-6) * *original;
            const T value = independent ? column[i] / *length : T(0);
            out[i * columns + j] = value;
            return value;
        });
    }
}

template void orthogonalize<float>(const Stream&, const float*, int64_t, int64_t, float*);
template void orthogonalize<double>(const Stream&, const double*, int64_t, int64_t, double*);

}  // namespace gpu
}  // namespace grace
