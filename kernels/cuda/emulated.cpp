// All GPU kernels, compiled for the emulator, and the emulator's threads.
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "emulator.h"

dim3 blockIdx, threadIdx, gridDim;

namespace grace {
namespace emulator {

uint64_t slots[1024];

namespace {

enum class State { ready, at_block, at_warp, done };

constexpr size_t kStack = 256 << 10;

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(kStack);
    State state;
};

std::vector<Fiber> fibers(256);
ucontext_t scheduler;
Fiber* current;
const std::function<void()>* work;

void enter() {
    (*work)();
    current->state = State::done;
    swapcontext(&current->context, &scheduler);
}

void wait(State state) {
    Fiber* me = current;
    const unsigned index = threadIdx.x;
    me->state = state;
    swapcontext(&me->context, &scheduler);
    threadIdx.x = index;
}

// Resumes threads that wait for each other. Returns whether there were any.
bool release(unsigned threads) {
    bool any = false;
    for (unsigned first = 0; first < threads; first += 32) {
        const auto waits = [&](const Fiber& fiber) { return fiber.state == State::at_warp; };
        const auto begin = fibers.begin() + first, end = begin + 32;
        if (!std::all_of(begin, end, waits)) continue;
        for (auto fiber = begin; fiber != end; ++fiber) fiber->state = State::ready;
        any = true;
    }
    if (any) return true;
    const auto waits = [&](const Fiber& fiber) { return fiber.state == State::at_block; };
    if (!std::all_of(fibers.begin(), fibers.begin() + threads, waits)) return false;
    for (unsigned t = 0; t < threads; ++t) fibers[t].state = State::ready;
    return true;
}

// A number that shuffles the order; 0 keeps it.
uint64_t order_seed() {
    const char* given = std::getenv("GRACE_EMULATED_ORDER");
    return given == nullptr ? 0 : std::strtoull(given, nullptr, 10);
}

std::vector<unsigned> order_of(unsigned n, uint64_t& state) {
    std::vector<unsigned> order(n);
    for (unsigned i = 0; i < n; ++i) order[i] = i;
    for (unsigned i = n; state != 0 && i > 1; --i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        std::swap(order[i - 1], order[(state >> 33) % i]);
    }
    return order;
}

}  // namespace

void meet_block() { wait(State::at_block); }
void meet_warp() { wait(State::at_warp); }

void run(unsigned blocks, unsigned threads, const std::function<void()>& body) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    if (threads != fibers.size()) throw std::logic_error("emulator: every block has 256 threads");
    uint64_t seed = order_seed();
    work = &body;
    gridDim = dim3(blocks);
    for (const unsigned block : order_of(blocks, seed)) {
        blockIdx.x = block;
        for (Fiber& fiber : fibers) {
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, enter, 0);
            fiber.state = State::ready;
        }
        const std::vector<unsigned> order = order_of(threads, seed);
        do {
            for (const unsigned t : order) {
                if (fibers[t].state != State::ready) continue;
                current = &fibers[t];
                threadIdx.x = t;
                swapcontext(&scheduler, &current->context);
            }
        } while (release(threads));
        for (const Fiber& fiber : fibers) {
            if (fiber.state != State::done) throw std::logic_error("emulator: not all threads came to a barrier");
        }
    }
}

}  // namespace emulator
}  // namespace grace

#include "arithmetic.cu"
#include "codings.cu"
#include "device.cu"
#include "levels.cu"
#include "matrices.cu"
#include "rotation.cu"
#include "sketch.cu"
#include "sparse.cu"
#include "widths.cu"
