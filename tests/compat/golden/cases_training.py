"""Cases of TrainingClient: forward, forward_backward, optimizer steps, saving and loading, and their polls."""

from __future__ import annotations

import warnings
from typing import Any

from .canned import as_json
from .case import BOTH, NEW, OLD, case

PNG = bytes(range(1, 9))
PATH = "tinker://session-0:train:0/weights/0001"


def datum(T: Any, tokens: list[int] | None = None, **inputs: Any) -> Any:
    """A datum over three tokens; `inputs` replaces the usual targets and weights."""
    prompt = T.types.ModelInput.from_ints(tokens or [1, 2, 3])
    return T.types.Datum(
        model_input=prompt, loss_fn_inputs=inputs or {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 0.5]}
    )


def chunked(T: Any, *chunks: Any) -> Any:
    prompt = T.types.ModelInput(chunks=list(chunks))
    targets = {"target_tokens": [0] * prompt.length, "weights": [0.5] * prompt.length}
    return T.types.Datum(model_input=prompt, loss_fn_inputs=targets)


CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "config-none": ({"loss_fn_config": None}, BOTH),
    "config-empty": ({"loss_fn_config": {}}, BOTH),
    "config-floats": ({"loss_fn_config": {"clip_low_threshold": 0.75, "clip_high_threshold": 1.25}}, BOTH),
    "config-int": ({"loss_fn_config": {"beta": 1}}, BOTH),
    "config-strings": ({"loss_fn_config": {"mode": "strict", "beta": 0.5}}, NEW),
}
for name, (arguments, versions) in CONFIGS.items():

    @case(f"forward-backward/{name}", versions=versions)
    def forward_backward_config(T: Any, training: Any, arguments: dict[str, Any] = arguments) -> object:
        return training.forward_backward([datum(T)], "cross_entropy", **arguments)

    @case(f"forward/{name}", versions=versions)
    def forward_config(T: Any, training: Any, arguments: dict[str, Any] = arguments) -> object:
        return training.forward([datum(T)], "cross_entropy", **arguments)


@case("forward-backward/lists")
def lists(T: Any, training: Any) -> object:
    return training.forward_backward([datum(T)], "cross_entropy")


@case("forward/lists")
def forward_lists(T: Any, training: Any) -> object:
    return training.forward([datum(T)], "cross_entropy")


@case("forward-backward/two-datums")
def two_datums(T: Any, training: Any) -> object:
    return training.forward_backward([datum(T), datum(T, [5, 6, 7])], "cross_entropy")


@case("forward-backward/no-datums")
def no_datums(T: Any, training: Any) -> object:
    return training.forward_backward([], "cross_entropy")


@case("forward-backward/no-loss-inputs")
def no_loss_inputs(T: Any, training: Any) -> object:
    bare = T.types.Datum(model_input=T.types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={})
    return training.forward_backward([bare], "cross_entropy")


@case("forward-backward/int-weights")
def int_weights(T: Any, training: Any) -> object:
    return training.forward_backward([datum(T, target_tokens=[2, 3, 4], weights=[0, 1, 1])], "cross_entropy")


LOSSES: dict[str, tuple[dict[str, list[float]], tuple[str, ...]]] = {
    "importance_sampling": ({"logprobs": [-0.5, -0.25, -1.0], "advantages": [1.0, -1.0, 0.5]}, BOTH),
    "ppo": (
        {
            "logprobs": [-0.5, -0.25, -1.0],
            "advantages": [1.0, -1.0, 0.5],
            "clip_low_threshold": [0.75, 0.75, 0.75],
            "clip_high_threshold": [1.25, 1.25, 1.25],
        },
        BOTH,
    ),
    "cispo": ({"logprobs": [-0.5, -0.25, -1.0], "advantages": [1.0, -1.0, 0.5]}, NEW),
    "dro": ({"logprobs": [-0.5, -0.25, -1.0], "advantages": [1.0, -1.0, 0.5]}, NEW),
    "gspo": (
        {
            "logprobs": [-0.5, -0.25, -1.0],
            "advantages": [1.0, -1.0, 0.5],
            "sequence_ratio_mask": [0.0, 1.0, 1.0],
        },
        NEW,
    ),
    "stable_reinforce": ({"advantages": [1.0, -1.0, 0.5]}, NEW),
    "a-loss-nobody-knows": ({"weights": [0.0, 1.0, 0.5]}, BOTH),
}
for loss, (inputs, versions) in LOSSES.items():

    @case(f"forward-backward/loss-{loss}", versions=versions)
    def loss_inputs(T: Any, training: Any, loss: str = loss, inputs: dict[str, Any] = inputs) -> object:
        return training.forward_backward([datum(T, target_tokens=[2, 3, 4], **inputs)], loss)


ARRAYS = {
    "int64-float32": ("int64", "float32"),
    "int32-float64": ("int32", "float64"),
    "int16-float16": ("int16", "float16"),
    "uint8-float32": ("uint8", "float32"),
    "bool-weights": ("int64", "bool"),
}
for name, (int_dtype, float_dtype) in ARRAYS.items():

    @case(f"forward-backward/numpy-{name}")
    def numpy_arrays(T: Any, training: Any, int_dtype: str = int_dtype, float_dtype: str = float_dtype) -> object:
        import numpy as np

        targets, weights = np.array([2, 3, 4], int_dtype), np.array([0, 1, 1], float_dtype)
        return training.forward_backward([datum(T, target_tokens=targets, weights=weights)], "cross_entropy")

    @case(f"forward-backward/torch-{name}", needs_torch=True)
    def torch_tensors(T: Any, training: Any, int_dtype: str = int_dtype, float_dtype: str = float_dtype) -> object:
        import torch

        targets = torch.tensor([2, 3, 4], dtype=getattr(torch, int_dtype))
        weights = torch.tensor([0, 1, 1], dtype=getattr(torch, float_dtype))
        return training.forward_backward([datum(T, target_tokens=targets, weights=weights)], "cross_entropy")


@case("forward-backward/torch-bfloat16", needs_torch=True)
def torch_bfloat16(T: Any, training: Any) -> object:
    import torch

    weights = torch.tensor([0, 1.5, 1], dtype=torch.bfloat16)
    return training.forward_backward([datum(T, target_tokens=[2, 3, 4], weights=weights)], "cross_entropy")


@case("forward-backward/unknown-key-list")
def unknown_key_list(T: Any, training: Any) -> object:
    return training.forward_backward([datum(T, target_tokens=[2, 3, 4], colour=[0.5, 1.0, 0.5])], "cross_entropy")


@case("forward-backward/unknown-key-numpy")
def unknown_key_numpy(T: Any, training: Any) -> object:
    import numpy as np

    colour = np.array([0.5, 1.0, 0.5], "float32")
    return training.forward_backward([datum(T, target_tokens=[2, 3, 4], colour=colour)], "cross_entropy")


@case("forward-backward/nested-lists")
def nested_lists(T: Any, training: Any) -> object:
    rows: dict[str, Any] = {"target_tokens": [[2, 3], [3, 4], [4, 5]], "weights": [[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]}
    return training.forward_backward([datum(T, **rows)], "cross_entropy")


@case("forward-backward/ragged-lists")
def ragged_lists(T: Any, training: Any) -> object:
    return training.forward_backward(
        [datum(T, target_tokens=[[2, 3], [3]], weights=[[0.5, 1.0], [1.0]])], "cross_entropy"
    )


@case("forward-backward/numpy-2d")
def numpy_two_dimensions(T: Any, training: Any) -> object:
    import numpy as np

    targets, weights = np.array([[2, 3], [3, 4], [4, 5]]), np.array([[0, 1], [1, 0], [0.5, 0.5]], "float32")
    return training.forward_backward([datum(T, target_tokens=targets, weights=weights)], "cross_entropy")


@case("forward-backward/torch-2d-dense", needs_torch=True)
def torch_two_dimensions(T: Any, training: Any) -> object:
    import torch

    targets = torch.tensor([[2, 3], [3, 4], [4, 5]])
    weights = torch.tensor([[0.25, 1], [1, 0.25], [0.5, 0.5]])
    return training.forward_backward([datum(T, target_tokens=targets, weights=weights)], "cross_entropy")


@case("forward-backward/torch-2d-sparse", needs_torch=True)
def torch_sparse(T: Any, training: Any) -> object:
    """Mostly zeros: 0.36 turns these into CSR by itself."""
    import torch

    targets, weights = torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, 8)
    targets[0, 1], targets[2, 7], weights[0, 1], weights[2, 7] = 5, 6, 0.5, 1.0
    return training.forward_backward([datum(T, target_tokens=targets, weights=weights)], "cross_entropy")


@case("forward-backward/tensor-data")
def tensor_data(T: Any, training: Any) -> object:
    targets = T.types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3])
    weights = T.types.TensorData(data=[0.0, 1.0, 0.5], dtype="float32", shape=[3])
    return training.forward_backward([datum(T, target_tokens=targets, weights=weights)], "cross_entropy")


@case("forward-backward/tensor-data-without-shape")
def tensor_data_without_shape(T: Any, training: Any) -> object:
    targets = T.types.TensorData(data=[2, 3, 4], dtype="int64")
    weights = T.types.TensorData(data=[0.0, 1.0, 0.5], dtype="float32")
    return training.forward_backward([datum(T, target_tokens=targets, weights=weights)], "cross_entropy")


@case("forward-backward/tensor-data-shape-none")
def tensor_data_shape_none(T: Any, training: Any) -> object:
    targets = T.types.TensorData(data=[2, 3, 4], dtype="int64", shape=None)
    weights = T.types.TensorData(data=[0.0, 1.0, 0.5], dtype="float32", shape=None)
    return training.forward_backward([datum(T, target_tokens=targets, weights=weights)], "cross_entropy")


@case("forward-backward/tensor-data-csr", versions=NEW)
def tensor_data_csr(T: Any, training: Any) -> object:
    csr = {"shape": [3, 8], "sparse_crow_indices": [0, 1, 1, 2], "sparse_col_indices": [1, 7]}
    targets = T.types.TensorData(data=[5, 6], dtype="int64", **csr)
    weights = T.types.TensorData(data=[0.5, 1.0], dtype="float32", **csr)
    return training.forward_backward([datum(T, target_tokens=targets, weights=weights)], "cross_entropy")


@case("forward-backward/nan-weight")
def nan_weight(T: Any, training: Any) -> object:
    weights = [0.0, float("nan"), 1.0]
    return training.forward_backward([datum(T, target_tokens=[2, 3, 4], weights=weights)], "cross_entropy")


@case("forward-backward/several-text-chunks")
def several_chunks(T: Any, training: Any) -> object:
    text = T.types.EncodedTextChunk
    return training.forward_backward([chunked(T, text(tokens=[1, 2]), text(tokens=[3]))], "cross_entropy")


@case("forward-backward/image", versions=OLD)
def image(T: Any, training: Any) -> object:
    picture = T.types.ImageChunk(data=PNG, format="png", height=4, width=6, tokens=2)
    return training.forward_backward([chunked(T, T.types.EncodedTextChunk(tokens=[1, 2]), picture)], "cross_entropy")


@case("forward-backward/image-asset-pointer", versions=OLD)
def asset_pointer(T: Any, training: Any) -> object:
    pointer = T.types.ImageAssetPointerChunk(location="gs://a/b.png", format="png", height=4, width=6, tokens=2)
    return training.forward_backward([chunked(T, T.types.EncodedTextChunk(tokens=[1, 2]), pointer)], "cross_entropy")


EXPECTED_TOKENS: dict[str, dict[str, Any]] = {
    "": {},
    "-expected-tokens": {"expected_tokens": 2},
    "-expected-none": {"expected_tokens": None},
}
for name, arguments in EXPECTED_TOKENS.items():

    @case(f"forward-backward/image{name}-0.36", versions=NEW)
    def image_by_expected_tokens(T: Any, training: Any, arguments: dict[str, Any] = arguments) -> object:
        prompt = T.types.ModelInput(chunks=[T.types.ImageChunk(data=PNG, format="jpeg", **arguments)])
        targets = {"target_tokens": [2, 3], "weights": [0.5, 0.5]}
        return training.forward_backward([T.types.Datum(model_input=prompt, loss_fn_inputs=targets)], "cross_entropy")


@case("forward-backward/image-asset-pointer-0.36", versions=NEW)
def asset_pointer_by_expected_tokens(T: Any, training: Any) -> object:
    pointer = T.types.ImageAssetPointerChunk(location="gs://a/b.png", format="png", expected_tokens=2)
    return training.forward_backward([chunked(T, T.types.EncodedTextChunk(tokens=[1]), pointer)], "cross_entropy")


@case("forward-backward/dmel", versions=NEW)
def dmel(T: Any, training: Any) -> object:
    prompt = T.types.ModelInput(chunks=[T.types.DmelChunk(dmel=PNG)])
    targets = {"target_tokens": [2, 3], "weights": [0.5, 0.5]}
    return training.forward_backward([T.types.Datum(model_input=prompt, loss_fn_inputs=targets)], "cross_entropy")


@case("forward-backward/provenance", versions=NEW)
def provenance(T: Any, training: Any) -> object:
    prompt = T.types.PromptProvenanceSpan(sequence_id="0:0", length=2)
    sampled = T.types.SampledProvenanceSpan(sequence_id="0:0", offset=1, length=1)
    annotated = datum(T).with_provenance(model_input=[prompt, sampled], loss_fn_inputs=[prompt, sampled])
    return training.forward_backward([annotated], "cross_entropy")


@case("forward-backward/zstd", versions=NEW, config={"proto_compress_fwdbwd": True})
def compressed(T: Any, training: Any) -> object:
    return training.forward_backward([datum(T)], "cross_entropy")


@case("forward-backward/chunks-by-count", versions=OLD, order="polls last")
def chunks_by_count(T: Any, training: Any) -> object:
    """130 datums: one request of 128, one of two."""
    one = datum(T, [1], target_tokens=[2], weights=[0.5])
    return training.forward_backward([one] * 130, "cross_entropy")


@case(
    "forward-backward/chunks-in-order",
    versions=NEW,
    config={"parallel_fwdbwd_chunks": False, "fwdbwd_max_chunk_len": 2},
    order="polls last",
)
def chunks_in_order(T: Any, training: Any) -> object:
    return training.forward_backward([datum(T, [n, n, n]) for n in range(1, 6)], "cross_entropy")


@case(
    "forward-backward/chunks-in-parallel",
    versions=NEW,
    config={"parallel_fwdbwd_chunks": True, "fwdbwd_max_chunk_len": 2},
    order="sorted",
)
def chunks_in_parallel(T: Any, training: Any) -> object:
    return training.forward_backward([datum(T, [n, n, n]) for n in range(1, 6)], "cross_entropy")


@case(
    "forward-backward/chunks-by-bytes",
    versions=NEW,
    config={"parallel_fwdbwd_chunks": False, "fwdbwd_max_chunk_bytes_count": 100},
    order="polls last",
)
def chunks_by_bytes(T: Any, training: Any) -> object:
    """A datum here counts 48 bytes: 3 tokens of 4, 3 targets of 8, 3 weights of 4."""
    return training.forward_backward([datum(T, [n, n, n]) for n in range(1, 6)], "cross_entropy")


def squared_error(data: list[Any], logprobs: list[Any]) -> Any:
    loss = sum((row * row).sum() for row in logprobs)
    return loss, {"squared": 0.75}


@case("forward-backward-custom/lists", needs_torch=True)
def custom_lists(T: Any, training: Any) -> object:
    return training.forward_backward_custom([datum(T), datum(T, [5, 6, 7])], squared_error)


@case("forward-backward-custom/targets-only", needs_torch=True)
def custom_targets_only(T: Any, training: Any) -> object:
    return training.forward_backward_custom([datum(T, target_tokens=[2, 3, 4])], squared_error)


@case("forward-backward-custom/extra-inputs", needs_torch=True)
def custom_extra_inputs(T: Any, training: Any) -> object:
    extra = datum(T, target_tokens=[2, 3, 4], weights=[0.0, 1.0, 0.5], advantages=[1.0, -1.0, 0.5])
    return training.forward_backward_custom([extra], squared_error)


@case("forward-backward-custom/2d", needs_torch=True)
def custom_two_dimensions(T: Any, training: Any) -> object:
    import numpy as np

    return training.forward_backward_custom([datum(T, target_tokens=np.array([[2, 3], [3, 4], [4, 5]]))], squared_error)


ADAM: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "defaults": ({}, BOTH),
    "learning-rate": ({"learning_rate": 0.5}, BOTH),
    "learning-rate-default-passed": ({"learning_rate": 0.0001}, BOTH),
    "learning-rate-zero": ({"learning_rate": 0}, BOTH),
    "beta1": ({"beta1": 0.5}, BOTH),
    "beta2": ({"beta2": 0.75}, BOTH),
    "eps": ({"eps": 1e-8}, BOTH),
    "all-of-0.4.1": ({"learning_rate": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 0.25}, BOTH),
    "learning-rate-none": ({"learning_rate": None}, BOTH),
    "eps-first": ({"eps": 0.25, "learning_rate": 0.5}, BOTH),
    "weight-decay": ({"weight_decay": 0.5}, NEW),
    "grad-clip-norm": ({"grad_clip_norm": 0.5}, NEW),
    "all": (
        {
            "learning_rate": 0.5,
            "beta1": 0.5,
            "beta2": 0.75,
            "eps": 0.25,
            "weight_decay": 0.125,
            "grad_clip_norm": 1.0,
        },
        NEW,
    ),
}
for name, (arguments, versions) in ADAM.items():

    @case(f"optim-step/{name}", versions=versions)
    def optim_step(T: Any, training: Any, arguments: dict[str, Any] = arguments) -> object:
        return training.optim_step(T.types.AdamParams(**arguments))


@case("optim-step/by-keyword")
def optim_step_by_keyword(T: Any, training: Any) -> object:
    return training.optim_step(adam_params=T.types.AdamParams(learning_rate=0.5))


@case("optim-step/dict")
def optim_step_dict(T: Any, training: Any) -> object:
    return training.optim_step({"learning_rate": 0.5})


for name, arguments in {"": {}, "-all": {"grad_clip_norm": 1.0, "beta1": 0.5}}.items():

    @case(f"optim-step/dimuon{name}", versions=NEW)
    def optim_step_dimuon(T: Any, training: Any, arguments: dict[str, Any] = arguments) -> object:
        return training.optim_step(T.types.DimuonParams(learning_rate=0.5, **arguments))


SAVES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "save-state/plain": ("save_state", {}, BOTH),
    "save-state/ttl": ("save_state", {"ttl_seconds": 3600}, NEW),
    "save-state/ttl-none": ("save_state", {"ttl_seconds": None}, NEW),
    "save-state/overwrite": ("save_state", {"overwrite": True}, NEW),
    "save-state/overwrite-false": ("save_state", {"overwrite": False}, NEW),
    "save-state/user-metadata": ("save_state", {"user_metadata": {"step": "1"}}, NEW),
    "save-state/user-metadata-none": ("save_state", {"user_metadata": None}, NEW),
    "save-for-sampler/plain": ("save_weights_for_sampler", {}, BOTH),
    "save-for-sampler/ttl": ("save_weights_for_sampler", {"ttl_seconds": 3600}, NEW),
    "save-for-sampler/ttl-none": ("save_weights_for_sampler", {"ttl_seconds": None}, NEW),
    "save-for-sampler/user-metadata": ("save_weights_for_sampler", {"user_metadata": {"step": "1"}}, NEW),
    "save-external/plain": ("save_weights_external", {}, NEW),
    "save-external/ttl": ("save_weights_external", {"ttl_seconds": 3600}, NEW),
    "save-external/encrypted": ("save_weights_external", {"age_encryption_recipients": ["age1abc"]}, NEW),
    "load-state/plain": ("load_state", {}, BOTH),
    "load-state/access-token": ("load_state", {"weights_access_token": "tml-weights-token"}, NEW),
    "load-state/with-optimizer": ("load_state_with_optimizer", {}, NEW),
}
for name, (method, arguments, versions) in SAVES.items():

    @case(name, versions=versions)
    def save_or_load(T: Any, training: Any, method: str = method, arguments: dict[str, Any] = arguments) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return getattr(training, method)(PATH if method.startswith("load") else "0001", **arguments)


NAMED: dict[str, dict[str, Any]] = {"": {}, "-named": {"name": "ignored"}, "-name-none": {"name": None}}
for name, arguments in NAMED.items():

    @case(f"save-and-sample/ephemeral{name}")
    def ephemeral_sampler(T: Any, training: Any, arguments: dict[str, Any] = arguments) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            sampler = training.save_weights_and_get_sampling_client(**arguments)
        return sampler.sample(T.types.ModelInput.from_ints([1, 2]), 1, T.types.SamplingParams(max_tokens=2))


@case("save-and-sample/counts-on")
def samplers_count_on(T: Any, training: Any) -> None:
    training.save_weights_and_get_sampling_client()
    training.create_sampling_client("tinker://session-0:train:0/sampler_weights/a")
    training.save_weights_and_get_sampling_client()


@case("get-info")
def get_info(T: Any, training: Any) -> None:
    training.get_info()


@case("sequence/numbers-run-over-all-operations")
def sequence(T: Any, training: Any) -> object:
    training.forward_backward([datum(T)], "cross_entropy").result(60)
    training.optim_step(T.types.AdamParams()).result(60)
    training.save_state("a").result(60)
    training.forward([datum(T)], "cross_entropy").result(60)
    training.get_info()
    return training.save_weights_for_sampler("b")


@case("poll/408-then-done", needs_stage=True)
def poll_again_after_408(T: Any, training: Any, stage: Any) -> object:
    stage.script["retrieve_future"] = [as_json({"queue_state": "active", "queue_state_reason": None}, 408)]
    return training.optim_step(T.types.AdamParams())


@case("poll/try-again-then-done", needs_stage=True)
def poll_again_when_told(T: Any, training: Any, stage: Any) -> object:
    stage.script["retrieve_future"] = [as_json({"type": "try_again", "request_id": "x", "queue_state": "active"})]
    return training.optim_step(T.types.AdamParams())


@case("poll/metadata-then-done", needs_stage=True, versions=NEW)
def poll_after_metadata(T: Any, training: Any, stage: Any) -> object:
    stage.script["retrieve_future"] = [as_json({"status": "complete_metadata", "response_payload_size": 100})]
    return training.forward_backward([datum(T)], "cross_entropy")


@case("poll/500-then-done", needs_stage=True)
def poll_again_after_500(T: Any, training: Any, stage: Any) -> object:
    stage.script["retrieve_future"] = [as_json({"detail": "down"}, 500)]
    return training.optim_step(T.types.AdamParams())


@case("submit/500-then-done", needs_stage=True)
def submit_again_after_500(T: Any, training: Any, stage: Any) -> object:
    """The inner retry: is the idempotency key kept, and which headers tell of the retry?"""
    stage.script["optim_step"] = [as_json({"detail": "down"}, 500)]
    return training.optim_step(T.types.AdamParams())
