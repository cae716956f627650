#include <unordered_map>

#include "grace/kernels.h"

namespace grace {
namespace {

const std::unordered_map<std::string, Kernel>& table() {
    static const std::unordered_map<std::string, Kernel> all = {
#define GRACE_ENTRY(name, signature) {#name, name##_kernel},
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

std::map<std::string, std::string> signatures() {
    return {
#define GRACE_ENTRY(name, signature) {#name, signature},
        GRACE_KERNELS(GRACE_ENTRY)
#undef GRACE_ENTRY
    };
}

}  // namespace grace
