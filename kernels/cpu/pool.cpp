#include "grace/pool.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace grace {
namespace {

// Tells AddressSanitizer which memory must not be used: the end of a block beyond the requested size, and kept blocks.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGuard = 64;
void forbid(void* from, size_t bytes) { __asan_poison_memory_region(from, bytes); }
void allow(void* from, size_t bytes) { __asan_unpoison_memory_region(from, bytes); }
#else
constexpr size_t kGuard = 0;
void forbid(void*, size_t) {}
void allow(void*, size_t) {}
#endif

constexpr size_t kHeader = 64;        // before every block; keeps the alignment
constexpr size_t kHuge = 2u << 20;    // blocks of this size or more are mapped, in huge pages if the system allows it
constexpr size_t kLargest = size_t(1) << 46;

struct Header {
    size_t bytes;  // the size of the block, including the header
};

struct Kept {
    void* block;
    uint64_t since;  // the number of earlier releases
};

struct Blocks {
    std::mutex mutex;
    std::map<size_t, std::deque<Kept>> free;  // by size class, oldest first
    size_t kept = 0, in_use = 0, peak = 0;
    uint64_t releases = 0;
};

// It is never destroyed, because arrays may outlive the module. If a process forks while another thread holds the
// mutex, the mutex would stay locked in the child; so the fork handlers below take care of it.
Blocks& blocks() {
    static Blocks* all = [] {
        pthread_atfork([] { blocks().mutex.lock(); }, [] { blocks().mutex.unlock(); },
                       [] { blocks().mutex.unlock(); });
        return new Blocks;
    }();
    return *all;
}

// Sizes are rounded up to one of eight steps per power of two, so that tensors of similar size share blocks.
size_t size_class(size_t bytes) {
    size_t power = 256;
    while (power < bytes) power *= 2;
    const size_t step = power / 16 > 64 ? power / 16 : 64;
    const size_t rounded = (bytes + step - 1) / step * step;
    return rounded < kHuge ? rounded : (rounded + kHuge - 1) / kHuge * kHuge;
}

void* from_system(size_t bytes) {
    if (bytes < kHuge) {
        void* block = std::aligned_alloc(kHeader, bytes);
        if (block == nullptr) throw std::bad_alloc();
        return block;
    }
    // Align the mapping, because only aligned huge pages can be used.
    char* start = static_cast<char*>(
        mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (start == MAP_FAILED) throw std::bad_alloc();
    const size_t skip = (kHuge - reinterpret_cast<uintptr_t>(start) % kHuge) % kHuge;
    if (skip > 0) munmap(start, skip);
    if (skip < kHuge) munmap(start + skip + bytes, kHuge - skip);
#ifdef MADV_HUGEPAGE
    madvise(start + skip, bytes, MADV_HUGEPAGE);
#endif
    return start + skip;
}

void to_system(void* block, size_t bytes) {
    allow(block, bytes);
    if (bytes < kHuge) {
        std::free(block);
    } else {
        munmap(block, bytes);
    }
}

}  // namespace

void* acquire(size_t bytes) {
    if (bytes > kLargest) throw std::bad_alloc();
    const size_t size = size_class(kHeader + bytes + kGuard);
    Blocks& all = blocks();
    void* block = nullptr;
    {
        std::lock_guard<std::mutex> lock(all.mutex);
        auto found = all.free.find(size);
        if (found != all.free.end() && !found->second.empty()) {
            block = found->second.back().block;
            found->second.pop_back();
            all.kept -= size;
        }
        all.in_use += size;
        if (all.in_use > all.peak) all.peak = all.in_use;
    }
    if (block == nullptr) {
        try {
            block = from_system(size);
        } catch (...) {
            std::lock_guard<std::mutex> lock(all.mutex);
            all.in_use -= size;
            throw;
        }
    }
    allow(block, size);
    static_cast<Header*>(block)->bytes = size;
    char* data = static_cast<char*>(block) + kHeader;
    forbid(data + bytes, size - kHeader - bytes);
    return data;
}

void release(void* data) noexcept {
    if (data == nullptr) return;
    void* block = static_cast<char*>(data) - kHeader;
    const size_t size = static_cast<Header*>(block)->bytes;
    Blocks& all = blocks();
    std::vector<std::pair<void*, size_t>> dropped;
    {
        std::lock_guard<std::mutex> lock(all.mutex);
        all.in_use -= size;
        try {
            all.free[size].push_back({block, ++all.releases});
            all.kept += size;
            forbid(block, size);
            block = nullptr;
            // Free the block that was unused for the longest time. Otherwise sizes that are no longer requested would
            // displace those in use.
            while (all.in_use + all.kept > 2 * all.peak) {
                auto oldest = all.free.end();
                for (auto at = all.free.begin(); at != all.free.end(); ++at) {
                    if (at->second.empty()) continue;
                    if (oldest == all.free.end() || at->second.front().since < oldest->second.front().since) oldest = at;
                }
                dropped.push_back({oldest->second.front().block, oldest->first});
                oldest->second.pop_front();
                all.kept -= oldest->first;
            }
        } catch (...) {
            // No memory for the list of kept blocks: return this block to the system, and keep the others for now.
        }
    }
    if (block != nullptr) to_system(block, size);
    for (const auto& [old, bytes] : dropped) to_system(old, bytes);
}

size_t kept_bytes() {
    std::lock_guard<std::mutex> lock(blocks().mutex);
    return blocks().kept;
}

// --- threads ---------------------------------------------------------------------------------------------------------

namespace {

// One set of tasks. Helpers and the caller take the next task until none is left.
struct Job {
    const std::function<void(int64_t)>* task;
    int64_t tasks;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable finished;
    std::exception_ptr failure;

    void work() {
        for (int64_t i = next.fetch_add(1); i < tasks; i = next.fetch_add(1)) {
            try {
                (*task)(i);
            } catch (...) {
                std::lock_guard<std::mutex> lock(mutex);
                if (!failure) failure = std::current_exception();
            }
            if (done.fetch_add(1) + 1 == tasks) {
                std::lock_guard<std::mutex> lock(mutex);
                finished.notify_all();
            }
        }
    }
};

class Helpers {
  public:
    // Starts threads until there are `helpers` of them, if the system allows it.
    void hire(int helpers) {
        std::lock_guard<std::mutex> lock(mutex_);
        try {
            for (; threads_ < helpers; ++threads_) std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
            // The system refuses more threads. The existing ones and the caller do the work.
        }
    }
    void offer(std::function<void()> work) {
        std::lock_guard<std::mutex> lock(mutex_);
        // No helper would ever take the task.
        if (threads_ == 0) return;
        waiting_.push_back(std::move(work));
        wake_.notify_one();
    }

  private:
    void serve() {
        for (;;) {
            std::function<void()> work;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [this] { return !waiting_.empty(); });
                work = std::move(waiting_.back());
                waiting_.pop_back();
            }
            work();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::function<void()>> waiting_;
    int threads_ = 0;
};

// A forked child has none of its parent's threads; so it starts its own helpers.
std::atomic<Helpers*> of_process{nullptr};

Helpers& helpers() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { of_process = nullptr; });
    static_cast<void>(registered);
    Helpers* mine = of_process;
    if (mine == nullptr) {
        Helpers* made = new Helpers;
        if (of_process.compare_exchange_strong(mine, made)) {
            mine = made;
        } else {
            delete made;
        }
    }
    return *mine;
}

}  // namespace

void run_tasks(int64_t tasks, int threads, const std::function<void(int64_t)>& task, const Schedule& schedule) {
    if (tasks <= 1 || threads <= 1) {
        for (int64_t i = 0; i < tasks; ++i) task(i);
        return;
    }
    auto job = std::make_shared<Job>();
    job->task = &task;
    job->tasks = tasks;
    // A late helper finds no task. The job lives until the last helper has seen it.
    const int others = static_cast<int>(tasks < threads ? tasks : threads) - 1;
    if (!schedule) helpers().hire(others);
    for (int i = 0; i < others; ++i) {
        schedule ? schedule([job] { job->work(); }) : helpers().offer([job] { job->work(); });
    }
    job->work();
    std::unique_lock<std::mutex> lock(job->mutex);
    job->finished.wait(lock, [&] { return job->done.load() == tasks; });
    if (job->failure) std::rethrow_exception(job->failure);
}

}  // namespace grace
