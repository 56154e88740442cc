// Vectors of VL floats: AVX-512, AVX2, NEON or whatever the compiler makes of 16 bytes. Included by every kernel.
// Arithmetic uses the compiler's vector operators; only what they cannot say stands here. Sums have a fixed
// order, and the build forbids contraction (-ffp-contract=off), so a result depends on its inputs alone.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define OCTAVO_AVX512
#if defined(__AVX512BF16__)
#define OCTAVO_DOTS  // products of bf16, two to a sum
#define OCTAVO_DOTS_512
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define OCTAVO_AVX2
#elif defined(__aarch64__)
#define OCTAVO_NEON
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define OCTAVO_DOTS
#endif
#endif

// For what is small only once its parameters are known.
#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo {

typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

// How a value lies in memory, aligned or not.
template <class T>
struct Bytes {
    static T read(const void* p) {
        T value;
        std::memcpy(&value, p, sizeof(T));
        return value;
    }
    static void write(void* p, T value) { std::memcpy(p, &value, sizeof(T)); }
};
template <class T>
inline T read(const void* p) {
    return Bytes<T>::read(p);
}
template <class T>
inline void write(void* p, T value) {
    Bytes<T>::write(p, value);
}

inline int64_t divide_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
inline int64_t round_up(int64_t n, int64_t unit) { return divide_up(n, unit) * unit; }

template <class Body, int... I>
OCTAVO_INLINE void unroll(Body&& body, std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, I>{}), ...);
}

// Call body(0) … body(N - 1), each with a number that is known when compiling.
template <int N, class Body>
OCTAVO_INLINE void unrolled(Body&& body) {
    unroll(body, std::make_integer_sequence<int, N>{});
}

}  // namespace octavo

#if defined(OCTAVO_NEON)
#include "neon.h"
#else

namespace octavo {

typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef int8_t i8x32 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint64_t u64x4 __attribute__((vector_size(32)));
typedef float f32x8 __attribute__((vector_size(32)));

inline f32x8 splat(float a) { return f32x8{a, a, a, a, a, a, a, a}; }

#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)  // in registers: loading what two stores wrote would stall
inline u8x32 join(u8x16 low, u8x16 high) { return (u8x32)_mm256_set_m128i((__m128i)high, (__m128i)low); }
inline u8x16 lower(u8x32 a) { return (u8x16)_mm256_castsi256_si128((__m256i)a); }
inline u8x16 upper(u8x32 a) { return (u8x16)_mm256_extracti128_si256((__m256i)a, 1); }
// Each of four bytes eight times.
inline u8x32 each_eight_times(const uint8_t* p) {
    const u64x4 places = {0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303};
    return (u8x32)_mm256_shuffle_epi8(_mm256_set1_epi32(read<int>(p)), (__m256i)places);
}
#else
inline u8x32 join(u8x16 low, u8x16 high) {
    u8x32 both;
    std::memcpy(&both, &low, 16);
    std::memcpy((char*)&both + 16, &high, 16);
    return both;
}
inline u8x16 lower(u8x32 a) { return read<u8x16>(&a); }
inline u8x16 upper(u8x32 a) { return read<u8x16>((char*)&a + 16); }
inline u8x32 each_eight_times(const uint8_t* p) {
    constexpr uint64_t EIGHT = 0x0101010101010101;
    return (u8x32)u64x4{p[0] * EIGHT, p[1] * EIGHT, p[2] * EIGHT, p[3] * EIGHT};
}
#endif

#if defined(OCTAVO_AVX512)

constexpr int VL = 16, REGISTERS = 32;
typedef __m512 vf;
typedef int32_t vi __attribute__((vector_size(64)));  // __m512i counts in 64 bits
inline vf set1(float a) { return _mm512_set1_ps(a); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf a) { _mm512_storeu_ps(p, a); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf round(vf a) { return _mm512_roundscale_ps(a, 0); }
constexpr float BIAS = 0, SIGNED_BIAS = 0;  // see below
template <bool, int I>
inline vf biased(u8x32 a) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)(I ? upper(a) : lower(a))));
}
inline vf load_bf16(const uint16_t* p) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
inline vf load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void store_f16(uint16_t* p, vf a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, 0)); }
inline void store_low16(uint16_t* p, vi a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)a));
}
inline vf load_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline void store_low8(int8_t* p, vi a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)a)); }
inline float half(uint16_t a) { return _cvtsh_ss(a); }
inline vf set1_half(const void* p) { return _mm512_cvtph_ps(_mm256_set1_epi16(read<int16_t>(p))); }
inline vi to_int(vf a) { return (vi)_mm512_cvtps_epi32(a); }
inline float sum(vf a) { return _mm512_reduce_add_ps(a); }
inline float largest(vf a) { return _mm512_reduce_max_ps(a); }

#elif defined(OCTAVO_AVX2)

constexpr int VL = 8, REGISTERS = 16;
typedef __m256 vf;
typedef int32_t vi __attribute__((vector_size(32)));  // __m256i counts in 64 bits
inline vf set1(float a) { return _mm256_set1_ps(a); }
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vf a) { _mm256_storeu_ps(p, a); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// BIAS + bytes 8 i … 8 i + 7, exactly: a byte is put among the bits of a float's mantissa. Half the price of
// sign extension and conversion.
constexpr float BIAS = 128, SIGNED_BIAS = 32768 + 128;
template <bool SIGNED, int I>
inline vf biased(u8x32 a) {
    constexpr int AT = SIGNED ? 8 : 16, F = I % 2 * 8;  // where a bit counts as 1 in a float of 2^15, of 2^7
    const vi places = (vi{F, F + 1, F + 2, F + 3, F + 4, F + 5, F + 6, F + 7} << AT) | ~(255 << AT);
    __m128i both = I < 2 ? (__m128i)lower(a) : (__m128i)upper(a);
    __m256i spread = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(both), (__m256i)places);
    return (vf)_mm256_xor_si256(spread, _mm256_set1_epi32(SIGNED ? 0x47008000 : 0x43000000));
}
inline vf load_bf16(const uint16_t* p) {
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
inline vf load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void store_f16(uint16_t* p, vf a) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a, 0)); }
inline void store_low16(uint16_t* p, vi a) {
    __m256i low =
        _mm256_packus_epi32(_mm256_and_si256((__m256i)a, _mm256_set1_epi32(0xFFFF)), _mm256_setzero_si256());
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(low, 0x08)));
}
inline vf load_i8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline void store_low8(int8_t* p, vi a) {
    const __m256i low = _mm256_set1_epi32(0x0C080400);  // of each four lanes the lowest bytes, to the front
    __m256i fours = _mm256_shuffle_epi8((__m256i)a, low);
    __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    _mm_storel_epi64((__m128i*)p, both);
}
inline float half(uint16_t a) { return _cvtsh_ss(a); }
inline vf set1_half(const void* p) { return _mm256_cvtph_ps(_mm_set1_epi16(read<int16_t>(p))); }
inline vi to_int(vf a) { return (vi)_mm256_cvtps_epi32(a); }
inline float sum(vf a) {
    __m128 b = _mm256_castps256_ps128(a) + _mm256_extractf128_ps(a, 1);
    b = b + _mm_movehl_ps(b, b);
    return _mm_cvtss_f32(b) + _mm_cvtss_f32(_mm_shuffle_ps(b, b, 1));
}
inline float largest(vf a) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}

#endif

}  // namespace octavo

#if !defined(OCTAVO_AVX512) && !defined(OCTAVO_AVX2)
#include "simd_plain.h"
#endif

#endif

namespace octavo {

// The lanes with these numbers, which count through a and on through b.
template <int... I, class V>
OCTAVO_INLINE V picked(V a, V b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, decltype(a == b){I...});
#endif
}

template <int HALF, class V, int... I>
OCTAVO_INLINE void exchange(V& a, V& b, std::integer_sequence<int, I...>) {
    constexpr int N = sizeof...(I);
    V first = picked<(I & HALF ? N + I - HALF : I)...>(a, b);
    b = picked<(I & HALF ? N + I : I + HALF)...>(a, b);
    a = first;
}

// Of each 2 * HALF lanes: a's upper half for b's lower.
template <int HALF, class V>
OCTAVO_INLINE void exchange(V& a, V& b) {
    exchange<HALF>(a, b, std::make_integer_sequence<int, int(sizeof(V) / sizeof(a[0]))>{});
}

// N vectors of N lanes turned, rows to columns; HALF: N / 2.
template <int HALF, class V, int N>
OCTAVO_INLINE void turn(V (&a)[N]) {
    if constexpr (HALF > 0) {
        unrolled<N>([&](auto i) {
            if constexpr (!(i.value & HALF)) exchange<HALF>(a[i.value], a[i.value + HALF]);
        });
        turn<HALF / 2>(a);
    }
}

#if !defined(OCTAVO_NEON)
// Eight bytes as floats.
template <bool SIGNED>
inline f32x8 eight_bytes(const void* p) {
#if defined(__AVX2__)
    __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
    return _mm256_cvtepi32_ps(SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    f32x8 out;
    const uint8_t* bytes = (const uint8_t*)p;
    for (int i = 0; i < 8; i++) out[i] = SIGNED ? float(int8_t(bytes[i])) : float(bytes[i]);
    return out;
#endif
}
#endif

// Keeps the compiler from loading a value again at each use, and from adding many up in a tree, for which
// there are no registers.
template <class V>
inline V in_register(V a) {
#if defined(__AVX2__)
    asm("" : "+v"(a));
#elif defined(OCTAVO_NEON)
    asm("" : "+w"(a));
#endif
    return a;
}
#if defined(OCTAVO_NEON)
template <class V>
OCTAVO_INLINE Pair<V> in_register(Pair<V> a) {
    return {in_register(a.low), in_register(a.high)};
}
#endif

// Rounds to nearest, ties to even, as torch does; a not-a-number stays one.
inline void store_bf16(uint16_t* p, vf a) {
#if defined(OCTAVO_NEON) && defined(OCTAVO_DOTS)
    store_halves(p, vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)a)));
#else
    vi bits = (vi)a;
    vi rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    store_low16(p, (vi)(a == a ? (vf)rounded : (vf)((vi){} + 0x7FC0)));
#endif
}

// (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2: the polynomial of Cephes' expf.
inline vf exp_terms(vf r) {
    vf p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    return fma(p, r, set1(5.0000001201e-1f));
}

// e^(x - n ln 2), as far.
inline vf exp_rest(vf x, vf n) {
    vf r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    return fma(exp_terms(r), r * r, r) + 1.0f;
}

#if defined(OCTAVO_AVX512)
// As exp, of `low` and `high` where x lies beyond.
inline vf exp_between(float low, float high, vf x) {
    vf clamped = _mm512_min_ps(set1(high), _mm512_max_ps(set1(low), x));  // NaN stays NaN
    vf n = round(clamped * set1(1.44269504088896341f));
    return _mm512_scalef_ps(exp_rest(clamped, n), n);
}
#endif

// e^x to 1-2 units in the last place; 0 below -104 (so for -inf), inf above 88.7. Range reduction and
// polynomial after Cephes' expf.
#if defined(OCTAVO_AVX512)
inline vf exp(vf x) { return exp_between(-104.0f, 89.0f, x); }
#else
inline vf exp(vf x) {
    vf clamped = x < set1(-87.3f) ? set1(-87.3f) : x;
    clamped = clamped > set1(88.7f) ? set1(88.7f) : clamped;
    vf n = round(clamped * set1(1.44269504088896341f));
    vf p = exp_rest(clamped, n);
    vi exponent = to_int(n);
    vi lower = exponent >> 1;  // in two steps, as 2^128 is no float
    vf y = p * (vf)((lower + 127) << 23) * (vf)((exponent - lower + 127) << 23);
    y = x > set1(88.7f) ? set1(std::numeric_limits<float>::infinity()) : y;
    y = x < set1(-87.3f) ? set1(0.0f) : y;
    return x == x ? y : x;
}
#endif

// e^x, at least e^-87 and at most e^80: enough beside 1, and normal numbers, as is one divided by them.
inline vf exp_beside_one(vf x) {
#if defined(OCTAVO_AVX512)
    return exp_between(-87.0f, 80.0f, x);
#else
    x = x < set1(-87.0f) ? set1(-87.0f) : x;
    return exp(x > set1(80.0f) ? set1(80.0f) : x);
#endif
}

// 1 / x to 1-2 units in the last place, for x from 1 to e^80.
inline vf reciprocal(vf x) {
#if defined(OCTAVO_AVX512)
    vf y = _mm512_rcp14_ps(x);  // a division takes as long as all the rest of a sigmoid
    return fma(fma(-x, y, set1(1.0f)), y, y);
#else
    return 1.0f / x;
#endif
}

// 1 / (1 + e^-x), to 2-3 units in the last place where it is more than e^-80.
inline vf sigmoid(vf x) { return reciprocal(exp_beside_one(-x) + 1.0f); }

// tanh: by e^2x where it is large, with an absolute error about 1e-7; below 0.625, where that would be many units
// in the last place, by the polynomial of Cephes' tanhf.
inline vf tanh(vf x) {
    vf square = x * x;
    vf p = fma(set1(-5.70498872745e-3f), square, set1(2.06390887954e-2f));
    p = fma(p, square, set1(-5.37397155531e-2f));
    p = fma(p, square, set1(1.33314422036e-1f));
    p = fma(p, square, set1(-3.33332819422e-1f));
    vf large = 1.0f - 2.0f * reciprocal(exp_beside_one(x + x) + 1.0f);
    return square < set1(0.390625f) ? fma(p * square, x, x) : large;
}

}  // namespace octavo
