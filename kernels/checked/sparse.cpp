// Selection of elements, and operations at a list of indices.
#include <atomic>
#include <limits>

#include "selection.h"

namespace grace {
namespace {

// Lists of entries: their indices and values, as a sparsifier sends them, or in words with a table of values.
struct Indices {
    const int32_t* indices;
    int64_t count;
    int32_t index(int64_t i) const { return indices[i]; }
};
template <class T> struct Pairs : Indices {
    const T* values;
    T value(int64_t i) const { return values[i]; }
};
struct Words {
    const int32_t* words;
    int64_t count;
    int32_t index(int64_t i) const { return index_of_word(words[i]); }
};
template <class T> struct WordValues : Words {
    T of[16];
    T value(int64_t i) const { return of[static_cast<uint32_t>(words[i]) >> kIndexBits]; }
};

// Throws Error(payload) unless all indices are in [0, n). Returns whether they ascend strictly.
template <class List> bool check_indices(const Call& call, const List& list, int64_t n) {
    bool ascending = true, inside = true;
    int32_t before = -1;
    for (int64_t i = 0; i < list.count; ++i) {
        const int32_t index = list.index(i);
        inside &= index >= 0 && index < n;
        ascending &= index > before;
        before = index;
    }
    for (int64_t i = 0; i < list.count && !inside; ++i) {
        if (list.index(i) >= 0 && list.index(i) < n) continue;
        call.fail(Error::Kind::payload, "expected indices from 0 to " + std::to_string(n - 1) + ", received " +
                                            std::to_string(list.index(i)));
    }
    return ascending;
}

// The number of entries before an element, of a list whose indices ascend.
template <class List> int64_t count_before(const List& list, int64_t element) {
    int64_t low = 0, high = list.count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (list.index(middle) < element) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

constexpr int64_t kAhead = 24;  // prefetch distance for memory that is read out of order

// All elements that differ from zero, which are fewer than k, and the first zeros, sorted by index. False if there are
// not enough zeros, because some elements are NaN.
template <class T>
bool fill_with_zeros(const T* x, int64_t n, const Finds<T>& finds, int64_t k, T* values, int32_t* indices) {
    int64_t zeros = k - finds.count(), found = 0, at = 0;
    for (int64_t i = 0; i < n && zeros > 0; ++i) {
        const bool differs = found < finds.count() && finds.indices()[found] == i;
        if (!differs && magnitude_bits(x[i]) != 0) continue;
        found += differs;
        zeros -= !differs;
        values[at] = x[i];
        indices[at++] = static_cast<int32_t>(i);
    }
    std::copy(finds.values() + found, finds.values() + finds.count(), values + at);
    std::copy(finds.indices() + found, finds.indices() + finds.count(), indices + at);
    return zeros == 0;
}

// The weighted sum of two arrays, element by element.
template <class T> struct Sum {
    const T* x;
    T a;
    const T* y;
    T b;
    T operator[](int64_t i) const { return x[i] * a + y[i] * b; }
};

// The pass that writes a sum to `out` and selects from it while it is in the cache.
template <class T> class SumPass {
  public:
    SumPass(const Sum<T>& sum, T* out, int64_t n) : sum_(sum), out_(out), around_(is_large<T>(n)) {}

    void operator()(int64_t begin, int64_t n, T bound, bool strict, Selected<T>* into) {
        const T *x = sum_.x + begin, *y = sum_.y + begin;
        const bool good = loops<T>().sum_select(x, sum_.a, y, sum_.b, out_ + begin, around_, bound, strict,
                                                static_cast<int32_t>(begin), n, into);
        if (!good) good_ = 0;
    }
    // Only the sum.
    void operator()(int64_t begin, int64_t n) {
        const T *x = sum_.x + begin, *y = sum_.y + begin;
        if (!loops<T>().weighted_sum(x, sum_.a, y, sum_.b, out_ + begin, n, around_)) good_ = 0;
    }
    uint8_t good() const { return good_; }

  private:
    Sum<T> sum_;
    T* out_;
    bool around_;
    std::atomic<uint8_t> good_{1};
};

// The k largest magnitudes of x, 0 <= k <= n, sorted by index. Of equal magnitudes, the lower index is kept.
template <class T> void take_top(Call& call, const T* x, int64_t n, int64_t k, T* values, int32_t* indices) {
    if (k == n) {
        std::copy(x, x + n, values);
        for (int64_t i = 0; i < n; ++i) indices[i] = static_cast<int32_t>(i);
        return;
    }
    if (k == 0) return;
    const auto any = [](T) { return true; };
    // A bound that every element reaches that differs from zero: in gradients of embeddings, few do.
    const T least = std::numeric_limits<T>::denorm_min();
    if (Sample<T>::pays(n, k)) {
        const Sample<T> sample(x, n, Sample<T>::draws_for(n));
        // Draw a second sample if the first one misled.
        for (const double slack : {4.0, 16.0}) {
            const T bound = std::max(least, sample.bound(k, slack, any));
            const Finds<T> finds(call, n, [&](int64_t at, int64_t length, Selected<T>* into) {
                loops<T>().select(x + at, bound, false, false, static_cast<int32_t>(at), length, into);
            });
            if (finds.count() >= k) {
                return best_of(finds.values(), finds.indices(), finds.count(), k, values, indices);
            }
            if (bound == least) {
                if (fill_with_zeros(x, n, finds, k, values, indices)) return;
                break;
            }
        }
    }
    Scratch<WordOf<T>> sizes(n);
    for (int64_t i = 0; i < n; ++i) sizes[i] = magnitude_bits(x[i]);
    const WordOf<T> bound = kth_largest(sizes.data(), n, k);
    int64_t above = 0;
    for (int64_t i = 0; i < n; ++i) above += magnitude_bits(x[i]) > bound;
    int64_t ties = k - above, at = 0;
    for (int64_t i = 0; at < k; ++i) {
        const WordOf<T> size = magnitude_bits(x[i]);
        if (size > bound || (size == bound && ties-- > 0)) {
            values[at] = x[i];
            indices[at++] = static_cast<int32_t>(i);
        }
    }
}

// Adds one list after the other to `to.onto`, or to zeros.
template <class T, class List>
void add_lists(Call& call, const std::vector<List>& lists, const Target<T>& to, int64_t n) {
    bool ascending = true;
    for (const List& list : lists) ascending &= check_indices(call, list, n);
    const auto scatter = [&](const List& list) {
        for (int64_t i = 0; i < list.count; ++i) {
            __builtin_prefetch(to.out + list.index(std::min(i + kAhead, list.count - 1)), 1);
            to.out[list.index(i)] += list.value(i);
        }
    };
    if (to.onto != nullptr) {
        for (const List& list : lists) scatter(list);
        return;
    }
    if (!ascending) {
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            loops<T>().fill(to.out + begin, T(0), end - begin, to.around);
        });
        for (const List& list : lists) scatter(list);
        return;
    }
    // For each piece of the output, add all values that belong to it. So each piece is touched once and stays in the
    // cache.
    over_pieces(call, n, [&](int64_t begin, int64_t end) {
        std::vector<int64_t> at;
        for (const List& list : lists) at.push_back(count_before(list, begin));
        std::vector<int64_t> ends = at;
        constexpr int64_t kCached = 512;
        // It is all zeros at the start of each piece. Only what was added is cleared: loads of a cache line that has just
        // been stored in parts would have to wait.
        alignas(64) T buffer[kCached] = {};
        for (int64_t from = begin; from < end; from += kCached) {
            const int64_t length = std::min(kCached, end - from);
            for (size_t r = 0; r < lists.size(); ++r) {
                const List& list = lists[r];
                int64_t i = at[r];
                for (; i < list.count && list.index(i) < from + length; ++i) buffer[list.index(i) - from] += list.value(i);
                ends[r] = i;
            }
            loops<T>().copy(buffer, to.out + from, length, to.around);
            for (size_t r = 0; r < lists.size(); ++r) {
                for (int64_t i = at[r]; i < ends[r]; ++i) buffer[lists[r].index(i) - from] = T(0);
                at[r] = ends[r];
            }
        }
        integer_loops().settle();
    });
}

}  // namespace

GRACE_KERNEL(select, "x T, bound T; strict, nonzero -> T[m], int32[m]") {
    call.expect(2, 2, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        check_addressable(call, n);
        const bool strict = call.integer(0) != 0, nonzero = call.integer(1) != 0;
        const T *x = call.input<T>(0), *bound = call.input<T>(1, 1);
        GRACE_GPU(call, select, x, bound, strict, nonzero, n, room_of<T>(call));
        const Finds<T> finds(call, n, [&](int64_t at, int64_t length, Selected<T>* into) {
            loops<T>().select(x + at, *bound, strict, nonzero, static_cast<int32_t>(at), length, into);
        });
        std::copy(finds.values(), finds.values() + finds.count(), call.output<T>(finds.count()));
        std::copy(finds.indices(), finds.indices() + finds.count(), call.output<int32_t>(finds.count()));
    });
}

GRACE_KERNEL(moments, "x T, bound T; powers -> int64[1], T[3]") {
    call.expect(2, 1, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T *x = call.input<T>(0), *bound = call.input<T>(1, 1);
        const int powers = static_cast<int>(std::clamp<int64_t>(call.integer(0), 0, 2));
        int64_t* number = call.output<int64_t>(1);
        T* out = call.output<T>(3);
        GRACE_GPU(call, moments, x, bound, powers, n, number, out);
        Scratch<double> found(4 * divide_up(n, kPiece));
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            double* mine = found.data() + 4 * (begin / kPiece);
            std::fill(mine, mine + 4, 0.0);
            loops<T>().moments(x + begin, *bound, powers, mine, end - begin);
        });
        double sums[4] = {0, 0, 0, 0};
        for (int64_t i = 0; i < 4 * divide_up(n, kPiece); ++i) sums[i % 4] += found[i];
        *number = static_cast<int64_t>(sums[0]);
        out[0] = static_cast<T>(sums[1]);
        out[1] = static_cast<T>(sums[2]);
        out[2] = static_cast<T>(std::sqrt(sums[3]));
    });
}

GRACE_KERNEL(top, "x T; k -> T[k], int32[k]") {
    call.expect(1, 1, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, k = std::min(n, call.length(0));
        check_addressable(call, n);
        const T* x = call.input<T>(0);
        T* values = call.output<T>(k);
        int32_t* indices = call.output<int32_t>(k);
        GRACE_GPU(call, top, x, n, k, values, indices);
        take_top(call, x, n, k, values, indices);
    });
}

GRACE_KERNEL(sum_top, "x T, y T; k; a, b -> T[x], T[k], int32[k], uint8[1]") {
    call.expect(2, 1, 2);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, k = std::min(n, call.length(0));
        check_addressable(call, n);
        const Sum<T> sum{call.input<T>(0), static_cast<T>(call.number(0)), call.input<T>(1, n),
                         static_cast<T>(call.number(1))};
        T* out = call.output<T>(n);
        T* values = call.output<T>(k);
        int32_t* indices = call.output<int32_t>(k);
        uint8_t* good = call.verdict();
        GRACE_GPU(call, sum_top, sum.x, sum.a, sum.y, sum.b, out, good, n, k, values, indices);
        SumPass<T> pass(sum, out, n);
        bool found = false;
        if (k > 0 && Sample<T>::pays(n, k)) {
            const Sample<T> sample(sum, n, Sample<T>::draws_for(n));
            const T bound = std::max(std::numeric_limits<T>::denorm_min(), sample.bound(k, 4.0, [](T) { return true; }));
            const Finds<T> finds(call, n, [&](int64_t at, int64_t length, Selected<T>* into) {
                pass(at, length, bound, false, into);
            });
            found = finds.count() >= k;
            if (found) best_of(finds.values(), finds.indices(), finds.count(), k, values, indices);
        } else {
            over_pieces(call, n, [&](int64_t begin, int64_t end) { pass(begin, end - begin); });
        }
        *good = pass.good();
        if (!found) take_top(call, out, n, k, values, indices);
    });
}

GRACE_KERNEL(sum_select, "x T, y T, bound T; strict; a, b -> T[x], T[m], int32[m], uint8[1]") {
    call.expect(3, 1, 2);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        check_addressable(call, n);
        const bool strict = call.integer(0) != 0;
        const Sum<T> sum{call.input<T>(0), static_cast<T>(call.number(0)), call.input<T>(1, n),
                         static_cast<T>(call.number(1))};
        const T* bound = call.input<T>(2, 1);
        T* out = call.output<T>(n);
        GRACE_GPU(call, sum_select, sum.x, sum.a, sum.y, sum.b, out, bound, strict, n, room_of<T>(call),
                  [&call] { return call.verdict(); });
        SumPass<T> pass(sum, out, n);
        const Finds<T> finds(call, n, [&](int64_t at, int64_t length, Selected<T>* into) {
            pass(at, length, *bound, strict, into);
        });
        std::copy(finds.values(), finds.values() + finds.count(), call.output<T>(finds.count()));
        std::copy(finds.indices(), finds.indices() + finds.count(), call.output<int32_t>(finds.count()));
        *call.verdict() = pass.good();
    });
}

GRACE_KERNEL(top_bound, "x T; k -> T[1]") {
    call.expect(1, 1, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, k = call.length(0);
        check_addressable(call, n);
        if (k < 1 || k > n) {
            call.fail(Error::Kind::value,
                      "expected k from 1 to " + std::to_string(n) + ", received " + std::to_string(k));
        }
        const T* x = call.input<T>(0);
        T* out = call.output<T>(1);
        GRACE_GPU(call, top_bound, x, n, k, out);
        Scratch<T> values(k);
        Scratch<int32_t> indices(k);
        take_top(call, x, n, k, values.data(), indices.data());
        WordOf<T> least = magnitude_bits(values[0]);
        for (int64_t i = 1; i < k; ++i) least = std::min(least, magnitude_bits(values[i]));
        *out = bits_as<T>(least);
    });
}

GRACE_KERNEL(gather, "x T, indices int32 -> T[indices]") {
    call.expect(2, 0, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, count = call.input(1).size;
        const T* x = call.input<T>(0);
        const int32_t* indices = call.input<int32_t>(1);
        T* out = call.output<T>(count);
        GRACE_GPU(call, gather, x, n, indices, out, count);
        check_indices(call, Indices{indices, count}, n);
        over_pieces(call, count, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                __builtin_prefetch(x + indices[std::min(i + kAhead, count - 1)]);
                out[i] = x[indices[i]];
            }
        });
    });
}

GRACE_KERNEL(put, "x_ T, indices int32; ; value -> x_") {
    call.expect(2, 0, 1);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, count = call.input(1).size;
        T* x = call.consumed<T>(0);
        const int32_t* indices = call.input<int32_t>(1);
        const T value = static_cast<T>(call.number(0));
        GRACE_GPU(call, put, x, n, indices, value, count);
        check_indices(call, Indices{indices, count}, n);
        for (int64_t i = 0; i < count; ++i) {
            __builtin_prefetch(x + indices[std::min(i + kAhead, count - 1)], 1);
            x[indices[i]] = value;
        }
    });
}

GRACE_KERNEL(scatter_add, "x_ T, indices int32, values T -> x_") {
    call.expect(3, 0, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, count = call.input(1).size;
        T* x = call.consumed<T>(0);
        const int32_t* indices = call.input<int32_t>(1);
        const T* values = call.input<T>(2, count);
        GRACE_GPU(call, scatter_add, x, n, Entries<T>{values, indices, count});
        check_indices(call, Indices{indices, count}, n);
        for (int64_t i = 0; i < count; ++i) {
            __builtin_prefetch(x + indices[std::min(i + kAhead, count - 1)], 1);
            x[indices[i]] += values[i];
        }
    });
}

GRACE_KERNEL(sparse_sum, "[onto_ T], values T..., indices int32...; ranks, n, has_onto -> T[n]") {
    const int ranks = ranks_at(call, 0), first = call.integer(2) != 0 ? 1 : 0;
    call.expect(first + 2 * ranks, 3, 0);
    const int64_t n = call.length(1);
    dispatch(call, call.input(first), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        std::vector<Entries<T>> lists;
        for (int r = 0; r < ranks; ++r) {
            const int64_t count = call.input(first + ranks + r).size;
            lists.push_back({call.input<T>(first + r, count), call.input<int32_t>(first + ranks + r), count});
        }
        const Target<T> to = target_of<T>(call, first == 1, n);
        GRACE_GPU(call, sparse_sum, lists, to.onto, to.out, n);
        std::vector<Pairs<T>> pairs;
        for (const Entries<T>& list : lists) pairs.push_back({{list.indices, list.count}, list.values});
        add_lists(call, pairs, to, n);
    });
}

GRACE_KERNEL(power_words, "x T, [noise T]; ; alpha -> T[1], int32[m]") {
    call.expect(call.inputs() == 2 ? 2 : 1, 0, 1);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        if (n >= int64_t(1) << kIndexBits) {
            call.fail(Error::Kind::value, "words cannot address " + std::to_string(n) + " elements");
        }
        const T* x = call.input<T>(0);
        const T* noise = call.inputs() == 2 ? call.input<T>(1, n) : nullptr;
        const double alpha = call.number(0);
        T* scale = call.output<T>(1);
        GRACE_GPU(call, power_words, x, noise, alpha, scale, n,
                  [&](int64_t count) { return call.output<int32_t>(count); });
        // The largest magnitude so far is a lower limit: elements that it lets in too early are left out at the end.
        std::atomic<WordOf<T>> most{0};
        const Finds<T> finds(call, n, [&](int64_t at, int64_t length, Selected<T>* into) {
            WordOf<T> seen = most;
            T here = bits_as<T>(seen);
            const T* noise_here = noise == nullptr ? nullptr : noise + at;
            loops<T>().select_powers(x + at, noise_here, alpha, &here, static_cast<int32_t>(at), length, into);
            while (magnitude_bits(here) > seen && !most.compare_exchange_weak(seen, magnitude_bits(here))) continue;
        });
        const int32_t top = nearest_exponent(bits_as<T>(most.load()));
        *scale = power_of<T>(top);
        const T bound = least_sent<T>(top);
        int64_t sent = 0;
        for (int64_t i = 0; i < finds.count(); ++i) sent += magnitude(finds.values()[i]) >= bound ? 1 : 0;
        int32_t* words = call.output<int32_t>(sent);
        for (int64_t i = 0; i < finds.count(); ++i) {
            const T value = finds.values()[i];
            if (magnitude(value) >= bound) *words++ = power_word(value, finds.indices()[i], top);
        }
    });
}

GRACE_KERNEL(power_sum, "[onto_ T], words int32..., scales T...; ranks, n, has_onto -> T[n]") {
    const int ranks = ranks_at(call, 0), first = call.integer(2) != 0 ? 1 : 0;
    call.expect(first + 2 * ranks, 3, 0);
    const int64_t n = call.length(1);
    dispatch(call, call.input(first + ranks), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        std::vector<PowerWords<T>> lists;
        for (int r = 0; r < ranks; ++r) {
            lists.push_back({call.input<int32_t>(first + r), call.input<T>(first + ranks + r, 1),
                             call.input(first + r).size});
        }
        const Target<T> to = target_of<T>(call, first == 1, n);
        GRACE_GPU(call, power_sum, lists, to.onto, to.out, n);
        std::vector<WordValues<T>> values;
        for (const PowerWords<T>& list : lists) {
            values.push_back({{list.words, list.count}, {}});
            for (int i = 0; i < 16; ++i) {
                values.back().of[i] = value_of_word(static_cast<int32_t>(uint32_t(i) << kIndexBits), *list.scale);
            }
        }
        add_lists(call, values, to, n);
    });
}

GRACE_KERNEL(power_fade, "x_ T, words int32; ; factor -> x_") {
    call.expect(2, 0, 1);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        T* x = call.consumed<T>(0);
        const Words list{call.input<int32_t>(1), call.input(1).size};
        const T factor = static_cast<T>(call.number(0));
        GRACE_GPU(call, power_fade, x, list.words, factor, list.count, n);
        const bool ascending = check_indices(call, list, n);
        const auto erase = [&](int64_t from, int64_t to) {
            for (int64_t i = from; i < to; ++i) {
                __builtin_prefetch(x + list.index(std::min(i + kAhead, to - 1)), 1);
                x[list.index(i)] = T(0);
            }
        };
        if (factor != T(1)) {
            over_pieces(call, n, [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) x[i] *= factor;
                if (ascending) erase(count_before(list, begin), count_before(list, end));
            });
        }
        if (factor == T(1) || !ascending) erase(0, list.count);
    });
}

}  // namespace grace
