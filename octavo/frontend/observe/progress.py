"""The progress bar of `LLM.generate`: prompts done, tokens so far, tokens per second."""

import time
from collections.abc import Callable
from typing import Any

from octavo.frontend.outputs.request_output import RequestOutput

_REFRESH_S = 0.2


class ProgressBar:
    """Counts finished requests; does nothing when not wanted."""

    def __init__(self, wanted: bool | Callable[..., Any], total: int) -> None:
        self._wanted = wanted
        self._total = total
        self._bar: Any = None
        self._num_in = self._num_out = 0
        """Tokens of finished requests."""
        self._num_open = 0
        """Output tokens of the others, as far as told."""
        self._shown_s = 0.0

    def begin(self) -> None:
        """Show it. Raises what a callable of the user's raises."""
        if not self._wanted:
            return
        from tqdm.auto import tqdm  # costs time to import, and few need it

        make = self._wanted if callable(self._wanted) else tqdm
        self._bar = make(total=self._total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
        self._begun_s = time.monotonic()

    def update(self, output: RequestOutput, num_prompts: int = 1) -> None:
        """Count a finished request, of so many prompts."""
        if self._bar is None:
            return
        self._num_in += len(output.prompt_token_ids or ())
        num_out = sum(len(completion.token_ids) for completion in output.outputs)
        self._num_out += num_out
        self._num_open = max(0, self._num_open - num_out)
        self._tell()
        self._bar.update(num_prompts)

    @property
    def is_due(self) -> bool:
        """Return True a few times a second, if it is shown."""
        return self._bar is not None and time.monotonic() - self._shown_s >= _REFRESH_S

    def advance(self, num_open: int) -> None:
        """Show that `num_open` tokens have come of requests that are not finished."""
        self._shown_s = time.monotonic()
        self._num_open = num_open
        self._tell(refresh=True)

    def _tell(self, *, refresh: bool = False) -> None:
        num_out = self._num_out + self._num_open
        elapsed_s = max(time.monotonic() - self._begun_s, 1e-9)
        speeds = f"in {self._num_in / elapsed_s:.0f} tok/s, out {num_out / elapsed_s:.0f} tok/s"
        self._bar.set_postfix_str(f"{num_out} tokens, {speeds}", refresh=refresh)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
