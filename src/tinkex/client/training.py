"""`TrainingClient`: forward, forward_backward, optim_step, save and load, in the order they were called.

Every verb returns an `APIFuture` at once; submit the next step before waiting for the last one, and the service is
never idle. The `_async` names are one-line twins: `await client.optim_step_async(...)` gives the future.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinkex.client import custom_loss
from tinkex.client._calls import chunks, validate
from tinkex.client._calls.chunks import estimate
from tinkex.client._runtime.base_client import Handle, warn_of_retry_config
from tinkex.client._runtime.lane import Lane, Turn, inside_custom_loss
from tinkex.client._runtime.operation import NO_METRICS, NO_USAGE
from tinkex.client._runtime.session import Session
from tinkex.client._runtime.worker_threads import in_thread
from tinkex.client.custom_loss import CustomLossFn
from tinkex.client.future import APIFuture
from tinkex.errors import TinkexError, ValidationError
from tinkex.events import Usage, counts_usage
from tinkex.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsResponse,
    OptimParams,
    OptimStepResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    UnloadModelResponse,
)
from tinkex.wire import endpoints, requests
from tinkex.wire.body import Body
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import Endpoint

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient


class TrainingClient(Handle):
    """Trains one adapter. Made by `ServiceClient.create_lora_training_client` and its relatives."""

    def __init__(self, session: Session, model_id: str, *, base_model: str | None = None, next_seq_id: int = 1) -> None:
        super().__init__(session)
        self.model_id = model_id
        self.base_model = base_model
        self._lane = Lane(session, model_id, next_seq_id, self._observer())

    # -- passes -----------------------------------------------------------------------------------------------------

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss and each target's log-probability; no gradient."""
        return self._pass("forward", endpoints.FORWARD, data, loss_fn, loss_fn_config)

    async def forward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward(data, loss_fn, loss_fn_config)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss and add its gradient to what `optim_step` will apply. Losses are sums, not means.

        >>> training = service.create_lora_training_client("Qwen/Qwen3-8B")
        >>> datum = tinkex.Datum(tinkex.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0, 1]})
        >>> result = training.forward_backward([datum], "cross_entropy").result()
        >>> len(result.loss_fn_outputs[0]["logprobs"])
        2
        """
        return self._pass("forward_backward", endpoints.FORWARD_BACKWARD, data, loss_fn, loss_fn_config)

    async def forward_backward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward(data, loss_fn, loss_fn_config)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLossFn, *, loss_type_input: str | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """A loss of your own, written in torch: two passes, with `loss_fn` run in a worker thread between them.

        The queue of this client waits for it, so an `optim_step` called next applies its gradient. Metrics are those
        of the second pass (its `loss:sum` as `surrogate_loss:sum`) and the function's own.
        """
        if loss_type_input not in (None, "logprobs"):
            raise ValidationError(f"loss_type_input={loss_type_input!r}: only 'logprobs' is offered.")
        if not callable(loss_fn):
            raise ValidationError(f"forward_backward_custom takes a function, got {type(loss_fn).__name__}.")
        kept = validate.check_data(data, None)
        chunks = self._split(kept)
        usage = self._usage(kept, trains=True, prefills=True)
        program = self._custom(kept, chunks, loss_fn)
        return self._lane.submit("forward_backward_custom", program, 2 * len(chunks), usage=usage)

    async def forward_backward_custom_async(
        self, data: Sequence[Datum], loss_fn: CustomLossFn, *, loss_type_input: str | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward_custom(data, loss_fn, loss_type_input=loss_type_input)

    def optim_step(
        self, optim_params: OptimParams | Mapping[str, Any] | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        """Apply the gathered gradients, then clear them.

        >>> training = service.create_lora_training_client("Qwen/Qwen3-8B")
        >>> step = training.optim_step(tinkex.AdamParams(learning_rate=1e-4))
        >>> step.result()
        OptimStepResponse(metrics=...)
        """
        if optim_params is not None and adam_params is not None:
            raise ValidationError("optim_step takes optim_params or adam_params, not both.")
        given = adam_params if optim_params is None else optim_params
        if given is None:
            raise ValidationError("optim_step needs its parameters, for example AdamParams(learning_rate=1e-4).")
        params = validate.check_adam(given)
        rate: float | None = getattr(params, "learning_rate", None)  # an optimizer of the future may have none
        return self._single(
            "optim_step",
            endpoints.OPTIM_STEP,
            lambda seq, dialect: requests.optim_step(self.model_id, seq, params, dialect=dialect),
            metrics=NO_METRICS if rate is None else {"learning_rate": rate},
        )

    async def optim_step_async(
        self, optim_params: OptimParams | Mapping[str, Any] | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        return self.optim_step(optim_params, adam_params=adam_params)

    # -- weights ----------------------------------------------------------------------------------------------------

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Save weights and optimizer under a name, to go on from later. `ttl_seconds=None` keeps it."""
        validate.check_name(name)
        validate.check_ttl(ttl_seconds)
        validate.check_metadata(user_metadata)
        return self._single(
            "save_state",
            endpoints.SAVE_WEIGHTS,
            lambda seq, dialect: requests.save_weights(
                self.model_id,
                seq,
                name,
                ttl_seconds,
                overwrite,
                user_metadata,
                dialect=dialect,
            ),
        )

    async def save_state_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        future = self.save_state(name, ttl_seconds, overwrite, user_metadata)
        await asyncio.sleep(0)  # callers that save in a background task count on a turn of the loop here
        return future

    def load_state(self, path: str, weights_access_token: str | None = None) -> APIFuture[LoadWeightsResponse]:
        """Load weights only. The optimizer's state is not loaded; our own service leaves it as it is."""
        return self._load(path, optimizer=False, weights_access_token=weights_access_token)

    async def load_state_async(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        return self.load_state(path, weights_access_token)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Load weights and the optimizer's state."""
        return self._load(path, optimizer=True, weights_access_token=weights_access_token)

    async def load_state_with_optimizer_async(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        return self.load_state_with_optimizer(path, weights_access_token)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Save weights for sampling under a name; `.path` goes to `create_sampling_client`."""
        validate.check_name(name)
        validate.check_ttl(ttl_seconds)
        validate.check_metadata(user_metadata)

        def encode(seq: int, dialect: Dialect) -> Body:
            return requests.save_weights_for_sampler(
                self.model_id, seq, name, ttl_seconds=ttl_seconds, user_metadata=user_metadata, dialect=dialect
            )

        def read(answer: Any) -> SaveWeightsForSamplerResponse:
            if answer.path is None:
                raise TinkexError(f"The service saved {name!r} for sampling but named no path.")
            return SaveWeightsForSamplerResponse(path=answer.path)

        return self._single("save_weights_for_sampler", endpoints.SAVE_WEIGHTS_FOR_SAMPLER, encode, read)

    async def save_weights_for_sampler_async(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        future = self.save_weights_for_sampler(name, ttl_seconds, user_metadata)
        await asyncio.sleep(0)  # as in save_state_async
        return future

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: list[str] | None = None
    ) -> APIFuture[SaveWeightsExternalResponse]:
        """Save weights as files for download (`RestClient.get_external_weights_urls`)."""
        validate.check_name(name)
        validate.check_ttl(ttl_seconds)
        return self._single(
            "save_weights_external",
            endpoints.SAVE_WEIGHTS_EXTERNAL,
            lambda seq, dialect: requests.save_weights_external(
                self.model_id, seq, name, ttl_seconds, age_encryption_recipients
            ),
        )

    async def save_weights_external_async(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: list[str] | None = None
    ) -> APIFuture[SaveWeightsExternalResponse]:
        return self.save_weights_external(name, ttl_seconds, age_encryption_recipients)

    # -- sampling ---------------------------------------------------------------------------------------------------

    def save_weights_and_get_sampling_client(
        self, name: str | None = None, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """A sampler of the weights as they are after everything called so far. Ephemeral: it ends with the session."""
        warn_of_retry_config(retry_config)
        return self._ephemeral(name, record_stability_info).result()

    async def save_weights_and_get_sampling_client_async(
        self, name: str | None = None, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        warn_of_retry_config(retry_config)
        return await self._ephemeral(name, record_stability_info)

    def save_weights_and_get_sampling_client_submit(self, retry_config: Any = None) -> APIFuture[SamplingClient]:
        """The same without waiting, as programs for 0.4.1 call it."""
        warn_of_retry_config(retry_config)
        return self._ephemeral(None, False)

    def create_sampling_client(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """A sampler of weights saved with `save_weights_for_sampler`."""
        warn_of_retry_config(retry_config)
        from tinkex.client.sampling import create_sampling_client

        return create_sampling_client(
            self._session, model_path=model_path, record_stability_info=record_stability_info
        ).result()

    async def create_sampling_client_async(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        warn_of_retry_config(retry_config)
        from tinkex.client.sampling import create_sampling_client

        return await create_sampling_client(
            self._session, model_path=model_path, record_stability_info=record_stability_info
        )

    def unload_model(self) -> APIFuture[UnloadModelResponse]:
        """Let the service free this adapter now, after everything called so far. What was saved stays."""
        return self._single(
            "unload_model",
            endpoints.UNLOAD_MODEL,
            lambda seq, dialect: requests.unload_model(self.model_id, dialect=dialect),
        )

    # -- about the model --------------------------------------------------------------------------------------------

    def get_info(self) -> GetInfoResponse:
        """Name, architecture and tokenizer of the model being trained."""
        return self._info().result()

    async def get_info_async(self) -> GetInfoResponse:
        return await self._info()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer: transformers' own where that is installed, else the light `tokenizers` one."""
        from tinkex.client._files.tokenizer_files import tokenizer_of_model

        return tokenizer_of_model(self._session, self.get_info())

    def get_console_url(self) -> str:
        return f"{self._console()}/training_runs/{self.model_id}"

    # -- private ----------------------------------------------------------------------------------------------------

    def _split(self, data: list[Datum]) -> list[list[Datum]]:
        connection = self._session.connect()
        if connection.dialect is Dialect.JSON:
            return chunks.split(data, *chunks.JSON_LIMITS)
        server = connection.server
        return chunks.split(data, server.fwdbwd_max_chunk_len, server.fwdbwd_max_chunk_bytes_count)

    def _pass(
        self,
        kind: str,
        endpoint: Endpoint,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
    ) -> APIFuture[ForwardBackwardOutput]:
        kept = validate.check_data(data, loss_fn)
        chunks = self._split(kept)
        config = validate.check_loss_config(loss_fn_config, loss_fn)

        async def program(turn: Turn) -> Coroutine[Any, Any, ForwardBackwardOutput]:
            waits = await _send_chunks(turn, endpoint, self.model_id, chunks, loss_fn, config)
            return _joined(waits, endpoint is endpoints.FORWARD)

        is_forward = endpoint is endpoints.FORWARD
        usage = self._usage(kept, trains=not is_forward, prefills=is_forward)
        return self._lane.submit(kind, program, len(chunks), usage=usage)

    def _usage(self, data: list[Datum], *, trains: bool, prefills: bool) -> Usage:
        if not counts_usage():
            return NO_USAGE
        tokens = sum(validate.input_length(datum.model_input) or 0 for datum in data)
        return Usage(tokens * trains, tokens * prefills, base_model=self.base_model or "")

    def _custom(
        self, data: list[Datum], chunks: list[list[Datum]], loss_fn: CustomLossFn
    ) -> Callable[[Turn], Coroutine[Any, Any, Coroutine[Any, Any, ForwardBackwardOutput]]]:
        def evaluate(output: ForwardBackwardOutput) -> custom_loss.Surrogate:
            inside_custom_loss.lane = self._lane
            try:
                return custom_loss.surrogate(data, output, loss_fn)
            finally:
                inside_custom_loss.lane = None

        async def program(turn: Turn) -> Coroutine[Any, Any, ForwardBackwardOutput]:
            plain = [[custom_loss.for_forward(datum) for datum in chunk] for chunk in chunks]
            waits = await _send_chunks(turn, endpoints.FORWARD, self.model_id, plain, "cross_entropy", None)
            output = await _joined(waits, True)
            found = await in_thread(lambda: evaluate(output), "tinkex-custom-loss")
            position = 0
            second = []
            for chunk in chunks:
                second.append(found.data[position : position + len(chunk)])
                position += len(chunk)
            waits = await _send_chunks(turn, endpoints.FORWARD_BACKWARD, self.model_id, second, "cross_entropy", None)
            return _finished_custom(waits, found)

        return program

    def _single(
        self,
        kind: str,
        endpoint: Endpoint,
        encode: Callable[[int, Dialect], Body],
        read: Callable[[Any], Any] | None = None,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> APIFuture[Any]:
        async def program(turn: Turn) -> Coroutine[Any, Any, Any]:
            wait = await turn.send(endpoint, encode)
            return wait if read is None else _then(wait, read)

        return self._lane.submit(kind, program, metrics=metrics)

    def _load(self, path: str, *, optimizer: bool, weights_access_token: str | None) -> APIFuture[LoadWeightsResponse]:
        validate.check_state_path(path)
        return self._single(
            "load_state",
            endpoints.LOAD_WEIGHTS,
            # An old service knows no `optimizer`: it is told only what it could not guess.
            lambda seq, dialect: requests.load_weights(
                self.model_id, seq, path, optimizer or None, weights_access_token, dialect=dialect
            ),
        )

    def _ephemeral(self, name: str | None, record_stability_info: bool) -> APIFuture[SamplingClient]:
        from tinkex.client.sampling import SamplingClient

        if name is not None:
            warnings.warn(
                f"save_weights_and_get_sampling_client(name={name!r}) saves nothing under that name: the sampler is "
                "ephemeral. To keep the weights use save_weights_for_sampler(name).",
                DeprecationWarning,
                stacklevel=3,
            )
        # One number for all attempts: a retry must find the same sampler, not make another.
        sampling_seq = self._session.next_sampling_seq()

        def encode(seq: int, dialect: Dialect) -> Body:
            return requests.save_weights_for_sampler(self.model_id, seq, None, sampling_seq, dialect=dialect)

        def read(answer: Any) -> SamplingClient:
            if answer.sampling_session_id is None:
                raise TinkexError("The service saved the weights but gave no sampler for them.")
            return SamplingClient(
                self._session,
                answer.sampling_session_id,
                base_model=self.base_model,
                record_stability_info=record_stability_info,
            )

        return self._single("save_weights_and_get_sampling_client", endpoints.SAVE_WEIGHTS_FOR_SAMPLER, encode, read)

    def _info(self) -> APIFuture[GetInfoResponse]:
        return self._ask(endpoints.GET_INFO, lambda dialect: requests.get_info(self.model_id, dialect=dialect))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (*self._pickled(), self.model_id, self.base_model, self._lane.next_seq_id)

    def __repr__(self) -> str:
        return f"<TrainingClient {self.model_id}>"


def _unpickle(
    place: dict[str, Any], session_id: str | None, model_id: str, base_model: str | None, next_seq_id: int
) -> TrainingClient:
    session = Handle._session_from(place, session_id)
    return TrainingClient(session, model_id, base_model=base_model, next_seq_id=next_seq_id)


async def _send_chunks(
    turn: Turn,
    endpoint: Endpoint,
    model_id: str,
    chunks: list[list[Datum]],
    loss_fn: str,
    config: Mapping[str, float | str] | None,
) -> list[Coroutine[Any, Any, Any]]:
    """Submit chunk after chunk, each after the one before was accepted; returns the waits for their results."""
    is_forward = endpoint is endpoints.FORWARD
    waits: list[Coroutine[Any, Any, Any]] = []
    for chunk in chunks:

        def encode(seq: int, dialect: Dialect, chunk: list[Datum] = chunk) -> Body:
            return requests.forward_backward(model_id, seq, chunk, loss_fn, config, is_forward, dialect=dialect)

        try:
            waits.append(await turn.send(endpoint, encode, sum(map(estimate, chunk))))
        except BaseException as problem:
            for wait in waits:
                wait.close()
            if not isinstance(problem, Exception):
                raise
            raise _partly_applied(problem, len(waits), len(chunks), is_forward) from problem.__cause__
    return waits


async def _joined(waits: list[Coroutine[Any, Any, Any]], is_forward: bool) -> ForwardBackwardOutput:
    outputs: list[ForwardBackwardOutput] = []
    try:
        for wait in waits:
            outputs += [await wait]
    except Exception as problem:
        raise _partly_applied(problem, len(outputs), len(waits), is_forward) from None
    finally:
        for wait in waits[len(outputs) :]:
            wait.close()
    return chunks.join(outputs)


async def _finished_custom(
    waits: list[Coroutine[Any, Any, Any]], found: custom_loss.Surrogate
) -> ForwardBackwardOutput:
    return custom_loss.with_metrics(await _joined(waits, False), found)


async def _then(wait: Coroutine[Any, Any, Any], read: Callable[[Any], Any]) -> Any:
    return read(await wait)


def _partly_applied(problem: Exception, applied: int, chunks: int, is_forward: bool) -> Exception:
    """Say which chunks of a call went through, and how to be rid of their gradient."""
    if chunks > 1 and not is_forward and isinstance(problem, TinkexError):
        remedy = (
            f" This call was sent as {chunks} chunks; chunk {applied + 1} failed"
            + (f", the {applied} before it were accepted and their gradient counts" if applied else ", none before it")
            + ". To discard that gradient, load the last saved state, or call optim_step with learning_rate=0."
        )
        problem.args = (f"{problem.args[0] if problem.args else problem}{remedy}", *problem.args[1:])
    return problem
