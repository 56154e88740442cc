#include "tape.h"

// Makes the calls of a tape. Each is: address of its f_taped, number of words, words.
extern "C" void octavo_replay(const int64_t* tape, int64_t num_calls) {
    for (; num_calls > 0; num_calls--) {
        reinterpret_cast<void (*)(const int64_t*)>(tape[0])(tape + 2);
        tape += 2 + tape[1];
    }
}
