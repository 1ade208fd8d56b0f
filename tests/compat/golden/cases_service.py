"""Cases of ServiceClient: session, training and sampling clients, capabilities, copying, closing, telemetry."""

from __future__ import annotations

from typing import Any

from .canned import as_json
from .case import BASE_MODEL, BOTH, NEW, add, case
from .recording import WEIGHTS_TOKEN

PATH = "tinker://session-0:train:0/weights/0001"
SESSION: dict[str, dict[str, Any]] = {
    "session/plain": {},
    "session/user-metadata": {"service": {"user_metadata": {"owner": "me", "run": "1"}}},
    "session/user-metadata-none": {"service": {"user_metadata": None}},
    "session/user-metadata-empty": {"service": {"user_metadata": {}}},
    "session/tag": {"env": {"TINKER_TAGS": "one"}},
    "session/tags": {"env": {"TINKER_TAGS": "one,two,three"}},
    "session/tags-empty": {"env": {"TINKER_TAGS": ""}},
    "session/cloudflare": {
        "env": {"CLOUDFLARE_ACCESS_CLIENT_ID": "cf-id", "CLOUDFLARE_ACCESS_CLIENT_SECRET": "cf-secret"},
    },
    "session/project-id": {"service": {"project_id": "project-1"}, "versions": NEW},
    "session/project-id-none": {"service": {"project_id": None}, "versions": NEW},
    "session/project-id-from-env": {"env": {"TINKER_PROJECT_ID": "project-2"}, "versions": NEW},
    "session/display-name": {"service": {"display_name": "a name"}, "versions": NEW},
    "session/header-overrides": {"service": {"default_headers_overrides": {"X-Tinker-Extra": "1"}}, "versions": NEW},
    "session/jwt": {"config": {"pjwt_auth_enabled": True}, "versions": NEW},
}
for name, circumstances in SESSION.items():
    # A sampling client is the cheapest reason for a session to be opened.
    add(
        name,
        lambda T, service: service.create_sampling_client(base_model=BASE_MODEL) and None,
        on="service",
        from_start=True,
        **circumstances,
    )


@case("session/key-passed-and-in-env", on="rest", env={"TINKER_API_KEY": "tml-from-env"})
def key_passed_and_in_env(T: Any, rest: Any) -> object:
    return rest.get_training_run("session-1:train:0")


@case("session/heartbeat", on="service", keep=("session_heartbeat",), needs_stage=True)
def heartbeat(T: Any, service: Any, stage: Any) -> None:
    service.create_sampling_client(base_model=BASE_MODEL)
    stage.forget()
    stage.wait_for("session_heartbeat")


for status, detail in (("success", None), ("errored", "out of memory"), ("interrupted", "")):

    @case(f"session/finish-{status}", on="service", versions=NEW)
    def finish(T: Any, service: Any, status: str = status, detail: str | None = detail) -> object:
        service.create_sampling_client(base_model=BASE_MODEL)
        return service.close(status, detail)


@case("session/finish-without-session", on="service", versions=NEW, from_start=True)
def finish_without_session(T: Any, service: Any) -> object:
    return service.close("success")


TELEMETRY: dict[str, Any] = {"env": {"TINKER_TELEMETRY": "1"}, "keep": ("telemetry",), "needs_stage": True}


@case("telemetry/user-error", on="training", **TELEMETRY)
def telemetry_user_error(T: Any, training: Any, stage: Any) -> None:
    """SESSION_START, then a 400: a user error, and the events that follow it."""
    stage.script["get_info"] = [as_json({"detail": "no such model"}, 400)]
    fails(training.get_info)
    stage.wait_until(lambda requests: "SESSION_END" in telemetry_events(requests), "SESSION_END")
    only_telemetry(stage)


@case("telemetry/unhandled-exception", on="training", **TELEMETRY)
def telemetry_unhandled_exception(T: Any, training: Any, stage: Any) -> None:
    """A failed future that is the server's fault."""
    stage.script["retrieve_future"] = [as_json({"error": "disk full", "category": "server"})]
    fails(lambda: training.optim_step(T.types.AdamParams()).result(60))
    stage.wait_until(lambda requests: "UNHANDLED_EXCEPTION" in telemetry_events(requests), "UNHANDLED_EXCEPTION")
    stage.wait_until(lambda requests: "SESSION_END" in telemetry_events(requests), "SESSION_END")
    only_telemetry(stage)


def fails(call: Any) -> None:
    try:
        call()
    except Exception:
        return
    raise AssertionError("the call was expected to fail")


def telemetry_events(requests: list[Any]) -> set[str]:
    return {event["event"] for r in requests if r.endpoint == "telemetry" for event in r.json()["events"]}


def only_telemetry(stage: Any) -> None:
    with stage.changed:
        stage.requests[:] = [request for request in stage.requests if request.endpoint == "telemetry"]


MODEL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, BOTH),
    "rank": ({"rank": 8}, BOTH),
    "seed": ({"seed": 7}, BOTH),
    "seed-none": ({"seed": None}, BOTH),
    "seed-zero": ({"seed": 0}, BOTH),
    "without-mlp": ({"train_mlp": False}, BOTH),
    "without-attn": ({"train_attn": False}, BOTH),
    "without-unembed": ({"train_unembed": False}, BOTH),
    "nothing-to-train": ({"train_mlp": False, "train_attn": False, "train_unembed": False}, BOTH),
    "user-metadata": ({"user_metadata": {"k": "v"}}, BOTH),
    "user-metadata-none": ({"user_metadata": None}, BOTH),
    "user-metadata-empty": ({"user_metadata": {}}, BOTH),
    "optimizer-none": ({"optimizer": None}, NEW),
}
for name, (arguments, versions) in MODEL.items():

    @case(f"create-model/{name}", on="service", versions=versions)
    def create_model(T: Any, service: Any, arguments: dict[str, Any] = arguments) -> None:
        service.create_lora_training_client(BASE_MODEL, **arguments)


for optimizer in ("AdamOptimizerConfig", "DimuonOptimizerConfig"):

    @case(f"create-model/optimizer-{optimizer}", on="service", versions=NEW)
    def create_model_with_optimizer(T: Any, service: Any, optimizer: str = optimizer) -> None:
        service.create_lora_training_client(BASE_MODEL, optimizer=getattr(T.types, optimizer)())


@case("create-model/second-client-counts-on", on="service")
def second_model(T: Any, service: Any) -> None:
    service.create_lora_training_client(BASE_MODEL)
    service.create_lora_training_client(BASE_MODEL)


FROM_STATE: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "plain": ("create_training_client_from_state", {}, BOTH),
    "user-metadata": ("create_training_client_from_state", {"user_metadata": {"k": "v"}}, BOTH),
    "user-metadata-none": ("create_training_client_from_state", {"user_metadata": None}, BOTH),
    "base-model": ("create_training_client_from_state", {"base_model": "Qwen/Qwen3-8B-Base"}, NEW),
    "access-token": ("create_training_client_from_state", {"weights_access_token": WEIGHTS_TOKEN}, NEW),
    "with-optimizer": ("create_training_client_from_state_with_optimizer", {}, NEW),
    "with-optimizer-user-metadata": (
        "create_training_client_from_state_with_optimizer",
        {"user_metadata": {"k": "v"}},
        NEW,
    ),
}
for name, (method, arguments, versions) in FROM_STATE.items():

    @case(f"from-state/{name}", on="service", versions=versions)
    def from_state(T: Any, service: Any, method: str = method, arguments: dict[str, Any] = arguments) -> None:
        getattr(service, method)(PATH, **arguments)

    @case(f"from-state-async/{name}", on="service", versions=versions)
    async def from_state_async(
        T: Any, service: Any, method: str = method, arguments: dict[str, Any] = arguments
    ) -> None:
        await getattr(service, f"{method}_async")(PATH, **arguments)

    if versions == NEW:

        @case(f"from-state-by-load/{name}", on="service", versions=NEW, config={"create_model_via_load_weights": True})
        def from_state_by_load(
            T: Any, service: Any, method: str = method, arguments: dict[str, Any] = arguments
        ) -> None:
            getattr(service, method)(PATH, **arguments)


SAMPLER: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "base-model": ({"base_model": BASE_MODEL}, BOTH),
    "model-path": ({"model_path": "tinker://session-0:train:0/sampler_weights/a"}, BOTH),
    "both": ({"base_model": BASE_MODEL, "model_path": "tinker://session-0:train:0/sampler_weights/a"}, BOTH),
    "base-model-path-none": ({"base_model": BASE_MODEL, "model_path": None}, BOTH),
    "neither": ({}, BOTH),
    "path-without-scheme": ({"model_path": "session-0:train:0/sampler_weights/a"}, BOTH),
}
for name, (arguments, versions) in SAMPLER.items():

    @case(f"create-sampling-session/{name}", on="service", versions=versions)
    def create_sampler(T: Any, service: Any, arguments: dict[str, Any] = arguments) -> None:
        service.create_sampling_client(**arguments)


@case("capabilities", on="service")
def capabilities(T: Any, service: Any) -> None:
    service.get_server_capabilities()


COPIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ttl": {"ttl_seconds": 3600},
    "access-token": {"weights_access_token": WEIGHTS_TOKEN},
}
for name, arguments in COPIES.items():

    @case(f"copy-weights/{name}", on="service", versions=NEW, service={"project_id": "project-1"})
    def copy_weights(T: Any, service: Any, arguments: dict[str, Any] = arguments) -> object:
        return service.copy_weights(PATH, **arguments)


@case("copy-weights/without-project", on="service", versions=NEW)
def copy_weights_without_project(T: Any, service: Any) -> object:
    return service.copy_weights(PATH)


for server_side in (True, False):

    @case(
        f"custom-loss/{'server' if server_side else 'client'}-side",
        on="service",
        versions=NEW,
        config={"custom_loss_server_side": server_side},
        needs_torch=True,
    )
    def custom_loss(T: Any, service: Any) -> object:
        training = service.create_lora_training_client(BASE_MODEL)
        handle = service.create_custom_loss(negative_log_likelihood, {"logprobs": 1, "weights": 1}).result(60)
        datum = T.types.Datum(
            model_input=T.types.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
        )
        return training.forward_backward_custom([datum], handle)


def negative_log_likelihood(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss}
