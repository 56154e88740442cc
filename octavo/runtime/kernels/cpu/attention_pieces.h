// A batch in pieces. Neighbours that decode behind the same blocks become one piece: all its rows see a tile of
// these before the next one is read, then each goes on to what is its own, with the bits of the row alone. Where
// nothing is common, finding out is a look at two block ids per request. Sharing after Hydragen (Juravsky et
// al., 2024), whose two passes over the keys and join are not needed here.
#pragma once
#include <numeric>
#include <vector>

#include "attention.h"

namespace octavo {

// Queries times keys: what a piece costs.
inline int64_t work(const Piece& piece) { return piece.seen.size() * piece.queries() * piece.heads; }

// Queries first … last - 1 of one request.
inline Piece piece_of(const Attention& job, int request, int64_t head, int64_t first, int64_t last) {
    int64_t position = job.kv_lens[request] - job.cu_q_lens[request + 1] + first;
    int64_t end = job.visible_end(request, position + last - first - 1);
    return {request, head, first, last, position, 1, {job.oldest_visible(position), end}};
}

// The only queries of `count` requests.
inline Piece piece_of_several(const Attention& job, int request, int count, int64_t head, int64_t heads,
                              Span common) {
    int64_t first = job.cu_q_lens[request];
    Piece piece = piece_of(job, request, head, first, first + 1);
    piece.last = first + count;
    piece.step = 0;
    piece.common = common;
    piece.heads = heads;
    for (int r = request + 1; r < request + count; r++) {
        piece.seen.begin = std::min(piece.seen.begin, job.oldest_visible(job.kv_lens[r] - 1));
        piece.seen.end = std::max<int64_t>(piece.seen.end, job.kv_lens[r]);
    }
    return piece;
}

// Of such a piece one request and one head.
inline Piece one_of(const Attention& job, const Piece& several, int64_t i, int64_t head) {
    int64_t query = several.first + i;
    return piece_of(job, several.request + int(i), several.head + head, query, query + 1);
}

// What of `span` the new token of a request sees in the same blocks as that of `other`: whole tiles.
inline Span in_common(const Attention& job, Span span, int request, int other) {
    const int64_t size = job.cache.block_size, len = job.kv_lens[request];
    const int32_t *its = job.table(request), *others = job.table(other);
    Span seen = both(span, {round_up(job.oldest_visible(len - 1), TILE), len});
    int64_t block = seen.begin / size;
    while (block * size < seen.end && its[block] == others[block]) block++;
    return {seen.begin, std::min(seen.end, block * size) / TILE * TILE};
}

// How many requests from `first` on to take together, and what they have in common. Another one is taken if
// that leaves no more to read.
inline int alike(const Attention& job, int first, int num_requests, Span& common) {
    auto is_single = [&](int r) { return r < num_requests && job.cu_q_lens[r + 1] - job.cu_q_lens[r] == 1; };
    common = {round_up(job.oldest_visible(job.kv_lens[first] - 1), TILE), job.kv_lens[first]};
    int count = 1;
    for (; is_single(first) && is_single(first + count); count++) {
        Span shared = in_common(job, common, first + count, first);
        if (!shared.size() || shared.size() * count < common.size() * (count - 1)) break;
        common = shared;
    }
    return count;
}

// The batch in pieces of at most so many rows, the longest first so that threads end together.
inline std::vector<Piece> cut(const Attention& job, int num_requests, int most_rows, int threads) {
    std::vector<Piece> pieces;
    const int64_t num_heads = job.cache.num_kv_heads, most = std::max<int64_t>(1, most_rows / job.group());
    const int64_t sharers = std::gcd<int64_t>(threads, num_heads), heads = num_heads / sharers;
    auto add = [&](int request) {
        int64_t end = job.cu_q_lens[request + 1];
        for (int64_t first = job.cu_q_lens[request]; first < end; first += most)
            for (int64_t head = 0; head < num_heads; head++)
                pieces.push_back(piece_of(job, request, head, first, std::min(end, first + most)));
    };
    for (int next = 0; next < num_requests;) {
        Span common;
        const int count = alike(job, next, num_requests, common), end = next + count;
        const int64_t fair = round_up(divide_up(count, most), threads / sharers);  // all threads get as many
        for (int few = int(divide_up(count, fair)); next < end; next += few) {
            few = std::min(few, end - next);
            if (few == 1) add(next);
            for (int64_t head = 0; head < num_heads && few > 1; head += heads)
                pieces.push_back(piece_of_several(job, next, few, head, heads, common));
        }
    }
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const Piece& a, const Piece& b) { return work(a) > work(b); });
    return pieces;
}

}  // namespace octavo
