// Random selection of the fewest elements for a variance.
#include "selection.h"

namespace grace {

GRACE_KERNEL(keep_odds, "x T; k; budget -> float64[2]") {
    call.expect(1, 1, 1);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, k = call.length(0), pieces = divide_up(n, kPiece);
        const double budget = call.number(0);
        const T* x = call.input<T>(0);
        double* out = call.output<double>(2);
        GRACE_GPU(call, keep_odds, x, k, budget, out, n);
        Scratch<T> most(pieces);
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            most[begin / kPiece] = loops<T>().max_abs(x + begin, end - begin);
        });
        const T largest = loops<T>().max_abs(most.data(), pieces), unit = unit_of(largest);
        const double pair[2] = {static_cast<double>(largest), 0.0};
        Odds odds = odds_of(pair);
        Scratch<double> found(3 * pieces);
        const auto below = [&](T bound) {
            over_pieces(call, n, [&](int64_t begin, int64_t end) {
                double* mine = found.data() + begin / kPiece * 3;
                mine[0] = mine[1] = mine[2] = 0;
                loops<T>().moments_below(x + begin, bound, unit, budget == 0 ? 1 : 2, mine, end - begin);
            });
            Uncertain sums{0, 0, 0};
            for (int64_t i = 0; i < pieces; ++i) {
                sums.number += found[3 * i];
                sums.sizes += found[3 * i + 1];
                sums.squares += found[3 * i + 2];
            }
            return in_largest(sums, odds.largest * static_cast<double>(unit));
        };
        Uncertain sums = below(certain_from<T>(odds));
        const double squares = sums.squares;
        for (;;) {
            const double next = next_factor(sums, squares, n, k, budget, odds.factor);
            if (!(next > odds.factor)) break;
            odds.factor = next;
            sums = below(certain_from<T>(odds));
        }
        out[0] = pair[0];
        out[1] = odds.factor;
    });
}

GRACE_KERNEL(draw_kept, "x T, odds float64; key -> T[certain], int32[certain], int32[drawn]") {
    call.expect(2, 4, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        check_addressable(call, n);
        const T* x = call.input<T>(0);
        const double* pair = call.input<double>(1, 2);
        const RandomKey key = key_at(call, 0);
        GRACE_GPU(call, draw_kept<T>, x, pair, key, n, [&](int64_t certain, int64_t drawn) {
            gpu::Drawn<T> lists;
            lists.values = call.output<T>(certain);
            lists.indices = call.output<int32_t>(certain);
            lists.drawn = call.output<int32_t>(drawn);
            return lists;
        });
        const Odds odds = odds_of(pair);
        const Finds<T> finds(call, n, [&](int64_t at, int64_t length, Selected<T>* into) {
            loops<T>().draw(x, &odds, &key, at, length, into);
        });
        const int64_t count = finds.count();
        const T bound = certain_from<T>(odds);
        const auto is_certain = [&](int64_t i) { return magnitude(finds.values()[i]) >= bound; };
        int64_t certain = 0;
        for (int64_t i = 0; i < count; ++i) certain += is_certain(i) ? 1 : 0;
        T* values = call.output<T>(certain);
        int32_t* indices = call.output<int32_t>(certain);
        int32_t* drawn = call.output<int32_t>(count - certain);
        for (int64_t i = 0; i < count; ++i) {
            const T value = finds.values()[i];
            const int32_t index = finds.indices()[i];
            if (is_certain(i)) {
                *values++ = value;
                *indices++ = index;
            } else {
                *drawn++ = signed_index(value, index);
            }
        }
    });
}

GRACE_KERNEL(drawn_entries, "signed int32, scale T -> T[signed], int32[signed]") {
    call.expect(2, 0, 0);
    dispatch(call, call.input(1), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t count = call.input(0).size;
        const int32_t* drawn = call.input<int32_t>(0);
        const T* scale = call.input<T>(1, 1);
        T* values = call.output<T>(count);
        int32_t* indices = call.output<int32_t>(count);
        GRACE_GPU(call, drawn_entries, drawn, scale, values, indices, count);
        over_pieces(call, count, [&](int64_t begin, int64_t end) {
            loops<T>().drawn_entries(drawn + begin, *scale, values + begin, indices + begin, end - begin);
        });
    });
}

}  // namespace grace
