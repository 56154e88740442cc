// What ranks of one host say to each other, by memory that all of them have mapped. A message goes in pieces: each
// rank writes its own, says so, waits for the others, and reads all. There are two places for pieces, in turns: who
// writes the one after next has seen that all have read the last one there.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "exported.h"
#include "threads.h"

namespace octavo {
namespace {

constexpr int64_t PIECE_BYTES = 64 << 10;
constexpr int SPINS = 2000;  // some 100 us
constexpr auto LONGEST_WAIT = std::chrono::minutes(10);  // as torch's collectives wait

// Of a group, as kernels/peers.py has it: `regions` and `flags` are addresses by rank.
struct Ranks {
    const int64_t *regions, *flags;
    uint32_t* turn;
    int64_t rank, size;

    char* piece(int64_t of) const { return reinterpret_cast<char*>(regions[of]) + (*turn & 1) * PIECE_BYTES; }

    // The place of this rank's next piece.
    void* begin() const {
        ++*turn;
        return piece(rank);
    }

    // Wait until every rank has written its piece.
    void meet() const {
        __atomic_store_n(flag(rank), *turn, __ATOMIC_RELEASE);
        for (int64_t other = 0; other < size; other++)
            for (int spins = 0; !has_come(other); spins++)
                if (spins < SPINS)
                    RELAX();
                else
                    return sleep(other);
    }

private:
    uint32_t* flag(int64_t of) const { return reinterpret_cast<uint32_t*>(flags[of]); }

    bool has_come(int64_t other) const { return int32_t(__atomic_load_n(flag(other), __ATOMIC_ACQUIRE) - *turn) >= 0; }

    // The longer it takes the more seldom it looks: who waits for a rank that hangs should seem to do nothing.
    void sleep(int64_t other) const {
        const auto begun = std::chrono::steady_clock::now();
        for (; other < size; other++)
            while (!has_come(other)) {
                const auto waited = std::chrono::steady_clock::now() - begun;
                if (waited > LONGEST_WAIT) throw Alone();
                std::this_thread::sleep_for(std::clamp<std::chrono::nanoseconds>(
                    waited / 16, std::chrono::microseconds(20), std::chrono::milliseconds(10)));
            }
    }
};

struct Chosen {
    int64_t id;
    float logit;
};

}  // namespace
}  // namespace octavo

using namespace octavo;

// x += those of the other ranks: summed rank by rank, so to the same bits everywhere and in any company.
extern "C" void octavo_sum_ranks(const int64_t* regions, const int64_t* flags, void* turn, int64_t rank, int64_t size,
                                 float* x, int64_t count) {
    const Ranks ranks{regions, flags, static_cast<uint32_t*>(turn), rank, size};
    constexpr int64_t MOST = PIECE_BYTES / sizeof(float);
    for (int64_t done = 0, n; done < count; done += n, x += n) {
        n = std::min(MOST, count - done);
        std::memcpy(ranks.begin(), x, n * sizeof(float));
        ranks.meet();
        auto of = [&](int64_t other) { return reinterpret_cast<const float*>(ranks.piece(other)); };
        const float *first = of(0), *second = of(1);
        for (int64_t i = 0; i < n; i++) x[i] = first[i] + second[i];
        for (int64_t other = 2; other < size; other++) {
            const float* next = of(other);
            for (int64_t i = 0; i < n; i++) x[i] += next[i];
        }
    }
}
OCTAVO_EXPORTED(octavo_sum_ranks)

// What every rank has in x: out is [size, num_bytes].
extern "C" void octavo_gather_ranks(const int64_t* regions, const int64_t* flags, void* turn, int64_t rank,
                                    int64_t size, const char* x, int64_t num_bytes, char* out) {
    const Ranks ranks{regions, flags, static_cast<uint32_t*>(turn), rank, size};
    for (int64_t done = 0, n; done < num_bytes; done += n) {
        n = std::min(PIECE_BYTES, num_bytes - done);
        std::memcpy(ranks.begin(), x + done, n);
        ranks.meet();
        for (int64_t other = 0; other < size; other++)
            std::memcpy(out + other * num_bytes + done, ranks.piece(other), n);
    }
}
OCTAVO_EXPORTED(octavo_gather_ranks)

// The best of the ranks' choices takes their place; of equal ones that of the first rank. `start` is added to own ids.
// What is not a number stays.
extern "C" void octavo_choose_ranks(const int64_t* regions, const int64_t* flags, void* turn, int64_t rank,
                                    int64_t size, int64_t* ids, float* logits, int64_t count, int64_t start) {
    const Ranks ranks{regions, flags, static_cast<uint32_t*>(turn), rank, size};
    constexpr int64_t MOST = PIECE_BYTES / sizeof(Chosen);
    for (int64_t done = 0, n; done < count; done += n) {
        n = std::min(MOST, count - done);
        auto* own = static_cast<Chosen*>(ranks.begin());
        for (int64_t i = 0; i < n; i++) own[i] = {ids[done + i] + start, logits[done + i]};
        ranks.meet();
        for (int64_t i = 0; i < n; i++) {
            Chosen best = reinterpret_cast<const Chosen*>(ranks.piece(0))[i];
            for (int64_t other = 1; other < size && best.logit == best.logit; other++) {
                const Chosen next = reinterpret_cast<const Chosen*>(ranks.piece(other))[i];
                if (!(next.logit <= best.logit)) best = next;
            }
            ids[done + i] = best.id, logits[done + i] = best.logit;
        }
    }
}
OCTAVO_EXPORTED(octavo_choose_ranks)

// Which rows of a part from `start` on, `size` of them, have these ids; -1 = none.
extern "C" void octavo_own_rows(const int64_t* ids, int64_t count, int64_t start, int64_t size, int64_t* rows) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = ids[i] - start;
        rows[i] = row < 0 || row >= size ? -1 : row;
    }
}
OCTAVO_EXPORTED(octavo_own_rows)
