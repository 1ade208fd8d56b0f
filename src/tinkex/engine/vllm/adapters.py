"""The adapters that vLLM has: loads one before its first request, proves it, and keeps its files.

vLLM itself may drop an adapter and read its files again later. If they were gone by then, or damaged, the whole engine
would end, with the samples of all tenants. So it never reads the folder that the server named, which may be deleted,
but links to its files in a folder of ours, which stay until vLLM has forgotten the adapter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

from tinkex.engine.contract import EngineFault, Proof, ProofMissing, SampleSpec, first_line
from tinkex.engine.proofs import FILE as PROOF
from tinkex.engine.proofs import difference, mismatch, read_proof

logger = logging.getLogger("tinkex.engine")

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files of a PEFT folder that vLLM reads."""
LOCK = "in-use"
MOST_PROBES = 16
"""Different tokens of proofs: those of one service are always the same."""


class Loader(Protocol):
    """What of vLLM is needed here (`sampler.VllmSampler` has it)."""

    async def add(self, number: int, folder: Path) -> object:
        """Load an adapter under a number that was never used. Return what a request names it by. Raises if vLLM
        cannot; the engine lives on."""

    async def remove(self, number: int) -> None: ...

    async def logprobs(self, handle: object, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of every token after the first. Without a handle, of the base model."""


class AdapterKey(NamedTuple):
    """A folder, and the version of its weights: it may be deleted and written again under the same name."""

    folder: str
    version: tuple[int, int]


class LoadedAdapter:
    """An adapter that vLLM has, under a number that no other ever had."""

    def __init__(self, number: int, links: Path, handle: object) -> None:
        self.number, self.links, self.handle = number, links, handle
        self.users = 0
        """Requests that name it."""


class Adapters:
    """Keeps at most `most` adapters loaded, and more while they are in use."""

    def __init__(self, loader: Loader, home: Path, most: int, *, is_exact: bool) -> None:
        """`home`: an empty folder for links to files. `is_exact`: vLLM computes in float32."""
        self._loader, self._home, self._most, self._is_exact = loader, home, most, is_exact
        self._base: dict[tuple[int, ...], list[float]] = {}
        """The log-probabilities of the base model, by the tokens of proofs."""
        self._loaded: OrderedDict[AdapterKey, LoadedAdapter] = OrderedDict()
        """The least recently used first."""
        self._numbers = 0
        self._loading = asyncio.Lock()
        self.proved = self.rejected = 0
        """Adapters that showed, and did not show, the log-probabilities of their proof."""
        self.last_difference = self.largest_difference = 0.0
        """Of log-probabilities in proofs, rejected ones included."""

    def __len__(self) -> int:
        return len(self._loaded)

    @asynccontextmanager
    async def use(self, spec: SampleSpec) -> AsyncIterator[object | None]:
        """Let a request use the weights that it names; None is the base model. Raises EngineFault."""
        if spec.weights is None:
            yield None
            return
        adapter = await self._get(spec.weights, spec.proof)
        try:
            await self._drop_unused()
            yield adapter.handle
        finally:
            adapter.users -= 1

    async def _get(self, folder: str, proof: Proof | None) -> LoadedAdapter:
        """Return an adapter, counted as used."""
        key = self._key(folder)
        if key not in self._loaded:
            async with self._loading:  # vLLM loads one at a time too
                if key not in self._loaded:
                    self._loaded[key] = await self._load(Path(folder), proof)
        adapter = self._loaded[key]
        adapter.users += 1
        self._loaded.move_to_end(key)
        return adapter

    def _key(self, folder: str) -> AdapterKey:
        """Return the key of a folder's weights. Loaded ones stay usable when their folder is gone."""
        try:
            status = os.stat(os.path.join(folder, WEIGHTS))
        except OSError:
            known = next((key for key in reversed(self._loaded) if key.folder == folder), None)
            if known is None:
                raise EngineFault(f"The weights {name_of(folder)} are gone. Were they deleted?", "server") from None
            return known
        return AdapterKey(folder, (status.st_ino, status.st_mtime_ns))

    async def _load(self, folder: Path, proof: Proof | None) -> LoadedAdapter:
        self._numbers += 1
        number, links = self._numbers, self._home / str(self._numbers)
        try:
            await asyncio.to_thread(_link_files, folder, links)
            proof = read_proof(links) or proof
            if proof is None:
                raise ProofMissing(f"The weights {name_of(folder)} were saved without a proof.", "server")
            handle = await self._add(number, links, folder)
            try:
                await self._prove(handle, proof, folder)
            except BaseException:
                await _finish(self._loader.remove(number))
                raise
        except BaseException:
            shutil.rmtree(links, ignore_errors=True)
            raise
        return LoadedAdapter(number, links, handle)

    async def _add(self, number: int, links: Path, folder: Path) -> object:
        try:
            return await self._loader.add(number, links)
        except EngineFault:
            raise
        except Exception as error:
            if is_dead(error):
                raise
            logger.warning("vLLM cannot load %s: %s", folder, error)
            reason = first_line(error, 300).replace(str(links), name_of(folder)).rstrip(".")
            raise EngineFault(f"The sampler cannot load the weights {name_of(folder)}: {reason}.", "server") from None

    async def _prove(self, handle: object, proof: Proof, folder: Path) -> None:
        """Raise unless vLLM computes the log-probabilities of the proof."""
        logprobs = await self._loader.logprobs(handle, proof.tokens)
        base = () if self._is_exact else await self._base_logprobs(proof.tokens)
        self.last_difference = difference(proof, logprobs)
        self.largest_difference = max(self.largest_difference, self.last_difference)
        reason = mismatch(proof, logprobs, base, is_exact=self._is_exact)
        if not reason:
            self.proved += 1
            return
        self.rejected += 1
        logger.error("%s does not pass its proof: its log-probabilities %s", folder, reason)
        raise EngineFault(
            f"The weights {name_of(folder)} are not served: in vLLM the log-probabilities of their proof {reason} from "
            "those that they had when they were saved. Are the files those of this base model, with the names of its "
            "layers? Save them again, or sample with `--sampler own`.",
            "server",
        )

    async def _base_logprobs(self, tokens: tuple[int, ...]) -> Sequence[float]:
        if tokens not in self._base:
            while len(self._base) >= MOST_PROBES:
                del self._base[next(iter(self._base))]
            self._base[tokens] = await self._loader.logprobs(None, tokens)
        return self._base[tokens]

    async def _drop_unused(self) -> None:
        """Forget the least recently used adapters beyond `most`; their files go after vLLM has forgotten them."""
        while len(self._loaded) > self._most:
            key = next((key for key, adapter in self._loaded.items() if not adapter.users), None)
            if key is None:
                return
            adapter = self._loaded.pop(key)
            await self._loader.remove(adapter.number)
            shutil.rmtree(adapter.links, ignore_errors=True)


def is_dead(error: BaseException) -> bool:
    """Return whether vLLM says that its engine has ended. By name, so that this module needs no vLLM."""
    return any(kind.__name__ == "EngineDeadError" for kind in type(error).__mro__)


def name_of(folder: Path | str) -> str:
    """Return what a client may read of a folder: run, kind and name."""
    return "/".join(Path(folder).parts[-3:])


async def _finish(work: Awaitable[Any]) -> None:
    """Do a last thing although the caller is being cancelled; its error is not the one to report."""
    try:
        await asyncio.shield(asyncio.ensure_future(work))
    except Exception as error:
        if is_dead(error):
            raise
        logger.warning("vLLM could not drop an adapter: %s", error)


def _link_files(folder: Path, links: Path) -> None:
    """Link an adapter's files, or copy them if they are on another disk."""
    links.mkdir()
    for name in (WEIGHTS, CONFIG, PROOF):
        try:
            os.link(folder / name, links / name)
        except FileNotFoundError:
            if name != PROOF:
                raise EngineFault(
                    f"The weights {name_of(folder)} have no {name}. Were they deleted?", "server"
                ) from None
        except OSError:
            shutil.copyfile(folder / name, links / name)


def make_home(parent: Path) -> Path:
    """Return a new folder for links, and delete those of processes that have ended."""
    parent.mkdir(parents=True, exist_ok=True)
    for other in parent.iterdir():
        if _lock_of(other) is not None:
            shutil.rmtree(other, ignore_errors=True)
    home = parent / uuid4().hex[:16]
    home.mkdir(mode=0o700)
    (home / LOCK).touch()
    if _lock_of(home) is None:
        raise EngineFault(f"The folder {home} cannot be locked.", "server")
    return home


def _lock_of(home: Path) -> int | None:
    """Lock a folder for as long as this process lives. Returns None if another one has it, or has just made it."""
    import fcntl

    try:
        descriptor = os.open(home / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor  # never closed: the kernel lets go with the process
