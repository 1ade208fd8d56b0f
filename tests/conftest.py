"""For every test: torch's threads wait without burning a core, or two processes on two cores stand still together."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # OpenMP reads it when torch loads it
