// The module grace._native: every kernel through one function, for NumPy arrays and PyTorch tensors (DLPack).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "grace/kernels.h"

namespace nb = nanobind;

namespace {

using Given = nb::ndarray<nb::ro, nb::c_contig>;

grace::DType dtype_of(const nb::dlpack::dtype& dtype) {
    using grace::DType;
    using nb::dlpack::dtype_code;
    const auto is = [&](dtype_code code, int bits) {
        return dtype.code == static_cast<uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
    };
    if (is(dtype_code::Float, 32)) return DType::float32;
    if (is(dtype_code::Float, 64)) return DType::float64;
    if (is(dtype_code::Float, 16)) return DType::float16;
    // NumPy hands bfloat16 over as uint16, because DLPack of NumPy does not know it.
    if (is(dtype_code::Bfloat, 16) || is(dtype_code::UInt, 16)) return DType::bfloat16;
    if (is(dtype_code::UInt, 8)) return DType::uint8;
    if (is(dtype_code::Int, 8)) return DType::int8;
    if (is(dtype_code::Int, 16)) return DType::int16;
    if (is(dtype_code::Int, 32)) return DType::int32;
    if (is(dtype_code::Int, 64)) return DType::int64;
    if (dtype.code == static_cast<uint8_t>(dtype_code::Bool)) return DType::boolean;
    throw grace::Error(grace::Error::Kind::type, "arrays of this dtype cannot be given to a kernel");
}

nb::dlpack::dtype dlpack_of(grace::DType dtype, bool numpy) {
    using grace::DType;
    using nb::dlpack::dtype_code;
    dtype_code code = dtype_code::Int;
    switch (dtype) {
        case DType::float16: case DType::float32: case DType::float64: code = dtype_code::Float; break;
        case DType::bfloat16: code = numpy ? dtype_code::UInt : dtype_code::Bfloat; break;
        case DType::boolean: code = dtype_code::Bool; break;
        case DType::uint8: code = dtype_code::UInt; break;
        default: break;
    }
    return {static_cast<uint8_t>(code), static_cast<uint8_t>(8 * grace::size_of(dtype)), 1};
}

struct Output {
    void* data;
    int64_t size;
    grace::DType dtype;
};

class HostCall : public grace::Call {
  public:
    HostCall(std::string kernel, std::vector<grace::Array> inputs, std::vector<int64_t> integers,
             std::vector<double> numbers, int threads)
        : Call(std::move(kernel), std::move(inputs), std::move(integers), std::move(numbers)), threads_(threads) {}
    ~HostCall() override {
        for (const Output& output : outputs) grace::release(output.data);
    }

    void* allocate(grace::DType dtype, int64_t n) override {
        outputs.push_back({grace::acquire(static_cast<size_t>(grace::size_of(dtype) * n)), n, dtype});
        return outputs.back().data;
    }
    void parallel(int64_t tasks, const std::function<void(int64_t)>& task) override {
        grace::run_tasks(tasks, threads_, task);
    }
    int threads() const override { return threads_; }

    std::vector<Output> outputs;

  private:
    int threads_;
};

// A NumPy array, or a DLPack capsule.
template <class... Framework> nb::object wrapped(const Output& output, bool numpy) {
    nb::capsule owner(output.data, [](void* data) noexcept { grace::release(data); });
    const size_t shape[1] = {static_cast<size_t>(output.size)};
    return nb::cast(nb::ndarray<Framework...>(output.data, 1, shape, owner, nullptr, dlpack_of(output.dtype, numpy)));
}

std::vector<grace::Array> arrays_of(nb::sequence inputs, bool consumes, bool numpy, std::vector<Given>& held) {
    std::vector<grace::Array> arrays;
    for (nb::handle handle : inputs) {
        Given array;
        if (!nb::try_cast(handle, array, false)) {
            throw grace::Error(grace::Error::Kind::type, "expected flat contiguous arrays of one framework");
        }
        if (array.device_type() != nb::device::cpu::value) {
            throw grace::Error(grace::Error::Kind::type,
                               "expected arrays in main memory; these kernels were built without CUDA");
        }
        // A capsule is taken once; whether what it holds is read-only, DLPack of this version cannot say.
        bool writable = consumes && arrays.empty();
        if (writable && numpy) {
            nb::ndarray<nb::c_contig> changeable;
            writable = nb::try_cast(handle, changeable, false);
        }
        arrays.push_back({const_cast<void*>(static_cast<const void*>(array.data())),
                          static_cast<int64_t>(array.size()), dtype_of(array.dtype()), writable});
        held.push_back(std::move(array));
    }
    return arrays;
}

nb::list run(const std::string& kernel, nb::sequence inputs, const std::vector<int64_t>& integers,
             const std::vector<double>& numbers, bool consumes, int threads, bool numpy) {
    const grace::Kernel function = grace::find(kernel);
    if (function == nullptr) throw grace::Error(grace::Error::Kind::value, "there is no kernel '" + kernel + "'");
    std::vector<Given> held;
    HostCall call(kernel, arrays_of(inputs, consumes, numpy, held), integers, numbers, threads);
    {
        nb::gil_scoped_release released;
        function(call);
    }
    nb::list results;
    std::vector<Output> outputs;
    outputs.swap(call.outputs);
    for (const Output& output : outputs) {
        results.append(numpy ? wrapped<nb::numpy>(output, true) : wrapped<>(output, false));
    }
    return results;
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "Kernels of grace on NumPy arrays and PyTorch tensors.";
    module.def("run", &run, nb::arg("kernel"), nb::arg("inputs"), nb::arg("integers"), nb::arg("numbers"),
               nb::arg("consumes"), nb::arg("threads"), nb::arg("numpy"),
               "Results of a kernel, of flat contiguous arrays, integers and numbers: NumPy arrays, or DLPack capsules.");
    module.def("kernels", &grace::names, "The names of all kernels.");
    module.def("isa", &grace::isa, "The instruction set in use: baseline, avx2 or avx512.");
    module.def("kept_bytes", &grace::kept_bytes, "Bytes of memory kept for use again.");
    module.attr("cuda") = false;
    static nb::exception<grace::Error> corrupt(module, "CorruptPayload", PyExc_ValueError);
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        try {
            std::rethrow_exception(pointer);
        } catch (const grace::Error& error) {
            const bool type = error.kind == grace::Error::Kind::type;
            if (error.kind == grace::Error::Kind::payload) {
                PyErr_SetString(corrupt.ptr(), error.what());
            } else {
                PyErr_SetString(type ? PyExc_TypeError : PyExc_ValueError, error.what());
            }
        }
    });
}
