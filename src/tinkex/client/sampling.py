"""`SamplingClient`: samples and log-probabilities from a base model or from saved weights.

`sample()` returns an `APIFuture` at once; thousands may be in flight. How many are really sent at a time is decided by
the limiter that all samplers of one service and key share: a 429 slows all of them down and fails none of them.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from tinkex.client._calls import validate
from tinkex.client._calls.attempts import call
from tinkex.client._calls.decode import read_value
from tinkex.client._calls.handshake import ready
from tinkex.client._calls.sample_call import SampleCall, cancel_on_service, run_sample
from tinkex.client._calls.sampling_session import SamplingSession
from tinkex.client._files.tokenizer_files import load_tokenizer
from tinkex.client._http.transport import HTTPResponse
from tinkex.client._runtime.base_client import BaseClient
from tinkex.client._runtime.link import ServiceLink
from tinkex.client._runtime.operation import NO_USAGE, Operation
from tinkex.client._runtime.session import Session
from tinkex.client.future import APIFuture, finished, follow_up, reject, resolve
from tinkex.client.stream import SampleStream
from tinkex.client.tokenizer import tokenizer_id
from tinkex.errors import APIError, ClosedError, TinkexError, ValidationError
from tinkex.events import Usage, counts_usage
from tinkex.types import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    GetServerCapabilitiesResponse,
    ModelInput,
    SampleResponse,
    SamplingParams,
    TensorData,
)
from tinkex.wire import endpoints, json_codec, requests


class SamplingClient(BaseClient):
    """Samples from one model. Made by `create_sampling_client` or `save_weights_and_get_sampling_client`."""

    def __init__(
        self,
        session: Session,
        sampling_session_id: str,
        *,
        base_model: str | None = None,
        model_path: str | None = None,
        record_stability_info: bool = False,
        is_copy: bool = False,
    ) -> None:
        super().__init__(session)
        self._sampling = SamplingSession(sampling_session_id, is_copy)
        self.base_model = base_model
        self.model_path = model_path
        self._record_stability_info = record_stability_info
        self._observe = self._observer()

    @property
    def sampling_session_id(self) -> str:
        """The id of this sampler on the service; its events have it as `model_id`."""
        return self._sampling.sampling_session_id

    _sampling_session_id = sampling_session_id  # programs written for the official package reach for this name

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """Draw `num_samples` continuations of the prompt.

        >>> sampler = service.create_sampling_client(base_model="Qwen/Qwen3-8B")
        >>> prompt = tinkex.ModelInput.from_ints([1, 2, 3])
        >>> response = sampler.sample(prompt, 1, tinkex.SamplingParams(max_tokens=4)).result()
        >>> len(response.sequences[0].tokens)
        4
        """
        link = self._session.link()
        sample = SampleCall(
            prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs, topk_sample_logprobs,
            target_prompt_logprobs, prompt_alt_tokens_k, prompt_logprobs_last_n, self._record_stability_info,
        )  # fmt: skip
        sample = validate.check_sampling(sample, self._context_length(link))
        operation = Operation(
            "sample",
            link.clock.now(),
            seq_id=self._sampling.next_seq_id(),
            model_id=self.sampling_session_id,
            session=self._session,
            usage=self._usage(prompt),
            observers=(self._observe,),
        )
        if link.dialect is not None:
            requests.write_prompt(prompt, link.dialect)  # the long part of the body, on the caller's thread
        link.announce(operation)
        future = link.run(operation, lambda: run_sample(link, operation, self._sampling, sample))
        if link.dynamic.sample_cancel_enabled:
            future.add_done_callback(lambda done: cancel_on_service(link, operation, done))
        return future

    _draw = sample  # programs that replace `sample` to count samples must not count log-probabilities

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> SampleResponse:
        return await self.sample(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """Return the log-probability of every prompt token; the first has none."""
        sampled = self._draw(
            prompt, 1, SamplingParams(max_tokens=1), True, prompt_logprobs_last_n=prompt_logprobs_last_n
        )
        future: APIFuture[list[float | None]] = follow_up(sampled)
        sampled.add_done_callback(lambda done: _forward(done, future))
        future.add_done_callback(lambda done: sampled.cancel() if done.cancelled() else None)
        return future

    async def compute_logprobs_async(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        return await self.compute_logprobs(prompt, prompt_logprobs_last_n)

    def stream(self, prompt: ModelInput, sampling_params: SamplingParams, num_samples: int = 1) -> SampleStream:
        """Return an iterator of tokens and log-probabilities as they are sampled: for `for` or `async for`, once.

        Where the service does not announce streaming, one final chunk per sample.

        >>> sampler = service.create_sampling_client(base_model="Qwen/Qwen3-8B")
        >>> prompt = tinkex.ModelInput.from_ints([1, 2, 3])
        >>> stream = sampler.stream(prompt, tinkex.SamplingParams(max_tokens=4))
        >>> len([token for chunk in stream for token in chunk.tokens])
        4
        """
        link = self._session.link()
        sample = SampleCall(prompt, num_samples, sampling_params)
        sample = validate.check_sampling(sample, self._context_length(link))
        return SampleStream(self._session, self._sampling, sample, lambda: self._usage(prompt))

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer: transformers' own where that is installed, else the light `tokenizers` one."""
        return load_tokenizer(self._session, tokenizer_id(self.get_base_model()))

    def get_base_model(self) -> str:
        return self._base_model().result()

    async def get_base_model_async(self) -> str:
        return await self._base_model()

    @staticmethod
    def create(
        holder: Session,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> APIFuture[SamplingClient]:
        """As `ServiceClient.create_sampling_client`, without waiting; `holder` is `ServiceClient.holder`."""
        if sampling_session_id is None:
            return create_sampling_client(
                holder, model_path=model_path, base_model=base_model, record_stability_info=record_stability_info
            )
        return finished(
            SamplingClient(
                holder,
                sampling_session_id,
                base_model=base_model,
                model_path=model_path,
                record_stability_info=record_stability_info,
            )
        )

    def get_sampler_handle(self) -> str:
        """Return a text that names this sampler, for `from_sampler_handle` in another process. Holds no key."""
        address, session_id = self._pickled()
        fields = [address, session_id, self.sampling_session_id, self.base_model, self.model_path]
        return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        try:
            address, session_id, sampling_session_id, base_model, model_path = json.loads(
                base64.urlsafe_b64decode(handle)
            )
            address = {name: value for name, value in address.items() if api_key is None or name != "key"}
        except (ValueError, TypeError, AttributeError):
            raise ValidationError("This is not a handle made by SamplingClient.get_sampler_handle().") from None
        if api_key is not None:
            address["api_key"] = api_key
        return _unpickle(address, session_id, sampling_session_id, base_model, model_path)

    # -- private ----------------------------------------------------------------------------------------------------

    def _usage(self, prompt: ModelInput) -> Usage:
        if not counts_usage():
            return NO_USAGE
        return Usage(prefill_tokens=validate.input_length(prompt) or 0, base_model=self.base_model or "")

    def _context_length(self, link: ServiceLink) -> int | None:
        return link.context_lengths.get(self.base_model) if self.base_model else None

    def _base_model(self) -> APIFuture[str]:
        if self.base_model:
            return finished(self.base_model)

        def read(response: HTTPResponse) -> str:
            sampler = json_codec.read_content(GetSamplerResponse, response.content)
            self.base_model = sampler.base_model
            return sampler.base_model

        path = endpoints.GET_SAMPLER.url(sampler_id=self.sampling_session_id)
        return self._ask(endpoints.GET_SAMPLER, path=path, read=read)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (*self._pickled(), self.sampling_session_id, self.base_model, self.model_path)

    def __repr__(self) -> str:
        return f"<SamplingClient {self.model_path or self.sampling_session_id}>"


def create_sampling_client(
    session: Session,
    *,
    model_path: str | None = None,
    base_model: str | None = None,
    record_stability_info: bool = False,
) -> APIFuture[SamplingClient]:
    """Open a sampling session and return its client."""
    if model_path is None and base_model is None:
        raise ValidationError("create_sampling_client needs base_model=… or model_path=tinker://…/sampler_weights/…")
    if model_path is not None:
        validate.check_sampler_path(model_path)
    link = session.link()
    sampling_seq = next(session.sampling_seqs)

    async def work(operation: Operation) -> SamplingClient:
        session_id = await session.id()
        dialect = await ready(link)
        link.loop.spawn(learn_context_lengths(session))
        request = CreateSamplingSessionRequest(
            session_id=session_id, sampling_session_seq_id=sampling_seq, base_model=base_model, model_path=model_path
        )
        body = requests.request(request, dialect)
        response = await call(link, endpoints.CREATE_SAMPLING_SESSION, body, operation=operation)
        created = await read_value(CreateSamplingSessionResponse, response.content)
        return SamplingClient(
            session,
            created.sampling_session_id,
            base_model=base_model,
            model_path=model_path,
            record_stability_info=record_stability_info,
        )

    return session.run("create_sampling_session", work)


async def learn_context_lengths(session: Session) -> None:
    """Ask once per link how long prompts may be, so that too long ones are rejected before they are sent."""
    try:
        link = session.link()
        if link.context_lengths:
            return
        link.context_lengths[""] = 0  # asked
        response = await call(
            link, endpoints.GET_SERVER_CAPABILITIES, operation=session.operation("capabilities"), max_attempts=1
        )
        capabilities = await read_value(GetServerCapabilitiesResponse, response.content)
    except (APIError, ClosedError):
        return  # the check is a courtesy: without it the service rejects what is too long
    for model in capabilities.supported_models:
        if model.model_name and model.max_context_length:
            link.context_lengths[model.model_name] = model.max_context_length


def _unpickle(
    address: dict[str, Any],
    session_id: str | None,
    sampling_session_id: str,
    base_model: str | None,
    model_path: str | None,
) -> SamplingClient:
    session = BaseClient._session_from(address, session_id)
    return SamplingClient(session, sampling_session_id, base_model=base_model, model_path=model_path, is_copy=True)


def _forward(sampled: APIFuture[SampleResponse], future: APIFuture[list[float | None]]) -> None:
    if sampled.cancelled():
        future.cancel()
        return
    error = sampled.exception()
    if error is not None:
        reject(future, error)
        return
    logprobs = sampled.result().prompt_logprobs
    if logprobs is None:
        reject(future, TinkexError("The service was asked for prompt log-probabilities and gave none."))
    else:
        resolve(future, logprobs)
