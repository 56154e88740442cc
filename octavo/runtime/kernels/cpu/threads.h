// A pool of threads of our own: starting a parallel loop costs about a microsecond while the workers still
// spin from the last one, and they sleep soon after (OpenMP's spin for milliseconds and would starve torch's
// threads). Loops may be called from several threads at once: who finds the pool busy runs alone. Results
// must not depend on who runs a task.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <type_traits>

// What a loop does that waits for another core.
#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() asm volatile("isb" ::: "memory")  // some 20 ns, where `yield` is nothing
#else
#define RELAX() std::this_thread::yield()
#endif

namespace octavo {

using Task = void (*)(void* context, int64_t index);

// Run task(context, i) for every i < count on up to `threads` threads, the caller's among them; returns when
// all ran. Tasks take numbers too small to be normal for zero. Throws std::bad_alloc if one did.
void run_tasks(int64_t count, int threads, Task task, void* context);

template <class Body>
void parallel_for(int64_t count, int threads, Body&& body) {
    using B = std::remove_reference_t<Body>;
    run_tasks(count, threads, [](void* b, int64_t i) { (*static_cast<B*>(b))(i); }, (void*)&body);
}

constexpr int64_t VALUES_PER_TASK = 8192;  // a few microseconds of work
constexpr int64_t MOST_TASKS = 16;         // of a thread

// Call body(row) for all rows of `size` values, in pieces worth a task, as many for every thread.
template <class Body>
void for_rows(int64_t rows, int64_t size, int threads, Body&& body) {
    int64_t tasks = std::clamp<int64_t>(rows * size / VALUES_PER_TASK, 1, MOST_TASKS * threads);
    if (tasks > threads) tasks = (tasks + threads - 1) / threads * threads;
    parallel_for(tasks, threads, [&](int64_t task) {
        for (int64_t row = rows * task / tasks; row < rows * (task + 1) / tasks; row++) body(row);
    });
}

// Work space of a thread: a task's own, what one call keeps for all its tasks, or what outlives several calls.
enum Shelf { OF_TASK, OF_CALL, OF_EXPERTS, NUM_SHELVES };

// At least `count` floats of the calling thread's work space, 64-byte aligned; valid until its next call for that
// shelf. Memory is kept: what a prompt needs is tens of megabytes, which cost more to get than to use. Throws
// std::bad_alloc where there is none.
float* scratch(size_t count, Shelf shelf = OF_TASK);

}  // namespace octavo
