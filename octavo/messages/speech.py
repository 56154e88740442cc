"""`TranscriptRules`: which tokens a transcript may go on with; part of sampling parameters."""

import msgspec


class TranscriptRules(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Whisper's rules (https://arxiv.org/abs/2212.04356), filled by the input processor, not by users."""

    end_id: int
    first_timestamp: int = -1
    """The tokens from here on are times, by 0.02 s; -1 = there are none."""
    has_times: bool = False
    """Whether the transcript has some."""
    max_initial: int | None = None
    """The first timestamp may be that many after `first_timestamp`; None = any."""
    suppressed: tuple[int, ...] = ()
    """Never chosen."""
    suppressed_first: tuple[int, ...] = ()
    """Not chosen as the first."""
