// Count-Sketches.
#include "grace/kernels.h"

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

int64_t columns_at(const Call& call, int i) {
    const int64_t columns = call.integer(i);
    if (columns < 1 || columns > INT32_MAX || columns % kSketchBlock != 0) {
        call.fail(Error::Kind::value, "expected a multiple of " + std::to_string(kSketchBlock) +
                                          " columns, below 2^31, received " + std::to_string(columns));
    }
    return columns;
}

}  // namespace

void count_sketch_kernel(Call& call) {
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

void sketch_estimate_kernel(Call& call) {
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

}  // namespace grace
