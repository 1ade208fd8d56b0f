"""Writes a fixture for the tests of upgrades: data of a service as this release writes it, kept for all later ones.

Run it once before a release, and before a change of the database: `python scripts/make_upgrade_fixture.py 0.2.0`.
A fixture is never written again: its point is that an old release made it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="the release, or the release and the version of the database: 0.1.0-db3")
    folder = parser.parse_args().version
    sys.path.insert(0, str(ROOT))
    from tests.integration.service.upgrades import FIXTURES, write_fixture

    target = FIXTURES / folder
    if target.exists():
        print(f"{target} exists. A fixture is never written again.", file=sys.stderr)
        return 1
    write_fixture(target)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(f"{target}: {size / 1000:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
