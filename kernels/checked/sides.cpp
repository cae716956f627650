// The largest elements of each sign.
#include <atomic>
#include <cmath>
#include <limits>

#include "pairwise.h"
#include "selection.h"

namespace grace {
namespace {

// The number of elements of one sign to keep, of `count`, computed as in the reference implementation.
int64_t kept_of(double ratio, int64_t count) {
    const double kept = std::floor(static_cast<double>(count) * ratio);
    return std::min(count, kept < 1 ? int64_t(1) : static_cast<int64_t>(kept));
}

// Selects the largest elements beyond the two bounds. Returns false if a bound was too strict to find enough.
template <class T> bool choose(Call& call, const T* x, int64_t n, double ratio, T high, T low) {
    std::atomic<int64_t> positives{0}, negatives{0};
    const Finds<T> finds(call, n, [&](int64_t at, int64_t length, Selected<T>* into) {
        int64_t counts[2] = {0, 0};
        loops<T>().select_sides(x + at, high, -low, static_cast<int32_t>(at), length, into, counts);
        positives += counts[0];
        negatives += counts[1];
    });
    // Write both lists without a branch, because the signs are unpredictable.
    const int64_t count = finds.count();
    Scratch<T> values(2 * (count + 1));
    Scratch<int32_t> indices(2 * (count + 1));
    int64_t found[2] = {0, count + 1};
    for (int64_t i = 0; i < count; ++i) {
        const int side = finds.values()[i] > 0 ? 0 : 1;
        for (const int64_t at : found) {
            values[at] = finds.values()[i];
            indices[at] = finds.indices()[i];
        }
        found[0] += 1 - side;
        found[1] += side;
    }
    const int64_t counts[2] = {found[0], found[1] - (count + 1)};
    const int64_t kept[2] = {kept_of(ratio, positives), kept_of(ratio, negatives)};
    if (counts[0] < kept[0] || counts[1] < kept[1]) return false;
    T* means = call.output<T>(2);
    for (int side = 0; side < 2; ++side) {
        const int64_t k = kept[side], first = side * (count + 1);
        Scratch<T> best(k);
        Scratch<double> wide(k);
        best_of(&values[first], &indices[first], counts[side], k, best.data(), call.output<int32_t>(k));
        std::copy(best.data(), best.data() + k, wide.data());
        means[side] = k > 0 ? static_cast<T>(pairwise_sum(wide.data(), k) / static_cast<double>(k)) : T(0);
    }
    return true;
}

}  // namespace

GRACE_KERNEL(top_of_sides, "x T; ; ratio -> T[2], int32[p], int32[q]") {
    call.expect(1, 0, 1);
    const double ratio = call.number(0);
    if (!(ratio > 0 && ratio <= 1)) {
        call.fail(Error::Kind::value, "expected a ratio in (0, 1], received " + std::to_string(ratio));
    }
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        check_addressable(call, n);
        const T* x = call.input<T>(0);
        GRACE_GPU(call, top_of_sides<T>, x, n, [ratio](int64_t count) { return kept_of(ratio, count); },
                  [&](int64_t positive, int64_t negative) {
                      gpu::Tops<T> out;
                      out.means = call.output<T>(2);
                      out.positive = call.output<int32_t>(positive);
                      out.negative = call.output<int32_t>(negative);
                      return out;
                  });
        // A bound that every nonzero element reaches.
        const T least = std::numeric_limits<T>::denorm_min();
        if (Sample<T>::pays(n, static_cast<int64_t>(ratio * static_cast<double>(n)))) {
            const Sample<T> sample(x, n, Sample<T>::draws_for(n));
            const auto bound = [&](double slack, auto counts) {
                const double expected = sample.share(counts) * ratio * static_cast<double>(n);
                return std::max(least, sample.bound(static_cast<int64_t>(expected), slack, counts));
            };
            for (const double slack : {4.0, 16.0}) {
                const T high = bound(slack, [](T value) { return value > 0; });
                const T low = bound(slack, [](T value) { return value < 0; });
                if (choose(call, x, n, ratio, high, low)) return;
            }
        }
        choose(call, x, n, ratio, least, least);
    });
}

GRACE_KERNEL(select_in_bins, "x T, gradient T, maxima T; width -> int32[positive], int32[negative]") {
    call.expect(3, 1, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, width = width_at(call, 0);
        check_addressable(call, n);
        const T *x = call.input<T>(0), *gradient = call.input<T>(1, n), *maxima = call.input<T>(2, divide_up(n, width));
        const auto room = [&](int64_t positive, int64_t negative) {
            int32_t* indices = call.output<int32_t>(positive);
            return gpu::Signs{indices, call.output<int32_t>(negative)};
        };
        GRACE_GPU(call, select_in_bins<T>, x, gradient, maxima, width, n, room);
        const Finds<T> finds(call, n, [&](int64_t at, int64_t length, Selected<T>* into) {
            loops<T>().select_in_bins(x, gradient, maxima, width, at, length, into);
        });
        int64_t positives = 0;
        for (int64_t i = 0; i < finds.count(); ++i) positives += finds.values()[i] > 0 ? 1 : 0;
        const gpu::Signs out = room(positives, finds.count() - positives);
        int32_t* lists[2] = {out.negative, out.positive};
        for (int64_t i = 0; i < finds.count(); ++i) *lists[finds.values()[i] > 0 ? 1 : 0]++ = finds.indices()[i];
    });
}

}  // namespace grace
