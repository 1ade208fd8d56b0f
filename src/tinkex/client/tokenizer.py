"""Converts text to token ids and back: which tokenizer a model needs, where it comes from, and a light one of ours.

No call here applies a chat template: `encode` turns exactly the text it is given into tokens. A conversation must be
rendered first (with `transformers`: `get_tokenizer().apply_chat_template(...)`, or a renderer library).
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from tinkex.errors import ConfigError, MissingExtra

_LLAMA_3: Final = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
"""The same tokenizer as Meta's, without the gate in front of Meta's repositories."""

_ALIASES: Final = {"moonshotai/Kimi-K2.5-Text-Only": "moonshotai/Kimi-K2.5"}
# These tokenizers are code, which tinkex does not run. The revisions are those that the official client pins; the error
# names them, so that a user who loads one by hand gets the same.
_REMOTE_CODE: Final = {
    "moonshotai/Kimi-K2-Thinking": "612681931a8c906ddb349f8ad0f582cb552189cd",
    "moonshotai/Kimi-K2.5": "4d01dfe0332d63057c186e0b262165819efb6611",
    "moonshotai/Kimi-K2.6": "b5aabbfb20227ed42becbf5541dbffd213942c58",
    "moonshotai/Kimi-K3": "f831ab66814297da540d832a5235f8e904f29d06",
}


def tokenizer_id(model_name: str, info_tokenizer_id: str | None = None) -> str:
    """Return the id of a model's tokenizer: what the service says, else by the model's name.

    >>> tokenizer_id("Qwen/Qwen3-8B/instruct")
    'Qwen/Qwen3-8B'
    """
    if info_tokenizer_id:
        return info_tokenizer_id
    name = model_name.partition(":")[0]
    if name.startswith("meta-llama/Llama-3"):
        return _LLAMA_3
    parts = name.split("/")
    return f"{parts[0]}/{parts[1]}" if len(parts) == 3 else name


class Encoded(dict[str, Any]):
    """The result of calling a tokenizer: `input_ids` and `attention_mask`, by key or attribute."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]


class Tokenizer:
    """A tokenizer on the light `tokenizers` library, with the everyday names of `transformers`. No chat template.

    Made with `Tokenizer.from_file(path)` or `Tokenizer.from_pretrained(name)`, or around one of that library:

    >>> import tokenizers
    >>> backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hello": 0, "world": 1}, unk_token="hello"))
    >>> backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    >>> Tokenizer(backend).encode("hello world")
    [0, 1]
    """

    def __init__(
        self, backend: Any, *, name_or_path: str = "", bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        # A file may ask to cut or pad texts: right for a classifier, silent damage to a prompt.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.name_or_path = name_or_path
        self.bos_token = bos_token
        self.eos_token = eos_token

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, name_or_path: str = "") -> Tokenizer:
        """Read a `tokenizer.json`, or a folder that has one; files next to it name the start and end tokens."""
        given_path = Path(path)
        file = given_path / "tokenizer.json" if given_path.is_dir() else given_path
        try:
            backend = _tokenizers().Tokenizer.from_file(str(file))
        except MissingExtra:
            raise
        except Exception as error:  # the library raises bare Exceptions
            raise ConfigError(f"{file} cannot be read as a tokenizer: {error}.") from None
        config = {**_read(file.with_name("special_tokens_map.json")), **_read(file.with_name("tokenizer_config.json"))}
        return cls(
            backend,
            name_or_path=name_or_path or str(given_path),
            bos_token=_token(config.get("bos_token")),
            eos_token=_token(config.get("eos_token")),
        )

    @classmethod
    def from_pretrained(cls, name: str, *, revision: str | None = None) -> Tokenizer:
        """Fetch a tokenizer from the Hugging Face hub, or from its cache on this machine; a local folder works too."""
        if Path(name).is_dir():
            return cls.from_file(name)
        _tokenizers()
        import huggingface_hub
        from huggingface_hub import errors

        try:
            file = huggingface_hub.hf_hub_download(name, "tokenizer.json", revision=revision)
        except (OSError, ValueError, errors.EntryNotFoundError) as error:
            raise ConfigError(
                f"No tokenizer for {name!r}: the hub gave no tokenizer.json ({type(error).__name__}). Check the name "
                "and the network, or load your own with Tokenizer.from_file(path)."
            ) from error
        for extra in ("tokenizer_config.json", "special_tokens_map.json"):
            try:
                huggingface_hub.hf_hub_download(name, extra, revision=revision)
            except (OSError, errors.EntryNotFoundError):
                continue  # they only name the start and end tokens
        return cls.from_file(file, name_or_path=name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of exactly this text; special tokens, such as a start token, only where the model adds them."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        text: str = self.backend.decode(
            [ids] if isinstance(ids, int) else list(ids), skip_special_tokens=skip_special_tokens
        )
        return text

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoded:
        """The ids of one text, or a list of ids for several, each at its own length."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoded(input_ids=ids, attention_mask=[1] * len(ids))
        encoded = self.backend.encode_batch(list(text), add_special_tokens=add_special_tokens)
        rows = [list(entry.ids) for entry in encoded]
        return Encoded(input_ids=rows, attention_mask=[[1] * len(row) for row in rows])

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text, or None if the files do not name it."""
        return None if self.eos_token is None else self._id(self.eos_token)

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token that starts a text, or None if the files do not name it."""
        return None if self.bos_token is None else self._id(self.bos_token)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, special ones included."""
        return len(self)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or the ids of several; None for one that is not in the vocabulary."""
        return self._id(tokens) if isinstance(tokens, str) else [self._id(token) for token in tokens]

    def _id(self, token: str) -> int | None:
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    def __len__(self) -> int:
        return int(self.backend.get_vocab_size())

    def __repr__(self) -> str:
        return f"Tokenizer({self.name_or_path!r}, {len(self)} tokens)"


class ServiceFiles(NamedTuple):
    """A service that hands out tokenizer files, and where they are kept."""

    fetch: Callable[[str], bytes | None]
    """Gives the content of a file, such as "tokenizer.json", or None if the service does not have it."""
    cache_dir: Path
    scope: str
    """Which service it is: two services may mean different files by one name."""


_loaded: dict[tuple[str, str], Any] = {}
_locks: dict[tuple[int, str, str], threading.Lock] = {}


def load(name: str, files: ServiceFiles | None = None) -> Any:
    """Return the tokenizer of an id (see `tokenizer_id`), made once per process and shared by all clients and threads.

    From the service's own files if it has them, else from the hub. With `transformers` installed it is theirs (fast, or
    slow where there is no fast one); otherwise a `Tokenizer`.
    """
    key = (name, "" if files is None else files.scope)
    if key in _loaded:
        return _loaded[key]
    # Who needs the same tokenizer waits for the first; others do not. The process id is part of the lock's name because
    # a lock that was held while the process forked would never open in the child.
    with _locks.setdefault((os.getpid(), *key), threading.Lock()):
        if key not in _loaded:
            _loaded[key] = _make(_ALIASES.get(name, name), files)
        return _loaded[key]


def _make(name: str, files: ServiceFiles | None) -> Any:
    folder = None if files is None else _fetched(name, files)
    if folder is None and name.startswith(("TML/", "thinkingmachines/")):
        return _thinking_machines(name)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return Tokenizer.from_pretrained(name) if folder is None else Tokenizer.from_file(folder, name_or_path=name)
    source = name if folder is None else str(folder)
    try:
        return _trusting_nothing(AutoTokenizer, source)
    except Exception as error:  # another library's edge: it raises whatever its files make it raise
        if folder is not None:  # a lone tokenizer.json is enough for ours
            return Tokenizer.from_file(folder, name_or_path=name)
        if name in _REMOTE_CODE or "trust_remote_code" in str(error):
            raise ConfigError(_needs_code(name)) from error
        raise ConfigError(
            f"No tokenizer for {name!r}: {error}. Load your own with tinkex.Tokenizer.from_file(path), or with "
            "transformers."
        ) from error


def _trusting_nothing(auto_tokenizer: Any, source: str) -> Any:
    """Return the fast tokenizer of transformers, or the slow one, without running code that comes with it.

    Without `trust_remote_code=False` transformers asks the terminal whether to run what the files name, and a service
    chooses the files.
    """
    try:
        return auto_tokenizer.from_pretrained(source, use_fast=True, trust_remote_code=False)
    except Exception as error:
        try:
            return auto_tokenizer.from_pretrained(source, use_fast=False, trust_remote_code=False)
        except Exception:
            raise error from None  # the first says more


def _needs_code(name: str) -> str:
    revision = f", revision={_REMOTE_CODE[name]!r}" if name in _REMOTE_CODE else ""
    return (
        f"The tokenizer of {name!r} is a program, and tinkex runs no code that comes with a model. If you trust it, "
        f"load it yourself: transformers.AutoTokenizer.from_pretrained({name!r}{revision}, trust_remote_code=True)."
    )


def _thinking_machines(name: str) -> Any:
    try:
        from tml_tokenizers.tinker_tokenizers import get_tinker_tokenizer  # type: ignore[import-not-found]
    except ImportError:
        raise ConfigError(
            f"The tokenizer of {name!r} is not public. Render prompts with the package tml-renderers instead."
        ) from None
    return get_tinker_tokenizer(name)


# The first is needed; the others name special tokens and, for transformers, the chat template.
_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def _fetched(name: str, files: ServiceFiles) -> Path | None:
    """The folder with the service's files, fetched on first need, or None if the service has none for this name."""
    service = hashlib.sha256(files.scope.encode()).hexdigest()[:12]
    folder = files.cache_dir / "tokenizers" / f"{quote(name, safe='')}-{service}"
    if (folder / _FILES[0]).exists():
        return folder
    first = files.fetch(_FILES[0])
    if first is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for file in _FILES[1:]:
        content = files.fetch(file)
        if content is not None:
            _write(folder / file, content)
    # Last, because its presence says that the folder is complete.
    _write(folder / _FILES[0], first)
    return folder


def _write(path: Path, content: bytes) -> None:
    # Several processes may do this at once: each sees no file or a whole one.
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    part.write_bytes(content)
    part.replace(path)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _token(entry: Any) -> str | None:
    """A token as configuration files write it: a text, or an object with its content."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise MissingExtra("A tokenizer", "tokenizers") from None
    return tokenizers
