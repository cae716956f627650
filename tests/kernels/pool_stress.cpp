// Threads that share blocks of memory and the pool's helpers. A test builds it with ThreadSanitizer.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "grace/pool.h"

namespace {

std::mutex mutex;
std::vector<void*> shared;  // blocks that one thread acquires and another releases

void exchange(void* block) {
    std::lock_guard<std::mutex> lock(mutex);
    if (block != nullptr) shared.push_back(block);
    if (shared.size() > 16) {
        grace::release(shared.front());
        shared.erase(shared.begin());
    }
}

bool stress(int seed) {
    bool good = true;
    for (int round = 0; round < 200; ++round) {
        const int64_t tasks = 1 + (seed + round) % 40;
        grace::Scratch<int64_t> results(tasks);
        grace::run_tasks(tasks, 1 + round % 5, [&](int64_t i) {
            grace::Scratch<uint8_t> mine(1000 * (i + 1));
            std::memset(mine.data(), static_cast<int>(i), 1000);
            results[i] = mine[999] + i;
        });
        for (int64_t i = 0; i < tasks; ++i) good = good && results[i] == 2 * i;
        void* block = grace::acquire(static_cast<size_t>(1) << (round % 23));
        std::memset(block, round, 1);
        exchange(block);
        try {
            grace::run_tasks(8, 4, [&](int64_t i) {
                if (i == round % 8) throw std::runtime_error("wanted");
            });
            good = false;
        } catch (const std::runtime_error&) {
        }
    }
    return good;
}

}  // namespace

int main() {
    bool good[6];
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i) threads.emplace_back([&good, i] { good[i] = stress(7 * i); });
    for (std::thread& thread : threads) thread.join();
    for (void* block : shared) grace::release(block);
    bool all = true;
    for (const bool each : good) all = all && each;
    std::puts(all ? "all right" : "wrong results");
    return all ? 0 : 1;
}
