// Products of bf16 by ARM's BFMMLA: 2 x 4 numbers times 4 x 2, for two rows of x and two of weights. Included by
// dots_bf16.h, which says what the functions do; dots_512.h has them for AVX512_BF16.
//
// Rows lie in pairs, four numbers of one beside four of the other. BFMMLA adds two pairs of products to a sum, one after
// the other, and rounds to odd unless a program sets FPCR.EBF, which none does unasked: the same bits on every CPU.
#pragma once

namespace octavo {
namespace dots {

constexpr int ROWS = 8, COLUMNS = 8;
constexpr int STEPS = PART / 4;

inline vf dot(vf sums, u16x8 a, u16x8 b) {
    return (vf)vbfmmlaq_f32((float32x4_t)sums, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
template <class V>
inline V first_halves(V a, V b) {
    return (V)vzip1q_u64((uint64x2_t)a, (uint64x2_t)b);
}
template <class V>
inline V second_halves(V a, V b) {
    return (V)vzip2q_u64((uint64x2_t)a, (uint64x2_t)b);
}
inline u16x8 eight(const void* p, int64_t i) { return read<u16x8>((const char*)p + 16 * i); }

// A part of one row and the same of another, one behind the other, become a pair.
inline void pair_up(const halves* rows, halves* pair) {
    u16x8 a[STEPS];
    for (int i = 0; i < STEPS; i++) a[i] = eight(rows, i);
    for (int i = 0; i < STEPS / 2; i++) {
        const u16x8 both[] = {first_halves(a[i], a[i + STEPS / 2]), second_halves(a[i], a[i + STEPS / 2])};
        std::memcpy((char*)pair + 32 * i, both, sizeof both);
    }
}

inline void round_rows(const Product& job, int64_t first, int64_t last, halves* space) {
    for (int64_t row = first; row < last; row += 2)
        for (int64_t i = 0; i < job.parts; i++) {
            const halves rows[] = {rounded_x(job, row, i), row + 1 < last ? rounded_x(job, row + 1, i) : halves{}};
            pair_up(rows, space + row * job.parts + 2 * i);
        }
}

inline void arrange(Tile* tiles, int64_t count) {
    for (int64_t i = 0; i < count * STRIP; i += 2) {
        halves* rows = reinterpret_cast<halves*>(tiles) + i;
        pair_up(rows, rows);
    }
}

// P pairs of rows of x with COLUMNS weight rows of a strip.
template <int P>
Outputs<ROWS * COLUMNS> multiply_pairs(const halves* x, int64_t parts, const halves* w) {
    constexpr int C = COLUMNS / 2;
    vf sums[P][C] = {};
    for (int64_t i = 0; i < parts; i++, x += 2, w += STRIP)
        unrolled<STEPS>([&](auto step) {
            u16x8 b[C];
            for (int c = 0; c < C; c++) b[c] = in_register(eight(w + 2 * c, step));
            for (int p = 0; p < P; p++) {
                const u16x8 a = in_register(eight(x + 2 * p * parts, step));
                for (int c = 0; c < C; c++) sums[p][c] = dot(sums[p][c], a, b[c]);
            }
        });
    Outputs<ROWS * COLUMNS> out = {};
    for (int p = 0; p < P; p++)
        for (int c = 0; c < C; c += 2) {
            out.vectors[2 * p * C / 2 + c / 2] = first_halves(sums[p][c], sums[p][c + 1]);
            out.vectors[(2 * p + 1) * C / 2 + c / 2] = second_halves(sums[p][c], sums[p][c + 1]);
        }
    return out;
}

inline Outputs<ROWS * COLUMNS> multiply_rows(int64_t rows, const halves* x, int64_t parts, const halves* w) {
    if (rows > 6) return multiply_pairs<4>(x, parts, w);
    if (rows > 4) return multiply_pairs<3>(x, parts, w);
    return rows > 2 ? multiply_pairs<2>(x, parts, w) : multiply_pairs<1>(x, parts, w);
}

// Four pairs of weight rows in whole parts of bf16, where they lie; what is beyond the last row is that row.
inline void multiply_in_place(const Product& job, const Rows& rows, int64_t row, int64_t last, vf (&sums)[4]) {
    const uint8_t* w[8];
    for (int64_t r = 0; r < 8; r++) w[r] = rows.data + std::min(row + r, last) * rows.row_bytes;
    for (int64_t i = 0; i < job.k / 8; i++) {
        const u16x8 low = eight(job.rounded, 2 * i), high = eight(job.rounded, 2 * i + 1);
        unrolled<4>([&](auto p) {
            const u16x8 a = eight(w[2 * p], i), b = eight(w[2 * p + 1], i);
            sums[p] = dot(dot(sums[p], low, first_halves(a, b)), high, second_halves(a, b));
        });
    }
}

template <class Type>
Outputs<STRIP> multiply_vector(const Product& job, const Rows& rows, int64_t count) {
    vf sums[STRIP / 8][4] = {};
    if (std::is_same_v<Type, BF16> && job.k % PART == 0) {
        for (int64_t row = 0; row < count; row += 8) multiply_in_place(job, rows, row, count - 1, sums[row / 8]);
    } else {
        alignas(64) Tile piece[PIECE] = {};
        for (int64_t first = 0; first < job.parts; first += PIECE) {
            const int64_t parts = std::min(PIECE, job.parts - first);
            unpack_piece<Type>(rows, count, first, parts, piece);
            arrange(piece, parts);
            for (int64_t i = 0; i < parts; i++)
                unrolled<STEPS>([&](auto step) {
                    const u16x8 x = eight(job.rounded + 2 * (first + i), step);
                    unrolled<STRIP / 2>([&](auto p) {
                        vf& sum = sums[p / 4][p % 4];
                        sum = dot(sum, x, eight(piece[i][2 * p], step));
                    });
                });
        }
    }
    Outputs<STRIP> out;
    for (int i = 0; i < STRIP / 4; i++)
        out.vectors[i] = first_halves(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
    return out;
}

}  // namespace dots
}  // namespace octavo
