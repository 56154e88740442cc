"""Arithmetic of launches. Triton's own functions of these names cost 3 µs a call on the host."""


def power_of_2(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


def parts(number: int, size: int) -> int:
    """How many programs of `size` cover `number`."""
    return -(-number // size)
