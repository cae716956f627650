// Count-Sketches: a part of loops.inl.

// Buckets of elements first .. first + n - 1 (n at most kBlock) and, in their upper bits, signs.
GRACE_LOCAL void hash_block(const SketchHash& hash, uint32_t columns, int64_t first, int64_t n, uint32_t* buckets,
                            uint32_t* signs) {
    uint64_t bucket = uint64_t(first) * hash.bucket_factor + hash.bucket_term;
    uint64_t sign = uint64_t(first) * hash.sign_factor + hash.sign_term;
    for (int64_t i = 0; i < n; ++i) {
        buckets[i] = bucket_of(uint32_t(bucket >> 32), columns);
        bucket += hash.bucket_factor;
    }
    for (int64_t i = 0; i < n; ++i) {
        signs[i] = uint32_t(sign >> 32);
        sign += hash.sign_factor;
    }
}

constexpr int64_t kSketchAhead = 32;  // how far ahead a bucket is asked for

template <class T>
static void sketch_row(const T* x, const SketchHash* hash, uint32_t columns, int64_t n, double* sums) {
    using Word = typename Format<T>::Word;
    alignas(64) uint32_t buckets[kBlock + kSketchAhead], signs[kBlock];
    alignas(64) double values[kBlock];
    for (int64_t j = 0; j < kSketchAhead; ++j) buckets[kBlock + j] = 0;
    for (int64_t at = 0; at < n; at += kBlock) {
        const int64_t length = lesser(kBlock, n - at);
        hash_block(*hash, columns, at, length, buckets, signs);
        for (int64_t i = 0; i < length; ++i) {
            values[i] = double(bits_as<T>(bits_as<Word>(x[at + i]) ^ (Word(signs[i] >> 31) << (8 * sizeof(T) - 1))));
        }
        for (int64_t j = 0; j < kSketchAhead && j < length; ++j) __builtin_prefetch(sums + buckets[j], 1);
        for (int64_t i = 0; i < length; ++i) {
            __builtin_prefetch(sums + buckets[i + kSketchAhead], 1);
            sums[buckets[i]] += values[i];
        }
    }
}

// Floating numbers as integers of the same order, -0 before 0 and NaN last.
template <class T> GRACE_LOCAL typename Format<T>::Signed ordered(T x) {
    using Signed = typename Format<T>::Signed;
    constexpr Signed infinite = Signed((int64_t(1) << Format<T>::exponent) - 1) << Format<T>::mantissa;
    const Signed size = bits_as<Signed>(magnitude(x)), own = bits_as<Signed>(x);
    return own >= 0 || size > infinite ? size : ~size;
}

template <class T> GRACE_LOCAL T from_ordered(typename Format<T>::Signed word) {
    using Word = typename Format<T>::Word;
    return bits_as<T>(word >= 0 ? Word(word) : Word(~word) | Word(1) << (8 * sizeof(T) - 1));
}

template <class T>
static void sketch_medians(const T* sketch, const SketchHash* hashes, int rows, uint32_t columns, int64_t begin,
                           int64_t end, typename Format<T>::Signed* found, T* out, bool around) {
    using Word = typename Format<T>::Word;
    using Signed = typename Format<T>::Signed;
    in_blocks(out + begin, end - begin, around, [&](int64_t from, int64_t length, T* target) {
        alignas(64) uint32_t buckets[kBlock + kSketchAhead], signs[kBlock];
        alignas(64) T values[kBlock];
        for (int row = 0; row < rows; ++row) {
            const T* mine = sketch + int64_t(row) * columns;
            Signed* into = found + row * kBlock;
            hash_block(hashes[row], columns, begin + from, length, buckets, signs);
            for (int64_t j = 0; j < kSketchAhead; ++j) buckets[length + j] = buckets[length - 1];
            for (int64_t j = 0; j < kSketchAhead && j < length; ++j) __builtin_prefetch(mine + buckets[j]);
            for (int64_t i = 0; i < length; ++i) {
                __builtin_prefetch(mine + buckets[i + kSketchAhead]);
                uint64_t bucket = buckets[i];
                GRACE_ONE_BY_ONE(bucket);
                values[i] = mine[bucket];
            }
            for (int64_t i = 0; i < length; ++i) {
                into[i] = ordered(bits_as<T>(bits_as<Word>(values[i]) ^ (Word(signs[i] >> 31) << (8 * sizeof(T) - 1))));
            }
        }
        // The least of what is left, until only the median and what is above it are.
        for (int least = 0; least <= rows / 2; ++least) {
            for (int row = rows - 1; row > least; --row) {
                Signed *low = found + (row - 1) * kBlock, *high = found + row * kBlock;
                for (int64_t i = 0; i < length; ++i) {
                    const Signed a = low[i], b = high[i];
                    low[i] = a < b ? a : b;
                    high[i] = a < b ? b : a;
                }
            }
        }
        const Signed* median = found + rows / 2 * kBlock;
        for (int64_t i = 0; i < length; ++i) target[i] = from_ordered<T>(median[i]);
    });
}
