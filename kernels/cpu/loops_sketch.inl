// Count-Sketches: a part of loops.inl.

// Buckets of elements first .. first + n - 1 (n at most kBlock), and the bits of their signs, 16 per number.
GRACE_LOCAL void hash_block(const SketchHash& hash, uint32_t columns, int64_t first, int64_t n, uint32_t* buckets,
                            uint16_t* signs) {
    uint64_t bucket = uint64_t(first) * hash.bucket_factor + hash.bucket_term;
    uint64_t sign = uint64_t(first) * hash.sign_factor + hash.sign_term;
#if defined(__AVX512F__)
    const __m512i lanes = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), many = _mm512_set1_epi64(columns);
    const __m512i upper = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const auto start = [&](uint64_t from, uint64_t factor) {
        return _mm512_add_epi64(_mm512_set1_epi64(int64_t(from)),
                                _mm512_mullo_epi64(lanes, _mm512_set1_epi64(int64_t(factor))));
    };
    const __m512i bucket_step = _mm512_set1_epi64(int64_t(8 * hash.bucket_factor));
    const __m512i sign_step = _mm512_set1_epi64(int64_t(8 * hash.sign_factor));
    __m512i b = start(bucket, hash.bucket_factor), s = start(sign, hash.sign_factor);
    for (int64_t i = 0; i < n; i += 16) {
        const __m512i low = _mm512_mul_epu32(_mm512_srli_epi64(b, 32), many);
        const uint32_t low_signs = _mm512_movepi64_mask(s);
        b = _mm512_add_epi64(b, bucket_step);
        s = _mm512_add_epi64(s, sign_step);
        const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(b, 32), many);
        signs[i / 16] = uint16_t(low_signs | uint32_t(_mm512_movepi64_mask(s)) << 8);
        b = _mm512_add_epi64(b, bucket_step);
        s = _mm512_add_epi64(s, sign_step);
        _mm512_storeu_si512(buckets + i, _mm512_permutex2var_epi32(low, upper, high));
    }
#else
    for (int64_t i = 0; i < n; ++i) {
        buckets[i] = bucket_of(uint32_t(bucket >> 32), columns);
        bucket += hash.bucket_factor;
    }
    for (int64_t i = 0; i < n; i += 16) {
        uint32_t bits = 0;
        for (int j = 0; j < 16; ++j) {
            bits |= uint32_t(sign >> 63) << j;
            sign += hash.sign_factor;
        }
        signs[i / 16] = uint16_t(bits);
    }
#endif
}

// x, negated where a sign bit is set.
template <class T> GRACE_LOCAL T signed_by(const uint16_t* signs, int64_t i, T x) {
    using Word = typename Format<T>::Word;
    return bits_as<T>(bits_as<Word>(x) ^ (Word(uint32_t(signs[i / 16]) >> (i % 16) & 1u) << (8 * sizeof(T) - 1)));
}

// body(i, bucket) for n buckets, two per load.
template <class Body> GRACE_LOCAL void each_bucket(const uint32_t* buckets, int64_t n, Body body) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; j += 2) {
            uint64_t pair;
            memcpy(&pair, buckets + i + j, 8);
            GRACE_ONE_BY_ONE(pair);
            body(i + j, pair & 0xFFFFFFFFu);
            body(i + j + 1, pair >> 32);
        }
    }
    for (; i < n; ++i) body(i, uint64_t(buckets[i]));
}

template <class T>
static void sketch_row(const T* x, const SketchHash* hash, uint32_t columns, int64_t n, double* sums) {
    alignas(64) uint32_t buckets[kBlock];
    alignas(64) double values[kBlock];
    uint16_t signs[kBlock / 16];
    for (int64_t at = 0; at < n; at += kBlock) {
        const int64_t length = lesser(kBlock, n - at);
        hash_block(*hash, columns, at, length, buckets, signs);
        for (int64_t i = 0; i + 16 <= length; i += 16) {
            for (int j = 0; j < 16; ++j) values[i + j] = double(signed_by(signs + i / 16, j, x[at + i + j]));
        }
        for (int64_t i = length / 16 * 16; i < length; ++i) values[i] = double(signed_by(signs, i, x[at + i]));
        each_bucket(buckets, length, [&](int64_t i, uint64_t bucket) { sums[bucket] += values[i]; });
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

// Medians over rows that begin every `stride` integers; a number of rows known to the compiler stays in registers.
template <int known, class Word>
GRACE_LOCAL void medians(const Word* found, int64_t stride, int rows, int64_t n, Word* out) {
    if constexpr (known > 0) {
        for (int64_t i = 0; i < n; ++i) {
            Word mine[known];
            for (int row = 0; row < known; ++row) mine[row] = found[row * stride + i];
#pragma GCC unroll 4
            for (int least = 0; least <= known / 2; ++least) least_first(mine, least, known);
            out[i] = mine[known / 2];
        }
        return;
    }
    for (int64_t i = 0; i < n; ++i) {
        // Selection by counting: as many are below the median as above it.
        for (int row = 0; row < rows; ++row) {
            const Word mine = found[row * stride + i];
            int below = 0, equal = 0;
            for (int other = 0; other < rows; ++other) {
                below += found[other * stride + i] < mine;
                equal += found[other * stride + i] == mine;
            }
            if (below <= rows / 2 && rows / 2 < below + equal) out[i] = mine;
        }
    }
}

template <class T>
static void sketch_medians(const T* sketch, const SketchHash* hashes, int rows, uint32_t columns, int64_t begin,
                           int64_t end, typename Format<T>::Signed* found, T* out, bool around) {
    using Signed = typename Format<T>::Signed;
    // Row by row, so that one row at a time wants a place in the cache.
    for (int row = 0; row < rows; ++row) {
        const T* mine = sketch + int64_t(row) * columns;
        for (int64_t at = begin; at < end; at += kBlock) {
            alignas(64) uint32_t buckets[kBlock];
            alignas(64) T values[kBlock];
            uint16_t signs[kBlock / 16];
            const int64_t length = lesser(kBlock, end - at);
            Signed* into = found + row * (end - begin) + (at - begin);
            hash_block(hashes[row], columns, at, length, buckets, signs);
            each_bucket(buckets, length, [&](int64_t i, uint64_t bucket) { values[i] = mine[bucket]; });
            for (int64_t i = 0; i + 16 <= length; i += 16) {
                for (int j = 0; j < 16; ++j) into[i + j] = ordered(signed_by(signs + i / 16, j, values[i + j]));
            }
            for (int64_t i = length / 16 * 16; i < length; ++i) into[i] = ordered(signed_by(signs, i, values[i]));
        }
    }
    in_blocks(out + begin, end - begin, around, [&](int64_t at, int64_t length, T* target) {
        alignas(64) Signed median[kBlock];
        const Signed* here = found + at;
        switch (rows) {
            case 1: medians<1>(here, end - begin, rows, length, median); break;
            case 3: medians<3>(here, end - begin, rows, length, median); break;
            case 5: medians<5>(here, end - begin, rows, length, median); break;
            case 7: medians<7>(here, end - begin, rows, length, median); break;
            default: medians<0>(here, end - begin, rows, length, median);
        }
        for (int64_t i = 0; i < length; ++i) target[i] = from_ordered<T>(median[i]);
    });
}
