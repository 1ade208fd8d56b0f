"""`tinkex serve`: runs a service on this machine until it is stopped."""

from __future__ import annotations

import argparse
import os
import sys
import threading

from tinkex.cli.parser import CommandParser
from tinkex.cli.service.data_folder import add_flags, config_of, open_store
from tinkex.settings import ServeConfig
from tinkex.terminal import output

GROUPS = {
    "models and computation": ("base_models", "device", "dtype", "decode_weights", "threads", "cache_dir"),
    "network": ("host", "port", "public_url"),
    "access": ("api_keys", "keys_file"),
    "storage": ("data_dir", "database_url", "durability", "snapshot_every_s", "result_ttl_s", "quota_gb"),
    "limits": (
        "max_batch_tokens", "max_rows", "max_cache_tokens", "max_queued_samples", "max_queued_operations",
        "max_body_bytes", "poll_hold_s", "gap_s", "idle_session_s", "drain_s",
    ),
    "logging": ("log_level",),
}  # fmt: skip
MORE = """\
Trains and samples models for every client of the Tinker API: this package, or the official
`tinker` from 0.4.1 to 0.36.0. Without --base-model it serves smollm2-135m, which is downloaded on
first use. By default it listens on this machine only, and needs no key; on other addresses, keys
are required (`tinkex key create NAME`). If it is stopped at any moment, even by kill -9, it
continues where it was when it is started again with the same data folder.

Every flag can also be set in the environment (the name in brackets), or in the table [serve] of
tinkex.toml. A client needs TINKER_BASE_URL and, if there are keys, TINKER_API_KEY. While the
service is running, `tinkex console` shows it in the browser and `tinkex chat` uses its models."""


def add(parser: CommandParser, about: str) -> None:
    command = parser.add_command(
        "serve", serve, about, "tinkex serve", "tinkex serve --base-model tinkex/tiny --port 0",
        "tinkex serve --base-model Qwen/Qwen3-0.6B --base-model ./my-model --device cuda --dtype bfloat16",
        "tinkex serve --host 0.0.0.0 --keys-file keys.txt --public-url https://tinkex.example.org",
        more=MORE, is_local=True,
    )  # fmt: skip
    for title, names in GROUPS.items():
        add_flags(command.add_argument_group(title), names)
    # For `tinkex.local`, which starts a private service: serve until stdin closes, which happens however that program
    # ends, then remove the folder.
    command.add_argument("--private", metavar="FOLDER", help=argparse.SUPPRESS)


def serve(args: argparse.Namespace) -> int:
    if args.api_key:  # given before the command: `tinkex --api-key KEY serve`
        args.api_keys = [*(args.api_keys or ()), args.api_key]
    config = config_of(args)
    from tinkex.local_service import needs_local
    from tinkex.terminal.progress_bar import ProgressBar

    needs_local("tinkex serve")
    _set_up_logging(config, args)
    parent_is_gone = _stop_when_stdin_closes() if args.private else None
    from tinkex.server.main import serve as run

    bar = ProgressBar()

    def on_ready(url: str) -> None:
        bar.close()
        announce(config, url, as_json=args.output == "json")

    try:
        with bar:
            return run(config, on_ready=on_ready, progress=bar.update)
    finally:
        if parent_is_gone is not None and parent_is_gone.is_set():
            # A parent that is still running reads the log first and removes the folder itself.
            import shutil

            shutil.rmtree(args.private, ignore_errors=True)


def announce(config: ServeConfig, url: str, *, as_json: bool) -> None:
    """Print that the service is ready and how to use it. For programs: one line of JSON."""
    if as_json:
        import json

        ready = {"url": url, "models": config.base_models, "data_dir": str(config.data_dir), "pid": os.getpid()}
        print(json.dumps(ready), flush=True)
        return
    with open_store(config) as store:
        needs_key = bool(config.api_keys) or store.has_keys()
    # An address that a client on this machine can use: 0.0.0.0 and :: are for listening only.
    near = url.replace("://0.0.0.0", "://127.0.0.1").replace("://[::]", "://[::1]")
    key = "tml-…" if needs_key else "tml-local"
    about_key = "one of your keys" if needs_key else "any key that starts with tml-"
    print(
        f"""
tinkex serves {", ".join(config.base_models)}
  at       {url}
  console  {near}/    (`tinkex console` opens it)
  data     {config.data_dir}

To use it from a client:
  official  TINKER_BASE_URL={near} TINKER_API_KEY={key} python train.py    ({about_key})
  tinkex    tinkex.ServiceClient(base_url="{near}"{', api_key="tml-…"' if needs_key else ""})
  openai    openai.OpenAI(base_url="{near}/v1", api_key="{key}")

Ctrl-C stops the service; queued work continues at the next start.""",
        flush=True,
    )


def _set_up_logging(config: ServeConfig, args: argparse.Namespace) -> None:
    import logging

    level = "debug" if args.debug else config.log_level
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # Our own loggers at the chosen level, other libraries only from WARNING.
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("tinkex").setLevel(level.upper())


def _stop_when_stdin_closes() -> threading.Event:
    """Return an event that is set when stdin has closed: the parent program has ended or wants the service to stop."""
    import signal

    has_closed = threading.Event()

    def wait() -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError:
            pass  # no stdin at all: there is no parent
        has_closed.set()
        output.remark("Stopping: the program that started this service has ended.")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="tinkex-parent", daemon=True).start()
    return has_closed
