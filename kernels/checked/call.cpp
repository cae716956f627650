#include "grace/call.h"

namespace grace {

const char* name_of(DType dtype) {
    static const char* const names[] = {"float16", "bfloat16", "float32", "float64", "bool",
                                        "uint8",   "int8",     "int16",   "int32",   "int64"};
    return names[static_cast<int>(dtype)];
}

int64_t size_of(DType dtype) {
    static const int64_t sizes[] = {2, 2, 4, 8, 1, 1, 1, 2, 4, 8};
    return sizes[static_cast<int>(dtype)];
}

void Call::fail(Error::Kind kind, const std::string& text) const {
    const char* advice = kind == Error::Kind::payload
                             ? ". The payload is truncated or damaged, or of another version or configuration."
                             : "";
    throw Error(kind, "kernel " + kernel_ + ": " + text + advice);
}

void Call::expect(int inputs, int integers, int numbers) const {
    if (static_cast<int>(inputs_.size()) != inputs || static_cast<int>(integers_.size()) != integers ||
        static_cast<int>(numbers_.size()) != numbers) {
        fail(Error::Kind::value, "expected " + std::to_string(inputs) + " arrays, " + std::to_string(integers) +
                                     " integers and " + std::to_string(numbers) + " numbers, received " +
                                     std::to_string(inputs_.size()) + ", " + std::to_string(integers_.size()) +
                                     " and " + std::to_string(numbers_.size()));
    }
}

const Array& Call::input(int i) const {
    if (i < 0 || i >= inputs()) {
        fail(Error::Kind::value, "expected an array " + std::to_string(i) + ", received " + std::to_string(inputs()) +
                                     " arrays");
    }
    return inputs_[i];
}

const Array& Call::checked(int i, DType dtype, int64_t size) const {
    const Array& array = input(i);
    if (array.dtype != dtype) {
        fail(Error::Kind::type, "array " + std::to_string(i) + ": expected " + name_of(dtype) + ", received " +
                                    name_of(array.dtype));
    }
    if (size >= 0 && array.size != size) {
        fail(Error::Kind::payload, "array " + std::to_string(i) + ": expected " + std::to_string(size) +
                                       " elements, received " + std::to_string(array.size));
    }
    return array;
}

const Array& Call::writable(const Array& array) const {
    if (!array.writable) {
        fail(Error::Kind::value, "array 0: expected one that may be changed, received a read-only one");
    }
    return array;
}

int64_t Call::integer(int i) const {
    if (i < 0 || i >= static_cast<int>(integers_.size())) {
        fail(Error::Kind::value, "expected an integer " + std::to_string(i) + ", received " +
                                     std::to_string(integers_.size()) + " integers");
    }
    return integers_[i];
}

double Call::number(int i) const {
    if (i < 0 || i >= static_cast<int>(numbers_.size())) {
        fail(Error::Kind::value,
             "expected a number " + std::to_string(i) + ", received " + std::to_string(numbers_.size()) + " numbers");
    }
    return numbers_[i];
}

int64_t Call::length(int i) const {
    const int64_t n = integer(i);
    if (n < 0 || n > kMost) {
        fail(Error::Kind::value,
             "expected a length from 0 to " + std::to_string(kMost) + ", received " + std::to_string(n));
    }
    return n;
}

}  // namespace grace
