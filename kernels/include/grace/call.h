// One call of a kernel, independent of the framework: flat arrays and numbers in, flat arrays out.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace grace {
namespace gpu {
struct Stream;
}

enum class DType { float16, bfloat16, float32, float64, boolean, uint8, int8, int16, int32, int64 };

const char* name_of(DType dtype);
int64_t size_of(DType dtype);

template <class T> constexpr DType dtype_of();
template <> constexpr DType dtype_of<float>() { return DType::float32; }
template <> constexpr DType dtype_of<double>() { return DType::float64; }
template <> constexpr DType dtype_of<uint8_t>() { return DType::uint8; }
template <> constexpr DType dtype_of<int8_t>() { return DType::int8; }
template <> constexpr DType dtype_of<int16_t>() { return DType::int16; }
template <> constexpr DType dtype_of<int32_t>() { return DType::int32; }
template <> constexpr DType dtype_of<int64_t>() { return DType::int64; }

// A flat contiguous array. `writable` is false if the caller's memory must not be changed.
struct Array {
    void* data;
    int64_t size;
    DType dtype;
    bool writable;
};

// An error of a call. `type` and `value` are errors of the caller. `payload` means that bytes from another rank violate
// the format; `device` is an error of CUDA.
class Error : public std::runtime_error {
  public:
    enum class Kind { type, value, payload, device };
    Error(Kind kind, const std::string& text) : std::runtime_error(text), kind(kind) {}
    const Kind kind;
};

// The maximum length of an array. It keeps sizes in bytes and bits far below the range of int64.
constexpr int64_t kMost = int64_t(1) << 40;

class Call {
  public:
    Call(std::string kernel, std::vector<Array> inputs, std::vector<int64_t> integers, std::vector<double> numbers)
        : kernel_(std::move(kernel)), inputs_(std::move(inputs)), integers_(std::move(integers)),
          numbers_(std::move(numbers)) {}
    virtual ~Call() = default;

    int inputs() const { return static_cast<int>(inputs_.size()); }

    // Throws Error(value) unless the call has these numbers of inputs, integers and numbers.
    void expect(int inputs, int integers, int numbers) const;

    // Input i, whatever its dtype.
    const Array& input(int i) const;
    // Input i, which must have type T and this size; -1 means any size.
    template <class T> const T* input(int i, int64_t size = -1) const {
        return static_cast<const T*>(checked(i, dtype_of<T>(), size).data);
    }
    // The only element of input i. For the CPU only, because a kernel must not wait for a device.
    template <class T> T scalar(int i) const { return *input<T>(i, 1); }
    // Input i, which the call consumes and may change in place.
    template <class T> T* consumed(int i, int64_t size = -1) const {
        return static_cast<T*>(writable(checked(i, dtype_of<T>(), size)).data);
    }
    // Integer and number i; throw Error(value) if the call has fewer.
    int64_t integer(int i) const;
    double number(int i) const;
    // Integer i as a length; throws Error(value) unless it is in [0, kMost].
    int64_t length(int i) const;

    // The next output, of n uninitialized elements. The caller owns the memory.
    template <class T> T* output(int64_t n) { return static_cast<T*>(allocate(dtype_of<T>(), n)); }
    virtual void* allocate(DType dtype, int64_t n) = 0;
    // The last output of a kernel that judges its input: one uint8 of 0 or 1.
    virtual uint8_t* verdict() { return output<uint8_t>(1); }

    // Runs task(0) .. task(tasks - 1) on as many threads as the framework uses. Rethrows exceptions of tasks.
    virtual void parallel(int64_t tasks, const std::function<void(int64_t)>& task) = 0;
    virtual int threads() const = 0;

    // The stream on a GPU, null on the CPU. With a stream, the arrays are in device memory, and the host must not read
    // them.
    virtual const gpu::Stream* gpu() const { return nullptr; }

    [[noreturn]] void fail(Error::Kind kind, const std::string& text) const;

  private:
    const Array& checked(int i, DType dtype, int64_t size) const;
    const Array& writable(const Array& array) const;

    std::string kernel_;
    std::vector<Array> inputs_;
    std::vector<int64_t> integers_;
    std::vector<double> numbers_;
};

using Kernel = void (*)(Call&);

// The kernel with this name, or null.
Kernel find(const std::string& name);
// What each kernel takes and gives, see grace/kernels.h.
std::map<std::string, std::string> signatures();

// Calls body with a null pointer of the array's floating-point type. Throws Error(type) for another dtype.
template <class Body> void dispatch(const Call& call, const Array& array, Body body) {
    if (array.dtype == DType::float32) {
        body(static_cast<float*>(nullptr));
    } else if (array.dtype == DType::float64) {
        body(static_cast<double*>(nullptr));
    } else {
        call.fail(Error::Kind::type, std::string("expected float32 or float64, received ") + name_of(array.dtype));
    }
}

// The number of elements per task: a multiple of 64, so that packed bits of two tasks do not share a byte.
constexpr int64_t kPiece = 1 << 16;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Runs body(begin, end) for all pieces of [0, n).
template <class Body> void over_pieces(Call& call, int64_t n, Body body) {
    call.parallel(divide_up(n, kPiece), [&](int64_t piece) {
        const int64_t begin = piece * kPiece;
        body(begin, begin + kPiece < n ? begin + kPiece : n);
    });
}

}  // namespace grace
