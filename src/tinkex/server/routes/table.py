"""The handler of every endpoint of `wire.endpoints`, and of the two calls that only `tinkex` itself uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from starlette.routing import Route

from tinkex.server.http.handlers import Handler, guarded
from tinkex.server.routes import (
    account,
    checkpoints,
    copies,
    files,
    futures,
    imports,
    insight,
    runs,
    sampling,
    sessions,
    training,
)
from tinkex.wire import endpoints
from tinkex.wire.endpoints import Endpoint

HANDLERS: Final[Mapping[Endpoint, Handler]] = {
    # The service and the session
    endpoints.CLIENT_CONFIG: account.client_config,
    endpoints.CLIENT_DYNAMIC_CONFIG: account.client_dynamic_config,
    endpoints.AUTH_TOKEN: account.auth_token,
    endpoints.HEALTHZ: account.healthz,
    endpoints.GET_SERVER_CAPABILITIES: account.get_server_capabilities,
    endpoints.CREATE_SESSION: sessions.create_session,
    endpoints.SESSION_HEARTBEAT: sessions.session_heartbeat,
    endpoints.FINISH_SESSION: sessions.finish_session,
    endpoints.CREATE_SAMPLING_SESSION: sampling.create_sampling_session,
    endpoints.JOIN_SAMPLING_SESSION: sampling.join_sampling_session,
    endpoints.TELEMETRY: sessions.telemetry,
    # Training
    endpoints.CREATE_MODEL: training.create_model,
    endpoints.UNLOAD_MODEL: training.unload_model,
    endpoints.GET_INFO: runs.get_info,
    endpoints.FORWARD: training.forward,
    endpoints.FORWARD_BACKWARD: training.forward_backward,
    endpoints.OPTIM_STEP: training.optim_step,
    endpoints.CREATE_CUSTOM_LOSS: account.create_custom_loss,
    endpoints.SAVE_WEIGHTS: training.save_weights,
    endpoints.SAVE_WEIGHTS_FOR_SAMPLER: training.save_weights_for_sampler,
    endpoints.SAVE_WEIGHTS_EXTERNAL: training.save_weights_external,
    endpoints.LOAD_WEIGHTS: training.load_weights,
    # Sampling
    endpoints.ASAMPLE: sampling.asample,
    endpoints.SAMPLE_STREAM: sampling.sample_stream,
    endpoints.GET_SAMPLER: runs.get_sampler,
    endpoints.TOKENIZER_FILE: files.tokenizer_file,
    # Results
    endpoints.RETRIEVE_FUTURE: futures.retrieve_future,
    endpoints.RETRIEVE_FUTURES: futures.retrieve_futures,
    endpoints.CANCEL_FUTURE: futures.cancel_future,
    # Runs and checkpoints
    endpoints.LIST_TRAINING_RUNS: runs.list_training_runs,
    endpoints.GET_TRAINING_RUN: runs.get_training_run,
    endpoints.LIST_CHECKPOINTS: checkpoints.list_checkpoints,
    endpoints.LIST_USER_CHECKPOINTS: checkpoints.list_user_checkpoints,
    endpoints.DELETE_CHECKPOINT: checkpoints.delete_checkpoint,
    endpoints.PUBLISH_CHECKPOINT: checkpoints.publish_checkpoint,
    endpoints.UNPUBLISH_CHECKPOINT: checkpoints.unpublish_checkpoint,
    endpoints.SET_CHECKPOINT_TTL: checkpoints.set_checkpoint_ttl,
    endpoints.CHECKPOINT_ARCHIVE: files.checkpoint_archive,
    endpoints.EXTERNAL_WEIGHTS_URLS: files.external_weights_urls,
    endpoints.WEIGHTS_INFO: checkpoints.weights_info,
    endpoints.COPY_WEIGHTS: copies.copy_weights,
    # For the console and `tinkex run watch`
    endpoints.RUN_STEPS: insight.run_steps,
    endpoints.SERVICE_STATE: insight.service_state,
    endpoints.FAILED_OPERATIONS: insight.failed_operations,
    # Sessions and the account
    endpoints.LIST_SESSIONS: sessions.list_sessions,
    endpoints.GET_SESSION: sessions.get_session,
    endpoints.SET_SESSION_PROJECT: sessions.set_session_project,
    endpoints.SESSION_TRACE_EXPORT: sessions.session_trace_export,
    endpoints.SEARCH_SESSIONS: sessions.search_sessions,
    endpoints.AUDIT_LOG: account.audit_log,
    endpoints.BILLING_USAGE: account.billing_usage,
    endpoints.CHECKPOINT_STORAGE_USAGE: account.checkpoint_storage_usage,
    endpoints.WHOAMI: account.whoami,
    endpoints.REVOKE_KEY: account.revoke_key,
}

_MOST_CALLED: Final = (
    endpoints.RETRIEVE_FUTURE,
    endpoints.ASAMPLE,
    endpoints.FORWARD_BACKWARD,
    endpoints.OPTIM_STEP,
    endpoints.FORWARD,
    endpoints.SESSION_HEARTBEAT,
)
"""Starlette tries routes in order, so the endpoints of a training loop come first."""


def api_routes() -> list[Route]:
    """Return one route per endpoint. Longer paths come first, because `{checkpoint_id:path}` matches slashes too."""
    rows = sorted(HANDLERS.items(), key=lambda row: (row[0] not in _MOST_CALLED, -len(row[0].path)))
    return [
        *(
            Route(_pattern(endpoint.path), guarded(endpoint.name, handler), methods=[endpoint.method])
            for endpoint, handler in rows
        ),
        Route("/api/v1/files/{token}/{name}", guarded("download_file", files.download_file)),
        Route("/api/v1/import_weights", guarded("import_weights", imports.import_weights), methods=["POST"]),
    ]


def _pattern(path: str) -> str:
    """Let the ids that consist of several segments match slashes."""
    return re.sub(r"\{(checkpoint_id|tokenizer)\}", r"{\1:path}", path)
