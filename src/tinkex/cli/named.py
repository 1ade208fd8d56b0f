"""Finds what the user of a command names: a run, a checkpoint, or what to sample from."""

from __future__ import annotations

import argparse

import tinkex
from tinkex.cli.connect import rest_client
from tinkex.errors import NotFoundError, ValidationError
from tinkex.terminal.format import aware

RUN = "a name, an id or its beginning, the path of a checkpoint, or latest"
CHECKPOINT = "tinker://…, RUN/weights/NAME, or a run: its newest checkpoint; latest: the newest of all"
WEIGHTS = "tinker://…/sampler_weights/…, a run: what it saved for sampling last, or latest: what you saved last"
"""What the help of commands says of a run, of a checkpoint, and of weights to sample from."""
LATEST = "latest"  # `rules.run_names` has it too, but would load every type for `--help`
KINDS = ("weights", "sampler_weights", "external_weights")
SAMPLER = "sampler"
SCHEME = "tinker://"
PAGE = 1000


def run_named(client: tinkex.RestClient, text: str) -> tinkex.TrainingRun:
    """Return the run that a text names."""
    try:
        return client.find_run(text).result()
    except NotFoundError:
        if text != LATEST:
            raise
        raise ValidationError(
            "There is no training run yet. Start one, or name another service with TINKER_BASE_URL.", "no_run"
        ) from None


def is_unknown(error: Exception) -> bool:
    """Whether an error says that no run is called so."""
    return isinstance(error, NotFoundError) or getattr(error, "code", "") == "unknown_run"


def checkpoint_named(client: tinkex.RestClient, text: str, kind: str | None = None) -> str:
    """Return the path of the checkpoint that a text names, of one kind (`sampler`) or of any.

    In a path, the run may have its name or the beginning of its id too. A run alone is its newest checkpoint.
    """
    run, _, rest = text.removeprefix(SCHEME).partition("/")
    if text.startswith(SCHEME):
        return tinkex.ParsedCheckpointTinkerPath.from_tinker_path(text).tinker_path
    if rest.partition("/")[0] in KINDS:
        return f"{SCHEME}{run_named(client, run).training_run_id}/{rest}"
    if text == LATEST:
        saved, owner = all_checkpoints(client), "There is"
    else:
        found = run_named(client, text)
        saved = client.list_checkpoints(found.training_run_id).result().checkpoints
        owner = f"The run {found.name or found.training_run_id} has"
    fit = [checkpoint for checkpoint in saved if kind in (None, checkpoint.checkpoint_type)]
    if fit:
        return max(fit, key=lambda checkpoint: aware(checkpoint.time)).tinker_path
    if kind == SAMPLER:
        raise ValidationError(
            f"{owner} no checkpoint to sample from: training.save_weights_for_sampler(name) saves one.", "no_checkpoint"
        )
    raise ValidationError(f"{owner} no checkpoint yet: training.save_state(name) saves one.", "no_checkpoint")


def all_checkpoints(client: tinkex.RestClient) -> list[tinkex.Checkpoint]:
    saved: list[tinkex.Checkpoint] = []
    while True:
        page = client.list_user_checkpoints(limit=PAGE, offset=len(saved)).result()
        saved += page.checkpoints
        if not page.checkpoints or (page.cursor is not None and len(saved) >= page.cursor.total_count):
            return saved


def weights_named(args: argparse.Namespace, text: str, base_models: list[str]) -> str:
    """Return the path of the weights to sample from that a text names, which is no base model of the service."""
    try:
        return checkpoint_named(rest_client(args), text, SAMPLER)
    except (NotFoundError, ValidationError) as error:
        if not is_unknown(error):
            raise
        raise ValidationError(
            f"The service has no model {text!r}, and you have no run with this id or name. It offers "
            f"{', '.join(base_models) or 'no base model'}; `tinkex run list` shows your runs, `latest` is what you "
            "saved for sampling last."
        ) from None
