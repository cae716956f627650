// Count-Sketches.
#include "grace/kernels.h"

namespace grace {
namespace {

// Two hashes per row as `hash_words` in grace/core/ops/random.py draws them: first those of all buckets, then all signs.
std::vector<SketchHash> hashes_of(const RandomKey& key, int rows) {
    std::vector<uint32_t> words(static_cast<size_t>(12 * rows));
    integer_loops().words(&key, 0, 3 * rows, words.data());
    const auto drawn = [&](int i) {
        const uint32_t* part = words.data() + 3 * i;
        return static_cast<uint64_t>(part[0] >> 8) << 40 ^ static_cast<uint64_t>(part[1] >> 8) << 16 ^ part[2] >> 16;
    };
    std::vector<SketchHash> hashes;
    for (int j = 0; j < rows; ++j) {
        hashes.push_back({drawn(2 * j), drawn(2 * j + 1), drawn(2 * (rows + j)), drawn(2 * (rows + j) + 1)});
    }
    return hashes;
}

int rows_at(const Call& call, int i) {
    const int64_t rows = call.integer(i);
    if (rows < 1 || rows > 1 << 16) {
        call.fail(Error::Kind::value, "expected 1 to 65536 rows, received " + std::to_string(rows));
    }
    return static_cast<int>(rows);
}

int64_t columns_at(const Call& call, int i) {
    const int64_t columns = call.integer(i);
    if (columns < 1 || columns > INT32_MAX) {
        call.fail(Error::Kind::value, "expected 1 to 2^31 - 1 columns, received " + std::to_string(columns));
    }
    return columns;
}

// Elements whose estimates are found together: enough to make a row of the sketch worth loading.
constexpr int64_t kTile = 1 << 18;

}  // namespace

void count_sketch_kernel(Call& call) {
    call.expect(1, 6, 0);
    const int rows = rows_at(call, 0);
    const int64_t columns = columns_at(call, 1);
    const auto hashes = hashes_of(key_at(call, 2), rows);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const T* x = call.input<T>(0);
        T* out = call.output<T>(rows * columns);
        // Row by row, because the order within a bucket is that of the elements.
        call.parallel(rows, [&](int64_t row) {
            Scratch<double> sums(columns);
            std::fill(sums.data(), sums.data() + columns, 0.0);
            loops<T>().sketch_row(x, &hashes[static_cast<size_t>(row)], static_cast<uint32_t>(columns), call.input(0).size,
                                  sums.data());
            std::copy(sums.data(), sums.data() + columns, out + row * columns);
        });
    });
}

void sketch_estimate_kernel(Call& call) {
    call.expect(1, 7, 0);
    const int64_t n = call.length(0);
    const int rows = rows_at(call, 1);
    const int64_t columns = columns_at(call, 2);
    if (rows % 2 == 0) call.fail(Error::Kind::value, "expected an odd number of rows, received " + std::to_string(rows));
    const auto hashes = hashes_of(key_at(call, 3), rows);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const T* sketch = call.input<T>(0, rows * columns);
        T* out = call.output<T>(n);
        call.parallel(divide_up(n, kTile), [&](int64_t tile) {
            const int64_t begin = tile * kTile, end = std::min(n, begin + kTile);
            Scratch<typename Format<T>::Signed> found(rows * (end - begin));
            loops<T>().sketch_medians(sketch, hashes.data(), rows, static_cast<uint32_t>(columns), begin, end, found.data(),
                                      out, is_large<T>(n));
        });
    });
}

}  // namespace grace
