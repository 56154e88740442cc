"""The precision of a product's inputs."""

from typing import Literal

InputPrecision = Literal["float32", "bfloat16", "int16", "int8", "float8"]
