// Entropy coders of bytes that consist of symbols: Huffman's code and rANS.
#include <cstring>

#include "grace/kernels.h"
#include "symbols.h"

namespace grace {
namespace {

constexpr int kLongest = 12, kScale = 15, kLanes = 4;
constexpr int64_t kPerLanes = 16384;
constexpr uint32_t kLeast = 1 << 16;

// --- Huffman ------------------------------------------------------------------------------------------------------

struct Item {
    int64_t weight;
    bool leaf;
};

// The best lengths of words of at most kLongest bits (package-merge), 0 for symbols that do not occur.
std::vector<int> word_lengths(const std::vector<int64_t>& counts) {
    std::vector<std::pair<int64_t, int>> leaves;
    for (size_t i = 0; i < counts.size(); ++i) {
        if (counts[i] > 0) leaves.emplace_back(counts[i], static_cast<int>(i));
    }
    std::sort(leaves.begin(), leaves.end());
    std::vector<int> lengths(counts.size(), 0);
    if (leaves.size() < 2) {
        for (const auto& leaf : leaves) lengths[static_cast<size_t>(leaf.second)] = 1;
        return lengths;
    }
    std::vector<std::vector<Item>> levels;
    std::vector<Item> level;
    for (const auto& leaf : leaves) level.push_back({leaf.first, true});
    for (int j = 0; j < kLongest; ++j) {
        levels.push_back(level);
        std::vector<Item> next;
        size_t leaf = 0;
        for (size_t pair = 0; pair + 1 < level.size(); pair += 2) {
            const int64_t weight = level[pair].weight + level[pair + 1].weight;
            while (leaf < leaves.size() && leaves[leaf].first <= weight) next.push_back({leaves[leaf++].first, true});
            next.push_back({weight, false});
        }
        while (leaf < leaves.size()) next.push_back({leaves[leaf++].first, true});
        level = std::move(next);
    }
    size_t taken = 2 * leaves.size() - 2;
    for (int j = kLongest - 1; j >= 0; --j) {
        const std::vector<Item>& items = levels[static_cast<size_t>(j)];
        size_t of_leaves = 0;
        for (size_t i = 0; i < taken; ++i) of_leaves += items[i].leaf;
        for (size_t i = 0; i < of_leaves; ++i) ++lengths[static_cast<size_t>(leaves[i].second)];
        taken = 2 * (taken - of_leaves);
    }
    return lengths;
}

// The symbols in the order of their words: by length, and by number among equal ones.
std::vector<int> in_order(const std::vector<int>& lengths) {
    std::vector<int> ordered;
    for (int length = 1; length <= kLongest; ++length) {
        for (size_t i = 0; i < lengths.size(); ++i) {
            if (lengths[i] == length) ordered.push_back(static_cast<int>(i));
        }
    }
    return ordered;
}

// The low `count` bits of x in the other order.
uint32_t reversed(uint32_t x, int count) {
    uint32_t out = 0;
    for (int i = 0; i < count; ++i) out |= (x >> i & 1) << (count - 1 - i);
    return out;
}

[[noreturn]] void fail_huffman(const Call& call) {
    call.fail(Error::Kind::payload,
              "huffman: expected lengths of a complete code, and words that end where the bytes end, received others; "
              "the payload is damaged.");
}

// --- rANS ---------------------------------------------------------------------------------------------------------

int64_t lanes_of(int64_t count) { return kLanes * divide_up(count, kPerLanes); }

std::vector<uint32_t> frequencies_of(const std::vector<int64_t>& counts) {
    int64_t total = 0, used = 0;
    for (const int64_t count : counts) total += count, used += count > 0;
    std::vector<uint32_t> out(counts.size(), 0);
    int64_t left = 1 << kScale;
    size_t most = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
        if (counts[i] > 0) out[i] = static_cast<uint32_t>(1 + counts[i] * ((1 << kScale) - used) / total);
        left -= out[i];
        if (out[i] > out[most]) most = i;
    }
    out[most] += static_cast<uint32_t>(left);
    return out;
}

// Numbers of 16 bits as `pack` stores them: all low bytes, then all high bytes.
template <class Byte> struct Words {
    Byte *low, *high;

    Words(Byte* data, int64_t n) : low(data), high(data + n) {}
    uint32_t operator[](int64_t i) const { return low[i] | static_cast<uint32_t>(high[i]) << 8; }
    void put(int64_t i, uint32_t value) const {
        low[i] = static_cast<uint8_t>(value);
        high[i] = static_cast<uint8_t>(value >> 8);
    }
};

[[noreturn]] void fail_rans(const Call& call) {
    call.fail(Error::Kind::payload,
              "rans: expected frequencies that add up to 32768, and states that return to their start when the words "
              "are used up, received others; the payload is damaged.");
}

}  // namespace

GRACE_KERNEL(huffman_encode, "data uint8; bits -> uint8[m]") {
    call.expect(1, 1, 0);
    const int bits = symbol_bits_at(call, 0, 3);
    const Symbols symbols{call.input<uint8_t>(0), call.input(0).size, bits};
    const std::vector<int64_t> counts = counts_of(symbols);
    const std::vector<int> lengths = word_lengths(counts);
    std::vector<uint32_t> words(counts.size());
    uint32_t window = 0;
    int64_t total = 0;
    for (const int symbol : in_order(lengths)) {
        const size_t i = static_cast<size_t>(symbol);
        words[i] = reversed(window >> (kLongest - lengths[i]), lengths[i]);
        window += uint32_t(1) << (kLongest - lengths[i]);
        total += counts[i] * lengths[i];
    }
    const int64_t table = int64_t(1) << (bits - 1);
    uint8_t* out = call.output<uint8_t>(table + divide_up(total, 8));
    for (int64_t i = 0; i < table; ++i) {
        const size_t first = static_cast<size_t>(2 * i);
        out[i] = static_cast<uint8_t>(lengths[first] | lengths[first + 1] << 4);
    }
    uint8_t* next = out + table;
    uint64_t waiting = 0;
    int held = 0;
    const int64_t n = symbols.count();
    for (int64_t i = 0; i < n; ++i) {
        const size_t symbol = static_cast<size_t>(symbols[i]);
        waiting |= uint64_t(words[symbol]) << held;
        held += lengths[symbol];
        if (held >= 32) {
            for (int j = 0; j < 4; ++j) *next++ = static_cast<uint8_t>(waiting >> 8 * j);
            waiting >>= 32;
            held -= 32;
        }
    }
    for (; held > 0; held -= 8, waiting >>= 8) *next++ = static_cast<uint8_t>(waiting);
}

GRACE_KERNEL(huffman_decode, "coded uint8; bits, n -> uint8[n]") {
    call.expect(1, 2, 0);
    const int bits = symbol_bits_at(call, 0, 3);
    const int64_t n = call.length(1), table = int64_t(1) << (bits - 1), size = call.input(0).size;
    const uint8_t* coded = call.input<uint8_t>(0);
    if (size < table) fail_huffman(call);
    std::vector<int> lengths(static_cast<size_t>(2 * table));
    int64_t kraft = 0, used = 0;
    int longest = 0;
    for (int64_t i = 0; i < 2 * table; ++i) {
        const int length = coded[i / 2] >> 4 * (i % 2) & 15;
        if (length > kLongest) fail_huffman(call);
        lengths[static_cast<size_t>(i)] = length;
        kraft += length > 0 ? int64_t(1) << (kLongest - length) : 0;
        used += length > 0;
        longest = std::max(longest, length);
    }
    if (kraft != 1 << kLongest && (used != 1 || longest != 1)) fail_huffman(call);
    // The symbol and the length of the word with which a window begins. Of a single word, every window is the first.
    std::vector<uint16_t> words(1 << kLongest);
    const std::vector<int> ordered = in_order(lengths);
    uint32_t window = 0;
    for (const int symbol : ordered) {
        const int length = lengths[static_cast<size_t>(symbol)];
        const uint32_t end = used == 1 ? 1 << kLongest : window + (uint32_t(1) << (kLongest - length));
        for (; window < end; ++window) {
            words[reversed(window, kLongest)] = static_cast<uint16_t>(symbol | length << 8);
        }
    }
    const int64_t total = size - table, count = divide_up(8 * n, bits);
    const uint8_t *next = coded + table, *end = next + total;
    // A word has at least one bit; this bounds n before memory is asked for.
    if (count > 8 * total) fail_huffman(call);
    Writer out(call.output<uint8_t>(n), n, bits);
    uint64_t waiting = 0;
    int held = 0;
    int64_t bit = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (held < kLongest) {
            for (; held <= 56 && next != end; held += 8) waiting |= uint64_t(*next++) << held;
        }
        const uint16_t word = words[waiting & ((1 << kLongest) - 1)];
        const int length = word >> 8;
        bit += length;
        waiting >>= length;
        held -= length;
        if (held < 0) fail_huffman(call);
        out.put(word & 255);
    }
    if (divide_up(bit, 8) != total) fail_huffman(call);
    out.finish();
}

GRACE_KERNEL(rans_encode, "data uint8; bits -> uint8[m]") {
    call.expect(1, 1, 0);
    const int bits = symbol_bits_at(call, 0, 3);
    const Symbols symbols{call.input<uint8_t>(0), call.input(0).size, bits};
    const std::vector<int64_t> counts = counts_of(symbols);
    const std::vector<uint32_t> frequencies = frequencies_of(counts);
    std::vector<uint32_t> starts(counts.size());
    int64_t used = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
        if (i > 0) starts[i] = starts[i - 1] + frequencies[i - 1];
        used += counts[i] > 0;
    }
    const int64_t count = symbols.count(), lanes = lanes_of(count);
    std::vector<uint32_t> states(static_cast<size_t>(lanes), kLeast);
    // A symbol sends one word at most.
    Scratch<uint16_t> words(count);
    int64_t first = count, lane = lanes == 0 ? 0 : count % lanes;
    for (int64_t i = count - 1; i >= 0; --i) {
        lane = (lane == 0 ? lanes : lane) - 1;
        const size_t symbol = static_cast<size_t>(symbols[i]);
        uint32_t& x = states[static_cast<size_t>(lane)];
        const uint32_t frequency = frequencies[symbol];
        if (x >= uint64_t(frequency) << (32 - kScale)) {
            words[--first] = static_cast<uint16_t>(x);
            x >>= 16;
        }
        x = ((x / frequency) << kScale) + x % frequency + starts[symbol];
    }
    const int64_t flags = (int64_t(1) << bits) / 8, sent = count - first;
    uint8_t* out = call.output<uint8_t>(flags + 2 * used + 2 * (2 * lanes + sent));
    std::memset(out, 0, static_cast<size_t>(flags));
    const Words<uint8_t> given(out + flags, used), stream(out + flags + 2 * used, 2 * lanes + sent);
    int64_t place = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
        if (counts[i] == 0) continue;
        out[i / 8] |= static_cast<uint8_t>(1 << i % 8);
        given.put(place++, frequencies[i] - 1);
    }
    for (int64_t j = 0; j < lanes; ++j) {
        stream.put(j, states[static_cast<size_t>(j)] & 0xFFFF);
        stream.put(lanes + j, states[static_cast<size_t>(j)] >> 16);
    }
    for (int64_t i = 0; i < sent; ++i) stream.put(2 * lanes + i, words[first + i]);
}

GRACE_KERNEL(rans_decode, "coded uint8; bits, n -> uint8[n]") {
    call.expect(1, 2, 0);
    const int bits = symbol_bits_at(call, 0, 3);
    const int64_t n = call.length(1), size = call.input(0).size, alphabet = int64_t(1) << bits, flags = alphabet / 8;
    const uint8_t* coded = call.input<uint8_t>(0);
    if (size < flags) fail_rans(call);
    int64_t used = 0;
    for (int64_t i = 0; i < flags; ++i) used += __builtin_popcount(coded[i]);
    const int64_t count = divide_up(8 * n, bits), lanes = lanes_of(count), rest = size - flags - 2 * used;
    if (rest < 4 * lanes || rest % 2 != 0) fail_rans(call);
    const Words<const uint8_t> given(coded + flags, used), stream(coded + flags + 2 * used, rest / 2);
    struct Entry {
        uint16_t frequency, offset;
        uint8_t symbol;
    };
    // By the low bits of a state. A frequency of 2^15 fits into 16 bits, and so does the offset in it.
    std::vector<Entry> table(1 << kScale);
    int64_t end = 0;
    for (int64_t i = 0, place = 0; i < alphabet; ++i) {
        if ((coded[i / 8] >> i % 8 & 1) == 0) continue;
        const int64_t frequency = int64_t(given[place++]) + 1;
        if (end + frequency > 1 << kScale) fail_rans(call);
        for (int64_t j = 0; j < frequency; ++j) {
            table[static_cast<size_t>(end + j)] = {static_cast<uint16_t>(frequency), static_cast<uint16_t>(j),
                                                   static_cast<uint8_t>(i)};
        }
        end += frequency;
    }
    if (end != 1 << kScale) fail_rans(call);
    std::vector<uint32_t> states(static_cast<size_t>(lanes));
    for (int64_t j = 0; j < lanes; ++j) states[static_cast<size_t>(j)] = stream[j] | stream[lanes + j] << 16;
    Writer out(call.output<uint8_t>(n), n, bits);
    const int64_t last = rest / 2;
    int64_t next = 2 * lanes, lane = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint32_t& x = states[static_cast<size_t>(lane)];
        if (++lane == lanes) lane = 0;
        const Entry& entry = table[x & ((1 << kScale) - 1)];
        x = entry.frequency * (x >> kScale) + entry.offset;
        if (x < kLeast) {
            if (next == last) fail_rans(call);
            x = x << 16 | stream[next++];
        }
        out.put(entry.symbol);
    }
    for (const uint32_t x : states) {
        if (x != kLeast) fail_rans(call);
    }
    if (next != last) fail_rans(call);
    out.finish();
}

}  // namespace grace
