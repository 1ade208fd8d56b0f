"""Cases of SamplingClient: every parameter, prompt log-probabilities, images in prompts, cancelling, handles."""

from __future__ import annotations

import threading
from typing import Any

from .canned import Answer, as_json
from .case import BOTH, NEW, OLD, case

PNG = bytes(range(1, 9))

PARAMS: dict[str, dict[str, Any]] = {
    "none-passed": {},
    "max-tokens": {"max_tokens": 5},
    "max-tokens-none": {"max_tokens": None},
    "seed": {"seed": 7},
    "seed-zero": {"seed": 0},
    "seed-none": {"seed": None},
    "stop-none": {"stop": None},
    "stop-string": {"stop": "\n\n"},
    "stop-strings": {"stop": ["END", "é"]},
    "stop-tokens": {"stop": [1, 2]},
    "stop-empty": {"stop": []},
    "temperature": {"temperature": 0.5},
    "temperature-zero": {"temperature": 0},
    "temperature-int": {"temperature": 1},
    "temperature-default-passed": {"temperature": 1.0},
    "temperature-none": {"temperature": None},
    "top-k": {"top_k": 40},
    "top-k-default-passed": {"top_k": -1},
    "top-p": {"top_p": 0.75},
    "top-p-int": {"top_p": 1},
    "unknown-field": {"max_tokens": 5, "frequency_penalty": 0.5},
    "all": {"max_tokens": 5, "seed": 7, "stop": ["END"], "temperature": 0.5, "top_k": 40, "top_p": 0.75},
    "all-in-another-order": {"top_p": 0.75, "stop": ["END"], "temperature": 0.5, "max_tokens": 5},
}
for name, arguments in PARAMS.items():

    @case(f"sample/params-{name}", on="sampling")
    def sample_params(T: Any, sampling: Any, arguments: dict[str, Any] = arguments) -> object:
        return sampling.sample(T.types.ModelInput.from_ints([1, 2, 3]), 1, T.types.SamplingParams(**arguments))


CALLS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two-samples": ({"num_samples": 2}, BOTH),
    "prompt-logprobs-true": ({"include_prompt_logprobs": True}, BOTH),
    "prompt-logprobs-false": ({"include_prompt_logprobs": False}, BOTH),
    "prompt-logprobs-none": ({"include_prompt_logprobs": None}, BOTH),
    "topk-prompt-logprobs": ({"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}, BOTH),
    "topk-prompt-logprobs-zero": ({"topk_prompt_logprobs": 0}, BOTH),
    "topk-sample-logprobs": ({"topk_sample_logprobs": 2}, NEW),
    "prompt-alt-tokens": ({"prompt_alt_tokens_k": 2}, NEW),
    "prompt-alt-tokens-negative": ({"prompt_alt_tokens_k": -1}, NEW),
    "prompt-logprobs-last-n": ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 1}, NEW),
    "prompt-logprobs-last-n-none": ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": None}, NEW),
    "prompt-logprobs-last-n-alone": ({"prompt_logprobs_last_n": 1}, NEW),
    "prompt-logprobs-last-n-zero": ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 0}, NEW),
    "target-prompt-logprobs-none": ({"target_prompt_logprobs": None}, NEW),
}
for name, (arguments, versions) in CALLS.items():

    @case(f"sample/{name}", on="sampling", versions=versions)
    def sample_call(T: Any, sampling: Any, arguments: dict[str, Any] = arguments) -> object:
        prompt, params = T.types.ModelInput.from_ints([1, 2, 3]), T.types.SamplingParams(max_tokens=2)
        return sampling.sample(**{"prompt": prompt, "num_samples": 1, "sampling_params": params, **arguments})


TARGETS: dict[str, dict[str, Any]] = {
    "dense": {"data": [5, -1, 6, 7], "dtype": "int64", "shape": [2, 2]},
    "csr": {
        "data": [5, 6],
        "dtype": "int64",
        "shape": [2, 2],
        "sparse_crow_indices": [0, 1, 2],
        "sparse_col_indices": [0, 1],
    },
    "float": {"data": [5.0, 6.0], "dtype": "float32", "shape": [2, 1]},
    "1d": {"data": [5, 6], "dtype": "int64", "shape": [2]},
}
for name, arguments in TARGETS.items():

    @case(f"sample/target-prompt-logprobs-{name}", on="sampling", versions=NEW)
    def sample_targets(T: Any, sampling: Any, arguments: dict[str, Any] = arguments) -> object:
        prompt, params = T.types.ModelInput.from_ints([1, 2, 3]), T.types.SamplingParams(max_tokens=2)
        targets = T.types.TensorData(**arguments)
        return sampling.sample(prompt, 1, params, target_prompt_logprobs=targets)


@case("sample/sequence-numbers", on="sampling")
def sample_three_times(T: Any, sampling: Any) -> None:
    for _ in range(3):
        sampling.sample(T.types.ModelInput.from_ints([1, 2]), 1, T.types.SamplingParams(max_tokens=2)).result(60)


@case("sample/async", on="sampling")
async def sample_async(T: Any, sampling: Any) -> None:
    await sampling.sample_async(T.types.ModelInput.from_ints([1, 2]), 1, T.types.SamplingParams(max_tokens=2))


@case("sample/stability-info", on="service", versions=NEW)
def sample_with_stability_info(T: Any, service: Any) -> object:
    sampling = service.create_sampling_client(base_model="Qwen/Qwen3-8B", record_stability_info=True)
    return sampling.sample(T.types.ModelInput.from_ints([1, 2]), 1, T.types.SamplingParams(max_tokens=2))


@case("sample/empty-prompt", on="sampling")
def sample_empty(T: Any, sampling: Any) -> object:
    return sampling.sample(T.types.ModelInput.empty(), 1, T.types.SamplingParams(max_tokens=2))


@case("sample/appended-prompt", on="sampling")
def sample_appended(T: Any, sampling: Any) -> object:
    prompt = T.types.ModelInput.empty().append_int(1).append_int(2).append(T.types.EncodedTextChunk(tokens=[3, 4]))
    return sampling.sample(prompt, 1, T.types.SamplingParams(max_tokens=2))


@case("sample/image", on="sampling", versions=OLD)
def sample_image(T: Any, sampling: Any) -> object:
    picture = T.types.ImageChunk(data=PNG, format="png", height=4, width=6, tokens=2)
    prompt = T.types.ModelInput(chunks=[T.types.EncodedTextChunk(tokens=[1, 2]), picture])
    return sampling.sample(prompt, 1, T.types.SamplingParams(max_tokens=2))


@case("sample/image-asset-pointer", on="sampling", versions=OLD)
def sample_asset_pointer(T: Any, sampling: Any) -> object:
    pointer = T.types.ImageAssetPointerChunk(location="gs://a/b.png", format="jpeg", height=4, width=6, tokens=2)
    prompt = T.types.ModelInput(chunks=[pointer, T.types.EncodedTextChunk(tokens=[1, 2])])
    return sampling.sample(prompt, 1, T.types.SamplingParams(max_tokens=2))


EXPECTED_TOKENS: dict[str, dict[str, Any]] = {
    "": {},
    "-expected-tokens": {"expected_tokens": 2},
    "-expected-none": {"expected_tokens": None},
}
for name, arguments in EXPECTED_TOKENS.items():

    @case(f"sample/image{name}-0.36", on="sampling", versions=NEW)
    def sample_image_by_expected_tokens(T: Any, sampling: Any, arguments: dict[str, Any] = arguments) -> object:
        picture = T.types.ImageChunk(data=PNG, format="png", **arguments)
        prompt = T.types.ModelInput(chunks=[T.types.EncodedTextChunk(tokens=[1, 2]), picture])
        return sampling.sample(prompt, 1, T.types.SamplingParams(max_tokens=2))

    @case(f"sample/image-asset-pointer{name}-0.36", on="sampling", versions=NEW)
    def sample_pointer_by_expected_tokens(T: Any, sampling: Any, arguments: dict[str, Any] = arguments) -> object:
        pointer = T.types.ImageAssetPointerChunk(location="gs://a/b.png", format="png", **arguments)
        prompt = T.types.ModelInput(chunks=[T.types.EncodedTextChunk(tokens=[1, 2]), pointer])
        return sampling.sample(prompt, 1, T.types.SamplingParams(max_tokens=2))


@case("sample/dmel", on="sampling", versions=NEW)
def sample_dmel(T: Any, sampling: Any) -> object:
    prompt = T.types.ModelInput(chunks=[T.types.EncodedTextChunk(tokens=[1, 2]), T.types.DmelChunk(dmel=PNG)])
    return sampling.sample(prompt, 1, T.types.SamplingParams(max_tokens=2))


@case("compute-logprobs/plain", on="sampling")
def compute_logprobs(T: Any, sampling: Any) -> object:
    return sampling.compute_logprobs(T.types.ModelInput.from_ints([1, 2, 3]))


@case("compute-logprobs/last-n", on="sampling", versions=NEW)
def compute_logprobs_last_n(T: Any, sampling: Any) -> object:
    return sampling.compute_logprobs(T.types.ModelInput.from_ints([1, 2, 3]), prompt_logprobs_last_n=1)


@case("sample/429-then-done", on="sampling", needs_stage=True)
def sample_after_429(T: Any, sampling: Any, stage: Any) -> object:
    stage.script["asample"] = [as_json({"detail": "slow down"}, 429)]
    return sampling.sample(T.types.ModelInput.from_ints([1, 2]), 1, T.types.SamplingParams(max_tokens=2))


@case("sample/500-then-done", on="sampling", needs_stage=True)
def sample_after_500(T: Any, sampling: Any, stage: Any) -> object:
    stage.script["asample"] = [as_json({"detail": "down"}, 500)]
    return sampling.sample(T.types.ModelInput.from_ints([1, 2]), 1, T.types.SamplingParams(max_tokens=2))


@case("sample/410-then-done", on="sampling", needs_stage=True)
def sample_again_after_410(T: Any, sampling: Any, stage: Any) -> object:
    """The result is gone: the sample is asked for again."""
    stage.script["retrieve_future"] = [as_json({"detail": "expired"}, 410)]
    return sampling.sample(T.types.ModelInput.from_ints([1, 2]), 1, T.types.SamplingParams(max_tokens=2))


@case(
    "sample/one-poll-for-all",
    on="sampling",
    versions=NEW,
    config={"sample_use_retrieve_futures": True},
    needs_stage=True,
)
def sample_by_session_poll(T: Any, sampling: Any, stage: Any) -> None:
    sampling.sample(T.types.ModelInput.from_ints([1, 2]), 1, T.types.SamplingParams(max_tokens=2)).result(60)
    with stage.changed:
        # Whether the client has already begun its next long poll depends on timing.
        stage.requests[:] = [r for r in stage.requests if not r.json().get("prev_cursor")]


@case("sample/cancelled", on="sampling", versions=NEW, dynamic_config={"sample_cancel_enabled": True}, needs_stage=True)
def sample_cancelled(T: Any, sampling: Any, stage: Any) -> None:
    release = threading.Event()
    stage.script["retrieve_future"] = [Answer(408, b'{"queue_state": "active"}', release=release)]
    pending = sampling.sample(T.types.ModelInput.from_ints([1, 2]), 1, T.types.SamplingParams(max_tokens=2))
    stage.wait_for("retrieve_future")
    pending.cancel()
    stage.wait_for("cancel_future")
    release.set()


@case("sampler/get-base-model", on="sampling", versions=NEW)
def get_base_model(T: Any, sampling: Any) -> None:
    sampling.get_base_model()


@case("sampler/from-handle", on="sampling", versions=NEW, config={"sample_join_sampling_session": True})
def from_handle(T: Any, sampling: Any) -> object:
    twin = T.SamplingClient.from_sampler_handle(sampling.get_sampler_handle(), api_key="tml-golden")
    return twin.sample(T.types.ModelInput.from_ints([1, 2]), 1, T.types.SamplingParams(max_tokens=2))
