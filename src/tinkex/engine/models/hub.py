"""Models of the hub: what huggingface_hub's own cache has, else a download into it, so that other programs share it.

Only safetensors, configuration and tokenizer files are fetched: nothing that could run code.
"""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tinkex.errors import ConfigError

Progress = Callable[[str, int, int], None]

ANSWER_S = 5.0
"""An unreachable hub is given up after this. Looking a name up can take longer than any timeout of HTTP libraries."""

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

_silent: dict[str, str] = {}
"""Hub addresses that did not answer in this process → why: the second model need not wait for it again."""


class Unreachable(ConfigError):
    """The hub gave no usable answer."""


def cached(name: str) -> Path | None:
    """The folder of a model that was fetched before, by whatever program. No network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=list(FILES)))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError:
        raise ConfigError(f"{name!r} is no model's name. Names look like org/model.") from None


def fetch(name: str, progress: Progress) -> Path:
    """Download a model. Raises Unreachable within seconds if the hub does not answer."""
    from huggingface_hub import snapshot_download

    endpoint = address()
    if endpoint in _silent:
        raise Unreachable(_silent[endpoint])
    try:
        found = _within(ANSWER_S, lambda: _look_up(name, endpoint))
    except Unreachable as error:
        _silent[endpoint] = str(error)
        raise
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or () if "/" not in file.rfilename}
    _refuse_pickle(name, list(sizes))
    wanted = [file for file in sizes if Path(file).match(WEIGHTS) or file in FILES]
    total = sum(sizes[file] for file in wanted)
    try:
        folder = snapshot_download(
            name, endpoint=endpoint, revision=found.sha, allow_patterns=wanted, tqdm_class=_bar(name, total, progress)
        )
        # The next start finds `main` in the cache without asking; a download by commit does not leave that mark.
        mark = Path(folder).parent.parent / "refs" / "main"
        mark.parent.mkdir(exist_ok=True)
        mark.write_text(str(found.sha))
    except Exception as error:  # an edge: it raises what its HTTP library, of which it has changed several, raises
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ConfigError(
                f"The disk ran full while {name} ({total / 1e9:.1f} GB) was fetched. Make room."
            ) from None
        raise ConfigError(
            f"The download of {name} broke off ({_first_line(error)}). Start again: it goes on where it stopped."
        ) from None
    progress(f"downloading {name}", total, total)
    return Path(folder)


def address() -> str:
    """Where the hub is: huggingface_hub's own setting (HF_ENDPOINT)."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _look_up(name: str, endpoint: str) -> Any:
    """The hub's record of a model: commit, files, sizes."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return HfApi(endpoint=endpoint).model_info(name, files_metadata=True, timeout=ANSWER_S)
    except GatedRepoError:
        raise ConfigError(
            f"{name} is gated. Accept its terms on its page at the hub, log in with `hf auth login`, and start again."
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"The hub has no model {name!r}, or it is private. Check the name, or log in with `hf auth login`."
        ) from None
    except Exception as error:  # an edge, as in `fetch`
        raise Unreachable(_first_line(error)) from None


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """Run it in a thread that is left behind if it takes too long."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="tinkex-hub", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise Unreachable(f"no answer within {seconds:g} s") from None


def _refuse_pickle(name: str, files: Sequence[str]) -> None:
    if any(Path(file).match(WEIGHTS) for file in files):
        return
    if any(Path(file).suffix in (".bin", ".pt", ".pth") for file in files):
        raise ConfigError(
            f"{name} has pickled weights only, and opening them could run anyone's code. "
            "Choose a model with safetensors, or convert it and give --base-model the folder."
        )
    raise ConfigError(f"{name} has no safetensors weights. Choose a causal language model that has them.")


def _bar(name: str, total: int, progress: Progress) -> type:
    """What huggingface_hub takes for a progress bar: it draws nothing and hands the bytes on."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]

    class Bar(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        most = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> Any:
            answer = super().update(n)
            # One bar counts files, and newer releases have two for bytes (received, written): the furthest is right.
            if self.unit == "B" and self.n > Bar.most:
                Bar.most = int(self.n)
                progress(f"downloading {name}", min(Bar.most, total), total)
            return answer

    return Bar


def _first_line(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    return (said[0] if said else type(error).__name__)[:200]
