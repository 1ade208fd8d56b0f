"""`tinkex sample`: generates text or token ids from a prompt, printed as they arrive."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import tinkex
from tinkex.cli.arguments import count, token_ids
from tinkex.cli.connect import announce_retries, config_for
from tinkex.cli.named import WEIGHTS, weights_named
from tinkex.cli.parser import CommandParser
from tinkex.errors import TinkexError, ValidationError
from tinkex.terminal import output

PARAMS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
GOODBYE_S = 2.0
"""How long closing the session may take: the text is already printed."""
BROKEN = "\ufffd"


def add(parser: CommandParser, about: str) -> None:
    command = parser.add_command(
        "sample", sample, about,
        'tinkex sample -m Qwen/Qwen3-8B "The capital of France is" --max-tokens 16',
        "tinkex sample -m latest < prompt.txt",
        "tinkex sample -m Qwen/Qwen3-8B --prompt-ids 12,7,345 --ids",
        more="The prompt is used as it is, without a chat template (`tinkex chat` applies one). Text needs the\n"
        "model's tokenizer and the extra `tokenizers`; --prompt-ids with --ids needs neither.",
    )  # fmt: skip
    command.add_argument("prompt", nargs="?", help="the text to continue (default: stdin, without its last line break)")
    command.add_argument("-m", "--model", help=f"a base model, {WEIGHTS} (default: the only base model)")
    command.add_argument("--prompt-ids", type=token_ids, metavar="IDS", help="the prompt as token ids")
    command.add_argument("--ids", action="store_true", help="print token ids, not text")
    command.add_argument("--tokenizer", metavar="NAME|FILE", help="use this tokenizer instead of the model's")
    command.add_argument("-n", "--num-samples", type=count, default=1, metavar="N", help="how many samples (default 1)")
    command.add_argument(
        "--max-tokens", type=count, default=256, metavar="N", help="maximum length of a sample (default 256)"
    )
    command.add_argument("--temperature", type=float, metavar="T", help="0: always the most likely token (default 1)")
    command.add_argument("--top-p", type=float, metavar="P", help="only the most likely tokens that add up to P")
    command.add_argument("--top-k", type=int, metavar="K", help="only the K most likely tokens (default: all)")
    command.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same sample")
    command.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")


def sample(args: argparse.Namespace) -> None:
    if args.prompt is not None and args.prompt_ids is not None:
        raise ValidationError("Give the prompt as text or as --prompt-ids, not both.")
    announce_retries()
    service = tinkex.ServiceClient(config=config_for(args))
    status = "interrupted"
    try:
        _sample(args, service)
        status = "success"
    except Exception:
        status = "errored"
        raise
    finally:
        try:
            service.close(status).result(GOODBYE_S)
        except (TinkexError, TimeoutError):
            pass  # the service ends the session when its heartbeats stop


def _sample(args: argparse.Namespace, service: tinkex.ServiceClient) -> None:
    text = args.prompt
    if text is None and args.prompt_ids is None:
        if sys.stdin.isatty():
            output.remark("Type the prompt, then press Ctrl-D on an empty line.")
        text = sys.stdin.read().removesuffix("\n")
    client = _sampler(args, service)
    needs_text = text is not None or not args.ids
    tokenizer: Any = _tokenizer(args.tokenizer, client) if needs_text else None
    prompt = args.prompt_ids if text is None else list(tokenizer.encode(text))
    # Options that were not set are left out: the service has its own defaults.
    params = {name: value for name in PARAMS if (value := getattr(args, name)) is not None}
    stream = client.stream(tinkex.ModelInput.from_ints(prompt), tinkex.SamplingParams(**params), args.num_samples)
    decode = None if args.ids or tokenizer is None else tokenizer.decode
    if args.output == "json":
        _write_json(stream, prompt, decode)
    else:
        _write_text(stream, decode or ids_as_text, args.num_samples)


def _write_text(stream: tinkex.SampleStream, decode: Callable[..., str], num_samples: int) -> None:
    """Print one sample as it arrives; print several only when each is complete, because they arrive interleaved."""
    writers = [TextWriter(decode) for _ in range(num_samples)]
    stop = None
    for chunk in stream:
        piece = writers[chunk.sample].feed(chunk.tokens)
        stop = chunk.stop_reason or stop
        if num_samples == 1:
            output.stream(piece)
        elif chunk.stop_reason:
            writer = writers[chunk.sample]
            writer.flush()
            output.stream(f"--- sample {chunk.sample + 1} ({chunk.stop_reason})\n{writer.text}\n")
    if num_samples == 1:
        output.stream(writers[0].flush() + "\n")
        if stop == "length" and sys.stderr.isatty():
            output.remark("(cut at --max-tokens)")


def _write_json(stream: tinkex.SampleStream, prompt: list[int], decode: Callable[..., str] | None) -> None:
    for _ in stream:
        pass
    assert stream.response is not None  # the stream ended well
    sequences = []
    for sequence in stream.response.sequences:
        fields = {"tokens": sequence.tokens, "logprobs": sequence.logprobs, "stop_reason": sequence.stop_reason}
        text = {} if decode is None else {"text": decode(sequence.tokens, skip_special_tokens=True)}
        sequences.append({**text, **fields})
    output.write_json({"prompt_tokens": len(prompt), "sequences": sequences})


class TextWriter:
    """Turns tokens into text piece by piece, in time proportional to the text.

    A token may be part of a character, and its text may depend on the token before: the new text is the difference
    between decoding the last pieces with and without it. An incomplete character waits for the rest of it.
    """

    def __init__(self, decode: Callable[..., str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._start = self._read = 0
        self.text = ""

    def feed(self, tokens: list[int]) -> str:
        self._tokens += tokens
        return self._advance(is_last=False)

    def flush(self) -> str:
        """Return the rest, even if its last character is incomplete."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        known = self._text(self._start, self._read)
        whole = self._text(self._start, len(self._tokens))
        if len(whole) <= len(known) or (whole.endswith(BROKEN) and not is_last):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        self.text += whole[len(known) :]
        return whole[len(known) :]

    def _text(self, start: int, end: int) -> str:
        return self._decode(self._tokens[start:end], skip_special_tokens=True) if end > start else ""


def ids_as_text(tokens: list[int], **_: object) -> str:
    return " ".join(map(str, tokens))


def _sampler(args: argparse.Namespace, service: tinkex.ServiceClient) -> tinkex.SamplingClient:
    if args.model is not None and args.model.startswith("tinker://"):
        return service.create_sampling_client(model_path=args.model)
    models = service.get_server_capabilities().supported_models
    bases = [model.model_name for model in models if model.model_name and model.alias_of is None]
    if args.model is None:
        if len(bases) != 1:
            raise ValidationError(f"Name a model with -m. The service offers {', '.join(bases) or 'none'}.")
        return service.create_sampling_client(base_model=bases[0])
    if args.model in [model.model_name for model in models]:
        return service.create_sampling_client(base_model=args.model)
    return service.create_sampling_client(model_path=weights_named(args, args.model, bases))


def _tokenizer(name: str | None, client: tinkex.SamplingClient) -> Any:
    if name is None:
        return client.get_tokenizer()
    return tinkex.Tokenizer.from_file(name) if os.path.exists(name) else tinkex.Tokenizer.from_pretrained(name)
