// A call of an exported function as a row of 64-bit words, so that many calls can be kept and made one after
// the other without Python: OCTAVO_TAPED(f) behind a function f defines f_taped, which takes its arguments as
// words. A word holds a pointer, an integer, or in its lower half a float.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace octavo {

template <class T>
T from_word(const int64_t& word) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(word);
    } else if constexpr (std::is_same_v<T, float>) {
        float value;
        std::memcpy(&value, &word, sizeof value);
        return value;
    } else {
        return T(word);
    }
}

template <class... A, size_t... I>
void call_with(void (*function)(A...), const int64_t* words, std::index_sequence<I...>) {
    function(from_word<A>(words[I])...);
}

template <class... A>
void call_taped(void (*function)(A...), const int64_t* words) {
    call_with(function, words, std::index_sequence_for<A...>());
}

}  // namespace octavo

#define OCTAVO_TAPED(name) \
    extern "C" void name##_taped(const int64_t* words) { octavo::call_taped(name, words); }
