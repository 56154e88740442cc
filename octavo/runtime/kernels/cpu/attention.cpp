// Causal attention of a ragged batch over the paged cache, and the write into it. After "online softmax"
// (Milakov and Gimelshein, 2018) and FlashAttention's tiling.
//
// Keys are visited in tiles of TILE positions that begin at multiples of TILE, whatever the block size: a
// query's result depends on its position and the cache alone, never on how the prompt was cut into steps nor
// on its neighbours in the batch. Only visible slots are read.
#include <algorithm>
#include <vector>

#include "simd.h"
#include "tape.h"
#include "threads.h"

namespace octavo {
namespace {

constexpr int TILE = 32;
constexpr int ROWS_PER_TASK = 48;  // query heads that share the keys and values of a tile
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

enum CacheType { CACHE_F32 = 0, CACHE_F16 = 1, CACHE_BF16 = 2 };

struct Cache {
    const uint8_t* data;
    CacheType type;
    int64_t block_size, num_kv_heads, head_dim;

    int64_t value_bytes() const { return type == CACHE_F32 ? 4 : 2; }
    int64_t slot_bytes() const { return num_kv_heads * head_dim * value_bytes(); }
    // Key (which = 0) or value (1) of one head at an offset of a block.
    const uint8_t* vector(int64_t block, int which, int64_t offset, int64_t head) const {
        return data + ((block * 2 + which) * block_size + offset) * slot_bytes() +
               head * head_dim * value_bytes();
    }
};

struct Attention {
    Cache cache;
    const float* q;
    int64_t q_stride, num_heads;
    const int32_t* tables;
    int64_t table_stride;
    const int32_t *cu_q_lens, *kv_lens;
    float scale, soft_cap;
    int64_t window;
    float* out;

    int64_t group() const { return num_heads / cache.num_kv_heads; }
    int64_t oldest_visible(int64_t position) const {
        return window ? std::max<int64_t>(0, position - window + 1) : 0;
    }
};

// Some consecutive queries of one request with all heads that share a KV head.
struct Piece {
    int request;
    int64_t head, first, last;  // first … last - 1: places in the batch
    int64_t position;           // of `first` in its request
};

int64_t pad(int64_t head_dim) { return (head_dim + VL - 1) / VL * VL; }

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

void prefetch(const uint8_t* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

// Copy keys and values of positions begin … end - 1 to rows position % TILE of k and v, and ask for those of
// the next tile, up to position `limit`.
template <CacheType TYPE>
void gather(const Attention& job, const Piece& piece, int64_t begin, int64_t end, int64_t limit, float* k,
            float* v) {
    const Cache& cache = job.cache;
    const int32_t* table = job.tables + piece.request * job.table_stride;
    int64_t size = cache.head_dim, width = pad(size), slot = cache.slot_bytes(),
            bytes = size * cache.value_bytes();
    auto for_runs = [&](int64_t at, int64_t stop, auto body) {  // body(keys, values, position) of each slot
        while (at < stop) {
            int64_t offset = at % cache.block_size, next = std::min(stop, at - offset + cache.block_size);
            const uint8_t* keys = cache.vector(table[at / cache.block_size], 0, offset, piece.head);
            const uint8_t* values = keys + cache.block_size * slot;
            for (; at < next; at++, keys += slot, values += slot) body(keys, values, at);
        }
    };
    for_runs(std::min(limit, end), std::min(limit, end + TILE),
             [&](const uint8_t* keys, const uint8_t* values, int64_t) {
                 prefetch(keys, bytes);
                 prefetch(values, bytes);
             });
    for_runs(begin, end, [&](const uint8_t* keys, const uint8_t* values, int64_t at) {
        widen_vector<TYPE>(keys, size, k + at % TILE * width);
        widen_vector<TYPE>(values, size, v + at % TILE * width);
    });
}

#if defined(OCTAVO_AVX2) || defined(OCTAVO_AVX512)
inline __m256 sums8(const __m256* a) {
    __m256 ab = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    __m256 cd = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
    return _mm256_permute2f128_ps(ab, cd, 0x20) + _mm256_permute2f128_ps(ab, cd, 0x31);
}
#endif

// Lane i = sum of the lanes of a[i].
inline vf sums(const vf (&a)[VL]) {
#if defined(OCTAVO_AVX512)
    __m256 folded[16];
    for (int i = 0; i < 16; i++) folded[i] = _mm512_castps512_ps256(a[i]) + _mm512_extractf32x8_ps(a[i], 1);
    return _mm512_insertf32x8(_mm512_castps256_ps512(sums8(folded)), sums8(folded + 8), 1);
#elif defined(OCTAVO_AVX2)
    return sums8(a);
#else
    vf out;
    for (int i = 0; i < VL; i++) out[i] = sum(a[i]);
    return out;
#endif
}

// Dot products of q with the next VL rows of k.
inline vf dots(const float* q, const float* k, int64_t width) {
    vf acc[VL] = {};
    for (int64_t d = 0; d < width; d += VL) {
        vf a = load(q + d);
        for (int i = 0; i < VL; i++) acc[i] = fma(a, load(k + i * width + d), acc[i]);
    }
    return sums(acc);
}

// out = out * decay + sum over rows begin … end - 1 of weights[row] * v[row], for N vectors.
template <int N>
void add_values(float* out, float decay, const float* weights, int begin, int end, const float* v,
                int64_t width) {
    vf acc[N];
    for (int i = 0; i < N; i++) acc[i] = load(out + i * VL) * decay;
    for (int row = begin; row < end; row++) {
        vf weight = set1(weights[row]);
        for (int i = 0; i < N; i++) acc[i] = fma(weight, load(v + row * width + i * VL), acc[i]);
    }
    for (int i = 0; i < N; i++) store(out + i * VL, acc[i]);
}

// One query head on its way through the keys.
struct Row {
    float* q;
    float* out;
    float highest, total;
};

// Let the row see positions begin … end - 1 of the tile (0 <= begin < end <= TILE).
void visit(const Attention& job, Row& row, const float* k, const float* v, int begin, int end,
           int64_t width) {
    alignas(64) float weights[TILE];
    vf lanes, highest = set1(row.highest);
    for (int i = 0; i < VL; i++) lanes[i] = float(i);
    int first = begin / VL * VL;
    for (int at = first; at < end; at += VL) {
        vf score = dots(row.q, k + at * width, width);
        if (job.soft_cap > 0) score = tanh(score * (1.0f / job.soft_cap)) * job.soft_cap;
        vf place = lanes + float(at);
        score = place < set1(float(begin)) ? set1(LOWEST) : score;
        score = place < set1(float(end)) ? score : set1(LOWEST);
        store(weights + at, score);
        highest = max(highest, score);
    }
    float now = largest(highest);
    if (now == LOWEST) return;  // scores of -inf: nothing to see yet
    float decay = std::exp(row.highest - now);
    vf total = {};
    for (int at = first; at < end; at += VL) {
        vf weight = exp(load(weights + at) - now);
        store(weights + at, weight);
        total = total + weight;
    }
    row.highest = now;
    row.total = row.total * decay + sum(total);
    int64_t d = 0;
    for (; d + 8 * VL <= width; d += 8 * VL)
        add_values<8>(row.out + d, decay, weights, begin, end, v + d, width);
    for (; d < width; d += VL) add_values<1>(row.out + d, decay, weights, begin, end, v + d, width);
}

void attend(const Attention& job, const Piece& piece) {
    int64_t group = job.group(), size = job.cache.head_dim, width = pad(size);
    int64_t num_rows = (piece.last - piece.first) * group;
    float* k = scratch(size_t((2 * TILE + 2 * num_rows) * width));
    float* v = k + TILE * width;
    std::vector<Row> rows;
    rows.reserve(size_t(num_rows));
    for (int64_t i = 0; i < num_rows; i++) {
        float* q = v + (TILE + 2 * i) * width;
        const float* from =
            job.q + (piece.first + i / group) * job.q_stride + (piece.head * group + i % group) * size;
        std::fill(q, q + 2 * width, 0.0f);
        for (int64_t d = 0; d < size; d++) q[d] = from[d] * job.scale;
        rows.push_back({q, q + width, LOWEST, 0.0f});
    }
    auto read = job.cache.type == CACHE_F32   ? gather<CACHE_F32>
                : job.cache.type == CACHE_F16 ? gather<CACHE_F16>
                                              : gather<CACHE_BF16>;
    int64_t oldest = job.oldest_visible(piece.position), limit = piece.position + piece.last - piece.first;
    for (int64_t tile = oldest / TILE * TILE; tile < limit; tile += TILE) {
        read(job, piece, std::max(oldest, tile), std::min(limit, tile + TILE), limit, k, v);
        for (int64_t i = 0; i < num_rows; i++) {
            int64_t position = piece.position + i / group;
            int64_t begin = std::max(job.oldest_visible(position) - tile, int64_t(0));
            int64_t end = std::min<int64_t>(position + 1 - tile, TILE);
            if (begin < end) visit(job, rows[size_t(i)], k, v, int(begin), int(end), width);
        }
    }
    for (int64_t i = 0; i < num_rows; i++) {
        float* to =
            job.out + ((piece.first + i / group) * job.num_heads + piece.head * group + i % group) * size;
        for (int64_t d = 0; d < size; d++) to[d] = rows[size_t(i)].out[d] / rows[size_t(i)].total;
    }
}

// The batch in pieces, the longest contexts first so that threads end together.
std::vector<Piece> cut(const Attention& job, int num_requests) {
    std::vector<Piece> pieces;
    int64_t step = std::max<int64_t>(1, ROWS_PER_TASK / job.group());
    for (int r = 0; r < num_requests; r++) {
        int64_t begin = job.cu_q_lens[r], end = job.cu_q_lens[r + 1];
        for (int64_t first = begin; first < end; first += step)
            for (int64_t head = 0; head < job.cache.num_kv_heads; head++)
                pieces.push_back({r, head, first, std::min(end, first + step), job.kv_lens[r] - end + first});
    }
    auto work = [](const Piece& p) { return (p.position + p.last - p.first) * (p.last - p.first); };
    std::stable_sort(pieces.begin(), pieces.end(),
                     [&](const Piece& a, const Piece& b) { return work(a) > work(b); });
    return pieces;
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

extern "C" void octavo_attention(const float* q, int64_t q_stride, int64_t num_heads, const void* data,
                                 int type, int64_t block_size, int64_t num_kv_heads, int64_t head_dim,
                                 const int32_t* tables, int64_t table_stride, const int32_t* cu_q_lens,
                                 const int32_t* kv_lens, int num_requests, float scale, int64_t window,
                                 float soft_cap, float* out, int threads) {
    Cache cache{(const uint8_t*)data, CacheType(type), block_size, num_kv_heads, head_dim};
    Attention job{cache,     q,       q_stride, num_heads, tables, table_stride,
                  cu_q_lens, kv_lens, scale,    soft_cap,  window, out};
    std::vector<Piece> pieces = cut(job, num_requests);
    parallel_for(int64_t(pieces.size()), threads, [&](int64_t i) { attend(job, pieces[size_t(i)]); });
}
OCTAVO_TAPED(octavo_attention)
