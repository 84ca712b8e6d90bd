"""Units that figures are told in, and how many there are of a thing."""

MIB = 2**20
"""Bytes of a mebibyte."""


def many(count: int, noun: str) -> str:
    """So many of what ``noun`` names, whose plural ends in s.

    >>> many(1, "step"), many(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def bytes_told(size: float) -> str:
    """A number of bytes to three digits, in the unit that leaves some before the point.

    >>> [bytes_told(size) for size in (0, 430, 16_000, 5_330_004, 3 * 2**30)]
    ['0 bytes', '430 bytes', '15.6 KiB', '5.08 MiB', '3,072 MiB']
    """
    scale, unit = next(((s, u) for s, u in ((MIB, "MiB"), (1024, "KiB")) if size >= s), (1, "bytes"))
    value = size / scale
    digits = 0 if scale == 1 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"
