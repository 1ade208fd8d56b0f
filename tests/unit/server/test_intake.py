"""A retry after a restart is read by another process, and is still the same operation."""

from __future__ import annotations

import subprocess
import sys

import tinkex
from tinkex.wire import proto_codec

READ = """
import sys
from tinkex.engine.contract import pass_frame
from tinkex.server.training.residency import digest_of
from tinkex.wire.proto_codec import decode_forward_backward_request

batch = decode_forward_backward_request(bytes.fromhex(sys.argv[1])).forward_backward_input
frame = pass_frame("forward_backward", "a", batch.data, batch.loss_fn, batch.loss_fn_config)
print(digest_of("forward_backward", frame.encode(), {}))
"""


def test_every_process_reads_the_same_bytes_as_the_same_operation() -> None:
    """Protobuf gives a map's entries in an order that differs from process to process."""
    inputs = {name: [1.0, 2.0] for name in ("target_tokens", "weights", "logprobs", "advantages", "mask")}
    datum = tinkex.Datum(tinkex.ModelInput.from_ints([1, 2]), {**inputs, "target_tokens": [3, 4]})
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "kl": 0.1}
    content = proto_codec.encode_forward_backward("m", 1, [datum], "ppo", config)
    found = {
        subprocess.run([sys.executable, "-c", READ, content.hex()], capture_output=True, text=True, check=True).stdout
        for _ in range(6)
    }
    assert len(found) == 1
