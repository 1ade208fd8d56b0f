"""A link between two servers is cut or silent as a network can be; what it does is what the proofs rest on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.cluster.links import Link, Links

WITHIN_S = 5.0


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends everything back."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while piece := connection.recv(4096):
                    connection.sendall(piece)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


@pytest.fixture
def link(echo: int) -> Iterator[Link]:
    links = Links()
    yield links.add(echo)
    links.close()


def dial(link: Link) -> socket.socket:
    return socket.create_connection(("127.0.0.1", link.port), WITHIN_S)


def test_a_link_that_is_open_carries_everything(link: Link) -> None:
    content = bytes(range(256)) * 4096
    with dial(link) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        assert b"".join(iter(lambda: connection.recv(65536), b"")) == content


def test_a_cut_link_resets_what_is_open_and_what_comes(link: Link) -> None:
    with dial(link) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        link.set("cut")
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
        with pytest.raises(ConnectionResetError), dial(link) as another:  # in the middle of connecting, or right after
            another.recv(1)
    link.set("open")
    with dial(link) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"


def test_a_silent_link_delivers_later_also_what_its_sender_has_given_up(link: Link, echo: int) -> None:
    with dial(link) as connection:
        link.set("silent")
        connection.sendall(b"late")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(4)
        link.set("open")
        connection.settimeout(WITHIN_S)
        assert connection.recv(4) == b"late"
