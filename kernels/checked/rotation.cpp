// Rotations in blocks, with the rotated elements rounded to a few levels, redundant frames, and measurements.
#include "selection.h"

namespace grace {
namespace {

// Integer i as the number of elements in a block.
int64_t block_at(const Call& call, int i) {
    const int64_t block = call.integer(i);
    if (block < kShortestRotation || block > kRotation || (block & (block - 1)) != 0) {
        call.fail(Error::Kind::value, "expected a block of " + std::to_string(kShortestRotation) + " to " +
                                          std::to_string(kRotation) + " elements, a power of two, received " +
                                          std::to_string(block));
    }
    return block;
}

// The length of the last block of n elements, if it is not whole.
int64_t tail_of(int64_t n, int64_t block) {
    int64_t tail = n % block == 0 ? 0 : 8;
    while (tail < n % block) tail *= 2;
    return tail;
}

// Integer i as the number of transforms: true for two, false for one.
bool twice_at(const Call& call, int i) {
    const int64_t transforms = call.integer(i);
    if (transforms != 1 && transforms != 2) {
        call.fail(Error::Kind::value, "expected 1 or 2 transforms, received " + std::to_string(transforms));
    }
    return transforms == 2;
}

// The rotation of n elements, with the levels of input i, and signs from the key of a rank. Its block and transforms
// begin at integer `first`.
template <class T>
Rotation<T> rotation_of(const Call& call, int i, int first, int64_t n, const RandomKey& key, uint32_t rank) {
    const int64_t block = block_at(call, first);
    const bool twice = twice_at(call, first + 1);
    const int bits = level_bits(call, i);
    return {n, block, tail_of(n, block), call.input<T>(i), bits, signs_of(key, rank, twice)};
}

// The codes of all ranks from input `first` on, and after them their scales.
template <class T>
std::vector<Coded<T>> payloads_at(const Call& call, int first, int ranks, const Rotation<T>& by) {
    std::vector<Coded<T>> payloads;
    for (int r = 0; r < ranks; ++r) {
        payloads.push_back({call.input<uint8_t>(first + r, packed_size(by.coded(), by.bits)),
                            call.input<T>(first + ranks + r, by.blocks())});
    }
    return payloads;
}

// The frame whose block, redundancy and key begin at integer `first`.
Frame frame_at(const Call& call, int first, int64_t n) {
    const int64_t block = block_at(call, first), redundancy = call.integer(first + 1);
    if (redundancy < 2 || redundancy > block || (redundancy & (redundancy - 1)) != 0) {
        call.fail(Error::Kind::value, "expected a redundancy of 2 to " + std::to_string(block) +
                                          ", a power of two, received " + std::to_string(redundancy));
    }
    const RandomKey key = key_at(call, first + 2);
    return {n, block, block / redundancy, signs_of(key, key.rank)};
}

// The blocks of a task.
int64_t each(int64_t block) { return kPiece / block; }

// Rotates x by the signs of a rank and rounds it. The noise of the rounding is always that of the key.
void encode(Call& call, uint32_t rank) {
    const bool fit = call.integer(2) != 0, stochastic = call.integer(3) != 0;
    const RandomKey key = key_at(call, 4);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T* x = call.input<T>(0);
        const Rotation<T> by = rotation_of<T>(call, 1, 0, n, key, rank);
        const int64_t block = by.block;
        uint8_t* codes = call.output<uint8_t>(packed_size(by.coded(), by.bits));
        T* scales = call.output<T>(by.blocks());
        GRACE_GPU(call, rotated_encode, x, by, fit, stochastic ? &key : nullptr, codes, scales);
        call.parallel(divide_up(by.blocks(), each(block)), [&](int64_t task) {
            loops<T>().rotated_codes(x, &by, fit, stochastic ? &key : nullptr, codes, scales, task * each(block),
                                     std::min(by.blocks(), (task + 1) * each(block)));
        });
    });
}

}  // namespace

GRACE_KERNEL(rotate, "x T; block, back, key -> T[rotated]") {
    call.expect(1, 6, 0);
    const int64_t block = block_at(call, 0);
    const bool back = call.integer(1) != 0;
    const RandomKey key = key_at(call, 2);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const T* x = call.input<T>(0);
        const Rotation<T> by = {n, block, tail_of(n, block), nullptr, 0, signs_of(key, key.rank)};
        T* out = call.output<T>(by.coded());
        GRACE_GPU(call, rotate, x, by, back, out);
        call.parallel(divide_up(by.blocks(), each(block)), [&](int64_t task) {
            loops<T>().rotate(x, &by, back, out, task * each(block), std::min(by.blocks(), (task + 1) * each(block)));
        });
    });
}

GRACE_KERNEL(rotated_encode, "x T, levels T; block, transforms, fit, stochastic, key -> uint8[packed], T[blocks]") {
    call.expect(2, 8, 0);
    encode(call, key_at(call, 4).rank);
}

GRACE_KERNEL(shared_rotated_encode, "x T, levels T; block, transforms, fit, stochastic, key, salt -> uint8[packed], "
                                    "T[blocks]") {
    call.expect(2, 9, 0);
    encode(call, static_cast<uint32_t>(call.integer(8)));
}

GRACE_KERNEL(rotated_sum, "[onto_ T], codes uint8..., scales T..., salts int32..., levels T; ranks, block, transforms, "
                          "n, key, has_onto -> T[n]") {
    const int ranks = ranks_at(call, 0), first = call.integer(8) != 0 ? 1 : 0;
    call.expect(first + 3 * ranks + 1, 9, 0);
    const int64_t n = call.length(3);
    const RandomKey key = key_at(call, 4);
    dispatch(call, call.input(first + 3 * ranks), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const Rotation<T> by = rotation_of<T>(call, first + 3 * ranks, 1, n, key, key.rank);
        const int64_t block = by.block;
        const std::vector<Coded<T>> payloads = payloads_at<T>(call, first, ranks, by);
        std::vector<const int32_t*> salts;
        for (int r = 0; r < ranks; ++r) salts.push_back(call.input<int32_t>(first + 2 * ranks + r, 1));
        const Target<T> to = target_of<T>(call, first == 1, n);
        GRACE_GPU(call, rotated_sum, payloads, salts, key, by, to.onto, to.out);
        std::vector<RotationKey> keys;
        for (const int32_t* salt : salts) keys.push_back(signs_of(key, static_cast<uint32_t>(*salt), by.key.twice));
        call.parallel(divide_up(by.blocks(), each(block)), [&](int64_t task) {
            loops<T>().rotated_sum(payloads.data(), keys.data(), ranks, &by, to.onto, to.out, task * each(block),
                                   std::min(by.blocks(), (task + 1) * each(block)), to.around);
        });
    });
}

GRACE_KERNEL(shared_rotated_sum, "[onto_ T], codes uint8..., scales T..., levels T; ranks, block, transforms, n, key, "
                                 "has_onto -> T[n]") {
    const int ranks = ranks_at(call, 0), first = call.integer(8) != 0 ? 1 : 0;
    call.expect(first + 2 * ranks + 1, 9, 0);
    const int64_t n = call.length(3);
    const RandomKey key = key_at(call, 4);
    dispatch(call, call.input(first + 2 * ranks), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const Rotation<T> by = rotation_of<T>(call, first + 2 * ranks, 1, n, key, key.rank);
        const int64_t block = by.block;
        const std::vector<Coded<T>> payloads = payloads_at<T>(call, first, ranks, by);
        const Target<T> to = target_of<T>(call, first == 1, n);
        GRACE_GPU(call, shared_rotated_sum, payloads, by, to.onto, to.out);
        call.parallel(divide_up(by.blocks(), each(block)), [&](int64_t task) {
            loops<T>().shared_rotated_sum(payloads.data(), ranks, &by, to.onto, to.out, task * each(block),
                                          std::min(by.blocks(), (task + 1) * each(block)), to.around);
        });
    });
}

GRACE_KERNEL(spread_in_frame, "x T, norms T; block, redundancy, key -> T[coefficients]") {
    call.expect(2, 6, 0);
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size;
        const Frame frame = frame_at(call, 0, n);
        const T* x = call.input<T>(0);
        const T* norms = call.input<T>(1, buckets_of(n, frame.width));
        T* out = call.output<T>(frame.blocks() * frame.block);
        GRACE_GPU(call, spread_in_frame, x, norms, frame, out);
        call.parallel(divide_up(frame.blocks(), each(frame.block)), [&](int64_t task) {
            loops<T>().spread_in_frame(x, norms, &frame, out, task * each(frame.block),
                                       std::min(frame.blocks(), (task + 1) * each(frame.block)));
        });
    });
}

GRACE_KERNEL(project_from_frame, "coefficients T; block, redundancy, key -> T[elements]") {
    call.expect(1, 6, 0);
    const int64_t block = block_at(call, 0), size = call.input(0).size;
    if (size % block != 0) {
        call.fail(Error::Kind::value, "expected whole blocks of " + std::to_string(block) + " coefficients, received " +
                                          std::to_string(size));
    }
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        Frame frame = frame_at(call, 0, 0);
        frame.n = size / block * frame.width;
        const T* coefficients = call.input<T>(0);
        T* out = call.output<T>(frame.n);
        GRACE_GPU(call, project_from_frame, coefficients, frame, out);
        call.parallel(divide_up(frame.blocks(), each(block)), [&](int64_t task) {
            loops<T>().project_from_frame(coefficients, &frame, out, task * each(block),
                                          std::min(frame.blocks(), (task + 1) * each(block)));
        });
    });
}

GRACE_KERNEL(largest_of_blocks, "x T; block, kept, last -> T[x]") {
    call.expect(1, 3, 0);
    const int64_t block = block_at(call, 0), kept = call.integer(1), last = call.integer(2);
    for (const int64_t k : {kept, last}) {
        if (k < 1 || k > block) {
            call.fail(Error::Kind::value, "expected 1 to " + std::to_string(block) + " elements of a block, received " +
                                              std::to_string(k));
        }
    }
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const int64_t n = call.input(0).size, blocks = divide_up(n, block);
        const T* x = call.input<T>(0);
        T* out = call.output<T>(n);
        GRACE_GPU(call, largest_of_blocks, x, block, kept, last, out, n);
        call.parallel(divide_up(blocks, each(block)), [&](int64_t task) {
            Scratch<WordOf<T>> sizes(block);
            for (int64_t i = task * each(block); i < std::min(blocks, (task + 1) * each(block)); ++i) {
                const T* mine = x + i * block;
                const int64_t length = std::min(block, n - i * block), k = i + 1 < blocks ? kept : last;
                for (int64_t j = 0; j < length; ++j) sizes[j] = magnitude_bits(mine[j]);
                const WordOf<T> least = k < length ? kth_largest(sizes.data(), length, k) : 0;
                for (int64_t j = 0; j < length; ++j) {
                    out[i * block + j] = magnitude_bits(mine[j]) >= least ? mine[j] : T(0);
                }
            }
        });
    });
}

GRACE_KERNEL(recover_sparse, "z T; n, block, reduction, rounds, key; share, noise -> T[n]") {
    call.expect(1, 8, 2);
    const int64_t n = call.length(0), block = block_at(call, 1), reduction = call.integer(2), rounds = call.integer(3);
    const RandomKey key = key_at(call, 4);
    const double share = call.number(0), noise = call.number(1);
    if (reduction < 1 || reduction > kShortestRotation) {
        call.fail(Error::Kind::value, "expected 1 to " + std::to_string(kShortestRotation) +
                                          " elements per measurement, received " + std::to_string(reduction));
    }
    if (rounds < 1 || rounds > 1 << 20) {
        call.fail(Error::Kind::value, "expected at least one round, received " + std::to_string(rounds));
    }
    dispatch(call, call.input(0), [&](auto* type) {
        using T = of_pointer<decltype(type)>;
        const Rotation<T> by = {n, block, tail_of(n, block), nullptr, 0, signs_of(key, key.rank)};
        const int64_t whole = n / block * measurements(block, reduction);
        const T* z = call.input<T>(0, whole + (by.tail > 0 ? measurements(by.tail, reduction) : 0));
        T* out = call.output<T>(n);
        const int times = static_cast<int>(rounds);
        GRACE_GPU(call, recover_sparse, z, by, reduction, times, share, noise, out);
        call.parallel(divide_up(by.blocks(), each(block)), [&](int64_t task) {
            loops<T>().recover_sparse(z, &by, reduction, times, share, noise, out, task * each(block),
                                      std::min(by.blocks(), (task + 1) * each(block)));
        });
    });
}

}  // namespace grace
