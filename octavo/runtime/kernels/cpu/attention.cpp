// Attention of a ragged batch over the paged cache: the batch in pieces, pieces to threads, long
// contexts in parts. After "online softmax" (Milakov and Gimelshein, 2018), FlashAttention's tiling and
// Flash-Decoding.
#include "attention_pieces.h"

#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "amx.h"
#include "exported.h"
#include "threads.h"

namespace octavo {
namespace {

// Of a piece, whose rows share the keys of a tile: more where that leaves every thread several pieces. Not where both
// sides are seen: which kernel sees a row, and with that its bits, must depend on its request alone.
constexpr int MOST_ROWS = 128, MOST_ROWS_OF_MANY = 192, MOST_ROWS_OF_TILES = 256;
constexpr int TASKS_PER_THREAD = 4;  // no task shall be longer than a thread's share by so much

void copy(const State& from, const State& to, int64_t rows, int64_t width) {
    std::copy_n(from.highest, rows, to.highest);
    std::copy_n(from.total, rows, to.total);
    std::copy_n(from.out, rows * width, to.out);
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

void finish(const Attention& job, const Piece& piece, const State& state, const Arithmetic& arithmetic) {
    const int64_t size = job.cache.head_dim;
    for (int64_t i = 0; i < piece.rows(job); i++) {
        float *to = piece.result(job, i), *sums = state.out + i * job.width(), total = state.total[i];
        if (arithmetic.order) arithmetic.order(sums, size);
        if (job.sinks) total += std::exp(job.sinks[piece.head * job.group() + i % job.group()] - state.highest[i]);
        const float factor = 1.0f / total;
        for (int64_t d = 0; d < size; d++) to[d] = total == 0 ? 0.0f : sums[d] * factor;
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
        for (const Piece& piece : pieces_) total += work(piece);
        for (const Piece& piece : pieces_) {
            bool large = threads > 1 && work(piece) * threads * TASKS_PER_THREAD > total;
            int64_t begin = piece.seen.begin, end = piece.seen.end, parts = num_parts(piece);
            if (!large || parts == 1) {
                tasks_.push_back({&piece, begin, end, nullptr});
                continue;
            }
            shared_.push_back(std::make_unique<Shared>(State::floats(num_rows(piece), job_.width()), parts));
            for (int64_t at = begin; at < end; at = next_part(at))
                tasks_.push_back({&piece, at, std::min(end, next_part(at)), shared_.back().get()});
        }
        // A request's heads lie beside each other: one thread takes them all where that leaves enough to share.
        const bool enough = num_tasks() >= TASKS_PER_THREAD * threads * job_.cache.num_kv_heads;
        for (int64_t i = 0; i <= num_tasks(); i++)
            if (!enough || i == num_tasks() || begins_run(tasks_[size_t(i)])) runs_.push_back(i);
    }
    int64_t num_runs() const { return int64_t(runs_.size()) - 1; }

    void run(int64_t index) const {
        for (int64_t i = runs_[size_t(index)]; i < runs_[size_t(index) + 1]; i++) run(tasks_[size_t(i)]);
    }

  private:
    static int64_t next_part(int64_t at) { return at / PART * PART + PART; }
    static int64_t num_parts(const Piece& piece) {
        return (piece.seen.end - 1) / PART - piece.seen.begin / PART + 1;
    }
    static bool begins_run(const Task& task) {
        return task.piece->head == 0 || task.shared || task.piece->common.size();
    }
    int64_t num_tasks() const { return int64_t(tasks_.size()); }

    const Arithmetic& choose(int64_t rows) const {
        return tiles_ ? bfloat16_tiles : takes_decode(job_, rows) ? decode_kernels : prefill_kernels;
    }

    // Rows from one head of a piece to the next, and of all.
    int64_t head_step(const Piece& piece) const { return round_up(piece.rows(job_), ROW_UNIT); }
    int64_t num_rows(const Piece& piece) const {
        return (piece.heads - 1) * head_step(piece) + piece.rows(job_);
    }

    void run(const Task& task) const {
        const Piece& piece = *task.piece;
        int64_t rows = num_rows(piece), width = job_.width(), floats = State::floats(rows, width);
        float* space = scratch(size_t(2 * floats + space_for(piece)));
        float* work = space + 2 * floats;
        if (!piece.common.size()) begin(piece, work);
        if (task.shared) {
            int64_t part = task.begin / PART - piece.seen.begin / PART;
            State state = State::make(task.shared->states.get() + part * floats, rows, width);
            see(piece, {task.begin, task.end}, state, work);
            if (task.shared->left.fetch_sub(1, std::memory_order_acq_rel) == 1) join_parts(task);
            return;
        }
        State whole = State::make(space, rows, width);
        see(piece, {task.begin, std::min(task.end, next_part(task.begin))}, whole, work);
        for (int64_t at = next_part(task.begin); at < task.end; at += PART) {
            State state = State::make(space + floats, rows, width);
            see(piece, {at, std::min(task.end, at + PART)}, state, work);
            join(whole, state, rows, width);
        }
        finish_all(piece, whole);
    }

    int64_t space_for(const Piece& piece) const {
        int64_t group = job_.group(), rows = piece.rows(job_), together = choose(rows).space(job_, rows);
        if (!piece.common.size()) return together;
        return State::floats(group, job_.width()) + std::max(together, choose(group).space(job_, group));
    }

    void begin(const Piece& piece, float* space) const {
        const Arithmetic& arithmetic = choose(piece.rows(job_));
        if (arithmetic.begin) arithmetic.begin(job_, piece, space);
    }

    // Let a piece's rows see what they may of a span of one part.
    void see(const Piece& piece, Span span, const State& state, float* space) const {
        const Arithmetic& arithmetic = choose(piece.rows(job_));
        if (!piece.common.size())
            return arithmetic.see(job_, piece, span.begin, span.end, state, space);
        see_alone(piece, {span.begin, std::min(span.end, piece.common.begin)}, state, space);
        Span common = both(span, piece.common);
        for (int64_t head = 0; head < piece.heads && common.size(); head++) {
            State its = state.from(head * head_step(piece), job_.width());
            begin(piece.of_head(head), space);
            arithmetic.see(job_, piece.of_head(head), common.begin, common.end, its, space);
        }
        see_alone(piece, {std::max(span.begin, piece.common.end), span.end}, state, space);
    }

    // The same, each of several requests by itself; aside, as arithmetic may write behind the last row.
    void see_alone(const Piece& several, Span span, const State& state, float* space) const {
        const int64_t rows = job_.group(), width = job_.width();
        for (int64_t i = 0; i < several.queries() && span.size(); i++)
            for (int64_t head = 0; head < several.heads; head++) {
                Piece one = one_of(job_, several, i, head);
                Span seen = both(span, one.seen);
                if (!seen.size()) continue;
                State among = state.from(head * head_step(several) + i * rows, width);
                State its = State::make(space, rows, width);
                copy(among, its, rows, width);
                float* work = space + State::floats(rows, width);
                begin(one, work);
                choose(rows).see(job_, one, seen.begin, seen.end, its, work);
                copy(its, among, rows, width);
            }
    }

    void finish_all(const Piece& piece, const State& state) const {
        const Arithmetic& arithmetic = choose(piece.rows(job_));
        for (int64_t head = 0; head < piece.heads; head++)
            finish(job_, piece.of_head(head), state.from(head * head_step(piece), job_.width()), arithmetic);
    }

    void join_parts(const Task& last) const {
        const Piece& piece = *last.piece;
        int64_t rows = num_rows(piece), width = job_.width(), floats = State::floats(rows, width);
        int64_t parts = num_parts(piece);
        State whole = State::of(last.shared->states.get(), rows);
        for (int64_t part = 1; part < parts; part++)
            join(whole, State::of(last.shared->states.get() + part * floats, rows), rows, width);
        finish_all(piece, whole);
    }

    const Attention& job_;
    std::vector<Piece> pieces_;
    bool tiles_;
    std::vector<Task> tasks_;
    std::vector<int64_t> runs_;  // first task of each, and the end
    std::vector<std::unique_ptr<Shared>> shared_;
};

// Whether tiles can take what this cache holds. Floats lose a third of their bits, which only those of
// encoders may, and cost three products, which vectors are no faster by.
bool fits_tiles(const Attention& job) {
    const Cache& cache = job.cache;
#if defined(OCTAVO_VECTOR_TILES)
    if (cache.type == CACHE_F32) return false;
#else
    if (!tiles_usable()) return false;
#endif
    return bfloat16_tiles.see && cache.type != CACHE_F16 && !(cache.type == CACHE_F32 && job.causal) &&
           cache.head_dim % 32 == 0 && cache.block_size % 16 == 0;
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// bfloat16: queries and weights may be rounded, for products of tiles where there are any. causal: 0 = queries
// see later positions, too, and a window counts to both sides.
extern "C" void octavo_attention(const float* q, int64_t q_stride, int64_t num_heads, const void* data,
                                 int type, int64_t halves, int64_t block_size, int64_t num_kv_heads,
                                 int64_t head_dim, const int32_t* tables, int64_t table_stride, const int32_t* cu_q_lens,
                                 const int32_t* kv_lens, int num_requests, float scale, int64_t window,
                                 float soft_cap, float* out, int threads, int bfloat16, int causal,
                                 const float* sinks) {
    Cache cache{(const uint8_t*)data, CacheType(type), halves, block_size, num_kv_heads, head_dim};
    Attention job{cache,     q,       q_stride, num_heads, tables, table_stride,
                  cu_q_lens, kv_lens, scale,    soft_cap,  window, out,    bool(causal), sinks};
    bool tiles = bfloat16 && fits_tiles(job);
    const bool many = causal && cu_q_lens[num_requests] * num_heads >= MOST_ROWS_OF_MANY * TASKS_PER_THREAD * threads;
    const int most = tiles ? MOST_ROWS_OF_TILES : many ? MOST_ROWS_OF_MANY : MOST_ROWS;
    Batch batch(job, cut(job, num_requests, most, threads), tiles, threads);
    parallel_for(batch.num_runs(), threads, [&](int64_t i) { batch.run(i); });
}
OCTAVO_EXPORTED(octavo_attention)
