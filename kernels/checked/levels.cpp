// Signs and levels: quantizers, and the packing of bits.
#include <atomic>
#include <cstring>

#include "grace/kernels.h"
#include "grace/sums.h"

namespace grace {
namespace {

int bits_at(const Call& call, int i, int most) {
    const int64_t bits = call.integer(i);
    if (bits < 1 || bits > most) {
        call.fail(Error::Kind::value,
                  "expected 1 to " + std::to_string(most) + " bits, received " + std::to_string(bits));
    }
    return static_cast<int>(bits);
}

// Integer i as the width of buckets that are rounded while they are in the cache.
int64_t rounded_width(const Call& call, int i) {
    const int64_t width = width_at(call, i);
    if (width > kRoundWidth) {
        call.fail(Error::Kind::value, "expected buckets of at most " + std::to_string(kRoundWidth) +
                                          " elements, received " + std::to_string(width));
    }
    return width;
}

// Integer i as the number of columns of a matrix of n elements; throws Error(value) if they make no whole rows.
int64_t columns_at(const Call& call, int i, int64_t n) {
    const int64_t columns = call.integer(i);
    if (columns < 1 || columns > std::max<int64_t>(1, n) || n % columns != 0) {
        call.fail(Error::Kind::value, "expected columns that divide " + std::to_string(n) + " elements, received " +
                                          std::to_string(columns));
    }
    return columns;
}

// The sums of both sides of all pieces; body(begin, end, sums) adds those of a piece to three zeros.
template <class Body> Sides sides_of_pieces(Call& call, int64_t n, Body body) {
    Scratch<double> of_piece(3 * divide_up(n, kPiece));
    over_pieces(call, n, [&](int64_t begin, int64_t end) {
        double* mine = of_piece.data() + begin / kPiece * 3;
        mine[0] = mine[1] = mine[2] = 0;
        body(begin, end, mine);
    });
    Sides sides{0, 0, 0};
    for (int64_t i = 0; i < divide_up(n, kPiece); ++i) {
        sides.count += of_piece[3 * i];
        sides.high += of_piece[3 * i + 1];
        sides.low += of_piece[3 * i + 2];
    }
    return sides;
}

// The bits and the means of the columns of x. make(begin, end) is called for all elements, before they are read.
template <class T, class Make>
void signs_of_columns(Call& call, const T* x, int64_t n, int64_t columns, T threshold, uint8_t* bits, T* means,
                      Make make) {
    // Tiles of kPiece elements or a few times as many: wide, so that memory is read in long stretches, and high, so that
    // there are few sums to add.
    const int64_t rows = n / columns, width = divide_up(divide_up(columns, divide_up(columns, 4096)), 16) * 16;
    const int64_t each = std::max<int64_t>(128, kPiece / width / 8 * 8);
    const int64_t across = divide_up(columns, width), blocks = std::max<int64_t>(1, divide_up(rows, each));
    // Tiles beside each other share bytes of bits.
    if (across > 1) over_pieces(call, n, make);
    Scratch<double> of_block(3 * columns * blocks);
    call.parallel(blocks * across, [&](int64_t task) {
        const int64_t block = task / across, begin = task % across * width;
        const Tile tile{columns, block * each, std::min(rows, (block + 1) * each), begin,
                        std::min(columns, begin + width)};
        if (across == 1) make(tile.first * columns, tile.last * columns);
        loops<T>().binarize_columns(x, threshold, bits, n, &tile, of_block.data() + 3 * columns * block + begin);
    });
    call.parallel(across, [&](int64_t task) {
        double* sums = of_block.data();
        const int64_t begin = task * width, end = std::min(columns, begin + width);
        for (int64_t list = 3; list < 3 * blocks; ++list) {
            // Of one block after the other, because the sums of one column lie far apart.
            double *total = sums + list % 3 * columns, *more = sums + list * columns;
            for (int64_t j = begin; j < end; ++j) total[j] += more[j];
        }
        for (int64_t j = begin; j < end; ++j) {
            T pair[2];
            means_of(Sides{sums[j], sums[columns + j], sums[2 * columns + j]}, rows, pair);
            means[j] = pair[0];
            means[columns + j] = pair[1];
        }
    });
}

// codes(begin, end, low, high) writes the low bytes of a piece's codes and, above 8 bits, the high bytes.
template <class Codes> void packed(Call& call, uint8_t* out, int64_t n, int bits, Codes codes) {
    over_pieces(call, n, [&](int64_t begin, int64_t end) {
        uint8_t low[1024], high[1024];
        for (int64_t at = begin; at < end; at += 1024) {
            const int64_t length = std::min<int64_t>(1024, end - at);
            codes(at, at + length, low, high);
            if (bits > 8) {
                std::memcpy(out + at, low, static_cast<size_t>(length));
                integer_loops().pack(high, bits - 8, length, out + n + at / 8 * (bits - 8));
            } else {
                integer_loops().pack(low, bits, length, out + at / 8 * bits);
            }
        }
    });
}

void split(const uint16_t* codes, int64_t n, uint8_t* low, uint8_t* high) {
    for (int64_t i = 0; i < n; ++i) {
        low[i] = static_cast<uint8_t>(codes[i]);
        high[i] = static_cast<uint8_t>(codes[i] >> 8);
    }
}

template <class T> std::vector<const uint8_t*> bits_of(const Call& call, int first, int ranks, int64_t n) {
    std::vector<const uint8_t*> bits;
    for (int r = 0; r < ranks; ++r) bits.push_back(call.input<uint8_t>(first + r, packed_size(n, 1)));
    return bits;
}

std::vector<const uint8_t*> moved(const std::vector<const uint8_t*>& bits, int64_t elements) {
    std::vector<const uint8_t*> at;
    for (const uint8_t* mine : bits) at.push_back(mine + elements / 8);
    return at;
}

// Calls body with a null pointer of the array's type of integers.
template <class Body> void dispatch_integers(const Call& call, const Array& array, Body body) {
    if (array.dtype == DType::int8) {
        body(static_cast<int8_t*>(nullptr));
    } else if (array.dtype == DType::int16) {
        body(static_cast<int16_t*>(nullptr));
    } else if (array.dtype == DType::int32) {
        body(static_cast<int32_t*>(nullptr));
    } else {
        call.fail(Error::Kind::type, std::string("expected int8, int16 or int32, received ") + name_of(array.dtype));
    }
}

// Calls body with a null pointer of the type of integers of 8, 16 or 32 bits.
template <class Body> void of_bits(const Call& call, int64_t bits, Body body) {
    if (bits == 8) {
        body(static_cast<int8_t*>(nullptr));
    } else if (bits == 16) {
        body(static_cast<int16_t*>(nullptr));
    } else if (bits == 32) {
        body(static_cast<int32_t*>(nullptr));
    } else {
        call.fail(Error::Kind::value, "expected integers of 8, 16 or 32 bits, received " + std::to_string(bits));
    }
}

// The loop for a type of integers, of those for 8, 16 and 32 bits.
template <class Code, class F8, class F16, class F32> auto loop_of(F8 f8, F16 f16, F32 f32) {
    if constexpr (sizeof(Code) == 1) return f8;
    if constexpr (sizeof(Code) == 2) return f16;
    if constexpr (sizeof(Code) == 4) return f32;
}

// Integer i as the largest level that integers of 8 to 32 bits hold.
int32_t most_at(const Call& call, int i, int64_t bits) {
    const int64_t most = call.integer(i);
    if (most < 1 || most >= int64_t(1) << (bits - 1)) {
        call.fail(Error::Kind::value, "expected a level from 1 that fits " + std::to_string(bits) + " bits, received " +
                                          std::to_string(most));
    }
    return static_cast<int32_t>(most);
}

int lanes_at(const Call& call, int i) {
    const int64_t lanes = call.integer(i);
    if (lanes < 1 || lanes > 16) {
        call.fail(Error::Kind::value, "expected 1 to 16 lanes, received " + std::to_string(lanes));
    }
    return static_cast<int>(lanes);
}

}  // namespace

GRACE_KERNEL(pack, "codes uint8/int64; bits -> uint8[packed]") {
    call.expect(1, 1, 0);
    const Array& codes = call.input(0);
    const int bits = bits_at(call, 0, 16);
    if (codes.dtype == DType::uint8 && bits <= 8) {
        const uint8_t* from = call.input<uint8_t>(0);
        uint8_t* out = call.output<uint8_t>(packed_size(codes.size, bits));
        GRACE_GPU(call, pack, from, bits, out, codes.size);
        over_pieces(call, codes.size, [&](int64_t begin, int64_t end) {
            integer_loops().pack(from + begin, bits, end - begin, out + begin / 8 * bits);
        });
        return;
    }
    const int64_t* from = call.input<int64_t>(0);
    uint8_t* out = call.output<uint8_t>(packed_size(codes.size, bits));
    GRACE_GPU(call, pack, from, bits, out, codes.size);
    packed(call, out, codes.size, bits, [&](int64_t begin, int64_t end, uint8_t* low, uint8_t* high) {
        for (int64_t i = begin; i < end; ++i) {
            low[i - begin] = static_cast<uint8_t>(from[i]);
            high[i - begin] = static_cast<uint8_t>(from[i] >> 8);
        }
    });
}

GRACE_KERNEL(unpack, "codes uint8; bits, n -> int64[n]") {
    call.expect(1, 2, 0);
    const int bits = bits_at(call, 0, 16);
    const int64_t n = call.length(1);
    const uint8_t* data = call.input<uint8_t>(0, packed_size(n, bits));
    int64_t* out = call.output<int64_t>(n);
    GRACE_GPU(call, unpack, data, bits, out, n);
    over_pieces(call, n, [&](int64_t begin, int64_t end) {
        uint8_t low[1024], high[1024];
        for (int64_t at = begin; at < end; at += 1024) {
            const int64_t length = std::min<int64_t>(1024, end - at);
            if (bits > 8) {
                integer_loops().unpack(data + n + at / 8 * (bits - 8), bits - 8, length, high);
                for (int64_t i = 0; i < length; ++i) out[at + i] = data[at + i] | static_cast<int64_t>(high[i]) << 8;
            } else {
                integer_loops().unpack(data + at / 8 * bits, bits, length, low);
                std::copy(low, low + length, out + at);
            }
        }
    });
}

GRACE_KERNEL(binarize, "x T; ; threshold -> uint8[packed]") {
    call.expect(1, 0, 1);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T* x = call.input<T>(0);
        const T threshold = static_cast<T>(call.number(0));
        uint8_t* bits = call.output<uint8_t>(packed_size(n, 1));
        GRACE_GPU(call, binarize, x, threshold, bits, n);
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            loops<T>().binarize(x + begin, threshold, bits + begin / 8, end - begin);
        });
    });
}

GRACE_KERNEL(binarize_finite, "x T; ; threshold -> uint8[packed], uint8[1]") {
    call.expect(1, 0, 1);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T* x = call.input<T>(0);
        const T threshold = static_cast<T>(call.number(0));
        uint8_t* bits = call.output<uint8_t>(packed_size(n, 1));
        uint8_t* good = call.verdict();
        GRACE_GPU(call, binarize_finite, x, threshold, bits, good, n);
        std::atomic<uint8_t> all{1};
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            // The second loop reads a step from the first-level cache.
            constexpr int64_t step = 4096;
            for (int64_t at = begin; at < end; at += step) {
                const int64_t length = std::min(step, end - at);
                loops<T>().binarize(x + at, threshold, bits + at / 8, length);
                if (!loops<T>().finite(x + at, length)) all = 0;
            }
        });
        *good = all;
    });
}

GRACE_KERNEL(binarize_means, "x T; single; threshold -> uint8[packed], T[2 - single]") {
    call.expect(1, 1, 1);
    const bool single = call.integer(0) != 0;
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T* x = call.input<T>(0);
        uint8_t* bits = call.output<uint8_t>(packed_size(n, 1));
        T* means = call.output<T>(single ? 1 : 2);
        const T threshold = static_cast<T>(call.number(0));
        GRACE_GPU(call, binarize_means, x, threshold, single, bits, means, n);
        const Sides sides = sides_of_pieces(call, n, [&](int64_t begin, int64_t end, double* sums) {
            loops<T>().binarize_sums(x + begin, threshold, bits + begin / 8, sums, end - begin);
        });
        single ? mean_magnitude(sides, n, means) : means_of(sides, n, means);
    });
}

GRACE_KERNEL(sum_sign_mean, "x T, y T; ; a, b -> T[x], uint8[packed], T[1], uint8[1]") {
    call.expect(2, 0, 2);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T *x = call.input<T>(0), *y = call.input<T>(1, n);
        const T a = static_cast<T>(call.number(0)), b = static_cast<T>(call.number(1));
        T* out = call.output<T>(n);
        uint8_t* bits = call.output<uint8_t>(packed_size(n, 1));
        T* mean = call.output<T>(1);
        uint8_t* good = call.verdict();
        GRACE_GPU(call, sum_sign_mean, x, a, y, b, out, good, bits, mean, n);
        std::atomic<uint8_t> all{1};
        const Sides sides = sides_of_pieces(call, n, [&](int64_t begin, int64_t end, double* sums) {
            if (!loops<T>().sum_signs(x + begin, a, y + begin, b, out + begin, is_large<T>(n), bits + begin / 8, sums,
                                      end - begin)) {
                all = 0;
            }
        });
        mean_magnitude(sides, n, mean);
        *good = all;
    });
}

GRACE_KERNEL(binary_sum, "[onto_ T], bits uint8..., levels T...; ranks, n, single, negate, has_onto; factor -> T[n]") {
    const int ranks = ranks_at(call, 0), first = call.integer(4) != 0 ? 1 : 0;
    call.expect(first + 2 * ranks, 5, 1);
    const int64_t n = call.length(1);
    const bool single = call.integer(2) != 0, negate = call.integer(3) != 0;
    dispatch(call, call.input(first + ranks), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const auto bits = bits_of<T>(call, first, ranks, n);
        std::vector<Coded<T>> payloads;
        for (int r = 0; r < ranks; ++r) {
            payloads.push_back({bits[r], call.input<T>(first + ranks + r, single ? 1 : 2)});
        }
        const T factor = static_cast<T>(call.number(0));
        const Target<T> to = target_of<T>(call, first == 1, n);
        GRACE_GPU(call, binary_sum, payloads, single, negate, to.onto, factor, to.out, n);
        std::vector<T> levels;
        for (const Coded<T>& one : payloads) {
            for (const bool bit : {false, true}) levels.push_back(level_of(one.scales, single, negate, bit));
        }
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            const T* onto = to.onto == nullptr ? nullptr : to.onto + begin;
            loops<T>().binary_sum(moved(bits, begin).data(), levels.data(), ranks, onto, factor, to.out + begin,
                                  end - begin, to.around);
        });
    });
}

GRACE_KERNEL(binarize_columns, "x T; columns; threshold -> uint8[packed], T[2 columns]") {
    call.expect(1, 1, 1);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, columns = columns_at(call, 0, n);
        const T* x = call.input<T>(0);
        uint8_t* bits = call.output<uint8_t>(packed_size(n, 1));
        T* means = call.output<T>(2 * columns);
        const T threshold = static_cast<T>(call.number(0));
        GRACE_GPU(call, binarize_columns, x, threshold, columns, bits, means, n);
        signs_of_columns(call, x, n, columns, threshold, bits, means, [](int64_t, int64_t) {});
    });
}

GRACE_KERNEL(sum_columns, "x T, y T; columns; threshold, a, b -> T[x], uint8[packed], T[2 columns], uint8[1]") {
    call.expect(2, 1, 3);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, columns = columns_at(call, 0, n);
        const T *x = call.input<T>(0), *y = call.input<T>(1, n);
        const T threshold = static_cast<T>(call.number(0));
        const T a = static_cast<T>(call.number(1)), b = static_cast<T>(call.number(2));
        T* out = call.output<T>(n);
        uint8_t* bits = call.output<uint8_t>(packed_size(n, 1));
        T* means = call.output<T>(2 * columns);
        uint8_t* good = call.verdict();
        GRACE_GPU(call, sum_columns, x, a, y, b, out, threshold, columns, bits, means, good, n);
        std::atomic<uint8_t> all{1};
        const auto add = [&](int64_t begin, int64_t end) {
            if (!loops<T>().weighted_sum(x + begin, a, y + begin, b, out + begin, end - begin, false)) all = 0;
        };
        if (columns == 1) {
            const Sides sides = sides_of_pieces(call, n, [&](int64_t begin, int64_t end, double* sums) {
                add(begin, end);
                loops<T>().binarize_sums(out + begin, threshold, bits + begin / 8, sums, end - begin);
            });
            means_of(sides, n, means);
        } else {
            signs_of_columns(call, out, n, columns, threshold, bits, means, add);
        }
        *good = all;
    });
}

GRACE_KERNEL(column_sum, "[onto_ T], bits uint8..., levels T...; ranks, n, columns, negate, has_onto -> T[n]") {
    const int ranks = ranks_at(call, 0), first = call.integer(4) != 0 ? 1 : 0;
    call.expect(first + 2 * ranks, 5, 0);
    const int64_t n = call.length(1), columns = columns_at(call, 2, n);
    const bool negate = call.integer(3) != 0;
    dispatch(call, call.input(first + ranks), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const auto bits = bits_of<T>(call, first, ranks, n);
        std::vector<Coded<T>> payloads;
        for (int r = 0; r < ranks; ++r) payloads.push_back({bits[r], call.input<T>(first + ranks + r, 2 * columns)});
        const Target<T> to = target_of<T>(call, first == 1, n);
        GRACE_GPU(call, column_sum, payloads, columns, negate, to.onto, to.out, n);
        // Levels that repeat after each row let a block begin in any column and go on in the next row.
        const int64_t length = columns + kBeyond;
        Scratch<T> repeated(2 * ranks * length);
        std::vector<const T*> levels;
        for (int i = 0; i < 2 * ranks; ++i) {
            const T* from = payloads[i / 2].scales + (i % 2) * columns;
            T* to_levels = repeated.data() + i * length;
            for (int64_t j = 0; j < columns; ++j) to_levels[j] = negate ? -from[j] : from[j];
            for (int64_t j = columns; j < length; ++j) to_levels[j] = to_levels[j - columns];
            levels.push_back(to_levels);
        }
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            loops<T>().column_sum(bits.data(), levels.data(), columns, ranks, n, to.onto, to.out, begin, end,
                                  to.around);
        });
    });
}

GRACE_KERNEL(majority, "bits uint8...; n, wide -> T[n]") {
    const int ranks = call.inputs();
    call.expect(std::max(1, ranks), 2, 0);
    const int64_t n = call.length(0);
    const auto body = [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const auto bits = bits_of<T>(call, 0, ranks, n);
        T* out = call.output<T>(n);
        GRACE_GPU(call, majority, bits, out, n);
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            loops<T>().majority(moved(bits, begin).data(), ranks, out + begin, end - begin, is_large<T>(n));
        });
    };
    call.integer(1) != 0 ? body(static_cast<double*>(nullptr)) : body(static_cast<float*>(nullptr));
}

GRACE_KERNEL(bucket_norms, "x T; width, largest -> T[buckets]") {
    call.expect(1, 2, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, width = width_at(call, 0), buckets = divide_up(n, width);
        const T* x = call.input<T>(0);
        T* norms = call.output<T>(buckets);
        GRACE_GPU(call, bucket_norms, x, n, width, call.integer(1) != 0, norms);
        const int64_t each = std::max<int64_t>(1, kPiece / width);
        call.parallel(divide_up(buckets, each), [&](int64_t task) {
            loops<T>().bucket_norms(x, n, width, call.integer(1) != 0, norms, task * each,
                                    std::min(buckets, (task + 1) * each));
        });
    });
}

GRACE_KERNEL(quantize_packed, "x T, scales T, [limit T]; width, levels, bits, stochastic, key -> uint8[packed]") {
    call.expect(call.inputs() == 3 ? 3 : 2, 8, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, width = width_at(call, 0), levels = call.integer(1);
        const int bits = bits_at(call, 2, 16);
        if (levels < 1 || levels >= int64_t(1) << (bits - 1)) {
            call.fail(Error::Kind::value, "expected levels from 1 that fit " + std::to_string(bits) + " bits, " +
                                              "received " + std::to_string(levels));
        }
        const T *x = call.input<T>(0), *scales = call.input<T>(1, buckets_of(n, width));
        const T* limit = call.inputs() == 3 ? call.input<T>(2, 1) : nullptr;
        const RandomKey key = key_at(call, 4);
        const RandomKey* noise = call.integer(3) != 0 ? &key : nullptr;
        uint8_t* out = call.output<uint8_t>(packed_size(n, bits));
        GRACE_GPU(call, quantize_packed, x, scales, width, static_cast<int>(levels), bits, limit, noise, out, n);
        packed(call, out, n, bits, [&](int64_t begin, int64_t end, uint8_t* low, uint8_t* high) {
            if (bits <= 8) {
                loops<T>().levels8(x, scales, width, static_cast<T>(levels), limit, noise, begin, end, low);
            } else {
                uint16_t codes[1024];
                loops<T>().levels16(x, scales, width, static_cast<T>(levels), limit, noise, begin, end, codes);
                split(codes, end - begin, low, high);
            }
        });
    });
}

GRACE_KERNEL(bucket_quantize, "x T; width, largest, levels, bits, stochastic, key -> uint8[packed], T[buckets]") {
    call.expect(1, 9, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, width = rounded_width(call, 0), levels = call.integer(2);
        const bool largest = call.integer(1) != 0;
        const int bits = bits_at(call, 3, 8);
        if (levels < 1 || levels >= int64_t(1) << (bits - 1)) {
            call.fail(Error::Kind::value, "expected levels from 1 that fit " + std::to_string(bits) + " bits, " +
                                              "received " + std::to_string(levels));
        }
        const T* x = call.input<T>(0);
        const RandomKey key = key_at(call, 5);
        const RandomKey* noise = call.integer(4) != 0 ? &key : nullptr;
        uint8_t* out = call.output<uint8_t>(packed_size(n, bits));
        const int64_t buckets = divide_up(n, width);
        T* norms = call.output<T>(buckets);
        GRACE_GPU(call, bucket_quantize, x, width, largest, static_cast<int>(levels), bits, noise, out, norms, n);
        const int64_t unit = round_unit(width), block = std::max<int64_t>(1, kBlock / unit) * unit;
        const int64_t each = std::max<int64_t>(1, kPiece / block) * block;
        call.parallel(divide_up(n, each), [&](int64_t task) {
            uint8_t codes[8 * kRoundWidth];
            for (int64_t at = task * each; at < std::min(n, (task + 1) * each); at += block) {
                const int64_t end = std::min(n, at + block);
                loops<T>().bucket_norms(x, n, width, largest, norms, at / width, divide_up(end, width));
                loops<T>().levels8(x, norms, width, static_cast<T>(levels), nullptr, noise, at, end, codes);
                integer_loops().pack(codes, bits, end - at, out + at / 8 * bits);
            }
        });
    });
}

GRACE_KERNEL(floor_packed, "x T, delta T; width, key -> uint8[packed]") {
    call.expect(2, 5, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const int bits = bits_at(call, 0, 16);
        const T *x = call.input<T>(0), *delta = call.input<T>(1, 1);
        const RandomKey key = key_at(call, 1);
        uint8_t* out = call.output<uint8_t>(packed_size(n, bits));
        GRACE_GPU(call, floor_packed, x, delta, bits, key, out, n);
        const int32_t half = int32_t(1) << (bits - 1);
        packed(call, out, n, bits, [&](int64_t begin, int64_t end, uint8_t* low, uint8_t* high) {
            if (bits <= 8) {
                loops<T>().floors8(x, *delta, half, &key, begin, end, low);
            } else {
                uint16_t codes[1024];
                loops<T>().floors16(x, *delta, half, &key, begin, end, codes);
                split(codes, end - begin, low, high);
            }
        });
    });
}

GRACE_KERNEL(dequantize_sum, "[onto_ T], codes uint8..., scales T...; ranks, width, levels, bits, n, has_onto -> "
                             "T[n]") {
    const int ranks = ranks_at(call, 0), first = call.integer(5) != 0 ? 1 : 0;
    call.expect(first + 2 * ranks, 6, 0);
    const int64_t width = width_at(call, 1), levels = call.integer(2), n = call.length(4);
    const int bits = bits_at(call, 3, 16);
    if (levels < 1 || levels > 32768) {
        call.fail(Error::Kind::value, "expected 1 to 32768 levels, received " + std::to_string(levels));
    }
    dispatch(call, call.input(first + ranks), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        std::vector<Coded<T>> payloads;
        for (int r = 0; r < ranks; ++r) {
            payloads.push_back({call.input<uint8_t>(first + r, packed_size(n, bits)),
                                call.input<T>(first + ranks + r, buckets_of(n, width))});
        }
        const Target<T> to = target_of<T>(call, first == 1, n);
        GRACE_GPU(call, dequantize_sum, payloads, width, static_cast<int>(levels), bits, to.onto, to.out, n);
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            loops<T>().dequantize_sum(payloads.data(), ranks, width, static_cast<int>(levels), bits, n, to.onto, to.out,
                                      begin, end, to.around);
        });
    });
}

GRACE_KERNEL(round_packed, "x T, scales T, levels T; width, stochastic, key -> uint8[packed]") {
    call.expect(3, 6, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, width = width_at(call, 0);
        const int bits = level_bits(call, 2);
        const T *x = call.input<T>(0), *scales = call.input<T>(1, buckets_of(n, width)), *levels = call.input<T>(2);
        const RandomKey key = key_at(call, 2);
        const RandomKey* noise = call.integer(1) != 0 ? &key : nullptr;
        uint8_t* out = call.output<uint8_t>(packed_size(n, bits));
        GRACE_GPU(call, round_packed, x, scales, width, levels, bits, noise, out, n);
        packed(call, out, n, bits, [&](int64_t begin, int64_t end, uint8_t* low, uint8_t*) {
            loops<T>().level_codes(x, scales, width, levels, bits, noise, begin, end, low);
        });
    });
}

GRACE_KERNEL(sum_round, "x T, y T, levels T; width; a, b -> T[x], uint8[packed], T[buckets], uint8[1]") {
    call.expect(3, 1, 2);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, width = rounded_width(call, 0);
        const int bits = level_bits(call, 2);
        const T *x = call.input<T>(0), *y = call.input<T>(1, n), *levels = call.input<T>(2);
        const T a = static_cast<T>(call.number(0)), b = static_cast<T>(call.number(1));
        T* out = call.output<T>(n);
        uint8_t* codes = call.output<uint8_t>(packed_size(n, bits));
        const int64_t buckets = divide_up(n, width);
        T* norms = call.output<T>(buckets);
        uint8_t* good = call.verdict();
        GRACE_GPU(call, sum_round, x, a, y, b, width, levels, bits, out, codes, norms, good, n);
        const int64_t each = std::max<int64_t>(1, kPiece / round_unit(width)) * round_unit(width);
        call.parallel(divide_up(n, each), [&](int64_t task) {
            loops<T>().sum_round(x, a, y, b, width, levels, bits, out, norms, codes, task * each,
                                 std::min(n, (task + 1) * each), is_large<T>(n));
        });
        *good = loops<T>().finite(norms, buckets) ? 1 : 0;
    });
}

GRACE_KERNEL(levels_sum, "[onto_ T], codes uint8..., scales T..., levels T...; ranks, width, n, has_onto -> T[n]") {
    const int ranks = ranks_at(call, 0), first = call.integer(3) != 0 ? 1 : 0;
    call.expect(first + 3 * ranks, 4, 0);
    const int64_t width = width_at(call, 1), n = call.length(2);
    dispatch(call, call.input(first + ranks), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int lists = first + 2 * ranks, bits = level_bits(call, lists);
        std::vector<Listed<T>> payloads;
        for (int r = 0; r < ranks; ++r) {
            payloads.push_back({call.input<uint8_t>(first + r, packed_size(n, bits)),
                                call.input<T>(first + ranks + r, buckets_of(n, width)),
                                call.input<T>(lists + r, int64_t(1) << bits)});
        }
        const Target<T> to = target_of<T>(call, first == 1, n);
        GRACE_GPU(call, levels_sum, payloads, width, bits, to.onto, to.out, n);
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            loops<T>().levels_sum(payloads.data(), ranks, width, bits, to.onto, to.out, begin, end, to.around);
        });
    });
}

GRACE_KERNEL(to_integers, "x T, scale T; most, bits, stochastic, key -> int8/int16/int32[x]") {
    call.expect(2, 7, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        of_bits(call, call.integer(1), [&](auto* code) {
            using Code = of_pointer<decltype(code)>;
            const int64_t n = call.input(0).size;
            const T most = static_cast<T>(most_at(call, 0, 8 * sizeof(Code)));
            const T *x = call.input<T>(0), *scale = call.input<T>(1, 1);
            const RandomKey key = key_at(call, 3);
            const RandomKey* noise = call.integer(2) != 0 ? &key : nullptr;
            Code* out = call.output<Code>(n);
            GRACE_GPU(call, to_integers, x, scale, most, noise, out, n);
            const auto& of = loops<T>();
            const auto loop = loop_of<Code>(of.to_integers8, of.to_integers16, of.to_integers32);
            over_pieces(call, n, [&](int64_t begin, int64_t end) {
                loop(x, *scale, most, noise, begin, end, out + begin);
            });
        });
    });
}

GRACE_KERNEL(from_integers, "[onto_ T], codes int8/int16/int32, scale T; most, has_onto -> T[codes]") {
    const int first = call.integer(1) != 0 ? 1 : 0;
    call.expect(first + 2, 2, 0);
    dispatch(call, call.input(first + 1), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        dispatch_integers(call, call.input(first), [&](auto* code) {
            using Code = of_pointer<decltype(code)>;
            const int64_t n = call.input(first).size;
            const T most = static_cast<T>(most_at(call, 0, 32));
            const Code* codes = call.input<Code>(first);
            const T* scale = call.input<T>(first + 1, 1);
            const Target<T> to = target_of<T>(call, first == 1, n);
            GRACE_GPU(call, from_integers, codes, scale, most, to.onto, to.out, n);
            const auto& of = loops<T>();
            const auto loop = loop_of<Code>(of.from_integers8, of.from_integers16, of.from_integers32);
            const T unit = *scale / most;
            over_pieces(call, n, [&](int64_t begin, int64_t end) {
                const T* onto = to.onto == nullptr ? nullptr : to.onto + begin;
                loop(codes + begin, unit, onto, to.out + begin, end - begin, to.around);
            });
        });
    });
}

GRACE_KERNEL(pack_lanes, "x int8/int16/int32; lanes -> int32[words]") {
    call.expect(1, 1, 0);
    const int lanes = lanes_at(call, 0);
    dispatch_integers(call, call.input(0), [&](auto* code) {
        using Code = of_pointer<decltype(code)>;
        const int64_t n = call.input(0).size, count = divide_up(n, lanes);
        const Code* x = call.input<Code>(0);
        int32_t* words = call.output<int32_t>(count);
        GRACE_GPU(call, pack_lanes, x, n, lanes, words, count);
        const auto& of = integer_loops();
        const auto loop = loop_of<Code>(of.pack_lanes8, of.pack_lanes16, of.pack_lanes32);
        over_pieces(call, count, [&](int64_t begin, int64_t end) { loop(x, n, lanes, begin, end, words); });
    });
}

GRACE_KERNEL(unpack_lanes, "word int32; lanes, n -> int8/int16/int32[n]") {
    call.expect(1, 2, 0);
    const int lanes = lanes_at(call, 0);
    const int64_t n = call.length(1), count = divide_up(n, lanes);
    const int32_t* words = call.input<int32_t>(0, count);
    of_bits(call, lanes >= 4 ? 8 : lanes > 1 ? 16 : 32, [&](auto* code) {
        using Code = of_pointer<decltype(code)>;
        Code* out = call.output<Code>(n);
        GRACE_GPU(call, unpack_lanes, words, count, lanes, out, n);
        const auto& of = integer_loops();
        const auto loop = loop_of<Code>(of.unpack_lanes8, of.unpack_lanes16, of.unpack_lanes32);
        over_pieces(call, count, [&](int64_t begin, int64_t end) { loop(words, n, lanes, begin, end, out); });
    });
}

GRACE_KERNEL(best_levels, "sizes float64, starts int32; exponential -> float64[starts + 2]") {
    call.expect(2, 1, 0);
    const int64_t n = call.input(0).size, inner = call.input(1).size;
    const bool exponential = call.integer(0) != 0;
    if (n < 1) call.fail(Error::Kind::value, "expected at least one size, received none");
    if (inner < 1 || inner >= kMostInner) {
        call.fail(Error::Kind::value, "expected 1 to " + std::to_string(kMostInner - 1) + " levels, received " +
                                          std::to_string(inner));
    }
    const double* sizes = call.input<double>(0);
    const int32_t* starts = call.input<int32_t>(1);
    double* levels = call.output<double>(inner + 2);
    GRACE_GPU(call, best_levels, sizes, n, starts, static_cast<int>(inner), exponential, levels);
    Scratch<double> prefixes(2 * (n + 1));
    fit_levels(sizes, n, starts, static_cast<int>(inner), exponential, prefixes.data(), levels);
}

}  // namespace grace
