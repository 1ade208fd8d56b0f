"""Property tests here are about values, not about time: a busy machine must not fail them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("wire", deadline=None)
settings.load_profile("wire")
