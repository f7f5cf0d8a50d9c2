"""Regular expressions from strangers: matched exactly as `re` would, but never for ever.

Python's `re` can take exponential time. An expression of plain characters is matched here; any
other is tried in a child process that is ended when its time is up.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from adapters.limits import MAX_EXPRESSION_CHARS, MAX_MATCH_CPU_S

MATCH_TIMEOUT_S = 30.0

# Expressions that can't branch or repeat, so that matching is linear.
_PLAIN = re.compile(r"(?:[A-Za-z0-9_.\-]|\\\.)*")

_CHILD = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({MAX_MATCH_CPU_S}, {MAX_MATCH_CPU_S}))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
patterns, keys = json.load(sys.stdin)
rows = []
for whole, expression in patterns:
    try:
        compiled = re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        rows.append(str(error))
        continue
    match = compiled.fullmatch if whole else compiled.match
    found = (match(key) for key in keys)
    rows.append([m and m.groupdict() for m in found])
json.dump(rows, sys.stdout)
"""


class BadPattern(ValueError):
    """An expression is broken, or takes too long to match; the text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One expression; `whole` asks for the whole key, else it need only match at its start."""

    expression: str
    whole: bool
    shown: str

    @property
    def is_plain(self) -> bool:
        return _PLAIN.fullmatch(self.shown) is not None


class PatternMatcher:
    """The answers of some patterns over some keys, all found at once."""

    def __init__(self, patterns: Sequence[Pattern], keys: Sequence[str]) -> None:
        self._found: dict[tuple[Pattern, str], dict[str, str] | None] = {}
        for pattern in patterns:
            if len(pattern.shown) > MAX_EXPRESSION_CHARS:
                raise BadPattern(
                    f"an expression has {len(pattern.shown)} characters; at most "
                    f"{MAX_EXPRESSION_CHARS} are read"
                )
        self._match_here([pattern for pattern in patterns if pattern.is_plain], keys)
        self._match_in_child([pattern for pattern in patterns if not pattern.is_plain], keys)

    def groups(self, pattern: Pattern, key: str) -> dict[str, str] | None:
        """Return the named groups of the match, or None when `key` doesn't match."""
        return self._found[pattern, key]

    def _match_here(self, patterns: Sequence[Pattern], keys: Sequence[str]) -> None:
        for pattern in patterns:
            compiled = re.compile(pattern.expression)
            match = compiled.fullmatch if pattern.whole else compiled.match
            for key in keys:
                found = match(key)
                self._found[pattern, key] = None if found is None else found.groupdict()

    def _match_in_child(self, patterns: Sequence[Pattern], keys: Sequence[str]) -> None:
        if not patterns:
            return
        question = [[[p.whole, p.expression] for p in patterns], list(keys)]
        try:
            answer = subprocess.run(
                [sys.executable, "-I", "-S", "-W", "ignore", "-c", _CHILD],
                input=json.dumps(question).encode(),
                capture_output=True,
                timeout=MATCH_TIMEOUT_S,
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            raise _too_slow(patterns) from error
        except subprocess.CalledProcessError as error:
            if -error.returncode in (signal.SIGXCPU, signal.SIGKILL):
                raise _too_slow(patterns) from error
            raise BadPattern("an expression can't be matched") from error
        for pattern, row in zip(patterns, json.loads(answer.stdout), strict=True):
            if isinstance(row, str):
                raise BadPattern(f"{pattern.shown[:80]!r} isn't a regular expression: {row}")
            self._found.update(
                ((pattern, key), groups) for key, groups in zip(keys, row, strict=True)
            )


def _too_slow(patterns: Sequence[Pattern]) -> BadPattern:
    shown = ", ".join(repr(pattern.shown[:80]) for pattern in patterns[:4])
    return BadPattern(
        f"{shown}: matching takes too long; at most {MAX_MATCH_CPU_S} s of computing is spent on it"
    )
