"""Phi-4 multimodal cuts images into squares behind a small copy; beside images it hears otherwise."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from PIL import Image

from octavo.frontend.media import pixels
from octavo.frontend.media.processors import interface
from octavo.frontend.media.processors.audio import Qwen2AudioProcessor
from octavo.frontend.media.processors.internvl import best_grid
from octavo.frontend.media.spectrogram import Waveform, kaldi_log_mel


class Phi4Processor(interface.ImageProcessor):
    """White fills up the squares at the edges."""

    DEFAULTS: ClassVar[interface.Settings] = interface.HALF | {
        "size": {"height": 448, "width": 448},
        "patch_size": 14,
        "dynamic_hd": 36,
        "is_beside_images": False,
    }
    OPTIONS = interface.ImageProcessor.OPTIONS - {"do_resize", "resample"} | {"dynamic_hd"}

    def beside(self, modalities: frozenset[str]) -> interface.Settings:
        return {"is_beside_images": "image" in modalities}

    @staticmethod
    def prepare(image: Image.Image, settings: interface.Settings) -> interface.Arrays:
        side, patch, most = settings["size"]["height"], settings["patch_size"], settings["dynamic_hd"]
        rows, columns = -(-image.height // side), -(-image.width // side)
        if rows * columns > most:
            rows, columns = best_grid(image, side, side, 1, most)
        height, width = rows * side, columns * side
        by_width, by_height = width / image.width, height / image.height
        is_flat = by_width < by_height
        new = (int(image.height * by_width), width) if is_flat else (height, int(image.width * by_height))
        if min(new) < 10:
            raise ValueError(f"the aspect ratio is very extreme {new[::-1]}")
        whole = np.full((height, width, 3), 255, np.uint8)
        whole[: new[0], : new[1]] = np.asarray(pixels.resized(image, new[0], new[1], interface.BILINEAR))
        values = pixels.normalised(whole, settings)
        squares = values.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
        seen = [-(-length // patch) for length in new]
        return {
            "pixel_values": np.concatenate([_small(values, side)[None], squares.reshape(-1, 3, side, side)]),
            "grid": np.array([rows, columns, *seen]),
        }

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        side = arrays["pixel_values"].shape[-1] // self.settings["patch_size"] // 2
        high, wide = (-(-int(count) // 2) for count in arrays["grid"][2:])
        return self.tokens_of_embeds(high * (wide + 1) + 1 + side * (side + 1))


class Phi4AudioProcessor(Qwen2AudioProcessor):
    """A token stands for 80 ms of a sound."""

    SETTINGS = "audio_processor"
    DEFAULTS: ClassVar[interface.Settings] = {
        "feature_size": 80,
        "sampling_rate": 16000,
        "mel_max_frequency": 7690,
        "is_beside_images": False,
    }

    @staticmethod
    def prepare(sound: Waveform, settings: interface.Settings) -> interface.Arrays:
        """See AudioProcessor: [frames, mels]."""
        sizes = settings["sampling_rate"], settings["feature_size"], settings["mel_max_frequency"]
        is_beside_images = np.array([int(settings["is_beside_images"])])
        return {"input_features": kaldi_log_mel(sound, *sizes), "is_beside_images": is_beside_images}

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        return [self.placeholder_id] * -(-len(arrays["input_features"]) // 8)


def _small(values: np.ndarray, side: int) -> np.ndarray:
    """Return a copy of side x side by bicubic interpolation without antialias, as torch computes it."""
    a = -0.75
    for axis, length in ((2, values.shape[2]), (1, values.shape[1])):
        places = (np.arange(side) + 0.5) * (length / side) - 0.5
        start, parts = np.floor(places).astype(int), []
        for step in (-1, 0, 1, 2):
            x = np.abs(places - start - step)
            far, near = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a, ((a + 2) * x - (a + 3)) * x * x + 1
            factors = np.where(x > 1, far, near).astype(np.float32)
            taken = values.take((start + step).clip(0, length - 1), axis)
            parts.append(taken * (factors[:, None] if axis == 1 else factors))
        values = np.sum(parts, axis=0)
    return values
