// Symbols in the bytes of a field, for codings.
#pragma once

#include <vector>

#include "grace/call.h"

namespace grace {

// Integer i as the width of symbols; throws Error(value) unless it is from `least` to 8.
inline int symbol_bits_at(const Call& call, int i, int least) {
    const int64_t bits = call.integer(i);
    if (bits < least || bits > 8) {
        call.fail(Error::Kind::value,
                  "expected symbols of " + std::to_string(least) + " to 8 bits, received " + std::to_string(bits));
    }
    return static_cast<int>(bits);
}

// The symbols of n bytes; the last one is filled up with zero bits.
struct Symbols {
    const uint8_t* data;
    int64_t n;
    int bits;

    int64_t count() const { return divide_up(8 * n, bits); }
    int operator[](int64_t i) const {
        if (bits == 8) return data[i];
        const int64_t bit = i * bits, byte = bit / 8;
        const int both = data[byte] | (byte + 1 < n ? data[byte + 1] << 8 : 0);
        return both >> bit % 8 & ((1 << bits) - 1);
    }
};

// Writes symbols to n bytes, in order.
class Writer {
  public:
    Writer(uint8_t* out, int64_t n, int bits) : out_(out), end_(out + n), bits_(bits) {}
    void put(int symbol) {
        waiting_ |= static_cast<uint32_t>(symbol) << held_;
        for (held_ += bits_; held_ >= 8; held_ -= 8, waiting_ >>= 8) flush();
    }
    void finish() {
        if (held_ > 0) flush();
    }

  private:
    // The bits of the last symbol that lie beyond the bytes are dropped.
    void flush() {
        if (out_ != end_) *out_++ = static_cast<uint8_t>(waiting_);
    }

    uint8_t *out_, *end_;
    int bits_, held_ = 0;
    uint32_t waiting_ = 0;
};

inline std::vector<int64_t> counts_of(const Symbols& symbols) {
    // Four tables: to count equal neighbors in one would wait for the memory each time.
    std::vector<int64_t> counts(4 << symbols.bits);
    const int64_t n = symbols.count();
    int64_t* table = counts.data();
    for (int64_t i = 0; i < n; ++i) ++table[(i & 3) << symbols.bits | symbols[i]];
    const int64_t size = int64_t(1) << symbols.bits;
    for (int64_t i = size; i < 4 * size; ++i) table[i % size] += table[i];
    counts.resize(static_cast<size_t>(size));
    return counts;
}

// The most frequent symbol, of equally frequent ones the lowest.
inline int most_frequent(const std::vector<int64_t>& counts) {
    size_t most = 0;
    for (size_t i = 1; i < counts.size(); ++i) {
        if (counts[i] > counts[most]) most = i;
    }
    return static_cast<int>(most);
}

}  // namespace grace
