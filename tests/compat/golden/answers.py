"""All golden answers. `VARIANTS[name]` is a Variant; the data files hold what each official client made of it."""

from __future__ import annotations

from . import answers_futures, answers_rest, answers_training
from .variant import ALL as VARIANTS
from .variant import Variant, read_answer, rendered, run_variant

__all__ = ["VARIANTS", "Variant", "read_answer", "rendered", "run_variant", "variants_for"]

MODULES = (answers_futures, answers_training, answers_rest)


def variants_for(version: str) -> list[Variant]:
    return [variant for variant in VARIANTS.values() if version in variant.versions]
