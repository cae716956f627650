// Powers of two and tables of 128 magnitudes.
#include <atomic>
#include <cmath>
#include <limits>

#include "grace/kernels.h"

namespace grace {
namespace {

constexpr int kMagnitudes = 128, kEdges = kMagnitudes - 1;

// The base exponent of the clipped codes of x: 127 below the largest exponent after rounding.
template <class T> int32_t natural_base(Call& call, const T* x, int64_t n, const RandomKey& key) {
    constexpr int32_t clipped = 127, largest = (1 << Format<T>::exponent) - 2;
    Scratch<T> most(divide_up(n, kPiece));
    over_pieces(call, n, [&](int64_t begin, int64_t end) {
        most[begin / kPiece] = loops<T>().max_abs(x + begin, end - begin);
    });
    const auto exponent_of = [](T size) { return static_cast<int32_t>(magnitude_bits(size) >> Format<T>::mantissa); };
    const int32_t own = exponent_of(loops<T>().max_abs(most.data(), divide_up(n, kPiece)));
    // Only an element with the largest exponent can be rounded to a larger one.
    std::atomic<bool> rises{own < clipped || own >= largest};
    over_pieces(call, n, [&](int64_t begin, int64_t end) {
        if (rises || exponent_of(most[begin / kPiece]) < own) return;
        if (loops<T>().natural_rises(x, &key, own, begin, end)) rises = true;
    });
    const int32_t code = std::min(largest, own + (rises ? 1 : 0));
    return std::max(0, code - clipped);
}

// Makes the cells for the edges of an ascending table, scaled. This pays off for many elements.
template <class T> class Cells {
  public:
    Cells(const T* table, T scale, int64_t elements) : below_(kMost), inside_(kMost), edges_(kEdges) {
        const T safe = scale > 0 ? scale : T(1);
        for (int i = 0; i < kEdges; ++i) edges_[i] = reaching((table[i] + table[i + 1]) * T(0.5), safe);
        found_ = {edges_.data(), 0, 0, 0, below_.data(), inside_.data()};
        if (elements < 4 * kMost) return;
        for (int bits = 4; bits <= 9 && found_.cells == 0; ++bits) divide(Format<T>::mantissa - bits);
    }
    const Edges<T>* edges() const { return &found_; }

  private:
    using Signed = typename Format<T>::Signed;
    static constexpr int64_t kMost = 4096;

    // The cells reach from the one below the first edge above 0 to the one above the last edge. There are no cells if
    // there would be too many, or if one would contain two edges.
    void divide(int shift) {
        int at = 0;
        while (at < kEdges && !(edges_[at] > T(0))) ++at;
        if (at == kEdges || !(edges_[kEdges - 1] <= std::numeric_limits<T>::max())) return;
        const Signed lowest = (bits_as<Signed>(edges_[at]) >> shift) - 1;
        const Signed highest = (bits_as<Signed>(edges_[kEdges - 1]) >> shift) + 1;
        if (highest - lowest + 1 > kMost) return;
        for (Signed cell = lowest; cell <= highest; ++cell) {
            const int64_t i = cell - lowest;
            // The bits of positive numbers have the same order as the numbers.
            const auto reached = [&](Signed from) { return at < kEdges && bits_as<Signed>(edges_[at]) <= from; };
            while (cell > lowest && reached(cell << shift)) ++at;
            below_[i] = static_cast<uint8_t>(at);
            const bool holds = at < kEdges && (bits_as<Signed>(edges_[at]) >> shift) == cell;
            inside_[i] = holds ? edges_[at] : std::numeric_limits<T>::quiet_NaN();
            if (holds && at + 1 < kEdges && (bits_as<Signed>(edges_[at + 1]) >> shift) == cell) return;
        }
        found_.lowest = lowest;
        found_.shift = shift;
        found_.cells = static_cast<int64_t>(highest - lowest + 1);
    }

    Scratch<uint8_t> below_;
    Scratch<T> inside_, edges_;
    Edges<T> found_;
};

}  // namespace

GRACE_KERNEL(natural_encode, "x T; clipped, key -> uint8[packed], int32[1], T[1]") {
    call.expect(1, 5, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T* x = call.input<T>(0);
        const bool clipped = call.integer(0) != 0;
        const RandomKey key = key_at(call, 1);
        // The number of bits of a code above the low eight.
        const int more = clipped ? 0 : Format<T>::exponent - 7;
        uint8_t* codes = call.output<uint8_t>(clipped ? n : packed_size(n, 8 + more));
        int32_t* least = call.output<int32_t>(1);
        T* largest = call.output<T>(1);
        GRACE_GPU(call, natural_encode, x, clipped, key, codes, least, largest, n);
        const int32_t base = clipped ? natural_base(call, x, n, key) : -1;
        *least = std::max(0, base);
        Scratch<T> most(divide_up(n, kPiece));
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            most[begin / kPiece] =
                loops<T>().natural_codes(x, &key, base, begin, end, codes + begin, codes + n + begin / 8 * more);
        });
        *largest = loops<T>().max_abs(most.data(), divide_up(n, kPiece));
    });
}

GRACE_KERNEL(natural_sum, "[onto_ T], codes uint8..., bases int32...; ranks, n, wide, clipped, negate, has_onto; "
                          "factor -> T[n]") {
    const int ranks = ranks_at(call, 0), first = call.integer(5) != 0 ? 1 : 0;
    call.expect(first + 2 * ranks, 6, 1);
    const int64_t n = call.length(1);
    const bool clipped = call.integer(3) != 0, negate = call.integer(4) != 0;
    const auto body = [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        std::vector<gpu::NaturalCodes> lists;
        for (int r = 0; r < ranks; ++r) {
            lists.push_back({call.input<uint8_t>(first + r, packed_size(n, clipped ? 8 : Format<T>::exponent + 1)),
                             call.input<int32_t>(first + ranks + r, 1)});
        }
        const T factor = static_cast<T>(call.number(0));
        const Target<T> to = target_of<T>(call, first == 1, n);
        GRACE_GPU(call, natural_sum, lists, clipped, negate, to.onto, factor, to.out, n);
        std::vector<Powers> payloads;
        for (const gpu::NaturalCodes& one : lists) payloads.push_back({one.codes, static_cast<uint32_t>(*one.base)});
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            loops<T>().natural_sum(payloads.data(), ranks, clipped, negate, n, to.onto, factor, to.out, begin, end,
                                   to.around);
        });
    };
    call.integer(2) != 0 ? body(static_cast<double*>(nullptr)) : body(static_cast<float*>(nullptr));
}

GRACE_KERNEL(table_encode, "x T, scales T, table T; width -> uint8[x]") {
    call.expect(3, 1, 0);
    const int64_t width = width_at(call, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T* x = call.input<T>(0);
        const T *scales = call.input<T>(1, buckets_of(n, width)), *table = call.input<T>(2, kMagnitudes);
        uint8_t* codes = call.output<uint8_t>(n);
        if (n == 0) return;
        GRACE_GPU(call, table_encode, x, scales, width, table, codes, n);
        // One scale moves the edges. Several divide the elements, because a bucket is too short for edges of its own.
        const bool single = width >= n;
        const Cells<T> cells(table, single ? *scales : T(1), n);
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            if (single) {
                loops<T>().table_codes(x + begin, cells.edges(), end - begin, codes + begin);
            } else {
                loops<T>().table_codes_of_buckets(x, scales, width, cells.edges(), begin, end, codes);
            }
        });
    });
}

GRACE_KERNEL(table_sum, "[onto_ T], codes uint8..., scales T..., table T; ranks, width, n, has_onto -> T[n]") {
    const int ranks = ranks_at(call, 0), first = call.integer(3) != 0 ? 1 : 0;
    call.expect(first + 2 * ranks + 1, 4, 0);
    const int64_t width = width_at(call, 1), n = call.length(2);
    dispatch(call, call.input(first + 2 * ranks), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const T* table = call.input<T>(first + 2 * ranks, kMagnitudes);
        std::vector<Coded<T>> lists;
        for (int r = 0; r < ranks; ++r) {
            lists.push_back({call.input<uint8_t>(first + r, n), call.input<T>(first + ranks + r, buckets_of(n, width))});
        }
        const Target<T> to = target_of<T>(call, first == 1, n);
        if (n == 0) return;
        GRACE_GPU(call, table_sum, lists, width, table, to.onto, to.out, n);
        if (width < n) {
            over_pieces(call, n, [&](int64_t begin, int64_t end) {
                loops<T>().table_sum_of_buckets(lists.data(), ranks, width, table, to.onto, to.out, begin, end, to.around);
            });
            return;
        }
        Scratch<T> values(2 * kMagnitudes * ranks);
        std::vector<const uint8_t*> codes;
        for (const Coded<T>& one : lists) {
            T* mine = values.data() + 2 * kMagnitudes * static_cast<int64_t>(codes.size());
            codes.push_back(one.codes);
            for (int i = 0; i < kMagnitudes; ++i) {
                mine[i] = table[i] * *one.scales;
                mine[kMagnitudes + i] = -mine[i];
            }
        }
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            loops<T>().table_sum(codes.data(), values.data(), ranks, to.onto, to.out, begin, end, to.around);
        });
    });
}

}  // namespace grace
