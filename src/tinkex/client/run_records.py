"""`RunRecords`: lists, finds, names, archives and deletes training runs. `RestClient` has its methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tinkex.client._calls.handshake import ready
from tinkex.client._runtime.account_client import AccountClient, keeps_records
from tinkex.client._runtime.operation import Operation
from tinkex.client.future import APIFuture
from tinkex.errors import NotFoundError, ValidationError
from tinkex.rules.run_names import LATEST, LEAST_PREFIX, check_run_name, check_tags, name_in
from tinkex.types import (
    DeletedTrainingRun,
    ParsedCheckpointTinkerPath,
    RunMetricsResponse,
    RunSamplesResponse,
    RunStepsResponse,
    TrainingRun,
    TrainingRunsResponse,
)
from tinkex.wire import endpoints, requests

PAGE = 100
"""Runs that are asked for at once where the service cannot look for one."""


class RunRecords(AccountClient):
    """Training runs. Starts none."""

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: str = "owned",
        project_id: str | None = None,
        *,
        search: str | None = None,
        status: str | None = None,
        tag: str | None = None,
        base_model: str | None = None,
        archived: str | None = None,
        order: str | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        """List your runs, the latest first, a page at a time. Only our own service has what follows `project_id`.

        `search`: words that are in the name, the id, the base model or a tag. `status`: running, idle, finished or
        failed. `archived`: no (as without it), only, all. `order`: created, last_request, name, steps, loss; a minus
        before it reverses it.
        """
        own = {"q": search, "status": status, "tag": tag, "base_model": base_model, "archived": archived}
        own["order"] = order
        query = {"limit": limit, "offset": offset, "access_scope": access_scope, "project_id": project_id, **own}
        needs_records = any(value is not None for value in own.values())
        return self._call("list_training_runs", endpoints.LIST_TRAINING_RUNS, query, needs_records=needs_records)

    async def list_training_runs_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: str = "owned",
        project_id: str | None = None,
        *,
        search: str | None = None,
        status: str | None = None,
        tag: str | None = None,
        base_model: str | None = None,
        archived: str | None = None,
        order: str | None = None,
    ) -> TrainingRunsResponse:
        return await self.list_training_runs(
            limit, offset, access_scope, project_id,
            search=search, status=status, tag=tag, base_model=base_model, archived=archived, order=order,
        )  # fmt: skip

    def get_training_run(self, training_run_id: str, access_scope: str = "owned") -> APIFuture[TrainingRun]:
        query = {"access_scope": access_scope}
        return self._call("get_training_run", endpoints.GET_TRAINING_RUN, query, run_id=training_run_id)

    async def get_training_run_async(self, training_run_id: str, access_scope: str = "owned") -> TrainingRun:
        return await self.get_training_run(training_run_id, access_scope)

    def get_training_run_by_tinker_path(self, tinker_path: str, access_scope: str = "owned") -> APIFuture[TrainingRun]:
        return self.get_training_run(_run_of(tinker_path), access_scope)

    async def get_training_run_by_tinker_path_async(self, tinker_path: str, access_scope: str = "owned") -> TrainingRun:
        return await self.get_training_run_by_tinker_path(tinker_path, access_scope)

    def find_run(self, run: str) -> APIFuture[TrainingRun]:
        """Return the run that you name: by its id, the beginning of it, its name, `latest`, or a checkpoint's path.

        A name that several runs have is that of the newest; `latest` is the run that was used last. On services other
        than ours the runs are listed and compared here, with the names that `user_metadata` gives them.

        >>> training = service.create_lora_training_client("Qwen/Qwen3-8B", name="harbour")
        >>> service.create_rest_client().find_run("harbour").result().training_run_id == training.model_id
        True
        """
        link = self._session.link()

        async def work(operation: Operation) -> TrainingRun:
            await ready(link)
            if keeps_records(link.server):
                found: TrainingRun = await self._call("find_run", endpoints.FIND_TRAINING_RUN, {"run": run})
                return found
            return await self._find_in_list(run)

        return self._session.run("find_run", work)

    async def find_run_async(self, run: str) -> TrainingRun:
        return await self.find_run(run)

    def has_run_records(self) -> APIFuture[bool]:
        """Return whether the service keeps names, tags and a status of runs, and can archive and delete them."""
        link = self._session.link()

        async def work(operation: Operation) -> bool:
            await ready(link)
            return keeps_records(link.server)

        return self._session.run("has_run_records", work)

    async def has_run_records_async(self) -> bool:
        return await self.has_run_records()

    def rename_run(self, training_run_id: str, name: str | None) -> APIFuture[TrainingRun]:
        """Give a run another name; None or an empty text takes its name away. Only our own service has it."""
        return self._change("rename_run", training_run_id, name=check_run_name(name))

    async def rename_run_async(self, training_run_id: str, name: str | None) -> TrainingRun:
        return await self.rename_run(training_run_id, name)

    def tag_run(self, training_run_id: str, tags: Sequence[str]) -> APIFuture[TrainingRun]:
        """Give a run these tags instead of those that it has. Only our own service has it."""
        return self._change("tag_run", training_run_id, tags=check_tags(tags))

    async def tag_run_async(self, training_run_id: str, tags: Sequence[str]) -> TrainingRun:
        return await self.tag_run(training_run_id, tags)

    def archive_run(self, training_run_id: str, archived: bool = True) -> APIFuture[TrainingRun]:
        """Leave a run out of lists, or (`archived=False`) list it again. It keeps all it has. Only ours has it."""
        return self._change("archive_run", training_run_id, archived=archived)

    async def archive_run_async(self, training_run_id: str, archived: bool = True) -> TrainingRun:
        return await self.archive_run(training_run_id, archived)

    def delete_run(self, training_run_id: str, force: bool = False) -> APIFuture[DeletedTrainingRun]:
        """Delete a run and its history for good. Only our own service has it.

        Without `force`, a run that has checkpoints or is being trained raises a ConflictError that names them; with it,
        they are deleted too.
        """
        query = {"force": "true"} if force else None
        return self._call(
            "delete_run", endpoints.DELETE_TRAINING_RUN, query, needs_records=True, run_id=training_run_id
        )

    async def delete_run_async(self, training_run_id: str, force: bool = False) -> DeletedTrainingRun:
        return await self.delete_run(training_run_id, force)

    def get_run_steps(self, training_run_id: str, after_seq_id: int = -1) -> APIFuture[RunStepsResponse]:
        """Return a run's optimizer steps with loss, learning rate and tokens, oldest first. Only our service has it."""
        query = {"after_seq_id": after_seq_id}
        return self._call("get_run_steps", endpoints.RUN_STEPS, query, run_id=training_run_id)

    async def get_run_steps_async(self, training_run_id: str, after_seq_id: int = -1) -> RunStepsResponse:
        return await self.get_run_steps(training_run_id, after_seq_id)

    def get_run_metrics(self, training_run_id: str, after: int = 0, most: int = 1000) -> APIFuture[RunMetricsResponse]:
        """Return the numbers that a program logged for a run, oldest first. Only our service has it."""
        query = {"after": after, "most": most}
        return self._call("get_run_metrics", endpoints.RUN_METRICS, query, run_id=training_run_id)

    async def get_run_metrics_async(self, training_run_id: str, after: int = 0, most: int = 1000) -> RunMetricsResponse:
        return await self.get_run_metrics(training_run_id, after, most)

    def get_run_samples(self, training_run_id: str, after: int = 0, most: int = 1000) -> APIFuture[RunSamplesResponse]:
        """Return the samples that a program logged for a run, oldest first. Only our service has it."""
        query = {"after": after, "most": most}
        return self._call("get_run_samples", endpoints.RUN_SAMPLES, query, run_id=training_run_id)

    async def get_run_samples_async(self, training_run_id: str, after: int = 0, most: int = 1000) -> RunSamplesResponse:
        return await self.get_run_samples(training_run_id, after, most)

    def get_run_history(self, training_run_id: str, format: Literal["csv", "jsonl"] = "csv") -> APIFuture[str]:
        """Return the steps of a run and the numbers that were logged for it, as one text. Only our service has it."""
        path = endpoints.RUN_HISTORY.url(run_id=training_run_id) + f"?format={format}"
        return self._ask(endpoints.RUN_HISTORY, path=path, read=lambda response: response.content.decode())

    async def get_run_history_async(self, training_run_id: str, format: Literal["csv", "jsonl"] = "csv") -> str:
        return await self.get_run_history(training_run_id, format)

    def _change(self, method: str, training_run_id: str, **changes: object) -> APIFuture[TrainingRun]:
        body = requests.update_run(changes)
        return self._call(method, endpoints.UPDATE_TRAINING_RUN, body=body, needs_records=True, run_id=training_run_id)

    async def _find_in_list(self, run: str) -> TrainingRun:
        """Find a run where the service cannot: an id with one request, everything else in the list of all runs."""
        if run != LATEST:
            try:
                return await self.get_training_run(_run_of(run) if run.startswith("tinker://") else run)
            except NotFoundError:
                if run.startswith("tinker://"):
                    raise
        runs: list[TrainingRun] = []
        while True:
            page = await self.list_training_runs(PAGE, len(runs))
            runs += page.training_runs
            if not page.training_runs or len(runs) >= page.cursor.total_count:
                return match_run(runs, run)


def match_run(runs: Sequence[TrainingRun], text: str) -> TrainingRun:
    """Return the run that a text names, by the rules of our service. Raises ValidationError if there is not one."""
    newest_first = sorted(runs, key=lambda run: run.last_request_time, reverse=True)
    if text == LATEST:
        if not newest_first:
            raise ValidationError("There is no training run yet. Start one, or name another service.", "unknown_run")
        return newest_first[0]
    named = [run for run in newest_first if text == (run.name or name_in(run.user_metadata))]
    begun = [run for run in newest_first if len(text) >= LEAST_PREFIX and run.training_run_id.startswith(text)]
    found = named[:1] or begun
    if len(found) == 1:
        return found[0]
    if found:
        listed = "; ".join(run.training_run_id for run in found[:10])
        raise ValidationError(f"Several training runs begin with {text!r}: {listed}. Name one.", "ambiguous_run")
    raise ValidationError(
        f"training run {text!r} is not known: no run of this service has this id or name, or an id that begins with it "
        f"({LEAST_PREFIX} characters at least). `tinkex run list` shows your runs.",
        "unknown_run",
    )


def _run_of(tinker_path: str) -> str:
    return ParsedCheckpointTinkerPath.from_tinker_path(tinker_path).training_run_id
