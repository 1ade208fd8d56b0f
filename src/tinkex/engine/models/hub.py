"""Models of the Hugging Face hub: found in huggingface_hub's own cache, or downloaded into it for other programs too.

Only safetensors, configuration and tokenizer files are downloaded: nothing that could run code.
"""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from tinkex.engine.contract import first_line
from tinkex.errors import ConfigError

ProgressReport = Callable[[str, int, int], None]
"""Called with what is going on, bytes done and bytes in all."""

TIMEOUT_S = 5.0
"""Give up on an unreachable hub after this. A DNS lookup can take longer than any timeout of HTTP libraries."""

WEIGHTS = "model*.safetensors"
FILES = (
    WEIGHTS,
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""`model*` and not `*`: some repositories hold a second copy of the weights under another name."""

_unreachable: dict[str, str] = {}
"""Hub endpoints that did not respond in this process → the reason, so that the second model need not wait again."""


class HubUnreachable(ConfigError):
    """The hub gave no usable response."""


def find_cached(name: str) -> Path | None:
    """Return the folder of a model that any program downloaded before, or None. Uses no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=list(FILES)))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError:
        raise ConfigError(f"{name!r} is not a model name. Names look like org/model.") from None


def download(name: str, progress: ProgressReport) -> Path:
    """Download a model. Raises HubUnreachable within seconds if the hub does not respond."""
    from huggingface_hub import snapshot_download

    address = endpoint()
    if address in _unreachable:
        raise HubUnreachable(_unreachable[address])
    try:
        info = _run_within(TIMEOUT_S, lambda: _model_info(name, address))
    except HubUnreachable as error:
        _unreachable[address] = str(error)
        raise
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if "/" not in file.rfilename}
    _require_safetensors(name, list(sizes))
    chosen = [file for file in sizes if Path(file).match(WEIGHTS) or file in FILES]
    total = sum(sizes[file] for file in chosen)
    try:
        fetch = partial(
            snapshot_download,
            name,
            endpoint=address,
            revision=info.sha,
            allow_patterns=chosen,
            tqdm_class=_bar_class(name, total, progress),
        )
        # Where it is called it waits for its threads, also when SIGTERM comes: for the rest of a file, maybe hours.
        folder = _run_within(None, fetch)
        # With this file the next start finds `main` in the cache offline; a download by commit does not write it.
        main_ref = Path(folder).parent.parent / "refs" / "main"
        main_ref.parent.mkdir(exist_ok=True)
        main_ref.write_text(str(info.sha))
    # An edge: huggingface_hub raises what its HTTP library raises, and it has changed that library more than once.
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ConfigError(
                f"The disk is full: {name} needs {total / 1e9:.1f} GB. Free some space and start again."
            ) from None
        raise ConfigError(
            f"The download of {name} failed ({first_line(error, 200)}). Start again: it continues where it stopped."
        ) from None
    progress(f"downloading {name}", total, total)
    return Path(folder)


def endpoint() -> str:
    """Return the address of the hub: huggingface_hub's own setting (HF_ENDPOINT)."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _model_info(name: str, address: str) -> Any:
    """Return the hub's record of a model: commit, files, sizes."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return HfApi(endpoint=address).model_info(name, files_metadata=True, timeout=TIMEOUT_S)
    except GatedRepoError:
        raise ConfigError(
            f"{name} is gated. Accept its terms on its page at the hub, log in with `hf auth login`, and start again."
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"The hub has no model {name!r}, or it is private. Check the name, or log in with `hf auth login`."
        ) from None
    except Exception as error:  # an edge, as in `download`
        raise HubUnreachable(first_line(error, 200)) from None


def _run_within(seconds: float | None, work: Callable[[], Any]) -> Any:
    """Run a function in a thread, and abandon the thread if it takes too long or if a signal ends the wait."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="tinkex-hub", daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError:
        if seconds is None or result.done():  # the function's own
            raise
        raise HubUnreachable(f"no response within {seconds:g} s") from None


def _require_safetensors(name: str, files: Sequence[str]) -> None:
    if any(Path(file).match(WEIGHTS) for file in files):
        return
    if any(Path(file).suffix in (".bin", ".pt", ".pth") for file in files):
        raise ConfigError(
            f"{name} has pickled weights only, and loading them could run any code. "
            "Choose a model with safetensors, or convert it and give --base-model the folder."
        )
    raise ConfigError(f"{name} has no safetensors weights. Choose a causal language model that has them.")


def _bar_class(name: str, total: int, progress: ProgressReport) -> type:
    """Return a class that huggingface_hub takes for a progress bar: it draws nothing and reports the bytes."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]

    class Bar(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        furthest = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> Any:
            is_drawn = super().update(n)
            # One bar counts files, and newer releases have two for bytes (received, written): report the furthest.
            if self.unit == "B" and self.n > Bar.furthest:
                Bar.furthest = int(self.n)
                progress(f"downloading {name}", min(Bar.furthest, total), total)
            return is_drawn

    return Bar
