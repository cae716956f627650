// Count-Sketches and Bloom filters.
#include "selection.h"

namespace grace {
namespace {

std::vector<SketchHash> hashes_of(const RandomKey& key, int rows) {
    std::vector<SketchHash> hashes;
    for (int row = 0; row < rows; ++row) hashes.push_back(hash_of_row(key, row, rows));
    return hashes;
}

int rows_at(const Call& call, int i) {
    const int64_t rows = call.integer(i);
    if (rows < 1 || rows > 1 << 16) {
        call.fail(Error::Kind::value, "expected 1 to 65536 rows, received " + std::to_string(rows));
    }
    return static_cast<int>(rows);
}

int hashes_at(const Call& call, int i) {
    const int64_t hashes = call.integer(i);
    if (hashes < 1 || hashes > 1 << 16) {
        call.fail(Error::Kind::value, "expected 1 to 65536 hash functions, received " + std::to_string(hashes));
    }
    return static_cast<int>(hashes);
}

int64_t columns_at(const Call& call, int i) {
    const int64_t columns = call.integer(i);
    if (columns < 1 || columns > INT32_MAX || columns % kSketchBlock != 0) {
        call.fail(Error::Kind::value, "expected a multiple of " + std::to_string(kSketchBlock) +
                                          " columns, below 2^31, received " + std::to_string(columns));
    }
    return columns;
}

}  // namespace

GRACE_KERNEL(count_sketch, "x T; rows, columns, key -> T[rows columns]") {
    call.expect(1, 6, 0);
    const int rows = rows_at(call, 0);
    const int64_t columns = columns_at(call, 1);
    const RandomKey key = key_at(call, 2);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T* x = call.input<T>(0);
        T* out = call.output<T>(rows * columns);
        GRACE_GPU(call, count_sketch, x, n, rows, columns, key, out);
        const auto hashes = hashes_of(key, rows);
        // One task per row, because elements are added to a bucket in their order.
        call.parallel(rows, [&](int64_t row) {
            Scratch<double> sums(columns);
            std::fill(sums.data(), sums.data() + columns, 0.0);
            loops<T>().sketch_row(x, &hashes[static_cast<size_t>(row)], static_cast<uint32_t>(columns), n,
                                  sums.data());
            std::copy(sums.data(), sums.data() + columns, out + row * columns);
        });
    });
}

GRACE_KERNEL(sketch_estimate, "sketch T; n, rows, columns, key -> T[n]") {
    call.expect(1, 7, 0);
    const int64_t n = call.length(0);
    const int rows = rows_at(call, 1);
    const int64_t columns = columns_at(call, 2);
    if (rows % 2 == 0) {
        call.fail(Error::Kind::value, "expected an odd number of rows, received " + std::to_string(rows));
    }
    const RandomKey key = key_at(call, 3);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const T* sketch = call.input<T>(0, rows * columns);
        T* out = call.output<T>(n);
        GRACE_GPU(call, sketch_estimate, sketch, rows, columns, key, out, n);
        const auto hashes = hashes_of(key, rows);
        over_pieces(call, n, [&](int64_t begin, int64_t end) {
            Scratch<SketchPlace> places(rows);
            Scratch<typename Format<T>::Signed> found(int64_t(rows) * kSketchBlock);
            loops<T>().sketch_medians(sketch, hashes.data(), rows, static_cast<uint32_t>(columns), begin, end,
                                      places.data(), found.data(), out, is_large<T>(n));
        });
    });
}

GRACE_KERNEL(filter_positions, "data uint8; bits, hashes, n, key -> int32[reported]") {
    call.expect(1, 7, 0);
    const int64_t bits = call.integer(0), n = call.length(2);
    if (bits < 1 || bits > INT32_MAX) {
        call.fail(Error::Kind::value, "expected a filter of 1 to 2^31 - 1 bits, received " + std::to_string(bits));
    }
    const int count = hashes_at(call, 1);
    check_addressable(call, n);
    const RandomKey key = key_at(call, 3);
    const uint8_t* filter = call.input<uint8_t>(0, divide_up(bits, 8));
    const auto room = [&](int64_t reported) { return call.output<int32_t>(reported); };
    GRACE_GPU(call, filter_positions, filter, bits, count, key, n, room);
    std::vector<ItemHash> hashes;
    for (int i = 0; i < count; ++i) hashes.push_back(hash_of_items(key, i));
    Scratch<uint8_t> marks(divide_up(n, 8));
    // The number of positions before each piece.
    std::vector<int64_t> before(static_cast<size_t>(divide_up(n, kPiece)) + 1, 0);
    over_pieces(call, n, [&](int64_t begin, int64_t end) {
        before[static_cast<size_t>(begin / kPiece) + 1] = integer_loops().filter_marks(
            filter, static_cast<uint32_t>(bits), hashes.data(), count, begin, end, marks.data() + begin / 8);
    });
    for (size_t i = 1; i < before.size(); ++i) before[i] += before[i - 1];
    int32_t* out = room(before.back());
    over_pieces(call, n, [&](int64_t begin, int64_t end) {
        int32_t* to = out + before[static_cast<size_t>(begin / kPiece)];
        for (int64_t at = begin; at < end; at += 8) {
            for (uint32_t mask = marks[at / 8]; mask != 0; mask &= mask - 1) {
                *to++ = static_cast<int32_t>(at + __builtin_ctz(mask));
            }
        }
    });
}

}  // namespace grace
