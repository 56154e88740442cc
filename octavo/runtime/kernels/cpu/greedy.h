// The greedy output of each row of x, found in the tiles that outputs are made in: those are neither turned nor
// written, and logits cost no memory. Included by gemv_bf16.h.
#pragma once
#include "matmul_bf16.h"

namespace octavo {
namespace {

// An output and its place; of equal ones the first. A row with a not-a-number: 0, and that.
struct Choice {
    float max_logit = -std::numeric_limits<float>::infinity();
    int64_t id = 0;

    void add(const Choice& later) {
        if (!std::isnan(max_logit) && (later.max_logit > max_logit || std::isnan(later.max_logit))) *this = later;
    }
};

// Of a range of outputs, seen in their order. A lane is a row of x; if there is one only, an output of 16.
struct Greedy {
    struct Lanes {
        floats tops = all(-std::numeric_limits<float>::infinity());
        floats spoilt = {};  // not a number where one was seen
        integers ids = {};
    } lanes[MOST_GEMV_ROWS / TILE_ROWS];

    // Outputs column … column + columns - 1 of tile t of x: [columns][16 rows], or [columns] of the only row.
    void see(const float* sums, int64_t width, int64_t t, int64_t column, int64_t columns) {
        Lanes its = lanes[t];
        if (width == 1) {
            const integers lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            const floats none = all(-std::numeric_limits<float>::infinity());
            see(its, lane < int(columns) ? at<floats>(sums) : none, lane + int(column));
        } else {
            for (int64_t i = 0; i < columns; i++) see(its, at<floats>(sums + 16 * i), integers{} + int(column + i));
        }
        lanes[t] = its;
    }
    static void see(Lanes& its, floats values, integers ids) {
        its.ids = values > its.tops ? ids : its.ids;
        its.tops = values > its.tops ? values : its.tops;
        its.spoilt = values == values ? its.spoilt : values;
    }

    Choice of_row(int64_t row, int64_t width) const {
        if (width > 1) return of_lane(row / 16, row % 16);
        Choice best;
        for (int i = 0; i < 16; i++) {
            const Choice one = of_lane(0, i);
            if (one.max_logit == best.max_logit) best.id = std::min(best.id, one.id);
            best.add(one);
        }
        return best;
    }
    Choice of_lane(int64_t t, int64_t i) const {
        const Lanes& its = lanes[t];
        if (std::isnan(its.spoilt[i])) return {its.spoilt[i], 0};
        return {its.tops[i], its.ids[i]};
    }
};

}  // namespace
}  // namespace octavo
