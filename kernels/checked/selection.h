// Exact selection of the largest elements: a bound from a random sample, a compacting pass, and a choice among its
// candidates.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "grace/kernels.h"

namespace grace {

// Throws Error(value) for more elements than int32 indices can address.
inline void check_addressable(const Call& call, int64_t n) {
    if (n > INT32_MAX) {
        call.fail(Error::Kind::value, "int32 indices cannot address " + std::to_string(n) + " elements");
    }
}

// The elements found by a selecting pass, sorted by index.
template <class T> class Finds {
  public:
    // pass(begin, length, into) appends the elements it finds. The n elements are divided into one stretch per thread,
    // each with its own growing list.
    template <class Pass> Finds(Call& call, int64_t n, Pass pass) {
        const int64_t pieces = divide_up(n, kPiece);
        const int64_t stretches = std::max<int64_t>(1, std::min<int64_t>(call.threads(), pieces));
        const std::unique_ptr<List[]> lists(new List[static_cast<size_t>(stretches)]);
        call.parallel(stretches, [&](int64_t s) {
            List& mine = lists[static_cast<size_t>(s)];
            const int64_t begin = pieces * s / stretches * kPiece;
            const int64_t end = std::min(n, pieces * (s + 1) / stretches * kPiece);
            // Small steps need little reserved memory.
            for (int64_t at = begin; at < end; at += kStep) {
                const int64_t length = std::min(kStep, end - at);
                mine.reserve(length + 1);
                Selected<T> into{mine.values, mine.indices, mine.count};
                pass(at, length, &into);
                mine.count = into.count;
            }
        });
        std::swap(all_, lists[0]);
        for (int64_t s = 1; s < stretches; ++s) all_.append(lists[static_cast<size_t>(s)]);
    }

    int64_t count() const { return all_.count; }
    const T* values() const { return all_.values; }
    const int32_t* indices() const { return all_.indices; }

  private:
    static constexpr int64_t kStep = 4096;

    struct List {
        T* values = nullptr;
        int32_t* indices = nullptr;
        int64_t count = 0, room = 0;

        List() = default;
        List(List&& other) noexcept { *this = std::move(other); }
        List& operator=(List&& other) noexcept {
            std::swap(values, other.values);
            std::swap(indices, other.indices);
            std::swap(count, other.count);
            std::swap(room, other.room);
            return *this;
        }
        ~List() {
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
        void append(const List& other) {
            reserve(other.count);
            std::copy(other.values, other.values + other.count, values + count);
            std::copy(other.indices, other.indices + other.count, indices + count);
            count += other.count;
        }
        template <class U> void grow(U*& list, int64_t wanted) {
            U* larger = static_cast<U*>(acquire(sizeof(U) * static_cast<size_t>(wanted)));
            if (count > 0) std::memcpy(larger, list, sizeof(U) * static_cast<size_t>(count));
            release(list);
            list = larger;
        }
    };

    List all_;
};

// The k-th largest of n < 2^32 words (1 <= k <= n), by a radix selection that counts each digit.
template <class Word> Word kth_largest(Word* words, int64_t n, int64_t k) {
    constexpr int kDigit = 11, kDigits = 1 << kDigit;
    // Sorting a few words is faster than clearing the counts.
    constexpr int64_t kFew = 64;
    for (int shift = (int(sizeof(Word)) * 8 - 1) / kDigit * kDigit; shift >= 0 && n > kFew; shift -= kDigit) {
        const auto digit_of = [shift](Word word) { return static_cast<int>(word >> shift & (kDigits - 1)); };
        // Two counters per digit, because neighbours are often equal and one counter would wait for its last update.
        uint32_t counts[2][kDigits] = {};
        Word all = 0;
        for (int64_t i = 0; i < n; ++i) {
            all |= words[i] >> shift & (kDigits - 1);
            ++counts[i % 2][digit_of(words[i])];
        }
        // No digit is larger than the bitwise or of all words.
        int digit = static_cast<int>(all);
        for (int64_t here; (here = int64_t(counts[0][digit]) + counts[1][digit]) < k; --digit) k -= here;
        // Without a branch, because the digits of neighbours are hard to predict.
        int64_t left = 0;
        for (int64_t i = 0; i < n; ++i) {
            const Word word = words[i];
            words[left] = word;
            left += digit_of(word) == digit ? 1 : 0;
        }
        n = left;
    }
    // The remaining words agree in all digits so far.
    if (n <= kFew) std::nth_element(words, words + k - 1, words + n, std::greater<Word>());
    return words[k - 1];
}

template <class T> using WordOf = typename Format<T>::Word;

// A random sample of the elements of x. A regular grid would be wrong: in a gradient it can hit the same columns of a
// matrix every time.
template <class T> class Sample {
  public:
    // x[i] returns element i.
    template <class Values>
    Sample(const Values& x, int64_t n, int64_t draws) : n_(n), draws_(draws), drawn_(draws), words_(draws) {
        uint64_t state = 0x9E3779B97F4A7C15u * static_cast<uint64_t>(draws + 1);
        for (int64_t i = 0; i < draws; ++i) {
            // splitmix64 (Steele, Lea and Flood, OOPSLA 2014), with the upper bits scaled to n.
            state += 0x9E3779B97F4A7C15u;
            uint64_t z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
            z = (z ^ z >> 27) * 0x94D049BB133111EBu;
            const uint64_t word = (z ^ z >> 31) >> 32;
            drawn_[i] = x[static_cast<int64_t>(word * static_cast<uint64_t>(n) >> 32)];
        }
    }

    // True if a sample pays off for the k largest of n: few of many.
    static bool pays(int64_t n, int64_t k) { return n >= 8 * draws_for(n) && k < n / 4; }
    static int64_t draws_for(int64_t n) { return std::min<int64_t>(1 << 16, std::max<int64_t>(2048, n / 512)); }

    // The estimated magnitude that k elements or slightly more reach, among the elements for which `counts` is true.
    template <class Counts> T bound(int64_t k, double slack, Counts counts) const {
        int64_t eligible = 0;
        for (int64_t i = 0; i < draws_; ++i) {
            if (counts(drawn_[i])) words_[eligible++] = magnitude_bits(drawn_[i]);
        }
        const double expected = static_cast<double>(draws_) * static_cast<double>(k) / static_cast<double>(n_);
        const int64_t rank = static_cast<int64_t>(expected + slack * std::sqrt(expected)) + 2;
        return bits_as<T>(rank >= eligible ? WordOf<T>(0) : kth_largest(words_.data(), eligible, rank));
    }
    // The estimated share of elements for which `counts` is true.
    template <class Counts> double share(Counts counts) const {
        const int64_t found = std::count_if(drawn_.data(), drawn_.data() + draws_, counts);
        return static_cast<double>(found) / static_cast<double>(draws_);
    }

  private:
    int64_t n_, draws_;
    Scratch<T> drawn_;
    Scratch<WordOf<T>> words_;
};

// The k largest magnitudes of a list. Of equal magnitudes, those with the lowest indices are kept.
template <class T>
void best_of(const T* from, const int32_t* indices_from, int64_t count, int64_t k, T* values, int32_t* indices) {
    if (k == 0) return;
    Scratch<WordOf<T>> sizes(count);
    for (int64_t i = 0; i < count; ++i) sizes[i] = magnitude_bits(from[i]);
    const WordOf<T> bound = kth_largest(sizes.data(), count, k);
    int64_t above = 0;
    for (int64_t i = 0; i < count; ++i) above += magnitude_bits(from[i]) > bound;
    int64_t ties = k - above;
    // Without a branch that is hard to predict, as above.
    for (int64_t i = 0, at = 0; at < k; ++i) {
        const WordOf<T> size = magnitude_bits(from[i]);
        const int64_t tie = int64_t(size == bound) & int64_t(ties > 0);
        values[at] = from[i];
        indices[at] = indices_from[i];
        ties -= tie;
        at += int64_t(size > bound) | tie;
    }
}

}  // namespace grace
