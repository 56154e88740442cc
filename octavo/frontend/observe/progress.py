"""The progress bar of `LLM.generate`: prompts done, tokens per second."""

import time
from collections.abc import Callable
from typing import Any

from octavo.frontend.outputs.request_output import RequestOutput


class ProgressBar:
    """Counts finished requests; does nothing when not wanted."""

    def __init__(self, wanted: bool | Callable[..., Any], total: int) -> None:
        self._wanted = wanted
        self._total = total
        self._bar: Any = None
        self._num_in = self._num_out = 0

    def begin(self) -> None:
        """Show it. Raises what a callable of the user's raises."""
        if not self._wanted:
            return
        from tqdm import tqdm  # costs time to import, and few need it

        make = self._wanted if callable(self._wanted) else tqdm
        self._bar = make(total=self._total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
        self._begun_s = time.monotonic()

    def update(self, output: RequestOutput) -> None:
        """Count a finished request."""
        if self._bar is None:
            return
        self._num_in += len(output.prompt_token_ids or ())
        self._num_out += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed_s = max(time.monotonic() - self._begun_s, 1e-9)
        self._bar.set_postfix_str(
            f"in {self._num_in / elapsed_s:.0f} tok/s, out {self._num_out / elapsed_s:.0f} tok/s",
            refresh=False,
        )
        self._bar.update(1)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
