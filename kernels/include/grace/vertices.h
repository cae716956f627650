// Random vertices of a cross-polytope in place of the elements of a bucket, see
// grace/core/compressors/contrib/vqsgd.py.
#pragma once

#include "grace/loops.h"
#ifndef GRACE_ISA
#include "grace/gpu.h"
#endif

namespace grace {

// Buckets of n elements and the vertices that are drawn for each of them. `least` is R in units of 2^-24, or 0 for the
// sum of a bucket's shares. Words of `rest` make up for what lies between.
struct Vertices {
    int64_t n, width, samples, least;
    RandomKey key, rest;
};

// The vertices of one rank.
template <class T> struct VertexCodes {
    const int64_t* codes;
    const T* scales;
};

// The codes of vertices and the sums of shares for buckets begin .. end - 1. `ends` has room for one bucket.
GRACE_LOOP(void draw_vertices(const T* x, const T* norms, const Vertices* by, int64_t* ends, int64_t* codes,
                              int64_t* masses, int64_t begin, int64_t end))
// out = onto + sum over ranks of scale * how often the elements of buckets begin .. end - 1 were drawn. `counts` has room
// for one bucket.
GRACE_LOOP(void vertices_sum(const VertexCodes<T>* ranks, int count, const Vertices* by, const T* onto, T* out,
                             int32_t* counts, int64_t begin, int64_t end))

#ifndef GRACE_ISA
namespace gpu {

template <class T>
void draw_vertices(const Stream& on, const T* x, const T* norms, const Vertices& by, int64_t* codes, int64_t* masses);
template <class T>
void vertices_sum(const Stream& on, const std::vector<VertexCodes<T>>& ranks, const Vertices& by, const T* onto, T* out);

}  // namespace gpu
#endif
}  // namespace grace
