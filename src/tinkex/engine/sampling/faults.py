"""Turns what went wrong while sampling into an error for the caller."""

from __future__ import annotations

import logging

from tinkex.engine.contract import EngineFault, OutOfMemory, SampleSpec, is_out_of_memory

logger = logging.getLogger("tinkex.engine")


def as_fault(error: Exception, spec: SampleSpec) -> EngineFault:
    """Return the error for the caller. The details go to the log."""
    if isinstance(error, EngineFault):
        return error
    logger.error("sampling failed", exc_info=error)
    size = f"a prompt of {len(spec.prompt)} tokens, {spec.num_samples} x {spec.max_tokens} tokens requested"
    if is_out_of_memory(error):
        return OutOfMemory(
            f"The engine had not enough memory for this request ({size}). "
            "Ask for fewer or shorter samples, or try again later.",
            "server",
        )
    return EngineFault(
        f"The engine failed at this request ({size}): {type(error).__name__}. The log of the service has the details.",
        "server",
    )
