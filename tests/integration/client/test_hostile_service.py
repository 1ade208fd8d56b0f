"""A hostile or broken service: whatever it sends, the caller gets an error of ours, in time and in little memory."""

from __future__ import annotations

import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zstandard

import tinkex
from tinkex.client._calls.decode import INLINE_BYTES
from tinkex.client._runtime import loop
from tinkex.errors import APIError, APIResponseValidationError, DeadlineExceeded, TinkexError
from tinkex.testing import Answer, ScriptedService
from tinkex.wire import json_codec
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.body import PROTOBUF, decompress

from .conftest import MODEL, datum, prompt

Connect = Callable[..., tinkex.ServiceClient]
MIB = 1 << 20
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
PARAMS = tinkex.SamplingParams(max_tokens=4)


@contextmanager
def raw_service(respond: Callable[[], Iterable[bytes]]) -> Iterator[str]:
    """Answer every request with these pieces, then be silent until the client closes the connection."""

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                received = b""
                while b"\r\n\r\n" not in received:
                    if not (data := connection.recv(1 << 16)):
                        return
                    received += data
                for piece in respond():
                    connection.sendall(piece)
                while connection.recv(1 << 16):
                    pass
            except OSError:
                pass  # the client has had enough

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def ask(url: str, **options: Any) -> Exception:
    """What a caller gets whose client takes responses of 1 MiB."""
    settings = {"max_response_bytes": MIB, "deadline_s": 5.0, "telemetry": False, **options}
    client = tinkex.ServiceClient(base_url=url, api_key="tml-hostile", **settings)
    with pytest.raises(TinkexError) as caught:
        client.get_server_capabilities()
    return caught.value


def test_an_endless_body_is_rejected_at_the_limit_and_not_at_the_deadline() -> None:
    with raw_service(lambda: [OK + b"connection: close\r\n\r\n", *([b"x" * 65536] * 128)]) as url:
        error = ask(url)
    assert isinstance(error, APIResponseValidationError) and not error.retryable
    assert "1,048,576 bytes" in str(error) and "max_response_bytes" in str(error)


def test_a_body_that_is_announced_too_large_is_not_waited_for() -> None:
    with raw_service(lambda: [OK + b"content-length: 1099511627776\r\n\r\n"]) as url:
        assert "1099511627776 bytes" in str(ask(url))


def test_endless_headers_are_rejected() -> None:
    with raw_service(lambda: [b"HTTP/1.1 200 OK\r\nx-long: ", *([b"x" * 65536] * 32)]) as url:
        assert "headers have more than" in str(ask(url))


def test_endless_trailers_are_rejected() -> None:
    start = OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-long: "
    with raw_service(lambda: [start, *([b"x" * 65536] * 32)]) as url:
        assert "headers have more than" in str(ask(url))


def test_many_headers_are_rejected() -> None:
    with raw_service(lambda: [b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 5000]) as url:
        assert "more than 256 headers" in str(ask(url))


def test_a_compressed_answer_that_unfolds_without_end_is_rejected_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_loop: list[bool] = []

    def watched(*arguments: Any) -> bytes:
        on_loop.append(loop.on_own_loop())
        return decompress(*arguments)

    monkeypatch.setattr("tinkex.client._http.transport.decompress", watched)
    for name, content in (
        (b"zstd", zstandard.ZstdCompressor().compress(bytes(16 * MIB))),
        (b"gzip", zlib.compress(bytes(16 * MIB), wbits=31)),
    ):
        head = OK + b"content-encoding: %b\r\ncontent-length: %d\r\n\r\n" % (name, len(content))
        with raw_service([head, content].copy) as url:
            assert "unfolds to more than" in str(ask(url))
    assert on_loop == [False, False]


def test_a_deadline_is_kept_while_a_body_drips() -> None:
    stop = threading.Event()

    def drip() -> Iterator[bytes]:
        yield OK + b"content-length: 100000\r\n\r\n"
        while not stop.wait(0.02):
            yield b" "

    with raw_service(drip) as url:
        error = ask(url, deadline_s=0.5)
        stop.set()
    assert isinstance(error, DeadlineExceeded)


def test_a_large_error_page_is_shown_by_its_beginning() -> None:
    page = b"<html>" + b"x" * 900_000
    head = b"HTTP/1.1 400 Bad\r\ncontent-type: text/html\r\ncontent-length: %d\r\n\r\n" % len(page)
    with raw_service(lambda: [head, page]) as url:
        assert len(str(ask(url))) < 1000


# -- streams ----------------------------------------------------------------------------------------------------------


def stream_error(service: ScriptedService, connect: Connect, body: bytes, max_response_bytes: int = MIB) -> Exception:
    sampler = connect(service, max_response_bytes=max_response_bytes, deadline_s=10.0).create_sampling_client(
        base_model=MODEL
    )
    service.script.on("sample_stream", do=Answer(body, "text/event-stream"))
    with pytest.raises(TinkexError) as caught:
        list(sampler.stream(prompt(), PARAMS))
    return caught.value


@pytest.mark.parametrize("failure", ["[1, 2]", "7", '"no"', "null", "{", "[" * 2000, "NaN" + "[" * 2000])
def test_an_error_event_that_is_no_object_is_a_clean_error(
    proto_service: ScriptedService, connect: Connect, failure: str
) -> None:
    error = stream_error(proto_service, connect, f"event: error\ndata: {failure}\n\n".encode())
    assert isinstance(error, APIError)


def test_an_event_without_end_is_rejected(proto_service: ScriptedService, connect: Connect) -> None:
    for body in (b"data: " + b"x" * 2 * MIB, b"data: x\n" * 300_000):
        error = stream_error(proto_service, connect, body)
        assert isinstance(error, APIResponseValidationError) and "1,048,576 bytes" in str(error)


def test_a_stream_without_end_is_rejected(proto_service: ScriptedService, connect: Connect) -> None:
    error = stream_error(proto_service, connect, b": nothing\n\n" * 200_000)
    assert "stream has more than 1,048,576 bytes" in str(error)


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ('{"index": 0, "tokens": [1, 2, 3, 4, 5, 6]}', "more tokens than"),
        ('{"index": 7, "tokens": [1]}', "tokens of sample 7"),
        ('{"index": -1, "tokens": [1]}', "tokens of sample -1"),
        ('{"index": 0, "tokens": "text"}', "brought no tokens"),
        ('{"index": 0, "tokens": [{}]}', "brought no tokens"),
        ('{"index": 0, "tokens": [1], "logprobs": ["x"]}', "brought no tokens"),
        ("[]", "brought no tokens"),
    ],
)
def test_tokens_that_were_not_asked_for_are_rejected(
    proto_service: ScriptedService, connect: Connect, token: str, reason: str
) -> None:
    error = stream_error(proto_service, connect, f"event: token\ndata: {token}\n\n".encode())
    assert isinstance(error, APIResponseValidationError) and reason in str(error)


def test_a_large_event_with_tokens_is_rejected_by_its_size(proto_service: ScriptedService, connect: Connect) -> None:
    token = b'{"index": 0, "tokens": [' + b"1," * 600_000 + b"1]}"
    error = stream_error(proto_service, connect, b"event: token\ndata: " + token + b"\n\n", max_response_bytes=8 * MIB)
    assert isinstance(error, APIResponseValidationError) and "event of 1,2" in str(error)


@pytest.mark.parametrize("size", [400_000, 4_500_000])
@pytest.mark.parametrize("endpoint", ["sample_stream", "asample", "forward_backward"])
def test_a_large_acceptance_or_event_does_not_stop_the_loop(
    proto_service: ScriptedService, connect: Connect, monkeypatch: pytest.MonkeyPatch, endpoint: str, size: int
) -> None:
    """Before: 4.5 MB of `[],` were decoded on the loop, which stood still for 0.54 s."""
    on_loop: list[int] = []
    decode = json_codec.decode_bounded

    def watched(content: bytes) -> Any:
        if len(content) > INLINE_BYTES and loop.on_own_loop():
            on_loop.append(len(content))
        return decode(content)

    monkeypatch.setattr(json_codec, "decode_bounded", watched)
    lists = b'{"x": [' + b"[]," * (size // 3) + b"[]]}"
    client = connect(proto_service, deadline_s=10.0)
    answer = Answer(b"event: token\ndata: " + lists + b"\n\n", "text/event-stream")
    proto_service.script.on(endpoint, do=answer if endpoint == "sample_stream" else Answer(lists))
    with pytest.raises(APIResponseValidationError):
        CALLS[endpoint](client)
    assert on_loop == []


# -- results ----------------------------------------------------------------------------------------------------------


def result_error(service: ScriptedService, connect: Connect, answer: Answer, *, is_sample: bool = False) -> Exception:
    client = connect(service, deadline_s=10.0)
    if is_sample:
        sampler = client.create_sampling_client(base_model=MODEL)
        service.script.on("retrieve_future", do=answer)
        future: Any = sampler.sample(prompt(), 2, PARAMS)
    else:
        training = client.create_lora_training_client(MODEL, rank=8)
        service.script.on("retrieve_future", do=answer)
        future = training.forward_backward([datum(), datum()], "cross_entropy")
    error = future.exception(20)
    assert isinstance(error, APIResponseValidationError), error
    return error


@pytest.mark.parametrize("count", [1_000_000, 1 << 40])
def test_25_bytes_that_claim_a_million_datums_do_not_eat_the_memory(
    proto_service: ScriptedService, connect: Connect, count: int
) -> None:
    record = pb.ArrayRecord(num_datums=count)
    content = pb.ForwardBackwardOutput(loss_fn_outputs=[record]).SerializeToString()
    assert len(content) < 25
    error = result_error(proto_service, connect, Answer(content, PROTOBUF))
    assert f"{count} outputs for 2 datums" in str(error)


def test_outputs_that_were_not_asked_for_are_rejected(proto_service: ScriptedService, connect: Connect) -> None:
    field = pb.BatchedTensor(offsets=bytes(8 * 500_000), dtype=pb.DTYPE_FLOAT32)
    content = pb.ForwardBackwardOutput(loss_fn_outputs=[pb.ArrayRecord(fields={"x": field})]).SerializeToString()
    assert "more than 2 entries" in str(result_error(proto_service, connect, Answer(content, PROTOBUF)))


def test_empty_records_are_counted_before_they_are_made(proto_service: ScriptedService, connect: Connect) -> None:
    kind = pb.ForwardBackwardOutput
    for count, reason in ((100_000, "100000 records for 2 datums"), (600_000, "more than 16,896 elements")):
        content = bytes((kind.LOSS_FN_OUTPUTS_FIELD_NUMBER << 3 | 2, 0)) * count
        assert reason in str(result_error(proto_service, connect, Answer(content, PROTOBUF)))
        proto_service.script.clear()


def test_a_thousand_outputs_for_a_datum_are_rejected(proto_service: ScriptedService, connect: Connect) -> None:
    record = pb.ArrayRecord(num_datums=1, fields={f"{n}": pb.BatchedTensor() for n in range(1000)})
    content = pb.ForwardBackwardOutput(loss_fn_outputs=[record]).SerializeToString()
    assert "1000 outputs for each datum" in str(result_error(proto_service, connect, Answer(content, PROTOBUF)))


def test_more_samples_than_asked_for_are_rejected(
    service: ScriptedService, connect: Connect, request: pytest.FixtureRequest
) -> None:
    if "proto" in request.node.name:
        answer = Answer(pb.SampleResponse(sequences=[pb.SampledSequence()] * 3).SerializeToString(), PROTOBUF)
    else:
        answer = Answer({"type": "sample", "sequences": [{"stop_reason": "stop", "tokens": [1]}] * 3})
    assert "3 sequences for 2" in str(result_error(service, connect, answer, is_sample=True))


# -- every call, every kind of nonsense -------------------------------------------------------------------------------

NONSENSE = {
    "nothing": Answer(b""),
    "a list": Answer(b"[]"),
    "a number": Answer(b"1e999"),
    "a deep list": Answer(b"[" * 900 + b"]" * 900),
    "a deep object": Answer(b'{"a":' * 900 + b"1" + b"}" * 900),
    "NaN in the deep": Answer(b"[" * 100_000 + b"NaN"),
    "lone surrogates": Answer(b'{"request_id": "\\ud800", "model_id": "\\ud800", "session_id": "\\ud800", "a": NaN}'),
    "integers beyond 64 bits": Answer(
        b'{"request_id": "r", "cursor": 1%b, "client_counter": -1%b, "model_id": 1, "a": NaN}' % (b"0" * 400, b"0" * 40)
    ),
    "null for everything": Answer(
        b'{"session_id": null, "model_id": null, "request_id": null, "supported_models": null}'
    ),
    "a key twice": Answer(b'{"request_id": "a", "request_id": 5}'),
    "no UTF-8": Answer(b'{"request_id": "\xff\xfe"}'),
    "protobuf": Answer(b"\x0a\x05abc", PROTOBUF),
    "a page": Answer(b"<html>hello</html>", "text/html"),
    "an unknown encoding": Answer(b"{}", headers={"content-encoding": "br"}),
    "a deep error": Answer(b"[" * 900 + b"]" * 900, status=400),
    "a redirect to nowhere": Answer(b"", status=302, headers={"location": "http://[half"}),
}
CALLS: dict[str, Callable[[tinkex.ServiceClient], Any]] = {
    "client_config": lambda client: client.get_server_capabilities(),
    "get_server_capabilities": lambda client: client.get_server_capabilities(),
    "create_session": lambda client: client.create_lora_training_client(MODEL),
    "create_model": lambda client: client.create_lora_training_client(MODEL),
    "retrieve_future": lambda client: client.create_lora_training_client(MODEL),
    "create_sampling_session": lambda client: client.create_sampling_client(base_model=MODEL),
    "asample": lambda client: client.create_sampling_client(base_model=MODEL).sample(prompt(), 1, PARAMS).result(20),
    "sample_stream": lambda client: list(client.create_sampling_client(base_model=MODEL).stream(prompt(), PARAMS)),
    "list_training_runs": lambda client: client.create_rest_client().list_training_runs().result(20),
    "forward_backward": lambda client: (
        client.create_lora_training_client(MODEL).forward_backward([datum()], "cross_entropy").result(20)
    ),
}


@pytest.mark.parametrize("endpoint", CALLS)
def test_nonsense_is_an_error_of_ours_whatever_the_call(
    proto_service: ScriptedService, connect: Connect, endpoint: str
) -> None:
    for name, answer in NONSENSE.items():
        proto_service.script.clear()
        proto_service.script.on(endpoint, do=answer)
        client = connect(proto_service, deadline_s=3.0, unreachable_s=0.2, max_retries=1)
        try:
            CALLS[endpoint](client)
        except TinkexError as error:
            assert len(str(error)) < 5000, name
        except BaseException as error:
            raise AssertionError(f"{endpoint} with {name}: {error!r}") from error
