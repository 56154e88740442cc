// Attention whose scores have learned terms of distances, too (T5): key by key, for each token and head by itself.
#include "attention_weights.h"
#include "exported.h"
#include "threads.h"

namespace octavo {
namespace {

struct Terms {
    const float* of;  // [count, heads]: of keys 0 … count - 1 positions before; the last is that of all farther ones
    int64_t stride, count;
};

// One token's head, at `position` of a request: scores of its keys, then the sum of values by their weights.
template <CacheType TYPE>
void attend(const Attention& job, const int32_t* table, const Terms& terms, const float* q, int64_t head,
            int64_t position, float* out) {
    const Cache& cache = job.cache;
    const int64_t size = cache.head_dim, width = job.width(), keys = position + 1;
    const int64_t kv_head = head / job.group(), padded = round_up(keys, VL);
    float *query = scratch(size_t(3 * width + padded)), *wide = query + width, *sums = wide + width;
    float* scores = sums + width;
    std::fill(query, scores, 0.0f);
    std::copy(q, q + size, query);
    auto widened = [&](int64_t at, int which) {
        widen_vector<TYPE>(cache.vector(table[at / cache.block_size], which, at % cache.block_size, kv_head), size, wide);
    };
    float highest = LOWEST;
    for (int64_t at = 0; at < keys; at++) {
        widened(at, 0);
        vf product = {};
        for (int64_t d = 0; d < size; d += VL) product = fma(load(query + d), load(wide + d), product);
        const int64_t distance = std::min(position - at, terms.count - 1);
        scores[at] = sum(product) * job.scale + terms.of[distance * terms.stride + head];
        highest = std::max(highest, scores[at]);
    }
    std::fill(scores + keys, scores + padded, LOWEST);
    vf total = {};
    for (int64_t at = 0; at < padded; at += VL) {
        vf weight = exp_nonpositive(load(scores + at) - highest);
        store(scores + at, weight);
        total = total + weight;
    }
    for (int64_t at = 0; at < keys; at++) {
        widened(at, 1);
        const vf weight = set1(scores[at]);
        for (int64_t d = 0; d < size; d += VL) store(sums + d, fma(weight, load(wide + d), load(sums + d)));
    }
    const float share = 1.0f / sum(total);
    for (int64_t d = 0; d < size; d++) out[d] = sums[d] * share;
}

}  // namespace
}  // namespace octavo

using namespace octavo;

extern "C" void octavo_distance_attention(const float* q, int64_t q_stride, int64_t num_heads, const void* data,
                                          int type, int64_t halves, int64_t block_size, int64_t num_kv_heads,
                                          int64_t head_dim, const int32_t* tables, int64_t table_stride,
                                          const int32_t* cu_q_lens, const int32_t* kv_lens, int64_t num_requests,
                                          const float* terms, int64_t terms_stride, int64_t num_terms, float scale,
                                          float* out, int threads) {
    Cache cache{(const uint8_t*)data, CacheType(type), halves, block_size, num_kv_heads, head_dim};
    Attention job{cache, q, q_stride, num_heads, tables, table_stride, cu_q_lens, kv_lens, scale, 0.0f, 0, out};
    parallel_for(num_requests * num_heads, threads, [&](int64_t task) {
        const int64_t request = task / num_heads, head = task % num_heads, end = cu_q_lens[request + 1];
        for (int64_t token = cu_q_lens[request]; token < end; token++)
            for_type(cache.type, [&](auto kind) {
                attend<kind.value>(job, job.table(int(request)), {terms, terms_stride, num_terms},
                                   q + token * q_stride + head * head_dim, head, kv_lens[request] - (end - token),
                                   out + (token * num_heads + head) * head_dim);
            });
    });
}
OCTAVO_EXPORTED(octavo_distance_attention)
