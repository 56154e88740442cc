"""`read_segments` reads a window's tokens as pieces of text with times; segments become subtitles, too."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from octavo.frontend.speech.model import SECONDS_PER_TIMESTAMP

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Segment:
    """Some words. start, end: seconds in the whole audio; tokens: without times"""

    start: float
    end: float
    text: str
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    no_speech_prob: float | None = None
    """That its window has none, as the model finds; None = it has no token for that."""
    temperature: float = 0.0
    """At which its window was decoded."""

    @property
    def avg_logprob(self) -> float:
        """The mean over its tokens."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else 0.0

    @property
    def compression_ratio(self) -> float:
        """That of its text."""
        return compression_ratio(self.text)


def compression_ratio(text: str) -> float:
    """Return how many times zlib makes a text shorter: much, where it repeats itself."""
    content = text.encode()
    return len(content) / len(zlib.compress(content)) if content else 0.0


def read_segments(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    first_timestamp: int,
    decode: Decode,
    start_s: float,
    end_s: float,
    earliest: float,
) -> list[Segment]:
    """Return the segments of a window from start_s to end_s, none of which begins before `earliest`.

    Times end a segment and begin the next; text without a time lasts to the window's end.
    """
    segments: list[Segment] = []
    tokens: list[int] = []
    scores: list[float] = []
    begin, latest = max(start_s, earliest), max(start_s, earliest)
    for token, logprob in zip(token_ids, logprobs, strict=True):
        if token < first_timestamp:
            tokens.append(token)
            scores.append(logprob)
            continue
        time = start_s + (token - first_timestamp) * SECONDS_PER_TIMESTAMP
        latest = min(max(time, latest), end_s)
        if tokens:
            segments.append(Segment(begin, latest, decode(tokens), tokens, scores))
            tokens, scores = [], []
        begin = latest
    if tokens:
        segments.append(Segment(begin, max(begin, end_s), decode(tokens), tokens, scores))
    return [segment for segment in segments if segment.text.strip()]


def srt(segments: Sequence[Segment]) -> str:
    """Return segments as SubRip subtitles."""
    return "".join(
        f"{number}\n{_clock(s.start, ',')} --> {_clock(s.end, ',')}\n{_one_block(s.text)}\n\n"
        for number, s in enumerate(segments, 1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """Return segments as WebVTT subtitles."""
    return "WEBVTT\n\n" + "".join(
        f"{_clock(s.start, '.')} --> {_clock(s.end, '.')}\n{_one_block(s.text)}\n\n" for s in segments
    )


def _one_block(text: str) -> str:
    """Return a text that cannot be read as the end of its subtitle, or as its times."""
    lines: Iterator[str] = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line).replace("-->", "->")


def _clock(seconds: float, mark: str) -> str:
    millis = round(seconds * 1000)
    hours, rest = divmod(millis, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{mark}{rest % 1000:03}"
