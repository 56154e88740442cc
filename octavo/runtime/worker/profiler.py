"""A `Profiler` traces what the device does between two commands, for Chrome (chrome://tracing, Perfetto).

Called by the worker for the verbs start_profile and stop_profile and, between them, for each step, on its
own thread.
"""

import time
from pathlib import Path

import torch
from torch import profiler

from octavo.base.errors import RequestError, Unsupported


class Profiler:
    """Makes one recording at a time; traces go into `folder`."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._recording: profiler.profile | None = None
        self._prefix = ""
        self._delay = 0
        self._num_left: int | None = None
        self._path: str | None = None
        self.is_on = False
        """From start to stop."""

    def start(self, prefix: str = "", delay_iterations: int = 0, max_iterations: int = 0) -> None:
        """Record from here on. Raises Unsupported without a folder, RequestError while recording.

        delay_iterations: steps before the first that is recorded
        max_iterations: most steps that are recorded; 0 = all until `stop`
        """
        if not self._folder:
            raise Unsupported("Profiling is off: name a folder for its traces, profiler_dir=…")
        if self.is_on:
            raise RequestError("A profile is being recorded already: stop_profile() ends it.")
        self.is_on, self._prefix, self._path = True, prefix, None
        self._delay, self._num_left = delay_iterations, max_iterations or None
        if not delay_iterations:
            self._begin()

    def before_step(self) -> None:
        """Begin or end the recording, where a number of steps was given. Called while `is_on`."""
        if self._delay:
            self._delay -= 1
        elif self._recording is None and self._path is None:
            self._begin()
        if self._recording is not None and self._num_left is not None:
            self._num_left -= 1
            if self._num_left < 0:
                self._end(self._recording)

    def stop(self) -> str:
        """End the recording; the path of its trace. Raises RequestError when there is none."""
        if not self.is_on:
            raise RequestError("No profile is being recorded: start_profile() begins one.")
        self.is_on = False
        if self._recording is not None:
            self._end(self._recording)
        return self._path or ""

    def _begin(self) -> None:
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        recording = profiler.profile(activities=activities)
        recording.start()
        self._recording = recording

    def _end(self, recording: "profiler.profile") -> None:
        self._recording = None
        recording.stop()
        folder = Path(self._folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self._prefix or 'profile'}-rank{self._rank}-{time.time_ns()}.json"
        path = folder / name
        recording.export_chrome_trace(str(path))
        self._path = str(path)
