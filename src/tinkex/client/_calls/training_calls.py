"""What a training client puts into its queue: single requests, passes over chunks of data, custom losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from tinkex.client import custom_loss
from tinkex.client._calls import chunks
from tinkex.client._calls.chunks import estimate
from tinkex.client._calls.submit import AcceptedRequest, Encode
from tinkex.client._runtime.operation_queue import OperationQueue, Turn, inside_custom_loss
from tinkex.client._runtime.worker_threads import in_thread
from tinkex.client.custom_loss import CustomLossFn
from tinkex.errors import TinkexError
from tinkex.types import Datum, ForwardBackwardOutput
from tinkex.wire import endpoints, requests
from tinkex.wire.body import Body
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import Endpoint

T = TypeVar("T")
LossConfig = Mapping[str, float | str]


class SingleCall(Generic[T]):
    """One request and its result, passed through `read`."""

    request_count = 1

    def __init__(self, endpoint: Endpoint, encode: Encode, read: Callable[[Any], T] | None = None) -> None:
        self._endpoint = endpoint
        self._encode = encode
        self._read = read
        self._accepted: AcceptedRequest

    async def submit(self, turn: Turn) -> None:
        self._accepted = await turn.send(self._endpoint, self._encode)

    async def collect(self) -> T:
        result = await self._accepted.result()
        return result if self._read is None else self._read(result)


class PassCall:
    """A forward or forward_backward over data that was cut into chunks, one request each."""

    def __init__(
        self,
        endpoint: Endpoint,
        model_id: str,
        data_chunks: list[list[Datum]],
        loss_fn: str,
        config: LossConfig | None = None,
    ) -> None:
        self.request_count = len(data_chunks)
        self._endpoint = endpoint
        self._is_forward = endpoint is endpoints.FORWARD
        self._model_id = model_id
        self._chunks = data_chunks
        self._loss_fn = loss_fn
        self._config = config
        self._accepted: list[AcceptedRequest] = []

    async def submit(self, turn: Turn) -> None:
        for chunk in self._chunks:
            try:
                self._accepted.append(await turn.send(self._endpoint, self._encoder(chunk), sum(map(estimate, chunk))))
            except Exception as error:
                raise self._with_remedy(error, len(self._accepted)) from error.__cause__

    async def collect(self) -> ForwardBackwardOutput:
        outputs: list[ForwardBackwardOutput] = []
        try:
            for accepted in self._accepted:
                outputs += [await accepted.result()]
        except Exception as error:
            raise self._with_remedy(error, len(outputs)) from None
        return chunks.join(outputs)

    def _encoder(self, chunk: list[Datum]) -> Encode:
        def encode(seq_id: int, dialect: Dialect) -> Body:
            return requests.forward_backward(
                self._model_id, seq_id, chunk, self._loss_fn, self._config, self._is_forward, dialect=dialect
            )

        return encode

    def _with_remedy(self, error: Exception, applied: int) -> Exception:
        """Say which chunks of a call went through, and how to be rid of their gradient."""
        if len(self._chunks) > 1 and not self._is_forward and isinstance(error, TinkexError):
            before = f"the {applied} before it were accepted and their gradient counts" if applied else "none before it"
            remedy = (
                f" This call was sent as {len(self._chunks)} chunks; chunk {applied + 1} failed, {before}. "
                "To discard that gradient, load the last saved state, or call optim_step with learning_rate=0."
            )
            error.args = (f"{error.args[0] if error.args else error}{remedy}", *error.args[1:])
        return error


class CustomLossCall:
    """A forward pass, the caller's loss on its log-probabilities, and a backward pass with the loss's gradient.

    The turn is held until the second pass is submitted: an `optim_step` called next applies its gradient.
    """

    def __init__(
        self, queue: OperationQueue, data: list[Datum], data_chunks: list[list[Datum]], loss_fn: CustomLossFn
    ) -> None:
        self.request_count = 2 * len(data_chunks)
        self._queue = queue
        self._data = data
        self._chunks = data_chunks
        self._loss_fn = loss_fn
        self._surrogate: custom_loss.Surrogate
        self._backward: PassCall

    async def submit(self, turn: Turn) -> None:
        plain = [[custom_loss.for_forward(datum) for datum in chunk] for chunk in self._chunks]
        forward = PassCall(endpoints.FORWARD, self._queue.model_id, plain, "cross_entropy")
        await forward.submit(turn)
        output = await forward.collect()
        self._surrogate = await in_thread(lambda: self._evaluate(output), "tinkex-custom-loss")
        weighted = iter(self._surrogate.data)
        second = [[next(weighted) for _ in chunk] for chunk in self._chunks]
        self._backward = PassCall(endpoints.FORWARD_BACKWARD, self._queue.model_id, second, "cross_entropy")
        await self._backward.submit(turn)

    async def collect(self) -> ForwardBackwardOutput:
        return custom_loss.with_metrics(await self._backward.collect(), self._surrogate)

    def _evaluate(self, output: ForwardBackwardOutput) -> custom_loss.Surrogate:
        inside_custom_loss.queue = self._queue
        try:
            return custom_loss.surrogate(self._data, output, self._loss_fn)
        finally:
            inside_custom_loss.queue = None
