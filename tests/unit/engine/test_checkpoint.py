"""Adapters as files: exact to the bit for ourselves, right for PEFT and vLLM, whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.engine.oracle import Oracle, Session, datum, plain_model, randomise
from tinkex.engine.adapters.adapter import Adapter
from tinkex.engine.adapters.checkpoint import read_weights
from tinkex.engine.adapters.lora import Segment
from tinkex.engine.contract import EngineFault, ModelInfo
from tinkex.engine.models.loaded_model import Model

PROMPT = list(b"tinkex keeps what it learns")
VLLM_MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""Layers on which vLLM's loader takes adapters for Llama-like models (it joins them into qkv_proj and gate_up_proj
itself). It has dropped `lm_head`: such an adapter has to be merged, or trained with train_unembed=False."""


def trained(session: Session, adapter: str = "a", steps: int = 3) -> None:
    for step in range(steps):
        data = [datum(range(step, step + n), target_tokens=range(step + 1, step + n + 1)) for n in (12, 5)]
        session.passes(data, "cross_entropy", adapter=adapter)
        session.optim(adapter, learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0)


def buffers(adapter: Adapter) -> list[Tensor]:
    return [adapter.weights_P, adapter.gradient_P, adapter.exp_avg_P, adapter.exp_avg_sq_P]


def assert_same(one: Adapter, other: Adapter) -> None:
    assert all(torch.equal(left, right) for left, right in zip(buffers(one), buffers(other), strict=True))
    assert (one.step, one.has_gradient, one.spec) == (other.step, other.has_gradient, other.spec)


def our_logits(model: Model, folder: Path) -> Tensor:
    weights = read_weights(folder, model)
    tokens_BT = torch.tensor([PROMPT])
    with torch.no_grad():
        hidden_BTD = model.hidden(tokens_BT, [Segment(weights, 0, 1)])
        return model.logits(hidden_BTD[0], [Segment(weights, 0, len(PROMPT))])


def peft_logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


@pytest.mark.parametrize("pending", [False, True], ids=["after a step", "with a pending gradient"])
def test_a_restored_run_continues_as_if_it_had_never_stopped(tiny: Model, tmp_path: Path, pending: bool) -> None:
    session = Session(tiny)
    session.create(seed=11)
    trained(session)
    if pending:
        session.passes([datum(PROMPT[:-1], target_tokens=PROMPT[1:])], "cross_entropy")
    reply = session.run("snapshot", folder=str(tmp_path / "kept"))
    assert reply.head["size_bytes"] == sum(path.stat().st_size for path in (tmp_path / "kept").iterdir())
    other = Session(tiny)
    other.run("restore", folder=str(tmp_path / "kept"))
    assert_same(other.trainer.adapters["a"], session.trainer.adapters["a"])
    for running in (session, other):
        trained(running, steps=2)
    assert_same(other.trainer.adapters["a"], session.trainer.adapters["a"])


def test_save_and_load_with_the_optimizer_continues_as_if_it_had_never_stopped(tiny: Model, tmp_path: Path) -> None:
    session = Session(tiny)
    session.create(seed=11)
    trained(session)
    session.run("save", folder=str(tmp_path / "saved"), with_optimizer=True)
    other = Session(tiny)
    other.create(seed=11)
    other.passes([datum(PROMPT[:-1], target_tokens=PROMPT[1:])], "cross_entropy")  # to be cleared by the load
    other.run("load", folder=str(tmp_path / "saved"), with_optimizer=True)
    assert_same(other.trainer.adapters["a"], session.trainer.adapters["a"])
    for running in (session, other):
        trained(running, steps=2)
    assert_same(other.trainer.adapters["a"], session.trainer.adapters["a"])


def test_load_without_the_optimizer_leaves_it_as_it_is(tiny: Model, tmp_path: Path) -> None:
    session = Session(tiny)
    adapter = session.create()
    trained(session)
    session.run("save", folder=str(tmp_path / "saved"), with_optimizer=True)
    saved = adapter.weights_P.clone()
    trained(session)
    session.passes([datum(PROMPT[:-1], target_tokens=PROMPT[1:])], "cross_entropy")
    moments, step = [buffer.clone() for buffer in buffers(adapter)[2:]], adapter.step
    session.run("load", folder=str(tmp_path / "saved"), with_optimizer=False)
    assert torch.equal(adapter.weights_P, saved)
    assert all(map(torch.equal, buffers(adapter)[2:], moments)) and adapter.step == step > 0
    assert not bool(adapter.gradient_P.any()) and not adapter.has_gradient


def test_saving_changes_nothing_and_reports_every_file(tiny: Model, tmp_path: Path) -> None:
    session = Session(tiny)
    adapter = session.create()
    trained(session)
    before = [buffer.clone() for buffer in buffers(adapter)]
    reply = session.run("save", folder=str(tmp_path / "saved"), with_optimizer=False)
    assert all(torch.equal(one, other) for one, other in zip(buffers(adapter), before, strict=True))
    assert set(reply.head["files"]) == {"adapter_model.safetensors", "adapter_config.json", "tinkex.json"}
    for name, entry in reply.head["files"].items():
        content = (tmp_path / "saved" / name).read_bytes()
        assert entry == {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert reply.head["size_bytes"] == sum(entry["size_bytes"] for entry in reply.head["files"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_saving_again_after_a_crash_replaces_the_folder(tiny: Model, tmp_path: Path) -> None:
    session = Session(tiny)
    session.create()
    for left_over in ("saved", "saved.partial", "saved.old"):
        (tmp_path / left_over).mkdir()
        (tmp_path / left_over / "rubbish").write_text("half")
    session.run("save", folder=str(tmp_path / "saved"), with_optimizer=False)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert not (tmp_path / "saved" / "rubbish").exists()


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"train_unembed": False},
        {"train_attn": False, "train_unembed": False},
        {"train_mlp": False, "train_attn": False},
    ],
    ids=["all", "no unembedding", "mlp", "unembedding"],
)
def test_peft_loads_what_we_save_and_gives_the_same_logits(tiny: Model, tmp_path: Path, flags: dict[str, bool]) -> None:
    session = Session(tiny)
    adapter = randomise(session.create("a", rank=6, **flags))
    session.run("save", folder=str(tmp_path / "saved"), with_optimizer=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = peft.PeftModel.from_pretrained(plain_model(tiny.info.folder), tmp_path / "saved").eval()
    # What PEFT says of the adapter is a UserWarning; a library's word on its own next release is none of ours.
    said = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    assert not [words for words in said if "tie_word_embeddings" not in words]
    adapted = {
        name.removeprefix("base_model.model.") for name, module in loaded.named_modules() if hasattr(module, "lora_A")
    }
    assert adapted == {site.name for site in adapter.sites}
    torch.testing.assert_close(our_logits(tiny, tmp_path / "saved"), peft_logits(loaded), atol=1e-4, rtol=0)
    assert not torch.allclose(peft_logits(loaded), peft_logits(plain_model(tiny.info.folder)), atol=1e-2)


def test_auto_peft_finds_the_base_model_by_itself(tiny: Model, tmp_path: Path) -> None:
    session = Session(tiny)
    randomise(session.create())
    session.run("save", folder=str(tmp_path / "saved"), with_optimizer=False)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(our_logits(tiny, tmp_path / "saved"), peft_logits(loaded), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]},
        {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        {"r": 4, "lora_alpha": 7, "use_rslora": True, "target_modules": ["down_proj", "lm_head"]},
    ],
    ids=["q and v", "another alpha", "rslora and unembedding"],
)
def test_an_adapter_made_by_peft_gives_the_same_logits_here(tiny: Model, tmp_path: Path, settings: Any) -> None:
    made = made_by_peft(tiny.info, tmp_path / "made", **settings)
    torch.testing.assert_close(our_logits(tiny, tmp_path / "made"), peft_logits(made), atol=1e-4, rtol=0)


def made_by_peft(info: ModelInfo, folder: Path, **settings: Any) -> Any:
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tied unembedding
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
        made = peft.get_peft_model(plain_model(info.folder), config).eval()
        made.save_pretrained(str(folder))
    return made


def test_a_run_can_go_on_from_an_adapter_made_by_peft(tiny: Model, tmp_path: Path) -> None:
    made = made_by_peft(tiny.info, tmp_path / "made", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    session = Session(tiny)
    session.create(rank=4, train_unembed=False)
    session.run("load", folder=str(tmp_path / "made"), with_optimizer=False)
    (found,) = session.logprobs([datum(PROMPT[:-1], target_tokens=PROMPT[1:])])
    lp_TV = peft_logits(made).log_softmax(-1)
    torch.testing.assert_close(found, lp_TV[range(len(PROMPT) - 1), PROMPT[1:]], atol=1e-4, rtol=0)
    trained(session)
    with pytest.raises(EngineFault, match="no optimizer state"):
        session.run("load", folder=str(tmp_path / "made"), with_optimizer=True)


@pytest.mark.slow
def test_a_real_models_adapter_generates_the_same_greedy_text_in_peft(smollm2: Model, tmp_path: Path) -> None:
    session = Session(smollm2)
    adapter = randomise(session.create(rank=4))
    session.run("save", folder=str(tmp_path / "saved"), with_optimizer=False)
    oracle = Oracle(adapter)
    weights = read_weights(tmp_path / "saved", smollm2)
    tokens = [504, 2591, 282, 4649]
    with torch.no_grad():
        written = oracle.model.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)[0].tolist()
        while len(tokens) < len(written):
            hidden_D = smollm2.hidden(torch.tensor([tokens]), [Segment(weights, 0, 1)])[0, -1:]
            tokens.append(int(smollm2.logits(hidden_D, [Segment(weights, 0, 1)]).argmax()))
    assert tokens == written


def test_keys_and_shapes_are_those_that_vllm_takes(tiny: Model, tmp_path: Path) -> None:
    session = Session(tiny)
    adapter = session.create(rank=8, train_unembed=False)
    session.run("save", folder=str(tmp_path / "saved"), with_optimizer=False)
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["r"] == 8 and config["lora_alpha"] == 32 and config["bias"] == "none"
    assert not config["modules_to_save"] and not config["use_dora"] and not config["use_rslora"]
    assert set(config["target_modules"]) == VLLM_MODULES
    tensors = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    sites = {site.name: site for site in adapter.sites}
    assert len(tensors) == 2 * len(sites)
    for key, tensor in tensors.items():
        name, letter = key.removesuffix(".weight").removeprefix("base_model.model.").rsplit(".lora_", 1)
        site = sites[name]
        assert name.startswith("model.layers.") and name.rpartition(".")[2] in VLLM_MODULES
        assert list(tensor.shape) == ([8, site.d_in] if letter == "A" else [site.d_out, 8])
        assert tensor.dtype == torch.float32


def test_full_names_are_written_where_short_ones_would_match_other_layers_too(tiny: Model, tmp_path: Path) -> None:
    session = Session(tiny)
    adapter = session.create(train_mlp=False, train_unembed=False)
    adapter.sites.pop()  # as of a model where a layer of the same last name is no site
    session.run("save", folder=str(tmp_path / "saved"), with_optimizer=False)
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(site.name for site in adapter.sites)


def test_a_checkpoint_of_another_rank_flags_or_base_is_rejected_naming_both(tiny: Model, tmp_path: Path) -> None:
    session = Session(tiny)
    session.create(rank=4)
    session.run("save", folder=str(tmp_path / "saved"), with_optimizer=True)
    adapter = session.create(rank=8)
    before = [buffer.clone() for buffer in buffers(adapter)]
    with pytest.raises(EngineFault, match="has rank 4, this run has rank 8") as refused:
        session.run("load", folder=str(tmp_path / "saved"), with_optimizer=True)
    assert refused.value.category == "user"
    assert all(torch.equal(one, other) for one, other in zip(buffers(adapter), before, strict=True))
    session.create(rank=4, train_mlp=False)
    with pytest.raises(EngineFault, match=r"train_mlp=true.*this run has.*train_mlp=false"):
        session.run("load", folder=str(tmp_path / "saved"), with_optimizer=False)
    info = json.loads((tmp_path / "saved" / "tinkex.json").read_text())
    (tmp_path / "saved" / "tinkex.json").write_text(json.dumps({**info, "base": "meta-llama/Llama-3.2-1B"}))
    session.create(rank=4)
    with pytest.raises(EngineFault, match=r"belongs to base model meta-llama/Llama-3\.2-1B, not to tinkex/tiny"):
        session.run("load", folder=str(tmp_path / "saved"), with_optimizer=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "uses DoRA"),
        ({"bias": "all"}, "trained biases"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"peft_type": "IA3"}, "type 'IA3'; only LORA"),
        ({"r": 5}, "have shapes .*at rank 5 needs"),
        ({"r": None}, "r = None"),
    ],
)
def test_an_adapter_that_is_not_plain_lora_is_rejected_by_name(
    tiny: Model, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    made_by_peft(tiny.info, tmp_path / "made", r=4, target_modules=["q_proj"])
    path = tmp_path / "made" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(EngineFault, match=words) as refused:
        read_weights(tmp_path / "made", tiny)
    assert refused.value.category == "user"


def test_damaged_missing_or_extra_tensors_are_rejected(tiny: Model, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    made_by_peft(tiny.info, folder, r=4, target_modules=["q_proj"])
    tensors = load_file(folder / "adapter_model.safetensors")
    first = next(iter(tensors))

    def refused(words: str) -> None:
        with pytest.raises(EngineFault, match=words) as fault:
            read_weights(folder, tiny)
        assert str(tmp_path) not in str(fault.value)

    save_file(
        {**tensors, "base_model.model.model.embed_tokens.weight": torch.zeros(263, 64)},
        folder / "adapter_model.safetensors",
    )
    refused("has no layer for")
    save_file({**tensors, first: torch.full_like(tensors[first], torch.nan)}, folder / "adapter_model.safetensors")
    refused("not all finite")
    save_file({key: value for key, value in tensors.items() if key != first}, folder / "adapter_model.safetensors")
    refused("have shapes")
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    refused("adapter_model.safetensors is damaged")
    (folder / "adapter_model.safetensors").unlink()
    refused("no adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{")
    refused("is not JSON")
    (folder / "adapter_config.json").write_text("[]")
    refused("is not a JSON object")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"lora_alpha": 1e308}, "not all finite"),  # found by the fuzzer: B became infinite when it was scaled
        ({"auto_mapping": "DEEP"}, "is not JSON"),
    ],
)
def test_an_adapter_whose_config_is_absurd_is_rejected_not_loaded_as_infinite_numbers(
    tiny: Model, tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    made_by_peft(tiny.info, tmp_path, r=4, target_modules=["q_proj"])
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    save_file(
        {name: torch.ones_like(tensor) for name, tensor in tensors.items()}, tmp_path / "adapter_model.safetensors"
    )
    path = tmp_path / "adapter_config.json"
    text = json.dumps({**json.loads(path.read_text()), **config})
    path.write_text(text.replace('"DEEP"', "[" * 1015 + "]" * 1015))  # the server's parser goes 1,024 deep
    with pytest.raises(EngineFault, match=words) as fault:
        read_weights(tmp_path, tiny, is_upload=True)
    assert fault.value.category == "user"


def test_a_missing_snapshot_is_a_server_error(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="cannot be continued") as failed:
        Session(tiny).run("restore", folder=str(tmp_path / "nowhere"))
    assert failed.value.category == "server" and str(tmp_path) not in str(failed.value)


@pytest.mark.parametrize("op", ["save", "snapshot"])
def test_a_failed_write_leaves_nothing_half_written(tiny: Model, tmp_path: Path, op: str) -> None:
    session = Session(tiny)
    adapter = session.create()
    trained(session)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(EngineFault, match="nothing was written") as failed:
            session.run(op, folder=str(tmp_path / "kept"), with_optimizer=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failed.value.category == "server" and str(tmp_path) not in str(failed.value)
    assert list(tmp_path.iterdir()) == [] and adapter.step == 3
    session.run(op, folder=str(tmp_path / "kept"), with_optimizer=True)


def test_a_full_disk_is_reported(tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str, encoding: str) -> int:
        raise OSError(28, "No space left on device")

    session = Session(tiny)
    session.create()
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(EngineFault, match=r"disk is full.*tinkex gc") as failed:
        session.run("save", folder=str(tmp_path / "kept"), with_optimizer=True)
    assert failed.value.category == "server" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_config.json", b"{"),
        ("adapter_config.json", b"[]"),
        ("adapter_config.json", b"[" * 100_000),
        ("adapter_model.safetensors", b"short"),
    ],
)
def test_a_damaged_file_is_the_services_fault_unless_it_was_just_uploaded(
    tiny: Model, tmp_path: Path, file: str, content: bytes
) -> None:
    session = Session(tiny)
    session.create(rank=4)
    session.run("save", folder=str(tmp_path / "saved"), with_optimizer=False)
    (tmp_path / "saved" / file).write_bytes(content)
    for is_upload, category in ((False, "server"), (True, "user")):
        with pytest.raises(EngineFault, match=f"{file} is damaged") as raised:
            session.run("load", folder=str(tmp_path / "saved"), with_optimizer=False, is_upload=is_upload)
        assert raised.value.category == category


@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize("rank", [1, 64])
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(
    tiny: Model, tmp_path: Path, rank: int, with_optimizer: bool
) -> None:
    session = Session(tiny)
    session.create(rank=rank)
    expected = session.run("size", with_optimizer=with_optimizer).head["size_bytes"]
    saved = session.run("save", folder=str(tmp_path / "saved"), with_optimizer=with_optimizer).head["size_bytes"]
    assert saved <= expected <= saved + 20_000


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux says which file a descriptor is")
def test_a_checkpoint_reaches_the_disk_before_its_name_and_its_name_before_the_reply(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(fd: int) -> None:
        steps.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        fsync(fd)

    def note_rename(source: Path, target: Path) -> None:
        steps.append(f"rename {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    session = Session(tiny)
    session.create(rank=4)
    session.run("save", folder=str(tmp_path / "checkpoints/run/weights/name"), with_optimizer=True)
    written, after = steps[: steps.index("rename name")], steps[steps.index("rename name") + 1 :]
    partial = "checkpoints/run/weights/name.partial"
    names = {"adapter_model.safetensors", "adapter_config.json", "tinkex.json", "optimizer.safetensors"}
    assert set(written) == {partial, *(f"{partial}/{name}" for name in names)}
    assert written[-1] == partial
    assert after == ["checkpoints/run/weights", "checkpoints/run", "checkpoints", "."]
