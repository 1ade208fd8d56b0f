"""Builds responses in OpenAI's format from the engine's events: text, log-probabilities, choices, chunks. Pure.

The same code builds whole responses and streams, so that they hold the same. The text ends before a stop string;
log-probabilities and usage cover every sampled token, those of the stop string included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tinkex.engine.contract import Sampled, SampleEvent
from tinkex.server.openai.requests import CompletionOptions
from tinkex.server.sampling.tokenizer_cache import Detokenizer, ModelTokenizer

MIN_LOGPROB: Final = -9999.0
"""JSON has no minus infinity; OpenAI writes this."""


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """A token with its log-probability, the alternatives, and the offset in the text at which it begins."""

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """The next part of a choice's text. The last one has the reason why the choice ended."""

    index: int
    text: str
    entries: Sequence[LogprobEntry] = ()
    finish_reason: str | None = None


class TextUntilStop:
    """Decodes the tokens of one sequence as they come, up to the first stop string."""

    def __init__(self, decoder: Detokenizer, stops: Sequence[str], length: int = 0) -> None:
        self._decoder = decoder
        self._stops = stops
        self._pending = ""
        """Decoded text that may be the beginning of a stop string."""
        self.length = length
        """Characters that were returned."""
        self.is_stopped = False

    @property
    def offset(self) -> int:
        """The offset in the text at which the next token begins."""
        return self.length + len(self._pending)

    def push(self, token: int) -> str:
        return "" if self.is_stopped else self._add(self._decoder.push(token))

    def finish(self) -> str:
        if self.is_stopped:
            return ""
        piece = self._add(self._decoder.finish())
        rest, self._pending = self._pending, ""
        self.length += len(rest)
        return piece + rest

    def _add(self, piece: str) -> str:
        text = self._pending + piece
        stops = [index for stop in self._stops if (index := text.find(stop)) >= 0]
        if stops:
            self.is_stopped, self._pending, text = True, "", text[: min(stops)]
        else:
            keep = max((_overlap(text, stop) for stop in self._stops), default=0)
            text, self._pending = text[: len(text) - keep], text[len(text) - keep :]
        self.length += len(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text are the beginning of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """The tokens of a prompt. `echo` is its text if the response begins with it."""

    tokens: Sequence[int]
    echo: str | None = None


Style = Literal["completion", "chat"]


class CompletionBuilder:
    """Builds all choices of a request. `feed` takes the events of each prompt and returns the text they add."""

    def __init__(
        self, style: Style, options: CompletionOptions, tokenizer: ModelTokenizer, prompts: Sequence[RenderedPrompt]
    ) -> None:
        self._style, self._options, self._tokenizer, self._prompts = style, options, tokenizer, prompts
        self._choices = [
            _Choice(index, options, tokenizer, prompt)
            for index, prompt in enumerate(prompt for prompt in prompts for _ in range(options.n))
        ]
        self._sampled_tokens = 0
        self._cached_tokens = 0

    def feed(self, prompt: int, event: SampleEvent) -> list[TextPiece]:
        """Return what an event of this prompt adds to its choices."""
        first = prompt * self._options.n
        if not isinstance(event, Sampled):
            piece = self._choices[first + event.index].push(event.tokens, event.logprobs)
            return [] if piece is None else [piece]
        self._cached_tokens += event.cache_hit_tokens
        pieces = []
        for index, sequence in enumerate(event.sequences):
            choice = self._choices[first + index]
            if choice.wants_tokens:
                self._sampled_tokens += sequence.length
            pieces.append(choice.finish(event, index))
        return pieces

    @property
    def usage(self) -> dict[str, Any]:
        prompt_tokens = sum(len(prompt.tokens) for prompt in self._prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._sampled_tokens,
            "total_tokens": prompt_tokens + self._sampled_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def whole_choice(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        """Return a choice of a response that is not streamed."""
        text = "".join(piece.text for piece in pieces)
        choice = self._choice(pieces[-1], self._logprobs([entry for piece in pieces for entry in piece.entries]))
        if self._style == "completion":
            return {**choice, "text": text}
        return {**choice, "message": {"role": "assistant", "content": text, "refusal": None}}

    def chunk_choice(self, piece: TextPiece, is_first: bool) -> dict[str, Any]:
        """Return a choice of one chunk of a stream."""
        choice = self._choice(piece, self._logprobs(piece.entries) if piece.entries else None)
        if self._style == "completion":
            return {**choice, "text": piece.text}
        delta = {"role": "assistant"} if is_first else {}
        return {**choice, "delta": {**delta, "content": piece.text} if piece.text or is_first else delta}

    @staticmethod
    def _choice(last: TextPiece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": last.index, "logprobs": logprobs, "finish_reason": last.finish_reason}

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, Any] | None:
        if self._options.top_logprobs is None:
            return None
        tokenizer = self._tokenizer
        if self._style == "chat":
            return {"content": [_chat_entry(tokenizer, entry) for entry in entries], "refusal": None}
        return {
            "tokens": [_name(tokenizer, entry.token) for entry in entries],
            "token_logprobs": [None if entry.logprob is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [_top(tokenizer, entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }


class _Choice:
    def __init__(
        self, index: int, options: CompletionOptions, tokenizer: ModelTokenizer, prompt: RenderedPrompt
    ) -> None:
        self._index, self._options, self._tokenizer, self._prompt = index, options, tokenizer, prompt
        self._text = TextUntilStop(Detokenizer(tokenizer, prompt.tokens), options.stop, len(prompt.echo or ""))
        self._seen = 0
        self._entries: list[LogprobEntry] = []
        self._is_echo_due = prompt.echo is not None
        self.wants_tokens = options.max_tokens != 0

    def push(self, tokens: Sequence[int], logprobs: Sequence[float]) -> TextPiece | None:
        """Add more tokens of a stream, and return their text if there is any."""
        text = self._echo() + self._take(tokens, logprobs, None)
        return self._piece(text) if text else None

    def finish(self, sampled: Sampled, index: int) -> TextPiece:
        """Return what was not pushed before, and the reason of the end: the whole sequence is known."""
        sequence = sampled.sequences[index]
        if self._is_echo_due and self._options.top_logprobs is not None:
            self._entries += prompt_logprob_entries(self._tokenizer, self._prompt, sampled)
        text, finish_reason = self._echo(), "length"
        if self.wants_tokens:
            rest = slice(self._seen, None)
            top = None if sequence.topk is None else [row or () for row in sequence.topk.to_lists()[rest]]
            text += self._take(sequence.tokens[rest], sequence.logprobs[rest], top) + self._text.finish()
            if sequence.stop_reason == "stop" or self._text.is_stopped:
                finish_reason = "stop"
        return self._piece(text, finish_reason)

    def _echo(self) -> str:
        is_due, self._is_echo_due = self._is_echo_due, False
        return (self._prompt.echo or "") if is_due else ""

    def _take(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Sequence[tuple[int, float]]] | None
    ) -> str:
        pieces = []
        for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if self._options.top_logprobs is not None:
                self._entries.append(LogprobEntry(token, logprob, () if top is None else top[index], self._text.offset))
            pieces.append(self._text.push(token))
        self._seen += len(tokens)
        return "".join(pieces)

    def _piece(self, text: str, finish_reason: str | None = None) -> TextPiece:
        # A token inside a stop string begins where the text ends.
        end = self._text.length
        entries = [LogprobEntry(row.token, row.logprob, row.top, min(row.offset, end)) for row in self._entries]
        self._entries = []
        return TextPiece(index=self._index, text=text, entries=entries, finish_reason=finish_reason)


def prompt_logprob_entries(tokenizer: ModelTokenizer, prompt: RenderedPrompt, sampled: Sampled) -> list[LogprobEntry]:
    """Return the entries of an echoed prompt. The first token has no log-probability: nothing comes before it."""
    text, entries = TextUntilStop(Detokenizer(tokenizer), ()), []
    logprobs = sampled.prompt_logprobs or [None] * len(prompt.tokens)
    ranked = None if sampled.topk_prompt is None else sampled.topk_prompt.to_lists()
    tops = ranked or [None] * len(prompt.tokens)
    for token, logprob, top in zip(prompt.tokens, logprobs, tops, strict=True):
        entries.append(LogprobEntry(token, logprob, top or (), min(text.offset, len(prompt.echo or ""))))
        text.push(token)
    return entries


# ── Log-probabilities as JSON


def _top(tokenizer: ModelTokenizer, entry: LogprobEntry) -> dict[str, float] | None:
    """Return the likeliest tokens, and the sampled one even if it is not among them."""
    if entry.logprob is None:
        return None
    named: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        # Two tokens may have the same text: report the likelier one.
        name = _name(tokenizer, token)
        named[name] = max(named.get(name, MIN_LOGPROB), _finite(logprob))
    return named


def _chat_entry(tokenizer: ModelTokenizer, entry: LogprobEntry) -> dict[str, Any]:
    top = [_chat_token(tokenizer, token, logprob) for token, logprob in entry.top]
    return {**_chat_token(tokenizer, entry.token, entry.logprob or 0.0), "top_logprobs": top}


def _chat_token(tokenizer: ModelTokenizer, token: int, logprob: float) -> dict[str, Any]:
    content = tokenizer.token_bytes(token)
    return {"token": content.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(content)}


def _name(tokenizer: ModelTokenizer, token: int) -> str:
    """Return a token's text. The bytes of a token that is only part of a character are spelled out, as at OpenAI."""
    content = tokenizer.token_bytes(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB) if logprob == logprob else MIN_LOGPROB
