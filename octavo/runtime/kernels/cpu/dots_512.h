// Products of bf16 by AVX512_BF16. Included by dots_bf16.h, which says what the functions do; dots_neon.h has them
// for ARM.
//
// A sum is a vector of 16 sums of pairs, whose lanes are added in a fixed order. One row of x: weights are unpacked in
// registers and multiplied at once.
#pragma once

namespace octavo {
namespace dots {

constexpr int ROWS = 4, COLUMNS = 4;

inline vf dot(vf sums, halves a, halves b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }

// Lane i of a[0] = sum of the lanes of a[i]; HALF: 8 of 16 vectors.
template <int HALF>
OCTAVO_INLINE void add_lanes(vf (&a)[16]) {
    for (int i = 0; i < HALF; i++) {
        exchange<HALF>(a[i], a[i + HALF]);
        a[i] = a[i] + a[i + HALF];
    }
    if constexpr (HALF > 1) add_lanes<HALF / 2>(a);
}

inline void round_rows(const Product& job, int64_t first, int64_t last, halves* space) {
    for (int64_t row = first; row < last; row++)
        for (int64_t i = 0; i < job.parts; i++) space[row * job.parts + i] = rounded_x(job, row, i);
}

inline void arrange(Tile*, int64_t) {}

// R rows of x with COLUMNS weight rows of a strip.
template <int R>
Outputs<ROWS * COLUMNS> multiply_tile(const halves* x, int64_t parts, const halves* w) {
    vf acc[R][COLUMNS];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < COLUMNS; c++) acc[r][c] = vf{};
    for (int64_t i = 0; i < parts; i++, x++, w += STRIP) {
        halves b[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) b[c] = in_register(w[c]);
        for (int r = 0; r < R; r++) {
            const halves a = in_register(x[r * parts]);
            for (int c = 0; c < COLUMNS; c++) acc[r][c] = dot(acc[r][c], a, b[c]);
        }
    }
    vf sums[ROWS * COLUMNS];
    unrolled<ROWS * COLUMNS>([&](auto i) { sums[i] = i < R * COLUMNS ? acc[i % (R * COLUMNS) / COLUMNS][i % COLUMNS] : vf{}; });
    add_lanes<8>(sums);
    return {{sums[0]}};
}

inline Outputs<ROWS * COLUMNS> multiply_rows(int64_t rows, const halves* x, int64_t parts, const halves* w) {
    if (rows >= 4) return multiply_tile<4>(x, parts, w);
    if (rows == 3) return multiply_tile<3>(x, parts, w);
    return rows == 2 ? multiply_tile<2>(x, parts, w) : multiply_tile<1>(x, parts, w);
}

// Four weight rows at a time, as sums of one wait for each other.
template <class Type>
Outputs<STRIP> multiply_vector(const Product& job, const Rows& rows, int64_t count) {
    const int64_t parts = job.parts, even = divide_up(parts, divide_up(parts, PIECE));
    int64_t piece = PIECE;
    if constexpr (Type::DENSE)
        piece = parts;
    else if constexpr (Type::PARTS == 1)
        piece = even;
    vf acc[STRIP] = {};
    for (int64_t row = 0; row < count; row += ROWS)
        for (int64_t first = 0; first < parts; first += piece)
            for (int64_t r = row; r < std::min<int64_t>(row + ROWS, count); r++) {
                vf sums = acc[r];
                const halves* x = job.rounded + first;
                unpack_row<Type>(rows, r, first, std::min(piece, parts - first),
                                 [&](int64_t i, halves w) { sums = dot(sums, x[i], w); });
                acc[r] = sums;
            }
    add_lanes<8>(acc);
    return {{acc[0]}};
}

}  // namespace dots
}  // namespace octavo
