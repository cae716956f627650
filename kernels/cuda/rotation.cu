// Rotations in blocks. A block of threads rotates a block of elements, which it holds in shared memory.
#include "ranks.h"

namespace grace {
namespace gpu {
namespace {

template <class T> struct Salted {
    Coded<T> coded;
    const int32_t* salt;
};

// The Hadamard transform in place, with the stages of the CPU. All threads must take part.
template <class T> __device__ void hadamard(T* x, int64_t n) {
    for (int64_t distance = 1; distance < n; distance *= 2) {
        __syncthreads();
        for (int64_t pair = threadIdx.x; pair < n / 2; pair += kThreads) {
            const int64_t i = (pair & ~(distance - 1)) * 2 + (pair & (distance - 1));
            const T a = x[i], b = x[i + distance];
            x[i] = a + b;
            x[i + distance] = a - b;
        }
    }
    __syncthreads();
}

// x with the sign of element i.
template <class T> __device__ T with_sign(const RandomKey& signs, int64_t i, T x) {
    uint32_t random[4];
    philox(signs, uint32_t(i / 128), random);
    return signed_by(random[i / 32 % 4], int(i % 32), x);
}

// The value of thread 0, for all threads.
template <class V> __device__ V of_first(V mine) {
    __shared__ V held;
    __syncthreads();
    if (threadIdx.x == 0) held = mine;
    __syncthreads();
    return held;
}

// H D' H y of a whole block, in place, with the factor `unit` on what D' negates; or H y, by one transform. All threads
// must take part.
template <class T> __device__ void turn(const RotationKey& key, int64_t first, T unit, int64_t width, T* y) {
    hadamard(y, width);
    if (!key.twice) return;
    for (int64_t i = threadIdx.x; i < width; i += kThreads) y[i] = with_sign(key.second, first + i, y[i]) * unit;
    hadamard(y, width);
}

// y = H D' H D x / d of a block in shared memory, with zeros from `length` on; or H D x, by one transform. x may be y.
// All threads must take part.
template <class T>
__device__ void rotate_block(const T* x, const RotationKey& key, int64_t first, int64_t length, int64_t width, T* y) {
    for (int64_t i = threadIdx.x; i < width; i += kThreads) {
        y[i] = i < length ? with_sign(key.first, first + i, x[i]) : T(0);
    }
    turn(key, first, T(1) / T(width), width, y);
}

// The inverse of `rotate_block` with two transforms on a whole block, in place. All threads must take part.
template <class T> __device__ void rotate_back(const RotationKey& key, int64_t first, int64_t width, T* y) {
    turn(key, first, T(1) / T(width), width, y);
    for (int64_t i = threadIdx.x; i < width; i += kThreads) y[i] = with_sign(key.first, first + i, y[i]);
}

// Each coefficient is added up where it is returned, by one thread.
template <class T> __global__ void spread_kernel(const T* x, const T* norms, Frame frame, T* out) {
    __shared__ T rest[kRotation / 2], found[kRotation];
    const int64_t size = frame.block, width = frame.width;
    for (int64_t block = blockIdx.x; block < frame.blocks(); block += gridDim.x) {
        const int64_t first = block * size, from = block * width;
        __syncthreads();
        for (int64_t i = threadIdx.x; i < width; i += kThreads) rest[i] = from + i < frame.n ? x[from + i] : T(0);
        T bound = norms[block] * T(1 / sqrt(double(size)));
        for (int projection = 0; projection <= kProjections; ++projection, bound *= T(0.5)) {
            const bool last = projection == kProjections;
            __syncthreads();
            rotate_block(rest, frame.key, first, width, size, found);
            for (int64_t i = threadIdx.x; i < size; i += kThreads) {
                if (!last) found[i] = clipped(found[i], bound);
                out[first + i] = (projection == 0 ? T(0) : out[first + i]) + found[i];
            }
            if (last) break;
            rotate_back(frame.key, first, size, found);
            for (int64_t i = threadIdx.x; i < width; i += kThreads) rest[i] -= found[i];
        }
    }
}

template <class T> __global__ void project_kernel(const T* coefficients, Frame frame, T* out) {
    __shared__ T held[kRotation];
    for (int64_t block = blockIdx.x; block < frame.blocks(); block += gridDim.x) {
        const int64_t first = block * frame.block;
        __syncthreads();
        for (int64_t i = threadIdx.x; i < frame.block; i += kThreads) held[i] = coefficients[first + i];
        rotate_back(frame.key, first, frame.block, held);
        for (int64_t i = threadIdx.x; i < frame.width; i += kThreads) out[block * frame.width + i] = held[i];
    }
}

// The k-th largest magnitude of a block is found bit by bit.
template <class T>
__global__ void largest_kernel(const T* x, int64_t block, int64_t kept, int64_t last, T* out, int64_t n) {
    using Word = typename Format<T>::Word;
    const int64_t blocks = (n + block - 1) / block;
    for (int64_t i = blockIdx.x; i < blocks; i += gridDim.x) {
        const T* mine = x + i * block;
        const int64_t length = n - i * block < block ? n - i * block : block, k = i + 1 < blocks ? kept : last;
        Word least = 0;
        for (int bit = 8 * int(sizeof(T)) - 2; k < length && bit >= 0; --bit) {
            const Word wanted = least | Word(1) << bit;
            int64_t count = 0;
            for (int64_t j = threadIdx.x; j < length; j += kThreads) count += magnitude_bits(mine[j]) >= wanted ? 1 : 0;
            if (of_first(joined(count, Added<int64_t>())) >= k) least = wanted;
        }
        for (int64_t j = threadIdx.x; j < length; j += kThreads) {
            out[i * block + j] = magnitude_bits(mine[j]) >= least ? mine[j] : T(0);
        }
    }
}

// `copies` and `found` have room for all elements.
template <class T>
__global__ void recover_kernel(const T* z, Rotation<T> by, int64_t reduction, int rounds, double share, double noise,
                               T* copies, T* found, T* out) {
    __shared__ T held[kRotation];
    for (int64_t block = blockIdx.x; block < by.blocks(); block += gridDim.x) {
        const int64_t first = block * by.block, width = by.width(block);
        const int64_t m = measurements(width, reduction);
        const double per = double(width) / double(m);
        const T* mine = z + block * measurements(by.block, reduction);
        T *copy = copies + first, *guessed = found + first;
        double squares = 0;
        for (int64_t i = threadIdx.x; i < m; i += kThreads) squares += double(mine[i] * mine[i]);
        Belief<T> now = first_belief(T(of_first(joined(squares, Added<double>()))), m, per, share, noise);
        for (int64_t i = threadIdx.x; i < width; i += kThreads) held[i] = i < m ? mine[i] : T(0);
        rotate_back(by.key, first, width, held);
        for (int64_t i = threadIdx.x; i < width; i += kThreads) copy[i] = held[i] * T(per);
        for (int round = 1;; ++round) {
            now = with_factors(now);
            double sums[3] = {0, 0, 0};
            for (int64_t i = threadIdx.x; i < width; i += kThreads) {
                const Guess<T> guess = guess_of(copy[i], now);
                guessed[i] = guess.estimate;
                sums[0] += double(guess.chance);
                sums[1] += double(guess.second);
                sums[2] += double(guess.second - guess.estimate * guess.estimate);
            }
            if (round == rounds) break;
            for (double& sum : sums) sum = of_first(joined(sum, Added<double>()));
            T trust;
            now = next_belief(now, T(sums[0]), T(sums[1]), T(sums[2]), width, &trust);
            for (int64_t i = threadIdx.x; i < width; i += kThreads) {
                guessed[i] = (guessed[i] - copy[i] * trust) / (T(1) - trust);
            }
            rotate_block(guessed, by.key, first, width, width, held);
            for (int64_t i = threadIdx.x; i < width; i += kThreads) held[i] = i < m ? mine[i] - held[i] : T(0);
            rotate_back(by.key, first, width, held);
            for (int64_t i = threadIdx.x; i < width; i += kThreads) copy[i] = guessed[i] + held[i] * T(per);
            now.error = next_error(now.error, per, noise);
        }
        for (int64_t i = threadIdx.x; i < width && first + i < by.n; i += kThreads) out[first + i] = guessed[i];
    }
}

template <class T> __global__ void rotate_kernel(const T* x, Rotation<T> by, bool back, T* out) {
    __shared__ T held[kRotation];
    for (int64_t block = blockIdx.x; block < by.blocks(); block += gridDim.x) {
        const int64_t first = block * by.block, width = by.width(block);
        __syncthreads();
        if (back) {
            for (int64_t i = threadIdx.x; i < width; i += kThreads) held[i] = first + i < by.n ? x[first + i] : T(0);
            rotate_back(by.key, first, width, held);
        } else {
            rotate_block(x + first, by.key, first, by.n - first, width, held);
        }
        for (int64_t i = threadIdx.x; i < width; i += kThreads) {
            out[first + i] = held[i];
        }
    }
}

template <class T>
__global__ void rotated_codes_kernel(const T* x, Rotation<T> by, bool fit, bool stochastic, RandomKey noise,
                                     uint8_t* codes, T* scales) {
    __shared__ T rotated[kRotation];
    for (int64_t block = blockIdx.x; block < by.blocks(); block += gridDim.x) {
        const int64_t first = block * by.block, width = by.width(block);
        double squares = 0;
        // Elements that count as infinite show in the scale.
        uint32_t shown = 0;
        __syncthreads();
        for (int64_t i = threadIdx.x; i < width; i += kThreads) {
            const T mine = rotated[i] = first + i < by.n ? x[first + i] : T(0);
            squares += double(mine) * double(mine);
            if (magnitude_bits(mine) > largest_bits<T>()) shown = 1;
        }
        shown = of_first(joined(shown, Larger<uint32_t>()));
        rotate_block(rotated, by.key, first, by.n - first, width, rotated);
        T reach, norm = 0;
        if (fit) {
            norm = T(sqrt(of_first(joined(squares, Added<double>()))));
            reach = norm * (by.key.twice ? T(1 / sqrt(double(width))) : T(1));
        } else {
            typename Format<T>::Word most = 0;
            for (int64_t i = threadIdx.x; i < width; i += kThreads) {
                const auto mine = magnitude_bits(rotated[i]);
                most = mine > most ? mine : most;
            }
            reach = bits_as<T>(of_first(joined(most, Larger<typename Format<T>::Word>())));
        }
        const int count = 1 << by.bits;
        double product = 0;
        for (int64_t group = threadIdx.x; group < width / 8; group += kThreads) {
            uint32_t random[8], found[8];
            if (stochastic) {
                philox(noise, uint32_t((first + 8 * group) / 4), random);
                philox(noise, uint32_t((first + 8 * group) / 4 + 1), random + 4);
            }
            for (int j = 0; j < 8; ++j) {
                const T value = rotated[8 * group + j], share = stochastic ? T(1) - T(grace::uniform(random[j])) : T(0.5);
                found[j] = index_of_level(value, by.levels, count, reach, share);
                product += double(value * by.levels[found[j]]);
            }
            store_codes(found, by.bits, first / 8 + group, 8, by.coded(), codes);
        }
        product = fit ? joined(product, Added<double>()) : 0;
        const T scale = (fit ? fitted_scale(norm, T(product)) : reach) / (fit && !by.key.twice ? T(1) : T(width));
        if (threadIdx.x == 0) scales[block] = shown != 0 ? T(__builtin_nan("")) : scale;
    }
}

// The sum stays in registers until all ranks are in it.
template <class T>
__global__ void rotated_sum_kernel(Ranks<Salted<T>> ranks, Rotation<T> by, RandomKey key, const T* onto, T* out) {
    __shared__ T values[kRotation];
    constexpr int each = int(kRotation) / kThreads;
    for (int64_t block = blockIdx.x; block < by.blocks(); block += gridDim.x) {
        const int64_t first = block * by.block, width = by.width(block);
        T sum[each];
        for (int r = 0; r < ranks.count; ++r) {
            const Salted<T>& rank = ranks.parts[r];
            __syncthreads();
            for (int64_t i = threadIdx.x; i < width; i += kThreads) {
                values[i] = by.levels[code_at(rank.coded.codes, by.bits, first + i)];
            }
            const RotationKey signs = signs_of(key, uint32_t(*rank.salt), by.key.twice);
            turn(signs, first, T(1), width, values);
            const T scale = rank.coded.scales[block];
#pragma unroll
            for (int j = 0; j < each; ++j) {
                const int64_t i = threadIdx.x + int64_t(j) * kThreads;
                if (i >= width || first + i >= by.n) continue;
                const T value = with_sign(signs.first, first + i, values[i]) * scale;
                sum[j] = r > 0 ? sum[j] + value : onto == nullptr ? value : onto[first + i] + value;
            }
        }
#pragma unroll
        for (int j = 0; j < each; ++j) {
            const int64_t i = threadIdx.x + int64_t(j) * kThreads;
            if (i < width && first + i < by.n) out[first + i] = sum[j];
        }
    }
}

// The sum of scale q over some ranks that share a rotation, and over those whose sum is `begun`. It is rotated back with
// the last ranks; before them it goes to `partial`.
template <class T>
__global__ void shared_sum_kernel(Ranks<Coded<T>> ranks, Rotation<T> by, const T* begun, T* partial, const T* onto,
                                  T* out) {
    __shared__ T values[kRotation];
    for (int64_t block = blockIdx.x; block < by.blocks(); block += gridDim.x) {
        const int64_t first = block * by.block, width = by.width(block);
        T* sums = partial == nullptr ? values : partial + first;
        __syncthreads();
        for (int64_t i = threadIdx.x; i < width; i += kThreads) {
            const auto sent = [&](const Coded<T>& rank) {
                return by.levels[code_at(rank.codes, by.bits, first + i)] * rank.scales[block];
            };
            T sum = begun == nullptr ? sent(ranks.parts[0]) : begun[first + i] + sent(ranks.parts[0]);
            for (int r = 1; r < ranks.count; ++r) sum = sum + sent(ranks.parts[r]);
            sums[i] = sum;
        }
        if (partial != nullptr) continue;
        turn(by.key, first, T(1), width, values);
        for (int64_t i = threadIdx.x; i < width && first + i < by.n; i += kThreads) {
            const T value = with_sign(by.key.first, first + i, values[i]);
            out[first + i] = onto == nullptr ? value : onto[first + i] + value;
        }
    }
}

}  // namespace

template <class T> void rotate(const Stream& on, const T* x, const Rotation<T>& by, bool back, T* out) {
    launch(on, blocks_for(by.blocks(), 1), rotate_kernel<T>, x, by, back, out);
}

template <class T> void spread_in_frame(const Stream& on, const T* x, const T* norms, const Frame& frame, T* out) {
    launch(on, blocks_for(frame.blocks(), 1), spread_kernel<T>, x, norms, frame, out);
}

template <class T> void project_from_frame(const Stream& on, const T* coefficients, const Frame& frame, T* out) {
    launch(on, blocks_for(frame.blocks(), 1), project_kernel<T>, coefficients, frame, out);
}

template <class T>
void largest_of_blocks(const Stream& on, const T* x, int64_t block, int64_t kept, int64_t last, T* out, int64_t n) {
    launch(on, blocks_for(divide_up(n, block), 1), largest_kernel<T>, x, block, kept, last, out, n);
}

template <class T>
void recover_sparse(const Stream& on, const T* z, const Rotation<T>& by, int64_t reduction, int rounds, double share,
                    double noise, T* out) {
    T *copies = scratch<T>(on, by.coded()), *found = scratch<T>(on, by.coded());
    launch(on, blocks_for(by.blocks(), 1), recover_kernel<T>, z, by, reduction, rounds, share, noise, copies, found, out);
}

template <class T>
void rotated_encode(const Stream& on, const T* x, const Rotation<T>& by, bool fit, const RandomKey* noise,
                    uint8_t* codes, T* scales) {
    launch(on, blocks_for(by.blocks(), 1), rotated_codes_kernel<T>, x, by, fit, noise != nullptr,
           noise == nullptr ? RandomKey() : *noise, codes, scales);
}

template <class T>
void rotated_sum(const Stream& on, const std::vector<Coded<T>>& ranks, const std::vector<const int32_t*>& salts,
                 const RandomKey& key, const Rotation<T>& by, const T* onto, T* out) {
    std::vector<Salted<T>> all;
    for (size_t r = 0; r < ranks.size(); ++r) all.push_back({ranks[r], salts[r]});
    in_turns(all, [&](const Ranks<Salted<T>>& some, bool begins, bool) {
        launch(on, blocks_for(by.blocks(), 1), rotated_sum_kernel<T>, some, by, key, begins ? onto : out, out);
    });
}

template <class T>
void shared_rotated_sum(const Stream& on, const std::vector<Coded<T>>& ranks, const Rotation<T>& by, const T* onto,
                        T* out) {
    T* sums = ranks.size() > kRanks ? scratch<T>(on, by.coded()) : nullptr;
    in_turns(ranks, [&](const Ranks<Coded<T>>& some, bool begins, bool ends) {
        launch(on, blocks_for(by.blocks(), 1), shared_sum_kernel<T>, some, by, begins ? nullptr : sums,
               ends ? nullptr : sums, onto, out);
    });
}

#define GRACE_MAKE(T)                                                                                                \
    template void rotate<T>(const Stream&, const T*, const Rotation<T>&, bool, T*);                                  \
    template void spread_in_frame<T>(const Stream&, const T*, const T*, const Frame&, T*);                           \
    template void project_from_frame<T>(const Stream&, const T*, const Frame&, T*);                                  \
    template void largest_of_blocks<T>(const Stream&, const T*, int64_t, int64_t, int64_t, T*, int64_t);             \
    template void recover_sparse<T>(const Stream&, const T*, const Rotation<T>&, int64_t, int, double, double, T*);  \
    template void rotated_encode<T>(const Stream&, const T*, const Rotation<T>&, bool, const RandomKey*, uint8_t*, T*); \
    template void rotated_sum<T>(const Stream&, const std::vector<Coded<T>>&, const std::vector<const int32_t*>&,    \
                                 const RandomKey&, const Rotation<T>&, const T*, T*);                            \
    template void shared_rotated_sum<T>(const Stream&, const std::vector<Coded<T>>&, const Rotation<T>&, const T*, T*);
GRACE_MAKE(float)
GRACE_MAKE(double)
#undef GRACE_MAKE

}  // namespace gpu
}  // namespace grace
