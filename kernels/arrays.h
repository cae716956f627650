// Conversion of NumPy arrays and PyTorch tensors in main memory, by NumPy's C interface and by PyTorch's C functions
// for DLPack. For small tensors, a conversion through Python would take longer than the kernels.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

#include "grace/call.h"
#include "grace/pool.h"

namespace grace {

namespace nb = nanobind;

// The requirements on arrays that come by DLPack. nanobind checks them.
using Given = nb::ndarray<nb::ro, nb::c_contig>;

// A result: a block of the pool until an array takes ownership.
struct Output {
    void* data;
    int64_t size;
    DType dtype;
};

// An array as its framework describes it, before a kernel's checks.
struct View {
    void* data;
    int64_t size;
    nb::dlpack::dtype dtype;
    int device_type, device_id;
    bool writable;
};

inline nb::dlpack::dtype dlpack_of(DType dtype) {
    using nb::dlpack::dtype_code;
    dtype_code code = dtype_code::Int;
    switch (dtype) {
        case DType::float16: case DType::float32: case DType::float64: code = dtype_code::Float; break;
        case DType::bfloat16: code = dtype_code::Bfloat; break;
        case DType::boolean: code = dtype_code::Bool; break;
        case DType::uint8: code = dtype_code::UInt; break;
        default: break;
    }
    return {static_cast<uint8_t>(code), static_cast<uint8_t>(8 * size_of(dtype)), 1};
}

// A framework. `view` describes an array; it returns false if the object is not a contiguous array of numbers. Objects
// that must live until the end of the call are added to `held`. `wrap` makes an array from a result.

class Numpy {
  public:
    bool view(nb::handle given, View& found, std::vector<nb::object>& held) const {
        nb::object array = nb::borrow(given);
        // Operators on arrays without axes return scalars.
        if (PyArray_IsScalar(given.ptr(), Generic)) array = nb::steal(PyArray_FromScalar(given.ptr(), nullptr));
        if (!array.is_valid()) throw nb::python_error();
        if (!PyArray_Check(array.ptr())) return false;
        PyArrayObject* const a = reinterpret_cast<PyArrayObject*>(array.ptr());
        const int type = PyArray_TYPE(a);
        if (!(PyTypeNum_ISNUMBER(type) || PyTypeNum_ISBOOL(type)) || !PyArray_IS_C_CONTIGUOUS(a) ||
            !PyArray_ISNOTSWAPPED(a)) {
            return false;
        }
        using nb::dlpack::dtype_code;
        const dtype_code code = PyTypeNum_ISBOOL(type)       ? dtype_code::Bool
                                : PyTypeNum_ISCOMPLEX(type)  ? dtype_code::Complex
                                : PyTypeNum_ISFLOAT(type)    ? dtype_code::Float
                                : PyTypeNum_ISUNSIGNED(type) ? dtype_code::UInt
                                                             : dtype_code::Int;
        const nb::dlpack::dtype dtype = {static_cast<uint8_t>(code), static_cast<uint8_t>(8 * PyArray_ITEMSIZE(a)), 1};
        found = {PyArray_DATA(a), static_cast<int64_t>(PyArray_SIZE(a)), dtype, nb::device::cpu::value, 0,
                 static_cast<bool>(PyArray_ISWRITEABLE(a))};
        held.push_back(std::move(array));
        return true;
    }

    nb::object wrap(Output& output) const {
        // bfloat16 becomes uint16 with the same bits, because NumPy has no bfloat16.
        static const int types[] = {NPY_FLOAT16, NPY_UINT16, NPY_FLOAT32, NPY_FLOAT64, NPY_BOOL,
                                    NPY_UINT8,   NPY_INT8,   NPY_INT16,   NPY_INT32,   NPY_INT64};
        npy_intp shape[1] = {static_cast<npy_intp>(output.size)};
        nb::object array =
            nb::steal(PyArray_SimpleNewFromData(1, shape, types[static_cast<int>(output.dtype)], output.data));
        if (!array.is_valid()) throw nb::python_error();
        nb::capsule owner(output.data, [](void* block) noexcept { release(block); });
        output.data = nullptr;
        PyArrayObject* const a = reinterpret_cast<PyArrayObject*>(array.ptr());
        if (PyArray_SetBaseObject(a, owner.release().ptr()) < 0) throw nb::python_error();
        return array;
    }
};

// The tables that a tensor class provides by this name: DLPack 1.2, https://dmlc.github.io/dlpack.
struct Managed {
    struct {
        uint32_t major, minor;
    } version;
    void* context;
    void (*deleter)(Managed*);
    uint64_t flags;
    nb::dlpack::dltensor tensor;
};

struct Exchange {
    struct {
        uint32_t major, minor;
    } version;
    Exchange* older;
    void* allocate;
    int (*give)(void*, Managed**);
    int (*take)(Managed*, void**);
    int (*look)(void*, nb::dlpack::dltensor*);
    void* stream;
};

class Torch {
  public:
    // `tensors` is the tensor class. Before PyTorch 2.10 it has no such table. Then nanobind converts, through Python.
    explicit Torch(nb::handle tensors) : tensors_(tensors) {
        // There is one such class, and the search for its table would take a quarter of a small call. The class is
        // never released, so that no other one gets its address.
        static PyObject* known = nullptr;
        static Exchange* table = nullptr;
        if (tensors.ptr() != known) {
            table = table_of(tensors);
            known = nb::borrow(tensors).release().ptr();
        }
        exchange_ = table;
    }

    bool view(nb::handle given, View& found, std::vector<nb::object>& held) const {
        if (exchange_ == nullptr) return converted(given, found, held);
        if (!PyObject_TypeCheck(given.ptr(), reinterpret_cast<PyTypeObject*>(tensors_.ptr()))) return false;
        nb::dlpack::dltensor t;
        if (exchange_->look(given.ptr(), &t) != 0) throw nb::python_error();
        int64_t size = 1;
        for (int i = t.ndim - 1; i >= 0; --i) {
            if (t.strides != nullptr && t.shape[i] > 1 && t.strides[i] != size) return false;
            size *= t.shape[i];
        }
        found = {static_cast<char*>(t.data) + t.byte_offset, size, t.dtype, t.device.device_type, t.device.device_id,
                 true};
        held.push_back(nb::borrow(given));
        return true;
    }

    nb::object wrap(Output& output) const {
        if (exchange_ == nullptr) return converted(output);
        struct Owned {
            Managed managed;
            int64_t shape[1], strides[1];
        };
        Owned* owned = new Owned{{{1, 0}, nullptr, nullptr, 0, {}}, {output.size}, {1}};
        owned->managed.context = owned;
        owned->managed.deleter = [](Managed* managed) {
            release(managed->tensor.data);
            delete static_cast<Owned*>(managed->context);
        };
        owned->managed.tensor = {output.data, {nb::device::cpu::value, 0}, 1, dlpack_of(output.dtype), owned->shape,
                                 owned->strides, 0};
        void* tensor = nullptr;
        // From here on PyTorch owns the block, even if the call fails.
        output.data = nullptr;
        if (exchange_->take(&owned->managed, &tensor) != 0) throw nb::python_error();
        return nb::steal(static_cast<PyObject*>(tensor));
    }

  private:
    static Exchange* table_of(nb::handle tensors) {
        nb::object capsule = nb::getattr(tensors, "__dlpack_c_exchange_api__", nb::none());
        if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
        Exchange* found = static_cast<Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
        while (found != nullptr && found->version.major != 1) found = found->older;
        return found != nullptr && found->look == nullptr ? nullptr : found;
    }
    static bool converted(nb::handle given, View& found, std::vector<nb::object>& held) {
        Given array;
        if (!nb::try_cast(given, array, false)) return false;
        found = {const_cast<void*>(array.data()), static_cast<int64_t>(array.size()), array.dtype(),
                 array.device_type(), array.device_id(), true};
        held.push_back(nb::borrow(given));
        return true;
    }
    static nb::object converted(Output& output) {
        void* data = output.data;
        nb::capsule owner(data, [](void* block) noexcept { release(block); });
        output.data = nullptr;
        const size_t shape[1] = {static_cast<size_t>(output.size)};
        return nb::cast(nb::ndarray<nb::pytorch>(data, 1, shape, owner, nullptr, dlpack_of(output.dtype)));
    }

    nb::handle tensors_;
    Exchange* exchange_ = nullptr;
};

}  // namespace grace
