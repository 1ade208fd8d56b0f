"""Runs a tenant's program with the real client, as a user would write it, and records every call."""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import tinkex
from tests.faults.history import FinalRun, Intrusion, Recorder, Unanswered, Value
from tests.faults.program import TARGETS, Program, Step, batch_of
from tinkex.client.download import download_checkpoint

ANSWER_WITHIN_S = 60.0
"""A future that has no outcome by then counts as never answered. All faults of a schedule are over long before."""
MOST_TRIES = 12
"""How often a save or load is tried that a full disk makes fail."""
MODEL = "tinkex/tiny"


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How a tenant's client is set, and how long a call may be without an outcome."""

    options: dict[str, Any] = field(
        default_factory=lambda: {"timeout_s": 8.0, "max_retries": 14, "unreachable_s": 50.0}
    )
    answer_within_s: float = ANSWER_WITHIN_S


def key_of(tenant: str) -> str:
    return f"tml-{tenant}-0123456789"


@dataclass
class Board:
    """What each tenant has, for the others to try and reach."""

    runs: dict[str, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)


class Tenant:
    """One program, one client object (a new one after each `reconnect`), one thread."""

    def __init__(
        self,
        name: str,
        program: Program,
        url: str,
        recorder: Recorder,
        board: Board,
        patience: Patience | None = None,
    ) -> None:
        self.name, self.program, self.paths = name, program, dict[str, str]()
        self._patience = patience or Patience()
        self._url, self._recorder, self._board = url, recorder, board
        self._pending: list[tuple[int, str, Callable[[], Value]]] = []
        self._service = self._connect()
        self._training: tinkex.TrainingClient
        self._run_id = ""
        self.is_finished = False
        self.thread = threading.Thread(target=self._run, name=f"tenant {name}", daemon=True)

    def _connect(self) -> tinkex.ServiceClient:
        return tinkex.ServiceClient(base_url=self._url, api_key=key_of(self.name), **self._patience.options)

    @property
    def run_id(self) -> str:
        return self._run_id

    def _answer(self, future: tinkex.APIFuture[Any]) -> Any:
        return _answer(future, self._patience.answer_within_s)

    def _run(self) -> None:
        try:
            self._training = self._call(-1, "create", self._create, lambda training: None)
            self._run_id = self._board.runs[self.name] = self._training.model_id
            for index, step in enumerate(self.program.steps):
                self._do(index, step)
            self._settle()
            self.is_finished = True
        except Exception as error:
            self._recorder.say(f"{self.name} gave up: {type(error).__name__}: {error}")
        finally:
            try:
                self._service.close().result(timeout=10)
            except Exception as error:
                self._recorder.say(f"{self.name} close: {type(error).__name__}: {error}")

    def _create(self) -> tinkex.TrainingClient:
        return self._service.create_lora_training_client(
            base_model=MODEL, rank=self.program.rank, seed=self.program.seed
        )

    def _call(self, index: int, what: str, work: Callable[[], Any], view: Callable[[Any], Value]) -> Any:
        """Do a call and record the view of its result; returns the result itself."""
        results: list[Any] = []

        def viewed() -> Value:
            results.append(work())
            return view(results[0])

        self._recorder.call(self.name, index, what, viewed)
        return results[0]

    # ── Steps

    def _do(self, index: int, step: Step) -> None:
        match step.kind:
            case "train":
                data = self._data(step.number, step.is_large)
                passed = self._training.forward_backward(data, "cross_entropy")
                stepped = self._training.optim_step(tinkex.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
                self._later(index, f"forward_backward {step.number}", passed, _view_of_pass)
                self._later(index, f"optim_step {step.number}", stepped, lambda _: None)
            case "forward":
                self._later(index, str(step), self._training.forward(self._data(50), "cross_entropy"), _view_of_pass)
            case "save" | "save_sampler":
                self._save(index, step)
            case "sample":
                self._settle()
                self._sample(index, step)
            case "load":
                self._settle()
                load = lambda: self._training.load_state_with_optimizer(self.paths[step.name])  # noqa: E731
                self._until_room(index, str(step), load)
            case "wait":
                self._settle()
            case "list":
                self._settle()
                rest = self._service.create_rest_client()
                self._call(index, "list", lambda: self._answer(rest.list_checkpoints(self._run_id)), _view_of_list)
            case "intrude":
                self._intrude()
            case "reconnect":
                self._settle()
                self._call(index, "reconnect", self._reconnect, lambda _: None)

    def _later(self, index: int, what: str, future: tinkex.APIFuture[Any], view: Callable[[Any], Value]) -> None:
        """Wait for it with the next `_settle`: calls are in flight together, as in a good training loop."""
        self._pending.append((index, what, lambda: view(self._answer(future))))

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        for index, what, work in pending:
            self._recorder.call(self.name, index, what, work)

    def _data(self, number: int, is_large: bool = False) -> list[tinkex.Datum]:
        rows = batch_of(self.program.number, number, is_large=is_large)
        return [
            tinkex.Datum(
                model_input=tinkex.ModelInput.from_ints(row[:-1]), loss_fn_inputs=_inputs_of(row[1:], is_large)
            )
            for row in rows
        ]

    def _save(self, index: int, step: Step) -> None:
        self._settle()
        is_state = step.kind == "save"
        # The path is looked up when it runs: `reconnect` replaces the client.
        save = (lambda: self._training.save_state(step.name, overwrite=True)) if is_state else (
            lambda: self._training.save_weights_for_sampler(step.name)
        )  # fmt: skip
        saved = self._until_room(index, str(step), save)
        self.paths[step.name] = saved.path
        if is_state:
            self._board.paths[self.name] = saved.path
        self._recorder.history.saved.setdefault(self.name, []).append(step.name)

    def _until_room(self, index: int, what: str, ask: Callable[[], tinkex.APIFuture[Any]]) -> Any:
        """Save or load. A full disk fails it for good and changes nothing; the user frees space and does it again."""
        for _ in range(MOST_TRIES - 1):
            try:
                return self._call(index, what, lambda: self._answer(ask()), lambda _: None)
            except tinkex.RequestFailedError as error:
                if "disk" not in str(error):
                    raise
                threading.Event().wait(0.2)
        return self._call(index, what, lambda: self._answer(ask()), lambda _: None)

    def _sample(self, index: int, step: Step) -> None:
        path = self.paths[f"sampler-{step.number}"]
        sampler = self._service.create_sampling_client(model_path=path)
        params = tinkex.SamplingParams(max_tokens=8, seed=step.number, temperature=1.0)
        prompt = tinkex.ModelInput.from_ints(batch_of(self.program.number, step.number)[0])
        self._call(
            index,
            str(step),
            lambda: self._answer(sampler.sample(prompt, 2, params)),
            lambda response: [list(sequence.tokens) for sequence in response.sequences],
        )

    def _reconnect(self) -> None:
        """Close everything and go on with the run from a new client, as a program does that was started again."""
        self._service.close().result(timeout=self._patience.answer_within_s)
        self._service = self._connect()
        self._training = self._service.create_training_client_from_run(self._run_id)

    # ── What belongs to others

    def _intrude(self) -> None:
        """Try to reach every other tenant's run and checkpoints."""
        rest = self._service.create_rest_client()
        for owner, run_id in list(self._board.runs.items()):
            if owner == self.name:
                continue
            self._try(owner, "get_training_run", lambda run_id=run_id: rest.get_training_run(run_id))
            self._try(owner, "list_checkpoints", lambda run_id=run_id: rest.list_checkpoints(run_id))
            path = self._board.paths.get(owner)
            if path is not None:
                self._try(owner, "weights_info", lambda path=path: rest.get_weights_info_by_tinker_path(path))
                self._try(
                    owner, "archive", lambda path=path: rest.get_checkpoint_archive_url_from_tinker_path(path)
                )  # fmt: skip
                self._try(owner, "load_state", lambda path=path: self._training.load_state(path))
        listed = self._answer(rest.list_user_checkpoints())
        for saved in listed.checkpoints:
            for owner, run_id in list(self._board.runs.items()):
                if owner != self.name and run_id in saved.tinker_path:
                    self._note_intrusion(owner, "list_user_checkpoints", True, saved.tinker_path)

    def _try(self, owner: str, what: str, attempt: Callable[..., tinkex.APIFuture[Any]]) -> None:
        try:
            outcome, was_given = repr(self._answer(attempt()))[:200], True
        except (tinkex.NotFoundError, tinkex.RequestFailedError, tinkex.BadRequestError) as error:
            outcome, was_given = f"{type(error).__name__}: {error}"[:200], False
        # An empty list of checkpoints gives nothing away; a missing run and another's must look the same, too.
        self._note_intrusion(owner, what, was_given, outcome)

    def _note_intrusion(self, owner: str, what: str, was_given: bool, outcome: str) -> None:
        intrusion = Intrusion(tenant=self.name, owner=owner, what=what, was_given=was_given, outcome=outcome)
        self._recorder.add(self._recorder.history.intrusions, intrusion)


def final_run(url: str, tenant: Tenant) -> FinalRun:
    """Ask the service, now quiet, for what it kept of a tenant's run; and download every checkpoint."""
    with tinkex.ServiceClient(base_url=url, api_key=key_of(tenant.name), timeout_s=10.0) as service:
        rest = service.create_rest_client()
        run_id = tenant.run_id
        steps = _answer(rest.get_run_steps(run_id)).steps
        listed = _answer(rest.list_checkpoints(run_id)).checkpoints
        digests = {name: _downloaded(rest, path) for name, path in tenant.paths.items()}
        failed = _answer(rest.list_failed_operations()).operations
        return FinalRun(
            tenant=tenant.name,
            steps=[[step.seq_id, _hex(step.loss)] for step in steps],
            checkpoints=digests,
            listed=sorted(saved.checkpoint_id.split("/")[-1] for saved in listed),
            failed_operations=[f"{row.kind} {row.seq_id}: {row.error}" for row in failed],
        )


def _downloaded(rest: Any, path: str) -> str:
    """Return the digest of a checkpoint's tensors, file by file. The client compares checksums on the way."""
    try:
        with tempfile.TemporaryDirectory(prefix="tinkex-faults-") as folder:
            files = _answer(download_checkpoint(rest, path, folder))
            digest = hashlib.sha256()
            for file in sorted(files):
                if file.suffix == ".safetensors":
                    digest.update(file.name.encode() + tensors_of(file))
            return digest.hexdigest()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def tensors_of(file: Path) -> bytes:
    """Return what a safetensors file holds: its header is in front, and both are the same bytes for equal tensors."""
    content = file.read_bytes()
    assert len(content) > 8, f"{file.name} is empty"
    return content


def _inputs_of(targets: list[int], is_large: bool) -> dict[str, Any]:
    if not is_large:
        return {"target_tokens": targets, "weights": [1.0] * len(targets)}
    # Each position has the same few targets and many of no weight: bytes that hardly cost anything to compute.
    shape = (len(targets), TARGETS)
    weights = np.zeros(shape, np.float32)
    weights[:, :4] = 0.25
    return {"target_tokens": np.resize(np.array(targets, np.int64), shape), "weights": weights}


def _answer(future: tinkex.APIFuture[Any], within_s: float = ANSWER_WITHIN_S) -> Any:
    try:
        return future.result(timeout=within_s)
    except TimeoutError as error:
        if future.done():
            raise
        raise Unanswered(f"no outcome after {within_s:.0f} s: {error}") from None


def _view_of_pass(result: Any) -> Value:
    logprobs = [output["logprobs"].tolist() for output in result.loss_fn_outputs]
    digest = hashlib.sha256(repr(logprobs).encode()).hexdigest()[:16]
    return {"loss": _hex(result.metrics.get("loss:sum")), "logprobs": digest}


def _view_of_list(result: Any) -> Value:
    return sorted(saved.checkpoint_id for saved in result.checkpoints)


def _hex(number: float | None) -> str | None:
    return None if number is None else float(number).hex()
