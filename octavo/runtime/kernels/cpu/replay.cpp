#include "exported.h"

// Makes the recorded calls, up to one that fails. Each is: address of its f_recorded, number of words, words.
extern "C" int octavo_replay(const int64_t* log, int64_t num_calls) {
    for (; num_calls > 0; num_calls--) {
        int outcome = reinterpret_cast<int (*)(const int64_t*)>(log[0])(log + 2);
        if (outcome != octavo::DONE) return outcome;
        log += 2 + log[1];
    }
    return octavo::DONE;
}
