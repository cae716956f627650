// Codings of bytes that are mostly equal: runs of one byte, and blocks of bit planes without those of zeros.
#include <cstring>

#include "grace/kernels.h"
#include "symbols.h"

namespace grace {
namespace {

constexpr int kBytes = 16;

[[noreturn]] void fail_runs(const Call& call) {
    call.fail(Error::Kind::payload,
              "run_length: expected runs of 1 to 255 bytes and as many bytes as the header says, received others; the "
              "payload is damaged.");
}

[[noreturn]] void fail_blocks(const Call& call) {
    call.fail(Error::Kind::payload,
              "bitshuffle: expected as many blocks as the flags say, received another number; the payload is damaged.");
}

// Bit j of byte i becomes bit i of byte j.
uint64_t transposed(uint64_t x) {
    uint64_t t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AA;
    x ^= t ^ (t << 7);
    t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCC;
    x ^= t ^ (t << 14);
    t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0;
    return x ^ t ^ (t << 28);
}

// Distances from one symbol, small ones first: 0, -1, 1, -2, 2 and so on, modulo 2^bits.
struct Distances {
    uint8_t there[256], back[256];

    Distances(int bits, int center) {
        const int size = 1 << bits;
        for (int symbol = 0; symbol < size; ++symbol) {
            const int apart = (symbol - center + size) % size, half = size / 2;
            const int folded = apart < half ? 2 * apart : 2 * (size - apart) - 1;
            there[symbol] = static_cast<uint8_t>(folded);
            back[folded] = static_cast<uint8_t>(symbol);
        }
    }
};

}  // namespace

GRACE_KERNEL(run_length_encode, "data uint8 -> uint8[m]") {
    call.expect(1, 0, 0);
    const int64_t n = call.input(0).size;
    const uint8_t* data = call.input<uint8_t>(0);
    const uint8_t most = static_cast<uint8_t>(most_frequent(counts_of({data, n, 8})));
    // Length of the run of the most frequent byte at i, up to 255.
    const auto run = [&](int64_t i) {
        int64_t end = i;
        while (end < n && end < i + 255 && data[end] == most) ++end;
        return end - i;
    };
    int64_t size = 1;
    for (int64_t i = 0; i < n;) {
        const int64_t length = run(i);
        size += length > 0 ? 2 : 1;
        i += length > 0 ? length : 1;
    }
    uint8_t* out = call.output<uint8_t>(size);
    *out++ = most;
    for (int64_t i = 0; i < n;) {
        const int64_t length = run(i);
        *out++ = static_cast<uint8_t>(data[i] ^ most);
        if (length > 0) *out++ = static_cast<uint8_t>(length);
        i += length > 0 ? length : 1;
    }
}

GRACE_KERNEL(run_length_decode, "coded uint8; n -> uint8[n]") {
    call.expect(1, 1, 0);
    const int64_t n = call.length(0), size = call.input(0).size;
    const uint8_t* coded = call.input<uint8_t>(0);
    // A run has two bytes; this bounds n before memory is asked for.
    if (size < 1 || n > 255 * size) fail_runs(call);
    const uint8_t most = coded[0];
    uint8_t* out = call.output<uint8_t>(n);
    int64_t done = 0;
    for (int64_t i = 1; i < size; ++i) {
        int64_t length = 1;
        const uint8_t byte = static_cast<uint8_t>(coded[i] ^ most);
        if (coded[i] == 0) {
            length = ++i < size ? coded[i] : 0;
            if (length == 0) fail_runs(call);
        }
        if (length > n - done) fail_runs(call);
        std::memset(out + done, byte, static_cast<size_t>(length));
        done += length;
    }
    if (done != n) fail_runs(call);
}

GRACE_KERNEL(bitshuffle_encode, "data uint8; bits -> uint8[m]") {
    call.expect(1, 1, 0);
    const int bits = symbol_bits_at(call, 0, 1);
    const Symbols symbols{call.input<uint8_t>(0), call.input(0).size, bits};
    const int64_t count = symbols.count(), plane = divide_up(count, 8 * kBytes) * kBytes;
    const int most = most_frequent(counts_of(symbols));
    const Distances distances(bits, most);
    Scratch<uint8_t> planes(bits * plane);
    std::memset(planes.data(), 0, static_cast<size_t>(bits * plane));
    for (int64_t i = 0; i < count; i += 8) {
        uint64_t eight = 0;
        for (int64_t j = 0; j < 8 && i + j < count; ++j) eight |= uint64_t(distances.there[symbols[i + j]]) << 8 * j;
        eight = transposed(eight);
        for (int j = 0; j < bits; ++j) planes[j * plane + i / 8] = static_cast<uint8_t>(eight >> 8 * j);
    }
    const int64_t blocks = bits * plane / kBytes, flags = divide_up(blocks, 8);
    Scratch<uint8_t> flag(flags);
    std::memset(flag.data(), 0, static_cast<size_t>(flags));
    static const uint8_t zeros[kBytes] = {};
    int64_t sent = 0;
    for (int64_t i = 0; i < blocks; ++i) {
        if (std::memcmp(planes.data() + kBytes * i, zeros, kBytes) == 0) continue;
        flag[i / 8] |= static_cast<uint8_t>(1 << i % 8);
        ++sent;
    }
    uint8_t* out = call.output<uint8_t>(1 + flags + kBytes * sent);
    *out++ = static_cast<uint8_t>(most);
    if (flags > 0) std::memcpy(out, flag.data(), static_cast<size_t>(flags));
    out += flags;
    for (int64_t i = 0; i < blocks; ++i) {
        if ((flag[i / 8] >> i % 8 & 1) == 0) continue;
        std::memcpy(out, planes.data() + kBytes * i, kBytes);
        out += kBytes;
    }
}

GRACE_KERNEL(bitshuffle_decode, "coded uint8; bits, n -> uint8[n]") {
    call.expect(1, 2, 0);
    const int bits = symbol_bits_at(call, 0, 1);
    const int64_t n = call.length(1), size = call.input(0).size, count = divide_up(8 * n, bits);
    const uint8_t* coded = call.input<uint8_t>(0);
    const int64_t plane = divide_up(count, 8 * kBytes) * kBytes, blocks = bits * plane / kBytes;
    const int64_t flags = divide_up(blocks, 8);
    if (size < 1 + flags) fail_blocks(call);
    const uint8_t *flag = coded + 1, *next = flag + flags;
    int64_t sent = 0;
    for (int64_t i = 0; i < blocks; ++i) sent += flag[i / 8] >> i % 8 & 1;
    if (size != 1 + flags + kBytes * sent) fail_blocks(call);
    Scratch<uint8_t> planes(bits * plane);
    for (int64_t i = 0; i < blocks; ++i) {
        const bool there = (flag[i / 8] >> i % 8 & 1) != 0;
        if (there) {
            std::memcpy(planes.data() + kBytes * i, next, kBytes);
            next += kBytes;
        } else {
            std::memset(planes.data() + kBytes * i, 0, kBytes);
        }
    }
    const Distances distances(bits, coded[0] & ((1 << bits) - 1));
    Writer out(call.output<uint8_t>(n), n, bits);
    for (int64_t i = 0; i < count; i += 8) {
        uint64_t eight = 0;
        for (int j = 0; j < bits; ++j) eight |= uint64_t(planes[j * plane + i / 8]) << 8 * j;
        eight = transposed(eight);
        for (int64_t j = 0; j < 8 && i + j < count; ++j) out.put(distances.back[eight >> 8 * j & 255]);
    }
    out.finish();
}

}  // namespace grace
