// Vectors of four floats for processors without a form of their own. Included by simd.h, whose other branches say what
// the functions do.
#pragma once
#include <cmath>

namespace octavo {

constexpr int VL = 4, REGISTERS = 16;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
inline vf set1(float a) { return vf{a, a, a, a}; }
inline vf load(const float* p) { return read<vf>(p); }
inline void store(float* p, vf a) { std::memcpy(p, &a, sizeof a); }
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf round(vf a) {
    return vf{std::nearbyint(a[0]), std::nearbyint(a[1]), std::nearbyint(a[2]), std::nearbyint(a[3])};
}
constexpr float BIAS = 0, SIGNED_BIAS = 0;  // see above
template <bool, int I>
inline vf biased(u8x32 a) {
    const i8x32 b = (i8x32)a;
    return vf{float(b[4 * I]), float(b[4 * I + 1]), float(b[4 * I + 2]), float(b[4 * I + 3])};
}
inline float half(uint16_t a) {
    uint32_t sign = uint32_t(a & 0x8000) << 16, mantissa = a & 0x3FF,
             bits = sign | 0x7F800000 | mantissa << 13;
    int exponent = a >> 10 & 31;
    if (exponent == 31) return read<float>(&bits);
    float magnitude =
        exponent ? std::ldexp(float(mantissa | 0x400), exponent - 25) : std::ldexp(float(mantissa), -24);
    return sign ? -magnitude : magnitude;
}
inline vf set1_half(const void* p) { return set1(half(read<uint16_t>(p))); }
inline uint16_t to_half(float a) {
    uint32_t bits = read<uint32_t>(&a), sign = bits >> 16 & 0x8000;
    if (std::isnan(a)) return uint16_t(sign | 0x7E00);
    float magnitude = std::fabs(a);
    if (magnitude >= 65520) return uint16_t(sign | 0x7C00);
    int exponent = magnitude < 6.103515625e-5f ? -14 : std::ilogb(magnitude);
    uint32_t steps = uint32_t(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
    return uint16_t(sign | ((uint32_t(exponent + 14) << 10) + steps));
}
inline vf load_bf16(const uint16_t* p) {
    vi bits = {p[0] << 16, p[1] << 16, p[2] << 16, p[3] << 16};
    return (vf)bits;
}
inline vf load_f16(const uint16_t* p) { return vf{half(p[0]), half(p[1]), half(p[2]), half(p[3])}; }
inline void store_f16(uint16_t* p, vf a) {
    for (int i = 0; i < VL; i++) p[i] = to_half(a[i]);
}
inline void store_low16(uint16_t* p, vi a) {
    for (int i = 0; i < VL; i++) p[i] = uint16_t(a[i]);
}
inline vf load_i8(const int8_t* p) { return vf{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
inline void store_low8(int8_t* p, vi a) {
    for (int i = 0; i < VL; i++) p[i] = int8_t(a[i]);
}
inline vi to_int(vf a) {
    return vi{int(std::nearbyint(a[0])), int(std::nearbyint(a[1])), int(std::nearbyint(a[2])),
              int(std::nearbyint(a[3]))};
}
inline float sum(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline float largest(vf a) { return std::fmax(std::fmax(a[0], a[1]), std::fmax(a[2], a[3])); }

}  // namespace octavo
