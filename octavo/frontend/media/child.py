"""A process that decodes and resizes files of strangers: `python -m octavo.frontend.media.child`.

Started by `pool`. Reads questions from standard input and writes answers to standard output, each a length
of 8 bytes and msgpack. It ends when its input does, when a question takes too long, and when it needs too
much memory.
"""

import signal
import sys
from select import select
from typing import Any

import msgspec

from octavo.base.errors import RequestError
from octavo.base.limits import limit_memory
from octavo.base.pages import return_freed_blocks, return_large_blocks
from octavo.frontend.media.audio import AudioLimits, decode_audio
from octavo.frontend.media.decoding import decode
from octavo.frontend.media.processors.media import Arrays
from octavo.frontend.media.registry import AUDIO_PROCESSORS, PROCESSORS
from octavo.frontend.media.video import VideoLimits, decode_video
from octavo.messages.media import Features

MAX_MEMORY_BYTES = 6 << 30
_IDLE_S = 0.1
FAULTS = (KeyError, TypeError, ValueError, ZeroDivisionError)
UNFIT = "The {} cannot be prepared with these mm_processor_kwargs: {}"
"""Said of what `prepare` fails at by one of `FAULTS`."""


class Question(msgspec.Struct, array_like=True, gc=False):
    """A file, and what is to become of it."""

    architecture: str
    settings: dict[str, Any]
    content: bytes
    max_pixels: int
    limit_s: float
    video: VideoLimits | None = None
    audio: AudioLimits | None = None
    """None of both = the file is an image."""

    @property
    def modality(self) -> str:
        """Return what the file is."""
        return "audio" if self.audio else "image" if self.video is None else "video"


class Answer(msgspec.Struct, array_like=True, gc=False):
    """What `ImageProcessor.prepare` made, or why it could not."""

    features: dict[str, Features] = {}
    error: str = ""


def pack(arrays: Arrays) -> dict[str, Features]:
    """Return arrays in the form in which they travel."""
    return {name: Features(str(a.dtype), list(a.shape), a.tobytes()) for name, a in arrays.items()}


def answer(question: Question) -> Answer:
    """Decode and prepare."""
    known, settings = (AUDIO_PROCESSORS if question.audio else PROCESSORS), question.settings
    processor = known.load(question.architecture)
    try:
        if question.audio is not None:
            sound = decode_audio(question.content, question.audio)
            is_plain = question.audio.is_plain
            return Answer(pack({"sound": sound} if is_plain else processor.prepare(sound, settings)))
        if question.video is not None:
            frames, info = decode_video(question.content, question.video)
            return Answer(pack(processor.prepare_video(frames, info, settings)))
        return Answer(pack(processor.prepare(decode(question.content, question.max_pixels), settings)))
    except RequestError as error:
        return Answer(error=str(error))
    except MemoryError:
        return Answer(error=f"Failed to load {question.modality}: it needs too much memory.")
    except FAULTS as error:
        return Answer(error=UNFIT.format(question.modality, error))


def main() -> None:
    """Answer until standard input ends."""
    limit_memory(MAX_MEMORY_BYTES)
    return_large_blocks()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while length := source.read(8):
        question = msgspec.msgpack.decode(source.read(int.from_bytes(length, "little")), type=Question)
        signal.setitimer(signal.ITIMER_REAL, question.limit_s)
        said = msgspec.msgpack.encode(answer(question))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sink.write(len(said).to_bytes(8, "little"))
        sink.write(said)
        sink.flush()
        del question, said
        if not select([source], [], [], _IDLE_S)[0]:
            return_freed_blocks()


if __name__ == "__main__":
    main()
