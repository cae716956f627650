// Sums in NumPy's order of additions.
#pragma once

#include <cstdint>

namespace grace {

// The sum of n numbers in NumPy's order of additions, so that float64 results have the same bits.
inline double pairwise_sum(const double* x, int64_t n) {
    if (n < 8) {
        double sum = 0;
        for (int64_t i = 0; i < n; ++i) sum += x[i];
        return sum;
    }
    if (n > 128) {
        const int64_t half = n / 2 - n / 2 % 8;
        return pairwise_sum(x, half) + pairwise_sum(x + half, n - half);
    }
    double sums[8];
    for (int j = 0; j < 8; ++j) sums[j] = x[j];
    int64_t i = 8;
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; ++j) sums[j] += x[i + j];
    }
    double sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    for (; i < n; ++i) sum += x[i];
    return sum;
}

}  // namespace grace
