"""Proofs: what other engines must see in an adapter before they serve it.

An engine that finds no tensor for a layer, because the file's names are not those it expects, serves the base model
there and says nothing. So the engine that trained the weights writes with them how likely it finds a few tokens, and
one that has loaded them computes the same.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

from tinkex.engine.contract import EngineFault, Proof, SampleSpec, pass_frame, read_outputs
from tinkex.engine.frames import Frame
from tinkex.types.inputs import Datum, ModelInput

FILE = "tinkex_proof.json"
"""In the folder of an adapter, beside its weights."""
PROBE_TOKENS = 16
TOLERANCE = 1e-3
"""The largest difference of two log-probabilities between two engines that compute in float32."""
COARSE_TOLERANCE = 0.2
"""In bfloat16 or float16, root mean square: so far apart two sound engines may be in what an adapter changes. A sound
one was 0.13 apart."""
LEAST_CHANGE = 0.02
"""Root mean square: of what an adapter changes, if an engine in which it changes nothing at all is to be rejected."""
LEAST_PART = 0.5
"""Of a large change (above 0.4) so large a part must be seen. Of a smaller one, all but `COARSE_TOLERANCE`."""
LIKELY = 20.0
"""Log-probabilities beyond minus this one may differ by more than the tolerance, in proportion."""


def probe_tokens(vocabulary: int) -> tuple[int, ...]:
    """Return tokens below `vocabulary`, always the same."""
    choice = random.Random("tinkex proof")
    return tuple(choice.randrange(vocabulary) for _ in range(PROBE_TOKENS))


def probe_frame(adapter: str, tokens: Sequence[int]) -> Frame:
    """Return the command by which the trainer computes a proof: a pass that changes nothing."""
    datum = Datum(
        model_input=ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), "weights": [1.0] * (len(tokens) - 1)},
    )
    return pass_frame("forward", adapter, [datum], "cross_entropy", None)


def logprobs_of_pass(reply: Frame) -> list[float]:
    [outputs] = read_outputs(reply)
    return [float(value) for value in outputs["logprobs"].data]


def probe_spec(base: str, weights: str | None, tenant: str, tokens: Sequence[int]) -> SampleSpec:
    """Return the sample by which an engine computes the log-probabilities of a proof."""
    return SampleSpec(
        base=base, weights=weights, tenant=tenant, prompt=tuple(tokens), max_tokens=1, prompt_logprobs=True
    )


def as_json(proof: Proof) -> dict[str, list[int] | list[float]]:
    values: dict[str, list[int] | list[float]] = {"tokens": list(proof.tokens), "logprobs": list(proof.logprobs)}
    if proof.base_logprobs:
        values["base_logprobs"] = list(proof.base_logprobs)
    return values


def read_proof(folder: Path) -> Proof | None:
    """Return the proof in a folder; None if it has none. Raises EngineFault if it is damaged."""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return checked_proof(content["tokens"], content["logprobs"], content.get("base_logprobs", ()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise EngineFault(f"The checkpoint's {FILE} is damaged.", "server") from None


def checked_proof(tokens: Sequence[int], logprobs: Sequence[float], base: Sequence[float] = ()) -> Proof:
    """Return a proof. Raises ValueError if it proves nothing."""
    if len(tokens) < 2 or len(logprobs) != len(tokens) - 1 or not all(type(token) is int for token in tokens):
        raise ValueError("a proof needs a log-probability for every token after the first")
    if len(base) not in (0, len(logprobs)):
        raise ValueError("a proof needs as many log-probabilities of the base model")
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in (*logprobs, *base)):
        raise ValueError("the log-probabilities of a proof must be finite")
    return Proof(tokens=tuple(tokens), logprobs=tuple(map(float, logprobs)), base_logprobs=tuple(map(float, base)))


def difference(proof: Proof, logprobs: Sequence[float]) -> float:
    """Return the largest difference between a proof and what another engine computed; infinite if one is not finite."""
    if len(logprobs) != len(proof.logprobs) or not all(map(math.isfinite, logprobs)):
        return math.inf
    return max(abs(own - other) for own, other in zip(proof.logprobs, logprobs, strict=True))


def mismatch(proof: Proof, logprobs: Sequence[float], base: Sequence[float], *, is_exact: bool) -> str:
    """Return in which way another engine differs from a proof by more than it may; "" if it does not.

    `base`: what that engine computes for its base model. In bfloat16 two sound engines differ by 0.2 in tokens that are
    unlikely, as much as some adapters change. But they differ so with every adapter: what the adapter changes is
    compared, and may differ by 0.2 or by half of it, whichever is more. An engine that serves the base model
    changes nothing.
    """
    apart = difference(proof, logprobs)
    allowed = TOLERANCE * max(1.0, max(map(abs, proof.logprobs)) / LIKELY)
    if apart <= allowed:
        return ""
    if is_exact or not proof.base_logprobs or not math.isfinite(apart):
        return f"differ by {apart:.3g}, more than {allowed:.1g},"
    changes = [own - before for own, before in zip(proof.logprobs, proof.base_logprobs, strict=True)]
    seen = [own - before for own, before in zip(logprobs, base, strict=True)]
    if list(logprobs) == list(base) and _root_mean_square(changes) > LEAST_CHANGE:
        return "are those of the base model to the last bit, and differ"
    missing = _root_mean_square([own - other for own, other in zip(changes, seen, strict=True)])
    allowed = max(COARSE_TOLERANCE, LEAST_PART * _root_mean_square(changes))
    return "" if missing <= allowed else f"change by another amount, {missing:.3g} apart and more than {allowed:.1g},"


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))
