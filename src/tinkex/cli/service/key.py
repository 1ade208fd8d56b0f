"""`tinkex key`: creates, lists and revokes API keys in the service's database, whether a server is running or not."""

from __future__ import annotations

import argparse
import datetime as dt
import re
from typing import TYPE_CHECKING

from tinkex.cli.parser import CommandParser
from tinkex.cli.service.data_folder import LOCATION, add_flags, config_of, new_store, open_store
from tinkex.clock import REAL
from tinkex.errors import ValidationError
from tinkex.terminal import output
from tinkex.terminal.format import age, utc_now

if TYPE_CHECKING:
    from tinkex.store.records import KeyRecord

SHOWN = ("id", "name", "tenant", "hint", "created_at", "revoked_at")
"""The fields of a key that may be shown."""
ABOUT_KEYS = """\
A service that listens on this machine only needs no keys. Once the first key is created, every
client must send a key, as TINKER_API_KEY. Keys are stored as hashes with the service's data and can
be created and revoked whether the service is running or not."""
ABOUT_TENANTS = """\
Runs and checkpoints belong to a tenant, and other tenants cannot see them. A key's tenant is its
name, unless --tenant names another: two keys of one tenant share their work. Runs from before the
first key belong to the tenant `local`. Clients send the key as TINKER_API_KEY."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


def add(parser: CommandParser, about: str) -> None:
    group = parser.add_group("key", about, "tinkex key create alice", "tinkex key list", more=ABOUT_KEYS, is_local=True)
    creator = group.add_command(
        "create", create, "create a key and print it once", "tinkex key create alice",
        "tinkex key create alice-laptop --tenant alice", "tinkex key create me --tenant local", more=ABOUT_TENANTS,
    )  # fmt: skip
    creator.add_argument("name", metavar="NAME", type=_name, help="a name for the key, such as its owner")
    creator.add_argument(
        "--tenant", metavar="TENANT", type=_name, help="who owns the work done with the key (default: NAME)"
    )
    lister = group.add_command("list", list_keys, "list keys, without the secrets", "tinkex key list -o json")
    revoker = group.add_command(
        "revoke", revoke, "revoke a key", "tinkex key revoke k-1f0c9a3b",
        more="A running server rejects the key within seconds. The work of its tenant stays.",
    )  # fmt: skip
    revoker.add_argument("id", metavar="ID", help="id of the key (k-…), from `tinkex key list`")
    for command in (creator, lister, revoker):
        add_flags(command.add_argument_group("the service's data"), LOCATION)


def create(args: argparse.Namespace) -> None:
    import secrets

    config = config_of(args)
    with new_store(config) as store:
        # Imported here: new_store has checked that the database library is installed.
        from tinkex.store.access import hash_key, hint, new_key
        from tinkex.store.records import KeyRecord

        others = store.list_keys()
        secret = new_key()
        key = KeyRecord(
            id=f"k-{secrets.token_hex(4)}",
            sha256=hash_key(secret),
            tenant=args.tenant or args.name,
            name=args.name,
            hint=hint(secret),
            created_at=REAL.wall(),
        )
        store.add_key(key)
    if args.output == "json":
        output.write_json({"key": secret, **_shown(key)})
        return
    print(secret)
    output.remark(f"This key ({key.id}, tenant {key.tenant}) is shown only once: the service stores its hash.")
    namesakes = [other.id for other in others if other.name == key.name and other.revoked_at is None]
    if namesakes:
        output.remark(
            f"The name {key.name} has another live key already ({', '.join(namesakes)}): it works too, until you run "
            "`tinkex key revoke ID`."
        )
    if not others and not config.api_keys:
        output.remark("It is the first key: from now on the service rejects clients without a key.")


def list_keys(args: argparse.Namespace) -> None:
    config = config_of(args)
    with open_store(config) as store:
        keys = store.list_keys()
    if args.output == "json":
        output.write_json({"keys": [_shown(key) for key in keys]})
        return
    configured = len(config.api_keys)
    if configured:
        output.remark(
            f"Not listed: {configured} from the configuration (--api-key, --keys-file), which are not stored."
        )
    if not keys:
        # A service may have been started with flags that this command cannot see.
        output.remark(
            "No keys are stored. `tinkex key create NAME` creates one."
            if configured
            else "No keys are stored. Unless the service was started with --api-key or --keys-file, it accepts every "
            "client on this machine. `tinkex key create NAME` creates a key."
        )
        return
    now = utc_now()
    rows = []
    for key in keys:
        key_age = age(dt.datetime.fromtimestamp(key.created_at, dt.UTC), now)
        rows.append((key.id, key.name, key.tenant, key.hint, key_age, "revoked" if key.revoked_at else "live"))
    output.write_table(("ID", "NAME", "TENANT", "KEY", "AGE", "STATE"), rows, numbers=["AGE"])


def revoke(args: argparse.Namespace) -> None:
    with open_store(config_of(args)) as store:
        revoked = store.revoke_key(args.id, REAL.wall())
        keys = [] if revoked is not None else store.list_keys()
    if revoked is None:
        for key in keys:
            if args.id in (key.id, key.hint):
                raise ValidationError(f"The key {key.id} ({key.name}) was revoked before.")
        raise ValidationError(
            f"No key has the id {args.id!r}. Ids look like k-1f0c9a3b; `tinkex key list` shows those of all keys."
        )
    if args.output == "json":
        output.write_json(_shown(revoked))
    else:
        print(f"Revoked {revoked.id} ({revoked.name}, {revoked.hint}).")


def _shown(key: KeyRecord) -> dict[str, object]:
    return {name: getattr(key, name) for name in SHOWN}


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid name; use up to 64 letters, digits, and . - _ @, and begin with a letter or digit"
        )
    return text
