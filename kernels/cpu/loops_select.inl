// Selection of elements. Included by loops.inl.

template <class T>
GRACE_LOCAL int64_t append(const T* x, uint64_t mask, int32_t first, int64_t count, Selected<T>* into) {
    for (; mask != 0; mask &= mask - 1) {
        const int j = __builtin_ctzll(mask);
        into->values[count] = x[j];
        into->indices[count] = first + j;
        ++count;
    }
    return count;
}

template <Test test, class T> GRACE_LOCAL uint64_t mask_up_to_64(const T* x, T bound, int64_t n) {
    return n >= 64 ? mask64<test>(x, bound) : mask_of<test>(x, bound, int(n));
}

template <Test test, class T>
GRACE_LOCAL void select_by(const T* x, T bound, bool nonzero, int32_t first, int64_t n, Selected<T>* into) {
    int64_t count = into->count;
    for (int64_t i = 0; i < n; i += 64) {
        const int64_t length = lesser(64, n - i);
        uint64_t mask = mask_up_to_64<test>(x + i, bound, length);
        if (nonzero) mask &= mask_up_to_64<Test::size_above>(x + i, T(0), length);
        count = append(x + i, mask, first + int32_t(i), count, into);
    }
    into->count = count;
}

template <class T>
static void select(const T* x, T bound, bool strict, bool nonzero, int32_t first, int64_t n, Selected<T>* into) {
    if (strict) {
        select_by<Test::size_above>(x, bound, nonzero, first, n, into);
    } else {
        select_by<Test::size_at_least>(x, bound, nonzero, first, n, into);
    }
}

template <class T>
static void select_sides(const T* x, T high, T low, int32_t first, int64_t n, Selected<T>* into, int64_t* counts) {
    int64_t count = into->count;
    for (int64_t i = 0; i < n; i += 64) {
        const uint64_t up = mask_up_to_64<Test::at_least>(x + i, high, n - i);
        const uint64_t down = mask_up_to_64<Test::at_most>(x + i, low, n - i);
        counts[0] += __builtin_popcountll(mask_up_to_64<Test::above>(x + i, T(0), n - i));
        counts[1] += __builtin_popcountll(mask_up_to_64<Test::below>(x + i, T(0), n - i));
        count = append(x + i, up | down, first + int32_t(i), count, into);
    }
    into->count = count;
}
