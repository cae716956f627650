// Gaps between ascending indices: low bits plane by plane, and the rest in unary.
#include <cstring>

#include "grace/kernels.h"

namespace grace {
namespace {

int low_at(const Call& call, int i) {
    const int64_t low = call.integer(i);
    if (low < 0 || low > 31) call.fail(Error::Kind::value, "expected 0 to 31 low bits, received " + std::to_string(low));
    return static_cast<int>(low);
}

// Calls body(i, gap) for each index. Throws Error(value) unless they ascend.
template <class Body> void over_gaps(const Call& call, const int32_t* indices, int64_t k, Body body) {
    int64_t next = 0;
    for (int64_t i = 0; i < k; ++i) {
        if (indices[i] < next) call.fail(Error::Kind::value, "expected indices from 0 on that ascend");
        body(i, indices[i] - next);
        next = int64_t(indices[i]) + 1;
    }
}

}  // namespace

GRACE_KERNEL(gap_facts, "indices int32; low -> int64[2]") {
    call.expect(1, 1, 0);
    const int low = low_at(call, 0);
    const int64_t k = call.input(0).size;
    const int32_t* indices = call.input<int32_t>(0);
    int64_t* out = call.output<int64_t>(2);
    int64_t widest = 0, quotients = 0;
    over_gaps(call, indices, k, [&](int64_t, int64_t gap) {
        widest = std::max(widest, gap);
        quotients += gap >> low;
    });
    out[0] = widest;
    out[1] = quotients;
}

GRACE_KERNEL(encode_gaps, "indices int32; low, unary -> uint8[m]") {
    call.expect(1, 2, 0);
    const int low = low_at(call, 0);
    const int64_t k = call.input(0).size, plane = divide_up(k, 8), unary = call.length(1);
    const int32_t* indices = call.input<int32_t>(0);
    uint8_t* planes = call.output<uint8_t>(low * plane + unary);
    uint8_t* marks = planes + low * plane;
    std::memset(planes, 0, static_cast<size_t>(low * plane + unary));
    int64_t mark = -1;
    over_gaps(call, indices, k, [&](int64_t i, int64_t gap) {
        for (int j = 0; j < low; ++j) planes[j * plane + i / 8] |= static_cast<uint8_t>((gap >> j & 1) << i % 8);
        mark += (gap >> low) + 1;
        if (unary == 0 ? gap >> low != 0 : mark >= 8 * unary) {
            call.fail(Error::Kind::value, "expected gaps that fit the lengths, received " + std::to_string(gap));
        }
        if (unary != 0) marks[mark / 8] |= static_cast<uint8_t>(1 << mark % 8);
    });
}

GRACE_KERNEL(decode_gaps, "data uint8; low, unary, k -> int32[k]") {
    call.expect(1, 3, 0);
    const int low = low_at(call, 0);
    const int64_t unary = call.length(1), k = call.length(2), plane = divide_up(k, 8);
    const uint8_t* planes = call.input<uint8_t>(0, low * plane + unary);
    const uint8_t* marks = planes + low * plane;
    int32_t* indices = call.output<int32_t>(k);
    int64_t ones = 0;
    for (int64_t i = 0; i < unary; ++i) ones += __builtin_popcount(marks[i]);
    if (unary != 0 && ones != k) {
        call.fail(Error::Kind::payload,
                  "indices: expected as many bits of the bitmap as the header says, received another number; the "
                  "payload is damaged.");
    }
    uint64_t next = 0;
    int64_t byte = 0;
    uint32_t left = unary == 0 ? 0 : marks[0];
    uint64_t before = ~uint64_t(0);
    for (int64_t i = 0; i < k; ++i) {
        uint64_t gap = 0;
        for (int j = 0; j < low; ++j) gap |= uint64_t(planes[j * plane + i / 8] >> i % 8 & 1) << j;
        if (unary != 0) {
            while (left == 0) left = marks[++byte];
            const uint64_t mark = 8 * static_cast<uint64_t>(byte) + static_cast<uint64_t>(__builtin_ctz(left));
            left &= left - 1;
            gap += (mark - before - 1) << low;
            before = mark;
        }
        // Damaged gaps may lead beyond 32 bits; what reads at these places checks them.
        indices[i] = static_cast<int32_t>(static_cast<uint32_t>(next + gap));
        next += gap + 1;
    }
}

}  // namespace grace
