// Leading bits of the elements of blocks, see grace/core/compressors/contrib/szx.py.
#pragma once

#include "grace/loops.h"
#ifndef GRACE_ISA
#include "grace/gpu.h"
#endif

namespace grace {

constexpr int kPlanes = 4;  // the most bytes of a word

// n elements in blocks of `block`, a multiple of 4. The last element fills the last block. A block sends bits of its
// elements if one differs from the middle by more than `least`; `exponent` is that of the error bound.
struct LeadingForm {
    int64_t n, block;
    float least;
    int exponent;

    GRACE_MEMBER int64_t blocks() const { return (n + block - 1) / block; }
    GRACE_MEMBER int64_t filled() const { return blocks() * block; }
};

// What one rank sends, the number of its bytes of packed codes, and of its other bytes.
template <class T> struct LeadingCodes {
    const float* middles;
    const uint8_t *lengths, *leads, *bytes;
    const T* scale;
    int64_t count, size;
};

// Growing lists of packed codes and of the bytes of each place, lowest first. The lists of bytes have room for 16 more.
struct LeadingLists {
    uint8_t *leads, *bytes[kPlanes];
};

// A position in what one rank sends: the codes before it, and the bytes before it in the whole list of bytes, counted for
// each place from the start of that list.
struct LeadingPlace {
    int64_t codes, bytes[kPlanes];
};

// The integer that orders floats as their values do; the same function gives the bits back.
GRACE_HD int32_t ordered_bits(int32_t bits) { return bits ^ (bits >> 31 & INT32_MAX); }

// The middle of a block. A zero has no sign.
GRACE_HD float leading_middle(float low, float high) {
    const float middle = (high + low) * 0.5f;
    return magnitude(middle) > 0 ? middle : 0.0f;
}

// The difference from the middle; 0 below 2^-60.
GRACE_HD float leading_rest(float y, float middle) {
    const float rest = y - middle;
    return magnitude(rest) < 8.673617379884035e-19f ? 0.0f : rest;
}

// How many leading bits a block keeps whose largest difference is `radius`; 0 for none.
GRACE_HD int leading_length(float radius, const LeadingForm& form) {
    if (!(radius > form.least)) return 0;
    const int kept = int(bits_as<uint32_t>(radius) >> 23) - 127 - form.exponent + 10;
    return kept < 9 ? 9 : kept > 32 ? 32 : kept;
}

// The number of bytes that these bits take.
GRACE_HD int leading_width(int kept) { return (kept + 7) / 8; }

// How many bytes of a word are sent after one from which it differs in these bits: at most three are equal.
GRACE_HD int leading_sent(uint32_t differ, int width) {
    const int sent = int(differ > 0) + int(differ > 0xFFu) + int(differ > 0xFFFFu) + int(differ > 0xFFFFFFu);
    return sent < width - 3 ? width - 3 : sent;
}

// The element of a word of `kept` bits, 0 for none.
GRACE_HD float leading_value(uint32_t word, int kept, float middle) {
    return bits_as<float>(kept > 0 ? word << (32 - kept) : 0u) + middle;
}

// Encodes blocks begin .. end - 1, divided by the scale, and advances the lists. `words` has room for one block and, before
// it, for one more word.
GRACE_LOOP(void leading_encode(const T* x, T scale, const LeadingForm* form, uint32_t* words, int64_t begin, int64_t end,
                               float* middles, uint8_t* lengths, LeadingLists* into))
// out = onto + sum over ranks of the elements of blocks begin .. end - 1, times the scales. `places` has the place of each
// rank at the first block, and room for its later ones. onto may be out or null.
GRACE_LOOP(void leading_sum(const LeadingCodes<T>* ranks, LeadingPlace* places, int count, const LeadingForm* form,
                            const T* onto, T* out, int64_t begin, int64_t end, bool around))

#ifndef GRACE_ISA
namespace gpu {

struct LeadingRoom {
    uint8_t *leads, *bytes;
};
// Waits for the stream.
template <class T>
void leading_encode(const Stream& on, const T* x, const T* scale, const LeadingForm& form, float* middles,
                    uint8_t* lengths, const std::function<LeadingRoom(int64_t leads, int64_t bytes)>& room);
// Codes and bytes of another number than the lengths ask for set the fault word. Missing ones count as zeros.
template <class T>
void leading_sum(const Stream& on, const std::vector<LeadingCodes<T>>& ranks, const LeadingForm& form, const T* onto,
                 T* out);

}  // namespace gpu
#endif
}  // namespace grace
