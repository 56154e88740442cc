// How Python calls a function f of the library. OCTAVO_EXPORTED(f) behind it defines f_checked, a pointer to what
// takes the same arguments, and f_recorded, which takes them as a row of 64-bit words, so that many calls can be kept
// and made one after the other without Python: a word holds a pointer, an integer, or in its lower half a float.
// Both give an Outcome back, as no exception may pass through Python. f_letters says what f takes.
#pragma once
#include <cstdint>
#include <cstring>
#include <new>
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

enum Outcome : int { DONE, NO_MEMORY, ALONE };

struct Alone {};  // thrown where the other ranks do not come

template <class T>
constexpr char letter = std::is_pointer_v<T> ? 'p' : std::is_same_v<T, float> ? 'f' : sizeof(T) == 8 ? 'l' : 'i';

template <auto FUNCTION>
struct Exported;

template <class... A, void (*FUNCTION)(A...)>
struct Exported<FUNCTION> {
    static constexpr char LETTERS[] = {letter<A>..., 0};
    static int call(A... arguments) {
        try {
            FUNCTION(arguments...);
            return DONE;
        } catch (const std::bad_alloc&) {
            return NO_MEMORY;
        } catch (const Alone&) {
            return ALONE;
        }
    }
    static int call_recorded(const int64_t* words) { return call_words(words, std::index_sequence_for<A...>()); }

private:
    template <size_t... I>
    static int call_words(const int64_t* words, std::index_sequence<I...>) {
        return call(from_word<A>(words[I])...);
    }
};

}  // namespace octavo

#define OCTAVO_EXPORTED(name)                                              \
    extern "C" {                                                           \
    const char* name##_letters = octavo::Exported<name>::LETTERS;          \
    auto* name##_checked = octavo::Exported<name>::call;                   \
    int name##_recorded(const int64_t* words) {                            \
        return octavo::Exported<name>::call_recorded(words);               \
    }                                                                      \
    }
