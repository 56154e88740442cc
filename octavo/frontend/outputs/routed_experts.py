"""`RoutedExperts` puts together which experts took each token of a sequence, as steps tell it."""

import base64
import io

import numpy as np

from octavo.messages.request import RoutedTokens


class RoutedExperts:
    """Grows with what comes; what comes again, after a preemption say, replaces what there was."""

    def __init__(self) -> None:
        self._ids: np.ndarray | None = None
        self._length = 0

    def take(self, parts: list[RoutedTokens]) -> None:
        """Put the ids of tokens at their places."""
        for part in parts:
            kind = np.uint8 if part.num_bytes == 1 else np.uint16
            new = np.frombuffer(part.ids, kind).reshape(-1, part.layers, part.top_k)
            end = part.start + len(new)
            if self._ids is None or end > len(self._ids):
                grown = np.zeros((max(256, 2 * end), *new.shape[1:]), kind)
                if self._ids is not None:
                    grown[: self._length] = self._ids[: self._length]
                self._ids = grown
            self._ids[part.start : end] = new
            self._length = max(self._length, end)

    def of(self, start: int, end: int) -> np.ndarray | None:
        """Return those of the tokens from one to another, [tokens, layers, k]; None if none came."""
        return None if self._ids is None else self._ids[start : min(end, self._length)].copy()


def written(ids: np.ndarray | None) -> str | None:
    """Return ids as a .npy file in base64, as vLLM sends them."""
    if ids is None:
        return None
    file = io.BytesIO()
    np.save(file, ids, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")
