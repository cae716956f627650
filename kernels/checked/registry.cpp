#include <unordered_map>

#include "grace/kernels.h"

namespace grace {
namespace {

struct Known {
    const char* signature;
    Kernel kernel;
};

// Within a function, so that it exists before the entries of other files, whose order is not specified.
std::unordered_map<std::string, Known>& table() {
    static std::unordered_map<std::string, Known> all;
    return all;
}

}  // namespace

Entry::Entry(const char* name, const char* signature, Kernel kernel) { table()[name] = {signature, kernel}; }

Kernel find(const std::string& name) {
    const auto found = table().find(name);
    return found == table().end() ? nullptr : found->second.kernel;
}

std::map<std::string, std::string> signatures() {
    std::map<std::string, std::string> all;
    for (const auto& [name, known] : table()) all[name] = known.signature;
    return all;
}

}  // namespace grace
