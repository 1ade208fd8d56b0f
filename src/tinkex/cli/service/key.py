"""`tinkex key`: who may use your service. Works on the database, whether a server runs or not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tinkex.cli.service.data_folder import PLACE, add_flags, config_of, new_store, open_store
from tinkex.terminal import output
from tinkex.terminal.format import age, utc_now
from tinkex.terminal.output import Column

if TYPE_CHECKING:
    import argparse

    from tinkex.cli.main import Words
    from tinkex.store.records import Key

COLUMNS = (
    Column("ID"),
    Column("NAME"),
    Column("TENANT"),
    Column("KEY"),
    Column("AGE", is_number=True),
    Column("STATE"),
)
ABOUT_KEYS = """\
A service that listens on this machine only needs no keys: whoever is here may use it. With the
first key that changes: from then on every client must send one, as TINKER_API_KEY. Keys are kept
with the service's data, as hashes; made and revoked while the service runs or while it does not."""
ABOUT_TENANTS = """\
Work belongs to a tenant: runs and checkpoints of one are not found by the others. A key's tenant
is its name unless --tenant says otherwise, so two keys of one name share their work. What was made
before there were any keys belongs to the tenant `local`. Clients send the key as TINKER_API_KEY."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


def add(words: Words, about: str) -> None:
    nouns = words.noun("key", about, "tinkex key create alice", "tinkex key list", more=ABOUT_KEYS, is_local=True)
    made = nouns.add(
        "create", create, "make a key and print it, this once", "tinkex key create alice",
        "tinkex key create alice-laptop --tenant alice", "tinkex key create me --tenant local", more=ABOUT_TENANTS,
        is_local=True,
    )  # fmt: skip
    made.add_argument("name", metavar="NAME", type=_name, help="whose key it is, for you to know it by")
    made.add_argument("--tenant", metavar="TENANT", type=_name, help="whom its work belongs to (default: NAME)")
    add_flags(made.add_argument_group("the service's data"), PLACE)
    made = nouns.add("list", list_keys, "list keys, without telling them", "tinkex key list -o json", is_local=True)
    add_flags(made.add_argument_group("the service's data"), PLACE)
    made = nouns.add(
        "revoke", revoke, "let a key open nothing any more", "tinkex key revoke k-1f0c9a3b",
        more="A running server refuses it within seconds. Work of its tenant stays.", is_local=True,
    )  # fmt: skip
    made.add_argument("id", metavar="ID", help="as `tinkex key list` shows it")
    add_flags(made.add_argument_group("the service's data"), PLACE)


def create(args: argparse.Namespace) -> int:
    import secrets

    from tinkex.clock import REAL

    with new_store(config_of(args)) as store:
        # Only now is the database library sure to be there.
        from tinkex.store.keys import hash_key, hint, new_key
        from tinkex.store.records import Key

        is_first = not store.list_keys()
        secret = new_key()
        made = Key(
            id=f"k-{secrets.token_hex(4)}",
            sha256=hash_key(secret),
            tenant=args.tenant or args.name,
            name=args.name,
            hint=hint(secret),
            created_at=REAL.wall(),
        )
        store.add_key(made)
    if args.output == "json":
        output.write_json({"key": secret, **_shown(made)})
        return 0
    print(secret)
    output.remark(f"This key ({made.id}, tenant {made.tenant}) is shown once: only its hash is kept.")
    if is_first:
        output.remark("It is the first one: from now on the service refuses clients without a key.")
    return 0


def list_keys(args: argparse.Namespace) -> int:
    import datetime as dt

    with open_store(config_of(args)) as store:
        found = store.list_keys()
    if args.output == "json":
        output.write_json({"keys": [_shown(key) for key in found]})
        return 0
    if not found:
        output.remark("No keys: on loopback everybody is let in. `tinkex key create NAME` makes one.")
        return 0
    now = utc_now()
    ages = [age(dt.datetime.fromtimestamp(key.created_at, dt.UTC), now) for key in found]
    output.write_table(
        COLUMNS,
        [
            (key.id, key.name, key.tenant, key.hint, age, "revoked" if key.revoked_at else "live")
            for key, age in zip(found, ages, strict=True)
        ],
    )
    return 0


def revoke(args: argparse.Namespace) -> int:
    from tinkex.clock import REAL
    from tinkex.errors import ValidationError

    with open_store(config_of(args)) as store:
        gone = store.revoke_key(args.id, REAL.wall())
    if gone is None:
        raise ValidationError(f"No live key has the id {args.id!r}. `tinkex key list` shows them.")
    if args.output == "json":
        output.write_json(_shown(gone))
    else:
        print(f"{gone.id} ({gone.name}, {gone.hint}) is revoked.")
    return 0


def _shown(key: Key) -> dict[str, object]:
    """What may be told of a key."""
    return {
        "id": key.id,
        "name": key.name,
        "tenant": key.tenant,
        "hint": key.hint,
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
    }


def _name(text: str) -> str:
    import argparse

    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name; use up to 64 letters, digits, dots, dashes, @ and _, the first a letter or a digit"
        )
    return text
