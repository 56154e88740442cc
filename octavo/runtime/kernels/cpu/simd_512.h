// Vectors of 64 bytes on any processor: sixteen lanes, as a tile has rows. Included by kernels of tiles.
#pragma once
#include "simd.h"

namespace octavo {

typedef float floats __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(64)));
typedef int32_t integers __attribute__((vector_size(64)));

template <class T, class U>
inline T at(const U* p) {
    return read<T>(p);
}
inline floats all(float a) { return floats{} + a; }

// Two bf16 in each word, of equal or larger amount where a float lies between two.
inline words pairs(floats even, floats odd) {
    return (((words)even + 0x8000) >> 16) | (((words)odd + 0x8000) & 0xFFFF0000);
}

#if defined(OCTAVO_AVX512)
inline floats larger(floats a, floats b) { return _mm512_max_ps(a, b); }
inline floats fused(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
inline floats above_floor(floats x) {
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
inline floats times_power(floats a, floats x) { return _mm512_scalef_ps(a, x); }  // a * 2^floor(x)
inline bool differ(floats a, floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }  // in any lane
#else  // with soft tiles
inline floats larger(floats a, floats b) { return a > b ? a : b; }
inline floats fused(floats a, floats b, floats c) { return a * b + c; }
inline floats above_floor(floats x) {
    for (int i = 0; i < 16; i++) x[i] = x[i] - std::floor(x[i]);
    return x;
}
inline floats times_power(floats a, floats x) {
    for (int i = 0; i < 16; i++) a[i] = a[i] * std::exp2(std::floor(x[i]));
    return a;
}
inline bool differ(floats a, floats b) {
    bool any = false;
    for (int i = 0; i < 16; i++) any = any || !(a[i] == b[i]);
    return any;
}
#endif

// 2^x, wrong by less than 4e-6 of it; exactly 1 at 0.
inline floats power(floats x) {
    floats part = above_floor(x), p = all(1.34266876e-2f);
    p = fused(p, part, all(5.22424690e-2f));
    p = fused(p, part, all(2.41280213e-1f));
    p = fused(p, part, all(6.93044841e-1f));
    return times_power(fused(p, part, all(1.0f)), x);
}

// The same, wrong by less than 3e-7 of it.
inline floats fine_power(floats x) {
    floats part = above_floor(x), p = all(1.86713125e-3f);
    p = fused(p, part, all(9.01702766e-3f));
    p = fused(p, part, all(5.57999152e-2f));
    p = fused(p, part, all(2.40164450e-1f));
    p = fused(p, part, all(6.93151312e-1f));
    return times_power(fused(p, part, all(1.0f)), x);
}

// 16 x 16 words turned, perhaps where they are: rows to columns.
inline void turn(const float* from, float* to) {
    words a[16];
    unrolled<16>([&](auto i) { a[i.value] = at<words>(from + 16 * i.value); });
    turn<8>(a);
    unrolled<16>([&](auto i) { std::memcpy(to + 16 * i.value, &a[i.value], 64); });
}
inline void turn(float* tile) { turn(tile, tile); }

}  // namespace octavo
