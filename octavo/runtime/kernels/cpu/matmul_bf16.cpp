// y = x W^T + bias with W in GGUF's types, for CPUs with AMX: x and the unpacked weights are rounded to bf16,
// their products are summed in float32.
//
// Weights are unpacked into panels of 32 rows that stay in the cache, as two rows of tiles. While one panel is
// multiplied, the next one is unpacked, a piece after every step along K: tiles have a unit of their own, so that
// few rows of x cost hardly more than unpacking. A tile product is 16 rows of W with 16 rows of x: what has to be
// transposed is x, once, and the result.
//
// Every output is one float that walks along K, 32 weights a step in the order of TDPBF16PS, whatever the number
// of rows and threads and wherever it lies: so a row of y never depends on the others.
#include <algorithm>
#include <memory>

#include "amx.h"
#include "blocks.h"
#include "tape.h"
#include "threads.h"

extern "C" void octavo_matmul(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w,
                              int64_t n, int64_t row_bytes, int type, const float* bias, float* y,
                              int64_t y_stride, int threads);

#if defined(OCTAVO_TILES)

namespace octavo {
namespace {

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint16_t Tile[TILE_ROWS][PART];  // 16 rows of W, or 16 pairs of k of x

constexpr int PANEL_ROWS = 2 * TILE_ROWS;
constexpr int64_t PIECE = 32;             // parts that are unpacked in one go
constexpr int64_t CHUNK_BYTES = 1 << 20;  // of x, meant to stay in the second cache
constexpr int64_t AHEAD = 2048;           // bytes between what is unpacked and what is asked for

inline f32x8 eight_halves(const uint16_t* p) {
#if defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    return f32x8{half(p[0]), half(p[1]), half(p[2]), half(p[3]), half(p[4]), half(p[5]), half(p[6]), half(p[7])};
#endif
}

inline void store_part(uint16_t* to, const vf (&values)[VECTORS]) {
#if defined(OCTAVO_AVX512) && defined(__AVX512BF16__)
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(values[1], values[0]));
#else
    for (int j = 0; j < VECTORS; j++) store_bf16(to + j * VL, values[j]);
#endif
}

inline void transpose(f32x16 (&rows)[16]) {
#if defined(OCTAVO_AVX512)
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
            b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {  // quarters
        __m512i even = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        __m512i odd = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xDD);
        __m512i even2 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        __m512i odd2 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xDD);
        rows[i] = (f32x16)_mm512_shuffle_i32x4(even, even2, 0x88);
        rows[i + 4] = (f32x16)_mm512_shuffle_i32x4(odd, odd2, 0x88);
        rows[i + 8] = (f32x16)_mm512_shuffle_i32x4(even, even2, 0xDD);
        rows[i + 12] = (f32x16)_mm512_shuffle_i32x4(odd, odd2, 0xDD);
    }
#else
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < i; j++) {
            float kept = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = kept;
        }
#endif
}

// Scales and offsets of the blocks of a piece, of one part each, converted together.
template <class Type>
struct PieceFactors {
    static constexpr int EACH = Type::MINIMUM ? 2 : 1;
    float numbers[PIECE * EACH];

    PieceFactors(const uint8_t* blocks, int64_t count) {
        if (count < 8) {
            convert(blocks, 0, int(count));
        } else {
            for (int64_t i = 0; i < count; i += 8) convert(blocks, std::min(i, count - 8), 8);
        }
        asm("" : "+m"(numbers));  // loads repeat a number for nothing, shuffles of a register do not
    }

    // Eight blocks from `first` on, or fewer.
    OCTAVO_INLINE void convert(const uint8_t* blocks, int64_t first, int count) {
        uint16_t halves[8 * EACH] = {};
        for (int i = 0; i < count; i++)
            std::memcpy(halves + i * EACH, blocks + (first + i) * Type::BYTES, EACH * sizeof(uint16_t));
        for (int i = 0; i < 8 * EACH; i += 8) {
            f32x8 wide = eight_halves(halves + i);
            std::memcpy(numbers + first * EACH + i, &wide, sizeof wide);
        }
    }
};

// One of them, as Factors.
template <class Type>
struct OneFactor {
    vf scales, offsets;
    OneFactor(const PieceFactors<Type>& piece, int64_t i)
        : scales(set1(piece.numbers[i * piece.EACH])),
          offsets(Type::MINIMUM ? set1(piece.numbers[i * piece.EACH + 1]) : scales * -zero<Type>) {}
    vf scale(int) const { return scales; }
    vf offset(int) const { return offsets; }
};

// Part s of a block in bf16.
template <class Type, class F>
OCTAVO_INLINE void round_part(const uint8_t* block, int s, const F& factors, uint16_t* out) {
#if defined(OCTAVO_AVX512) && defined(__AVX512BF16__)
    if constexpr (Type::LARGEST < 32) {  // few values: make them all, then look up
        const vf first = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        auto value = [&](vf q) {
            return Type::MINIMUM ? fma(q, factors.scale(2 * s), factors.offset(2 * s))
                                 : (q - float(Type::ZERO)) * factors.scale(2 * s);
        };
        __m512i values;
        if constexpr (Type::LARGEST < 16)
            values = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(value(first)));
        else
            values = (__m512i)_mm512_cvtne2ps_pbh(value(first + 16.0f), value(first));
        __m512i places = _mm512_cvtepu8_epi16((__m256i)Type::quants(block, s));
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(places, values));
        return;
    }
#endif
    vf values[VECTORS];
    unpack_part<Type>(block, s, factors, [&](auto j, vf w) { values[j] = w; });
    store_part(out, values);
}

// Unpack `count` parts of a row of `size` weights, from part `first`; part i of them goes to out[i][0].
template <class Type>
void unpack_piece(const uint8_t* row, int64_t first, int64_t count, int64_t size, Tile* out) {
    if constexpr (Type::DENSE) {
        for (int64_t i = first; i < first + count; i++) {
            prefetch<PART * Type::BYTES>(row + i * PART * Type::BYTES + AHEAD);
            vf values[VECTORS];
            read_part<Type>(row, i, size, [&](int j, vf w) { values[j] = w; });
            store_part(out[i - first][0], values);
        }
    } else {
        static_assert(PIECE % Type::PARTS == 0);
        const uint8_t* blocks = row + first / Type::PARTS * Type::BYTES;
        if constexpr (Type::PARTS > 1) {
            for (int64_t i = 0; i < count; i += Type::PARTS, blocks += Type::BYTES) {
                prefetch<Type::BYTES>(blocks + AHEAD);
                Factors<Type> factors(blocks);
                unrolled<Type::PARTS>([&](auto s) { round_part<Type>(blocks, s, factors, out[i + s][0]); });
            }
        } else {
            PieceFactors<Type> factors(blocks, count);
            for (int64_t i = 0; i < count; i++, blocks += Type::BYTES, out++) {
                __builtin_prefetch(blocks + AHEAD);
                round_part<Type>(blocks, 0, OneFactor<Type>(factors, i), (*out)[0]);
            }
        }
    }
}

using Unpack = void (*)(const uint8_t* row, int64_t first, int64_t count, int64_t size, Tile* out);

struct alignas(TILE_BYTES) Line {
    uint16_t values[PART];
};

// x in bf16, tile by tile: 16 rows of x, along K. A single row is alone in its tiles, which are one column wide.
struct Rounded {
    int64_t m, k, parts = divide_up(k, PART), width = m == 1 ? 1 : 16, num_tiles = divide_up(m, width);
    std::unique_ptr<Line[]> data{new Line[size_t(num_tiles * parts * width)]};  // not cleared

    uint16_t* tile(int64_t t, int64_t part) const { return data[(t * parts + part) * width].values; }

    void round(const float* x, int64_t x_stride, int64_t t) const {
        for (int64_t i = 0; i < parts; i++) {
            if (width == 1) {
                round_part(x + i * PART, i, tile(t, i));
                continue;
            }
            f32x16 rows[16] = {};  // of pairs
            for (int64_t r = 0; r < std::min<int64_t>(16, m - 16 * t); r++)
                round_part(x + (16 * t + r) * x_stride + i * PART, i, (uint16_t*)&rows[r]);
            transpose(rows);
            std::memcpy(tile(t, i), rows, sizeof rows);
        }
    }

    void round_part(const float* x, int64_t i, uint16_t* to) const {
        float padded[PART] = {};
        if (k < (i + 1) * PART) {
            std::copy_n(x, k - i * PART, padded);
            x = padded;
        }
        vf values[VECTORS];
        for (int j = 0; j < VECTORS; j++) values[j] = load(x + j * VL);
        store_part(to, values);
    }
};

struct Matmul {
    const Rounded& x;
    const uint8_t* w;
    int64_t n, row_bytes;
    Unpack unpack;
    const float* bias;
    float* y;
    int64_t y_stride;
};

// A panel on its way: after each of `steps` steps as many pieces of its rows as make all of them.
struct Unpacking {
    const Matmul& job;
    int64_t column;
    Tile* out;  // [2][parts]
    int64_t steps, pieces = divide_up(job.x.parts, PIECE), left = PANEL_ROWS * pieces, due = 0;

    void step() {
        for (due += PANEL_ROWS * pieces; due >= steps && left > 0; due -= steps) one();
    }
    void finish() {
        while (left > 0) one();
    }
    void one() {
        int64_t index = PANEL_ROWS * pieces - left--, row = index / pieces, first = index % pieces * PIECE;
        const uint8_t* from = job.w + std::min(column + row, job.n - 1) * job.row_bytes;
        Tile* tiles = out + row / TILE_ROWS * job.x.parts + first;
        Tile* at_row = reinterpret_cast<Tile*>(tiles[0][row % TILE_ROWS]);
        job.unpack(from, first, std::min(PIECE, job.x.parts - first), job.x.k, at_row);
    }
};

// Tile T: 16 outputs of 16 rows of x, or of one.
template <int T>
void write(const Matmul& job, int64_t row, int64_t column) {
    f32x16 rows[16];
    tile_store<T>(rows, 4 * job.x.width);
    if (column >= job.n) return;
    if (job.x.width > 1) transpose(rows);
    int64_t count = std::min<int64_t>(16, job.n - column), num_rows = std::min(job.x.width, job.x.m - row);
    f32x16 bias = {};
    if (job.bias) std::memcpy(&bias, job.bias + column, size_t(count) * 4);
    for (int64_t r = 0; r < num_rows; r++) {
        f32x16 out = job.bias ? rows[r] + bias : rows[r];
        float* to = job.y + (row + r) * job.y_stride + column;
        if (count == 16)
            std::memcpy(to, &out, sizeof out);
        else
            std::memcpy(to, &out, size_t(count) * 4);
    }
}

// A panel with one or two tiles of x. Tiles 0 … 3: sums; 4, 5: weights; 6, 7: x. Loads and products take turns.
template <int COUNT>
void multiply_tiles(const Matmul& job, int64_t t, const Tile* panel, int64_t column, Unpacking& next) {
    const int64_t parts = job.x.parts, width = job.x.width;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int64_t i = 0; i < parts; i++) {
        tile_load<6>(job.x.tile(t, i), 4 * width);
        tile_load<4>(panel[i], TILE_BYTES);
        tile_product<0, 4, 6>();
        tile_load<5>(panel[parts + i], TILE_BYTES);
        tile_product<1, 5, 6>();
        if constexpr (COUNT == 2) {
            tile_load<7>(job.x.tile(t + 1, i), 4 * width);
            tile_product<2, 4, 7>();
            tile_product<3, 5, 7>();
        }
        next.step();
    }
    write<0>(job, t * width, column);
    write<1>(job, t * width, column + TILE_ROWS);
    if constexpr (COUNT == 2) {
        write<2>(job, (t + 1) * width, column);
        write<3>(job, (t + 1) * width, column + TILE_ROWS);
    }
}

// Tiles `first` … `last` - 1 of x with rows `begin` … `end` - 1 of W.
void multiply_chunk(const Matmul& job, int64_t first, int64_t last, int64_t begin, int64_t end) {
    const int64_t tiles = 2 * job.x.parts, steps = divide_up(last - first, 2) * job.x.parts;
    Tile* panels = reinterpret_cast<Tile*>(scratch(2 * size_t(tiles) * sizeof(Tile) / sizeof(float)));
    Unpacking{job, begin, panels, steps}.finish();
    for (int64_t column = begin, i = 0; column < end; column += PANEL_ROWS, i ^= 1) {
        Unpacking next{job, column + PANEL_ROWS, panels + (i ^ 1) * tiles, steps};
        if (next.column >= end) next.left = 0;
        for (int64_t t = first; t < last; t += 2) {
            if (t + 1 < last)
                multiply_tiles<2>(job, t, panels + i * tiles, column, next);
            else
                multiply_tiles<1>(job, t, panels + i * tiles, column, next);
        }
        next.finish();
    }
}

void multiply(const Matmul& job, int threads) {
    const int64_t width = job.x.width, num_tiles = job.x.num_tiles;
    TileShapes shapes;
    for (int i = 0; i < 8; i++) shapes.set(i, TILE_ROWS, int(i == 4 || i == 5 ? TILE_BYTES : 4 * width));
    const int64_t chunk = std::max<int64_t>(1, CHUNK_BYTES / (job.x.parts * int64_t(sizeof(Tile))) / 2) * 2;
    const int64_t step = divide_up(divide_up(job.n, PANEL_ROWS), 3 * threads) * PANEL_ROWS;
    parallel_for(divide_up(job.n, step), threads, [&](int64_t i) {
        Tiles tiles(shapes);
        for (int64_t t = 0; t < num_tiles; t += chunk)
            multiply_chunk(job, t, std::min(num_tiles, t + chunk), i * step, std::min(job.n, (i + 1) * step));
    });
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// Whether octavo_matmul_bf16 rounds.
extern "C" int octavo_has_tiles() { return tiles_usable(); }

// As octavo_matmul.
extern "C" void octavo_matmul_bf16(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w,
                                   int64_t n, int64_t row_bytes, int type, const float* bias, float* y,
                                   int64_t y_stride, int threads) {
    if (!tiles_usable())
        return octavo_matmul(x, m, k, x_stride, w, n, row_bytes, type, bias, y, y_stride, threads);
    if (m == 0 || n == 0) return;
    Rounded rounded{m, k};
    parallel_for(rounded.num_tiles, threads, [&](int64_t t) { rounded.round(x, x_stride, t); });
    Matmul job{rounded, w, n, row_bytes, nullptr, bias, y, y_stride};
    with_type(type, [&](auto kind) { job.unpack = unpack_piece<decltype(kind)>; });
    multiply(job, threads);
}

#else

extern "C" int octavo_has_tiles() { return 0; }

extern "C" void octavo_matmul_bf16(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w,
                                   int64_t n, int64_t row_bytes, int type, const float* bias, float* y,
                                   int64_t y_stride, int threads) {
    octavo_matmul(x, m, k, x_stride, w, n, row_bytes, type, bias, y, y_stride, threads);
}

#endif

OCTAVO_TAPED(octavo_matmul_bf16)
