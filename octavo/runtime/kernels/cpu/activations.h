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
    static vf apply(vf x) {
        for (int i = 0; i < VL; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678118654752f));
        return x;
    }
};

// Call use(Activation{}) for number `kind`: 0 silu, 1 gelu, 2 gelu by tanh.
template <class Use>
auto with_activation(int kind, Use&& use) {
    return kind == 0 ? use(Silu{}) : kind == 1 ? use(Gelu{}) : use(GeluTanh{});
}

}  // namespace octavo
