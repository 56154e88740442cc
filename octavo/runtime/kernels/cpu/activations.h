// The activations of feed-forward blocks. Included by their kernel, and by the product that ends with one.
#pragma once
#include "simd.h"

namespace octavo {

struct Silu {
    static vf apply(vf x) { return x * sigmoid(x); }
};

struct GeluTanh {
    static vf apply(vf x) {
        return x * sigmoid(fma(x * x * x, set1(0.044715f), x) * (2 * 0.7978845608028654f));
    }
};

struct Gelu {
    // erf(z) as z times a quotient of polynomials of z^2 (the coefficients of Eigen), wrong by 3e-7 at most.
    static vf apply(vf x) {
        vf z = x * set1(0.70710678118654752f), end = set1(4.0f);
        z = max(-end, -max(-end, -z));
        vf s = z * z, p = set1(-2.72614225801306e-10f), q = set1(-1.45660718464996e-05f);
        p = fma(p, s, set1(2.77068142495902e-08f));
        p = fma(p, s, set1(-2.10102402082508e-06f));
        p = fma(p, s, set1(-5.69250639462346e-05f));
        p = fma(p, s, set1(-7.34990630326855e-04f));
        p = fma(p, s, set1(-2.95459980854025e-03f));
        p = fma(p, s, set1(-1.60960333262415e-02f));
        q = fma(q, s, set1(-2.13374055278905e-04f));
        q = fma(q, s, set1(-1.68282697438203e-03f));
        q = fma(q, s, set1(-7.37332916720468e-03f));
        q = fma(q, s, set1(-1.42647390514189e-02f));
        vf half = fma(z * p / q, set1(0.5f), set1(0.5f));
        return x * (z > -end ? half : vf{});  // 0, not a rounding error, however large -x is
    }
};

// Call use(Activation{}) for number `kind`: 0 silu, 1 gelu, 2 gelu by tanh.
template <class Use>
auto with_activation(int kind, Use&& use) {
    return kind == 0 ? use(Silu{}) : kind == 1 ? use(Gelu{}) : use(GeluTanh{});
}

// VL outputs: their gates times their values.
using VectorGate = vf (*)(vf gates, vf values);

inline VectorGate vector_gate(int kind) {
    return with_activation(kind, [](auto act) -> VectorGate {
        return [](vf gates, vf values) { return decltype(act)::apply(gates) * values; };
    });
}

}  // namespace octavo
