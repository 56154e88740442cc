// Vectors of ARM's NEON: four floats, and two vectors of 16 bytes where other processors have one of 32. Included by
// simd.h, whose other branches say what the functions do.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace octavo {

// As one vector of twice the size would, which compilers keep in memory where registers have 16 bytes.
template <class V>
struct Pair {
    using T = std::decay_t<decltype(V{}[0])>;
    V low, high;
    T& operator[](int i) { return reinterpret_cast<T*>(this)[i]; }
    template <class W>
    explicit operator Pair<W>() const {
        return {(W)low, (W)high};
    }
    Pair operator-() const { return {-low, -high}; }
};

// In two, so that compilers keep them in registers.
template <class V>
struct Bytes<Pair<V>> {
    static Pair<V> read(const void* p) { return {Bytes<V>::read(p), Bytes<V>::read((const char*)p + sizeof(V))}; }
    static void write(void* p, Pair<V> a) {
        Bytes<V>::write(p, a.low);
        Bytes<V>::write((char*)p + sizeof(V), a.high);
    }
};

#define OCTAVO_OF_EACH(OPERATOR)                                                        \
    template <class V>                                                                  \
    OCTAVO_INLINE Pair<V> operator OPERATOR(Pair<V> a, Pair<V> b) {                     \
        return {a.low OPERATOR b.low, a.high OPERATOR b.high};                          \
    }                                                                                   \
    template <class V>                                                                  \
    OCTAVO_INLINE Pair<V> operator OPERATOR(Pair<V> a, typename Pair<V>::T b) {         \
        return {a.low OPERATOR b, a.high OPERATOR b};                                   \
    }
OCTAVO_OF_EACH(+)
OCTAVO_OF_EACH(-)
OCTAVO_OF_EACH(*)
OCTAVO_OF_EACH(&)
OCTAVO_OF_EACH(|)
OCTAVO_OF_EACH(^)
OCTAVO_OF_EACH(<<)
OCTAVO_OF_EACH(>>)
#undef OCTAVO_OF_EACH

template <class V>
OCTAVO_INLINE auto operator==(Pair<V> a, Pair<V> b) -> Pair<decltype(a.low == b.low)> {
    return {a.low == b.low, a.high == b.high};
}

constexpr int VL = 4, REGISTERS = 32;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint64_t u64x2 __attribute__((vector_size(16)));

using u8x32 = Pair<u8x16>;
using i8x32 = Pair<i8x16>;
using u16x16 = Pair<u16x8>;
using u64x4 = Pair<u64x2>;
using f32x8 = Pair<vf>;

inline u8x32 join(u8x16 low, u8x16 high) { return {low, high}; }
inline u8x32 each_eight_times(const uint8_t* p) {
    const uint8x16_t bytes = vreinterpretq_u8_u32(vdupq_n_u32(read<uint32_t>(p)));
    const u8x16 first = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    return {(u8x16)vqtbl1q_u8(bytes, (uint8x16_t)first), (u8x16)vqtbl1q_u8(bytes, (uint8x16_t)(first + 2))};
}

inline vf set1(float a) { return (vf)vdupq_n_f32(a); }
inline vf load(const float* p) { return read<vf>(p); }
inline void store(float* p, vf a) { std::memcpy(p, &a, sizeof a); }
inline vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
inline vf max(vf a, vf b) { return a > b ? a : b; }  // of anything and b where a is not a number
inline vf round(vf a) { return (vf)vrndnq_f32((float32x4_t)a); }
inline f32x8 splat(float a) { return {set1(a), set1(a)}; }

constexpr float BIAS = 0, SIGNED_BIAS = 0;
template <bool, int I>
inline vf biased(u8x32 a) {
    const int8x16_t bytes = (int8x16_t)(I < 4 ? a.low : a.high);
    const int16x8_t eight = I % 4 < 2 ? vmovl_s8(vget_low_s8(bytes)) : vmovl_high_s8(bytes);
    return (vf)vcvtq_f32_s32(I % 2 ? vmovl_high_s16(eight) : vmovl_s16(vget_low_s16(eight)));
}
template <bool SIGNED>
inline f32x8 eight_bytes(const void* p) {
    const uint8x8_t bytes = vcreate_u8(read<uint64_t>(p));
    const int16x8_t wide = SIGNED ? vmovl_s8(vreinterpret_s8_u8(bytes)) : vreinterpretq_s16_u16(vmovl_u8(bytes));
    return {(vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), (vf)vcvtq_f32_s32(vmovl_high_s16(wide))};
}

inline float half(uint16_t a) { return float(read<__fp16>(&a)); }
inline vf set1_half(const void* p) { return set1(half(read<uint16_t>(p))); }
inline uint16x4_t four_halves(const uint16_t* p) { return vcreate_u16(read<uint64_t>(p)); }
inline void store_halves(uint16_t* p, uint16x4_t a) { std::memcpy(p, &a, sizeof a); }
inline vf load_bf16(const uint16_t* p) { return (vf)vshlq_n_u32(vmovl_u16(four_halves(p)), 16); }
inline vf load_f16(const uint16_t* p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(four_halves(p))); }
inline void store_f16(uint16_t* p, vf a) {
    store_halves(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)a)));
}
inline void store_low16(uint16_t* p, vi a) { store_halves(p, vmovn_u32((uint32x4_t)a)); }
inline vf load_i8(const int8_t* p) {
    const int8x8_t bytes = vcreate_s8(read<uint32_t>(p));
    return (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
}
inline void store_low8(int8_t* p, vi a) {
    const int16x4_t low = vmovn_s32((int32x4_t)a);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(low, low));
    std::memcpy(p, &bytes, VL);
}
inline vi to_int(vf a) { return (vi)vcvtnq_s32_f32((float32x4_t)a); }
inline float sum(vf a) {
    return vaddv_f32(vadd_f32(vget_low_f32((float32x4_t)a), vget_high_f32((float32x4_t)a)));
}
inline float largest(vf a) { return vmaxnmvq_f32((float32x4_t)a); }

}  // namespace octavo
