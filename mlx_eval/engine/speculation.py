"""Decides how many drafted tokens a decoding step verifies. Knows token ids, counts and seconds; no model, no mlx.

`lookup.py` guesses how each row goes on. A step with drafts computes T = 1 + the longest draft tokens of every row of
the batch, so T is chosen for the batch: the one that gives most tokens a second.

    tokens   one a row, and the drafts that will be right: how often a match of so many tokens goes on is counted on
             every token of every answer, drafted or not (`_Acceptance`)
    seconds  of steps over so many tokens, as measured (`_Costs`)

Where no T pays, steps are plain. What drafts cost is not measured then, so a short one is tried now and then, more
and more rarely.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from mlx_eval import config
from mlx_eval.engine.lookup import LONGEST, Lookup

MOST: Final = config.LONGEST_DRAFT
"""Tokens of the longest draft that is chosen by itself."""

MARGIN: Final = 1.1
"""How many times as many tokens a second as plain steps drafts must promise: a step with drafts waits for the one
before it, and figures are estimates."""

FIRST_WAIT: Final = 16
"""Plain steps between the first two tries of drafts whose cost is not known, or is known not to pay."""

LONGER_WAIT: Final = 4
"""How many times as long is waited after each further try."""

LONGEST_WAIT: Final = 4096
"""Where that ends: a device may become free that was busy."""

SHORTER_WAIT: Final = 0.9
"""What the wait is multiplied by for each step whose drafts pay, down to `FIRST_WAIT`."""

TOO_LONG: Final = 1.5
"""How many times as long as the same tokens one by one a first step of its size may take and be believed."""

ENOUGH: Final = 3
"""Measurements of a plain step without which nothing is drafted: the first of its size may be a slow one."""

LEARNT: Final = 0.2
"""Share of the last difference between what a step with drafts took and what it was expected to that goes into what
the next is expected to. The length that looks best is often the one whose measurements were lucky."""

MOST_OFF: Final = 0.5
"""The greatest such difference, as a logarithm, that is learnt from at once."""

SAMPLES: Final = 7
"""Measurements of one size that are remembered: three that are far off do not change their median."""

TICK: Final = 1e-9
"""The least seconds that count: a clock may give the same time twice."""

SECOND_TRY: Final = 3
"""Tokens of the drafts that are tried after those of one token, if they pay unless each further token costs as much
again: two tokens may cost more than one because another kernel computes them."""

FARTHEST: Final = 2
"""How many times as many tokens as were measured a cost is believed for."""

FADE: Final = 0.998
"""What counts of acceptance are multiplied by at each count: some 500 are remembered."""

PRIOR_RATE: Final = 0.5
"""How often the guess from a match of two tokens is right before any was seen; longer matches start from there."""

PRIOR_COUNT: Final = 8.0
"""How many guesses that stands for."""


class _Choice(NamedTuple):
    """What the next step is."""

    longest: int
    """Tokens of its drafts; 0: a plain step."""
    is_try: bool = False
    """Whether its cost is what it is for."""
    is_promising: bool = False
    """Whether drafts would pay if they cost nothing."""


_PLAIN: Final = _Choice(0)


class Speculation:
    """What to draft for the greedy rows of a batch."""

    def __init__(self, most: int | None) -> None:
        """Start with no rows.

        Args:
            most: tokens of a draft; every row that has a match is drafted as many in each step, whatever it costs.
                None: as many as pay, by the seconds that steps take.
        """
        self.drafted = 0
        """Tokens that were drafted and verified."""
        self.accepted = 0
        """Those that were the model's own."""
        self.forwards = 0
        """Steps with drafts."""
        self.saved = 0.0
        """Steps that were not needed: accepted tokens over the rows of their batch, since a plain step gives each
        row one."""
        self._most = most
        self._rows: dict[int, Lookup] = {}
        self._acceptance = _Acceptance()
        self._costs = _Costs()
        self._has_all = True  # tokens are known: no step is on its way
        self._wait: float = FIRST_WAIT
        self._waited = FIRST_WAIT  # promising plain steps since the last try: the first is made at once
        self._choice = _PLAIN

    def start(self, row: int, ids: Sequence[int]) -> None:
        """Take a greedy row.

        Args:
            row: the caller's number of it.
            ids: its prompt, and its answer so far.
        """
        self._rows[row] = Lookup(ids)

    def push(self, row: int, token_ids: Sequence[int]) -> None:
        """Add new tokens of a row's answer."""
        lookup = self._rows[row]
        for token_id in token_ids:
            length = lookup.length
            is_right = lookup.push(token_id)
            if length:
                self._acceptance.add(length, is_right)

    def end(self, row: int) -> None:
        """Forget a row, if it is there."""
        self._rows.pop(row, None)

    def pause(self) -> None:
        """Hear that the next `stepped` tells no step's time: none was on its way, or prompts were read beside it."""
        self._has_all = True

    def wants(self, num_rows: int) -> bool:
        """Whether drafts would probably pay now, asked while a step may be on its way.

        With no step on its way, `drafts` is sure to give some after True.

        Args:
            num_rows: rows of the batch, those that cannot draft included.
        """
        if self._most is not None and not self._has_all:
            return bool(self._rows)
        self._choice = self._choose(num_rows)
        return self._choice.longest > 0

    def drafts(self, num_rows: int) -> dict[int, list[int]]:
        """What to verify in the next step. All tokens before it have been pushed.

        Args:
            num_rows: rows of the batch, those that cannot draft included.

        Returns:
            Drafts by row; none: a plain step.
        """
        self._has_all = True
        self._choice = self._choose(num_rows)
        if not self._choice.longest:
            return {}
        if self._choice.longest == 1 and self._choice.is_try:
            self._costs.forget_drafts()
        return {
            row: lookup.draft(self._choice.longest) for row, lookup in self._rows.items() if lookup.length
        }

    def verified(
        self, num_rows: int, accepted: Mapping[int, int], drafted: Mapping[int, int], seconds: float
    ) -> None:
        """Hear of a step with drafts.

        Args:
            num_rows: rows of its batch.
            accepted: by row, how many drafted tokens were the model's own.
            drafted: by row, how many were verified.
            seconds: from when the tokens before it were known until its own were.
        """
        num_accepted = sum(accepted.values())
        self.forwards += 1
        self.drafted += sum(drafted.values())
        self.accepted += num_accepted
        self.saved += num_accepted / num_rows
        if not self._costs.add_drafts(num_rows, num_rows * (1 + max(drafted.values(), default=0)), seconds):
            return
        self._waited = 0
        if self._choice.is_try:
            self._wait = min(self._wait * LONGER_WAIT, LONGEST_WAIT)
        else:
            self._wait = max(self._wait * SHORTER_WAIT, FIRST_WAIT)

    def stepped(self, num_rows: int, seconds: float) -> None:
        """Hear that a plain step was sent.

        Args:
            num_rows: rows of its batch.
            seconds: between the tokens of the step before it and those of the step before that. Where no step was on
                its way they mean nothing and are not looked at.
        """
        if not self._has_all:
            self._costs.add_plain(num_rows, seconds)
        self._has_all = False
        self._waited += self._choice.is_promising

    def _choose(self, num_rows: int) -> _Choice:
        """The next step."""
        lengths = Counter(lookup.length for lookup in self._rows.values() if lookup.length)
        if not lengths:
            return _PLAIN
        if self._most is not None:
            return _Choice(self._most)
        plain = self._costs.plain(num_rows)
        gains = self._acceptance.gains(lengths, after=0 if self._has_all else 1)
        if plain is None or num_rows + gains[-1] < MARGIN * num_rows:
            return _PLAIN
        least = MARGIN * num_rows / plain  # tokens a second
        seconds = self._costs.drafts(num_rows, [num_rows * (1 + longest) for longest in range(1, MOST + 1)])
        rates = [(num_rows + gain) / cost for gain, cost in zip(gains, seconds, strict=False)]
        if rates and (best := max(rates)) > least:
            return _Choice(1 + rates.index(best), is_promising=True)
        shortest = self._costs.shortest(num_rows)
        if shortest is not None and (num_rows + gains[SECOND_TRY - 1]) / shortest > least:
            return _Choice(SECOND_TRY, is_try=True, is_promising=True)
        return _Choice(int(self._waited >= self._wait), is_try=True, is_promising=True)


class _Acceptance:
    """How often the guess from a match of so many tokens is right."""

    def __init__(self) -> None:
        self._right = [0.0] * (LONGEST + 1)
        self._all = [0.0] * (LONGEST + 1)

    def add(self, length: int, is_right: bool) -> None:
        """Count a token that followed a match."""
        self._right[length] = self._right[length] * FADE + is_right
        self._all[length] = self._all[length] * FADE + 1

    def gains(self, lengths: Mapping[int, int], after: int) -> list[float]:
        """Drafted tokens that will be right, for drafts of 1, 2, ... `MOST` tokens.

        Args:
            lengths: how many rows have a match of so many tokens.
            after: tokens that no draft has because they are being computed; the guess must be right for them too.
        """
        rates = self._rates()
        found = [0.0] * (MOST + after)
        for length, count in lengths.items():
            expected = float(count)
            for index in range(MOST + after):
                expected *= rates[min(length + index, LONGEST)]
                found[index] += expected
        gain = 0.0
        return [gain := gain + expected for expected in found[after:]]

    def _rates(self) -> list[float]:
        """By length of the match; one that was seldom seen is taken to be like the next shorter one."""
        rates, rate = [0.0] * (LONGEST + 1), PRIOR_RATE
        for length in range(2, LONGEST + 1):
            rate = (self._right[length] + PRIOR_COUNT * rate) / (self._all[length] + PRIOR_COUNT)
            rates[length] = rate
        return rates


class _Measured:
    """Seconds by the tokens of a forward pass."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self.seconds: dict[int, float] = {}
        """The median of the newest ones of each size."""

    def add(self, num_tokens: int, seconds: float) -> None:
        """Take a measurement."""
        samples = self._samples.setdefault(num_tokens, deque(maxlen=SAMPLES))
        samples.append(seconds)
        self.seconds[num_tokens] = statistics.median(samples)

    def sizes(self, num_samples: int) -> list[int]:
        """Those that were measured so many times or more."""
        return [size for size, samples in self._samples.items() if len(samples) >= num_samples]


class _Costs:
    """Seconds of forward passes by their tokens, as measured."""

    def __init__(self) -> None:
        self._plain = _Measured()
        self._drafts = _Measured()
        self._excess = 0.0  # logarithm of how much longer steps with drafts take than their measurements say
        self._sizes: set[int] = set()  # of steps with drafts, ever

    def add_plain(self, num_rows: int, seconds: float) -> None:
        """Measured: a plain step."""
        self._plain.add(num_rows, max(seconds, TICK))

    def add_drafts(self, num_rows: int, num_tokens: int, seconds: float) -> bool:
        """Measured: a step with drafts.

        Returns:
            Whether it counts: the first of a size does not where it took much longer than as many tokens in plain
            steps, for it may have set something up.
        """
        seconds = max(seconds, TICK)
        plain = self.plain(num_rows)
        is_first = num_tokens not in self._sizes
        self._sizes.add(num_tokens)
        if is_first and plain and seconds > TOO_LONG * plain * num_tokens / num_rows:
            return False
        if plain and (expected := self.drafts(num_rows, [num_tokens])):
            off = min(max(math.log(seconds / expected[0]), -MOST_OFF), MOST_OFF)
            self._excess += LEARNT * off
        self._drafts.add(num_tokens, seconds)
        return True

    def forget_drafts(self) -> None:
        """Take what was measured of steps with drafts for outdated."""
        self._drafts = _Measured()

    def plain(self, num_rows: int) -> float | None:
        """The least that a plain step may take: as measured, or by those of more and of fewer rows.

        Returns:
            Seconds; None: nothing is known.
        """
        known = self._plain.sizes(ENOUGH)
        if num_rows in known:
            return self._plain.seconds[num_rows]
        found = [self._plain.seconds[size] * min(1, num_rows / size) for size in known]
        return max(found, default=None)

    def shortest(self, num_rows: int) -> float | None:
        """Of the only size of steps with drafts that was measured above so many tokens; None: no or several sizes."""
        found = [seconds for size, seconds in self._drafts.seconds.items() if size > num_rows]
        return found[0] if len(found) == 1 else None

    def drafts(self, num_rows: int, num_tokens: Sequence[int]) -> list[float]:
        """Of steps with drafts: as measured, or on the line through the measured sizes beside them.

        Plain steps of more rows are measurements of such sizes too, where there are none with drafts.

        Args:
            num_rows: of the steps; `plain` must know something of them.
            num_tokens: of each step, more than its rows, ascending.

        Returns:
            Seconds of the first steps of these: as many as are known.
        """
        points = {num_rows: self.plain(num_rows) or 0.0}
        for measured in (self._plain, self._drafts):
            points |= {size: seconds for size, seconds in measured.seconds.items() if size > num_rows}
        sizes = sorted(points)
        if len(sizes) == 1:
            return []
        # Beyond the largest size the line through the last two goes on as far again.
        largest, before = sizes[-1], sizes[-2]
        slope = max(0.0, (points[largest] - points[before]) / (largest - before))
        farthest = FARTHEST * largest
        points[farthest] = points[largest] + slope * (farthest - largest)
        known = [size for size in num_tokens if size <= farthest]
        sizes.append(farthest)
        factor = math.exp(self._excess)
        return [factor * float(cost) for cost in np.interp(known, sizes, [points[size] for size in sizes])]
