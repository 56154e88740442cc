// Tokens that may not be chosen: their logits become -inf, as a mask of one bit per token says.
#include <algorithm>
#include <cmath>

#include "exported.h"
#include "threads.h"

namespace octavo {
namespace {

constexpr int64_t BITS = 32;

void forbid_row(float* logits, int64_t size, const uint32_t* words) {
    for (int64_t first = 0; first < size; first += BITS) {
        uint32_t word = words[first / BITS];
        float* x = logits + first;
        if (word == 0)
            std::fill(x, x + std::min(BITS, size - first), -INFINITY);
        else if (first + BITS > size)
            for (int64_t bit = 0; first + bit < size; bit++) x[bit] = word >> bit & 1 ? x[bit] : -INFINITY;
        else if (word != UINT32_MAX)
            for (int64_t bit = 0; bit < BITS; bit++) x[bit] = word >> bit & 1 ? x[bit] : -INFINITY;
    }
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// rows: m of the logits, distinct; numbers: the mask of each; words: of masks, `width` each, bit i of word w = token
// 32 w + i
extern "C" void octavo_forbid(float* logits, int64_t stride, int64_t size, const int64_t* rows, const int64_t* numbers,
                              int64_t count, const uint32_t* words, int64_t width, int threads) {
    parallel_for(count, threads, [&](int64_t i) {
        forbid_row(logits + rows[i] * stride, size, words + numbers[i] * width);
    });
}
OCTAVO_EXPORTED(octavo_forbid)
