// Count-Sketches and Bloom filters. Included by loops.inl.

namespace grace {
namespace GRACE_ISA {

constexpr int64_t kSketchAhead = 8;  // prefetch distance in blocks

#if defined(__AVX512F__)
constexpr int kVector = 64;
#elif defined(__AVX2__)
constexpr int kVector = 32;
#else
constexpr int kVector = 16;
#endif

// One vector register of numbers.
template <class V> struct Vector {
    typedef V type __attribute__((vector_size(kVector)));
    static constexpr int lanes = kVector / int(sizeof(V));
};

template <class V> GRACE_LOCAL typename Vector<V>::type load(const V* from) {
    typename Vector<V>::type found;
    memcpy(&found, from, sizeof(found));
    return found;
}

// Lane l of the result is lane l ^ flip, with the bits of `flip` that stay within a vector.
template <class V> GRACE_LOCAL typename Vector<V>::type flipped(typename Vector<V>::type numbers, uint32_t flip) {
    constexpr uint32_t lanes = Vector<V>::lanes;
    typename Vector<V>::type found;
#if defined(__AVX512F__) || defined(__AVX2__)
    // Words of 32 bits are exchanged; both words of a 64-bit number stay together.
    const int32_t words = int32_t(flip % lanes * (sizeof(V) / 4));
#endif
#if defined(__AVX512F__)
    const __m512i own = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i order = _mm512_xor_si512(own, _mm512_set1_epi32(words));
    found = (typename Vector<V>::type)_mm512_permutexvar_epi32(order, (__m512i)numbers);
#elif defined(__AVX2__)
    const __m256i own = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i order = _mm256_xor_si256(own, _mm256_set1_epi32(words));
    found = (typename Vector<V>::type)_mm256_permutevar8x32_epi32((__m256i)numbers, order);
#else
    for (uint32_t lane = 0; lane < lanes; ++lane) found[lane] = numbers[lane ^ (flip % lanes)];
#endif
    return found;
}

// A vector with the sign bit set in the lanes whose bit in `signs` is set.
template <class Signed> GRACE_LOCAL typename Vector<Signed>::type sign_bits(uint32_t signs) {
    typename Vector<Signed>::type bits, all = {};
    for (int lane = 0; lane < Vector<Signed>::lanes; ++lane) bits[lane] = Signed(1) << lane;
    all += Signed(signs);
    return ((all & bits) != 0) & Signed(uint64_t(1) << (8 * sizeof(Signed) - 1));
}

// sums[lane] += numbers[lane], in float64.
GRACE_LOCAL void add_lanes(double* sums, Vector<double>::type numbers) {
    const Vector<double>::type sum = load(sums) + numbers;
    memcpy(sums, &sum, sizeof(sum));
}
GRACE_LOCAL void add_lanes(double* sums, Vector<float>::type numbers) {
    typedef float Half __attribute__((vector_size(kVector / 2)));
    Half halves[2];
    memcpy(halves, &numbers, sizeof(numbers));
    add_lanes(sums, __builtin_convertvector(halves[0], Vector<double>::type));
    add_lanes(sums + Vector<double>::lanes, __builtin_convertvector(halves[1], Vector<double>::type));
}

template <class T>
static void sketch_row(const T* x, const SketchHash* hash, uint32_t columns, int64_t n, double* sums) {
    using Signed = typename Format<T>::Signed;
    const SketchHash mine = *hash;
    const int64_t whole = n / kSketchBlock;
    for (int64_t block = 0; block < whole; ++block, x += kSketchBlock) {
        const uint32_t later_column = sketch_column(mine, uint64_t(block + kSketchAhead), columns);
        const double* later = sums + later_column / kSketchBlock * kSketchBlock;
        __builtin_prefetch(later, 1);
        __builtin_prefetch(later + kSketchBlock / 2, 1);
        const SketchPlace place = place_of(mine, uint64_t(block), columns);
        const uint32_t flip = place.column % kSketchBlock;
        double* into = sums + place.column / kSketchBlock * kSketchBlock;
#pragma GCC unroll 8
        for (uint32_t lane = 0; lane < kSketchBlock; lane += Vector<T>::lanes) {
            const uint32_t from = lane ^ flip / Vector<T>::lanes * Vector<T>::lanes;
            const auto own = (typename Vector<Signed>::type)load(x + from) ^ sign_bits<Signed>(place.signs >> from);
            add_lanes(into + lane, flipped<T>((typename Vector<T>::type)own, flip));
        }
    }
    const SketchPlace place = place_of(mine, uint64_t(whole), columns);
    for (int lane = 0; lane < int(n % kSketchBlock); ++lane) {
        sums[place.column ^ uint32_t(lane)] += double(signed_by(place.signs, lane, x[lane]));
    }
}

// Moves the smallest of the rows from `least` on to the front.
template <class Words> GRACE_LOCAL void least_first(Words* found, int least, int rows) {
    for (int row = rows - 1; row > least; --row) {
        const Words a = found[row - 1], b = found[row];
        found[row - 1] = a < b ? a : b;
        found[row] = a < b ? b : a;
    }
}

// Medians over rows. `known` is the number of rows as a compile-time constant, or 0.
template <int known, class Words> GRACE_LOCAL Words median_of(Words* found, int rows) {
    if constexpr (known > 0) {
#pragma GCC unroll 4
        for (int least = 0; least <= known / 2; ++least) least_first(found, least, known);
    } else {
        for (int least = 0; least <= rows / 2; ++least) least_first(found, least, rows);
    }
    return found[(known > 0 ? known : rows) / 2];
}

// Like `ordered`, but with -0 next to 0.
template <class T, class Words> GRACE_LOCAL Words in_order(Words own) {
    using Signed = typename Format<T>::Signed;
    constexpr Signed infinite = Signed((int64_t(1) << Format<T>::exponent) - 1) << Format<T>::mantissa;
    const Words size = own & (Signed(~typename Format<T>::Word(0) >> 1));
    return size > infinite ? size : own < 0 ? ~size : size;
}

// The estimates of a whole block. `found` has room for one vector per row.
template <int known, class T>
GRACE_LOCAL void estimate_block(const T* sketch, const SketchHash* hashes, int rows, uint32_t columns, int64_t block,
                                SketchPlace* places, typename Format<T>::Signed* room, T* out) {
    using Signed = typename Format<T>::Signed;
    using Words = typename Vector<Signed>::type;
    using Numbers = typename Vector<T>::type;
    if (known > 0) rows = known;
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) {
        const T* later = sketch + int64_t(row) * columns;
        later += sketch_column(hashes[row], uint64_t(block + kSketchAhead), columns) / kSketchBlock * kSketchBlock;
        for (int64_t i = 0; i < kSketchBlock; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(later + i);
        places[row] = place_of(hashes[row], uint64_t(block), columns);
    }
#pragma GCC unroll 8
    for (uint32_t lane = 0; lane < kSketchBlock; lane += Vector<T>::lanes) {
        Words here[known > 0 ? known : 1];
        Words* found = known > 0 ? here : reinterpret_cast<Words*>(room);
#pragma GCC unroll 8
        for (int row = 0; row < rows; ++row) {
            const uint32_t from = places[row].column ^ lane, flip = from % Vector<T>::lanes;
            const Words own = (Words)flipped<T>(load(sketch + int64_t(row) * columns + (from - flip)), flip);
            found[row] = in_order<T>(own ^ sign_bits<Signed>(places[row].signs >> lane));
        }
        const Words median = median_of<known>(found, rows);
        constexpr Signed top = Signed(typename Format<T>::Word(1) << (8 * sizeof(T) - 1));
        const Words size = median < 0 ? ~median : median;
        const Numbers value = (Numbers)(size | (median & top));
        const T most = largest_estimate<T>();
        // The addition turns -0 into 0.
        const Numbers limited = ((Numbers)size < most ? value : Numbers{} + most) + T(0);
        memcpy(out + lane, &limited, sizeof(limited));
    }
}

template <int known, class T>
static void estimates(const T* sketch, const SketchHash* hashes, int rows, uint32_t columns, int64_t begin,
                      int64_t end, SketchPlace* places, typename Format<T>::Signed* found, T* out, bool around) {
    in_blocks(out + begin, end - begin, around, [&](int64_t at, int64_t length, T* target) {
        SketchPlace here[known > 0 ? known : 1];
        SketchPlace* mine = known > 0 ? here : places;
        for (int64_t i = 0; i < length; i += kSketchBlock) {
            const int64_t block = (begin + at + i) / kSketchBlock;
            if (i + kSketchBlock <= length) {
                estimate_block<known>(sketch, hashes, rows, columns, block, mine, found, target + i);
            } else {
                T last[kSketchBlock];
                estimate_block<known>(sketch, hashes, rows, columns, block, mine, found, last);
                memcpy(target + i, last, size_t(length - i) * sizeof(T));
            }
        }
    });
}

template <class T>
static void sketch_medians(const T* sketch, const SketchHash* hashes, int rows, uint32_t columns, int64_t begin,
                           int64_t end, SketchPlace* places, typename Format<T>::Signed* found, T* out, bool around) {
    switch (rows) {
        case 1: return estimates<1>(sketch, hashes, rows, columns, begin, end, places, found, out, around);
        case 3: return estimates<3>(sketch, hashes, rows, columns, begin, end, places, found, out, around);
        case 5: return estimates<5>(sketch, hashes, rows, columns, begin, end, places, found, out, around);
        case 7: return estimates<7>(sketch, hashes, rows, columns, begin, end, places, found, out, around);
        default: return estimates<0>(sketch, hashes, rows, columns, begin, end, places, found, out, around);
    }
}

static int64_t filter_marks(const uint8_t* filter, uint32_t bits, const ItemHash* hashes, int count, int64_t begin,
                            int64_t end, uint8_t* marks) {
    alignas(64) uint32_t places[kBlock], left[kBlock];
    int64_t found = 0;
    for (int64_t at = begin; at < end; at += kBlock, marks += kBlock / 8) {
        const int64_t length = lesser(kBlock, end - at);
        // The first function is asked for every item. One addition per item takes the place of a product of 64 bits.
        uint64_t word = uint64_t(at) * hashes[0].factor + hashes[0].term;
        const uint64_t step = hashes[0].factor;
        for (int64_t i = 0; i < length; ++i, word += step) places[i] = uint32_t(word >> 32);
        for (int64_t i = 0; i < length; ++i) places[i] = uint32_t(uint64_t(places[i]) * bits >> 32);
        int64_t here = 0;
        for (int64_t i = 0; i < length; ++i) {
            left[here] = uint32_t(i);
            here += bit_at(filter, places[i]);
        }
        // Each further function leaves about half of the false ones to the next.
        for (int j = 1; j < count && here > 0; ++j) {
            const int64_t asked = here;
            here = 0;
            for (int64_t i = 0; i < asked; ++i) {
                const uint32_t item = left[i];
                left[here] = item;
                here += bit_at(filter, filter_place(hashes[j], uint64_t(at) + item, bits));
            }
        }
        memset(marks, 0, size_t(length + 7) / 8);
        for (int64_t i = 0; i < here; ++i) marks[left[i] / 8] |= uint8_t(1u << left[i] % 8);
        found += here;
    }
    return found;
}

}  // namespace GRACE_ISA
}  // namespace grace
