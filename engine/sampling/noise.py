"""Noise that is a pure function, so that a seeded request repeats whatever runs beside it."""

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, odd


def uniform(seed: int, position: int, *, sample_index: int = 0) -> float:
    """Return a number in (0, 1) that looks drawn at random for each (seed, sample, position).

    A multiple of 2**-49, never 0 or 1: a product with a total stays strictly below the total.
    """
    word = _mix(_mix(_mix(seed & _MASK) + sample_index * _STEP) + position * _STEP)
    return ((word >> 16) + 0.5) / 2.0**48


def _mix(word: int) -> int:
    """The finaliser of the SplitMix64 generator: each input bit flips half of the output's."""
    word = (word + _STEP) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
