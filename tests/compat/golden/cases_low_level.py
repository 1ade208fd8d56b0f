"""Cases of the low-level resources: each optional field of each request absent, null and set.

The high-level clients always pass some of these; only a request built by hand shows what the wire makes of the rest.
"""

from __future__ import annotations

from typing import Any

from .case import BOTH, NEW, OLD, add

RUN = "session-0:train:0"


def text(T: Any) -> Any:
    return T.types.ModelInput.from_ints([1, 2, 3])


def params(T: Any) -> Any:
    return T.types.SamplingParams(max_tokens=2)


def adam(T: Any) -> Any:
    return T.types.AdamParams(learning_rate=0.5)


def lora(T: Any) -> Any:
    return T.types.LoraConfig(rank=8)


def batch(T: Any) -> Any:
    inputs = {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 0.5]}
    datum = T.types.Datum(model_input=text(T), loss_fn_inputs=inputs)
    return T.types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")


# (resource, method, request type, required fields, optional fields with a value, versions).
# A value that is a function is called with the module.
Row = tuple[str, str, str, dict[str, Any], dict[str, Any], tuple[str, ...]]
SAMPLE_OPTIONS: dict[str, Any] = {
    "num_samples": 2,
    "base_model": "Qwen/Qwen3-8B",
    "model_path": f"tinker://{RUN}/sampler_weights/a",
    "sampling_session_id": "session-0:sample:0",
    "seq_id": 4,
    "prompt_logprobs": True,
    "topk_prompt_logprobs": 2,
    "type": "sample",
}
ROWS: list[Row] = [
    ("sampling", "asample", "SampleRequest", {"prompt": text, "sampling_params": params}, SAMPLE_OPTIONS, BOTH),
    (
        "sampling",
        "asample",
        "SampleRequest",
        {"prompt": text, "sampling_params": params},
        {
            "topk_sample_logprobs": 2,
            "prompt_alt_tokens_k": 2,
            "prompt_logprobs_last_n": 1,
            "record_stability_info": True,
        },
        NEW,
    ),
    (
        "models",
        "create",
        "CreateModelRequest",
        {"session_id": "session-0", "model_seq_id": 0, "base_model": "Qwen/Qwen3-8B"},
        {"user_metadata": {"k": "v"}, "lora_config": lora, "type": "create_model"},
        BOTH,
    ),
    ("models", "get_info", "GetInfoRequest", {"model_id": RUN}, {"type": "get_info"}, BOTH),
    ("models", "unload", "UnloadModelRequest", {"model_id": RUN}, {"type": "unload_model"}, OLD),
    ("training", "forward", "ForwardRequest", {"forward_input": batch, "model_id": RUN}, {"seq_id": 4}, OLD),
    (
        "training",
        "forward_backward",
        "ForwardBackwardRequest",
        {"forward_backward_input": batch, "model_id": RUN},
        {"seq_id": 4},
        BOTH,
    ),
    (
        "training",
        "optim_step",
        "OptimStepRequest",
        {"adam_params": adam, "model_id": RUN},
        {"seq_id": 4, "type": "optim_step"},
        BOTH,
    ),
    (
        "weights",
        "save",
        "SaveWeightsRequest",
        {"model_id": RUN},
        {"path": "a", "seq_id": 4, "type": "save_weights"},
        BOTH,
    ),
    (
        "weights",
        "save",
        "SaveWeightsRequest",
        {"model_id": RUN},
        {"ttl_seconds": 3600, "overwrite": True, "user_metadata": {"k": "v"}},
        NEW,
    ),
    (
        "weights",
        "load",
        "LoadWeightsRequest",
        {"model_id": RUN, "path": f"tinker://{RUN}/weights/a"},
        {"seq_id": 4, "type": "load_weights"},
        OLD,
    ),
    (
        "weights",
        "load",
        "LoadWeightsRequest",
        {"path": f"tinker://{RUN}/weights/a", "optimizer": False},
        {
            "model_id": RUN,
            "seq_id": 4,
            "session_id": "session-0",
            "model_seq_id": 1,
            "base_model": "Qwen/Qwen3-8B",
            "user_metadata": {"k": "v"},
            "optimizer_config": lambda T: T.types.AdamOptimizerConfig(),
            "weights_access_token": "tml-weights-token",
        },
        NEW,
    ),
    (
        "weights",
        "save_for_sampler",
        "SaveWeightsForSamplerRequest",
        {"model_id": RUN},
        {"path": "a", "sampling_session_seq_id": 2, "seq_id": 4, "type": "save_weights_for_sampler"},
        BOTH,
    ),
    (
        "weights",
        "save_for_sampler",
        "SaveWeightsForSamplerRequest",
        {"model_id": RUN},
        {"ttl_seconds": 3600, "user_metadata": {"k": "v"}},
        NEW,
    ),
    (
        "weights",
        "save_external",
        "SaveWeightsExternalRequest",
        {"model_id": RUN, "path": "a"},
        {"seq_id": 4, "ttl_seconds": 3600, "age_encryption_recipients": ["age1abc"]},
        NEW,
    ),
    (
        "service",
        "create_session",
        "CreateSessionRequest",
        {"tags": ["one"], "user_metadata": None, "sdk_version": "1.0.0"},
        {"type": "create_session"},
        BOTH,
    ),
    (
        "service",
        "create_session",
        "CreateSessionRequest",
        {"tags": [], "user_metadata": {}, "sdk_version": "1.0.0"},
        {"project_id": "project-1", "display_name": "a name"},
        NEW,
    ),
    (
        "service",
        "create_sampling_session",
        "CreateSamplingSessionRequest",
        {"session_id": "session-0", "sampling_session_seq_id": 0},
        {"base_model": "Qwen/Qwen3-8B", "model_path": f"tinker://{RUN}/sampler_weights/a"},
        BOTH,
    ),
    (
        "models",
        "copy_weights",
        "CopyWeightsRequest",
        {"source_path": f"tinker://{RUN}/weights/a"},
        {
            "session_id": "session-0",
            "model_seq_id": 1,
            "destination_project_id": "project-1",
            "ttl_seconds": 3600,
            "weights_access_token": "tml-weights-token",
        },
        NEW,
    ),
    (
        "models",
        "create",
        "LoraConfig",
        {"rank": 8},
        {"seed": 7, "train_unembed": False, "train_mlp": False, "train_attn": False},
        BOTH,
    ),
]


def build(T: Any, request_type: str, arguments: dict[str, Any]) -> Any:
    """The request. A LoraConfig travels inside a create_model request."""
    values = {name: value(T) if callable(value) else value for name, value in arguments.items()}
    if request_type != "LoraConfig":
        return getattr(T.types, request_type)(**values)
    config = T.types.LoraConfig(**values)
    around = {"session_id": "session-0", "model_seq_id": 0, "base_model": "Qwen/Qwen3-8B"}
    return T.types.CreateModelRequest(**around, lora_config=config)


def register(name: str, row: Row, arguments: dict[str, Any]) -> None:
    resource, method, request_type, _, _, versions = row

    async def act(T: Any, client: Any) -> None:
        await getattr(getattr(client, resource), method)(request=build(T, request_type, arguments))

    add(f"low-level/{name}", act, on="low_level", versions=versions, from_start=True)


for row in ROWS:
    _, method, request_type, required, optional, versions = row
    label = f"{request_type}{'-0.36' if versions == NEW else ''}"
    register(f"{label}/required-only", row, required)
    register(f"{label}/all", row, required | optional)
    for option, value in optional.items():
        register(f"{label}/{option}", row, required | {option: value})
        register(f"{label}/{option}-none", row, required | {option: None})


async def health(T: Any, client: Any) -> None:
    await client.service.health_check()


add("low-level/health", health, on="low_level")
