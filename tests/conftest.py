"""For every test: torch's threads wait without burning a core, and Ctrl-C means what it means in a terminal."""

from __future__ import annotations

import os
import signal

# Two processes on two cores stand still together otherwise. OpenMP reads it when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts what it runs in the background with SIGINT ignored, and every child inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
