"""`TrainingClient`: forward, forward_backward, optim_step, save and load, in the order they were called.

Every verb returns an `APIFuture` at once; submit the next step before waiting for the last one, and the service is
never idle. The `_async` names are one-line twins: `await client.optim_step_async(...)` gives the future.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinkex.client._calls import chunks, validate
from tinkex.client._calls.passes import TrainingPass, run_custom_loss
from tinkex.client._calls.submit import Encode
from tinkex.client._files.tokenizer_files import load_tokenizer
from tinkex.client._runtime.base_client import BaseClient, warn_of_retry_config
from tinkex.client._runtime.operation import NO_METRICS, NO_USAGE
from tinkex.client._runtime.operation_queue import OperationQueue, Turn
from tinkex.client._runtime.run_log import FLUSH_S, metrics_row, sample_row
from tinkex.client._runtime.session import Session
from tinkex.client.custom_loss import CustomLossFn
from tinkex.client.future import APIFuture
from tinkex.client.sampling import SamplingClient, create_sampling_client
from tinkex.client.tokenizer import tokenizer_id
from tinkex.errors import TinkexError, ValidationError
from tinkex.events import Usage, counts_usage
from tinkex.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    GetInfoRequest,
    GetInfoResponse,
    LoadWeightsResponse,
    OptimParams,
    OptimStepResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)
from tinkex.wire import endpoints, requests
from tinkex.wire.body import Body
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import Endpoint


class TrainingClient(BaseClient):
    """Trains one adapter. Made by `ServiceClient.create_lora_training_client` and its relatives."""

    def __init__(self, session: Session, model_id: str, *, base_model: str | None = None, next_seq_id: int = 1) -> None:
        super().__init__(session)
        self.model_id = model_id
        self.base_model = base_model
        self._queue = OperationQueue(session, model_id, next_seq_id, self._observer())
        self._log = session.run_log(model_id)

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
        """Train on a custom loss, written in torch: two passes, with `loss_fn` run in a worker thread between them.

        The queue of this client waits for it, so an `optim_step` called next applies its gradient. Metrics are those
        of the second pass (its `loss:sum` as `surrogate_loss:sum`) and the function's own.
        """
        if loss_type_input not in (None, "logprobs"):
            raise ValidationError(f"loss_type_input={loss_type_input!r}: only 'logprobs' is offered.")
        if not callable(loss_fn):
            raise ValidationError(f"forward_backward_custom takes a function, got {type(loss_fn).__name__}.")
        checked = validate.check_data(data, None)
        usage = self._usage(checked, trains=True, prefills=True)
        parts = self._split(checked)
        return self._queue.submit(
            "forward_backward_custom",
            2 * len(parts),
            lambda turn: run_custom_loss(turn, self._queue, checked, parts, loss_fn),
            usage=usage,
        )

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
        chosen = adam_params if optim_params is None else optim_params
        if chosen is None:
            raise ValidationError("optim_step needs its parameters, for example AdamParams(learning_rate=1e-4).")
        params = validate.check_adam(chosen)
        rate: float | None = getattr(params, "learning_rate", None)  # a future optimizer may have none
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

        def read(response: Any) -> SaveWeightsForSamplerResponse:
            if response.path is None:
                raise TinkexError(f"The service saved {name!r} for sampling but named no path.")
            return SaveWeightsForSamplerResponse(path=response.path)

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
            lambda seq, dialect: requests.request(
                SaveWeightsExternalRequest(
                    model_id=self.model_id,
                    path=name,
                    seq_id=seq,
                    ttl_seconds=ttl_seconds,
                    age_encryption_recipients=age_encryption_recipients,
                ),
                Dialect.PROTO,
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
        """Return a sampler of the weights after everything called so far. Ephemeral: it ends with the session."""
        warn_of_retry_config(retry_config)
        return self._ephemeral(name, record_stability_info).result()

    async def save_weights_and_get_sampling_client_async(
        self, name: str | None = None, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        warn_of_retry_config(retry_config)
        return await self._ephemeral(name, record_stability_info)

    def save_weights_and_get_sampling_client_submit(self, retry_config: Any = None) -> APIFuture[SamplingClient]:
        """Do the same without waiting, as programs for 0.4.1 call it."""
        warn_of_retry_config(retry_config)
        return self._ephemeral(None, False)

    def create_sampling_client(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """Return a sampler of weights saved with `save_weights_for_sampler`."""
        warn_of_retry_config(retry_config)
        return create_sampling_client(
            self._session, model_path=model_path, record_stability_info=record_stability_info
        ).result()

    async def create_sampling_client_async(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        warn_of_retry_config(retry_config)
        return await create_sampling_client(
            self._session, model_path=model_path, record_stability_info=record_stability_info
        )

    def unload_model(self) -> APIFuture[UnloadModelResponse]:
        """Let the service free this adapter, after everything called so far. Saved checkpoints stay."""
        return self._single(
            "unload_model",
            endpoints.UNLOAD_MODEL,
            lambda seq, dialect: requests.request(UnloadModelRequest(model_id=self.model_id), dialect),
        )

    def _take_failure(self) -> tuple[str, BaseException] | None:
        """Return the first failed call whose future nobody has read, by its name, and its error; None if there is none.

        Each one once. `tinkex.progress` raises it.
        """
        failure = self._queue.take_failure()
        return None if failure is None else (failure[0].name, failure[1])

    # -- metrics and samples of your own ------------------------------------------------------------------------------

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers of your own for this run, such as a reward. Never waits: they are sent in the background.

        They are kept in `metrics_file` too. A service that keeps no metrics gets none.

        >>> training = service.create_lora_training_client("Qwen/Qwen3-8B")
        >>> training.log_metrics({"reward": 0.4, "kl": 0.02}, step=1)
        """
        link = self._session.link()
        row = metrics_row(metrics, step, self._queue.next_seq_id - 1, link.clock.wall())
        self._log.add(link, "metrics", row)

    def log_sample(
        self,
        prompt: str,
        text: str,
        reward: float | None = None,
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Log a sample of this run, as `log_metrics` logs numbers. Texts beyond 100,000 characters are cut."""
        link = self._session.link()
        self._log.add(link, "sample", sample_row(prompt, text, reward, step, metadata or {}, link.clock.wall()))

    def _keep_locally(self, kind: str, row: Mapping[str, Any]) -> None:
        """Write a line to `metrics_file`, and send nothing. `tinkex.progress` keeps its steps so."""
        self._log.file.write({"kind": kind, **row})

    @property
    def metrics_file(self) -> Path | None:
        """Where what was logged is kept on this machine, as lines of JSON; None with `metrics_dir="none"`."""
        return self._log.file.path

    def flush_metrics(self, timeout: float = FLUSH_S) -> None:
        """Wait until the service has what was logged, or so many seconds. `ServiceClient.close()` does it too."""
        self._log.finish(timeout)

    # -- about the model --------------------------------------------------------------------------------------------

    def get_info(self) -> GetInfoResponse:
        """Return name, architecture and tokenizer of the model being trained."""
        return self._info().result()

    async def get_info_async(self) -> GetInfoResponse:
        return await self._info()

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer: transformers' own where that is installed, else the light `tokenizers` one."""
        info = self.get_info()
        name = info.model_data.model_name or info.model_name or ""
        return load_tokenizer(self._session, tokenizer_id(name, info.model_data.tokenizer_id))

    def get_console_url(self) -> str:
        return f"{self._console()}/training_runs/{self.model_id}"

    # -- private ----------------------------------------------------------------------------------------------------

    def _split(self, data: list[Datum]) -> list[list[Datum]]:
        link = self._session.link()
        if link.dialect is Dialect.JSON:
            return chunks.split(data, *chunks.JSON_LIMITS)
        server = link.server
        return chunks.split(data, server.fwdbwd_max_chunk_len, server.fwdbwd_max_chunk_bytes_count)

    def _pass(
        self,
        kind: str,
        endpoint: Endpoint,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
    ) -> APIFuture[ForwardBackwardOutput]:
        checked = validate.check_data(data, loss_fn)
        config = validate.check_loss_config(loss_fn_config, loss_fn)
        is_forward = endpoint is endpoints.FORWARD
        usage = self._usage(checked, trains=not is_forward, prefills=is_forward)
        parts = self._split(checked)
        training_pass = TrainingPass(endpoint, self.model_id, parts, loss_fn, config)
        return self._queue.submit(kind, len(parts), training_pass.run, usage=usage)

    def _usage(self, data: list[Datum], *, trains: bool, prefills: bool) -> Usage:
        if not counts_usage():
            return NO_USAGE
        tokens = sum(validate.input_length(datum.model_input) or 0 for datum in data)
        return Usage(tokens * trains, tokens * prefills, base_model=self.base_model or "")

    def _single(
        self,
        kind: str,
        endpoint: Endpoint,
        encode: Encode,
        read: Callable[[Any], Any] | None = None,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> APIFuture[Any]:
        async def work(turn: Turn) -> Any:
            async with turn as send:
                collect = await send(endpoint, encode, 0)
            result = await collect()
            return result if read is None else read(result)

        return self._queue.submit(kind, 1, work, metrics=metrics)

    def _load(self, path: str, *, optimizer: bool, weights_access_token: str | None) -> APIFuture[LoadWeightsResponse]:
        validate.check_state_path(path)
        return self._single(
            "load_state",
            endpoints.LOAD_WEIGHTS,
            # An old service knows no `optimizer` field: it is sent only where it says something.
            lambda seq, dialect: requests.load_weights(
                self.model_id, seq, path, optimizer or None, weights_access_token, dialect=dialect
            ),
        )

    def _ephemeral(self, name: str | None, record_stability_info: bool) -> APIFuture[SamplingClient]:
        if name is not None:
            warnings.warn(
                f"save_weights_and_get_sampling_client(name={name!r}) saves nothing under that name: the sampler is "
                "ephemeral. To keep the weights use save_weights_for_sampler(name).",
                DeprecationWarning,
                stacklevel=3,
            )
        # One number for all attempts: a retry must find the same sampler, not make another.
        sampling_seq = next(self._session.sampling_seqs)

        def encode(seq: int, dialect: Dialect) -> Body:
            return requests.save_weights_for_sampler(self.model_id, seq, None, sampling_seq, dialect=dialect)

        def read(response: Any) -> SamplingClient:
            if response.sampling_session_id is None:
                raise TinkexError("The service saved the weights but gave no sampler for them.")
            return SamplingClient(
                self._session,
                response.sampling_session_id,
                base_model=self.base_model,
                record_stability_info=record_stability_info,
            )

        return self._single("save_weights_and_get_sampling_client", endpoints.SAVE_WEIGHTS_FOR_SAMPLER, encode, read)

    def _info(self) -> APIFuture[GetInfoResponse]:
        request = GetInfoRequest(model_id=self.model_id)
        return self._ask(endpoints.GET_INFO, lambda dialect: requests.request(request, dialect))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (*self._pickled(), self.model_id, self.base_model, self._queue.next_seq_id)

    def __repr__(self) -> str:
        return f"<TrainingClient {self.model_id}>"


def _unpickle(
    address: dict[str, Any], session_id: str | None, model_id: str, base_model: str | None, next_seq_id: int
) -> TrainingClient:
    session = BaseClient._session_from(address, session_id)
    return TrainingClient(session, model_id, base_model=base_model, next_seq_id=next_seq_id)
