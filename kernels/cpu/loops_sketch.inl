// Count-Sketches: a part of loops.inl.

constexpr int64_t kSketchAhead = 12;  // how many blocks ahead their columns are asked for

// to[lane] = from[lane ^ flip] of a block.
template <class T> GRACE_LOCAL void flip_block(const T* from, uint32_t flip, T* to) {
    for (uint32_t lane = 0; lane < kSketchBlock; ++lane) to[lane] = from[lane ^ flip];
}
#if defined(__AVX512F__)
GRACE_LOCAL void flip_block(const float* from, uint32_t flip, float* to) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i order = _mm512_xor_si512(lanes, _mm512_set1_epi32(int32_t(flip)));
    _mm512_storeu_ps(to, _mm512_permutexvar_ps(order, _mm512_loadu_ps(from)));
}
GRACE_LOCAL void flip_block(const double* from, uint32_t flip, double* to) {
    const __m512i lanes = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i order = _mm512_xor_si512(lanes, _mm512_set1_epi64(flip % 8));
    for (uint32_t half = 0; half < 16; half += 8) {
        const __m512d v = _mm512_loadu_pd(from + (half ^ (flip & 8)));
        _mm512_storeu_pd(to + half, _mm512_permutexvar_pd(order, v));
    }
}
#elif defined(__AVX2__)
GRACE_LOCAL void flip_block(const float* from, uint32_t flip, float* to) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i order = _mm256_xor_si256(lanes, _mm256_set1_epi32(int32_t(flip % 8)));
    for (uint32_t half = 0; half < 16; half += 8) {
        const __m256 v = _mm256_loadu_ps(from + (half ^ (flip & 8)));
        _mm256_storeu_ps(to + half, _mm256_permutevar8x32_ps(v, order));
    }
}
#endif

template <class T>
static void sketch_row(const T* x, const SketchHash* hash, uint32_t columns, int64_t n, double* sums) {
    const SketchHash mine = *hash;
    const int64_t whole = n / kSketchBlock;
    for (int64_t block = 0; block < whole; ++block, x += kSketchBlock) {
        const double* later = sums + sketch_column(mine, uint64_t(block + kSketchAhead), columns) / kSketchBlock * kSketchBlock;
        __builtin_prefetch(later, 1);
        __builtin_prefetch(later + kSketchBlock / 2, 1);
        const SketchPlace place = place_of(mine, uint64_t(block), columns);
        alignas(64) T values[kSketchBlock], flipped[kSketchBlock];
        for (int lane = 0; lane < kSketchBlock; ++lane) values[lane] = signed_by(place.signs, lane, x[lane]);
        flip_block(values, place.column % kSketchBlock, flipped);
        double* into = sums + place.column / kSketchBlock * kSketchBlock;
        for (int lane = 0; lane < kSketchBlock; ++lane) into[lane] += double(flipped[lane]);
    }
    const SketchPlace place = place_of(mine, uint64_t(whole), columns);
    for (int lane = 0; lane < int(n % kSketchBlock); ++lane) {
        sums[place.column ^ uint32_t(lane)] += double(signed_by(place.signs, lane, x[lane]));
    }
}

// Moves the least of the rows from `least` on to the front.
template <class Word> GRACE_LOCAL void least_first(Word* found, int least, int rows) {
    for (int row = rows - 1; row > least; --row) {
        const Word a = found[row - 1], b = found[row];
        found[row - 1] = a < b ? a : b;
        found[row] = a < b ? b : a;
    }
}

// Medians over rows of one block; a number of rows known to the compiler stays in registers.
template <int known, class Word> GRACE_LOCAL void medians(const Word* found, int rows, Word* out) {
    if constexpr (known > 0) {
        for (int lane = 0; lane < kSketchBlock; ++lane) {
            Word mine[known];
            for (int row = 0; row < known; ++row) mine[row] = found[row * kSketchBlock + lane];
#pragma GCC unroll 4
            for (int least = 0; least <= known / 2; ++least) least_first(mine, least, known);
            out[lane] = mine[known / 2];
        }
        return;
    }
    for (int lane = 0; lane < kSketchBlock; ++lane) {
        // Selection by counting: as many are below the median as above it.
        for (int row = 0; row < rows; ++row) {
            const Word mine = found[row * kSketchBlock + lane];
            int below = 0, equal = 0;
            for (int other = 0; other < rows; ++other) {
                below += found[other * kSketchBlock + lane] < mine;
                equal += found[other * kSketchBlock + lane] == mine;
            }
            if (below <= rows / 2 && rows / 2 < below + equal) out[lane] = mine;
        }
    }
}

// Estimates of `count` elements of a block.
template <int known, class T>
GRACE_LOCAL void estimate_block(const T* sketch, const SketchHash* hashes, int rows, uint32_t columns, int64_t block,
                                typename Format<T>::Signed* found, int64_t count, T* out) {
    if (known > 0) rows = known;
    for (int row = 0; row < rows; ++row) {
        const T* mine = sketch + int64_t(row) * columns;
        const T* later = mine + sketch_column(hashes[row], uint64_t(block + kSketchAhead), columns) / kSketchBlock * kSketchBlock;
        for (int64_t i = 0; i < kSketchBlock; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(later + i);
        const SketchPlace place = place_of(hashes[row], uint64_t(block), columns);
        alignas(64) T values[kSketchBlock];
        flip_block(mine + place.column / kSketchBlock * kSketchBlock, place.column % kSketchBlock, values);
        for (int lane = 0; lane < kSketchBlock; ++lane) {
            found[row * kSketchBlock + lane] = ordered(signed_by(place.signs, lane, values[lane]));
        }
    }
    alignas(64) typename Format<T>::Signed median[kSketchBlock];
    medians<known>(found, rows, median);
    if (count == kSketchBlock) {
        for (int lane = 0; lane < kSketchBlock; ++lane) out[lane] = finite_estimate(from_ordered<T>(median[lane]));
    } else {
        for (int lane = 0; lane < count; ++lane) out[lane] = finite_estimate(from_ordered<T>(median[lane]));
    }
}

template <int known, class T>
static void estimates(const T* sketch, const SketchHash* hashes, int rows, uint32_t columns, int64_t begin,
                      int64_t end, typename Format<T>::Signed* found, T* out, bool around) {
    in_blocks(out + begin, end - begin, around, [&](int64_t at, int64_t length, T* target) {
        alignas(64) typename Format<T>::Signed here[(known > 0 ? known : 1) * kSketchBlock];
        for (int64_t i = 0; i < length; i += kSketchBlock) {
            estimate_block<known>(sketch, hashes, rows, columns, (begin + at + i) / kSketchBlock, known > 0 ? here : found,
                                  lesser(kSketchBlock, length - i), target + i);
        }
    });
}

template <class T>
static void sketch_medians(const T* sketch, const SketchHash* hashes, int rows, uint32_t columns, int64_t begin,
                           int64_t end, typename Format<T>::Signed* found, T* out, bool around) {
    switch (rows) {
        case 1: return estimates<1>(sketch, hashes, rows, columns, begin, end, found, out, around);
        case 3: return estimates<3>(sketch, hashes, rows, columns, begin, end, found, out, around);
        case 5: return estimates<5>(sketch, hashes, rows, columns, begin, end, found, out, around);
        case 7: return estimates<7>(sketch, hashes, rows, columns, begin, end, found, out, around);
        default: return estimates<0>(sketch, hashes, rows, columns, begin, end, found, out, around);
    }
}
