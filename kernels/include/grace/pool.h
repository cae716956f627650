// Memory for results: blocks are kept and used again, because fresh pages cost more than a codec.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace grace {

// At least `bytes` bytes, aligned to 64. Throws std::bad_alloc. Any thread may release any block.
void* acquire(size_t bytes);
void release(void* block) noexcept;

// Bytes that are kept for use again: together with those in use at most twice what was ever in use at once.
size_t kept_bytes();

// Has a function run on some other thread, soon.
using Schedule = std::function<void(std::function<void()>)>;

// Runs task(0) .. task(tasks - 1) on at most `threads` threads, the caller's among them; rethrows what a task throws.
// The others come from `schedule`, or are threads of our own.
void run_tasks(int64_t tasks, int threads, const std::function<void(int64_t)>& task, const Schedule& schedule = {});

// A block that is released at the end of its scope.
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
