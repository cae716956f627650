// Random vertices of a cross-polytope in place of the elements of a bucket.
#include "grace/vertices.h"

#include "grace/kernels.h"

namespace grace {
namespace {

// The buckets and their vertices, from integers `first` (width) and `first` + 1 (samples).
Vertices vertices_at(const Call& call, int first, int64_t n) {
    const int64_t width = call.integer(first), samples = call.integer(first + 1);
    if (width < 2 || width > 1 << 15 || (width & (width - 1)) != 0) {
        call.fail(Error::Kind::value, "expected a bucket of 2 to 32768 elements, a power of two, received " +
                                          std::to_string(width));
    }
    if (samples < 1 || samples > INT32_MAX) {
        call.fail(Error::Kind::value, "expected 1 to 2^31 - 1 vertices, received " + std::to_string(samples));
    }
    return {n, width, samples, 0, {}, {}};
}

// The buckets of a task.
int64_t each(int64_t width) { return kPiece / width; }

}  // namespace

GRACE_KERNEL(draw_vertices, "x T, norms T; width, samples, least, key -> int64[vertices], int64[norms]") {
    call.expect(2, 7, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, buckets = call.input(1).size;
        Vertices by = vertices_at(call, 0, n);
        by.least = call.integer(2);
        if (by.least < 0 || by.least >= int64_t(1) << 32) {
            call.fail(Error::Kind::value, "expected a reach below 2^32, received " + std::to_string(by.least));
        }
        by.key = by.rest = key_at(call, 3);
        ++by.rest.stream;
        const T* x = call.input<T>(0);
        const T* norms = call.input<T>(1, divide_up(n, by.width));
        int64_t* codes = call.output<int64_t>(buckets * by.samples);
        int64_t* masses = call.output<int64_t>(buckets);
        GRACE_GPU(call, draw_vertices, x, norms, by, codes, masses);
        call.parallel(divide_up(buckets, each(by.width)), [&](int64_t task) {
            Scratch<int64_t> ends(by.width);
            GRACE_BEST(draw_vertices<T>)(x, norms, &by, ends.data(), codes, masses, task * each(by.width),
                                     std::min(buckets, (task + 1) * each(by.width)));
        });
    });
}

GRACE_KERNEL(vertices_sum, "[onto_ T], codes int64..., scales T...; ranks, width, samples, n, has_onto -> T[n]") {
    const int ranks = ranks_at(call, 0), first = call.integer(4) != 0 ? 1 : 0;
    call.expect(first + 2 * ranks, 5, 0);
    const int64_t n = call.length(3);
    const Vertices by = vertices_at(call, 1, n);
    const int64_t buckets = divide_up(n, by.width);
    dispatch(call, call.input(first + ranks), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        std::vector<VertexCodes<T>> payloads;
        for (int r = 0; r < ranks; ++r) {
            payloads.push_back({call.input<int64_t>(first + r, buckets * by.samples),
                                call.input<T>(first + ranks + r, buckets)});
        }
        const Target<T> to = target_of<T>(call, first == 1, n);
        GRACE_GPU(call, vertices_sum, payloads, by, to.onto, to.out);
        call.parallel(divide_up(buckets, each(by.width)), [&](int64_t task) {
            Scratch<int32_t> counts(by.width);
            GRACE_BEST(vertices_sum<T>)(payloads.data(), ranks, &by, to.onto, to.out, counts.data(), task * each(by.width),
                                    std::min(buckets, (task + 1) * each(by.width)));
        });
    });
}

}  // namespace grace
