"""Writes src/tinkex/wire/tinkex_pb2.py from tinkex.proto. Needs grpcio-tools (extra `dev`); `--check` only compares.

protoc's own Python output is tied to one release of the protobuf runtime, and its text changes with protoc. The
descriptor it makes is neither, so only that is kept; the message classes are built from it through the public API.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

SOURCES = Path(__file__).resolve().parent.parent / "src"
PROTO = SOURCES / "tinkex/wire/tinkex.proto"
TARGET = PROTO.with_name("tinkex_pb2.py")

HEAD = '''"""Made from tinkex.proto by scripts/generate_pb2.py. Do not edit."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool, message_factory

_DESCRIPTOR = (
{descriptor}
)

_FILE = descriptor_pool.Default().AddSerializedFile(_DESCRIPTOR)


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_FILE.message_types_by_name[name])


'''


def generate() -> str:
    """The text of tinkex_pb2.py."""
    file = describe()
    raw = file.SerializeToString(deterministic=True)
    lines = [f"    {raw[at : at + 64]!r}" for at in range(0, len(raw), 64)]
    text = HEAD.format(descriptor="\n".join(lines))
    text += "".join(f'{message.name} = _message("{message.name}")\n' for message in file.message_type)
    for kind in file.enum_type:
        text += "".join(f"{value.name} = {value.number}\n" for value in kind.value)
    return text


def describe() -> descriptor_pb2.FileDescriptorProto:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "descriptor"
        arguments = ["protoc", f"--proto_path={SOURCES}", f"--descriptor_set_out={out}", str(PROTO)]
        if protoc.main(arguments) != 0:
            raise SystemExit(f"protoc refused {PROTO}")
        file = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]
    for message in file.message_type:
        for entry in (message, *message.nested_type):
            for field in entry.field:
                field.ClearField("json_name")  # 2 KB that nobody reads
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=textwrap.shorten(__doc__ or "", 80))
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is out of date")
    text = generate()
    if not parser.parse_args().check:
        TARGET.write_text(text)
    elif TARGET.read_text() != text:
        sys.exit(f"{TARGET.name} does not match {PROTO.name}: run python scripts/generate_pb2.py")


if __name__ == "__main__":
    main()
