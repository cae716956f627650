// Bits, and codes of 1 to 8 bits: a part of loops.inl.

// --- bits ------------------------------------------------------------------------------------------------------------------

GRACE_LOCAL void store_mask(uint64_t mask, uint8_t* bits, int64_t bytes) {
    for (int64_t j = 0; j < bytes; ++j) bits[j] = uint8_t(mask >> (8 * j));
}

template <class T> static void binarize(const T* x, T threshold, uint8_t* bits, int64_t n) {
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) store_mask(mask64<Test::at_least>(x + i, threshold), bits + i / 8, 8);
    const int rest = int(n - i);
    if (rest > 0) store_mask(mask_of<Test::at_least>(x + i, threshold, rest), bits + i / 8, (rest + 7) / 8);
}

template <class T> static void binarize_sums(const T* x, T threshold, uint8_t* bits, double* sums, int64_t n) {
    double high[8] = {0, 0, 0, 0, 0, 0, 0, 0}, low[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t count = 0, i = 0;
    for (; i + 64 <= n; i += 64) {
        const uint64_t mask = mask64<Test::at_least>(x + i, threshold);
        store_mask(mask, bits + i / 8, 8);
        count += __builtin_popcountll(mask);
        for (int j = 0; j < 64; j += 8) {
            for (int l = 0; l < 8; ++l) {
                const T value = x[i + j + l];
                const bool above = value >= threshold;
                high[l] += double(above ? value : T(0));
                low[l] += double(above ? T(0) : value);
            }
        }
    }
    const int rest = int(n - i);
    if (rest > 0) {
        const uint64_t mask = mask_of<Test::at_least>(x + i, threshold, rest);
        store_mask(mask, bits + i / 8, (rest + 7) / 8);
        count += __builtin_popcountll(mask);
        for (int j = 0; j < rest; ++j) (mask >> j & 1 ? high : low)[j % 8] += double(x[i + j]);
    }
    sums[0] += double(count);
    for (int l = 0; l < 8; ++l) {
        sums[1] += high[l];
        sums[2] += low[l];
    }
}

// 32 bits as they lie in memory, of which only those of n elements are read.
GRACE_LOCAL uint32_t bits32(const uint8_t* bits, int64_t at, int64_t n) {
    uint32_t word = 0;
    const int64_t bytes = lesser(4, (n - at + 7) / 8);
    for (int64_t j = 0; j < bytes; ++j) word |= uint32_t(bits[at / 8 + j]) << (8 * j);
    return word;
}

template <class T>
static void binary_sum(const uint8_t* const* bits, const T* levels, int ranks, const T* onto, T* out, int64_t n,
                       bool around) {
    using Word = typename Format<T>::Word;
    in_blocks(out, n, around, [&](int64_t at, int64_t length, T* target) {
        for (int r = 0; r < ranks; ++r) {
            const Word low = bits_as<Word>(levels[2 * r]), differ = low ^ bits_as<Word>(levels[2 * r + 1]);
            const T* base = r > 0 ? target : onto == nullptr ? nullptr : onto + at;
            for (int64_t i = 0; i < length; i += 32) {
                alignas(64) T value[32];
                const uint32_t word = bits32(bits[r], at + i, n);
                for (uint32_t j = 0; j < 32; ++j) {
                    value[j] = bits_as<T>(low ^ (differ & (Word(0) - Word(word >> j & 1u))));
                }
                const int64_t here = lesser(32, length - i);
                if (here == 32) {
                    if (base == nullptr) {
                        for (int j = 0; j < 32; ++j) target[i + j] = value[j];
                    } else {
                        for (int j = 0; j < 32; ++j) target[i + j] = base[i + j] + value[j];
                    }
                } else {
                    for (int64_t j = 0; j < here; ++j) target[i + j] = base == nullptr ? value[j] : base[i + j] + value[j];
                }
            }
        }
    });
}

template <class T>
static void majority(const uint8_t* const* bits, int ranks, T* out, int64_t n, bool around) {
    in_blocks(out, n, around, [&](int64_t at, int64_t length, T* target) {
        for (int64_t i = 0; i < length; i += 32) {
            int32_t votes[32];
            for (int j = 0; j < 32; ++j) votes[j] = -ranks;
            for (int r = 0; r < ranks; ++r) {
                const uint32_t word = bits32(bits[r], at + i, n);
                for (uint32_t j = 0; j < 32; ++j) votes[j] += int32_t(word >> j & 1u) * 2;
            }
            const int64_t here = lesser(32, length - i);
            if (here == 32) {
                for (int j = 0; j < 32; ++j) target[i + j] = T((votes[j] > 0) - (votes[j] < 0));
            } else {
                for (int64_t j = 0; j < here; ++j) target[i + j] = T((votes[j] > 0) - (votes[j] < 0));
            }
        }
    });
}

// --- packing ---------------------------------------------------------------------------------------------------------------

static void pack(const uint8_t* codes, int bits, int64_t n, uint8_t* out) {
    if (bits == 8) {
        memcpy(out, codes, size_t(n));
        return;
    }
    int64_t i = 0;
    if (bits == 1) {
        for (; i + 8 <= n; i += 8) {
            uint64_t word;
            memcpy(&word, codes + i, 8);
            // Bit 0 of byte j comes to bit 56 + j of the product.
            *out++ = uint8_t((word & 0x0101010101010101u) * 0x0102040810204080u >> 56);
        }
    } else if (bits == 2) {
        for (; i + 8 <= n; i += 8, out += 2) {
            out[0] = uint8_t(codes[i] | codes[i + 1] << 2 | codes[i + 2] << 4 | codes[i + 3] << 6);
            out[1] = uint8_t(codes[i + 4] | codes[i + 5] << 2 | codes[i + 6] << 4 | codes[i + 7] << 6);
        }
    } else if (bits == 4) {
        for (; i + 8 <= n; i += 8, out += 4) {
            for (int j = 0; j < 4; ++j) out[j] = uint8_t(codes[i + 2 * j] | codes[i + 2 * j + 1] << 4);
        }
    } else {
        for (; i + 8 <= n; i += 8, out += bits) {
            uint64_t word = 0;
            for (int j = 0; j < 8; ++j) word |= uint64_t(codes[i + j]) << (bits * j);
            for (int j = 0; j < bits; ++j) out[j] = uint8_t(word >> (8 * j));
        }
    }
    if (i < n) {
        uint64_t word = 0;
        for (int j = 0; i + j < n; ++j) word |= uint64_t(codes[i + j]) << (bits * j);
        for (int64_t j = 0; j < ((n - i) * bits + 7) / 8; ++j) out[j] = uint8_t(word >> (8 * j));
    }
}

static void unpack(const uint8_t* data, int bits, int64_t n, uint8_t* codes) {
    if (bits == 8) {
        memcpy(codes, data, size_t(n));
        return;
    }
    const uint64_t mask = (uint64_t(1) << bits) - 1;
    int64_t i = 0;
    if (bits == 1) {
        for (; i + 8 <= n; i += 8) {
            const uint32_t byte = *data++;
            for (uint32_t j = 0; j < 8; ++j) codes[i + j] = uint8_t(byte >> j & 1u);
        }
    } else if (bits == 2) {
        for (; i + 8 <= n; i += 8, data += 2) {
            for (int j = 0; j < 4; ++j) codes[i + j] = uint8_t(data[0] >> (2 * j) & 3);
            for (int j = 0; j < 4; ++j) codes[i + 4 + j] = uint8_t(data[1] >> (2 * j) & 3);
        }
    } else if (bits == 4) {
        for (; i + 8 <= n; i += 8, data += 4) {
            for (int j = 0; j < 4; ++j) {
                codes[i + 2 * j] = data[j] & 15;
                codes[i + 2 * j + 1] = data[j] >> 4;
            }
        }
    } else {
        for (; i + 8 <= n; i += 8, data += bits) {
            uint64_t word = 0;
            for (int j = 0; j < bits; ++j) word |= uint64_t(data[j]) << (8 * j);
            for (int j = 0; j < 8; ++j) codes[i + j] = uint8_t(word >> (bits * j) & mask);
        }
    }
    if (i < n) {
        uint64_t word = 0;
        for (int64_t j = 0; j < ((n - i) * bits + 7) / 8; ++j) word |= uint64_t(data[j]) << (8 * j);
        for (int j = 0; i + j < n; ++j) codes[i + j] = uint8_t(word >> (bits * j) & mask);
    }
}
