"""POST /score and /rerank, under all their names."""

from functools import cache, partial
from typing import Any

from msgspec import Struct

from octavo.base.errors import RequestError
from octavo.frontend.requests.scoring import Scoring, pair_up
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.serving.caller import Caller
from octavo.serving.pooling import protocol
from octavo.serving.pooling.work import Answer, PoolingWork, arrays, routes_of, usage_of

_SPELLINGS = (("data_1", "data_2"), ("queries", "documents"), ("queries", "items"), ("text_1", "text_2"))


async def score(caller: Caller, body: protocol.ScoreRequest) -> protocol.Scores:
    """How well two texts fit each other: of each pair, or of one text and each of several."""
    work = PoolingWork.of(caller, body, "score")
    found, usage = await _score(work, body, pair_up(*_texts(body)))
    items = [protocol.ScoreItem(index, value) for index, value in enumerate(found)]
    return protocol.Scores(work.id, work.created, work.caller.model, items, usage)


async def rerank(caller: Caller, body: protocol.RerankRequest) -> protocol.Ranking:
    """The documents that fit a query, the best first."""
    work = PoolingWork.of(caller, body, "rerank")
    texts = [document if isinstance(document, str) else _text(document) for document in body.documents]
    found, usage = await _score(work, body, pair_up(body.query, texts))
    order = sorted(range(len(texts)), key=lambda index: -found[index])[: body.top_n or None]
    shows = body.return_documents is not False
    results = [
        protocol.Ranked(index, found[index], protocol.RankedDocument(texts[index]) if shows else None)
        for index in order
    ]
    return protocol.Ranking(work.id, work.caller.model, usage, results)


async def _score(
    work: PoolingWork, body: protocol.PairFields, pairs: list[tuple[str, str]]
) -> tuple[list[float], protocol.PoolingUsage]:
    engine, limits = work.caller.engine, (body.max_tokens_per_query, body.max_tokens_per_doc)
    if any(limits) and (tokenizer := await engine.get_tokenizer()) is not None:
        pairs = await engine.off_loop(partial(_shortened, tokenizer, pairs, limits))
    scoring = Scoring(engine.config, pairs, body.use_activation, body.instruction)
    outputs = await work.run(scoring.prompts, scoring.params)
    data = arrays(outputs)
    ids = [output.prompt_token_ids or [] for output in outputs]
    return [scoring.score(index, data, ids) for index in range(len(pairs))], usage_of(outputs)


def _shortened(
    tokenizer: Tokenizer, pairs: list[tuple[str, str]], limits: tuple[int | None, int | None]
) -> list[tuple[str, str]]:
    """The pairs, each of their two texts cut to its limit."""
    cut = cache(tokenizer.shortened)
    return [(cut(first, limits[0]), cut(second, limits[1])) for first, second in pairs]


def _texts(body: protocol.ScoreRequest) -> tuple[Any, Any]:
    for names in _SPELLINGS:
        first, second = (getattr(body, name) for name in names)
        if first is not None and second is not None:
            return first, second
    spelled = ", ".join(" and ".join(names) for names in _SPELLINGS)
    raise RequestError(f"Give two kinds of texts: {spelled}.", "data_1")


def _text(document: dict[str, str]) -> str:
    if "text" not in document:
        raise RequestError("A document must be a string, or an object with text.", "documents")
    return document["text"]


ANSWERS: dict[str, tuple[type[Struct], Answer]] = {
    **dict.fromkeys(("/score", "/v1/score"), (protocol.ScoreRequest, score)),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), (protocol.RerankRequest, rerank)),
}
ROUTES = routes_of(ANSWERS)
