// Attention by products of tiles: keys, values, queries and weights in bf16, sums and softmax in float32. For
// caches of bf16 or int8, one row or many: a lane of a vector is a row, so a row never meets its neighbours.
//
// Tiles come from the second cache. So that fewer do, 64 rows pass a tile of keys together, and the weights of some
// tiles wait until all are multiplied by their values: sums come and go once, not once for each tile.
#include "amx.h"
#include "attention.h"
#include "simd_512.h"

namespace octavo {

#if defined(OCTAVO_TILES) || defined(OCTAVO_VECTOR_TILES)
namespace {

constexpr int ROWS = 16;           // queries beside each other
constexpr int MOST_BLOCKS = 4;     // of so many rows, that are multiplied together
constexpr int64_t MOST_TILES = 4;  // of keys, whose weights wait together
constexpr int64_t TILE_FLOATS = 256;
constexpr float NOTHING = -5e29f;  // the highest score of a row that saw no key
constexpr float HIDDEN = -1e36f;   // … and of a key it must not see, below that with any sane scale
constexpr float LOG2_E = 1.44269504088896341f;
constexpr float SLACK = 8;  // by how much a score may lie above those that its row's sums are scaled to

// How many tiles of keys `rows` see in one go. A few read them once in any case, as they come.
int64_t tiles_at_once(int64_t rows) { return rows > ROWS ? MOST_TILES : 1; }

// Work space, in tiles but for the last three.
struct Space {
    float *queries;  // per 16 rows: head_dim / 32 tiles of 16 pairs of components x 16 rows
    float *values;   // per 32 keys: head_dim / 16 tiles of 16 pairs of keys x 16 components
    float *scores;   // per 16 rows: 64 keys x 16 rows
    float *weights;  // per 16 rows: for each 32 keys 16 rows x 16 pairs of keys
    uint8_t* zeros;   // a key, or a value
    int32_t* places;  // of rows; behind the last row, of that
    float* widened;   // of int8: for each tile keys and then values in bf16

    static constexpr int64_t SCORES = TILE / 16 * TILE_FLOATS, WEIGHTS = MOST_TILES * TILE / 32 * TILE_FLOATS;

    static int64_t floats(const Attention& job, int64_t rows) {
        int64_t size = job.cache.head_dim, tiles = tiles_at_once(rows);
        int64_t widened = job.cache.type == CACHE_I8 ? tiles * TILE * size : 0;
        return round_up(rows, ROWS) * (size / 2 + 1) + tiles * TILE * size / 2 +
               MOST_BLOCKS * (SCORES + WEIGHTS) + size + widened;
    }
    Space(float* space, int64_t rows, int64_t size)
        : queries(space),
          values(queries + round_up(rows, ROWS) * size / 2),
          scores(values + tiles_at_once(rows) * TILE * size / 2),
          weights(scores + MOST_BLOCKS * SCORES),
          zeros((uint8_t*)(weights + MOST_BLOCKS * WEIGHTS)),
          places((int32_t*)(weights + MOST_BLOCKS * WEIGHTS + size)),
          widened((float*)places + round_up(rows, ROWS)) {}
};

// Places of even and odd floats of 32; of those in order that `pack_values` puts in two tiles.
constexpr words EVEN = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, ODD = EVEN + 1;
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

    Cached() = default;
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

// Of COUNT blocks of rows scores, not yet scaled: [64 keys, 16 rows] each. Tiles 0 … 3: sums; 4, 5: keys.
template <int COUNT>
void score(const Cached& cached, const float* queries, int64_t size, float* scores) {
    constexpr int KEYS = 4 / COUNT;
    for (int first = 0; first < TILE / 16; first += KEYS) {
        unrolled<4>([](auto sum) { tile_zero<sum.value>(); });
        for (int64_t d = 0; d < size; d += 32)
            unrolled<KEYS>([&](auto k) {
                const int place = first + k.value;
                tile_load<4 + k.value % 2>(cached.keys[place] + 2 * d, cached.key_stride[place]);
                unrolled<COUNT>([&](auto c) {
                    if constexpr (k.value == 0)
                        tile_load<6 + c.value % 2>(queries + c.value * ROWS * size / 2 + d / 32 * TILE_FLOATS, 64);
                    tile_product<c.value * KEYS + k.value, 4 + k.value % 2, 6 + c.value % 2>();
                });
            });
        unrolled<COUNT>([&](auto c) {
            unrolled<KEYS>([&](auto k) {
                float* to = scores + c.value * Space::SCORES + (first + k.value) * TILE_FLOATS;
                tile_store<c.value * KEYS + k.value>(to, 64);
            });
        });
    }
}

// Of COUNT blocks of rows COLUMNS tiles of out += weights * values, over `steps` times 32 keys; `values`: of the
// first column.
template <int COUNT, int COLUMNS>
void add(const float* weights, int64_t steps, const float* values, int64_t size, float* out) {
    auto each_sum = [&](auto body) {
        unrolled<COUNT>([&](auto c) { unrolled<COLUMNS>([&](auto n) { body(c, n); }); });
    };
    each_sum([&](auto c, auto n) {
        tile_load<c.value * COLUMNS + n.value>(out + c.value * ROWS * size + 16 * n.value, 4 * size);
    });
    for (int64_t i = 0; i < steps; i++)
        unrolled<COLUMNS>([&](auto n) {
            tile_stream<4 + n.value % 2>(values + i * 16 * size + n.value * TILE_FLOATS, 64);
            unrolled<COUNT>([&](auto c) {
                if constexpr (n.value == 0)
                    tile_load<6 + c.value % 2>(weights + c.value * Space::WEIGHTS + i * TILE_FLOATS, 64);
                tile_product<c.value * COLUMNS + n.value, 6 + c.value % 2, 4 + n.value % 2>();
            });
        });
    each_sum([&](auto c, auto n) {
        tile_store<c.value * COLUMNS + n.value>(out + c.value * ROWS * size + 16 * n.value, 4 * size);
    });
}

// The same, of all columns.
template <int COUNT>
void add_all(const float* weights, int64_t steps, const float* values, int64_t size, float* out) {
    constexpr int COLUMNS = 4 / COUNT;
    int64_t d = 0;
    for (; d + 16 * COLUMNS <= size; d += 16 * COLUMNS)
        add<COUNT, COLUMNS>(weights, steps, values + 16 * d, size, out + d);
    if constexpr (COLUMNS == 4)
        if (d < size) add<COUNT, 2>(weights, steps, values + 16 * d, size, out + d);
}

// A block of 16 rows.
struct Rows {
    const Attention& job;
    const int32_t* places;
    float *highest, *total, *out;

    void cap(float* scores) const {
        for (int key = 0; key < TILE; key++, scores += ROWS) {
            floats twice = power(at<floats>(scores) * (2 * LOG2_E * job.scale / job.soft_cap));
            floats capped = job.soft_cap - 2 * job.soft_cap / (twice + 1.0f);
            std::memcpy(scores, &capped, 64);
        }
    }

    void hide(int64_t tile, float* scores) const {
        const integers end = at<integers>(places) + int(1 - tile);
        const integers begin = job.window ? end - int(job.window) : integers{};
        for (int key = 0; key < TILE; key++, scores += ROWS) {
            floats score = at<floats>(scores);
            score = (begin <= key) & (end > key) ? score : all(HIDDEN);
            std::memcpy(scores, &score, 64);
        }
    }

    // By what scores are still to be multiplied: `cap` has done it.
    float factor() const { return job.soft_cap > 0 ? 1.0f : job.scale; }

    // Scores to what is compared. Returns to which the row's sums are to be scaled: that stays until a score is
    // far above it.
    floats prepare(int64_t tile, float* scores) const {
        const int64_t low = places[0] - tile, high = places[ROWS - 1] - tile;
        if (job.soft_cap > 0) cap(scores);
        if ((job.window && high - job.window + 1 > 0) || low + 1 < TILE) hide(tile, scores);
        floats top[4] = {at<floats>(scores), at<floats>(scores + 16), at<floats>(scores + 32),
                         at<floats>(scores + 48)};
        for (int key = 4; key < TILE; key += 4)
            for (int i = 0; i < 4; i++) top[i] = larger(top[i], at<floats>(scores + (key + i) * ROWS));
        floats before = at<floats>(highest);
        floats most = larger(larger(top[0], top[1]), larger(top[2], top[3])) * factor();
        return most > before + SLACK ? most : before;
    }

    // Scores to weights in bf16, turned.
    void weigh(floats now, const float* scores, float* weights) const {
        const floats shift = now * -LOG2_E, scale = all(factor() * LOG2_E);
        floats sums[2] = {};
        for (int key = 0; key < TILE; key += 32) {
            float* tile = weights + key / 32 * TILE_FLOATS;
            for (int i = 0; i < 16; i++) {
                floats even = at<floats>(scores + (key + 2 * i) * ROWS);
                floats odd = at<floats>(scores + (key + 2 * i + 1) * ROWS);
                even = power(fused(even, scale, shift));
                odd = power(fused(odd, scale, shift));
                sums[0] += even;
                sums[1] += odd;
                words both = pairs(even, odd);
                std::memcpy(tile + 16 * i, &both, 64);
            }
            turn(tile);
        }
        floats sum = at<floats>(total) + (sums[0] + sums[1]);
        std::memcpy(total, &sum, 64);
    }

    void fade(floats now) const {
        const int64_t size = job.cache.head_dim;
        const floats before = at<floats>(highest), started = all(NOTHING);
        floats decay = before > started ? power((before - now) * LOG2_E) : all(1.0f);  // else of nothing
        floats sum = at<floats>(total) * decay;
        std::memcpy(total, &sum, 64);
        std::memcpy(highest, &now, 64);
        for (int i = 0; i < ROWS; i++) {
            if (decay[i] == 1.0f) continue;
            for (int64_t d = 0; d < size; d += 16) {
                floats faded = at<floats>(out + i * size + d) * decay[i];
                std::memcpy(out + i * size + d, &faded, 64);
            }
        }
    }
};

// COUNT blocks of rows, from `row` on, see `count` tiles of keys, the first of which begins at `tile`.
template <int COUNT>
void visit(const Attention& job, int64_t row, int64_t tile, const Cached* tiles, int64_t count,
           const State& state, const Space& space) {
    const int64_t size = job.cache.head_dim;
    const float* values = space.values;
    int64_t waiting = 0;
    auto add_waiting = [&] {
        if (waiting) add_all<COUNT>(space.weights, waiting, values, size, state.out + row * size);
        values += waiting * 16 * size;
        waiting = 0;
    };
    auto block = [&](int c) {
        const int64_t at = row + c * ROWS;
        return Rows{job, space.places + at, state.highest + at, state.total + at, state.out + at * size};
    };
    const int64_t low = space.places[row], high = space.places[row + COUNT * ROWS - 1];  // begin no earlier
    for (int64_t i = 0; i < count; i++, tile += TILE) {
        if (high < tile || job.oldest_visible(low) >= tile + TILE) {
            add_waiting();
            values += 32 * size;
            continue;
        }
        score<COUNT>(tiles[i], space.queries + row * size / 2, size, space.scores);
        floats now[COUNT];
        bool rises = false;
        for (int c = 0; c < COUNT; c++) {
            now[c] = block(c).prepare(tile, space.scores + c * Space::SCORES);
            rises = rises || differ(now[c], at<floats>(block(c).highest));
        }
        if (rises) {
            add_waiting();
            for (int c = 0; c < COUNT; c++) block(c).fade(now[c]);
        }
        for (int c = 0; c < COUNT; c++)
            block(c).weigh(now[c], space.scores + c * Space::SCORES,
                           space.weights + c * Space::WEIGHTS + waiting * TILE_FLOATS);
        waiting += TILE / 32;
    }
    add_waiting();
}

int64_t space(const Attention& job, int64_t rows) { return Space::floats(job, rows); }

void begin(const Attention& job, const Piece& piece, float* floats) {
    const int64_t rows = piece.rows(job), size = job.cache.head_dim;
    Space space(floats, rows, size);
    std::fill_n((float*)space.zeros, size, 0.0f);
    pack_queries(job, piece, space.queries);
    for (int64_t row = 0; row < round_up(rows, ROWS); row++)
        space.places[row] = int32_t(piece.position + std::min(row, rows - 1) / job.group() * piece.step);
}

void see(const Attention& job, const Piece& piece, int64_t begin, int64_t end, const State& state,
         float* floats) {
    int64_t rows = piece.rows(job), size = job.cache.head_dim;
    Space space(floats, rows, size);
    TileShapes shapes;
    for (int i = 0; i < 8; i++) shapes.set(i, TILE_ROWS, TILE_BYTES);
    Tiles tiles(shapes, rows);
    for (float* row = state.highest; row < state.total; row++) *row = std::max(*row, NOTHING);
    auto cached_at = [&](int64_t tile) {
        return Cached(job, piece, tile, part_of(tile, begin, end), space.zeros);
    };
    const bool widens = job.cache.type == CACHE_I8;
    Cached cached[MOST_TILES], next = cached_at(begin / TILE * TILE);
    for (int64_t tile = begin / TILE * TILE; tile < end;) {
        const int64_t first = tile;
        int64_t count = 0;
        for (; count < tiles_at_once(rows) && tile < end; count++) {
            cached[count] = next;
            next = cached_at(tile += TILE);
            next.prefetch(size * job.cache.value_bytes());
            if (widens)
                cached[count].widen_all(job.cache, space.zeros,
                                        (uint16_t*)(space.widened + count * TILE * size));
            pack_values(cached[count], size, space.values + count * TILE * size / 2);
        }
        int64_t row = 0;
        for (; row + 4 * ROWS <= round_up(rows, ROWS); row += 4 * ROWS)
            visit<4>(job, row, first, cached, count, state, space);
        for (; row + 2 * ROWS <= round_up(rows, ROWS); row += 2 * ROWS)
            visit<2>(job, row, first, cached, count, state, space);
        if (row < rows) visit<1>(job, row, first, cached, count, state, space);
    }
    for (int64_t row = 0; row < rows; row++)
        if (state.highest[row] == NOTHING) state.highest[row] = LOWEST;
}

// From how `pack_values` lays them apart.
void order(float* sums, int64_t size) {
    for (int64_t i = 0; i < size; i += 32) {
        floats a = at<floats>(sums + i), b = at<floats>(sums + i + 16);
        floats front = __builtin_shuffle(a, b, FRONT), back = __builtin_shuffle(a, b, BACK);
        std::memcpy(sums + i, &front, 64);
        std::memcpy(sums + i + 16, &back, 64);
    }
}

}  // namespace

const Arithmetic bfloat16_tiles = {space, begin, see, order};

#else

const Arithmetic bfloat16_tiles = {};

#endif

}  // namespace octavo
