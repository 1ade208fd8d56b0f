"""`tinkex serve`: runs a service on this machine until it is stopped."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tinkex.cli.parser import CommandParser
from tinkex.cli.service.data_folder import add_flags, config_of
from tinkex.clock import REAL
from tinkex.errors import ConfigError
from tinkex.settings import LIMITS, ServeConfig, home
from tinkex.terminal import output

GROUPS = {
    "models and computation": (
        "base_models", "load_models", "device", "dtype", "decode_weights", "threads", "devices_per_engine", "cache_dir",
    ),
    "sampling with vLLM": ("sampler", "vllm_python", "vllm_max_rank", "vllm_slots", "vllm_cache_gb", "proofs"),
    "network": ("host", "port", "public_url"),
    "access": ("api_keys", "keys_file"),
    "storage": (
        "data_dir", "database_url", "database_url_file", "blobs", "blobs_cache_gb", "durability", "snapshot_every_s",
        "result_ttl_s",
    ),
    "capacity and times": (
        "max_batch_tokens", "max_rows", "max_cache_tokens", "poll_hold_s", "gap_s", "idle_session_s", "drain_s",
    ),
    # Not the secret itself: others can read command lines.
    "cluster": (
        "engines", "node_url", "no_engine", "samples_only", "cluster_secret_file", "node_lease_s", "node_cert",
        "node_key", "cluster_ca",
    ),
    "limits": tuple(limit.setting.name for limit in LIMITS),
    "logging": ("log_level",),
}  # fmt: skip
MORE = """\
Trains and samples models for every client of the Tinker API: this package, or the official
`tinker` from 0.4.1 to 0.36.0. Without MODEL it serves smollm2-135m, which is downloaded on first
use. By default it listens on this machine only, and needs no key; on other addresses, keys
are required (`tinkex key create NAME`). If it is stopped at any moment, even by kill -9, it
continues where it was when it is started again with the same data folder.

Every flag can also be set in the environment (the name in brackets), or in the table [serve] of
tinkex.toml. No secret needs to be on the command line, where other users can read it: keys are made
with `tinkex key create` or listed in a --keys-file, the database's address with its password is in
TINKEX_DATABASE_URL or a --database-url-file, the secret of a cluster in TINKEX_CLUSTER_SECRET or a
--cluster-secret-file, the keys of a bucket in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or in the
file that AWS_SHARED_CREDENTIALS_FILE names.

While the service is running, other commands find it (`tinkex console`, `tinkex chat`), and
tinkex.local() joins it. Other clients need TINKER_BASE_URL and, if there are keys, TINKER_API_KEY.
With --background it runs on after the terminal is closed: see `tinkex ps`, `stop` and `logs`."""


def add(parser: CommandParser, about: str) -> None:
    command = parser.add_command(
        "serve", serve, about, "tinkex serve", "tinkex serve tinkex/tiny --port 0",
        "tinkex serve Qwen/Qwen3-0.6B ./my-model --device cuda --dtype bfloat16", "tinkex serve --background",
        "tinkex serve --host 0.0.0.0 --keys-file keys.txt --public-url https://tinkex.example.org",
        more=MORE, is_local=True,
    )  # fmt: skip
    command.add_argument(
        "models", nargs="*", metavar="MODEL", help="a model to serve, as with --base-model (default smollm2-135m)"
    )
    command.add_argument(
        "--background", action="store_true", help="return when it is ready; it runs until `tinkex stop`"
    )
    for title, names in GROUPS.items():
        add_flags(command.add_argument_group(title), names)
    # For a parent program (`tinkex.local`, `launch.KeptServer`): serve until stdin closes, which happens however that
    # program ends, then remove the folder.
    command.add_argument("--private", metavar="FOLDER", help=argparse.SUPPRESS)
    # In the background: end so many seconds after the last user left; 0: stay.
    command.add_argument("--detached", metavar="SECONDS", type=float, help=argparse.SUPPRESS)


HANGS_S = 30.0
"""How long a service whose parent has ended may take to stop, beyond the time for its running work."""


class Terminated(SystemExit):
    """SIGTERM came while the service started."""


def serve(args: argparse.Namespace) -> int:
    with _in_order_at_signals():
        try:
            return _serve(args)
        except (Terminated, KeyboardInterrupt) as stopped:
            is_ctrl_c = isinstance(stopped, KeyboardInterrupt)
            if is_ctrl_c:
                print("\ntinkex: stopped.", file=sys.stderr)
            # Everything is released. Python would wait for threads that download a model, for hours with a large one.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130 if is_ctrl_c else 0)


def _serve(args: argparse.Namespace) -> int:
    if args.api_key:  # given before the command: `tinkex --api-key KEY serve`
        args.api_keys = [*(args.api_keys or ()), args.api_key]
    if args.models:
        args.base_models = [*args.models, *(args.base_models or ())]
    config = config_of(args)
    from tinkex.local_service import needs_local
    from tinkex.terminal.progress_bar import ProgressBar

    needs_local("tinkex serve")
    if args.background:
        return _serve_in_background(config, as_json=args.output == "json")
    _set_up_logging(config, args)
    parent_is_gone = _stop_when_stdin_closes(config.drain_s + HANGS_S) if args.private else None

    bar = ProgressBar()

    def on_ready(needs_key: bool, url: str) -> None:
        bar.close()
        announce(config, url, needs_key=needs_key, as_json=args.output == "json")

    try:
        with bar:
            if config.engines > 1:
                from tinkex.launch.engines import serve_engines

                return serve_engines(config, on_ready=on_ready, progress=bar.update)
            from tinkex.server.main import serve as run

            return run(config, on_ready=on_ready, progress=bar.update, detached_s=args.detached)
    finally:
        if parent_is_gone is not None and parent_is_gone.is_set():
            # A parent that is still running reads the log first and removes the folder itself.
            import shutil

            shutil.rmtree(args.private, ignore_errors=True)


def _serve_in_background(config: ServeConfig, *, as_json: bool) -> int:
    """Start a service that stays when this command ends."""
    from tinkex.home.lock import holder_pid
    from tinkex.local_service.shared import join_or_start

    if config.engines > 1 or config.is_clustered:
        raise ConfigError(
            "--background is for one server with one engine. Let your system's supervisor run the others."
        )
    if pid := holder_pid(config.data_dir):
        raise ConfigError(f"A service (pid {pid}) uses {config.data_dir} already. `tinkex ps` shows it.")
    service = join_or_start(config, 0.0, who="tinkex serve")
    announce(config, service.url, needs_key=service.needs_key, as_json=as_json, background_pid=service.pid)
    return 0


def announce(
    config: ServeConfig, url: str, *, needs_key: bool, as_json: bool, background_pid: int | None = None
) -> None:
    """Print that the service is ready and how to use it. For programs: one line of JSON."""
    models = () if config.no_engine else config.base_models
    if as_json:
        import json

        about = {"models": models, "data_dir": str(config.data_dir), "pid": background_pid or os.getpid()}
        ready = {"url": url, **about, "needs_key": needs_key}
        print(json.dumps(ready), flush=True)
        return
    # An address that a client on this machine can use: 0.0.0.0 and :: are for listening only.
    near = url.replace("://0.0.0.0", "://127.0.0.1").replace("://[::]", "://[::1]")
    what = f"serves {', '.join(models)}" if models else "hands requests to the nodes of its cluster"
    what += f" with {config.engines} engines" if config.engines > 1 else ""
    is_home = config.data_dir == home() and config.engines == 1 and not config.is_clustered
    # Other commands find the service of the home by themselves; its owner needs no key.
    console = "`tinkex console` opens it" if is_home else f"`tinkex console --base-url {near}` opens it"
    key = "tml-…" if needs_key else "tml-local"
    about_key = "one of your keys" if needs_key else "any key that starts with tml-"
    end = (
        "`tinkex stop` stops the service, `tinkex logs` shows its log" if background_pid else "Ctrl-C stops the service"
    )
    print(
        f"""
tinkex {what}
  at       {url}
  console  {near}/    ({console})
  data     {config.data_dir}

To use it from a client, in any terminal:
  export TINKER_BASE_URL={near} TINKER_API_KEY={key}    ({about_key})
or in Python:
  tinkex    tinkex.ServiceClient(base_url="{near}"{', api_key="tml-…"' if needs_key else ""})
  openai    openai.OpenAI(base_url="{near}/v1", api_key="{key}")

{end}; queued work continues at the next start.""",
        flush=True,
    )


def _set_up_logging(config: ServeConfig, args: argparse.Namespace) -> None:
    import logging

    level = "debug" if args.debug else config.log_level
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # Our own loggers at the chosen level, other libraries only from WARNING.
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("tinkex").setLevel(level.upper())


@contextmanager
def _in_order_at_signals() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end a service that is still starting, locks released. Its loop replaces this."""
    import signal

    def terminate(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one does not wait
        raise Terminated(0)

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    former_int, former_term = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGTERM, terminate)
    if former_int is signal.default_int_handler:  # a shell ignores it for what a script runs in the background
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former_term)
        signal.signal(signal.SIGINT, former_int)


def _stop_when_stdin_closes(within_s: float) -> threading.Event:
    """Return an event that is set when stdin has closed: the parent program has ended or wants the service to stop.

    Then there may be nobody left who could end a service that hangs.
    """
    import signal

    has_closed = threading.Event()

    def wait() -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError:
            pass  # no stdin at all: there is no parent
        has_closed.set()
        os.kill(os.getpid(), signal.SIGTERM)
        with suppress(OSError):  # its stderr may have been a pipe to that program
            output.remark("Stopping: the program that started this service has ended.")
        REAL.pause(within_s)
        os._exit(1)

    threading.Thread(target=wait, name="tinkex-parent", daemon=True).start()
    return has_closed
