// Sums over the payloads of all ranks, in their order.
#pragma once

#include <vector>

#include "device.h"

namespace grace {
namespace gpu {

template <class P> struct Ranks {
    P parts[kRanks];
    int count;
};

// Calls body(some, begins, ends) for kRanks ranks at a time. With more ranks, several kernels add to the sum.
template <class P, class Body> static void in_turns(const std::vector<P>& all, Body body) {
    for (size_t at = 0; at < all.size(); at += kRanks) {
        Ranks<P> some = {};
        for (size_t r = at; r < all.size() && r < at + kRanks; ++r) some.parts[some.count++] = all[r];
        body(some, at == 0, at + kRanks >= all.size());
    }
}

// out = factor (onto + value(part, i) of every rank), rounded after each operation. Without `onto`, the sum starts with
// the first value.
template <class T, class P, class Value>
static void add_parts(const Stream& on, const Ranks<P>& some, const T* onto, T* out, int64_t n, Value value,
                      T factor) {
    map(on, out, n, [=] __device__(int64_t i) {
        T sum = onto == nullptr ? value(some.parts[0], i) : onto[i] + value(some.parts[0], i);
        for (int r = 1; r < some.count; ++r) sum = sum + value(some.parts[r], i);
        return sum * factor;
    });
}

// The same of all ranks.
template <class T, class P, class Value>
static void sum_parts(const Stream& on, const std::vector<P>& all, const T* onto, T* out, int64_t n, Value value,
                      T factor = T(1)) {
    in_turns(all, [&](const Ranks<P>& some, bool begins, bool ends) {
        add_parts(on, some, begins ? onto : out, out, n, value, ends ? factor : T(1));
    });
}

}  // namespace gpu
}  // namespace grace
