// Sums of a residual and a gradient that are compressed in the pass that adds them.
#pragma once

#include "grace/gpu.h"

namespace grace {

// The inverse of `permuted`.
GRACE_HD uint32_t unpermuted(const Permutation& p, uint32_t value) {
    uint32_t left = value & p.low_mask, right = value >> p.low;
    for (int r = 6; r >= 0; r -= 2) {
        right ^= mix(left, p.keys[r + 1]) & p.high_mask;
        left ^= mix(right, p.keys[r]) & p.low_mask;
    }
    return left + (right << p.low);
}

// The i-th element of a sample without replacement from n, and the place of an element in it. The permutation reaches
// beyond n, and what lies there is skipped.
GRACE_HD uint32_t sampled(const Permutation& p, uint32_t n, uint32_t i) {
    uint32_t found = permuted(p, i);
    while (found >= n) found = permuted(p, found);
    return found;
}
GRACE_HD uint32_t place_in_sample(const Permutation& p, uint32_t n, uint32_t element) {
    uint32_t found = unpermuted(p, element);
    while (found >= n) found = unpermuted(p, found);
    return found;
}

namespace gpu {

// a x + b y, with the bits and the means of its columns, as binarize_columns.
template <class T>
void sum_columns(const Stream& on, const T* x, T a, const T* y, T b, T* out, T threshold, int64_t columns,
                 uint8_t* bits, T* means, uint8_t* good, int64_t n);
// a x + b y with zeros in place of a sample of k elements, and these elements.
template <class T>
void sum_sample(const Stream& on, const T* x, T a, const T* y, T b, const Permutation& permutation, T* out, T* values,
                int32_t* indices, uint8_t* good, int64_t n, int64_t k);

}  // namespace gpu
}  // namespace grace
