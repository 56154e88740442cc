// The paged cache as kernels see it: [num_blocks, 2, block_size, num_kv_heads, head_dim], keys before values.
#pragma once
#include "simd.h"

namespace octavo {

enum CacheType { CACHE_F32 = 0, CACHE_F16 = 1, CACHE_BF16 = 2 };

struct Cache {
    const uint8_t* data;
    CacheType type;
    int64_t block_size, num_kv_heads, head_dim;

    int64_t value_bytes() const { return type == CACHE_F32 ? 4 : 2; }
    int64_t slot_bytes() const { return num_kv_heads * head_dim * value_bytes(); }
    // From a key to the value of the same slot.
    int64_t key_to_value() const { return block_size * slot_bytes(); }
    // Key (which = 0) or value (1) of one head at an offset of a block.
    const uint8_t* vector(int64_t block, int which, int64_t offset, int64_t head) const {
        return data + ((block * 2 + which) * block_size + offset) * slot_bytes() +
               head * head_dim * value_bytes();
    }
};

template <CacheType TYPE>
inline vf load_cached(const uint8_t* p, int64_t i) {
    if constexpr (TYPE == CACHE_F32) return load((const float*)p + i);
    if constexpr (TYPE == CACHE_F16) return load_f16((const uint16_t*)p + i);
    if constexpr (TYPE == CACHE_BF16) return load_bf16((const uint16_t*)p + i);
}

// `size` cached values to floats, the last vector filled up with zeros.
template <CacheType TYPE>
inline void widen_vector(const uint8_t* from, int64_t size, float* to) {
    constexpr int64_t BYTES = TYPE == CACHE_F32 ? 4 : 2;
    int64_t d = 0;
    for (; d + VL <= size; d += VL) store(to + d, load_cached<TYPE>(from, d));
    if (d == size) return;
    uint8_t rest[VL * BYTES] = {};
    std::memcpy(rest, from + d * BYTES, size_t((size - d) * BYTES));
    store(to + d, load_cached<TYPE>(rest, 0));
}

}  // namespace octavo
