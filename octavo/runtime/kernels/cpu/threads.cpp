#include "threads.h"

#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>

namespace octavo {
namespace {

// While one lives, its thread takes numbers too small to be normal for zero, and makes none: an instruction that meets
// one may take hundreds of cycles instead of some.
class NormalNumbers {
public:
#if defined(__x86_64__)
    NormalNumbers() { _mm_setcsr(before_ | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO); }
    ~NormalNumbers() { _mm_setcsr(before_); }

private:
    static constexpr unsigned FLUSH_TO_ZERO = 0x8000, DENORMALS_ARE_ZERO = 0x40;
    const unsigned before_ = _mm_getcsr();
#elif defined(__aarch64__)
    NormalNumbers() { set(before_ | FLUSH_TO_ZERO); }
    ~NormalNumbers() { set(before_); }

private:
    static constexpr uint64_t FLUSH_TO_ZERO = 1 << 24;  // of operands, too
    static uint64_t get() {
        uint64_t control;
        asm volatile("mrs %0, fpcr" : "=r"(control));
        return control;
    }
    static void set(uint64_t control) { asm volatile("msr fpcr, %0" ::"r"(control) : "memory"); }
    const uint64_t before_ = get();
#else
    NormalNumbers() {}
#endif
};

constexpr int SPINS = 4000;  // about 100 us
constexpr size_t LARGE_PAGE = 2 << 20;
constexpr uint64_t COUNT_MASK = 0xFFFFFFFF;

// `ticket` = (loop number << 32) | tasks not yet taken. A worker that reads the loop's fields takes a task by
// compare-and-swap from the ticket that it read before: if that succeeds, the fields were those of this loop,
// because they change only when no task is left and all taken ones are done. So a worker may wake up late.
struct Pool {
    std::atomic<uint64_t> ticket{0};
    std::atomic<int64_t> done{0};
    std::atomic<int64_t> count{0};
    std::atomic<int> width{0};
    std::atomic<Task> task{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int> sleepers{0};
    std::atomic<bool> failed{false};  // a task of this loop got no memory
    std::mutex busy, sleep;
    std::condition_variable wake;
    int num_workers = 0;

    void take_all(uint64_t seen) {
        while ((seen & COUNT_MASK) != 0) {
            Task call = task.load(std::memory_order_relaxed);
            void* argument = context.load(std::memory_order_relaxed);
            int64_t total = count.load(std::memory_order_relaxed);
            if (ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) {
                attempt(call, argument, total - int64_t(seen & COUNT_MASK));
                seen = ticket.load(std::memory_order_acquire);
            }
        }
    }

    // No exception may leave a worker, nor the caller's loop while others run its tasks.
    void attempt(Task call, void* argument, int64_t index) {
        try {
            call(argument, index);
        } catch (const std::bad_alloc&) {
            failed.store(true, std::memory_order_relaxed);
        }
        done.fetch_add(1, std::memory_order_release);
    }

    void work(int id) {
        const NormalNumbers only;
        uint64_t last = 0;
        for (;;) {
            uint64_t seen = wait_for_loop(last);
            last = seen >> 32;
            if (id < width.load(std::memory_order_relaxed)) take_all(seen);
        }
    }

    uint64_t wait_for_loop(uint64_t last) {
        uint64_t seen;
        for (int spin = 0; spin < SPINS; spin++) {
            seen = ticket.load(std::memory_order_acquire);
            if (seen >> 32 != last) return seen;
            RELAX();
        }
        std::unique_lock<std::mutex> lock(sleep);
        sleepers.fetch_add(1);
        wake.wait(lock, [&] { return (seen = ticket.load()) >> 32 != last; });
        sleepers.fetch_sub(1);
        return seen;
    }

    void run(int64_t total, int threads, Task call, void* argument) {
        start_workers(threads - 1);
        task.store(call, std::memory_order_relaxed);
        context.store(argument, std::memory_order_relaxed);
        count.store(total, std::memory_order_relaxed);
        width.store(threads - 1, std::memory_order_relaxed);
        done.store(0, std::memory_order_relaxed);
        failed.store(false, std::memory_order_relaxed);
        uint64_t next = ((ticket.load() >> 32) + 1) << 32 | uint64_t(total);
        ticket.store(next);
        if (sleepers.load() > 0) {
            std::lock_guard<std::mutex> lock(sleep);
            wake.notify_all();
        }
        take_all(next);
        for (int spin = 0; done.load(std::memory_order_acquire) < total; spin++) {
            if (spin < SPINS)
                RELAX();
            else
                std::this_thread::yield();
        }
        if (failed.load(std::memory_order_relaxed)) throw std::bad_alloc();
    }

    // As many as the system lets us have: a loop needs none.
    void start_workers(int wanted) {
        try {
            for (; num_workers < wanted; num_workers++)
                std::thread([this, id = num_workers] { work(id); }).detach();
        } catch (const std::system_error&) {
        }
    }
};

Pool* pool = new Pool;  // never destroyed: its threads run until the process ends

// A forked child has none of the threads, and perhaps a locked mutex.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

struct Scratch {
    float* data = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(data); }
};

}  // namespace

void run_tasks(int64_t count, int threads, Task task, void* context) {
    const NormalNumbers only;
    if (count > 1 && threads > 1) {
        std::unique_lock<std::mutex> lock(pool->busy, std::try_to_lock);
        if (lock.owns_lock()) return pool->run(count, threads, task, context);
    }
    for (int64_t i = 0; i < count; i++) task(context, i);
}

float* scratch(size_t count, Shelf shelf) {
    static thread_local Scratch spaces[NUM_SHELVES];
    Scratch& space = spaces[shelf];
    if (space.size < count) {
        std::free(space.data);
        const size_t page = count * sizeof(float) < LARGE_PAGE ? 4096 : LARGE_PAGE;
        const size_t bytes = (count * sizeof(float) + page - 1) / page * page;
        space.data = static_cast<float*>(std::aligned_alloc(page, bytes));
        space.size = space.data ? bytes / sizeof(float) : 0;
        if (!space.data) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        if (page == LARGE_PAGE) madvise(space.data, bytes, MADV_HUGEPAGE);  // if there are any
#endif
    }
    return space.data;
}

}  // namespace octavo
