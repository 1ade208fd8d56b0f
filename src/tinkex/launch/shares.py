"""Decides what of this machine each of several engines gets: as many cores as the others, or GPUs of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinkex.errors import ConfigError

_NVIDIA = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one engine gets. `threads` is for each of its processes; 0 leaves it to the engine."""

    threads: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of its server."""


def share_out(
    engines: int, device: str, threads: int, cores: int, gpus: Sequence[str], devices: int = 1
) -> list[Share]:
    """Return the share of each engine, which has so many `devices`. `threads` is the setting: 0 leaves it to this.

    All get the same: the order of a sum depends on the number of threads, so that a run which moves to an engine with
    another number goes on with other last bits.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"--engines {engines} and --device {device} contradict each other: one device is for one engine. Leave out "
            "--device, and each engine gets a GPU of its own or a share of the cores."
        )
    if device != "cpu" and gpus:
        if engines * devices > len(gpus):
            raise ConfigError(
                f"--engines {engines}: there are {len(gpus)} GPUs that this process may use, and an engine needs "
                f"{devices}. Ask for fewer engines, or for --device cpu."
            )
        groups = (gpus[start : start + devices] for start in range(0, engines * devices, devices))
        return [Share(threads=threads, variables={"CUDA_VISIBLE_DEVICES": ",".join(group)}) for group in groups]
    if engines * devices > cores:
        raise ConfigError(
            f"--engines {engines}: there are {cores} cores that this process may use, and an engine needs {devices}. "
            "Ask for fewer."
        )
    return [Share(threads=threads or cores // (engines * devices)) for _ in range(engines)]


def usable_gpus() -> list[str]:
    """Return the GPUs that CUDA may use here, by the names that CUDA_VISIBLE_DEVICES has for them. Loads no torch."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")  # border: a setting of CUDA, shared out among the engines
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    return [str(number) for number, _ in enumerate(sorted(_NVIDIA.glob("*")))]


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
