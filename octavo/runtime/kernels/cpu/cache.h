// The paged cache as kernels see it, laid out as in kernels/cache_layout.py: of each block the keys, then the
// values, [block_size, num_kv_heads, head_dim]; in int8 the scales [num_kv_heads, block_size] behind each. With one
// half, keys are the values, too.
#pragma once
#include <type_traits>

#include "simd.h"

namespace octavo {

enum CacheType { CACHE_F32 = 0, CACHE_F16 = 1, CACHE_BF16 = 2, CACHE_I8 = 3 };

struct Cache {
    const uint8_t* data;
    CacheType type;
    int64_t halves, block_size, num_kv_heads, head_dim;

    int64_t value_bytes() const { return type == CACHE_F32 ? 4 : type == CACHE_I8 ? 1 : 2; }
    int64_t slot_bytes() const { return num_kv_heads * head_dim * value_bytes(); }
    // From a key to the value of the same slot, and from its scale to that one's.
    int64_t key_to_value() const { return halves == 1 ? 0 : half_bytes(); }
    int64_t half_bytes() const {
        return block_size * (slot_bytes() + (type == CACHE_I8 ? num_kv_heads * int64_t(sizeof(float)) : 0));
    }
    // Key (which = 0) or value (1) of one head at an offset of a block.
    const uint8_t* vector(int64_t block, int which, int64_t offset, int64_t head) const {
        return data + block * halves * half_bytes() + which * key_to_value() + offset * slot_bytes() +
               head * head_dim * value_bytes();
    }
    // Of int8: the scale of such a vector; those of the next offsets follow.
    const uint8_t* scale(int64_t block, int which, int64_t offset, int64_t head) const {
        return data + block * halves * half_bytes() + which * key_to_value() + block_size * slot_bytes() +
               (head * block_size + offset) * int64_t(sizeof(float));
    }
};

template <CacheType TYPE>
inline vf load_cached(const uint8_t* p, int64_t i) {
    if constexpr (TYPE == CACHE_F32) return load((const float*)p + i);
    if constexpr (TYPE == CACHE_F16) return load_f16((const uint16_t*)p + i);
    if constexpr (TYPE == CACHE_BF16) return load_bf16((const uint16_t*)p + i);
    if constexpr (TYPE == CACHE_I8) return load_i8((const int8_t*)p + i);
}

// `size` cached values to floats, the last vector filled up with zeros; int8 without its scale.
template <CacheType TYPE>
inline void widen_vector(const uint8_t* from, int64_t size, float* to) {
    constexpr int64_t BYTES = TYPE == CACHE_F32 ? 4 : TYPE == CACHE_I8 ? 1 : 2;
    int64_t d = 0;
    for (; d + VL <= size; d += VL) store(to + d, load_cached<TYPE>(from, d));
    if (d == size) return;
    uint8_t rest[VL * BYTES] = {};
    std::memcpy(rest, from + d * BYTES, size_t((size - d) * BYTES));
    store(to + d, load_cached<TYPE>(rest, 0));
}

// Call body(the type as a constant) for a type known at run time.
template <class Body>
inline void for_type(CacheType type, Body&& body) {
    if (type == CACHE_F32) body(std::integral_constant<CacheType, CACHE_F32>());
    if (type == CACHE_F16) body(std::integral_constant<CacheType, CACHE_F16>());
    if (type == CACHE_BF16) body(std::integral_constant<CacheType, CACHE_BF16>());
    if (type == CACHE_I8) body(std::integral_constant<CacheType, CACHE_I8>());
}

}  // namespace octavo
