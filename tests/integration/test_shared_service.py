"""`tinkex.local()`: programs share one service on the home, which outlives any of them and ends after the last."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from tinkex.cli.main import main
from tinkex.errors import ConfigError
from tinkex.home.lock import holder_pid
from tinkex.home.running import SERVICE_FILE, running_service
from tinkex.home.users import user_pids
from tinkex.local_service import shared

from .processes import is_running, until_ended

pytestmark = pytest.mark.slow

TINY = "tinkex/tiny"
LINGER_S = 1.0
HEAD = f"""
import sys, time, tinkex
from tinkex.local_service import shared
shared.LINGER_S = {LINGER_S}
datum = tinkex.Datum(tinkex.ModelInput.from_ints([1, 2]), {{"target_tokens": [2, 3], "weights": [1.0, 1.0]}})
service = tinkex.local("{TINY}")
"""
TRAINS = (
    HEAD
    + """
training = service.create_lora_training_client("tinkex/tiny", rank=4)
while True:
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(tinkex.AdamParams(learning_rate=0.01)).result()
    print(service.pid, flush=True)
"""
)
SAVES = (
    HEAD
    + """
path = service.create_lora_training_client("tinkex/tiny", rank=4).save_state("harbour").result().path
print(service.pid, path, flush=True)
"""
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The home of these tests. No service is left running on it."""
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKEX_DATA_DIR", str(folder / "home"))
        patch.setenv("TINKEX_CACHE_DIR", str(folder / "cache"))
        patch.setenv("TINKEX_THREADS", "1")
        patch.setenv("TINKEX_PROXY", "http://127.0.0.1:9")
        for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
            patch.delenv(name, raising=False)
        patch.setattr(shared, "LINGER_S", LINGER_S)
        yield folder / "home"
        assert main(["stop"]) == 0


def program(text: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None and process.stderr is not None
    return process.stdout.readline() or process.stderr.read()


def losses(service: tinkex.ServiceClient, steps: int) -> Iterator[float]:
    training = service.create_lora_training_client(TINY, rank=4, seed=7)
    datum = tinkex.Datum(tinkex.ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8], "weights": [1.0] * 3})
    for _ in range(steps):
        passed = training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(tinkex.AdamParams(learning_rate=0.01)).result()
        yield passed.metrics["loss:sum"]


def test_kill_9_of_the_starter_leaves_the_other_program_training_bit_equal(home: Path) -> None:
    starter = program(TRAINS)
    assert line_of(starter).strip().isdigit()
    with tinkex.local(TINY) as service:
        beside = []
        for step, loss in enumerate(losses(service, 8)):
            beside.append(loss)
            if step == 2:
                starter.kill()  # SIGKILL, in the middle of its own training
                starter.communicate()
        assert is_running(service.pid)
        assert user_pids(home) == [os.getpid()], "a program that was killed is no user"
        assert list(losses(service, 8)) == beside
    assert until_ended(service.pid), "it ends by itself after its last user"
    assert not (home / SERVICE_FILE).exists() and holder_pid(home) is None


def test_two_programs_at_once_start_one_service_and_what_they_saved_is_there_the_next_time(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [program(SAVES), program(SAVES)]
    said = [one.communicate(timeout=120) for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    pids, paths = zip(*(out.split() for out, _ in said), strict=True)
    assert pids[0] == pids[1]
    assert until_ended(int(pids[0]))

    with tinkex.local(TINY) as service:
        assert service.pid != int(pids[0])
        kept = service.create_rest_client().list_user_checkpoints().result().checkpoints
        assert set(paths) <= {saved.tinker_path for saved in kept}
        assert service.create_training_client_from_state(paths[0]).get_info().lora_rank == 4
        # Every command finds the service, without any setting.
        capsys.readouterr()
        assert main(["run", "list", "-o", "json"]) == 0
        assert paths[0].split("/")[2] in capsys.readouterr().out
        assert main(["doctor"]) == 0
        assert service.base_url in capsys.readouterr().out
        assert main(["console", "--no-browser"]) == 0
        assert capsys.readouterr().out == f"{service.base_url}/\n"
        assert main(["ps", "-o", "json"]) == 0
        shown = json.loads(capsys.readouterr().out)["services"][0]
        assert (shown["pid"], shown["users"]) == (service.pid, [os.getpid()])
        # Its key is the owner's, and is asked for.
        stranger = tinkex.ServiceClient(base_url=service.base_url, proxy="")
        with pytest.raises(tinkex.AuthenticationError, match="No API key"):
            stranger.get_server_capabilities()
        assert service.api_key not in Path(f"/proc/{service.pid}/cmdline").read_text()
        for name in (SERVICE_FILE, "private.key", "service.log"):
            assert (home / name).stat().st_mode & 0o077 == 0, name
        # Not stopped under a program that uses it.
        assert main(["stop"]) == 1
        assert f"pid {os.getpid()}" in capsys.readouterr().err


def test_what_does_not_fit_the_running_service_is_one_clear_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tinkex.local(TINY) as service:
        with tinkex.local(TINY, threads=1) as same:
            assert same.pid == service.pid
        with pytest.raises(ConfigError, match=r"runs with threads=1, not with threads=2\. Stop it with `tinkex stop`"):
            tinkex.local(TINY, threads=2)
        with pytest.raises(ConfigError, match=r"offers tinkex/tiny, and not ./other"):
            tinkex.local("./other")
        with pytest.raises(ConfigError, match=r"No API key.*tinkex\.local\(\) joins it"):
            tinkex.ServiceClient()
        monkeypatch.setattr(shared, "__version__", "0.0.1")
        with pytest.raises(ConfigError, match=r"is tinkex .*, and this program has 0\.0\.1\..*tinkex stop"):
            tinkex.local(TINY)
        assert user_pids(home) == [os.getpid()], "a program that could not join is no user"


def test_a_service_that_was_killed_is_replaced_and_its_file_misleads_nobody(home: Path) -> None:
    killed = tinkex.local(TINY)
    os.kill(killed.pid, signal.SIGKILL)
    assert until_ended(killed.pid)
    assert (home / SERVICE_FILE).exists() and running_service(home) is None

    async def join() -> int:
        async with tinkex.local(TINY) as service:
            assert (await service.get_server_capabilities_async()).supported_models
            return service.pid

    assert asyncio.run(join()) != killed.pid
    killed.close().exception()


def test_chat_starts_a_service_for_the_model_and_leaves_it(home: Path) -> None:
    command = [sys.executable, "-c", f"{HEAD.split('datum')[0]}from tinkex.cli.main import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "chat", TINY, "--max-tokens", "4"], input="Who?", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or done.stdout == "\n"


def test_serve_in_the_background_stays_until_it_is_stopped(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "--force"]) == 0
    capsys.readouterr()
    assert main(["-o", "json", "serve", "--background", TINY, "--port", "0"]) == 0
    ready = json.loads(capsys.readouterr().out)
    assert is_running(ready["pid"])
    assert main(["serve", "--background", TINY]) == 1
    assert f"pid {ready['pid']}" in capsys.readouterr().err
    assert main(["logs", "-n", "5"]) == 0
    assert ready["url"] in capsys.readouterr().out
    with tinkex.local(TINY) as service:
        assert service.pid == ready["pid"]
    assert main(["stop"]) == 0
    assert str(ready["pid"]) in capsys.readouterr().out
    assert not is_running(ready["pid"])
