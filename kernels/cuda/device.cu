// Device management: the current device, supported devices, and the fault words.
#include <mutex>

#include "device.h"

namespace grace {
namespace gpu {
namespace {

constexpr int kMostDevices = 64;

__global__ void probe_kernel() {}

}  // namespace

DeviceGuard::DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "the current device");
    check(cudaSetDevice(device), "choosing a device");
}

DeviceGuard::~DeviceGuard() { cudaSetDevice(before_); }

int* fault_word(int device) {
    static std::mutex mutex;
    static int* words = nullptr;
    if (device < 0 || device >= kMostDevices) {
        throw Error(Error::Kind::value, "expected a device from 0 to 63, received " + std::to_string(device));
    }
    const std::lock_guard<std::mutex> lock(mutex);
    if (words == nullptr) {
        void* made = nullptr;
        const unsigned flags = cudaHostAllocPortable | cudaHostAllocMapped;
        check(cudaHostAlloc(&made, kMostDevices * sizeof(int), flags), "page-locked memory");
        memset(made, 0, kMostDevices * sizeof(int));
        words = static_cast<int*>(made);
    }
    return words + device;
}

bool serves(int device) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || device < 0 || device >= count) {
        cudaGetLastError();  // clear the error
        return false;
    }
    const DeviceGuard guard(device);
    cudaFuncAttributes attributes;
    const bool known = cudaFuncGetAttributes(&attributes, probe_kernel) == cudaSuccess;
    if (!known) cudaGetLastError();
    return known;
}

}  // namespace gpu
}  // namespace grace
