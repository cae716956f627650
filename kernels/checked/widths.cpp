// Codes of variable length: ternary digits with runs of zeros, numbers of 0, 8, 16 or all bits, and leading bits.
#include <cmath>
#include <cstring>

#include "grace/kernels.h"
#include "grace/leading.h"

namespace grace {
namespace {

// The byte format of 3LC, as in grace/core/compressors/threelc.py.
constexpr int kDigits = 5, kLongestRun = 14;
constexpr uint8_t kZeroByte = 121, kFirstRun = 243;
constexpr int64_t kSlack = 16;  // bytes that may be read and written beyond the end

// The digits 0 to 2 of every byte, most significant first, padded to eight for copies.
struct DigitTable {
    uint8_t of[kFirstRun][8];
};

constexpr DigitTable make_digits() {
    DigitTable table{};
    for (int byte = 0; byte < kFirstRun; ++byte) {
        for (int j = 0, power = 81; j < 8; ++j, power = power > 1 ? power / 3 : 1) {
            table.of[byte][j] = static_cast<uint8_t>(byte / power % 3);
        }
    }
    return table;
}

constexpr DigitTable kDigitTable = make_digits();

int64_t load64(const uint8_t* bytes) {
    int64_t word;
    std::memcpy(&word, bytes, 8);
    return word;
}

// Replaces runs of 2 to 14 kZeroBytes by one code, in place. Returns the number of codes.
int64_t encode_runs(uint8_t* bytes, int64_t n) {
    constexpr int64_t zeros = 0x7979797979797979;
    std::memset(bytes + n, 0, kSlack);
    int64_t count = 0;
    for (int64_t i = 0; i < n;) {
        const int64_t low = load64(bytes + i) ^ zeros, high = load64(bytes + i + 8) ^ zeros;
        int64_t run = low != 0 ? __builtin_ctzll(low) / 8 : 8 + (high != 0 ? __builtin_ctzll(high) / 8 : 8);
        run = std::min<int64_t>(run, kLongestRun);
        bytes[count++] = run > 1 ? static_cast<uint8_t>(kFirstRun - 2 + run) : bytes[i];
        i += std::max<int64_t>(1, run);
    }
    return count;
}

// The inverse, into `size` bytes plus kSlack. Returns false if the codes give another number of bytes.
bool decode_runs(const uint8_t* codes, int64_t count, uint8_t* bytes, int64_t size) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += codes[i] >= kFirstRun ? codes[i] - (kFirstRun - 2) : 1;
    if (total != size) return false;
    for (int64_t i = 0; i < count; ++i) {
        if (codes[i] < kFirstRun) {
            *bytes++ = codes[i];
        } else {
            std::memset(bytes, kZeroByte, kSlack);
            bytes += codes[i] - (kFirstRun - 2);
        }
    }
    return true;
}

// m and h of a call: numbers below 2^-m have 8 bits, numbers below 2^-h have 16.
struct Ends {
    int m, h;
};

Ends ends_at(const Call& call, int i) {
    const int64_t m = call.integer(i), h = call.integer(i + 1);
    if (h < 0 || m < h || m > 100) {
        call.fail(Error::Kind::value, "expected 0 <= h <= m <= 100, received m = " + std::to_string(m) +
                                          " and h = " + std::to_string(h));
    }
    return {static_cast<int>(m), static_cast<int>(h)};
}

// The number of tags of each kind before every piece. The last entry holds the totals.
struct Starts {
    std::vector<int64_t> counts;  // four per piece, the first unused

    explicit Starts(int64_t n) : counts(static_cast<size_t>(4 * (divide_up(n, kPiece) + 1))) {}
    // The counters of a piece.
    int64_t* of(int64_t piece) { return counts.data() + 4 * (piece + 1); }
    const int64_t* before(int64_t piece) const { return counts.data() + 4 * piece; }
    void add_up() {
        for (size_t i = 4; i < counts.size(); ++i) counts[i] += counts[i - 4];
    }
    int64_t total(int tag) const { return counts[counts.size() - 4 + static_cast<size_t>(tag)]; }
};

// The form of n elements in blocks of integer i. The bound is that of szx.
LeadingForm leading_form_at(const Call& call, int i, int64_t n, double bound) {
    const int64_t block = call.integer(i);
    if (block < 4 || block % 4 != 0 || block > kMost) {
        call.fail(Error::Kind::value, "expected blocks of a multiple of 4 elements, received " + std::to_string(block));
    }
    if (!(bound >= std::ldexp(1.0, -20) && bound < 1)) {
        call.fail(Error::Kind::value, "expected a bound from 2^-20 to 1, received " + std::to_string(bound));
    }
    // What three roundings can add to an error is kept free, see szx.py.
    return {n, block, static_cast<float>(bound - std::ldexp(1.0, -22)), std::ilogb(bound)};
}

int64_t blocks_of_task(const LeadingForm& form) { return std::max<int64_t>(1, kPiece / form.block); }

// Sets starts[ranks * task] to the place in one rank's payload where each task of `each` blocks begins. Throws
// Error(payload) if the payload does not have as many codes and bytes as its lengths and codes ask for.
template <class T>
void leading_places(Call& call, const LeadingForm& form, const LeadingCodes<T>& rank, int64_t each, int ranks,
                    LeadingPlace* starts) {
    const int64_t blocks = form.blocks(), tasks = divide_up(blocks, each);
    int64_t codes = 0;
    for (int64_t block = 0; block < blocks; ++block) {
        if (block % each == 0) starts[ranks * (block / each)].codes = codes;
        codes += rank.lengths[block] > 0 ? form.block : 0;
    }
    if (codes != 4 * rank.count) {
        call.fail(Error::Kind::payload, "expected " + std::to_string(codes / 4) + " bytes of codes, as the lengths of "
                                            "blocks ask for, received " + std::to_string(rank.count));
    }
    call.parallel(tasks, [&](int64_t task) {
        LeadingPlace& mine = starts[ranks * task];
        int64_t at = mine.codes;
        for (int64_t block = task * each; block < std::min(blocks, (task + 1) * each); ++block) {
            const int width = leading_width(std::min<int>(rank.lengths[block], 32));
            if (width == 0) continue;
            int64_t found[4] = {0, 0, 0, 0};
            integer_loops().count_tags(rank.leads + at / 4, form.block, found);
            found[0] = form.block - found[1] - found[2] - found[3];
            at += form.block;
            // An element with this code sends the bytes below width - code.
            for (int code = 0; code < 4; ++code) {
                for (int k = 0; k < width - code; ++k) mine.bytes[k] += found[code];
            }
        }
    });
    // From counts to positions, place by place.
    int64_t size = 0;
    for (int k = 0; k < kPlanes; ++k) {
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t mine = starts[ranks * task].bytes[k];
            starts[ranks * task].bytes[k] = size;
            size += mine;
        }
    }
    if (size != rank.size) {
        call.fail(Error::Kind::payload, "expected " + std::to_string(size) + " bytes, as the lengths of blocks ask for, "
                                            "received " + std::to_string(rank.size));
    }
}

}  // namespace

GRACE_KERNEL(ternary_encode, "x T, scale T -> uint8[m]") {
    call.expect(2, 0, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T* x = call.input<T>(0);
        const T* scale = call.input<T>(1, 1);
        GRACE_GPU(call, ternary_encode, x, scale, n, [&](int64_t count) { return call.output<uint8_t>(count); });
        // A multiple of the loop's step.
        constexpr int64_t piece = 60 * 1024;
        Scratch<uint8_t> bytes(divide_up(n, kDigits) + kSlack);
        const T half = *scale * T(0.5);
        call.parallel(divide_up(n, piece), [&](int64_t i) {
            loops<T>().ternary_bytes(x + i * piece, half, std::min(piece, n - i * piece), &bytes[i * piece / kDigits]);
        });
        const int64_t count = encode_runs(bytes.data(), divide_up(n, kDigits));
        std::memcpy(call.output<uint8_t>(count), bytes.data(), static_cast<size_t>(count));
    });
}

GRACE_KERNEL(ternary_sum, "[onto_ T], codes uint8..., scales T...; ranks, n, has_onto -> T[n]") {
    const int ranks = ranks_at(call, 0), first = call.integer(2) != 0 ? 1 : 0;
    call.expect(first + 2 * ranks, 3, 0);
    const int64_t n = call.length(1), size = divide_up(n, kDigits);
    dispatch(call, call.input(first + ranks), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        std::vector<gpu::TernaryCodes<T>> lists;
        for (int r = 0; r < ranks; ++r) {
            lists.push_back({call.input<uint8_t>(first + r), call.input(first + r).size,
                             call.input<T>(first + ranks + r, 1)});
        }
        const Target<T> to = target_of<T>(call, first == 1, n);
        GRACE_GPU(call, ternary_sum, lists, to.onto, to.out, n);
        Scratch<uint8_t> decoded(ranks * (size + kSlack));
        Scratch<T> values(ranks * kFirstRun * 8);
        std::vector<const uint8_t*> bytes;
        for (int64_t r = 0; r < ranks; ++r) {
            const gpu::TernaryCodes<T>& one = lists[static_cast<size_t>(r)];
            uint8_t* mine = &decoded[r * (size + kSlack)];
            if (!decode_runs(one.codes, one.count, mine, size)) {
                call.fail(Error::Kind::payload, "the codes must decode to " + std::to_string(size) +
                                                    " bytes of digits; they decode to another number");
            }
            bytes.push_back(mine);
            const T scale = *one.scale;
            const T of_digit[3] = {T(-1) * scale, T(0) * scale, scale};
            T* digits = &values[r * kFirstRun * 8];
            for (int i = 0; i < kFirstRun * 8; ++i) digits[i] = of_digit[kDigitTable.of[i / 8][i % 8]];
        }
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            loops<T>().ternary_sum(bytes.data(), values.data(), ranks, to.onto, to.out, begin, end, to.around);
        });
    });
}

GRACE_KERNEL(precision_encode, "x T, scale T; m, h; bound -> T[], int16[], int8[], uint8[packed]") {
    call.expect(2, 2, 1);
    const Ends ends = ends_at(call, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T* x = call.input<T>(0);
        const T* scale = call.input<T>(1, 1);
        const T bound = static_cast<T>(call.number(0));
        const auto power = [](int exponent) { return static_cast<T>(std::ldexp(1.0, exponent)); };
        const T steps[2] = {power(ends.m + 7), power(ends.h + 15)};
        GRACE_GPU(call, precision_encode<T>, x, scale, bound, power(-ends.m), power(-ends.h), steps[0], steps[1], n,
                  [&](int64_t full, int64_t words, int64_t bytes) {
                      gpu::Split<T> out;
                      out.full = call.output<T>(full);
                      out.words = call.output<int16_t>(words);
                      out.bytes = call.output<int8_t>(bytes);
                      out.tags = call.output<uint8_t>(packed_size(n, 2));
                      return out;
                  });
        // The tags compare elements with the ends in their own unit, which saves a division for each.
        const T safe = *scale > 0 ? *scale : T(1);
        const T least = reaching(bound, safe);
        const T byte_end = reaching(power(-ends.m), safe), word_end = reaching(power(-ends.h), safe);
        Scratch<uint8_t> tags(packed_size(n, 2));
        Starts starts(n);
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            loops<T>().precision_tags(x + begin, least, byte_end, word_end, end - begin, &tags[begin / 4],
                                      starts.of(begin / kPiece));
        });
        starts.add_up();
        T* full = call.output<T>(starts.total(3));
        int16_t* words = call.output<int16_t>(starts.total(2));
        int8_t* bytes = call.output<int8_t>(starts.total(1));
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            const int64_t* at = starts.before(begin / kPiece);
            loops<T>().precision_split(x + begin, safe, &tags[begin / 4], steps[0], steps[1], end - begin,
                                       full + at[3], words + at[2], bytes + at[1]);
        });
        std::memcpy(call.output<uint8_t>(packed_size(n, 2)), tags.data(), static_cast<size_t>(packed_size(n, 2)));
    });
}

GRACE_KERNEL(precision_sum, "[onto_ T], full T..., words int16..., bytes int8..., tags uint8..., scales T...; "
                            "ranks, m, h, n, has_onto -> T[n]") {
    const int ranks = ranks_at(call, 0), first = call.integer(4) != 0 ? 1 : 0;
    call.expect(first + 5 * ranks, 5, 0);
    const Ends ends = ends_at(call, 1);
    const int64_t n = call.length(3);
    dispatch(call, call.input(first), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        std::vector<gpu::WidthCodes<T>> payloads;
        for (int r = 0; r < ranks; ++r) {
            const int full = first + r, words = full + ranks, bytes = words + ranks, tags = bytes + ranks;
            const int scale = tags + ranks;
            payloads.push_back({{call.input<uint8_t>(tags, packed_size(n, 2)), call.input<T>(full),
                                 call.input<int16_t>(words), call.input<int8_t>(bytes), call.input<T>(scale, 1)},
                                {call.input(bytes).size, call.input(words).size, call.input(full).size}});
        }
        const T byte_step = static_cast<T>(std::ldexp(1.0, -(ends.m + 7)));
        const T word_step = static_cast<T>(std::ldexp(1.0, -(ends.h + 15)));
        const Target<T> to = target_of<T>(call, first == 1, n);
        GRACE_GPU(call, precision_sum, payloads, byte_step, word_step, to.onto, to.out, n);
        std::vector<Starts> starts;
        for (const gpu::WidthCodes<T>& one : payloads) {
            starts.emplace_back(n);
            Starts& mine = starts.back();
            over_pieces(call, n, [&](int64_t begin, int64_t end) {
                integer_loops().count_tags(one.lists.tags + begin / 4, end - begin, mine.of(begin / kPiece));
            });
            mine.add_up();
            for (int tag = 1; tag <= 3; ++tag) {
                if (one.counts[tag - 1] == mine.total(tag)) continue;
                call.fail(Error::Kind::payload, "expected " + std::to_string(mine.total(tag)) + " numbers, as many as tags " +
                                                    std::to_string(tag) + ", received " +
                                                    std::to_string(one.counts[tag - 1]));
            }
        }
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            std::vector<Widths<T>> here;
            for (int r = 0; r < ranks; ++r) {
                const int64_t* at = starts[static_cast<size_t>(r)].before(begin / kPiece);
                const Widths<T>& all = payloads[static_cast<size_t>(r)].lists;
                here.push_back(
                    {all.tags + begin / 4, all.full + at[3], all.words + at[2], all.bytes + at[1], all.scale});
            }
            loops<T>().precision_sum(here.data(), ranks, byte_step, word_step,
                                     to.onto == nullptr ? nullptr : to.onto + begin, to.out + begin, end - begin, to.around);
        });
    });
}

GRACE_KERNEL(leading_encode, "x T, scale T; block; bound -> float32[blocks], uint8[blocks], uint8[], uint8[]") {
    call.expect(2, 1, 1);
    const LeadingForm form = leading_form_at(call, 0, call.input(0).size, call.number(0));
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const T* x = call.input<T>(0);
        const T* scale = call.input<T>(1, 1);
        float* middles = call.output<float>(form.blocks());
        uint8_t* lengths = call.output<uint8_t>(form.blocks());
        GRACE_GPU(call, leading_encode, x, scale, form, middles, lengths, [&](int64_t leads, int64_t bytes) {
            uint8_t* packed = call.output<uint8_t>(leads);
            return gpu::LeadingRoom{packed, call.output<uint8_t>(bytes)};
        });
        const int64_t each = blocks_of_task(form), tasks = divide_up(form.blocks(), each);
        // Every task has lists of its own, as long as all of its elements need.
        const int64_t room = each * form.block + 16;
        Scratch<uint8_t> leads(tasks * room / 4), bytes(tasks * kPlanes * room);
        const auto lists_of = [&](int64_t task) {
            LeadingLists lists{&leads[task * room / 4], {}};
            for (int k = 0; k < kPlanes; ++k) lists.bytes[k] = &bytes[(task * kPlanes + k) * room];
            return lists;
        };
        std::vector<LeadingLists> ends(static_cast<size_t>(tasks));
        call.parallel(tasks, [&](int64_t task) {
            LeadingLists lists = lists_of(task);
            Scratch<uint32_t> words(form.block + 1);
            GRACE_BEST(leading_encode<T>)(x, *scale, &form, words.data(), task * each,
                                          std::min(form.blocks(), (task + 1) * each), middles, lengths, &lists);
            ends[static_cast<size_t>(task)] = lists;
        });
        // The bytes of a place follow those of the places below.
        std::vector<LeadingPlace> starts(static_cast<size_t>(tasks));
        int64_t count = 0, size = 0;
        for (int k = 0; k < kPlanes; ++k) {
            for (int64_t task = 0; task < tasks; ++task) {
                starts[static_cast<size_t>(task)].bytes[k] = size;
                size += ends[static_cast<size_t>(task)].bytes[k] - lists_of(task).bytes[k];
            }
        }
        for (int64_t task = 0; task < tasks; ++task) {
            starts[static_cast<size_t>(task)].codes = count;
            count += ends[static_cast<size_t>(task)].leads - lists_of(task).leads;
        }
        uint8_t* packed = call.output<uint8_t>(count);
        uint8_t* joined = call.output<uint8_t>(size);
        call.parallel(tasks, [&](int64_t task) {
            const LeadingLists lists = lists_of(task);
            const LeadingLists& end = ends[static_cast<size_t>(task)];
            const LeadingPlace& start = starts[static_cast<size_t>(task)];
            std::copy(lists.leads, end.leads, packed + start.codes);
            for (int k = 0; k < kPlanes; ++k) std::copy(lists.bytes[k], end.bytes[k], joined + start.bytes[k]);
        });
    });
}

GRACE_KERNEL(leading_sum, "[onto_ T], middles float32..., lengths uint8..., leads uint8..., bytes uint8..., scales T...; "
                          "ranks, block, n, has_onto -> T[n]") {
    const int ranks = ranks_at(call, 0), first = call.integer(3) != 0 ? 1 : 0;
    call.expect(first + 5 * ranks, 4, 0);
    const LeadingForm form = leading_form_at(call, 1, call.length(2), 0.5);
    const int64_t blocks = form.blocks();
    dispatch(call, call.input(first + 4 * ranks), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        std::vector<LeadingCodes<T>> payloads;
        for (int r = 0; r < ranks; ++r) {
            const int middles = first + r, lengths = middles + ranks, leads = lengths + ranks, bytes = leads + ranks;
            payloads.push_back({call.input<float>(middles, blocks), call.input<uint8_t>(lengths, blocks),
                                call.input<uint8_t>(leads), call.input<uint8_t>(bytes),
                                call.input<T>(bytes + ranks, 1), call.input(leads).size, call.input(bytes).size});
        }
        const Target<T> to = target_of<T>(call, first == 1, form.n);
        if (form.n == 0) return;
        GRACE_GPU(call, leading_sum, payloads, form, to.onto, to.out);
        const int64_t each = blocks_of_task(form), tasks = divide_up(blocks, each);
        std::vector<LeadingPlace> starts(static_cast<size_t>(tasks * ranks));
        for (int r = 0; r < ranks; ++r) {
            leading_places(call, form, payloads[static_cast<size_t>(r)], each, ranks, &starts[static_cast<size_t>(r)]);
        }
        call.parallel(tasks, [&](int64_t task) {
            GRACE_BEST(leading_sum<T>)(payloads.data(), &starts[static_cast<size_t>(task * ranks)], ranks, &form, to.onto,
                                       to.out, task * each, std::min(blocks, (task + 1) * each), to.around);
        });
    });
}

}  // namespace grace
