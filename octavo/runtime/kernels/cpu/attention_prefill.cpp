// Float32 attention of many rows: prompts. Keys are turned once per tile so that a vector holds the same
// component of VL keys; then scores and sums are matrix products in registers (after Goto and van de Geijn).
#include "attention_weights.h"

namespace octavo {
namespace {

constexpr int ROWS = 4;                     // rows of a product in registers …
constexpr int VECTORS = REGISTERS == 32 ? 4 : 3;  // … and vectors of its columns
constexpr int PANEL = VECTORS * VL;         // keys that stand together, turned

// Work space. q: groups of ROWS rows, [width, ROWS] each. keys: panels of PANEL keys (the last may be
// narrower), [width, keys] each. In both, component d stands at order(d).
struct Space {
    float *q, *keys, *values, *scores, *decay, *now, *rough;

    static int64_t floats(int64_t rows, int64_t width) {
        return rows * (width + TILE + 2) + 3 * TILE * width;
    }
    Space(float* space, int64_t rows, int64_t width)
        : q(space),
          keys(q + rows * width),
          values(keys + TILE * width),
          scores(values + TILE * width),
          decay(scores + rows * TILE),
          now(decay + rows),
          rough(now + rows) {}
};

// Components that a lane of SUMS would meet are neighbours: the sums of `score` go lane by lane. Not so, but
// `straight`, where a request is alone with itself: which kernels see its rows depends on the request alone.
inline int64_t order(int64_t d, int64_t width, bool straight) {
    if (straight) return d;
    return SUMS == VL ? d % VL * (width / VL) + d / VL : lane_of(d) * (width / SUMS) + d / 8 * 2 + d % 2;
}

// Keys [TILE, width] to panels.
void turn_keys(const float* from, int64_t width, bool straight, float* to) {
    for (int first = 0; first < TILE; first += VL) {
        int panel = first / PANEL * PANEL, keys = std::min(PANEL, TILE - panel);
        float* place = to + panel * width + first - panel;
        for (int64_t d = 0; d < width; d += VL) {
            vf a[VL];
            for (int i = 0; i < VL; i++) a[i] = load(from + (first + i) * width + d);
            turn<VL / 2>(a);
            for (int i = 0; i < VL; i++) store(place + order(d + i, width, straight) * keys, a[i]);
        }
    }
}

// Keys and values of a tile as floats; zeros where no row sees.
template <CacheType TYPE>
void widen_tile(const Attention& job, const Piece& piece, int64_t tile, Range seen, float* keys,
                float* values) {
    int64_t size = job.cache.head_dim, width = job.width(), to_value = job.cache.key_to_value();
    for (int i = 0; i < TILE; i++) {
        float *key = keys + i * width, *value = values + i * width;
        std::fill(key + size / VL * VL, key + width, 0.0f);
        std::fill(value + size / VL * VL, value + width, 0.0f);
        if (i >= seen.begin && i < seen.end) {
            const uint8_t* cached = piece.key(job, tile + i);
            widen_vector<TYPE>(cached, size, key);
            widen_vector<TYPE>(cached + to_value, size, value);
        } else {
            std::fill(key, key + size, 0.0f);
            std::fill(value, value + size, 0.0f);
        }
    }
}

template <int N>
struct Sums {
    vf at[ROWS][N];
};

// Sums over the components of lanes LANE … LANE + LANES - 1, added as `score` of few rows does.
template <int N, int LANE, int LANES>
OCTAVO_INLINE Sums<N> lane_sums(const float* q, const float* keys, int64_t steps) {
    Sums<N> a, b;
    if constexpr (LANES == 1) {
        a = {};
        q += LANE * steps * ROWS;
        keys += LANE * steps * (N * VL);
        for (int64_t i = 0; i < steps; i++, q += ROWS, keys += N * VL) {
            vf k[N];
            for (int n = 0; n < N; n++) k[n] = in_register(load(keys + n * VL));
            for (int r = 0; r < ROWS; r++)
                for (int n = 0; n < N; n++) a.at[r][n] = fma(set1(q[r]), k[n], a.at[r][n]);
        }
        return a;
    } else {
        a = lane_sums<N, LANE, LANES / 2>(q, keys, steps);
        b = lane_sums<N, LANE + LANES / 2, LANES / 2>(q, keys, steps);
    }
    for (int r = 0; r < ROWS; r++)
        for (int n = 0; n < N; n++) a.at[r][n] = a.at[r][n] + b.at[r][n];
    return a;
}

// Scores of ROWS rows and the N vectors of keys of a panel.
template <int N>
__attribute__((noinline)) void score(const float* q, const float* keys, int64_t width, bool straight, float* scores) {
    Sums<N> sums = straight ? lane_sums<N, 0, 1>(q, keys, width) : lane_sums<N, 0, SUMS>(q, keys, width / SUMS);
    for (int r = 0; r < ROWS; r++)
        for (int n = 0; n < N; n++) store(scores + r * TILE + n * VL, sums.at[r][n]);
}

// N vectors of out = out * decay + sum of weights * values over `range`, for ROWS rows.
template <int N>
void add(const float* weights, const float* decay, const float* values, Range range, float* out,
         int64_t width) {
    vf acc[ROWS][N];
    for (int r = 0; r < ROWS; r++)
        for (int n = 0; n < N; n++) acc[r][n] = load(out + r * width + n * VL) * decay[r];
    for (int place = range.begin; place < range.end; place++) {
        vf v[N];
        for (int n = 0; n < N; n++) v[n] = in_register(load(values + place * width + n * VL));
        for (int r = 0; r < ROWS; r++)
            for (int n = 0; n < N; n++) acc[r][n] = fma(set1(weights[r * TILE + place]), v[n], acc[r][n]);
    }
    for (int r = 0; r < ROWS; r++)
        for (int n = 0; n < N; n++) store(out + r * width + n * VL, acc[r][n]);
}

// Call body(N as a type, first column) for `columns` columns in steps of VECTORS vectors, or what is left.
template <class Body>
void for_vectors(int64_t columns, Body&& body) {
    int64_t at = 0;
    for (; at + PANEL <= columns; at += PANEL) body(std::integral_constant<int, VECTORS>(), at);
    if (columns - at == 3 * VL) body(std::integral_constant<int, 3>(), at);
    if (columns - at == 2 * VL) body(std::integral_constant<int, 2>(), at);
    if (columns - at == 1 * VL) body(std::integral_constant<int, 1>(), at);
}

bool sees_all(Range seen) { return seen.begin == 0 && seen.end == TILE; }

// What four vectors have each across its lanes: the largest, or the sum in the order of `sum`.
#if defined(OCTAVO_AVX512)
template <class Both>
inline __m128 across(const vf (&a)[ROWS], Both&& both) {
    auto halves = [&](vf b, vf c) { return both(_mm512_shuffle_f32x4(b, c, 0x44), _mm512_shuffle_f32x4(b, c, 0xEE)); };
    const vf low = halves(a[0], a[1]), high = halves(a[2], a[3]);
    vf four = both(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xDD));
    four = both(four, _mm512_permute_ps(four, 0x4E));
    four = both(four, _mm512_permute_ps(four, 0xB1));
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_setr4_epi32(0, 4, 8, 12), four));
}
inline void largest_of(const vf (&a)[ROWS], float* out) {
    _mm_storeu_ps(out, across(a, [](vf b, vf c) { return max(b, c); }));
}
inline void sums_of(const vf (&a)[ROWS], float* out) {
    _mm_storeu_ps(out, across(a, [](vf b, vf c) { return b + c; }));
}
inline void decays_of(const float* highest, const float* base, float* out) {
    const __m128 difference = _mm_loadu_ps(highest) - _mm_loadu_ps(base);
    _mm_storeu_ps(out, _mm512_castps512_ps128(exp_nonpositive(_mm512_castps128_ps512(difference))));
}
#else
inline void largest_of(const vf (&a)[ROWS], float* out) {
    for (int r = 0; r < ROWS; r++) out[r] = largest(a[r]);
}
inline void sums_of(const vf (&a)[ROWS], float* out) {
    for (int r = 0; r < ROWS; r++) out[r] = sum(a[r]);
}
inline void decays_of(const float* highest, const float* base, float* out) {
    for (int r = 0; r < ROWS; r++) out[r] = exp_nonpositive(set1(highest[r] - base[r]))[0];
}
#endif

// The scores of ROWS rows that see all of a tile, times their scales, and the largest so far of each.
template <bool SCALED>
void highest_of(const Scales* scales, float* scores, const float* highest, float* now) {
    vf top[ROWS];
    for (int r = 0; r < ROWS; r++) {
        top[r] = set1(highest[r]);
        for (int at = r * TILE; at < (r + 1) * TILE; at += VL) {
            if (SCALED) store(scores + at, load(scores + at) * load(scales->keys + at % TILE));
            top[r] = max(top[r], load(scores + at));
        }
    }
    largest_of(top, now);
}

// As `weigh`, to the bit, for ROWS rows that see all of a tile, of whose scores the largest are known: no masks.
template <bool SCALED>
void weigh_all(const Scales* scales, float* scores, const float* now, float* highest, float* total, float* decay) {
    float base[ROWS], added[ROWS];
    vf sums[ROWS];
    for (int r = 0; r < ROWS; r++) {
        base[r] = now[r] == LOWEST ? 0.0f : now[r];  // all are infinite: no weights
        sums[r] = vf{};
        unrolled<TILE / VL>([&](auto i) {
            const int at = r * TILE + i * VL;
            vf weight = exp_nonpositive(load(scores + at) - base[r]);
            store(scores + at, SCALED ? weight * load(scales->values + at % TILE) : weight);
            sums[r] = sums[r] + weight;
        });
    }
    sums_of(sums, added);
    decays_of(highest, base, decay);
    for (int r = 0; r < ROWS; r++) {
        highest[r] = now[r];
        total[r] = total[r] * decay[r] + added[r];
    }
}

// Let all rows see one tile.
template <bool SCALED>
void visit(const Attention& job, const Piece& piece, int64_t tile, const Scales* scales, const State& state,
           const Space& space) {
    int64_t rows = piece.rows(job), width = job.width();
    const bool straight = job.is_alone(piece.request);
    const bool whole = sees_all(visible(job, piece, 0, tile)) && sees_all(visible(job, piece, rows - 1, tile));
    auto seen_from = [&](int64_t row) { return whole ? Range{0, TILE} : seen_by(job, piece, row, ROWS, tile); };
    auto see_all = [&](int64_t row) {
        return row + ROWS <= rows && job.soft_cap == 0 &&
               (whole || (sees_all(visible(job, piece, row, tile)) && sees_all(visible(job, piece, row + ROWS - 1, tile))));
    };
    for_vectors(TILE, [&](auto n, int64_t column) {
        for (int64_t row = 0; row < rows; row += ROWS) {
            Range block = seen_from(row);
            if (block.end <= column || block.begin >= column + n.value * VL) continue;
            score<n.value>(space.q + row * width, space.keys + column * width, width, straight,
                           space.scores + row * TILE + column);
        }
    });
    for (int64_t first = 0; first < rows; first += ROWS)  // by itself: what waits for one sum lets others go on
        if (see_all(first))
            highest_of<SCALED>(scales, space.scores + first * TILE, state.highest + first, space.now + first);
    for (int64_t first = 0; first < rows; first += ROWS) {
        if (see_all(first)) {
            weigh_all<SCALED>(scales, space.scores + first * TILE, space.now + first, state.highest + first,
                              state.total + first, space.decay + first);
            continue;
        }
        Range block = seen_from(first);
        for (int64_t row = first; row < std::min(first + ROWS, rows) && !block.empty(); row++)
            space.decay[row] = weigh<SCALED>(job.soft_cap, scales, space.scores + row * TILE, block,
                                             visible(job, piece, row, tile), state.highest[row],
                                             state.total[row]);
    }
    for_vectors(width, [&](auto n, int64_t column) {
        for (int64_t row = 0; row < rows; row += ROWS) {
            Range block = seen_from(row);
            if (block.empty()) continue;
            add<n.value>(space.scores + row * TILE, space.decay + row, space.values + column, block,
                         state.out + row * width + column, width);
        }
    });
}

void begin(const Attention& job, const Piece& piece, float* floats) {
    const int64_t rows = piece.rows(job), width = job.width(), size = job.cache.head_dim;
    const bool straight = job.is_alone(piece.request);
    Space space(floats, round_up(rows, ROWS), width);
    std::fill_n(space.rough, size, 0.0f);  // a query of rows that are none
    for (int64_t first = 0; first < rows; first += ROWS) {
        const float* from[ROWS];
        for (int r = 0; r < ROWS; r++) from[r] = first + r < rows ? piece.query(job, first + r) : space.rough;
        float* to = space.q + first * width;
        for (int64_t d = 0; d < width; d++) {
            float* place = to + order(d, width, straight) * ROWS;
            for (int r = 0; r < ROWS; r++) place[r] = d < size ? from[r][d] * job.scale : 0.0f;
        }
    }
}

void see(const Attention& job, const Piece& piece, int64_t begin, int64_t end, const State& state,
         float* floats) {
    const int64_t rows = piece.rows(job), width = job.width();
    Space space(floats, round_up(rows, ROWS), width);
    std::fill(space.decay, space.now, 0.0f);
    for (int64_t tile = begin / TILE * TILE; tile < end; tile += TILE) {
        Range seen = part_of(tile, begin, end);
        for_type(job.cache.type, [&](auto type) {
            widen_tile<type.value>(job, piece, tile, seen, space.rough, space.values);
        });
        turn_keys(space.rough, width, job.is_alone(piece.request), space.keys);
        if (job.cache.type == CACHE_I8) {
            const Scales scales(job, piece, tile, seen);
            visit<true>(job, piece, tile, &scales, state, space);
        } else {
            visit<false>(job, piece, tile, nullptr, state, space);
        }
    }
}

int64_t space(const Attention& job, int64_t rows) {
    return Space::floats(round_up(rows, ROWS), job.width());
}

}  // namespace

const Arithmetic prefill_kernels = {space, begin, see, nullptr};

}  // namespace octavo
