#include "tape.h"

// Makes the calls of a tape, up to one that fails. Each is: address of its f_taped, number of words, words.
extern "C" int octavo_replay(const int64_t* tape, int64_t num_calls) {
    for (; num_calls > 0; num_calls--) {
        int outcome = reinterpret_cast<int (*)(const int64_t*)>(tape[0])(tape + 2);
        if (outcome != octavo::DONE) return outcome;
        tape += 2 + tape[1];
    }
    return octavo::DONE;
}
