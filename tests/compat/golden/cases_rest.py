"""Cases of RestClient and AdminClient: runs, checkpoints, sessions, usage."""

from __future__ import annotations

import datetime
from typing import Any

from .case import BOTH, NEW, OLD, case
from .recording import WEIGHTS_TOKEN

RUN = "session-0:train:0"
WEIGHTS = f"tinker://{RUN}/weights/0001"
SAMPLER = f"tinker://{RUN}/sampler_weights/a"
EXTERNAL = f"tinker://{RUN}/external_weights/a"

# name -> method, positional arguments, keyword arguments, versions
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], tuple[str, ...]]] = {
    "training-run/get": ("get_training_run", (RUN,), {}, BOTH),
    "training-run/get-accessible": ("get_training_run", (RUN,), {"access_scope": "accessible"}, NEW),
    "training-run/by-path": ("get_training_run_by_tinker_path", (WEIGHTS,), {}, BOTH),
    "training-run/by-sampler-path": ("get_training_run_by_tinker_path", (SAMPLER,), {}, BOTH),
    "training-run/by-external-path": ("get_training_run_by_tinker_path", (EXTERNAL,), {}, BOTH),
    "training-run/by-bad-path": ("get_training_run_by_tinker_path", ("tinker://run/0001",), {}, BOTH),
    "training-runs/plain": ("list_training_runs", (), {}, BOTH),
    "training-runs/page": ("list_training_runs", (), {"limit": 5, "offset": 10}, BOTH),
    "training-runs/project": ("list_training_runs", (), {"project_id": "project-1", "access_scope": "accessible"}, NEW),
    "checkpoints/of-run": ("list_checkpoints", (RUN,), {}, BOTH),
    "checkpoints/of-user": ("list_user_checkpoints", (), {}, BOTH),
    "checkpoints/of-user-page": ("list_user_checkpoints", (), {"limit": 5, "offset": 10}, BOTH),
    "checkpoint/delete": ("delete_checkpoint", (RUN, "weights/0001"), {}, BOTH),
    "checkpoint/delete-by-path": ("delete_checkpoint_from_tinker_path", (SAMPLER,), {}, BOTH),
    "checkpoint/publish": ("publish_checkpoint_from_tinker_path", (WEIGHTS,), {}, BOTH),
    "checkpoint/unpublish": ("unpublish_checkpoint_from_tinker_path", (WEIGHTS,), {}, BOTH),
    "checkpoint/archive": ("get_checkpoint_archive_url", (RUN, "sampler_weights/a"), {}, OLD),
    "checkpoint/archive-by-path": ("get_checkpoint_archive_url_from_tinker_path", (SAMPLER,), {}, OLD),
    "checkpoint/ttl": ("set_checkpoint_ttl_from_tinker_path", (WEIGHTS,), {"ttl_seconds": 3600}, NEW),
    "checkpoint/ttl-none": ("set_checkpoint_ttl_from_tinker_path", (WEIGHTS,), {"ttl_seconds": None}, NEW),
    "checkpoint/weights-info": ("get_weights_info_by_tinker_path", (WEIGHTS,), {}, NEW),
    "checkpoint/external-urls": ("get_external_weights_urls", (EXTERNAL,), {}, NEW),
    "checkpoint/external-urls-of-other-kind": ("get_external_weights_urls", (WEIGHTS,), {}, NEW),
    "checkpoint/copy": ("copy_weights", (WEIGHTS, "project-1"), {}, NEW),
    "checkpoint/copy-without-project": ("copy_weights", (WEIGHTS,), {}, NEW),
    "checkpoint/copy-ttl-token": (
        "copy_weights",
        (WEIGHTS, "project-1"),
        {"ttl_seconds": 3600, "weights_access_token": WEIGHTS_TOKEN},
        NEW,
    ),
    "session/get": ("get_session", ("session-0",), {}, NEW),
    "session/get-accessible": ("get_session", ("session-0",), {"access_scope": "accessible"}, NEW),
    "session/list": ("list_sessions", (), {}, NEW),
    "session/list-page": ("list_sessions", (), {"limit": 5, "offset": 10, "access_scope": "accessible"}, NEW),
    "session/assign-project": ("assign_session_project", ("session-0", "project-1"), {}, NEW),
    "session/trace-export": ("export_session_trace", ("session-0",), {}, NEW),
}
for name, (method, positional, named, versions) in CALLS.items():

    @case(f"rest/{name}", on="rest", versions=versions)
    def call_rest(T: Any, rest: Any, method: str = method, positional: Any = positional, named: Any = named) -> object:
        return getattr(rest, method)(*positional, **named)


@case("rest/session/whoami", on="rest", versions=NEW, config={"pjwt_auth_enabled": True}, from_start=True)
def whoami(T: Any, rest: Any) -> object:
    return rest.whoami()


@case("rest/first-requests", on="rest", from_start=True)
def rest_first_requests(T: Any, rest: Any) -> object:
    return rest.get_training_run(RUN)


@case("rest/from-service", on="service", from_start=True)
def rest_from_service(T: Any, service: Any) -> object:
    return service.create_rest_client().get_training_run(RUN)


def search(**arguments: Any) -> Any:
    return lambda T: T.types.SessionSearchRequest(**arguments)


SEARCHES: dict[str, Any] = {
    "plain": search(),
    "by-id": search(session_id="session-0"),
    "by-projects": search(project_ids=["project-1", "project-2"]),
    "no-projects": search(project_ids=[]),
    "by-metadata": search(user_metadata={"k": "v"}),
    "by-name": search(display_name="a name"),
    "limit": search(limit=5),
    "none-passed": search(session_id=None, project_ids=None, display_name=None, statuses=None, cursor=None),
    "own": lambda T: T.types.SessionSearchRequest(owner=T.types.OwnSearchOwner()),
    "accessible": lambda T: T.types.SessionSearchRequest(owner=T.types.AccessibleSearchOwner()),
    "of-user": lambda T: T.types.SessionSearchRequest(owner=T.types.UserSearchOwner(owner_urns=["tml:user:1"])),
    "by-status": lambda T: T.types.SessionSearchRequest(
        statuses=[
            T.types.ActiveSessionStatusQuery(),
            T.types.FailedSessionStatusQuery(),
            T.types.CancelledSessionStatusQuery(),
            T.types.ClientFinishedSessionStatusQuery(),
            T.types.ClientFinishedSessionStatusQuery(reasons=["success", "errored"]),
        ]
    ),
    "next-page": lambda T: T.types.SessionSearchRequest(
        cursor=T.types.SessionSearchCursor(
            last_created_at=datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC), last_session_id="session-0"
        )
    ),
}
for name, build in SEARCHES.items():

    @case(f"rest/session/search-{name}", on="rest", versions=NEW)
    def search_sessions(T: Any, rest: Any, build: Any = build) -> object:
        return rest.search_sessions(build(T))


ADMIN: dict[str, tuple[str, dict[str, Any]]] = {
    "audit-log": ("get_audit_log", {}),
    "audit-log-day": ("get_audit_log", {"event_type": "checkpoints", "day": datetime.date(2026, 1, 2)}),
    "billing-usage": (
        "get_billing_usage",
        {"starting_on": "2026-01-01T00:00:00Z", "ending_before": "2026-02-01T00:00:00Z"},
    ),
    "billing-usage-datetimes": (
        "get_billing_usage",
        {
            "starting_on": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
            "ending_before": datetime.datetime(2026, 2, 1),
        },
    ),
    "storage-usage": ("get_current_checkpoint_storage_usage", {}),
    "storage-usage-project": ("get_current_checkpoint_storage_usage", {"project_id": "project-1"}),
}
for name, (method, named) in ADMIN.items():

    @case(f"admin/{name}", on="admin", versions=NEW)
    def call_admin(T: Any, admin: Any, method: str = method, named: Any = named) -> object:
        return getattr(admin, method)(**named)
