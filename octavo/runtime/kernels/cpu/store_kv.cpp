// New keys and values into the paged cache.
#include <algorithm>

#include "cache.h"
#include "tape.h"
#include "threads.h"

namespace octavo {
namespace {

void narrow_vector(CacheType type, const float* from, uint8_t* to, int64_t size) {
    if (type == CACHE_F32) {
        std::memcpy(to, from, size_t(size) * 4);
        return;
    }
    uint16_t* out = (uint16_t*)to;
    auto narrow = type == CACHE_BF16 ? store_bf16 : store_f16;
    int64_t d = 0;
    for (; d + VL <= size; d += VL) narrow(out + d, load(from + d));
    if (d == size) return;
    float rest[VL] = {};
    uint16_t narrowed[VL];
    std::memcpy(rest, from + d, size_t(size - d) * 4);
    narrow(narrowed, load(rest));
    std::memcpy(out + d, narrowed, size_t(size - d) * 2);
}

}  // namespace
}  // namespace octavo

using namespace octavo;

extern "C" void octavo_write_kv(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                                void* data, int type, int64_t block_size, int64_t num_kv_heads,
                                int64_t head_dim, const int64_t* slots, int64_t num_tokens, int threads) {
    Cache cache{(const uint8_t*)data, CacheType(type), block_size, num_kv_heads, head_dim};
    int64_t size = num_kv_heads * head_dim, step = 1 + 32768 / size;
    parallel_for((num_tokens + step - 1) / step, threads, [&](int64_t task) {
        for (int64_t t = task * step; t < std::min(num_tokens, (task + 1) * step); t++) {
            if (slots[t] < 0) continue;
            int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
            narrow_vector(cache.type, k + t * k_stride, (uint8_t*)cache.vector(block, 0, offset, 0), size);
            narrow_vector(cache.type, v + t * v_stride, (uint8_t*)cache.vector(block, 1, offset, 0), size);
        }
    });
}
OCTAVO_TAPED(octavo_write_kv)
