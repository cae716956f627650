#include <unordered_map>

#include "grace/kernels.h"

namespace grace {
namespace {

const std::unordered_map<std::string, Kernel>& table() {
    static const std::unordered_map<std::string, Kernel> all = {
#define GRACE_ENTRY(name) {#name, name##_kernel},
        GRACE_KERNELS(GRACE_ENTRY)
#undef GRACE_ENTRY
    };
    return all;
}

}  // namespace

Kernel find(const std::string& name) {
    const auto found = table().find(name);
    return found == table().end() ? nullptr : found->second;
}

std::vector<std::string> names() {
    std::vector<std::string> all;
    for (const auto& entry : table()) all.push_back(entry.first);
    return all;
}

}  // namespace grace
