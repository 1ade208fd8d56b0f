"""Who computes next: a part of a training micro-batch or a decode step. Pure; the child's loop asks before every turn.

The policy, in full:

* If only one side has work, it has the turn.
* While both have work, each gets half of the *time*: the side that has had less of it goes next. A decode step takes
  tens of milliseconds and a micro-batch may take seconds, so taking turns one by one would starve the decoder.
* Time is counted only while the other side was waiting for it. What a side is owed is forgotten as soon as it has no
  work (nobody saves up turns while idle); what it owes it pays off while the other works alone. So a client that sends
  one long pass after another, with short gaps, does not get a fresh start in every gap.
* On a tie training goes first: most training commands are short (`optim_step`, `create`), and somebody waits for them.

A training turn is a layer of a micro-batch (of the general runner: a whole one), or what short commands are waiting.
Within training, passes share micro-batches, in equal parts for the tenants (`passes.share`); within decoding, the
sampler batches its rows.
"""

from __future__ import annotations

import enum


class Turn(enum.Enum):
    TRAIN = "train"
    DECODE = "decode"


class Turns:
    """Keeps the account of both sides. `choose`, do the work, `charge` what it took."""

    def __init__(self) -> None:
        self._lead_s = 0.0
        """Seconds that training has had more than decoding while both wanted them."""
        self._is_contended = False

    def choose(self, *, can_train: bool, can_decode: bool) -> Turn | None:
        """Whose turn it is, or None if there is nothing to do."""
        self._is_contended = can_train and can_decode
        if not can_decode:
            self._lead_s = min(self._lead_s, 0.0)
        if not can_train:
            self._lead_s = max(self._lead_s, 0.0)
        if self._is_contended:
            return Turn.TRAIN if self._lead_s <= 0 else Turn.DECODE
        if can_train:
            return Turn.TRAIN
        return Turn.DECODE if can_decode else None

    def charge(self, turn: Turn, seconds: float) -> None:
        """The chosen side has used this much time."""
        lead_s = self._lead_s + (seconds if turn is Turn.TRAIN else -seconds)
        if not self._is_contended:  # working alone pays off a debt and makes none
            lead_s = min(lead_s, 0.0) if turn is Turn.TRAIN else max(lead_s, 0.0)
        self._lead_s = lead_s
