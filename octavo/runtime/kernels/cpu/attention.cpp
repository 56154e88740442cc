// Causal attention of a ragged batch over the paged cache: the batch in pieces, pieces to threads, long
// contexts in parts. After "online softmax" (Milakov and Gimelshein, 2018), FlashAttention's tiling and
// Flash-Decoding.
#include "attention.h"

#include <atomic>
#include <memory>
#include <vector>

#include "amx.h"
#include "tape.h"
#include "threads.h"

namespace octavo {
namespace {

constexpr int ROWS_PER_PIECE = 128;  // query heads that share the keys and values of a tile
constexpr int TASKS_PER_THREAD = 4;  // no task shall be longer than a thread's share by so much

// Queries times keys: what a piece costs.
int64_t work(const Attention& job, const Piece& piece) {
    return (piece.limit() - piece.oldest(job)) * (piece.last - piece.first);
}

// The batch in pieces, the longest first so that threads end together.
std::vector<Piece> cut(const Attention& job, int num_requests) {
    std::vector<Piece> pieces;
    int64_t step = std::max<int64_t>(1, ROWS_PER_PIECE / job.group());
    for (int r = 0; r < num_requests; r++) {
        int64_t begin = job.cu_q_lens[r], end = job.cu_q_lens[r + 1];
        for (int64_t first = begin; first < end; first += step)
            for (int64_t head = 0; head < job.cache.num_kv_heads; head++)
                pieces.push_back({r, head, first, std::min(end, first + step), job.kv_lens[r] - end + first});
    }
    std::stable_sort(pieces.begin(), pieces.end(),
                     [&](const Piece& a, const Piece& b) { return work(job, a) > work(job, b); });
    return pieces;
}

// a = a and b together.
void join(const State& a, const State& b, int64_t rows, int64_t width) {
    for (int64_t first = 0; first < rows; first += VL) {
        vf highest = max(load(a.highest + first), load(b.highest + first));
        vf base = highest == set1(LOWEST) ? set1(0) : highest;
        vf of_a = exp(load(a.highest + first) - base), of_b = exp(load(b.highest + first) - base);
        store(a.highest + first, highest);
        store(a.total + first, load(a.total + first) * of_a + load(b.total + first) * of_b);
        for (int64_t i = first; i < std::min<int64_t>(first + VL, rows); i++)
            for (int64_t d = i * width; d < (i + 1) * width; d += VL)
                store(a.out + d, load(a.out + d) * of_a[i - first] + load(b.out + d) * of_b[i - first]);
    }
}

void finish(const Attention& job, const Piece& piece, const State& state) {
    int64_t size = job.cache.head_dim, width = job.width();
    for (int64_t i = 0; i < piece.rows(job); i++) {
        float *to = piece.result(job, i), total = state.total[i];
        for (int64_t d = 0; d < size; d++) to[d] = total == 0 ? 0.0f : state.out[i * width + d] / total;
    }
}

// A piece that several tasks share: each sees a part; the last to be done joins them, in order.
struct Shared {
    std::unique_ptr<float[]> states;
    std::atomic<int64_t> left;

    Shared(int64_t floats, int64_t parts) : states(new float[size_t(floats * parts)]), left(parts) {}
};

struct Task {
    const Piece* piece;
    int64_t begin, end;  // positions
    Shared* shared;      // null: all parts are this task's
};

class Batch {
  public:
    Batch(const Attention& job, std::vector<Piece> pieces, bool tiles, int threads)
        : job_(job), pieces_(std::move(pieces)), tiles_(tiles) {
        int64_t total = 0;
        for (const Piece& piece : pieces_) total += work(job_, piece);
        for (const Piece& piece : pieces_) {
            bool large = threads > 1 && work(job_, piece) * threads * TASKS_PER_THREAD > total;
            int64_t begin = piece.oldest(job_), end = piece.limit(), parts = (end - 1) / PART - begin / PART + 1;
            if (!large || parts == 1) {
                tasks_.push_back({&piece, begin, end, nullptr});
                continue;
            }
            shared_.push_back(std::make_unique<Shared>(State::floats(piece.rows(job_), job_.width()), parts));
            for (int64_t at = begin; at < end; at = next_part(at))
                tasks_.push_back({&piece, at, std::min(end, next_part(at)), shared_.back().get()});
        }
    }
    int64_t num_tasks() const { return int64_t(tasks_.size()); }

    void run(int64_t index) const {
        const Task& task = tasks_[size_t(index)];
        const Piece& piece = *task.piece;
        const Arithmetic& arithmetic = choose(piece.rows(job_));
        int64_t rows = piece.rows(job_), width = job_.width(), floats = State::floats(rows, width);
        float* space = scratch(size_t(2 * floats + arithmetic.space(job_, rows)));
        float* work = space + 2 * floats;
        if (task.shared) {
            int64_t part = task.begin / PART - piece.oldest(job_) / PART;
            State state = State::make(task.shared->states.get() + part * floats, rows, width);
            arithmetic.see(job_, piece, task.begin, task.end, state, work);
            if (task.shared->left.fetch_sub(1, std::memory_order_acq_rel) == 1) join_parts(task);
            return;
        }
        State whole = State::make(space, rows, width);
        arithmetic.see(job_, piece, task.begin, std::min(task.end, next_part(task.begin)), whole, work);
        for (int64_t at = next_part(task.begin); at < task.end; at += PART) {
            State state = State::make(space + floats, rows, width);
            arithmetic.see(job_, piece, at, std::min(task.end, at + PART), state, work);
            join(whole, state, rows, width);
        }
        finish(job_, piece, whole);
    }

  private:
    static int64_t next_part(int64_t at) { return at / PART * PART + PART; }

    const Arithmetic& choose(int64_t rows) const {
        return tiles_ ? bfloat16_tiles : is_few(job_, rows) ? few_rows : many_rows;
    }

    void join_parts(const Task& last) const {
        const Piece& piece = *last.piece;
        int64_t rows = piece.rows(job_), width = job_.width(), floats = State::floats(rows, width);
        int64_t parts = (piece.limit() - 1) / PART - piece.oldest(job_) / PART + 1;
        State whole = State::of(last.shared->states.get(), rows);
        for (int64_t part = 1; part < parts; part++)
            join(whole, State::of(last.shared->states.get() + part * floats, rows), rows, width);
        finish(job_, piece, whole);
    }

    const Attention& job_;
    std::vector<Piece> pieces_;
    bool tiles_;
    std::vector<Task> tasks_;
    std::vector<std::unique_ptr<Shared>> shared_;
};

// Whether tiles can take what this cache holds.
bool fits_tiles(const Cache& cache) {
    return bfloat16_tiles.see && (cache.type == CACHE_BF16 || cache.type == CACHE_I8) &&
           cache.head_dim % 32 == 0 && cache.block_size % 16 == 0;
}

#if defined(OCTAVO_TILES)
bool have_tiles() { return tiles_usable(); }
#else
bool have_tiles() { return false; }
#endif

}  // namespace
}  // namespace octavo

using namespace octavo;

// bfloat16: queries and weights may be rounded, for products of tiles where there are any.
extern "C" void octavo_attention(const float* q, int64_t q_stride, int64_t num_heads, const void* data,
                                 int type, int64_t block_size, int64_t num_kv_heads, int64_t head_dim,
                                 const int32_t* tables, int64_t table_stride, const int32_t* cu_q_lens,
                                 const int32_t* kv_lens, int num_requests, float scale, int64_t window,
                                 float soft_cap, float* out, int threads, int bfloat16) {
    Cache cache{(const uint8_t*)data, CacheType(type), block_size, num_kv_heads, head_dim};
    Attention job{cache,     q,       q_stride, num_heads, tables, table_stride,
                  cu_q_lens, kv_lens, scale,    soft_cap,  window, out};
    bool tiles = bfloat16 && fits_tiles(cache) && have_tiles();
    Batch batch(job, cut(job, num_requests), tiles, threads);
    // A request's heads lie beside each other: one thread takes them all, where that leaves enough to share.
    const int64_t tasks = batch.num_tasks(), enough = TASKS_PER_THREAD * threads * num_kv_heads;
    const int64_t run = tasks >= enough ? num_kv_heads : 1;
    parallel_for(divide_up(tasks, run), threads, [&](int64_t i) {
        for (int64_t task = i * run; task < std::min(tasks, (i + 1) * run); task++) batch.run(task);
    });
}
OCTAVO_TAPED(octavo_attention)
