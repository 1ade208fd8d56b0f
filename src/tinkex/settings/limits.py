"""Every limit that a service enforces, in one table: its setting, its scope, its status, and what to do about it.

The flags of `tinkex serve`, the page of limits, the error messages and the label of the metric
`tinkex_limit_rejections_total` come from here. `server/limits/ledger.py` counts what is in use.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tinkex.settings.setting import Setting, count, number, optional

Scope = Literal["connection", "address", "request", "tenant", "service"]


class Limit(NamedTuple):
    """One limit: the setting that changes it, what it bounds, and how a caller that breaks it is told."""

    setting: Setting
    scope: Scope
    status: int
    code: str
    remedy: str
    """What the caller can do: the last sentence of the message."""
    resource: str = ""
    """What the ledger counts, where something is held and given back. A tenant's and the service's limit of one
    resource are two rows with the same name."""


LIMITS = (
    # -- connections: before a key is known
    Limit(
        Setting("max_connections", count(1), "Connections in all; half of the files that the "
                "process may open, if that is less.", "N"),
        "service", 503, "too_many_connections", "Try again later.", "connections",
    ),
    Limit(
        Setting("max_connections_per_address", count(1), "Connections from one address: an IPv4 address or "
                "an IPv6 network (/64). Beyond it, a new connection closes the one that is idle for longest.", "N"),
        "address", 503, "too_many_connections", "Use fewer connections; behind a proxy, allow the proxy more.",
        "connections",
    ),
    Limit(
        Setting("head_timeout_s", number("seconds", 0.1), "Seconds for the head of a request to arrive.", "S"),
        "connection", 408, "head_stalled", "Send the whole head at once.",
    ),
    # -- requests and their bodies
    Limit(
        Setting("max_requests_per_s", number("requests", 1), "Requests of one tenant per second, on average; "
                "five seconds' worth may come at once. Polls and heartbeats do not count: ten times as many are "
                "served at once, others a second later.", "N"),
        "tenant", 429, "too_many_requests", "Send fewer requests, or put more work into each.",
    ),
    Limit(
        Setting("max_body_bytes", count(1024), "The largest training pass that is read. Other JSON bodies have at "
                "most 4 MiB.", "BYTES"),
        "request", 413, "body_too_large", "Send fewer datums per call.",
    ),
    Limit(
        Setting("max_tenant_body_bytes", count(1024), "Bytes of all bodies of one tenant that are being read or "
                "decoded. Bodies up to 64 KiB do not count.", "BYTES"),
        "tenant", 429, "too_many_bytes", "Wait for earlier requests to return.", "body_bytes",
    ),
    Limit(
        Setting("max_all_body_bytes", count(1024), "Bytes of all bodies that are being read or decoded.", "BYTES"),
        "service", 429, "too_many_bytes", "Try again in a moment.", "body_bytes",
    ),
    Limit(
        Setting("max_decompressed_per_s", count(1024), "Bytes that are made of one tenant's compressed bodies per "
                "second, on average; sixteen seconds' worth may come at once.", "BYTES"),
        "tenant", 429, "too_many_decompressed", "Send less per second, or send bodies that are not compressed.",
    ),
    Limit(
        Setting("min_body_rate", count(0), "Bytes per second at which a body must arrive on average, after its first "
                "30 seconds; 0: any.", "N"),
        "request", 408, "body_too_slow", "Send smaller bodies over a slow connection.",
    ),
    # -- what a request asks for
    Limit(
        Setting("max_targets", count(1, 2**26), "Log-probabilities that one training call may ask for: positions times "
                "targets per position.", "N"),
        "request", 400, "too_many_targets", "Send fewer datums per call, or fewer targets per position.",
    ),
    Limit(
        Setting("max_sample_values", count(1), "Numbers that one sampling request may return: samples times tokens "
                "times one more than the ranked tokens per position.", "N"),
        "request", 400, "too_many_values", "Ask for fewer samples, fewer tokens or fewer ranked tokens per request.",
    ),
    Limit(
        Setting("max_stops", count(1), "Stop strings and stop tokens of one sampling request.", "N"),
        "request", 400, "too_many_stops", "Send fewer; look for rare ends in the text that is returned.",
    ),
    Limit(
        Setting("max_text_characters", count(16), "Characters of a name, of all tags of a session, or "
                "of all stop strings of a sample.", "N"),
        "request", 400, "text_too_long", "Shorten it.",
    ),
    # -- what a tenant has
    Limit(
        Setting("max_queued_samples", count(1), "Sequences that may wait or be sampled; beyond it clients are told to "
                "come again.", "N"),
        "service", 429, "too_many_samples", "Try again in a moment.",
    ),
    Limit(
        Setting("max_tenant_sample_bytes", count(1024), "Bytes of one tenant's samples that wait or run: prompts and "
                "targets, as they are in memory.", "BYTES"),
        "tenant", 429, "too_many_sample_bytes", "Await some results before sending more.", "sample_bytes",
    ),
    Limit(
        Setting("max_all_sample_bytes", count(1024), "Bytes of all samples that wait or run.", "BYTES"),
        "service", 429, "too_many_sample_bytes", "Try again in a moment.", "sample_bytes",
    ),
    Limit(
        Setting("max_tenant_response_bytes", count(1024), "Bytes of one tenant's large results that are being sent; "
                "beyond it a poll finds no result yet.", "BYTES"),
        "tenant", 408, "try_again", "Read results as they come.", "response_bytes",
    ),
    Limit(
        Setting("max_all_response_bytes", count(1024), "Bytes of all large results that are being sent.", "BYTES"),
        "service", 408, "try_again", "Read results as they come.", "response_bytes",
    ),
    Limit(
        Setting("max_queued_operations", count(1), "Training operations of one tenant that may wait.", "N"),
        "tenant", 429, "too_many_operations", "Await some results before sending more.", "queued_operations",
    ),
    Limit(
        Setting("max_tenant_queued_bytes", count(1024), "Bytes of all training operations of one tenant that wait.",
                "BYTES"),
        "tenant", 429, "too_many_queued_bytes", "Await some results before sending more.", "queued_bytes",
    ),
    Limit(
        Setting("max_all_queued_bytes", count(1024), "Bytes of all training operations that wait.", "BYTES"),
        "service", 429, "too_many_queued_bytes", "Try again in a moment.", "queued_bytes",
    ),
    Limit(
        Setting("max_tenant_result_bytes", count(1024), "Bytes of the stored results of one tenant's training "
                "operations, without those below 64 KiB; beyond it the oldest are deleted before `--result-ttl-s`.",
                "BYTES"),
        "tenant", 410, "result_expired", "Fetch results soon after they are ready.",
    ),
    Limit(
        Setting("max_unread_bytes", count(1024), "Bytes of a stream that its client has not read yet.", "BYTES"),
        "request", 429, "stream_unread", "Read streams as they come.",
    ),
    Limit(
        Setting("max_sessions", count(1), "Open sessions of one tenant: not finished, and seen within "
                "`--idle-session-s`.", "N"),
        "tenant", 429, "too_many_sessions", "Close clients that are not used; idle sessions end by themselves.",
    ),
    Limit(
        Setting("max_models", count(1), "Training runs of one tenant that were used within a day and are not "
                "unloaded.", "N"),
        "tenant", 400, "too_many_models", "Unload runs that are not used; after a day without use they do not count.",
    ),
    Limit(
        Setting("max_run_metric_bytes", count(1024), "Bytes of the metrics that a program logs for one run.", "BYTES"),
        "request", 400, "too_many_metrics", "Log less often, or fewer metrics. metrics.jsonl on your machine has all.",
    ),
    Limit(
        Setting("max_run_sample_bytes", count(1024), "Bytes of the samples that a program logs for one run.", "BYTES"),
        "request", 400, "too_many_run_samples", "Log fewer samples. metrics.jsonl on your machine has all.",
    ),
    Limit(
        Setting("max_samplers", count(1), "Sampling sessions that one tenant makes within an hour.", "N"),
        "tenant", 400, "too_many_samplers", "Use one sampling session for many samples.",
    ),
    Limit(
        Setting("max_uploads", count(1), "Uploads of weights of one tenant at a time.", "N"),
        "tenant", 429, "too_many_uploads", "Wait for an earlier upload to end.", "uploads",
    ),
    Limit(
        Setting("adapter_memory_mb", optional(count(1)), "Megabytes of adapters in the engine. Beyond it, the run that "
                "was not used for longest leaves memory, not the disk. Not set: a quarter of the machine's.", "MB"),
        "request", 400, "adapter_too_large", "Use a lower rank, or train fewer layers.",
    ),
    Limit(
        Setting("base_model_memory_mb", optional(count(1)), "Megabytes of base models in the engine, with the copy of "
                "the weights that sampling on a CPU makes. Beyond it, the model that was not used for longest leaves "
                "memory. Not set: half of the machine's, and at least what is loaded at the start.", "MB"),
        "request", 400, "base_model_too_large", "Allow more, or offer a smaller model.",
    ),
    Limit(
        Setting("quota_gb", optional(number("gigabytes", 0.001)), "Gigabytes that the checkpoints of all tenants may "
                "take; a tenant with less than an even share may still save. Not set: what the disk holds.", "GB"),
        "service", 400, "quota_exceeded", "Delete checkpoints that are not needed, and give others a time to live.",
    ),
    Limit(
        Setting("tenant_quota_gb", optional(number("gigabytes", 0.001)), "Gigabytes that the checkpoints of one "
                "tenant may take. Not set: what the service's quota and the disk hold.", "GB"),
        "tenant", 400, "quota_exceeded", "Delete checkpoints that are not needed, and give others a time to live.",
    ),
)  # fmt: skip
"""Every limit, in the order in which a request meets them."""
