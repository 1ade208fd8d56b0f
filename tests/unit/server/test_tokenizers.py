"""The server's tokenizers and chat templates, compared with what transformers makes of the same files."""

from __future__ import annotations

import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests import prepare
from tinkex.engine.contract import ModelInfo
from tinkex.engine.models import registry
from tinkex.server.http.errors import RequestRejected
from tinkex.server.sampling.chat_templates import ChatTemplate
from tinkex.server.sampling.tokenizer_cache import Detokenizer, ModelTokenizer, Tokenizers
from tinkex.server.upkeep.catalog import Catalog
from tinkex.testing.clock import FakeClock

TEXTS = [
    "Hello, world!",
    "  two spaces, a\ttab\n\nand lines ",
    "naïve café — 日本語 😀👩‍👩‍👧",
    "<|im_start|>user\nhi<|im_end|>",
    "def f(x):\n    return x  # done",
    "",
]
CONVERSATION = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": '4 <b>&</b> "quotes"'},
    {"role": "user", "content": "日本語 and\nlines"},
]


@pytest.fixture(scope="module")
def infos() -> list[ModelInfo]:
    return [registry.resolve("tinkex/tiny", prepare.CACHE), prepare.model()]


@pytest.fixture(scope="module")
def ours(infos: list[ModelInfo]) -> Tokenizers:
    return Tokenizers(Catalog(infos))


@pytest.fixture(scope="module", params=[0, 1], ids=["tiny", "smollm2"])
def pair(request: pytest.FixtureRequest, infos: list[ModelInfo]) -> tuple[str, Any]:
    """A model's name, and transformers' tokenizer for it."""
    info = infos[request.param]
    return info.name, AutoTokenizer.from_pretrained(info.folder)


# ── Text and tokens


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_text_becomes_the_tokens_that_transformers_makes(
    ours: Tokenizers, pair: tuple[str, Any], text: str, add_special_tokens: bool
) -> None:
    name, theirs = pair
    tokens = ours.load(name).encode(text, add_special_tokens)
    assert tokens == theirs.encode(text, add_special_tokens=add_special_tokens)
    for skip in (True, False):
        assert ours.load(name).decode(tokens, skip) == theirs.decode(tokens, skip_special_tokens=skip)


def test_an_alias_finds_the_same_tokenizer(ours: Tokenizers) -> None:
    assert ours.load("smollm2-135m") is ours.load("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_a_model_that_is_not_served_is_refused(ours: Tokenizers) -> None:
    with pytest.raises(RequestRejected, match="not served here"):
        ours.load("../../etc/passwd")


def test_a_folder_without_a_tokenizer_is_refused_with_what_to_do(tmp_path: Path) -> None:
    bare = Tokenizers(Catalog([ModelInfo(name="bare", folder=str(tmp_path))]))
    with pytest.raises(RequestRejected, match="Send tokens instead") as caught:
        bare.load("bare")
    assert str(tmp_path) not in caught.value.detail


def test_the_bytes_of_tokens_make_the_text(ours: Tokenizers, pair: tuple[str, Any]) -> None:
    tokenizer = ours.load(pair[0])
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == text


# ── Decoding piece by piece


def sentencepiece(folder: Path) -> ModelTokenizer:
    """A tokenizer in the manner of Llama 2: words begin with ▁, what is not in the vocabulary is written in bytes."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", "a", "b", "▁a"]
    model = tokenizers.models.BPE(
        vocab={word: place for place, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True
    )
    made = tokenizers.Tokenizer(model)
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([tokenizers.AddedToken("<s>", special=True)])
    made.save(str(folder / "tokenizer.json"))
    return ModelTokenizer("sentencepiece", folder)


def pieces_of(decoder: Detokenizer, tokens: list[int]) -> list[str]:
    return [*(decoder.push(token) for token in tokens), decoder.finish()]


@pytest.mark.parametrize("seed", range(20))
def test_the_pieces_of_any_tokens_make_their_text(ours: Tokenizers, pair: tuple[str, Any], seed: int) -> None:
    tokenizer, draw = ours.load(pair[0]), random.Random(seed)
    size = 263 if pair[0] == "tinkex/tiny" else 49_152
    tokens = [draw.randrange(size) for _ in range(draw.choice([1, 5, 50, 300]))]
    assert "".join(pieces_of(Detokenizer(tokenizer), tokens)) == tokenizer.decode(tokens)
    shown = pieces_of(Detokenizer(tokenizer, skip_special_tokens=False), tokens)
    assert "".join(shown) == tokenizer.decode(tokens, skip_special_tokens=False)


def test_no_piece_has_half_a_character(ours: Tokenizers, pair: tuple[str, Any]) -> None:
    text = "日本語 😀 naïve " * 40
    tokens = ours.load(pair[0]).encode(text, add_special_tokens=False)
    pieces = pieces_of(Detokenizer(ours.load(pair[0])), tokens)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


def test_words_of_sentencepiece_keep_their_spaces(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    hello, world, a = (tokenizer._backend.token_to_id(word) for word in ("▁hello", "▁world", "▁a"))
    assert pieces_of(Detokenizer(tokenizer), [hello, world, a]) == ["hello", " world", " a", ""]
    # What goes on from a prompt keeps the space before its first word.
    assert pieces_of(Detokenizer(tokenizer, [hello]), [world]) == [" world", ""]
    assert [tokenizer.token_bytes(token) for token in (hello, world)] == [b" hello", b" world"]
    many = [hello, world, a] * 100
    assert "".join(pieces_of(Detokenizer(tokenizer), many)) == tokenizer.decode(many)


def test_bytes_of_sentencepiece_wait_for_their_character(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    tokens = [byte + 2 for byte in "é😀".encode()]
    assert pieces_of(Detokenizer(tokenizer), tokens) == ["", "é", "", "", "", "😀", ""]
    assert [tokenizer.token_bytes(token) for token in tokens] == [bytes([byte]) for byte in "é😀".encode()]
    assert pieces_of(Detokenizer(tokenizer), tokens[:1]) == ["", "\ufffd"]


def test_a_long_text_is_decoded_a_window_at_a_time(ours: Tokenizers) -> None:
    class Counting(ModelTokenizer):
        longest = 0

        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            self.longest = max(self.longest, len(ids))
            return super().decode(ids, skip_special_tokens)

    tokenizer = Counting("tiny", Path(ours._catalog.find("tinkex/tiny").folder))
    decoder = Detokenizer(tokenizer)
    for token in b"words and spaces\n" * 100:
        decoder.push(token)
    assert tokenizer.longest <= 64


# ── Chat templates


def test_a_conversation_is_rendered_as_transformers_renders_it(ours: Tokenizers, pair: tuple[str, Any]) -> None:
    name, theirs = pair
    for messages in (CONVERSATION, CONVERSATION[:1], [{"role": "system", "content": "Be brief."}, *CONVERSATION]):
        for add_generation_prompt in (True, False):
            text = ours.load(name).chat.render(name, messages, add_generation_prompt=add_generation_prompt)
            assert text == theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
            ids = theirs.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False)
            assert ours.load(name).encode(text, add_special_tokens=False) == ids


TEMPLATES = {
    "generation": "{% for m in messages %}\n    {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}\n{% endfor %}{{ eos_token }}",
    "loop": "{{ bos_token }}{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
    "{{ m['role'] | upper }}: {{ m['content'] | trim }}{% if not loop.last %}{% set _ = 1 %}, {% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
    "{% endfor %}{{ ns.n }}{{ unk_token }}{% if tools is none %}no tools{% endif %}{% if documents %}d{% endif %}",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{{ t.function | tojson(indent=2) }}{% endfor %}"
    "{% endif %}{{ messages[-1].content | tojson }}{% if add_generation_prompt %}>{% endif %}",
    "calls": "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "({% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}){% endfor %}{% endfor %}",
    "think": "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}!",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_templates_use_works_as_in_transformers(tmp_path: Path, name: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "unk_token": None})
    )
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs: Any = cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATES[name]
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é<"}}}
    messages: list[Any] = [*CONVERSATION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "description": "é <&>"}}}
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    for given in [None, tools] if name == "tools" else [None]:
        got = ChatTemplate(tmp_path).render("m", messages, tools=given, extras={"enable_thinking": False})
        assert got == theirs.apply_chat_template(
            messages, tools=given, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )


def test_the_date_in_a_template_is_the_clocks(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    clock = FakeClock()
    today = datetime.fromtimestamp(clock.wall()).strftime("%d %b %Y")
    assert ChatTemplate(tmp_path, clock).render("m", CONVERSATION) == today


def test_a_template_for_tools_is_used_when_there_are_tools(tmp_path: Path) -> None:
    entries = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    template = ChatTemplate(tmp_path)
    assert template.render("m", CONVERSATION) == "plain"
    assert template.render("m", CONVERSATION, tools=[{"function": {}}]) == "1 tools"


def test_tools_are_refused_where_the_template_would_leave_them_out(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}")
    with pytest.raises(RequestRejected, match="does not support tools"):
        ChatTemplate(tmp_path).render("m", CONVERSATION, tools=[{"function": {}}])


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(RequestRejected, match="no chat template") as caught:
        ChatTemplate(tmp_path).render("bare", CONVERSATION)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].missing.deeper }}", "missing"),
        ("{{ messages.append(1) }}", "rejects these messages"),
        ("{{ ''.__class__.__mro__ }}", "rejects these messages"),
        ("{{ messages[0].content + 1 }}", "rejects these messages"),
    ],
)
def test_what_a_template_refuses_is_the_callers_to_know(tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(RequestRejected, match=said) as caught:
        ChatTemplate(tmp_path).render("m", CONVERSATION)
    assert caught.value.status == 400
