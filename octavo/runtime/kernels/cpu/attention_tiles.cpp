// Attention by products of tiles: keys, values, queries and weights in bf16, sums and softmax in float32. For
// caches of bf16 or int8, one row or many: a lane of a vector is a row, so a row never meets its neighbours.
// Over a cache of floats each number is two in bf16, itself and what rounding left of it, and a product of two
// is three: as exact as 16 bits are. `TERMS`: how many numbers one is.
//
// Tiles come from the second cache. So that fewer do, 64 rows pass a tile of keys together, and the weights of some
// tiles wait until all are multiplied by their values: sums come and go once, not once for each tile.
#include "attention_tiles.h"

namespace octavo {

#if defined(OCTAVO_TILES) || defined(OCTAVO_VECTOR_TILES)
namespace {

// Of COUNT blocks of rows scores, not yet scaled: [keys, 16 rows] each. Tiles 0 … 3: sums; 4, 5: keys.
template <int COUNT, int TERMS>
void score(const Cached& cached, const float* queries, int64_t size, int keys, float* scores) {
    constexpr int KEYS = 4 / COUNT;
    const int64_t block = TERMS * ROWS * size / 2;
    for (int first = 0; first < keys / 16; first += KEYS) {
        unrolled<4>([](auto sum) { tile_zero<sum.value>(); });
        for (int64_t d = 0; d < size; d += 32)
            unrolled<KEYS>([&](auto k) {
                if (first + k.value >= keys / 16) return;
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
        const int keys = keys_of(end - tile);
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
            const int keys = keys_of(end - (tile - TILE));
            if (TERMS == 2) cached[count].split(keys, job.cache, widened);
            if (job.cache.type == CACHE_I8)
                cached[count].widen_all(job.cache, space.zeros, (uint16_t*)widened);
            pack_values(cached[count], keys, size, TERMS, space.values + TERMS * count * TILE * size / 2);
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
