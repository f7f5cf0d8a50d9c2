"""A block of keys in the form that the prefill kernel multiplies with, and the products.

The dtype that K and V are seen in says which form it is, at compile time:

    elements  All is widened to fp32. Keys lie in numba_panels' panels, a dimension in each row,
              values row after row; weights take the place of their scores.
    pairs     bf16 seen as uint32, where numba_dots runs. Keys lie in its panels, a pair of
              dimensions in each row; a row of values is two neighbouring keys', paired, and so are
              weights, which are words [ROWS, KEYS_AT_ONCE]. Of such a row of values, and of the
              sums, the even dimensions come first: they are wide rows of numba_pairs.

Queries are rows of elements, or of pairs. Scores and sums are fp32.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from punica_kernels import numba_dots, numba_panels
from punica_kernels.numba_bf16_panels import multiply_pairs, word_of
from punica_kernels.numba_floats import bits_of_float, exp, float_of_bits, narrow, widen
from punica_kernels.numba_pairs import spread

KEYS_AT_ONCE = 512
_COLUMNS, _DOT_COLUMNS = numba_panels.PANEL_COLUMNS, numba_dots.PANEL_COLUMNS
_WHOLE = _DOT_COLUMNS // numba_dots.LANES  # vectors of a panel
_REST = _WHOLE // 2  # of the last one of a head that isn't a multiple of panels
# What a few queries' scores and words take, of fp32.
SCORES_LEN = KEYS_AT_ONCE * max(numba_panels.ROWS, numba_dots.ROWS * 3 // 2)
assert KEYS_AT_ONCE % max(_COLUMNS, _DOT_COLUMNS) == 0, "a block is whole panels"

_LOW, _HIGH, _HALF = np.uint32(0xFFFF), np.uint32(0xFFFF0000), np.uint32(16)


def are_pairs(array: types.Array) -> bool:
    """Say whether an array of this type is of pairs."""
    return bool(array.dtype == types.uint32)


def rows_at_once(array: types.Array) -> int:
    """Return how many queries the products take, for K of this type."""
    return numba_dots.ROWS if are_pairs(array) else numba_panels.ROWS


def columns_at_once(array: types.Array) -> int:
    """Return how many keys a panel holds, for K of this type."""
    return _DOT_COLUMNS if are_pairs(array) else _COLUMNS


def take_query(place: Any, query: Any) -> None:
    """Put one query where `score` reads it."""
    raise NotImplementedError("runs in numba kernels only")


@overload(take_query, inline="always")
def _take_query(place, query):
    def pairs(place, query):
        for i in range(query.shape[0]):
            place[i] = float_of_bits(query[i])

    return pairs if are_pairs(query) else lambda place, query: spread(query, place)


def take_key(keys: Any, values: Any, j: Any, key: Any, value: Any) -> None:
    """Put key j of a block, and its value, where the products read them, in the order of keys."""
    raise NotImplementedError("runs in numba kernels only")


@overload(take_key, inline="always")
def _take_key(keys, values, j, key, value):
    def elements(keys, values, j, key, value):
        dim = key.shape[0]
        turned = keys[j // _COLUMNS * _COLUMNS * dim + j % _COLUMNS :]
        place = values[j * dim : (j + 1) * dim]
        for d in range(dim):
            turned[d * _COLUMNS] = widen(key[d])
            place[d] = widen(value[d])

    def pairs(keys, values, j, key, value):
        half = key.shape[0]
        turned = keys[j // _DOT_COLUMNS * _DOT_COLUMNS * half + j % _DOT_COLUMNS :]
        for i in range(half):
            turned[i * _DOT_COLUMNS] = float_of_bits(key[i])
        row = j // 2 * 2 * half
        evens, odds = values[row : row + half], values[row + half : row + 2 * half]
        if j % 2 == 0:  # until the next one comes, it is paired with zeros
            for i in range(half):
                evens[i] = float_of_bits(np.uint32(value[i] & _LOW))
                odds[i] = float_of_bits(np.uint32(value[i] >> _HALF))
        else:
            for i in range(half):
                even = np.uint32(bits_of_float(evens[i]) | np.uint32(value[i] << _HALF))
                odd = np.uint32(bits_of_float(odds[i]) | np.uint32(value[i] & _HIGH))
                evens[i], odds[i] = float_of_bits(even), float_of_bits(odd)

    return pairs if are_pairs(key) else elements


def score(*_arguments: Any) -> None:
    """Leave the products of a few queries with the first keys of a block, up to a whole panel."""
    raise NotImplementedError("runs in numba kernels only")


@overload(score, inline="always")
def _score(mine, scores0, queries0, keys0, length, num_seen, k):
    def elements(mine, scores0, queries0, keys0, length, num_seen, k):
        for j in range(0, num_seen, _COLUMNS):
            numba_panels.multiply(
                mine, scores0 + j, KEYS_AT_ONCE, mine, queries0, length,
                mine, keys0 + j * length, _COLUMNS, length, False,
            )  # fmt: skip

    def pairs(mine, scores0, queries0, keys0, length, num_seen, k):
        for j in range(0, num_seen, _DOT_COLUMNS):
            multiply_pairs(
                mine, scores0 + j, KEYS_AT_ONCE, mine, queries0, length,
                mine, keys0 + j * length, _DOT_COLUMNS, length, _WHOLE, False,
            )  # fmt: skip

    return pairs if are_pairs(k) else elements


def weigh(scores: Any, words: Any, seen: Any, scale: Any, largest: Any, v: Any) -> Any:
    """Turn a query's scores into weights, zero from `seen` on; return their sum before rounding.

    The scores are whole panels, so that a vectorised loop leaves no rest.
    """
    raise NotImplementedError("runs in numba kernels only")


@overload(weigh, inline="always")
def _weigh(scores, words, seen, scale, largest, v):
    def elements(scores, words, seen, scale, largest, v):
        total = np.float32(0.0)
        scores[seen:] = np.float32(-np.inf)
        for j in range(scores.shape[0]):
            weight = exp(scores[j] * scale - largest)
            scores[j] = widen(narrow(weight, v))
            total += weight
        scores[seen:] = np.float32(0.0)
        return total

    def pairs(scores, words, seen, scale, largest, v):
        total = np.float32(0.0)
        scores[seen:] = np.float32(-np.inf)
        for j in range(scores.shape[0]):
            weight = exp(scores[j] * scale - largest)
            words[j] = word_of(weight)
            total += weight
        words[seen : scores.shape[0]] = np.uint16(0)
        return total

    return pairs if are_pairs(v) else elements


def add_values(*_arguments: Any) -> None:
    """Add the products of a few queries' weights with the first values of a block."""
    raise NotImplementedError("runs in numba kernels only")


@overload(add_values, inline="always")
def _add_values(mine, sums0, scores0, words0, values0, dim, num_seen, v):
    def elements(mine, sums0, scores0, words0, values0, dim, num_seen, v):
        for d in range(0, dim, _COLUMNS):
            numba_panels.multiply(
                mine, sums0 + d, dim, mine, scores0, KEYS_AT_ONCE,
                mine, values0 + d, dim, num_seen, True,
            )  # fmt: skip

    def pairs(mine, sums0, scores0, words0, values0, dim, num_seen, v):
        depth = (num_seen + 1) // 2
        for d in range(0, dim // _DOT_COLUMNS * _DOT_COLUMNS, _DOT_COLUMNS):
            multiply_pairs(
                mine, sums0 + d, dim, mine, words0, KEYS_AT_ONCE // 2,
                mine, values0 + d, dim, depth, _WHOLE, True,
            )  # fmt: skip
        if dim % _DOT_COLUMNS > 0:
            d = dim // _DOT_COLUMNS * _DOT_COLUMNS
            multiply_pairs(
                mine, sums0 + d, dim, mine, words0, KEYS_AT_ONCE // 2,
                mine, values0 + d, dim, depth, _REST, True,
            )  # fmt: skip

    return pairs if are_pairs(v) else elements
