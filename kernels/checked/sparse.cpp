// Selection of elements, and what is done at a list of indices.
#include <cmath>
#include <cstring>
#include <memory>

#include "grace/kernels.h"

namespace grace {
namespace {

// What a selecting pass found, in the order of the indices: one growing list per stretch of the array.
template <class T> class Finds {
  public:
    // Runs over x, shared out to as many stretches as there are threads.
    Finds(Call& call, const T* x, int64_t n, T bound, bool strict, bool nonzero) {
        const int64_t pieces = divide_up(n, kPiece);
        const int64_t stretches = std::max<int64_t>(1, std::min<int64_t>(call.threads(), pieces));
        stretches_.resize(static_cast<size_t>(stretches));
        call.parallel(stretches, [&](int64_t s) {
            Stretch& mine = stretches_[static_cast<size_t>(s)];
            const int64_t begin = pieces * s / stretches * kPiece, end = std::min(n, pieces * (s + 1) / stretches * kPiece);
            // Small steps, so that little room is asked for ahead.
            for (int64_t at = begin; at < end; at += kStep) {
                const int64_t length = std::min(kStep, end - at);
                mine.reserve(length);
                Selected<T> into{mine.values, mine.indices, mine.count};
                loops<T>().select(x + at, bound, strict, nonzero, static_cast<int32_t>(at), length, &into);
                mine.count = into.count;
            }
        });
    }

    int64_t count() const {
        int64_t total = 0;
        for (const Stretch& s : stretches_) total += s.count;
        return total;
    }

    void copy_to(T* values, int32_t* indices) const {
        for (const Stretch& s : stretches_) {
            std::copy(s.values, s.values + s.count, values);
            std::copy(s.indices, s.indices + s.count, indices);
            values += s.count;
            indices += s.count;
        }
    }

    // body(value, index) in order.
    template <class Body> void each(Body body) const {
        for (const Stretch& s : stretches_) {
            for (int64_t i = 0; i < s.count; ++i) body(s.values[i], s.indices[i]);
        }
    }

  private:
    static constexpr int64_t kStep = 4096;

    struct Stretch {
        T* values = nullptr;
        int32_t* indices = nullptr;
        int64_t count = 0, room = 0;

        Stretch() = default;
        Stretch(const Stretch&) = delete;
        Stretch& operator=(const Stretch&) = delete;
        Stretch(Stretch&&) = delete;
        ~Stretch() {
            release(values);
            release(indices);
        }
        void reserve(int64_t more) {
            if (count + more <= room) return;
            const int64_t wanted = 2 * room + more;
            grow(values, wanted);
            grow(indices, wanted);
            room = wanted;
        }
        template <class U> void grow(U*& list, int64_t wanted) {
            U* larger = static_cast<U*>(acquire(sizeof(U) * static_cast<size_t>(wanted)));
            if (count > 0) std::memcpy(larger, list, sizeof(U) * static_cast<size_t>(count));
            release(list);
            list = larger;
        }
    };

    // A list whose elements stay where they are.
    class Stretches {
      public:
        void resize(size_t n) {
            data_.reset(new Stretch[n]);
            size_ = n;
        }
        Stretch& operator[](size_t i) { return data_[i]; }
        const Stretch* begin() const { return data_.get(); }
        const Stretch* end() const { return data_.get() + size_; }

      private:
        std::unique_ptr<Stretch[]> data_;
        size_t size_ = 0;
    };
    Stretches stretches_;
};

// The k-th largest of n words (1 <= k <= n): digit by digit, counting how often each occurs.
template <class Word> Word kth_largest(Word* words, int64_t n, int64_t k) {
    constexpr int kDigit = 11;
    Word found = 0;
    for (int shift = (int(sizeof(Word)) * 8 - 1) / kDigit * kDigit; shift >= 0; shift -= kDigit) {
        int64_t counts[1 << kDigit] = {};
        for (int64_t i = 0; i < n; ++i) ++counts[words[i] >> shift & ((1 << kDigit) - 1)];
        Word digit = (1 << kDigit) - 1;
        while (counts[digit] < k) k -= counts[digit--];
        found |= digit << shift;
        int64_t left = 0;
        for (int64_t i = 0; i < n; ++i) {
            if ((words[i] >> shift & ((1 << kDigit) - 1)) == digit) words[left++] = words[i];
        }
        n = left;
    }
    return found;
}

template <class T> using WordOf = typename Format<T>::Word;

// A magnitude that about k of n elements reach, a little more rather than less, from elements drawn at random. A sample
// at regular distances would fail: in a gradient it can hit the same columns of a matrix every time.
template <class T> T estimated_bound(const T* x, int64_t n, int64_t k, int64_t draws, double slack) {
    Scratch<WordOf<T>> drawn(draws);
    uint64_t state = 0x9E3779B97F4A7C15u * static_cast<uint64_t>(draws + 1);
    for (int64_t i = 0; i < draws; ++i) {
        // splitmix64 (Steele, Lea and Flood, OOPSLA 2014); the upper bits scaled to n.
        state += 0x9E3779B97F4A7C15u;
        uint64_t z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        const uint64_t word = (z ^ z >> 31) >> 32;
        drawn[i] = magnitude_bits(x[static_cast<int64_t>(word * static_cast<uint64_t>(n) >> 32)]);
    }
    const double expected = static_cast<double>(draws) * static_cast<double>(k) / static_cast<double>(n);
    const int64_t rank = static_cast<int64_t>(expected + slack * std::sqrt(expected)) + 2;
    return bits_as<T>(rank >= draws ? WordOf<T>(0) : kth_largest(drawn.data(), draws, rank));
}

// The k largest magnitudes among what was found; among equal ones those of the lowest indices.
template <class T> void best_of(const Finds<T>& finds, int64_t k, T* values, int32_t* indices) {
    const int64_t count = finds.count();
    Scratch<WordOf<T>> sizes(count);
    int64_t i = 0;
    finds.each([&](T value, int32_t) { sizes[i++] = magnitude_bits(value); });
    const WordOf<T> bound = kth_largest(sizes.data(), count, k);
    int64_t above = 0;
    finds.each([&](T value, int32_t) { above += magnitude_bits(value) > bound; });
    int64_t ties = k - above;
    finds.each([&](T value, int32_t index) {
        const WordOf<T> size = magnitude_bits(value);
        if (size > bound || (size == bound && ties-- > 0)) {
            *values++ = value;
            *indices++ = index;
        }
    });
}

// Throws Error(payload) unless all indices are in [0, n); whether they ascend strictly.
bool check_indices(const Call& call, const int32_t* indices, int64_t count, int64_t n) {
    bool ascending = true, inside = true;
    int32_t before = -1;
    for (int64_t i = 0; i < count; ++i) {
        inside &= indices[i] >= 0 && indices[i] < n;
        ascending &= indices[i] > before;
        before = indices[i];
    }
    if (!inside) {
        const int32_t* bad = std::find_if(indices, indices + count, [&](int32_t i) { return i < 0 || i >= n; });
        call.fail(Error::Kind::payload, "expected indices from 0 to " + std::to_string(n - 1) + ", received " +
                                            std::to_string(*bad));
    }
    return ascending;
}

constexpr int64_t kAhead = 24;  // how far ahead memory is asked for that is read out of order

}  // namespace

void select_kernel(Call& call) {
    call.expect(2, 2, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        if (n > INT32_MAX) call.fail(Error::Kind::value, "int32 indices cannot address " + std::to_string(n) + " elements");
        const bool strict = call.integer(0) != 0, nonzero = call.integer(1) != 0;
        const T *x = call.input<T>(0), *bound = call.input<T>(1, 1);
        GRACE_GPU(call, select, x, bound, strict, nonzero, n, room_of<T>(call));
        const Finds<T> finds(call, x, n, *bound, strict, nonzero);
        T* values = call.output<T>(finds.count());
        finds.copy_to(values, call.output<int32_t>(finds.count()));
    });
}

void top_kernel(Call& call) {
    call.expect(1, 1, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, k = std::min(n, call.length(0));
        if (n > INT32_MAX) call.fail(Error::Kind::value, "int32 indices cannot address " + std::to_string(n) + " elements");
        const T* x = call.input<T>(0);
        T* values = call.output<T>(k);
        int32_t* indices = call.output<int32_t>(k);
        GRACE_GPU(call, top, x, n, k, values, indices);
        if (k == n) {
            std::copy(x, x + n, values);
            for (int64_t i = 0; i < n; ++i) indices[i] = static_cast<int32_t>(i);
            return;
        }
        if (k == 0) return;
        // A sample pays where few of many are wanted; a second one if the first misled.
        const int64_t draws = std::min<int64_t>(1 << 16, std::max<int64_t>(2048, n / 512));
        if (n >= 16 * draws / 2 && k < n / 4) {
            for (const double slack : {4.0, 16.0}) {
                const T bound = estimated_bound(x, n, k, draws, slack);
                if (!(bound > T(0))) break;
                const Finds<T> finds(call, x, n, bound, false, false);
                if (finds.count() >= k) return best_of(finds, k, values, indices);
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
    });
}

void gather_kernel(Call& call) {
    call.expect(2, 0, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, count = call.input(1).size;
        const T* x = call.input<T>(0);
        const int32_t* indices = call.input<int32_t>(1);
        T* out = call.output<T>(count);
        GRACE_GPU(call, gather, x, n, indices, out, count);
        check_indices(call, indices, count, n);
        over_pieces(call, count, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                __builtin_prefetch(x + indices[std::min(i + kAhead, count - 1)]);
                out[i] = x[indices[i]];
            }
        });
    });
}

void put_kernel(Call& call) {
    call.expect(2, 0, 1);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, count = call.input(1).size;
        T* x = call.consumed<T>(0);
        const int32_t* indices = call.input<int32_t>(1);
        const T value = static_cast<T>(call.number(0));
        GRACE_GPU(call, put, x, n, indices, value, count);
        check_indices(call, indices, count, n);
        for (int64_t i = 0; i < count; ++i) {
            __builtin_prefetch(x + indices[std::min(i + kAhead, count - 1)], 1);
            x[indices[i]] = value;
        }
    });
}

void scatter_add_kernel(Call& call) {
    call.expect(3, 0, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, count = call.input(1).size;
        T* x = call.consumed<T>(0);
        const int32_t* indices = call.input<int32_t>(1);
        const T* values = call.input<T>(2, count);
        GRACE_GPU(call, scatter_add, x, n, Entries<T>{values, indices, count});
        check_indices(call, indices, count, n);
        for (int64_t i = 0; i < count; ++i) {
            __builtin_prefetch(x + indices[std::min(i + kAhead, count - 1)], 1);
            x[indices[i]] += values[i];
        }
    });
}

void sparse_sum_kernel(Call& call) {
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
        bool ascending = true;
        for (const Entries<T>& list : lists) ascending &= check_indices(call, list.indices, list.count, n);
        const auto scatter = [&](const Entries<T>& list, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                __builtin_prefetch(to.out + list.indices[std::min(i + kAhead, end - 1)], 1);
                to.out[list.indices[i]] += list.values[i];
            }
        };
        if (to.onto != nullptr) {
            for (const Entries<T>& list : lists) scatter(list, 0, list.count);
            return;
        }
        if (!ascending) {
            over_pieces(call, n, [&](int64_t begin, int64_t end) {
                loops<T>().fill(to.out + begin, T(0), end - begin, to.around);
            });
            for (const Entries<T>& list : lists) scatter(list, 0, list.count);
            return;
        }
        // Piece by piece what falls into it, so that every part of the output is touched once, and in the cache.
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            std::vector<int64_t> at;
            for (const Entries<T>& list : lists) {
                at.push_back(std::lower_bound(list.indices, list.indices + list.count, begin) - list.indices);
            }
            constexpr int64_t kCached = 4096;
            alignas(64) T buffer[kCached];
            for (int64_t from = begin; from < end; from += kCached) {
                const int64_t length = std::min(kCached, end - from);
                std::fill(buffer, buffer + length, T(0));
                for (size_t r = 0; r < lists.size(); ++r) {
                    for (; at[r] < lists[r].count && lists[r].indices[at[r]] < from + length; ++at[r]) {
                        buffer[lists[r].indices[at[r]] - from] += lists[r].values[at[r]];
                    }
                }
                loops<T>().copy(buffer, to.out + from, length, to.around);
            }
        });
    });
}

}  // namespace grace
