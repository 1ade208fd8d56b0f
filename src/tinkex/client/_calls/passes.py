"""The passes of a training client: over data cut into chunks, and with a custom loss between two of them."""

from __future__ import annotations

from collections.abc import Mapping

from tinkex.client import custom_loss
from tinkex.client._calls import chunks
from tinkex.client._calls.submit import Collect, Encode
from tinkex.client._runtime.loop import in_thread
from tinkex.client._runtime.operation_queue import OperationQueue, Send, Turn, inside_custom_loss
from tinkex.client.custom_loss import CustomLossFn
from tinkex.errors import TinkexError
from tinkex.types import Datum, ForwardBackwardOutput
from tinkex.wire import endpoints, requests
from tinkex.wire.body import Body
from tinkex.wire.custom_loss import CUSTOM, LOSS_HEADER, PASS_HEADER, encode_custom_loss
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import Endpoint

_IS_CUSTOM: Mapping[str, str] = {PASS_HEADER: CUSTOM}


class TrainingPass:
    """A forward or forward_backward over data that was cut into chunks, one request each."""

    def __init__(
        self,
        endpoint: Endpoint,
        model_id: str,
        data_chunks: list[list[Datum]],
        loss_fn: str,
        config: Mapping[str, float | str] | None = None,
        notes: Mapping[str, str] | None = None,
        first_notes: Mapping[str, str] | None = None,
    ) -> None:
        """`notes` go with every request, `first_notes` with the first only."""
        self._endpoint = endpoint
        self._is_forward = endpoint is endpoints.FORWARD
        self._model_id = model_id
        self._chunks = data_chunks
        self._loss_fn = loss_fn
        self._config = config
        self._notes, self._first_notes = notes, first_notes
        self._accepted: list[Collect] = []

    async def run(self, turn: Turn) -> ForwardBackwardOutput:
        async with turn as send:
            await self.submit(send)
        return await self.collect()

    async def submit(self, send: Send) -> None:
        for chunk in self._chunks:
            try:
                size_hint = sum(map(chunks.estimate, chunk))
                notes = self._notes if self._accepted else {**(self._notes or {}), **(self._first_notes or {})}
                self._accepted.append(await send(self._endpoint, self._encoder(chunk), size_hint, len(chunk), notes))
            except Exception as error:
                raise self._with_remedy(error, len(self._accepted)) from error.__cause__

    async def collect(self) -> ForwardBackwardOutput:
        outputs: list[ForwardBackwardOutput] = []
        try:
            for collect in self._accepted:
                outputs += [await collect()]
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


async def run_custom_loss(
    turn: Turn, queue: OperationQueue, data: list[Datum], data_chunks: list[list[Datum]], loss_fn: CustomLossFn
) -> ForwardBackwardOutput:
    """A forward pass, the caller's loss on its log-probabilities, and a backward pass with the loss's gradient.

    What the caller's function returned goes with the second pass, so that the service shows it as the loss of the step.
    The turn is held until the second pass is submitted: an `optim_step` called next applies its gradient.
    """

    def evaluate() -> custom_loss.Surrogate:
        inside_custom_loss.queue = queue
        try:
            return custom_loss.surrogate(data, output, loss_fn)
        finally:
            inside_custom_loss.queue = None

    async with turn as send:
        plain = [[custom_loss.for_forward(datum) for datum in chunk] for chunk in data_chunks]
        forward = TrainingPass(endpoints.FORWARD, queue.model_id, plain, "cross_entropy", notes=_IS_CUSTOM)
        await forward.submit(send)
        output = await forward.collect()
        surrogate = await in_thread(evaluate, "tinkex-custom-loss")
        weighted = iter(surrogate.data)
        second = [[next(weighted) for _ in chunk] for chunk in data_chunks]
        told = {LOSS_HEADER: encode_custom_loss(surrogate.loss, surrogate.metrics)}
        backward = TrainingPass(
            endpoints.FORWARD_BACKWARD, queue.model_id, second, "cross_entropy", notes=_IS_CUSTOM, first_notes=told
        )
        await backward.submit(send)
    return custom_loss.with_metrics(await backward.collect(), surrogate)
