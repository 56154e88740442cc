"""A `Profiler` traces what the device does between two commands, for Chrome (chrome://tracing, Perfetto).

Called by the worker for the verbs start_profile and stop_profile, on its own thread.
"""

import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from octavo.base.errors import RequestError, Unsupported


class Profiler:
    """Makes one recording at a time; traces go into `folder`."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._recording: profile | None = None
        self._prefix = ""

    def start(self, prefix: str = "") -> None:
        """Record from here on. Raises Unsupported without a folder, RequestError while recording."""
        if not self._folder:
            raise Unsupported("Profiling is off: name a folder for its traces, profiler_dir=…")
        if self._recording is not None:
            raise RequestError("A profile is being recorded already: stop_profile() ends it.")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        recording = profile(activities=activities)
        recording.start()
        self._recording, self._prefix = recording, prefix

    def stop(self) -> str:
        """End the recording; the path of its trace. Raises RequestError when there is none."""
        recording, self._recording = self._recording, None
        if recording is None:
            raise RequestError("No profile is being recorded: start_profile() begins one.")
        recording.stop()
        folder = Path(self._folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self._prefix or 'profile'}-rank{self._rank}-{time.time_ns()}.json"
        path = folder / name
        recording.export_chrome_trace(str(path))
        return str(path)
