// Attention by products of tiles: keys, values, queries and weights in bf16, sums and softmax in float32. For
// caches of bf16 or int8, one row or many: a lane of a vector is a row, so a row never meets its neighbours.
#include "amx.h"
#include "attention.h"
#include "lanes.h"

namespace octavo {

#if defined(OCTAVO_TILES)
namespace {

constexpr int ROWS = 16;           // queries beside each other
constexpr int64_t TILE_FLOATS = 256;
constexpr float NOTHING = -5e29f;  // the highest score of a row that saw no key
constexpr float HIDDEN = -1e36f;   // … and of a key it must not see, below that with any sane scale
constexpr float LOG2_E = 1.44269504088896341f;
constexpr float SLACK = 8;  // by how much a score may lie above those that its row's sums are scaled to

// Work space, in tiles but for the last three.
struct Space {
    float *queries;  // per 16 rows: head_dim / 32 tiles of 16 pairs of components x 16 rows
    float *values;   // per 32 keys: head_dim / 16 tiles of 16 pairs of keys x 16 components
    float *scores;   // twice 64 keys x 16 rows: while one is weighed the next is computed
    float *weights;  // per 32 keys: 16 rows x 16 pairs of keys
    uint8_t* zeros;   // a key, or a value
    int32_t* places;  // of rows; behind the last row, of that
    float* widened;   // of int8: keys and then values in bf16

    static int64_t floats(const Attention& job, int64_t rows) {
        int64_t size = job.cache.head_dim, widened = job.cache.type == CACHE_I8 ? TILE * size : 0;
        return round_up(rows, ROWS) * (size / 2 + 1) + TILE * size / 2 + 10 * TILE_FLOATS + size + widened;
    }
    Space(float* space, int64_t rows, int64_t size)
        : queries(space),
          values(queries + round_up(rows, ROWS) * size / 2),
          scores(values + TILE * size / 2),
          weights(scores + 8 * TILE_FLOATS),
          zeros((uint8_t*)(weights + 2 * TILE_FLOATS)),
          places((int32_t*)(weights + 2 * TILE_FLOATS + size)),
          widened((float*)places + round_up(rows, ROWS)) {
        std::fill(weights + 2 * TILE_FLOATS, weights + 2 * TILE_FLOATS + size, 0.0f);
    }
};

// Places of even and odd floats of 32; of those that `pack_values` puts in either tile, and of these in order.
constexpr words EVEN = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, ODD = EVEN + 1;
constexpr words LOW = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}, HIGH = LOW + 4;
constexpr words FRONT = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23}, BACK = FRONT + 8;

void pack_queries(const Attention& job, const Piece& piece, float* to) {
    int64_t rows = piece.rows(job), size = job.cache.head_dim;
    for (int64_t first = 0; first < rows; first += ROWS)
        for (int64_t d = 0; d < size; d += 32, to += TILE_FLOATS) {
            std::fill(to, to + TILE_FLOATS, 0.0f);
            for (int64_t i = 0; i < std::min<int64_t>(ROWS, rows - first); i++) {
                const float* q = piece.query(job, first + i) + d;
                floats low = at<floats>(q), high = at<floats>(q + 16);
                words row = pairs(__builtin_shuffle(low, high, EVEN), __builtin_shuffle(low, high, ODD));
                std::memcpy(to + 16 * i, &row, 64);
            }
            turn(to);
        }
}

// `size` numbers of int8, times `scale`, to bf16.
void widen(const uint8_t* from, float scale, int64_t size, uint16_t* to) {
    for (int64_t d = 0; d < size; d += 32) {
        integers both = __builtin_convertvector(at<u16x16>(from + d), integers);
        integers even = (both << 24) >> 24, odd = (both << 16) >> 24;
        words row = pairs(__builtin_convertvector(even, floats) * scale,
                          __builtin_convertvector(odd, floats) * scale);
        std::memcpy(to + d, &row, 64);
    }
}

// One tile of keys: where each 16 of them and each value are, and the scales of 16.
struct Cached {
    const uint8_t *keys[TILE / 16], *values[TILE], *scales[TILE / 16];
    int64_t key_stride[TILE / 16];

    Cached(const Attention& job, const Piece& piece, int64_t tile, Range seen, const uint8_t* zeros) {
        int64_t slot = job.cache.slot_bytes(), to_value = job.cache.key_to_value();
        for (int first = 0; first < TILE; first += 16) {
            bool some = first < seen.end && first + 16 > seen.begin;
            const uint8_t* key = some ? piece.key(job, tile + first) : zeros;
            keys[first / 16] = key;
            key_stride[first / 16] = some ? slot : 0;
            scales[first / 16] = some ? piece.key_scale(job, tile + first) : nullptr;
            for (int i = first; i < first + 16; i++)
                values[i] = i >= seen.begin && i < seen.end ? key + to_value + (i - first) * slot : zeros;
        }
    }
    // What was int8 in bf16, in `to`: keys, then values. Places where nothing is stay where they are: zeros.
    void widen_all(const Cache& cache, const uint8_t* zeros, uint16_t* to) {
        const int64_t size = cache.head_dim, to_value = cache.key_to_value();
        for (int i = 0; i < TILE; i++) {
            const uint8_t* scale = scales[i / 16] + i % 16 * sizeof(float);
            uint16_t *key = to + i * size, *value = key + TILE * size;
            const uint8_t* packed = keys[i / 16] + i % 16 * key_stride[i / 16];
            if (scales[i / 16]) widen(packed, read<float>(scale), size, key);
            if (values[i] == zeros) continue;
            widen(values[i], read<float>(scale + to_value), size, value);
            values[i] = (uint8_t*)value;
        }
        for (int first = 0; first < TILE; first += 16) {
            if (!scales[first / 16]) continue;
            keys[first / 16] = (uint8_t*)(to + first * size);
            key_stride[first / 16] = 2 * size;
        }
    }
    void prefetch(int64_t bytes) const {
        for (int i = 0; i < TILE; i++)
            for (int64_t b = 0; b < bytes; b += 64) {
                __builtin_prefetch(keys[i / 16] + i % 16 * key_stride[i / 16] + b, 0, 2);
                __builtin_prefetch(values[i] + b, 0, 2);
            }
    }
};

// Two neighbours' components side by side; of 32, the first tile gets 0-3, 8-11, …, the second 4-7, 12-15, …
void pack_values(const Cached& cached, int64_t size, float* to) {
    halves low, high;
    for (int i = 0; i < 32; i++) {
        low[i] = uint16_t(i / 8 * 8 + i % 8 / 2 + i % 2 * 32);
        high[i] = uint16_t(low[i] + 4);
    }
    for (int key = 0; key < TILE; key += 2)
        for (int64_t d = 0; d < size; d += 32) {
            halves a = at<halves>(cached.values[key] + 2 * d), b = at<halves>(cached.values[key + 1] + 2 * d);
            float* place = to + key / 32 * (16 * size) + d / 16 * TILE_FLOATS + key % 32 / 2 * 16;
            halves first = __builtin_shuffle(a, b, low), second = __builtin_shuffle(a, b, high);
            std::memcpy(place, &first, 64);
            std::memcpy(place + TILE_FLOATS, &second, 64);
        }
}

// Scores, not yet scaled: [64 keys, 16 rows].
void score(const Cached& cached, const float* queries, int64_t size, float* scores) {
    unrolled<4>([&](auto g) { tile_zero<g.value>(); });
    for (int64_t d = 0; d < size; d += 32, queries += TILE_FLOATS) {
        tile_load<6>(queries, 64);
        unrolled<4>([&](auto g) {
            constexpr int KEYS = 4 + g.value % 2;
            tile_load<KEYS>(cached.keys[g.value] + 2 * d, cached.key_stride[g.value]);
            tile_product<g.value, KEYS, 6>();
        });
    }
    unrolled<4>([&](auto g) { tile_store<g.value>(scores + g.value * TILE_FLOATS, 64); });
}

// N tiles of out += weights * values, `step` floats between the values of 32 keys and the next.
template <int N>
void add(const float* values, int64_t step, float* out, int64_t width) {
    unrolled<N>([&](auto n) { tile_load<n.value>(out + 16 * n.value, width * 4); });
    unrolled<2>([&](auto half) {
        unrolled<N>([&](auto n) {
            constexpr int VALUES = 6 + n.value % 2;
            tile_load<VALUES>(values + half.value * step + n.value * TILE_FLOATS, 64);
            tile_product<n.value, 4 + half.value, VALUES>();
        });
    });
    unrolled<N>([&](auto n) { tile_store<n.value>(out + 16 * n.value, width * 4); });
}

// 16 rows on their way past one tile of keys.
struct Rows {
    const Attention& job;
    const Piece& piece;
    int64_t first, tile;
    const int32_t* places;
    float *highest, *total, *out;

    void cap(float* scores) const {
        for (int key = 0; key < TILE; key++, scores += ROWS) {
            floats twice = power(at<floats>(scores) * (2 * LOG2_E * job.scale / job.soft_cap));
            floats capped = job.soft_cap - 2 * job.soft_cap / (twice + 1.0f);
            std::memcpy(scores, &capped, 64);
        }
    }

    void hide(float* scores) const {
        const integers end = at<integers>(places) + int(1 - tile);
        const integers begin = job.window ? end - int(job.window) : integers{};
        for (int key = 0; key < TILE; key++, scores += ROWS) {
            floats score = at<floats>(scores);
            score = (begin <= key) & (end > key) ? score : all(HIDDEN);
            std::memcpy(scores, &score, 64);
        }
    }

    // Scores to weights in bf16, turned. Sums keep their scale until a score is far above it.
    void weigh(const float* scores, float factor, float* weights) const {
        floats top[4] = {at<floats>(scores), at<floats>(scores + 16), at<floats>(scores + 32),
                         at<floats>(scores + 48)};
        for (int key = 4; key < TILE; key += 4)
            for (int i = 0; i < 4; i++) top[i] = larger(top[i], at<floats>(scores + (key + i) * ROWS));
        floats before = at<floats>(highest);
        floats most = larger(larger(top[0], top[1]), larger(top[2], top[3])) * factor;
        floats now = most > before + SLACK ? most : before, shift = now * -LOG2_E, sums[2] = {};
        if (differ(now, before)) fade(power((before - now) * LOG2_E));
        for (int key = 0; key < TILE; key += 32) {
            float* tile = weights + key / 32 * TILE_FLOATS;
            for (int i = 0; i < 16; i++) {
                floats even = at<floats>(scores + (key + 2 * i) * ROWS);
                floats odd = at<floats>(scores + (key + 2 * i + 1) * ROWS);
                even = power(fused(even, all(factor * LOG2_E), shift));
                odd = power(fused(odd, all(factor * LOG2_E), shift));
                sums[0] += even;
                sums[1] += odd;
                words both = pairs(even, odd);
                std::memcpy(tile + 16 * i, &both, 64);
            }
            turn(tile);
        }
        floats sum = at<floats>(total) + (sums[0] + sums[1]);
        std::memcpy(total, &sum, 64);
        std::memcpy(highest, &now, 64);
    }

    void fade(floats decay) const {
        int64_t width = job.width();
        floats sum = at<floats>(total) * decay;
        std::memcpy(total, &sum, 64);
        for (int i = 0; i < ROWS; i++) {
            if (decay[i] == 1.0f) continue;
            for (int64_t d = 0; d < width; d += 16) {
                floats faded = at<floats>(out + i * width + d) * decay[i];
                std::memcpy(out + i * width + d, &faded, 64);
            }
        }
    }

    // Scores of the tile; false if no row sees any of it.
    bool compare(const Cached& cached, const Space& space, float* scores) const {
        const int64_t low = places[0] - tile, high = places[ROWS - 1] - tile;  // later rows begin no earlier
        const int64_t window = job.window ? job.window : high + 1;
        if (low - window + 1 >= TILE || high < 0) return false;
        score(cached, space.queries + first * job.cache.head_dim / 2, job.cache.head_dim, scores);
        if (job.soft_cap > 0) cap(scores);
        if (high - window + 1 > 0 || low + 1 < TILE) hide(scores);
        return true;
    }

    void absorb(const float* scores, const Space& space) const {
        int64_t size = job.cache.head_dim, width = job.width(), d = 0;
        weigh(scores, job.soft_cap > 0 ? 1.0f : job.scale, space.weights);
        tile_load<4>(space.weights, 64);
        tile_load<5>(space.weights + TILE_FLOATS, 64);
        for (; d + 64 <= size; d += 64) add<4>(space.values + 16 * d, 16 * size, out + d, width);
        if (d < size) add<2>(space.values + 16 * d, 16 * size, out + d, width);
    }
};

// Let all rows see a tile: the processor computes the products of some while it weighs those before.
void visit(const Attention& job, const Piece& piece, int64_t tile, const State& state, const Cached& cached,
           const Space& space) {
    int64_t size = job.cache.head_dim, rows = piece.rows(job);
    auto rows_at = [&](int64_t row) {
        return Rows{job,
                    piece,
                    row,
                    tile,
                    space.places + row,
                    state.highest + row,
                    state.total + row,
                    state.out + row * size};
    };
    float *mine = space.scores, *next = mine + 4 * TILE_FLOATS;
    bool seen = rows_at(0).compare(cached, space, mine);
    for (int64_t row = 0; row < rows; row += ROWS) {
        bool next_seen = row + ROWS < rows && rows_at(row + ROWS).compare(cached, space, next);
        if (seen) rows_at(row).absorb(mine, space);
        seen = next_seen;
        std::swap(mine, next);
    }
}

// Components of each 32 as these places say: laid apart as `pack_values` does, or in order again.
void arrange(float* out, int64_t count, words first, words second) {
    for (int64_t i = 0; i < count; i += 32) {
        floats a = at<floats>(out + i), b = at<floats>(out + i + 16);
        floats low = __builtin_shuffle(a, b, first), high = __builtin_shuffle(a, b, second);
        std::memcpy(out + i, &low, 64);
        std::memcpy(out + i + 16, &high, 64);
    }
}

int64_t space(const Attention& job, int64_t rows) { return Space::floats(job, rows); }

void see(const Attention& job, const Piece& piece, int64_t begin, int64_t end, const State& state,
         float* floats) {
    int64_t rows = piece.rows(job), size = job.cache.head_dim;
    Space space(floats, rows, size);
    TileShapes shapes;
    for (int i = 0; i < 8; i++) shapes.set(i, TILE_ROWS, TILE_BYTES);
    Tiles tiles(shapes);
    pack_queries(job, piece, space.queries);
    for (int64_t row = 0; row < round_up(rows, ROWS); row++)
        space.places[row] = int32_t(piece.position + std::min(row, rows - 1) / job.group() * piece.step);
    arrange(state.out, rows * size, LOW, HIGH);
    for (float* row = state.highest; row < state.total; row++) *row = std::max(*row, NOTHING);
    auto cached_at = [&](int64_t tile) {
        return Cached(job, piece, tile, part_of(tile, begin, end), space.zeros);
    };
    int64_t tile = begin / TILE * TILE;
    Cached cached = cached_at(tile);
    for (; tile < end; tile += TILE) {
        Cached next = cached_at(tile + TILE);
        next.prefetch(size * job.cache.value_bytes());
        if (job.cache.type == CACHE_I8) cached.widen_all(job.cache, space.zeros, (uint16_t*)space.widened);
        pack_values(cached, size, space.values);
        visit(job, piece, tile, state, cached, space);
        cached = next;
    }
    arrange(state.out, rows * size, FRONT, BACK);
    for (int64_t row = 0; row < rows; row++)
        if (state.highest[row] == NOTHING) state.highest[row] = LOWEST;
}

}  // namespace

const Arithmetic bfloat16_tiles = {space, see};

#else

const Arithmetic bfloat16_tiles = {nullptr, nullptr};

#endif

}  // namespace octavo
