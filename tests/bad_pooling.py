"""Requests that no client should send to a server with an embedding model, as rows of tests.bad_requests."""

import json

from tests.bad_requests import Row

_NOT_TEXTS = [5, True, {}, 1.5]
_NOT_LISTS = [[], ["a", 1], [None], [{}], [[]]]
_NOT_COUNTS = ["one", [], {}, 0, -1, 0.5, 10**30]
_COMMON = {
    "model": [5, "no such model"],
    "truncate_prompt_tokens": ["one", 0, -2, 257, 10**30],
    "truncation_side": ["middle", 5],
    "priority": ["first", 10**30],
    "use_activation": ["yes", 1],
}
_VECTORS = {
    "input": [*_NOT_TEXTS, *_NOT_LISTS, [10**6], [-1], ["a"] * 10**5, "word " * 2560, None],
    "encoding_format": ["hex", 5],
    "embed_dtype": ["int3", 5],
    "endianness": ["middle", 5],
    "prompt_name": ["query", 5],
}
_PAIRS = {"instruction": ["what?", 5]}
ROUTES = {
    "/v1/embeddings": ({"input": "a"}, _COMMON | _VECTORS | {"dimensions": [*_NOT_COUNTS, 8, 99999]}),
    "/pooling": ({"input": "a"}, _COMMON | _VECTORS | {"task": ["score", "classify", "sing", 5]}),
    "/classify": ({"input": "a"}, {"input": ["a", *_NOT_LISTS]}),  # the model has no labels
    **dict.fromkeys(
        ("/v1/embed", "/v2/embed"),
        (
            {"texts": ["a"]},
            {
                "texts": [*_NOT_TEXTS, [], [1], None],
                "embedding_types": [["int8"], "float", [5]],
                "truncate": ["MIDDLE", 5],
                "output_dimension": [*_NOT_COUNTS, 8],
                "max_tokens": _NOT_COUNTS,
                "inputs": [5, [], ["a"], [{}], [{"content": []}], [{"content": [{"type": "video"}]}]],
            },
        ),
    ),
    **dict.fromkeys(
        ("/score", "/v1/score"),
        (
            {"data_1": ["a", "b"], "data_2": ["c", "d"]},
            _COMMON | _PAIRS | {"data_2": [[], ["a"] * 3, 5, [5], None], "data_1": [[], ["a"] * 3, 5, None]},
        ),
    ),
    **dict.fromkeys(
        ("/rerank", "/v1/rerank", "/v2/rerank"),
        (
            {"query": "a", "documents": ["b"]},
            _COMMON
            | _PAIRS
            | {
                "query": [5, [], None],
                "documents": [[], "a", 5, [5], [{}], [{"title": "a"}], ["a"] * 10**5],
                "top_n": [-1, "one", 0.5],
                "max_tokens_per_doc": _NOT_COUNTS,
                "max_tokens_per_query": _NOT_COUNTS,
            },
        ),
    ),
}


def rows():
    """One fault in one place of a request that is right otherwise, for each route."""
    for path, (base, wrong) in ROUTES.items():
        for name, values in wrong.items():
            for value in values:
                body = {**base, name: value}
                if value is None:
                    del body[name]
                statuses = (404,) if value == "no such model" else (400, 422)
                yield Row(f"{path} {name}={value!r:.40}", path, json.dumps(body).encode(), statuses)
        yield Row(f"{path} no object", path, b"[]", (400, 422))
        yield Row(f"GET {path}", path, b"", (405,), method="GET")
