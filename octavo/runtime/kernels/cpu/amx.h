// Intel's AMX: eight tiles of 16 rows of 64 bytes, and their products. Included by kernels whose fast form is a
// tile product: they compile where OCTAVO_TILES is defined and must ask `tiles_usable()` before they run.
//
// The instructions are written out, as g++ 12's intrinsics do not say that they read memory and the stores before
// them may be dropped. With OCTAVO_SOFT_TILES, plain code does the same in the same order: tests run kernels with
// it on any CPU. Semantics: "Intel Architecture Instruction Set Extensions Programming Reference", TDPBF16PS.
#pragma once
#include "simd.h"

#if defined(OCTAVO_SOFT_TILES)
#define OCTAVO_TILES
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define OCTAVO_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;

// What `ldtilecfg` reads.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int num_rows, int num_bytes) {
        rows[tile] = uint8_t(num_rows);
        row_bytes[tile] = uint16_t(num_bytes);
    }
};

#if defined(OCTAVO_TILES) && !defined(OCTAVO_SOFT_TILES)

// Whether this process may use tiles: Linux wants to be asked, once for all threads.
inline bool tiles_usable() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool usable = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return usable;
}

// The calling thread's tiles have these shapes, until the end of the scope.
class Tiles {
public:
    explicit Tiles(const TileShapes& shapes, int64_t = 0) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
    ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

template <int T>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
// Rows are `stride` bytes apart; 0 repeats one row.
template <int T>
inline void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
// The same, of what will not be wanted again soon: it shall not take the place of what will.
template <int T>
inline void tile_stream(const void* from, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
// Tile C += A B, in float32: A has a row of bf16 for each of C's rows, B a row for each pair of A's columns, with
// the two factors of a column of C side by side.
template <int C, int A, int B>
inline void tile_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#elif defined(OCTAVO_TILES)

inline bool tiles_usable() { return true; }

struct SoftTiles {
    TileShapes shapes;
    uint8_t data[8][TILE_ROWS][TILE_BYTES];
};
inline SoftTiles& soft_tiles() {
    static thread_local SoftTiles tiles;
    return tiles;
}

class Tiles {
public:
    explicit Tiles(const TileShapes& shapes, int64_t = 0) { soft_tiles() = SoftTiles{shapes, {}}; }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

template <int T>
inline void tile_zero() {
    std::memset(soft_tiles().data[T], 0, sizeof soft_tiles().data[T]);
}
template <int T>
inline void tile_load(const void* from, int64_t stride) {
    SoftTiles& tiles = soft_tiles();
    tile_zero<T>();
    for (int i = 0; i < tiles.shapes.rows[T]; i++)
        std::memcpy(tiles.data[T][i], static_cast<const uint8_t*>(from) + i * stride, tiles.shapes.row_bytes[T]);
}
template <int T>
inline void tile_stream(const void* from, int64_t stride) {
    tile_load<T>(from, stride);
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
    SoftTiles& tiles = soft_tiles();
    for (int i = 0; i < tiles.shapes.rows[T]; i++)
        std::memcpy(static_cast<uint8_t*>(to) + i * stride, tiles.data[T][i], tiles.shapes.row_bytes[T]);
}
// Even and odd columns are summed apart, from the left, then together, then onto C.
template <int C, int A, int B>
inline void tile_product() {
    SoftTiles& tiles = soft_tiles();
    auto value = [&](int tile, int row, int column) {
        uint16_t bits;
        std::memcpy(&bits, tiles.data[tile][row] + 2 * column, sizeof bits);
        uint32_t wide = uint32_t(bits) << 16;
        float number;
        std::memcpy(&number, &wide, sizeof number);
        return number;
    };
    for (int row = 0; row < tiles.shapes.rows[C]; row++)
        for (int column = 0; column < tiles.shapes.row_bytes[C] / 4; column++) {
            float sums[2] = {}, c;
            for (int i = 0; i < tiles.shapes.row_bytes[A] / 2; i++)
                sums[i % 2] += value(A, row, i) * value(B, i / 2, 2 * column + i % 2);
            uint8_t* place = tiles.data[C][row] + 4 * column;
            std::memcpy(&c, place, sizeof c);
            c += sums[0] + sums[1];
            std::memcpy(place, &c, sizeof c);
        }
}

#else

inline bool tiles_usable() { return false; }

#endif

#if defined(OCTAVO_DOTS_512) && !defined(OCTAVO_TILES)
#define OCTAVO_VECTOR_TILES

// The same by AVX512_BF16, for attention: sums lie in memory, a product has all of them in registers. What is loaded
// as a factor is multiplied where it lies, before it changes. Of tiles 6 and 7 the first `queries` rows (as the left
// factor) or columns (as the right one) count.
class Tiles {
public:
    explicit Tiles(const TileShapes&, int64_t queries) : queries(queries) { current() = this; }
    ~Tiles() { current() = nullptr; }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    static Tiles*& current() {
        static thread_local __attribute__((tls_model("initial-exec"))) Tiles* tiles = nullptr;
        return tiles;
    }

    const int64_t queries;
    const uint8_t* factors[8];
    int64_t strides[8];
    alignas(64) float sums[4][TILE_ROWS][16];
};

template <int T>
inline void tile_zero() {
    for (auto& row : Tiles::current()->sums[T]) store(row, vf{});
}
template <int T>
inline void tile_load(const void* from, int64_t stride) {
    Tiles& tiles = *Tiles::current();
    if constexpr (T < 4)
        for (int r = 0; r < TILE_ROWS; r++)
            store(tiles.sums[T][r], load((const float*)((const uint8_t*)from + r * stride)));
    else
        tiles.factors[T] = (const uint8_t*)from, tiles.strides[T] = stride;
}
template <int T>
inline void tile_stream(const void* from, int64_t stride) {
    tile_load<T>(from, stride);
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
    for (int r = 0; r < TILE_ROWS; r++) store((float*)((uint8_t*)to + r * stride), load(Tiles::current()->sums[T][r]));
}
inline __m512 dot_each(__m512 sums, const uint8_t* pairs, int both) {
    return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_loadu_si512(pairs), (__m512bh)_mm512_set1_epi32(both));
}
inline __m256 dot_each(__m256 sums, const uint8_t* pairs, int both) {
    return _mm256_dpbf16_ps(sums, (__m256bh)read<__m256i>(pairs), (__m256bh)_mm256_set1_epi32(both));
}
// ROWS rows of sums, as wide as V.
template <class V, int ROWS>
inline void product(float (*sums)[16], const uint8_t* a, int64_t a_stride, const uint8_t* b, int64_t b_stride) {
    V acc[ROWS];
    for (int r = 0; r < ROWS; r++) acc[r] = read<V>(sums[r]);
    const uint8_t* rows[4] = {a, a + 4 * a_stride, a + 8 * a_stride, a + 12 * a_stride};
    for (int pair = 0; pair < TILE_BYTES; pair += 4, b += b_stride)
        for (int r = 0; r < ROWS; r++) acc[r] = dot_each(acc[r], b, read<int>(rows[r / 4] + r % 4 * a_stride + pair));
    for (int r = 0; r < ROWS; r++) std::memcpy(sums[r], &acc[r], sizeof(V));
}
template <int C, int A, int B>
inline void tile_product() {
    Tiles& tiles = *Tiles::current();
    auto multiply = [&](auto kernel) {
        kernel(tiles.sums[C], tiles.factors[A], tiles.strides[A], tiles.factors[B], tiles.strides[B]);
    };
    if (B >= 6 && tiles.queries <= 8) return multiply(product<__m256, TILE_ROWS>);
    if (A >= 6 && tiles.queries <= 4) return multiply(product<__m512, 4>);
    if (A >= 6 && tiles.queries <= 8) return multiply(product<__m512, 8>);
    multiply(product<__m512, TILE_ROWS>);
}

#endif

}  // namespace octavo
