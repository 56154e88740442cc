// From a row's scores to its weights: soft cap, mask, online softmax (Milakov and Gimelshein, 2018). And the
// order in which float32 attention adds: both kinds of it include this, so that they give the same bits.
#pragma once
#include "attention.h"

namespace octavo {

// How many sums a score is made of: with vectors of 64 bytes, of which four keys have a quarter each, fewer than lanes.
constexpr int SUMS = VL == 16 ? 4 : VL;

// Then: which of them a component is added to. 0 and 1 are added up, 2 and 3, and both. A pair of neighbours goes to one.
constexpr int lane_of(int64_t d) { return int(d % 4 / 2 * 2 + d % 8 / 4); }

// e^x for x <= 0, to 1-2 units in the last place (5 near -87); 0 below -87. As simd.h's exp, less what other x need.
#if defined(OCTAVO_AVX512)
inline vf exp_nonpositive(vf x) {
    const vf integral = set1(0x1.8p23f);  // floats of this size are integers: what is added is rounded to one
    const vf shifted = fma(x, set1(1.44269504088896341f), integral);
    const vf r = fma(shifted - integral, set1(-0.693147180559945309f), x);
    const vf p = fma(fma(exp_terms(r), r, set1(1.0f)), r, set1(1.0f));
    const __mmask16 counts = _mm512_cmp_ps_mask(x, set1(-87.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_add_epi32(counts, (__m512i)p, _mm512_slli_epi32((__m512i)shifted, 23));
}
#else
inline vf exp_nonpositive(vf x) {
    vf n = round(max(set1(-87.0f), x) * 1.44269504088896341f);
    vf p = exp_rest(x, n);
    vf y = (vf)((vi)p + (to_int(n) << 23));
    return x < set1(-87.0f) ? set1(0.0f) : y;
}
#endif

// Scores of places `block` of a tile, of which the row sees `seen`, to weights: 0 where it sees nothing.
// Returns by what its sums so far are to be multiplied. `block` holds `seen` and whole vectors; scales: of int8.
template <bool SCALED>
OCTAVO_INLINE float weigh(float soft_cap, const Scales* scales, float* scores, Range block, Range seen,
                          float& highest, float& total) {
    vf lanes, top = set1(highest);
    for (int i = 0; i < VL; i++) lanes[i] = float(i);
    for (int at = block.begin; at < block.end; at += VL) {
        vf score = load(scores + at);
        if (SCALED) score = score * load(scales->keys + at);
        if (soft_cap > 0) score = tanh(score * (1.0f / soft_cap)) * soft_cap;
        if (at < seen.begin || at + VL > seen.end) {
            vf place = lanes + float(at);
            score = place < set1(float(seen.begin)) ? set1(LOWEST) : score;
            score = place < set1(float(seen.end)) ? score : set1(LOWEST);
        }
        store(scores + at, score);
        top = max(top, score);
    }
    float now = largest(top);
    if (now == LOWEST) {  // nothing seen yet
        std::fill(scores + block.begin, scores + block.end, 0.0f);
        return 1.0f;
    }
    float decay = now == highest ? 1.0f : exp_nonpositive(set1(highest - now))[0];  // mostly 1
    vf sums = {};
    for (int at = block.begin; at < block.end; at += VL) {
        vf weight = exp_nonpositive(load(scores + at) - now);
        store(scores + at, SCALED ? weight * load(scales->values + at) : weight);
        sums = sums + weight;
    }
    highest = now;
    total = total * decay + sum(sums);
    return decay;
}

// What `rows` rows from `first` on see among them, in whole vectors: later rows begin and end no earlier.
inline Range seen_by(const Attention& job, const Piece& piece, int64_t first, int64_t rows, int64_t tile) {
    int64_t last = std::min(first + rows, piece.rows(job)) - 1;
    int begin = visible(job, piece, first, tile).begin, end = visible(job, piece, last, tile).end;
    return {begin / VL * VL, (end + VL - 1) / VL * VL};
}

}  // namespace octavo
