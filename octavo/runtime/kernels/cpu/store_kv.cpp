// What happens between a layer's projections and its attention: norms of heads, rotation, store; in one pass over
// the tokens, each of which stays in the first-level cache meanwhile.
#include "cache.h"
#include "rows.h"
#include "exported.h"
#include "threads.h"

namespace octavo {
namespace {

void rotate_pairs(float* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cos[i] - b * sin[i];
        x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
}

void rotate_halves(float* x, const float* cos, const float* sin, int64_t half) {
    float* y = x + half;
    walk(
        half,
        [&](int64_t i) {
            vf a = load(x + i), b = load(y + i), c = load(cos + i), s = load(sin + i);
            store(x + i, a * c - b * s);
            store(y + i, b * c + a * s);
        },
        [&](int64_t i) {
            float a = x[i], b = y[i];
            x[i] = a * cos[i] - b * sin[i];
            y[i] = b * cos[i] + a * sin[i];
        });
}

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

// The largest amount; not a number if any component is none, or infinite.
float largest_amount(const float* from, int64_t size) {
    vf top = {}, spoilt = {};
    float rest[VL] = {};
    for (int64_t d = 0; d < size; d += VL) {
        bool whole = d + VL <= size;
        if (!whole) std::memcpy(rest, from + d, size_t(size - d) * 4);
        vf x = load(whole ? from + d : rest);
        top = max(top, max(x, -x));
        spoilt = spoilt + x * 0.0f;
    }
    return largest(top) + sum(spoilt);
}

// One vector to int8; see `rounded` in cache_layout.py. Returns its scale.
float round_vector(const float* from, int8_t* to, int64_t size) {
    float top = largest_amount(from, size);
    if (!(top >= 1e-30f)) {
        std::memset(to, 0, size_t(size));
        return top >= 0 ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    }
    vf factor = set1(127.0f / top);
    int64_t d = 0;
    for (; d + VL <= size; d += VL) store_low8(to + d, to_int(load(from + d) * factor));
    if (d == size) return top / 127.0f;
    float rest[VL] = {};
    int8_t narrowed[VL];
    std::memcpy(rest, from + d, size_t(size - d) * 4);
    store_low8(narrowed, to_int(load(rest) * factor));
    std::memcpy(to + d, narrowed, size_t(size - d));
    return top / 127.0f;
}

// A token's keys (which = 0) or values (1), [num_kv_heads, head_dim].
void write(const Cache& cache, int64_t slot, int which, const float* from) {
    int64_t block = slot / cache.block_size, offset = slot % cache.block_size, size = cache.head_dim;
    uint8_t* to = (uint8_t*)cache.vector(block, which, offset, 0);
    if (cache.type != CACHE_I8) return narrow_vector(cache.type, from, to, cache.num_kv_heads * size);
    for (int64_t head = 0; head < cache.num_kv_heads; head++) {
        float scale = round_vector(from + head * size, (int8_t*)to + head * size, size);
        std::memcpy((uint8_t*)cache.scale(block, which, offset, head), &scale, sizeof scale);
    }
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// Queries and keys change in place, by a norm of their last `normed` components if there are weights, and by a
// rotation if there are tables, which the norm precedes or follows; then queries by a factor per token.
extern "C" void octavo_store_kv(float* q, int64_t q_stride, int64_t num_heads, float* k, int64_t k_stride,
                                const float* v, int64_t v_stride, void* data, int type, int64_t halves,
                                int64_t block_size, int64_t num_kv_heads, int64_t head_dim,
                                const int64_t* slots, int64_t num_tokens, const float* q_weight,
                                const float* k_weight, int64_t normed, float eps, int follows, const float* q_factors,
                                const float* cos, const float* sin, int64_t half, int interleaved, int threads) {
    Cache cache{(const uint8_t*)data, CacheType(type), halves, block_size, num_kv_heads, head_dim};
    auto rotate = interleaved ? rotate_pairs : rotate_halves;
    auto change = [&](int64_t t, float* x, int64_t heads, const float* weight) {
        for (float* end = x + heads * head_dim; x < end; x += head_dim) {
            float* last = x + head_dim - normed;
            if (weight && !follows) normalize(last, weight, normed, eps, last);
            if (cos) rotate(x, cos + t * half, sin + t * half, half);
            if (weight && follows) normalize(last, weight, normed, eps, last);
        }
    };
    for_rows(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, threads, [&](int64_t t) {
        float* queries = q + t * q_stride;
        change(t, queries, num_heads, q_weight);
        for (int64_t i = 0; q_factors && i < num_heads * head_dim; i++) queries[i] *= q_factors[t];
        if (slots[t] < 0) return;
        change(t, k + t * k_stride, num_kv_heads, k_weight);
        write(cache, slots[t], 0, k + t * k_stride);
        if (halves > 1) write(cache, slots[t], 1, v + t * v_stride);
    });
}
OCTAVO_EXPORTED(octavo_store_kv)
