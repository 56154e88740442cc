"""`Fallback`: when a window's transcript is poor, and at which temperatures it is decoded again.

Rules, numbers and names of options are those of Whisper's authors (https://arxiv.org/abs/2212.04356, 4.5).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fallback:
    """Thresholds of one request. increment: of the temperature, up to 1; 0 = nothing is decoded again"""

    increment: float = 0.2
    compression_ratio: float = 2.4
    """A text that zlib makes shorter than that repeats itself."""
    logprob: float = -1.0
    """A mean over tokens below that is guesswork."""
    no_speech: float = 0.6
    """A window whose guesswork is less likely than that it has no speech has none."""

    def temperatures(self, first: float) -> list[float]:
        """Return those after the first, hotter and hotter."""
        if not self.increment:
            return []
        steps = int((1 - first) / self.increment + 1e-6)
        return [round(first + self.increment * (step + 1), 4) for step in range(steps)]

    def is_silence(self, no_speech_prob: float | None, avg_logprob: float) -> bool:
        """Return True if the window has no speech."""
        return (no_speech_prob or 0.0) > self.no_speech and avg_logprob < self.logprob

    def is_poor(self, ratio: float, avg_logprob: float) -> bool:
        """Return True if a transcript repeats itself or is guesswork. ratio: of the compression"""
        return ratio > self.compression_ratio or avg_logprob < self.logprob
