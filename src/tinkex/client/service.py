"""`ServiceClient`: makes all other clients. Making one costs nothing; the first call opens a session."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tinkex import settings
from tinkex.client._calls import validate
from tinkex.client._calls.handshake import ready
from tinkex.client._calls.submit import submit
from tinkex.client._runtime.base_client import BaseClient, warn_of_retry_config
from tinkex.client._runtime.operation import Operation
from tinkex.client._runtime.session import Session
from tinkex.client.future import APIFuture
from tinkex.client.sampling import SamplingClient, create_sampling_client, learn_context_lengths
from tinkex.client.training import TrainingClient
from tinkex.errors import APIResponseValidationError, NotFoundError, ValidationError
from tinkex.rules.run_names import with_name
from tinkex.types import (
    GetInfoRequest,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    LoadWeightsRequest,
    LoraConfig,
    OptimizerConfig,
    ParsedCheckpointTinkerPath,
    TrainingRun,
    WeightsInfoResponse,
)
from tinkex.wire import endpoints, requests
from tinkex.wire.dialect import Dialect

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient

_SETTINGS = ("timeout_s", "max_retries", "unreachable_s", "deadline_s", "wait_line_s", "max_response_bytes", "pools",
           "telemetry", "proxy", "ca_file", "tags", "cache_dir")  # fmt: skip


class ServiceClient(BaseClient):
    """Makes training, sampling and REST clients that share one session. Close it, or use it with `with`.

    >>> with tinkex.ServiceClient() as client:  # the service and the key from TINKER_BASE_URL and TINKER_API_KEY
    ...     print(client.get_server_capabilities().supported_models[0].model_name)
    Qwen/Qwen3-8B
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        config: settings.Config | None = None,
        **options: Any,
    ) -> None:
        if config is None:
            config = _configure(base_url, api_key, default_headers_overrides, options)
        elif base_url is not None or api_key is not None or options:
            raise ValidationError("Pass config=... or single settings, not both.")
        validate.check_metadata(user_metadata)
        _set_log_level()
        super().__init__(Session(config, user_metadata=user_metadata, project_id=project_id, display_name=display_name))

    # -- training clients -------------------------------------------------------------------------------------------

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        name: str | None = None,
        tags: list[str] | None = None,
    ) -> TrainingClient:
        """Create a new LoRA adapter on a base model.

        `name` and `tags` are an extension: they travel in `user_metadata`, so every service takes them. On ours, the
        run is found by its name: in every command, in the console, as `model` of the OpenAI-compatible interface.

        >>> training = service.create_lora_training_client("Qwen/Qwen3-8B", rank=16)
        >>> training.get_info().lora_rank
        16
        """
        lora = LoraConfig(rank=rank, seed=seed, train_unembed=train_unembed, train_mlp=train_mlp, train_attn=train_attn)
        return self._create(base_model, lora, with_name(user_metadata, name, tags), optimizer).result()

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        name: str | None = None,
        tags: list[str] | None = None,
    ) -> TrainingClient:
        lora = LoraConfig(rank=rank, seed=seed, train_unembed=train_unembed, train_mlp=train_mlp, train_attn=train_attn)
        return await self._create(base_model, lora, with_name(user_metadata, name, tags), optimizer)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        """Go on from saved weights, with a fresh optimizer. Rank and trained parts are those of the saved adapter."""
        return self._from_state(path, base_model, user_metadata, weights_access_token, optimizer, False).result()

    async def create_training_client_from_state_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        return await self._from_state(path, base_model, user_metadata, weights_access_token, optimizer, False)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        """Go on exactly where `save_state` stopped: weights and optimizer."""
        return self._from_state(path, base_model, user_metadata, weights_access_token, None, True).result()

    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        return await self._from_state(path, base_model, user_metadata, weights_access_token, None, True)

    def create_training_client_from_run(self, model_id: str) -> TrainingClient:
        """Go on with a run that is alive on the service, after this program or its machine went down.

        Nothing is loaded or lost: weights, optimizer and gathered gradients are as the last accepted operation left
        them. For one client at a time: two that train the same run would use the same numbers. Only our own service
        offers this; elsewhere go on from a saved state.
        """
        return self._from_run(model_id).result()

    async def create_training_client_from_run_async(self, model_id: str) -> TrainingClient:
        return await self._from_run(model_id)

    # -- other clients ----------------------------------------------------------------------------------------------

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Create a sampler of a base model, or of weights saved for sampling."""
        warn_of_retry_config(retry_config)
        return create_sampling_client(
            self._session, model_path=model_path, base_model=base_model, record_stability_info=record_stability_info
        ).result()

    async def create_sampling_client_async(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        warn_of_retry_config(retry_config)
        return await create_sampling_client(
            self._session, model_path=model_path, base_model=base_model, record_stability_info=record_stability_info
        )

    def create_rest_client(self) -> RestClient:
        """Return a client for reading and deleting runs, checkpoints and sessions. It opens no session."""
        from tinkex.client.rest import RestClient  # on first use: it costs 4 ms to load

        return RestClient(self._session)

    # -- the service ------------------------------------------------------------------------------------------------

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """Return which models the service offers."""
        return self._ask(endpoints.GET_SERVER_CAPABILITIES).result()  # type: ignore[no-any-return]

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        return await self._ask(endpoints.GET_SERVER_CAPABILITIES)  # type: ignore[no-any-return]

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> APIFuture[str]:
        """Copy a checkpoint into this session's runs; gives the new path."""
        from tinkex.client.rest import copy_weights  # as above

        return copy_weights(
            self, path, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token, into_session=True
        )

    def create_custom_loss(self, fn: Any, input_ranks: Mapping[str, Any]) -> APIFuture[Any]:
        """Rejected: custom losses run in this process, by `TrainingClient.forward_backward_custom`."""
        raise server_side_loss_error()

    def close(self, status: str = "success", detail: str | None = None) -> APIFuture[None]:
        """End the session: "success", "errored" or "interrupted". Heartbeats stop; what was accepted still runs."""
        return self._session.close(status, detail)

    def get_console_url(self) -> str:
        session_id = self._session.session_id
        return f"{self._console()}/sessions" + (f"/{session_id}" if session_id else "")

    # -- private ----------------------------------------------------------------------------------------------------

    def _create(
        self,
        base_model: str,
        lora: LoraConfig,
        user_metadata: Mapping[str, Any] | None,
        optimizer: OptimizerConfig | None,
    ) -> APIFuture[TrainingClient]:
        validate.check_lora(lora)
        validate.check_metadata(user_metadata)
        operation = self._session.operation("create_model")
        link = self._session.link()
        operation.observers = (self._observer(),)
        return link.run(operation, lambda: self._make(operation, base_model, lora, user_metadata, optimizer))

    async def _make(
        self,
        operation: Operation,
        base_model: str,
        lora: LoraConfig,
        user_metadata: Mapping[str, Any] | None,
        optimizer: OptimizerConfig | None,
    ) -> TrainingClient:
        link = self._session.link()
        session_id = await self._session.id()
        link.loop.spawn(learn_context_lengths(self._session))
        collect = await submit(
            link,
            operation,
            endpoints.CREATE_MODEL,
            next(self._session.model_seqs),
            lambda seq, dialect: requests.create_model(
                session_id, seq, base_model, lora, user_metadata, optimizer, dialect=dialect
            ),
        )
        created = await collect()
        return TrainingClient(self._session, created.model_id, base_model=base_model)

    def _from_state(
        self,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        weights_access_token: str | None,
        optimizer: OptimizerConfig | None,
        with_optimizer: bool,
    ) -> APIFuture[TrainingClient]:
        if isinstance(base_model, Mapping):  # 0.4.1 has user_metadata as its second argument
            base_model, user_metadata = None, dict(base_model)
        validate.check_state_path(path)
        validate.check_metadata(user_metadata)
        link = self._session.link()

        async def work(operation: Operation) -> TrainingClient:
            session_id = await self._session.id()
            if link.server.create_model_via_load_weights:
                collect = await submit(
                    link,
                    operation,
                    endpoints.LOAD_WEIGHTS,
                    next(self._session.model_seqs),
                    lambda seq, _: requests.request(
                        LoadWeightsRequest(
                            session_id=session_id,
                            model_seq_id=seq,
                            path=path,
                            optimizer=with_optimizer,
                            base_model=base_model,
                            user_metadata=user_metadata,
                            optimizer_config=optimizer,
                            weights_access_token=weights_access_token,
                        ),
                        Dialect.PROTO,
                    ),
                )
                loaded = await collect()
                if loaded.model_id is None:
                    raise APIResponseValidationError(message="The service loaded the weights but named no model.")
                return TrainingClient(self._session, loaded.model_id, base_model=base_model)
            info, metadata = await self._saved(path, weights_access_token)
            # A service that does not say trained all parts: there was no other way when it was written.
            flags = {name: getattr(info, name) is not False for name in ("train_unembed", "train_mlp", "train_attn")}
            lora = LoraConfig(rank=info.lora_rank or 32, seed=None, **flags)
            if metadata is not None or user_metadata is not None:
                metadata = {**(metadata or {}), **(user_metadata or {})}
            config = optimizer or (info.optimizer_config if with_optimizer else None)
            client = await self._make(operation, base_model or info.base_model, lora, metadata, config)
            load = client.load_state_with_optimizer if with_optimizer else client.load_state
            await load(path, weights_access_token)
            return client

        return self._session.run("create_training_client_from_state", work)

    def _from_run(self, model_id: str) -> APIFuture[TrainingClient]:
        if not isinstance(model_id, str) or not model_id:
            raise ValidationError("model_id must be the id of a training run, as `TrainingClient.model_id` gives it.")
        link = self._session.link()

        async def work(operation: Operation) -> TrainingClient:
            info: GetInfoResponse = await self._ask(
                endpoints.GET_INFO, lambda dialect: requests.request(GetInfoRequest(model_id=model_id), dialect)
            )
            if info.last_seq_id is None:
                raise ValidationError(
                    "This service does not say how far a run has come, so no second client can go on with it. "
                    "Use create_training_client_from_state_with_optimizer with a path that save_state gave."
                )
            link.loop.spawn(learn_context_lengths(self._session))
            base_model = info.model_name or info.model_data.model_name
            return TrainingClient(self._session, info.model_id, base_model=base_model, next_seq_id=info.last_seq_id + 1)

        return self._session.run("create_training_client_from_run", work)

    async def _saved(
        self, path: str, weights_access_token: str | None
    ) -> tuple[WeightsInfoResponse, dict[str, str] | None]:
        """Return what was saved: weights_info where the service has it, else what its run says (before 0.6)."""
        if await ready(self._session.link()) is Dialect.PROTO:
            try:
                headers = {"x-api-key": weights_access_token} if weights_access_token else None
                return await self._ask(endpoints.WEIGHTS_INFO, requests.weights_info(path), headers=headers), None
            except NotFoundError:
                pass  # either no such call or no such checkpoint: the run can tell
        run_id = ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
        run: TrainingRun = await self._ask(
            endpoints.GET_TRAINING_RUN, path=endpoints.GET_TRAINING_RUN.url(run_id=run_id)
        )
        if not run.is_lora:
            raise ValidationError(f"{path} is not a LoRA run; only adapters can be trained on.")
        info = WeightsInfoResponse(base_model=run.base_model, is_lora=True, lora_rank=run.lora_rank)
        return info, run.user_metadata

    @property
    def holder(self) -> Session:
        """What `RestClient(service.holder)` and `SamplingClient.create(service.holder, …)` take."""
        return self._session

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, self._pickled()

    def __repr__(self) -> str:
        return f"<ServiceClient {self._session.config.base_url}>"


def server_side_loss_error() -> ValidationError:
    """Return the error for losses that would run on the service."""
    return ValidationError(
        "Losses that run on the service (create_custom_loss, LossHandle) are not offered. Pass the function itself to "
        "TrainingClient.forward_backward_custom(data, fn): it runs here, in a worker thread between two passes."
    )


def _set_log_level() -> None:
    """TINKER_LOG=debug|info: seen on stderr even if the program has set up no logging. Not at import."""
    level = settings.log_level()
    if level in ("debug", "info"):
        logger = logging.getLogger("tinkex")
        logger.setLevel(level.upper())
        if not logger.handlers and not logging.getLogger().handlers:
            logger.addHandler(logging.StreamHandler())


def _unpickle(address: dict[str, Any], session_id: str | None) -> ServiceClient:
    client = ServiceClient.__new__(ServiceClient)
    # A copy creates its own models: it opens its own session, so that two processes never use the same number.
    BaseClient.__init__(client, BaseClient._session_from(address, None))
    return client


def _configure(
    base_url: str | None, api_key: str | None, headers: Mapping[str, str] | None, options: dict[str, Any]
) -> settings.Config:
    chosen = {name: options.pop(name) for name in _SETTINGS if name in options}
    timeout = options.pop("timeout", None)
    timeout = getattr(timeout, "read", timeout)  # also httpx.Timeout: the time for a response is its `read`
    for name, value in (("timeout_s", timeout), ("headers", options.pop("default_headers", None))):
        if isinstance(value, (int, float, Mapping)):
            chosen.setdefault(name, value)
    if headers:
        chosen["headers"] = {**chosen.get("headers", {}), **headers}
    if options:
        warnings.warn(f"ServiceClient ignores {', '.join(sorted(options))}: no such argument.", stacklevel=3)
    return settings.resolve(base_url=base_url, api_key=api_key, **chosen)
