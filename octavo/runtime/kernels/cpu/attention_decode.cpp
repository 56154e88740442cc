// Float32 attention of few rows over many keys: decoding. The cache is read once, as it lies; what comes next
// is asked for while what is there is used.
#include "attention_weights.h"

namespace octavo {
namespace {

constexpr int ROWS = 4;    // rows that share what is read of the cache
constexpr int CHUNK = 16;  // values added before the next keys are asked for

void prefetch(const uint8_t* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

// Where the keys of a tile are; for places that no row sees, the nearest one that some row sees.
struct Keys {
    const uint8_t* at[TILE];

    Keys(const Attention& job, const Piece& piece, int64_t tile, int64_t begin, int64_t end) {
        int first = int(std::max(begin - tile, int64_t(0))), last = int(std::min<int64_t>(end - tile, TILE));
        if (first >= last) last = 0;  // behind the end: nothing to read, nor to ask for
        const int64_t slot = job.cache.slot_bytes(), size = job.cache.block_size;
        for (int i = first; i < last;) {
            const uint8_t* key = piece.key(job, tile + i);
            int next = int(std::min<int64_t>(last, i + size - (tile + i) % size));
            for (; i < next; i++, key += slot) at[i] = key;
        }
        const uint8_t* low = last ? at[first] : nullptr;
        const uint8_t* high = last ? at[last - 1] : nullptr;
        std::fill(at, at + (last ? first : 0), low);
        std::fill(at + last, at + TILE, high);
    }
};

#if defined(OCTAVO_AVX512)
// 16 components of a query as `score` wants them: of each eight the even ones, then the odd ones.
inline vf in_quarters(vf q) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15), q);
}

// Components d … d + 7 of four keys, each in a quarter: the even ones, the odd ones.
struct Quarters {
    vf even, odd;
};

inline __m512i four(const void* a, const void* b, const void* c, const void* d) {
    auto part = [](const void* p) { return _mm_loadu_si128((const __m128i*)p); };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(part(a)), part(b), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(part(c)), part(d), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

template <CacheType TYPE>
OCTAVO_INLINE Quarters quarters(const uint8_t* const* keys, int64_t d) {
    const int64_t at = TYPE == CACHE_F32 ? 4 * d : TYPE == CACHE_I8 ? d : 2 * d;
    const uint8_t *a = keys[0] + at, *b = keys[4] + at, *c = keys[8] + at, *e = keys[12] + at;
    if constexpr (TYPE == CACHE_F32) {
        const __m512 low = (__m512)four(a, b, c, e), high = (__m512)four(a + 16, b + 16, c + 16, e + 16);
        return {_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xDD)};
    } else if constexpr (TYPE == CACHE_I8) {
        const __m256i bytes = _mm256_setr_epi64x(read<int64_t>(a), read<int64_t>(b), read<int64_t>(c), read<int64_t>(e));
        const __m512i both = _mm512_cvtepi8_epi16(bytes);
        return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(both, 16), 16)),
                _mm512_cvtepi32_ps(_mm512_srai_epi32(both, 16))};
    } else {
        const __m512i both = four(a, b, c, e);
        if constexpr (TYPE == CACHE_BF16)
            return {(vf)_mm512_slli_epi32(both, 16), (vf)_mm512_and_si512(both, _mm512_set1_epi32(int(0xFFFF0000)))};
        return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(both)),
                _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)))};
    }
}

// Scores of R rows and the next 16 keys. Of a[i] quarter k is that of key i + 4 k.
template <CacheType TYPE, int R>
void score(const float* q, int64_t size, const uint8_t* const* keys, float* scores) {
    vf a[R][4] = {};
    for (int64_t d = 0; d < size; d += 8) {
        vf even[R], odd[R];
        for (int r = 0; r < R; r++) {
            even[r] = in_register(_mm512_broadcast_f32x4(_mm_loadu_ps(q + r * size + d)));
            odd[r] = in_register(_mm512_broadcast_f32x4(_mm_loadu_ps(q + r * size + d + 4)));
        }
        for (int i = 0; i < 4; i++) {
            const Quarters k = quarters<TYPE>(keys + i, d);
            for (int r = 0; r < R; r++) a[r][i] = fma(odd[r], k.odd, fma(even[r], k.even, a[r][i]));
        }
    }
    for (int r = 0; r < R; r++) {
        const vf first = _mm512_unpacklo_ps(a[r][0], a[r][1]) + _mm512_unpackhi_ps(a[r][0], a[r][1]);
        const vf second = _mm512_unpacklo_ps(a[r][2], a[r][3]) + _mm512_unpackhi_ps(a[r][2], a[r][3]);
        store(scores + r * TILE, _mm512_shuffle_ps(first, second, 0x44) + _mm512_shuffle_ps(first, second, 0xEE));
    }
}
#else
inline vf in_quarters(vf q) { return q; }

// Lane i = sum of the lanes of a[i]: neighbours first, then pairs, then fours.
inline vf sums(const vf (&a)[VL]) {
#if defined(OCTAVO_AVX2)
    __m256 ab = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    __m256 cd = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
    return _mm256_permute2f128_ps(ab, cd, 0x20) + _mm256_permute2f128_ps(ab, cd, 0x31);
#elif defined(OCTAVO_NEON)
    auto pairs = [](vf b, vf c) { return (vf)vpaddq_f32((float32x4_t)b, (float32x4_t)c); };
    return pairs(pairs(a[0], a[1]), pairs(a[2], a[3]));
#else
    vf out;
    for (int i = 0; i < VL; i++) out[i] = (a[i][0] + a[i][1]) + (a[i][2] + a[i][3]);
    return out;
#endif
}

// Scores of R rows and the next VL keys.
template <CacheType TYPE, int R>
void score(const float* q, int64_t size, const uint8_t* const* keys, float* scores) {
    constexpr int KEYS = R > 2 ? 2 : 4;
    vf lanes[R][VL];
    for (int key = 0; key < VL; key += KEYS) {
        vf acc[R][KEYS] = {};
        for (int64_t d = 0; d < size; d += VL) {
            vf k[KEYS];
            for (int j = 0; j < KEYS; j++) k[j] = in_register(load_cached<TYPE>(keys[key + j], d));
            for (int r = 0; r < R; r++) {
                vf a = in_register(load(q + r * size + d));
                for (int j = 0; j < KEYS; j++) acc[r][j] = fma(a, k[j], acc[r][j]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int j = 0; j < KEYS; j++) lanes[r][key + j] = acc[r][j];
    }
    for (int r = 0; r < R; r++) store(scores + r * TILE, sums(lanes[r]));
}
#endif

// Per row: N vectors of out = out * decay + sum over places of weight * value, place by place.
template <CacheType TYPE, int R, int N>
void add(const uint8_t* const* keys, int64_t offset, int places, const float* weights, const float* decay,
         float* out, int64_t width) {
    vf acc[R][N];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) acc[r][i] = load(out + r * width + i * VL) * decay[r];
    for (int place = 0; place < places; place++) {
        vf v[N];
        for (int i = 0; i < N; i++) v[i] = in_register(load_cached<TYPE>(keys[place] + offset, i * VL));
        for (int r = 0; r < R; r++) {
            vf weight = set1(weights[r * TILE + place]);
            for (int i = 0; i < N; i++) acc[r][i] = fma(weight, v[i], acc[r][i]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) store(out + r * width + i * VL, acc[r][i]);
}

// A tile on its way past all rows.
struct Visit {
    const Attention& job;
    const Piece& piece;
    const State& state;
    int64_t tile;
    const Keys &keys, &next_keys;
    const Scales* scales;
    const float* q;
    float* scores;
    bool ask;  // whether to prefetch

    // R rows from `row` on.
    template <CacheType TYPE, int R>
    void pass(int64_t row) const {
        Range block = seen_by(job, piece, row, R, tile);
        if (block.empty()) return;
        int64_t size = job.cache.head_dim, width = job.width(), bytes = size * job.cache.value_bytes();
        int64_t to_value = job.cache.key_to_value();
        for (int at = block.begin; at < block.end; at += VL) {
            for (int i = 0; i < VL && ask; i++) prefetch(keys.at[at + i] + to_value, bytes);
            score<TYPE, R>(q + row * size, size, keys.at + at, scores + at);
        }
        float decay[R];
        for (int r = 0; r < R; r++)
            decay[r] = weigh<TYPE == CACHE_I8>(job.soft_cap, scales, scores + r * TILE, block,
                                               visible(job, piece, row + r, tile), state.highest[row + r],
                                               state.total[row + r]);
        constexpr int N = R > 2 && VL == 8 ? 2 : 4;
        for (int at = block.begin; at < block.end; at += CHUNK) {
            for (int i = 0; i < CHUNK && ask && next_keys.at[0]; i++) prefetch(next_keys.at[at + i], bytes);
            int places = std::min(CHUNK, block.end - at);
            float* out = state.out + row * width;
            int64_t d = 0, value_bytes = job.cache.value_bytes();
            auto add_vectors = [&](auto n) {
                add<TYPE, R, n.value>(keys.at + at, to_value + d * value_bytes, places, scores + at, decay,
                                      out + d, width);
                d += n.value * VL;
            };
            while (d + N * VL <= size) add_vectors(std::integral_constant<int, N>());
            while (d < size) add_vectors(std::integral_constant<int, 1>());
            std::fill(decay, decay + R, 1.0f);
        }
    }

    template <CacheType TYPE>
    void pass_all(int64_t rows) {
        for (int64_t row = 0; row < rows; row += ROWS, ask = false) {
            int64_t left = rows - row;
            if (left >= 4) pass<TYPE, 4>(row);
            if (left == 3) pass<TYPE, 3>(row);
            if (left == 2) pass<TYPE, 2>(row);
            if (left == 1) pass<TYPE, 1>(row);
        }
    }
};

void ask_for_scales(const Attention& job, const Piece& piece, int64_t tile, int64_t end) {
    int64_t last = std::min(tile + TILE, end);
    for (int64_t at = tile; at < last; at = (at / job.cache.block_size + 1) * job.cache.block_size) {
        const uint8_t* scale = piece.key_scale(job, at);
        __builtin_prefetch(scale);
        __builtin_prefetch(scale + job.cache.key_to_value());
    }
}

template <CacheType TYPE>
void see(const Attention& job, const Piece& piece, int64_t begin, int64_t end, const State& state,
         float* space) {
    int64_t rows = piece.rows(job), size = job.cache.head_dim;
    float *scores = space, *q = scores + ROWS * TILE;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < size; d += VL)
            store(q + row * size + d, in_quarters(load(piece.query(job, row) + d) * job.scale));
    int64_t tile = begin / TILE * TILE;
    Keys keys(job, piece, tile, begin, end);
    for (const uint8_t* key : keys.at) prefetch(key, size * job.cache.value_bytes());
    for (; tile < end; tile += TILE) {
        Keys next(job, piece, tile + TILE, begin, end);
        auto visit = [&](const Scales* scales) {
            Visit{job, piece, state, tile, keys, next, scales, q, scores, true}.pass_all<TYPE>(rows);
        };
        if constexpr (TYPE == CACHE_I8) {
            ask_for_scales(job, piece, tile + TILE, end);
            const Scales scales(job, piece, tile, part_of(tile, begin, end));
            visit(&scales);
        } else {
            visit(nullptr);
        }
        keys = next;
    }
}

int64_t space(const Attention& job, int64_t rows) { return ROWS * TILE + rows * job.cache.head_dim; }

void see_any(const Attention& job, const Piece& piece, int64_t begin, int64_t end, const State& state,
             float* space) {
    for_type(job.cache.type, [&](auto type) { see<type.value>(job, piece, begin, end, state, space); });
}

}  // namespace

const Arithmetic decode_kernels = {space, nullptr, see_any, nullptr};

}  // namespace octavo
