// Memory for results. Released blocks are reused, because new pages take longer than a codec.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace grace {

// Returns at least `bytes` bytes, aligned to 64. Throws std::bad_alloc. Any thread may release any block.
void* acquire(size_t bytes);
void release(void* block) noexcept;

// The bytes kept for reuse. Kept and used bytes together are at most twice the peak of the used bytes.
size_t kept_bytes();

// Makes another thread run a function soon.
using Schedule = std::function<void(std::function<void()>)>;

// Runs task(0) .. task(tasks - 1) on at most `threads` threads, including the caller's. Rethrows exceptions of tasks.
// The other threads come from `schedule`, or from a pool of this library.
void run_tasks(int64_t tasks, int threads, const std::function<void(int64_t)>& task, const Schedule& schedule = {});

// A block that is released at the end of the scope.
template <class T> class Scratch {
  public:
    explicit Scratch(int64_t n) : data_(static_cast<T*>(acquire(sizeof(T) * static_cast<size_t>(n)))) {}
    ~Scratch() { release(data_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    T* data() const { return data_; }
    T& operator[](int64_t i) const { return data_[i]; }

  private:
    T* data_;
};

}  // namespace grace
