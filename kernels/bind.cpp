// The module grace._native: one function that runs every kernel on NumPy arrays and PyTorch tensors (DLPack), and
// another function for arrays on a GPU.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "grace/kernels.h"

namespace nb = nanobind;

namespace {

using grace::Given;
using grace::Output;
using grace::View;

[[noreturn]] void refuse(grace::Error::Kind kind, const std::string& kernel, size_t i, const std::string& text) {
    throw grace::Error(kind, "kernel " + kernel + ", array " + std::to_string(i) + ": " + text);
}

// Finds the DType; false if the kernels do not support it.
bool read_dtype(const nb::dlpack::dtype& dtype, grace::DType& found) {
    using grace::DType;
    using nb::dlpack::dtype_code;
    const auto is = [&](dtype_code code, int bits) {
        return dtype.code == static_cast<uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
    };
    if (is(dtype_code::Float, 32)) return found = DType::float32, true;
    if (is(dtype_code::Float, 64)) return found = DType::float64, true;
    if (is(dtype_code::Float, 16)) return found = DType::float16, true;
    // bfloat16 arrays of NumPy arrive as uint16, because NumPy's DLPack does not support bfloat16.
    if (is(dtype_code::Bfloat, 16) || is(dtype_code::UInt, 16)) return found = DType::bfloat16, true;
    if (is(dtype_code::UInt, 8)) return found = DType::uint8, true;
    if (is(dtype_code::Int, 8)) return found = DType::int8, true;
    if (is(dtype_code::Int, 16)) return found = DType::int16, true;
    if (is(dtype_code::Int, 32)) return found = DType::int32, true;
    if (is(dtype_code::Int, 64)) return found = DType::int64, true;
    if (is(dtype_code::Bool, 8)) return found = DType::boolean, true;
    return false;
}

class HostCall : public grace::Call {
  public:
    HostCall(std::string kernel, std::vector<grace::Array> inputs, std::vector<int64_t> integers,
             std::vector<double> numbers, int threads, std::vector<grace::Array> offered, bool judges)
        : Call(std::move(kernel), std::move(inputs), std::move(integers), std::move(numbers)), threads_(threads),
          offered_(std::move(offered)), judges_(judges) {}
    ~HostCall() override {
        for (const Output& output : outputs) grace::release(output.data);
    }

    void* allocate(grace::DType dtype, int64_t n) override {
        const size_t i = outputs.size();
        if (i < offered_.size() && offered_[i].data != nullptr && dtype == offered_[i].dtype && n == offered_[i].size) {
            // The caller's array is the result; it needs no memory of its own.
            outputs.push_back({nullptr, n, dtype});
            return offered_[i].data;
        }
        outputs.push_back({grace::acquire(static_cast<size_t>(grace::size_of(dtype) * n)), n, dtype});
        return outputs.back().data;
    }
    uint8_t* verdict() override { return judges_ ? &judged : output<uint8_t>(1); }
    void parallel(int64_t tasks, const std::function<void(int64_t)>& task) override {
        grace::run_tasks(tasks, threads_, task);
    }
    int threads() const override { return threads_; }

    std::vector<Output> outputs;
    uint8_t judged = 0;

  private:
    int threads_;
    std::vector<grace::Array> offered_;
    bool judges_;
};

// Checks one array of a call. Throws Error(type) for a wrong device, dtype or alignment.
grace::Array array_of(const std::string& kernel, size_t i, const View& array, int device_type, int device) {
    using Kind = grace::Error::Kind;
    if (array.device_type != device_type || array.device_id != device) {
        refuse(Kind::type, kernel, i, device_type == nb::device::cpu::value
                                          ? "expected main memory, received another device"
                                          : "expected CUDA device " + std::to_string(device) + ", received another device");
    }
    grace::DType dtype;
    if (!read_dtype(array.dtype, dtype)) {
        refuse(Kind::type, kernel, i, "expected floats of 16 to 64 bits, integers, uint8 or bool, received another "
                                      "dtype of " + std::to_string(array.dtype.bits) + " bits");
    }
    if (array.size > 0 && reinterpret_cast<uintptr_t>(array.data) % grace::size_of(dtype) != 0) {
        refuse(Kind::type, kernel, i, std::string("expected an address that is a multiple of an element of ") +
                                          grace::name_of(dtype) + ", received another; pass a copy");
    }
    return {array.data, array.size, dtype, array.writable};
}

// The items of a list or tuple lie in memory; other sequences are copied. An iterator would take longer.
class Items {
  public:
    explicit Items(nb::sequence given) : kept_(nb::steal(PySequence_Fast(given.ptr(), "expected a sequence"))) {
        if (!kept_.is_valid()) throw nb::python_error();
    }
    PyObject** begin() const { return PySequence_Fast_ITEMS(kept_.ptr()); }
    PyObject** end() const { return begin() + size(); }
    size_t size() const { return static_cast<size_t>(PySequence_Fast_GET_SIZE(kept_.ptr())); }

  private:
    nb::object kept_;
};

template <class Framework>
std::vector<grace::Array> arrays_of(const std::string& kernel, const Items& inputs, bool consumes,
                                    const Framework& framework, std::vector<nb::object>& held) {
    std::vector<grace::Array> arrays;
    arrays.reserve(inputs.size());
    held.reserve(inputs.size());
    for (nb::handle handle : inputs) {
        const size_t i = arrays.size();
        View array;
        if (!framework.view(handle, array, held)) {
            refuse(grace::Error::Kind::type, kernel, i,
                   "expected a contiguous array of numbers as this processor has them, received another " +
                       std::string(nb::str(handle.type()).c_str()));
        }
        array.writable = array.writable && consumes && i == 0;
        arrays.push_back(array_of(kernel, i, array, nb::device::cpu::value, 0));
    }
    return arrays;
}

grace::Kernel kernel_of(const std::string& name) {
    const grace::Kernel function = grace::find(name);
    if (function == nullptr) throw grace::Error(grace::Error::Kind::value, "there is no kernel '" + name + "'");
    return function;
}

// Not done by nanobind, which parses all arguments a second time if an integer is given for a floating-point number.
std::vector<double> numbers_of(nb::sequence given) {
    const Items items(given);
    std::vector<double> numbers;
    numbers.reserve(items.size());
    for (nb::handle number : items) {
        numbers.push_back(PyFloat_AsDouble(number.ptr()));
        if (numbers.back() == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    }
    return numbers;
}

template <class Framework>
nb::list run_on(const Framework& framework, const std::string& kernel, nb::sequence inputs,
                const std::vector<int64_t>& integers, nb::sequence numbers, bool consumes, int threads,
                nb::sequence outs, bool judges) {
    const grace::Kernel function = kernel_of(kernel);
    std::vector<nb::object> held;
    std::vector<grace::Array> arrays = arrays_of(kernel, Items(inputs), consumes, framework, held);
    const Items offers(outs);
    std::vector<grace::Array> offered;
    for (nb::handle out : offers) {
        View view;
        offered.push_back({nullptr, 0, grace::DType::uint8, false});
        if (framework.view(out, view, held) && view.writable) {
            offered.back() = array_of(kernel, arrays.size() + offered.size() - 1, view, nb::device::cpu::value, 0);
        }
    }
    HostCall call(kernel, std::move(arrays), integers, numbers_of(numbers), threads, std::move(offered), judges);
    {
        nb::gil_scoped_release released;
        function(call);
    }
    nb::list results;
    for (size_t i = 0; i < call.outputs.size(); ++i) {
        Output& output = call.outputs[i];
        results.append(output.data == nullptr ? nb::borrow(offers.begin()[i]) : framework.wrap(output));
    }
    if (judges) results.append(nb::bool_(call.judged != 0));
    return results;
}

nb::list run(const std::string& kernel, nb::sequence inputs, const std::vector<int64_t>& integers,
             nb::sequence numbers, bool consumes, int threads, nb::handle tensors, nb::sequence outs,
             bool judges) {
    if (tensors.is_none()) {
        return run_on(grace::Numpy(), kernel, inputs, integers, numbers, consumes, threads, outs, judges);
    }
    return run_on(grace::Torch(tensors), kernel, inputs, integers, numbers, consumes, threads, outs, judges);
}

nb::object empty(int64_t n, nb::handle tensors) {
    if (n < 0) {
        throw grace::Error(grace::Error::Kind::value, "empty: expected a length from 0 on, received " + std::to_string(n));
    }
    // Released here unless an array takes ownership.
    struct Block {
        Output output;
        ~Block() { grace::release(output.data); }
    } block = {{grace::acquire(static_cast<size_t>(n)), n, grace::DType::uint8}};
    return tensors.is_none() ? grace::Numpy().wrap(block.output) : grace::Torch(tensors).wrap(block.output);
}

#ifdef GRACE_CUDA

#ifdef GRACE_EMULATED
constexpr int kDeviceType = nb::device::cpu::value;
#else
constexpr int kDeviceType = nb::device::cuda::value;
#endif

// A call on a GPU. The framework provides memory by allocate(dtype, n) -> (array, address).
class DeviceCall : public grace::Call {
  public:
    DeviceCall(std::string kernel, std::vector<grace::Array> inputs, std::vector<int64_t> integers,
               std::vector<double> numbers, uintptr_t stream, int* fault, nb::callable allocate)
        : Call(std::move(kernel), std::move(inputs), std::move(integers), std::move(numbers)),
          allocate_(std::move(allocate)),
          at_{reinterpret_cast<CUstream_st*>(stream), [this](int64_t bytes) { return scratch(bytes); }, fault} {}

    void* allocate(grace::DType dtype, int64_t n) override {
        const nb::gil_scoped_acquire held;
        return made(grace::name_of(dtype), n, results);
    }
    void parallel(int64_t, const std::function<void(int64_t)>&) override {
        fail(grace::Error::Kind::type, "there is no such kernel for GPUs");
    }
    int threads() const override { return 1; }
    const grace::gpu::Stream* gpu() const override { return &at_; }

    nb::list results;

  private:
    // The framework reuses this memory only after the current work on the stream.
    void* scratch(int64_t bytes) {
        const nb::gil_scoped_acquire held;
        return made("uint8", bytes, scratch_);
    }
    void* made(const char* dtype, int64_t n, nb::list& into) {
        const nb::tuple pair = nb::cast<nb::tuple>(allocate_(dtype, n));
        into.append(pair[0]);
        return reinterpret_cast<void*>(nb::cast<uintptr_t>(pair[1]));
    }

    nb::callable allocate_;
    nb::list scratch_;
    grace::gpu::Stream at_;
};

// `inputs` are DLPack capsules, because an array's own __dlpack__ method may make streams wait for each other.
std::vector<grace::Array> device_arrays_of(const std::string& kernel, nb::sequence inputs, int device,
                                           std::vector<Given>& held) {
    std::vector<grace::Array> arrays;
    for (nb::handle handle : inputs) {
        Given array;
        if (!nb::try_cast(handle, array, false)) {
            refuse(grace::Error::Kind::type, kernel, arrays.size(), "expected a capsule of a contiguous array, received "
                                                                    "another " + std::string(nb::str(handle.type()).c_str()));
        }
        const View view = {const_cast<void*>(array.data()), static_cast<int64_t>(array.size()), array.dtype(),
                           array.device_type(), array.device_id(), true};
        arrays.push_back(array_of(kernel, arrays.size(), view, kDeviceType, device));
        held.push_back(std::move(array));
    }
    return arrays;
}

nb::list run_on_gpu(const std::string& kernel, nb::sequence inputs, const std::vector<int64_t>& integers,
                    nb::sequence numbers, int device, uintptr_t stream, nb::callable allocate) {
    const grace::Kernel function = kernel_of(kernel);
    std::vector<Given> held;
    const std::vector<grace::Array> arrays = device_arrays_of(kernel, inputs, device, held);
    const grace::gpu::DeviceGuard current(device);
    volatile int* fault = grace::gpu::fault_word(device);
    DeviceCall call(kernel, arrays, integers, numbers_of(numbers), stream, const_cast<int*>(fault),
                    std::move(allocate));
    const auto report = [&] {
        if (*fault == 0) return;
        *fault = 0;
        call.fail(grace::Error::Kind::payload, "a kernel that ran before on CUDA device " + std::to_string(device) +
                                                   " met a damaged payload (an index out of range, or codes of another number) and left out "
                                                   "what does not fit");
    };
    report();
    {
        nb::gil_scoped_release released;
        function(call);
    }
    return call.results;
}

#endif

}  // namespace

#ifndef GRACE_MODULE
#define GRACE_MODULE _native
#endif

NB_MODULE(GRACE_MODULE, module) {
    if (_import_array() < 0) throw nb::python_error();
    module.doc() = "Kernels of grace on NumPy arrays and PyTorch tensors.";
    module.def("run", &run, nb::arg("kernel"), nb::arg("inputs"), nb::arg("integers"), nb::arg("numbers"),
               nb::arg("consumes"), nb::arg("threads"), nb::arg("tensors").none(), nb::arg("outs") = nb::tuple(),
               nb::arg("judges") = false,
               "Results of a kernel, of flat contiguous arrays, integers and numbers: NumPy arrays, or tensors of that "
               "class where it is not None. The first are written to `outs` where these have their dtype and length. The "
               "last is a bool if the kernel judges its input.");
    module.def("empty", &empty, nb::arg("n"), nb::arg("tensors").none(),
               "An array of n uninitialized bytes from the memory of results; a tensor of that class unless it is None.");
    module.def("kernels", &grace::signatures, "The signatures of all kernels by name.");
    module.def("isa", &grace::isa, "The instruction set in use: baseline, avx2 or avx512.");
    module.def("kept_bytes", &grace::kept_bytes, "Bytes of memory kept for use again.");
#ifdef GRACE_CUDA
    module.attr("cuda") = true;
    module.def("run_on_gpu", &run_on_gpu, nb::arg("kernel"), nb::arg("inputs"), nb::arg("integers"),
               nb::arg("numbers"), nb::arg("device"), nb::arg("stream"), nb::arg("allocate"),
               "Results of a kernel of capsules (DLPack) on a CUDA device and stream; "
               "allocate(dtype, n) gives an array and its address.");
    module.def("serves_gpu", &grace::gpu::serves, nb::arg("device"),
               "Whether there is this CUDA device, and code for it.");
#else
    module.attr("cuda") = false;
#endif
    static nb::exception<grace::Error> corrupt(module, "CorruptPayload", PyExc_ValueError);
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        try {
            std::rethrow_exception(pointer);
        } catch (const grace::Error& error) {
            PyObject* kind = PyExc_ValueError;
            switch (error.kind) {
                case grace::Error::Kind::type: kind = PyExc_TypeError; break;
                case grace::Error::Kind::payload: kind = corrupt.ptr(); break;
                case grace::Error::Kind::device: kind = PyExc_RuntimeError; break;
                default: break;
            }
            PyErr_SetString(kind, error.what());
        }
    });
}
