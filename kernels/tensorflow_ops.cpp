// The TensorFlow operation GraceKernel, which runs every kernel, in graphs and in eager mode.
#include <cstring>
#include <memory>
#include <utility>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/denormal.h"

#include "grace/call.h"
#include "grace/pool.h"

namespace tf = tensorflow;

namespace {

// TensorFlow's C++ interface changes with every version. grace reads this from the file before it loads the library.
__attribute__((used)) const char built_for[] = "grace: built for TensorFlow " GRACE_TENSORFLOW_VERSION;

// Error texts. In eager mode, grace makes its own exceptions from them. In a graph, only the text is visible.
const char* name_of(grace::Error::Kind kind) {
    switch (kind) {
        case grace::Error::Kind::type: return "TypeError: ";
        case grace::Error::Kind::payload: return "PayloadError: ";
        default: return "ValueError: ";
    }
}

grace::DType dtype_of(tf::DataType dtype) {
    using grace::DType;
    switch (dtype) {
        case tf::DT_HALF: return DType::float16;
        case tf::DT_BFLOAT16: return DType::bfloat16;
        case tf::DT_FLOAT: return DType::float32;
        case tf::DT_DOUBLE: return DType::float64;
        case tf::DT_BOOL: return DType::boolean;
        case tf::DT_UINT8: return DType::uint8;
        case tf::DT_INT8: return DType::int8;
        case tf::DT_INT16: return DType::int16;
        case tf::DT_INT32: return DType::int32;
        case tf::DT_INT64: return DType::int64;
        default: throw grace::Error(grace::Error::Kind::type, "arrays of this dtype cannot be given to a kernel");
    }
}

// A block of the kernels' pool. New pages from TensorFlow's allocator would take longer than a codec.
class Block : public tf::TensorBuffer {
  public:
    explicit Block(size_t bytes) : TensorBuffer(grace::acquire(bytes)), bytes_(bytes) {}
    ~Block() override { grace::release(data()); }
    size_t size() const override { return bytes_; }
    tf::TensorBuffer* root_buffer() override { return this; }
    void FillAllocationDescription(tf::AllocationDescription*) const override {}
    bool GetAllocatedBytes(size_t* bytes) const override {
        *bytes = bytes_;
        return true;
    }
    tf::AllocatorMemoryType GetMemoryType() const override { return tf::AllocatorMemoryType::kHostPageable; }

  private:
    const size_t bytes_;
};

tf::Tensor in_block(tf::DataType dtype, const tf::TensorShape& shape) {
    const size_t bytes = static_cast<size_t>(tf::DataTypeSize(dtype)) * static_cast<size_t>(shape.num_elements());
    return tf::Tensor(dtype, shape, tf::core::RefCountPtr<tf::TensorBuffer>(new Block(bytes)));
}

class GraphCall : public grace::Call {
  public:
    GraphCall(tf::OpKernelContext* context, std::string kernel, std::vector<grace::Array> inputs,
              std::vector<int64_t> integers, std::vector<double> numbers)
        : Call(std::move(kernel), std::move(inputs), std::move(integers), std::move(numbers)), context_(context),
          workers_(*context->device()->tensorflow_cpu_worker_threads()) {}

    void* allocate(grace::DType dtype, int64_t n) override {
        const int i = static_cast<int>(outputs.size());
        if (i >= context_->num_outputs() || dtype != dtype_of(context_->expected_output_dtype(i))) {
            fail(grace::Error::Kind::type, "expected another dtype or number of results, received " +
                                               std::string(grace::name_of(dtype)) + " as result " + std::to_string(i));
        }
        outputs.push_back(in_block(context_->expected_output_dtype(i), tf::TensorShape({n})));
        return outputs.back().data();
    }
    void parallel(int64_t tasks, const std::function<void(int64_t)>& task) override {
        grace::run_tasks(tasks, threads(), task, [this](std::function<void()> work) {
            workers_.workers->Schedule([work = std::move(work)] {
                const tf::port::ScopedDontFlushDenormal kept;
                work();
            });
        });
    }
    int threads() const override { return workers_.workers == nullptr ? 1 : workers_.num_threads; }

    std::vector<tf::Tensor> outputs;

  private:
    tf::OpKernelContext* context_;
    const tf::DeviceBase::CpuWorkerThreads workers_;
};

class GraceKernel : public tf::OpKernel {
  public:
    explicit GraceKernel(tf::OpKernelConstruction* context) : OpKernel(context) {
        OP_REQUIRES_OK(context, context->GetAttr("kernel", &name_));
        OP_REQUIRES_OK(context, context->GetAttr("consumes", &consumes_));
        OP_REQUIRES_OK(context, context->GetAttr("lengths", &lengths_));
        kernel_ = grace::find(name_);
        OP_REQUIRES(context, kernel_ != nullptr,
                    absl::InvalidArgumentError("ValueError: there is no kernel '" + name_ + "'"));
    }

    void Compute(tf::OpKernelContext* context) override {
        // TensorFlow's threads flush denormals to zero. The kernels must keep them, to give equal bytes everywhere.
        const tf::port::ScopedDontFlushDenormal kept;
        try {
            compute(context);
        } catch (const grace::Error& error) {
            context->SetStatus(absl::InvalidArgumentError(std::string(name_of(error.kind)) + error.what()));
        } catch (const std::bad_alloc&) {
            context->SetStatus(absl::ResourceExhaustedError("kernel " + name_ + ": out of memory"));
        } catch (const std::exception& error) {
            context->SetStatus(absl::InvalidArgumentError("ValueError: kernel " + name_ + ": " + error.what()));
        }
    }

  private:
    void compute(tf::OpKernelContext* context) const {
        const int arrays = context->num_inputs() - 2;
        std::vector<grace::Array> inputs;
        for (int i = 0; i < arrays; ++i) {
            const tf::Tensor& x = context->input(i);
            inputs.push_back({x.data(), x.NumElements(), dtype_of(x.dtype()), false});
        }
        const auto integers = context->input(arrays).flat<int64_t>();
        const auto numbers = context->input(arrays + 1).flat<double>();
        tf::Tensor consumed;
        if (consumes_) {
            if (inputs.empty()) throw grace::Error(grace::Error::Kind::value, "there is no array to be changed");
            consumed = changeable(context);
            inputs[0].data = consumed.data();
            inputs[0].writable = true;
        }
        GraphCall call(context, name_, std::move(inputs),
                       std::vector<int64_t>(integers.data(), integers.data() + integers.size()),
                       std::vector<double>(numbers.data(), numbers.data() + numbers.size()));
        kernel_(call);
        if (consumes_) call.outputs.insert(call.outputs.begin(), std::move(consumed));
        give(context, call.outputs);
    }

    // Array 0 if nothing else (a variable, the caller) holds it, otherwise a copy.
    static tf::Tensor changeable(tf::OpKernelContext* context) {
        const tf::Tensor& x = context->input(0);
        const std::unique_ptr<tf::Tensor> same = context->forward_input(
            0, 0, x.dtype(), x.shape(), context->output_memory_type(0), context->output_alloc_attr(0));
        if (same != nullptr) return *same;
        tf::Tensor copy = in_block(x.dtype(), x.shape());
        std::memcpy(copy.data(), x.data(), x.TotalBytes());
        return copy;
    }

    void give(tf::OpKernelContext* context, std::vector<tf::Tensor>& outputs) const {
        if (static_cast<int>(outputs.size()) != context->num_outputs()) {
            throw grace::Error(grace::Error::Kind::value, "expected " + std::to_string(context->num_outputs()) +
                                                              " results, received " + std::to_string(outputs.size()));
        }
        for (size_t i = 0; i < lengths_.size(); ++i) {
            if (lengths_[i] >= 0 && outputs[i].NumElements() != lengths_[i]) {
                throw grace::Error(grace::Error::Kind::value,
                                   "kernel " + name_ + ": expected " + std::to_string(lengths_[i]) +
                                       " elements as result " + std::to_string(i) + ", received " +
                                       std::to_string(outputs[i].NumElements()));
            }
        }
        for (size_t i = 0; i < outputs.size(); ++i) context->set_output(static_cast<int>(i), std::move(outputs[i]));
    }

    std::string name_;
    bool consumes_ = false;
    std::vector<int64_t> lengths_;
    grace::Kernel kernel_ = nullptr;
};

REGISTER_OP("GraceKernel")
    .Input("arrays: Tin")
    .Input("integers: int64")
    .Input("numbers: double")
    .Output("results: Tout")
    .Attr("kernel: string")
    .Attr("Tin: list(type) >= 0")
    .Attr("Tout: list(type) >= 1")
    // The lengths of the results, -1 if only the kernel knows it. Empty if no length is known.
    .Attr("lengths: list(int) = []")
    // True if array 0 is changed in place and is the first result.
    .Attr("consumes: bool = false")
    .SetShapeFn([](tf::shape_inference::InferenceContext* c) {
        std::vector<int64_t> lengths;
        TF_RETURN_IF_ERROR(c->GetAttr("lengths", &lengths));
        if (!lengths.empty() && static_cast<int>(lengths.size()) != c->num_outputs()) {
            return absl::InvalidArgumentError("expected a length per result");
        }
        for (int i = 0; i < c->num_outputs(); ++i) {
            const bool known = !lengths.empty() && lengths[i] >= 0;
            c->set_output(i, c->Vector(known ? c->MakeDim(lengths[i]) : c->UnknownDim()));
        }
        return absl::OkStatus();
    })
    .Doc("A kernel of grace on flat arrays.");

REGISTER_KERNEL_BUILDER(Name("GraceKernel").Device(tf::DEVICE_CPU), GraceKernel);

}  // namespace
