// The kernels of recurrent layers: convolutions with a state, scans, and gates. See recurrent.py.
//
// A task has a request's part of a state that no other task needs, and computes the request's tokens in order. So
// neither chunks nor other requests change a bit.
#include <algorithm>
#include <cmath>
#include <limits>

#include "activations.h"
#include "rows.h"
#include "exported.h"
#include "threads.h"

namespace octavo {
namespace {

struct States {
    float* cache;
    int64_t block_stride, block_size, offset;
    const int32_t* tables;
    int64_t table_stride;
    const int64_t* slots;
    const int32_t *bounds, *lens;
    int64_t requests, drafts;

    float* of(int64_t block) const { return cache + block * block_stride + offset; }

    float* at(int64_t slot) const { return of(slot / block_size); }

    // Whether the only token of a request is a draft behind that of the one before.
    bool follows(int64_t request) const {
        if (!drafts || request < 1 || request >= requests || bounds[request + 1] != bounds[request] + 1) return false;
        const int64_t* slot = slots + bounds[request];
        return bounds[request] > 0 && slot[-1] >= 0 && slot[0] == slot[-1] + 1 && slot[0] % block_size != 0;
    }

    // Call piece(first, last, position, from, to) for the tokens of a request in each block, the first at `position`:
    // `from` has the state before them (null: zeros), `to` is where it goes; null: nowhere.
    template <class Piece>
    void walk_pieces(int64_t request, Piece&& piece) const {
        int64_t first = bounds[request], end = lens[request];
        int64_t position = end - (bounds[request + 1] - first);
        if (position < 0 || end == 0) return;
        float* from =
            position ? of(tables[request * table_stride + (position - 1) / block_size]) : nullptr;
        while (position < end) {
            int64_t stop = std::min(end, (position / block_size + 1) * block_size);
            int64_t last = first + stop - position, slot = slots[last - 1];
            float* to = slot < 0 ? nullptr : of(slot / block_size);
            piece(first, last, position, from, to);
            from = to;
            first = last, position = stop;
        }
    }
};

constexpr int MOST_TAPS = 8;

// Some vectors at once: a token's channels stand far from the next one's, and several lines of each come as one.
struct Wide {
    static constexpr int COUNT = 4;
    vf part[COUNT];
};

template <class F>
Wide each(F&& f) {
    Wide made;
    for (int i = 0; i < Wide::COUNT; i++) made.part[i] = f(i);
    return made;
}

Wide operator*(const Wide& a, const Wide& b) {
    return each([&](int i) { return a.part[i] * b.part[i]; });
}

Wide operator+(const Wide& a, const Wide& b) {
    return each([&](int i) { return a.part[i] + b.part[i]; });
}

// Some vectors of channels, one, or for the last few one channel.
template <class V, class Load, class Store, class Act>
void convolve(const States& states, int64_t request, int64_t channel, int64_t channels, int taps, const float* x,
              int64_t x_stride, const float* weight, const float* bias, const float* before, int64_t before_stride,
              const float* behind, int64_t behind_stride, float* y, Load get, Store put, Act act) {
    V w[MOST_TAPS], h[MOST_TAPS] = {};
    for (int i = 0; i < taps; i++) w[i] = get(weight + i * channels + channel);
    V start = bias ? get(bias + channel) : V{};
    const int64_t size = states.drafts ? taps + states.drafts : taps - 1;
    auto input = [&](float* state, int64_t position) { return state + position % size * channels + channel; };
    auto take = [&](int64_t t) __attribute__((always_inline)) {  // else inputs and weights are not in registers
        V a = get(x + t * x_stride + channel);
        h[taps - 1] = before ? a * get(before + t * before_stride + channel) : a;
        V total = start;
        for (int i = 0; i < taps; i++) total = total + w[i] * h[i];
        for (int i = 0; i < taps - 1; i++) h[i] = h[i + 1];
        total = act(total);
        put(y + t * channels + channel, behind ? total * get(behind + t * behind_stride + channel) : total);
    };
    bool begun = false;
    states.walk_pieces(request, [&](int64_t first, int64_t last, int64_t position, float* from, float* to) {
        for (int64_t i = 0, p = position - taps + 1; !begun && from && i < taps - 1; i++, p++) {
            h[i] = p < 0 ? V{} : get(input(from, p));
        }
        begun = true;
        for (int64_t t = first; t < last; t++) take(t);
        for (int64_t i = 0, p = position + last - first - taps + 1; to && i < taps - 1; i++, p++) {
            if (p >= 0) put(input(to, p), h[i]);
        }
    });
    for (int64_t row = request + 1; states.follows(row); row++) {
        take(states.bounds[row]);
        put(input(states.at(states.slots[states.bounds[row]]), states.lens[row] - 1), h[taps - 2]);
    }
}

constexpr int TILE = 32;  // tokens that a row of a state passes at once

struct Tokens {
    const float *queries, *keys, *values;
    int64_t query_stride, key_stride, value_stride;
    float* y;
    int64_t y_stride;
    float skip;
    float decay[TILE], step[TILE], key_scale[TILE], query_scale[TILE];
};

// Let ROWS rows of a state of NV vectors each (0: of `nv`) pass `count` tokens. DELTA: see Scanned.strengths.
template <int NV, int ROWS, bool DELTA>
void pass(const Tokens& tokens, int64_t row, int count, int nv, const float* from, float* to) {
    if (NV) nv = NV;
    vf s[ROWS][NV ? NV : 64];
    const int64_t size = int64_t(nv) * VL;
    for (int r = 0; r < ROWS; r++) {
        for (int i = 0; i < nv; i++) s[r][i] = from ? load(from + (row + r) * size + i * VL) : vf{};
    }
    for (int t = 0; t < count; t++) {
        const float* k = tokens.keys + t * tokens.key_stride;
        const float* q = tokens.queries + t * tokens.query_stride;
        const float* values = tokens.values + t * tokens.value_stride + row;
        vf decay = set1(tokens.decay[t]), x[ROWS], seen[ROWS][2] = {};  // two sums at a time, as each waits for itself
        for (int r = 0; r < ROWS; r++) x[r] = set1(values[r] * tokens.step[t]);
        if (DELTA) {
            vf known[ROWS][2] = {};
            for (int i = 0; i < nv; i++) {
                vf key = load(k + i * VL);
                for (int r = 0; r < ROWS; r++) {
                    s[r][i] = s[r][i] * decay;
                    known[r][i % 2] = fma(s[r][i], key, known[r][i % 2]);
                }
            }
            for (int r = 0; r < ROWS; r++) {
                float missing = values[r] - sum(known[r][0] + known[r][1]) * tokens.key_scale[t];
                x[r] = set1(missing * tokens.step[t] * tokens.key_scale[t]);
            }
        }
        for (int i = 0; i < nv; i++) {
            vf key = load(k + i * VL), query = load(q + i * VL);
            for (int r = 0; r < ROWS; r++) {
                s[r][i] = DELTA ? fma(key, x[r], s[r][i]) : fma(key, x[r], s[r][i] * decay);
                seen[r][i % 2] = fma(s[r][i], query, seen[r][i % 2]);
            }
        }
        for (int r = 0; r < ROWS; r++) {
            tokens.y[t * tokens.y_stride + row + r] =
                sum(seen[r][0] + seen[r][1]) * tokens.query_scale[t] + tokens.skip * values[r];
        }
    }
    for (int r = 0; r < ROWS; r++) {
        for (int i = 0; i < nv; i++) store(to + (row + r) * size + i * VL, s[r][i]);
    }
}

using Pass = void (*)(const Tokens&, int64_t, int, int, const float*, float*);

template <int ROWS, bool DELTA>
Pass choose_pass(int64_t nv) {
    switch (nv) {
        case 1: return pass<1, ROWS, DELTA>;
        case 2: return pass<2, ROWS, DELTA>;
        case 4: return pass<4, ROWS, DELTA>;
        case 8: return pass<8, ROWS, DELTA>;
        case 16: return pass<16, ROWS, DELTA>;
        default: return pass<0, ROWS, DELTA>;
    }
}

template <int ROWS>
Pass choose_pass(int64_t nv, bool delta) {
    return delta ? choose_pass<ROWS, true>(nv) : choose_pass<ROWS, false>(nv);
}

float unit_scale(const float* x, int64_t size) {
    vf squares = {};
    for (int64_t i = 0; i < size; i += VL) squares = fma(load(x + i), load(x + i), squares);
    return 1.0f / std::sqrt(sum(squares) + 1e-6f);
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

float plain_sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace
}  // namespace octavo

using namespace octavo;

// before, behind: factors of inputs and of results, or null.
extern "C" void octavo_causal_conv(const float* x, int64_t x_stride, int64_t tokens, int64_t channels,
                                   const float* weight, int taps, const float* bias, int silu, const float* before,
                                   int64_t before_stride, const float* behind, int64_t behind_stride, float* cache,
                                   int64_t block_stride, int64_t block_size, int64_t offset, const int32_t* tables,
                                   int64_t table_stride, const int64_t* slots, const int32_t* bounds,
                                   const int32_t* lens, int64_t requests, int64_t drafts, float* y, int threads) {
    States states{cache, block_stride, block_size, offset, tables, table_stride, slots, bounds, lens, requests, drafts};
    constexpr int64_t WIDTH = Wide::COUNT * VL;
    const int64_t units = divide_up(channels, WIDTH), each_request = tokens / std::max<int64_t>(requests, 1) + 1;
    for_rows(requests * units, WIDTH * taps * each_request, threads, [&](int64_t task) {
        int64_t request = task / units, channel = task % units * WIDTH;
        if (states.follows(request)) return;
        auto run = [&](auto lane, auto get, auto put, auto act, int64_t at) {
            convolve<decltype(lane)>(states, request, at, channels, taps, x, x_stride, weight, bias, before,
                                     before_stride, behind, behind_stride, y, get, put, act);
        };
        auto act = [&](vf a) { return silu ? Silu::apply(a) : a; };
        if (channel + WIDTH <= channels) {
            auto get = [](const float* p) { return each([&](int i) { return load(p + i * VL); }); };
            auto put = [](float* p, const Wide& a) {
                for (int i = 0; i < Wide::COUNT; i++) store(p + i * VL, a.part[i]);
            };
            run(Wide{}, get, put, [&](const Wide& a) { return each([&](int i) { return act(a.part[i]); }); }, channel);
            return;
        }
        for (; channel + VL <= channels; channel += VL) {
            run(vf{}, [](const float* p) { return load(p); }, [](float* p, vf a) { store(p, a); }, act, channel);
        }
        auto act_one = [&](float a) { return act(set1(a))[0]; };
        for (; channel < channels; channel++) {
            run(float{}, [](const float* p) { return *p; }, [](float* p, float a) { *p = a; }, act_one, channel);
        }
    });
}
OCTAVO_EXPORTED(octavo_causal_conv)

// Keys and queries of `groups`, `size` components each; `heads` heads of `rows` values. strengths: null for Mamba-2.
extern "C" void octavo_scan(const float* queries, int64_t query_stride, const float* keys, int64_t key_stride,
                            const float* values, int64_t value_stride, const float* steps, int64_t step_stride,
                            const float* strengths, int64_t strength_stride, int64_t groups, int64_t size,
                            int64_t heads, int64_t rows, const float* rate, const float* bias, const float* skip,
                            float least, float most, float* cache, int64_t block_stride, int64_t block_size,
                            int64_t offset, const int32_t* tables, int64_t table_stride, const int64_t* slots,
                            const int32_t* bounds, const int32_t* lens, int64_t requests, int64_t drafts, float* y,
                            int threads) {
    States states{cache, block_stride, block_size, offset, tables, table_stride, slots, bounds, lens, requests, drafts};
    const int64_t nv = size / VL, state = rows * size, all_keys = groups * size, all_values = heads * rows;
    const int64_t logged = all_keys + all_values + (strengths ? 2 : 1) * heads, share = heads / groups;
    const Pass two = choose_pass<2>(nv, strengths), one = choose_pass<1>(nv, strengths);
    parallel_for(requests * heads, threads, [&](int64_t task) {
        const int64_t request = task / heads, head = task % heads, group = head / share;
        if (states.follows(request)) return;
        float* aside = scratch(state + rows);  // for states that nobody keeps, and results
        const float* source = nullptr;
        auto prepare = [&](Tokens& tile, int t, const float* score, const float* strength) {
            float step = softplus(*score + bias[head]);
            step = std::min(std::max(step, least), most);
            tile.decay[t] = std::exp(rate[head] * step);
            tile.step[t] = step, tile.key_scale[t] = tile.query_scale[t] = 1.0f;
            if (strengths) {
                tile.step[t] = plain_sigmoid(*strength);
                tile.key_scale[t] = unit_scale(tile.keys + t * tile.key_stride, size);
                tile.query_scale[t] = unit_scale(tile.queries + t * tile.query_stride, size) / std::sqrt(float(size));
            }
        };
        auto run = [&](const Tokens& tile, int count, float* kept) {
            int64_t row = 0;
            for (; row + 2 <= rows; row += 2) two(tile, row, count, int(nv), source, kept);
            if (row < rows) one(tile, row, count, int(nv), source, kept);
            source = kept;
        };
        auto take = [&](int64_t at, int count, float* kept) {
            Tokens tile;
            tile.queries = queries + at * query_stride + group * size, tile.query_stride = query_stride;
            tile.keys = keys + at * key_stride + group * size, tile.key_stride = key_stride;
            tile.values = values + at * value_stride + head * rows, tile.value_stride = value_stride;
            tile.y = y + (at * heads + head) * rows, tile.y_stride = heads * rows;
            tile.skip = skip ? skip[head] : 0.0f;
            for (int t = 0; t < count; t++) {
                prepare(tile, t, steps + (at + t) * step_stride + head,
                        strengths ? strengths + (at + t) * strength_stride + head : nullptr);
            }
            run(tile, count, kept);
        };
        auto marks_of = [&](float* block) { return block + heads * state + head * rows; };
        auto log_of = [&](float* block, int64_t position) {
            return block + heads * state + all_values + position % (2 * drafts + 1) * logged;
        };
        // Let the state pass the drafts that came true since it was left.
        auto catch_up = [&](float* block, int64_t position) {
            for (int64_t p = std::max(int64_t(*marks_of(block)), position - drafts); p < position; p++) {
                const float* entry = log_of(block, p);
                Tokens tile{entry + group * size, entry + group * size, entry + all_keys + head * rows, 0, 0, 0,
                            aside + state};
                prepare(tile, 0, entry + all_keys + all_values + head, entry + all_keys + all_values + heads + head);
                run(tile, 1, aside);
            }
        };
        states.walk_pieces(request, [&](int64_t first, int64_t last, int64_t position, float* from, float* to) {
            if (first == bounds[request] && from) {
                source = from + head * state;
                if (drafts) catch_up(from, position);
            }
            for (int64_t at = first; at < last; at += TILE) {
                take(at, int(std::min<int64_t>(TILE, last - at)), to ? to + head * state : aside);
            }
            if (to && drafts) std::fill_n(marks_of(to), rows, float(position + last - first));
        });
        for (int64_t row = request + 1; states.follows(row); row++) {
            const int64_t at = bounds[row];
            take(at, 1, aside);
            float* entry = log_of(states.at(slots[at]), lens[row] - 1);
            if (head % share == 0) std::copy_n(keys + at * key_stride + group * size, size, entry + group * size);
            std::copy_n(values + at * value_stride + head * rows, rows, entry + all_keys + head * rows);
            entry[all_keys + all_values + head] = steps[at * step_stride + head];
            if (strengths) entry[all_keys + all_values + heads + head] = strengths[at * strength_stride + head];
        }
    });
}
OCTAVO_EXPORTED(octavo_scan)

// Rows of `parts` parts; the parts' norms have weights of `groups` parts, or none.
extern "C" void octavo_gate(const float* x, int64_t x_stride, const float* gates, int64_t gate_stride, int64_t tokens,
                            int64_t size, const float* weight, float eps, int64_t parts, int64_t groups,
                            int norm_first, int by_sigmoid, float* y, int threads) {
    const int64_t part = size / parts;
    for_rows(tokens * parts, part, threads, [&](int64_t row) {
        const int64_t token = row / parts, at = row % parts * part;
        const float *from = x + token * x_stride + at, *by = gates + token * gate_stride + at;
        float* to = y + token * size + at;
        const float* factors = weight ? weight + row % parts % groups * part : nullptr;
        auto multiply = [&](const float* a) {
            auto times = [&](vf v, vf g) { return v * (by_sigmoid ? sigmoid(g) : Silu::apply(g)); };
            walk(
                part, [&](int64_t i) { store(to + i, times(load(a + i), load(by + i))); },
                [&](int64_t i) { to[i] = times(set1(a[i]), set1(by[i]))[0]; });
        };
        if (factors && norm_first) normalize(from, factors, part, eps, to);
        multiply(factors && norm_first ? to : from);
        if (factors && !norm_first) normalize(to, factors, part, eps, to);
    });
}
OCTAVO_EXPORTED(octavo_gate)
