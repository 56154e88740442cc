// Attention by products of tiles: keys, values, queries and weights in bf16, sums and softmax in float32. For
// caches of bf16 or int8, one row or many: a lane of a vector is a row, so a row never meets its neighbours.
// Over a cache of floats each number is two in bf16, itself and what rounding left of it, and a product of two
// is three: as exact as 16 bits are. `TERMS`: how many numbers one is.
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

int64_t terms_of(const Attention& job) { return job.cache.type == CACHE_F32 ? 2 : 1; }

// Work space, in tiles but for the last four. Second terms lie behind the first ones of the same rows or keys.
struct Space {
    float *queries;  // per 16 rows: head_dim / 32 tiles of 16 pairs of components x 16 rows
    float *values;   // per 32 keys: head_dim / 16 tiles of 16 pairs of keys x 16 components
    float *scores;   // per 16 rows: 64 keys x 16 rows
    float *weights;  // per 16 rows: for each 32 keys 16 rows x 16 pairs of keys
    uint8_t* zeros;          // a key, or a value
    int32_t *begins, *ends;  // of what rows see; behind the last row, of that
    float* widened;          // of what is not bf16: for each tile keys and then values in bf16

    static constexpr int64_t SCORES = TILE / 16 * TILE_FLOATS, WEIGHTS = MOST_TILES * TILE / 32 * TILE_FLOATS;

    static int64_t floats(const Attention& job, int64_t rows) {
        int64_t size = job.cache.head_dim, tiles = tiles_at_once(rows), terms = terms_of(job);
        int64_t widened = job.cache.type == CACHE_BF16 ? 0 : terms * tiles * TILE * size;
        return round_up(rows, ROWS) * (terms * size / 2 + 2) + terms * tiles * TILE * size / 2 +
               MOST_BLOCKS * (SCORES + terms * WEIGHTS) + size + widened;
    }
    Space(float* space, const Attention& job, int64_t rows) : queries(space) {
        const int64_t all = round_up(rows, ROWS), size = job.cache.head_dim, terms = terms_of(job);
        values = queries + terms * all * size / 2;
        scores = values + terms * tiles_at_once(rows) * TILE * size / 2;
        weights = scores + MOST_BLOCKS * SCORES;
        zeros = (uint8_t*)(weights + terms * MOST_BLOCKS * WEIGHTS);
        begins = (int32_t*)zeros + size;
        ends = begins + all;
        widened = (float*)ends + all;
    }
};

// Places of even and odd floats of 32; of those in order that `pack_values` puts in two tiles.
constexpr words EVEN = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, ODD = EVEN + 1;
constexpr words FRONT = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23}, BACK = FRONT + 8;

// Two floats in each word to the same in bf16; what is left of them goes `gap` floats behind.
template <int TERMS>
inline void put_pairs(floats even, floats odd, float* to, int64_t gap) {
    words both = pairs(even, odd);
    std::memcpy(to, &both, 64);
    if constexpr (TERMS == 1) return;
    both = pairs(even - (floats)(both << 16), odd - (floats)(both & 0xFFFF0000));
    std::memcpy(to + gap, &both, 64);
}

// 32 floats side by side, in order.
template <int TERMS>
inline void put_floats(const float* from, float* to, int64_t gap) {
    floats low = at<floats>(from), high = at<floats>(from + 16);
    put_pairs<TERMS>(__builtin_shuffle(low, high, EVEN), __builtin_shuffle(low, high, ODD), to, gap);
}

template <int TERMS>
void pack_queries(const Attention& job, const Piece& piece, float* to) {
    int64_t rows = piece.rows(job), size = job.cache.head_dim, gap = ROWS * size / 2;
    for (int64_t first = 0; first < rows; first += ROWS, to += (TERMS - 1) * gap)
        for (int64_t d = 0; d < size; d += 32, to += TILE_FLOATS) {
            for (int term = 0; term < TERMS; term++) std::fill_n(to + term * gap, TILE_FLOATS, 0.0f);
            for (int64_t i = 0; i < std::min<int64_t>(ROWS, rows - first); i++)
                put_floats<TERMS>(piece.query(job, first + i) + d, to + 16 * i, gap);
            for (int term = 0; term < TERMS; term++) turn(to + term * gap);
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
    // Floats as two numbers each.
    void split_all(const Cache& cache, float* to) {
        const int64_t size = cache.head_dim, row = size / 2;
        for (int i = 0; i < TILE; i++, to += row) {
            const uint8_t* key = keys[i / 16] + i % 16 * key_stride[i / 16];
            for (int64_t d = 0; d < size; d += 32) {
                put_floats<2>((const float*)key + d, to + d / 2, 2 * TILE * row);
                put_floats<2>((const float*)values[i] + d, to + TILE * row + d / 2, 2 * TILE * row);
            }
            values[i] = (uint8_t*)(to + TILE * row);
        }
        for (int first = 0; first < TILE; first += 16) {
            keys[first / 16] = (uint8_t*)(to - (TILE - first) * row);
            key_stride[first / 16] = 4 * row;
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

// Bytes from what `split_all` made of a key or a value to its second term.
constexpr int64_t term_gap(int64_t size) { return 4 * TILE * size; }

// Two neighbours' components side by side; of 32, the first tile gets 0-3, 8-11, …, the second 4-7, 12-15, …
void pack_values(const Cached& cached, int64_t size, int64_t terms, float* to) {
    halves low, high;
    for (int i = 0; i < 32; i++) {
        low[i] = uint16_t(i / 8 * 8 + i % 8 / 2 + i % 2 * 32);
        high[i] = uint16_t(low[i] + 4);
    }
    for (int64_t pair = 0; pair < terms * (TILE / 2); pair++) {
        const int64_t term = pair / (TILE / 2), key = pair % (TILE / 2) * 2;
        float* of_keys = to + (key / 32 * terms + term) * (16 * size) + key % 32 / 2 * 16;
        for (int64_t d = 0; d < size; d += 32) {
            const int64_t from = term * term_gap(size) + 2 * d;
            halves a = at<halves>(cached.values[key] + from), b = at<halves>(cached.values[key + 1] + from);
            float* place = of_keys + d / 16 * TILE_FLOATS;
            halves first = __builtin_shuffle(a, b, low), second = __builtin_shuffle(a, b, high);
            std::memcpy(place, &first, 64);
            std::memcpy(place + TILE_FLOATS, &second, 64);
        }
    }
}

// Of COUNT blocks of rows scores, not yet scaled: [keys, 16 rows] each. Tiles 0 … 3: sums; 4, 5: keys.
template <int COUNT, int TERMS>
void score(const Cached& cached, const float* queries, int64_t size, int keys, float* scores) {
    constexpr int KEYS = 4 / COUNT;
    const int64_t block = TERMS * ROWS * size / 2;
    for (int first = 0; first < keys / 16; first += KEYS) {
        unrolled<4>([](auto sum) { tile_zero<sum.value>(); });
        for (int64_t d = 0; d < size; d += 32)
            unrolled<KEYS>([&](auto k) {
                constexpr int KEY = TERMS == 1 ? 4 + k.value % 2 : 4;
                const float* of_d = queries + d / 32 * TILE_FLOATS;
                const uint8_t* key = cached.keys[first + k.value] + 2 * d;
                const int64_t stride = cached.key_stride[first + k.value];
                tile_load<KEY>(key, stride);
                if constexpr (TERMS == 2) tile_load<5>(key + term_gap(size), stride);
                unrolled<COUNT>([&](auto c) {
                    constexpr int SUM = c.value * KEYS + k.value, QUERY = TERMS == 1 ? 6 + c.value % 2 : 6;
                    if constexpr (k.value == 0 || TERMS == 2) tile_load<QUERY>(of_d + c.value * block, 64);
                    tile_product<SUM, KEY, QUERY>();
                    if constexpr (TERMS == 1) return;
                    tile_load<7>(of_d + c.value * block + block / 2, 64);
                    tile_product<SUM, 5, 6>();
                    tile_product<SUM, 4, 7>();
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
template <int COUNT, int COLUMNS, int TERMS>
void add(const float* weights, int64_t steps, const float* values, int64_t size, float* out) {
    auto each_sum = [&](auto body) {
        unrolled<COUNT>([&](auto c) { unrolled<COLUMNS>([&](auto n) { body(c, n); }); });
    };
    each_sum([&](auto c, auto n) {
        tile_load<c.value * COLUMNS + n.value>(out + c.value * ROWS * size + 16 * n.value, 4 * size);
    });
    for (int64_t i = 0; i < steps; i++)
        unrolled<COLUMNS>([&](auto n) {
            const float* of_n = values + i * TERMS * 16 * size + n.value * TILE_FLOATS;
            constexpr int VALUE = TERMS == 1 ? 4 + n.value % 2 : 4;
            tile_stream<VALUE>(of_n, 64);
            if constexpr (TERMS == 2) tile_stream<5>(of_n + 16 * size, 64);
            unrolled<COUNT>([&](auto c) {
                constexpr int SUM = c.value * COLUMNS + n.value, WEIGHT = TERMS == 1 ? 6 + c.value % 2 : 6;
                const float* of_c = weights + c.value * TERMS * Space::WEIGHTS + i * TILE_FLOATS;
                if constexpr (n.value == 0 || TERMS == 2) tile_load<WEIGHT>(of_c, 64);
                tile_product<SUM, WEIGHT, VALUE>();
                if constexpr (TERMS == 1) return;
                tile_load<7>(of_c + Space::WEIGHTS, 64);
                tile_product<SUM, 6, 5>();
                tile_product<SUM, 7, 4>();
            });
        });
    each_sum([&](auto c, auto n) {
        tile_store<c.value * COLUMNS + n.value>(out + c.value * ROWS * size + 16 * n.value, 4 * size);
    });
}

// The same, of all columns.
template <int COUNT, int TERMS>
void add_all(const float* weights, int64_t steps, const float* values, int64_t size, float* out) {
    constexpr int COLUMNS = 4 / COUNT;
    int64_t d = 0;
    for (; d + 16 * COLUMNS <= size; d += 16 * COLUMNS)
        add<COUNT, COLUMNS, TERMS>(weights, steps, values + 16 * d, size, out + d);
    if constexpr (COLUMNS == 4)
        if (d < size) add<COUNT, 2, TERMS>(weights, steps, values + 16 * d, size, out + d);
}

// A block of 16 rows, and `keys` of a tile: all that may be seen.
template <int TERMS>
struct Rows {
    const Attention& job;
    const int32_t *begins, *ends;
    float *highest, *total, *out;
    int keys;

    static floats power(floats x) { return TERMS == 1 ? octavo::power(x) : fine_power(x); }

    void cap(float* scores) const {
        for (int key = 0; key < keys; key++, scores += ROWS) {
            floats twice = power(at<floats>(scores) * (2 * LOG2_E * job.scale / job.soft_cap));
            floats capped = job.soft_cap - 2 * job.soft_cap / (twice + 1.0f);
            std::memcpy(scores, &capped, 64);
        }
    }

    void hide(int64_t tile, float* scores) const {
        const integers begin = at<integers>(begins) - int(tile), end = at<integers>(ends) - int(tile);
        for (int key = 0; key < keys; key++, scores += ROWS) {
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
        if (job.soft_cap > 0) cap(scores);
        if (begins[ROWS - 1] > tile || ends[0] < tile + keys) hide(tile, scores);
        floats top[4] = {at<floats>(scores), at<floats>(scores + 16), at<floats>(scores + 32),
                         at<floats>(scores + 48)};
        for (int key = 4; key < keys; key += 4)
            for (int i = 0; i < 4; i++) top[i] = larger(top[i], at<floats>(scores + (key + i) * ROWS));
        floats before = at<floats>(highest);
        floats most = larger(larger(top[0], top[1]), larger(top[2], top[3])) * factor();
        return most > before + SLACK ? most : before;
    }

    // Scores to weights in bf16, turned.
    void weigh(floats now, const float* scores, float* weights) const {
        const floats shift = now * -LOG2_E, scale = all(factor() * LOG2_E);
        floats sums[2] = {};
        for (int key = 0; key < keys; key += 32) {
            float* tile = weights + key / 32 * TILE_FLOATS;
            for (int i = 0; i < 16; i++) {
                floats even = at<floats>(scores + (key + 2 * i) * ROWS);
                floats odd = at<floats>(scores + (key + 2 * i + 1) * ROWS);
                even = power(fused(even, scale, shift));
                odd = power(fused(odd, scale, shift));
                sums[0] += even;
                sums[1] += odd;
                put_pairs<TERMS>(even, odd, tile + 16 * i, Space::WEIGHTS);
            }
            for (int term = 0; term < TERMS; term++) turn(tile + term * Space::WEIGHTS);
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

// COUNT blocks of rows, from `row` on, see `count` tiles of keys from `tile` on, but none from `end` on.
template <int COUNT, int TERMS>
void visit(const Attention& job, int64_t row, int64_t tile, int64_t end, const Cached* tiles, int64_t count,
           const State& state, const Space& space) {
    const int64_t size = job.cache.head_dim, step = TERMS * 16 * size, block = TERMS * Space::WEIGHTS;
    const float* values = space.values;
    int64_t waiting = 0;
    auto add_waiting = [&] {
        if (waiting) add_all<COUNT, TERMS>(space.weights, waiting, values, size, state.out + row * size);
        values += waiting * step;
        waiting = 0;
    };
    const int32_t *begins = space.begins + row, *ends = space.ends + row;  // of later rows no earlier
    for (int64_t i = 0; i < count; i++, tile += TILE) {
        if (ends[COUNT * ROWS - 1] <= tile || begins[0] >= tile + TILE) {
            add_waiting();
            values += TILE / 32 * step;
            continue;
        }
        const int keys = int(std::min<int64_t>(TILE, round_up(end - tile, 32)));
        auto of = [&](int c) {
            const int64_t at = row + c * ROWS;
            return Rows<TERMS>{job, begins + c * ROWS, ends + c * ROWS, state.highest + at, state.total + at,
                               state.out + at * size, keys};
        };
        score<COUNT, TERMS>(tiles[i], space.queries + row * size / 2 * TERMS, size, keys, space.scores);
        floats now[COUNT];
        bool rises = false;
        for (int c = 0; c < COUNT; c++) {
            now[c] = of(c).prepare(tile, space.scores + c * Space::SCORES);
            rises = rises || differ(now[c], at<floats>(of(c).highest));
        }
        if (rises) {
            add_waiting();
            for (int c = 0; c < COUNT; c++) of(c).fade(now[c]);
        }
        for (int c = 0; c < COUNT; c++)
            of(c).weigh(now[c], space.scores + c * Space::SCORES,
                        space.weights + c * block + waiting * TILE_FLOATS);
        waiting += keys / 32;
    }
    add_waiting();
}

int64_t space(const Attention& job, int64_t rows) { return Space::floats(job, rows); }

void begin(const Attention& job, const Piece& piece, float* floats) {
    const int64_t rows = piece.rows(job), size = job.cache.head_dim;
    Space space(floats, job, rows);
    std::fill_n((float*)space.zeros, size, 0.0f);
    (terms_of(job) == 1 ? pack_queries<1> : pack_queries<2>)(job, piece, space.queries);
    for (int64_t row = 0; row < round_up(rows, ROWS); row++) {
        const int64_t place = piece.position + std::min(row, rows - 1) / job.group() * piece.step;
        space.begins[row] = int32_t(job.oldest_visible(place));
        space.ends[row] = int32_t(job.visible_end(piece.request, place));
    }
}

template <int TERMS>
void see(const Attention& job, const Piece& piece, int64_t begin, int64_t end, const State& state,
         const Space& space) {
    int64_t rows = piece.rows(job), size = job.cache.head_dim;
    TileShapes shapes;
    for (int i = 0; i < 8; i++) shapes.set(i, TILE_ROWS, TILE_BYTES);
    Tiles tiles(shapes, rows);
    for (float* row = state.highest; row < state.total; row++) *row = std::max(*row, NOTHING);
    auto cached_at = [&](int64_t tile) {
        return Cached(job, piece, tile, part_of(tile, begin, end), space.zeros);
    };
    Cached cached[MOST_TILES], next = cached_at(begin / TILE * TILE);
    for (int64_t tile = begin / TILE * TILE; tile < end;) {
        const int64_t first = tile;
        int64_t count = 0;
        for (; count < tiles_at_once(rows) && tile < end; count++) {
            cached[count] = next;
            next = cached_at(tile += TILE);
            next.prefetch(size * job.cache.value_bytes());
            float* widened = space.widened + TERMS * count * TILE * size;
            if (TERMS == 2) cached[count].split_all(job.cache, widened);
            if (job.cache.type == CACHE_I8)
                cached[count].widen_all(job.cache, space.zeros, (uint16_t*)widened);
            pack_values(cached[count], size, TERMS, space.values + TERMS * count * TILE * size / 2);
        }
        int64_t row = 0;
        for (; row + 4 * ROWS <= round_up(rows, ROWS); row += 4 * ROWS)
            visit<4, TERMS>(job, row, first, end, cached, count, state, space);
        for (; row + 2 * ROWS <= round_up(rows, ROWS); row += 2 * ROWS)
            visit<2, TERMS>(job, row, first, end, cached, count, state, space);
        if (row < rows) visit<1, TERMS>(job, row, first, end, cached, count, state, space);
    }
    for (int64_t row = 0; row < rows; row++)
        if (state.highest[row] == NOTHING) state.highest[row] = LOWEST;
}

void see(const Attention& job, const Piece& piece, int64_t begin, int64_t end, const State& state,
         float* floats) {
    auto see_terms = terms_of(job) == 1 ? see<1> : see<2>;
    see_terms(job, piece, begin, end, state, Space(floats, job, piece.rows(job)));
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
