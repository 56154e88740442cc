// y = x W^T + bias with W in GGUF's quantized types and x rounded to 8 bits, 32 values to a scale, as
// llama.cpp does.
//
// Integers are summed exactly in eight lanes per 32 values; then two fused multiply-adds per part, from part
// 0 upwards: the same bits for every number of rows and threads. A tile is either several rows of x with one
// column, so that unpacking is shared, or one row with several columns.
#include <algorithm>
#include <vector>

#include "blocks.h"
#include "threads.h"

namespace octavo {
namespace {

typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef int8_t i8x32 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef float f32x8 __attribute__((vector_size(32)));

constexpr int LANES = 8;                 // of four bytes each
constexpr int64_t COLUMNS_AT_ONCE = 32;  // packed weights that stay in the cache while rows pass

inline f32x8 fma8(f32x8 a, f32x8 b, f32x8 c) {
#if defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// Lane i = sum of w[4 i + j] * x[4 i + j]; w is 0 … 63, or SIGNED.
template <bool SIGNED>
inline i32x8 dot(i8x32 w, i8x32 x) {
#if defined(__AVX2__)
    __m256i a = (__m256i)w, b = (__m256i)x;
    if constexpr (SIGNED) {
        b = _mm256_sign_epi8(b, a);
        a = _mm256_abs_epi8(a);
    }
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (i32x8)_mm256_dpbusd_epi32(_mm256_setzero_si256(), a, b);
#elif defined(__AVXVNNI__)
    return (i32x8)_mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), a, b);
#else
    return (i32x8)_mm256_madd_epi16(_mm256_maddubs_epi16(a, b),
                                    _mm256_set1_epi16(1));  // 2 * 128 * 127 < 2^15
#endif
#else
    i32x8 out = {};
    for (int i = 0; i < LANES; i++)
        for (int j = 4 * i; j < 4 * i + 4; j++) out[i] += w[j] * x[j];
    return out;
#endif
}

// One number per half; `different` is known when compiling.
inline f32x8 spread(const float (&value)[2], bool different) {
    float a = value[0], b = different ? value[1] : a;
#if defined(__AVX2__)
    if (different) return _mm256_set_m128(_mm_set1_ps(b), _mm_set1_ps(a));
#endif
    return f32x8{a, a, a, a, b, b, b, b};
}

inline i8x32 join(const i8x16 (&half)[2]) {
#if defined(__AVX2__)  // in registers: loading what two stores have just written would stall
    return (i8x32)_mm256_set_m128i((__m128i)half[1], (__m128i)half[0]);
#else
    return read<i8x32>(half);
#endif
}

// Rows of x in 8 bits: x = scale * q; sums = scale * (q summed over four neighbours).
struct Rounded {
    int64_t m, k;
    std::vector<int8_t> q;
    std::vector<float> sums, scales;

    Rounded(int64_t m, int64_t k)
        : m(m), k(k), q(size_t(m * k)), sums(size_t(m * k / 4)), scales(size_t(m * k / PART)) {}

    void round_row(const float* x, int64_t row) {
        for (int64_t i = 0; i < k / PART; i++) {
            int64_t part = row * (k / PART) + i;
            round_part(x + i * PART, q.data() + part * PART, sums.data() + part * LANES,
                       scales[size_t(part)]);
        }
    }

    static void round_part(const float* x, int8_t* q, float* sums, float& scale) {
        vf top = {}, poison = {};
        for (int j = 0; j < VECTORS; j++) {
            vf v = load(x + j * VL);
            top = max(top, v < 0.0f ? -v : v);
            poison = poison + v * 0.0f;  // not-a-number if one of x is that or infinite
        }
        float highest = largest(top), inverse = highest > 0 ? 127.0f / highest : 0.0f;
        scale = highest / 127.0f + sum(poison);
        int32_t whole[PART];
        for (int j = 0; j < VECTORS; j++) {
            vi rounded = to_int(round(load(x + j * VL) * inverse));
            std::memcpy(whole + j * VL, &rounded, sizeof rounded);
        }
        for (int j = 0; j < PART; j++) q[j] = int8_t(whole[j]);
        for (int j = 0; j < LANES; j++)
            sums[j] = scale * float(whole[4 * j] + whole[4 * j + 1] + whole[4 * j + 2] + whole[4 * j + 3]);
    }
};

struct Matmul {
    const Rounded& x;
    const uint8_t* w;
    int64_t n, row_bytes;
    const float* bias;
    float* y;
};

template <class Type, int R, int C>
void multiply_tile(const Matmul& job, int64_t row, int64_t column) {
    int64_t parts = job.x.k / PART;
    const int8_t* q = job.x.q.data() + row * job.x.k;
    const float* sums = job.x.sums.data() + row * parts * LANES;
    const float* scales = job.x.scales.data() + row * parts;
    f32x8 acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = f32x8{};
    for (int64_t i = 0; i < parts; i++)
        for (int c = 0; c < C; c++) {
            Part part = Type::part(job.w + (column + c) * job.row_bytes, i);
            i8x32 w = join(part.q);
            f32x8 scale = spread(part.scale, Type::TWO_SCALES),
                  offset = spread(part.offset, Type::TWO_SCALES);
            for (int r = 0; r < R; r++) {
                int64_t at = r * parts + i;
                f32x8 whole =
                    __builtin_convertvector(dot<Type::SIGNED>(w, read<i8x32>(q + at * PART)), f32x8);
                acc[r][c] = fma8(whole, scale * scales[at], acc[r][c]);
                if constexpr (!Type::SIGNED)
                    acc[r][c] = fma8(offset, read<f32x8>(sums + at * LANES), acc[r][c]);
            }
        }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            const f32x8& a = acc[r][c];
            float total = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
            job.y[(row + r) * job.n + column + c] = job.bias ? total + job.bias[column + c] : total;
        }
}

template <class Type, int R, int C>
void multiply_rows(const Matmul& job, int64_t row, int64_t begin, int64_t end) {
    int64_t column = begin;
    for (; column + C <= end; column += C) multiply_tile<Type, R, C>(job, row, column);
    for (; column < end; column++) multiply_tile<Type, R, 1>(job, row, column);
}

template <class Type>
void multiply_range(const Matmul& job, int64_t begin, int64_t end) {
    int64_t row = 0, m = job.x.m;
    for (; row + 8 <= m; row += 8) multiply_rows<Type, 8, 1>(job, row, begin, end);
    for (; row + 3 <= m; row += 3) multiply_rows<Type, 3, 2>(job, row, begin, end);
    for (; row < m; row++) multiply_rows<Type, 1, 4>(job, row, begin, end);
}

template <class Type>
void multiply(const Matmul& job, int threads) {
    if constexpr (Type::DENSE) {
        std::abort();  // the caller sends quantized types only
    } else {
        int64_t step = job.x.m == 1 ? std::max<int64_t>(COLUMNS_AT_ONCE, 65536 / job.x.k) : COLUMNS_AT_ONCE;
        parallel_for((job.n + step - 1) / step, threads, [&](int64_t i) {
            multiply_range<Type>(job, i * step, std::min(job.n, (i + 1) * step));
        });
    }
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// As octavo_matmul, for quantized types.
extern "C" void octavo_matmul_int8(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w,
                                   int64_t n, int64_t row_bytes, int type, const float* bias, float* y,
                                   int threads) {
    Rounded rounded(m, k);
    int64_t step = 1 + 32768 / k;
    parallel_for((m + step - 1) / step, threads, [&](int64_t task) {
        for (int64_t row = task * step; row < std::min(m, (task + 1) * step); row++)
            rounded.round_row(x + row * x_stride, row);
    });
    Matmul job{rounded, w, n, row_bytes, bias, y};
    with_type(type, [&](auto kind) { multiply<decltype(kind)>(job, threads); });
}
