"""Decides what computes next, a part of a training micro-batch or a decode step. Pure; the loop asks before every turn.

The policy, in full:

* If only one side has work, it has the turn.
* While both have work, each gets half of the *time*: the side that has had less of it goes next. A decode step takes
  tens of milliseconds and a micro-batch may take seconds, so taking turns one by one would starve the decoder.
* Time is counted only while the other side was waiting for it. What a side is owed is forgotten as soon as it has no
  work (an idle side saves up no turns); what it owes it pays off while the other works alone. So a client that sends
  one long pass after another, with short gaps, does not get a fresh start in every gap.
* On a tie training goes first: most training commands are short (`optim_step`, `create`), and a client waits for them.

A training turn is a layer of a micro-batch (of the general runner: a whole one), or the short commands that wait.
Within training, tenants get equal parts of a micro-batch (`micro_batches`); within decoding, the sampler batches its
rows. `docs/decisions/fairness.md` draws all of it.
"""

from __future__ import annotations

import enum


class EngineTurn(enum.Enum):
    TRAIN = "train"
    DECODE = "decode"


class Turns:
    """Keeps the account of both sides. `choose`, do the work, `charge` the time it took."""

    def __init__(self) -> None:
        self._lead_s = 0.0
        """Seconds that training has had more than decoding while both had work."""
        self._is_contended = False

    def choose(self, *, can_train: bool, can_decode: bool) -> EngineTurn | None:
        """Return whose turn it is, or None if there is nothing to do."""
        self._is_contended = can_train and can_decode
        if not can_decode:
            self._lead_s = min(self._lead_s, 0.0)
        if not can_train:
            self._lead_s = max(self._lead_s, 0.0)
        if self._is_contended:
            return EngineTurn.TRAIN if self._lead_s <= 0 else EngineTurn.DECODE
        if can_train:
            return EngineTurn.TRAIN
        return EngineTurn.DECODE if can_decode else None

    def charge(self, turn: EngineTurn, seconds: float) -> None:
        """Add the time that the chosen side has used."""
        lead_s = self._lead_s + (seconds if turn is EngineTurn.TRAIN else -seconds)
        if not self._is_contended:  # working alone pays off a debt and makes none
            lead_s = min(lead_s, 0.0) if turn is EngineTurn.TRAIN else max(lead_s, 0.0)
        self._lead_s = lead_s
