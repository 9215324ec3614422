"""The tokenizer against transformers' on the same directory, and text that grows token by token."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import (
    Tokenizer as Backend,
)

from engine.models.loader import open_checkpoint
from engine.tokenizer import ByteDetokenizer, Tokenizer, WindowDetokenizer

NASTY = [
    "",
    " ",
    "\n\n \t\r\n",
    "Hello, world! It's 12345.678e-9 o'clock; WE'LL see…",
    "  leading and trailing   ",
    "naïve Ünïcödé ﬁ ligature Å vs A\u030a",
    "日本語テキスト、한국어 텍스트، العربية हिन्दी ไทย",
    "👩‍👩‍👧‍👦🏳️‍🌈 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff \u200b\ufeff\u0000\x7f",
    "def f(x):\n    return {'a': [1, 2, 3]}  # comment\n",
    "<|im_start|>user\nhi<|im_end|> <|im_start|><|im_start|> <|endoftext|>x<|im_",
    "a" * 300 + " " * 300 + "é" * 300,
    "\ufffd is a character too \ufffd",
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi <b>&amp;</b>"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n\nc"},
        {"role": "user", "content": "日本 👍"},
    ],
]


def transformers_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def check_equal(ours: Tokenizer, theirs: Any, texts: list[str]) -> None:
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.pad_token_id == theirs.pad_token_id
    assert ours.vocab_size == len(theirs)
    for text in texts:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == expected, text


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    tokenizer = open_checkpoint("smollm2").tokenizer
    assert tokenizer is not None
    return tokenizer


@pytest.mark.smollm2
def test_smollm2_equals_transformers(smollm2: Tokenizer) -> None:
    theirs = transformers_tokenizer(open_checkpoint("smollm2").path)
    generator = random.Random(1)
    noise = ["".join(chr(generator.randrange(1, 0xD800)) for _ in range(40)) for _ in range(20)]
    check_equal(smollm2, theirs, NASTY + noise)
    for messages in CHATS:
        for prompt in (True, False):
            options = {"add_generation_prompt": prompt}
            expected = theirs.apply_chat_template(messages, tokenize=False, **options)
            assert smollm2.render_chat(messages, **options) == expected
            ids = theirs.apply_chat_template(messages, **options)["input_ids"]
            assert smollm2.chat(messages, **options) == ids


def train_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([*NASTY, "<unk> user assistant", "user user"] * 2, trainer)
    backend.add_special_tokens(
        [AddedToken("<|endoftext|>"), AddedToken("<|im_start|>", special=True)]
    )
    backend.add_tokens([AddedToken(t, normalized=False) for t in ("two words", "né à", "né")])
    return backend


TEMPLATE = (
    "{{ bos_token }}{%- for m in messages %}\n    {% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "{{ m | tojson }}{% if loop.last %}{% break %}{% endif %}{% generation %}{{ m.content | trim }}{% endgeneration %}"
    "{%- endfor %}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{{ '<a>' if add_generation_prompt }}"
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"eos_token": "<|endoftext|>"},
    "bos": {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>", "add_bos_token": True},
    "bos-eos": {
        "bos_token": {"content": "<|im_start|>", "__type": "AddedToken"},
        "eos_token": "<|endoftext|>",
        "add_bos_token": True,
        "add_eos_token": True,
    },
    "no-bos": {"bos_token": "<|im_start|>", "add_bos_token": False},
    "named-in-config-only": {"eos_token": "user", "pad_token": "<|im_start|>"},
    "decoder": {
        "added_tokens_decoder": {
            "385": {"content": "<new>", "special": True, "normalized": False},
            "386": {"content": "<plain>", "special": False, "normalized": False},
        }
    },
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("templated", [False, True])
def test_what_the_config_adds_equals_transformers(
    name: str, templated: bool, tmp_path: Path
) -> None:
    """Special tokens from tokenizer_config.json, over a tokenizer.json with or without a bos of its own."""
    backend = train_backend()
    if templated:
        start = "<|im_start|>"
        backend.post_processor = processors.TemplateProcessing(
            single=f"{start} $A",
            pair=f"{start} $A $B",
            special_tokens=[(start, backend.token_to_id(start))],
        )
    backend.enable_truncation(5)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE} | CONFIGS[
        name
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers_tokenizer(tmp_path)
    theirs.backend_tokenizer.no_truncation()
    ours = Tokenizer.from_directory(tmp_path)
    texts = [
        *NASTY,
        "two words né à né",
        "<new><plain>two words",
        "a user",
        "user<|endoftext|>users",
    ]
    check_equal(ours, theirs, texts)
    for messages in CHATS:
        for options in ({}, {"enable_thinking": False}):
            expected = theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options
            )
            assert ours.render_chat(messages, **options) == expected


def test_templates_in_a_file_or_by_name(tmp_path: Path) -> None:
    train_backend().save(str(tmp_path / "tokenizer.json"))
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_directory(tmp_path).render_chat(CHATS[0]) == "d"
    (tmp_path / "chat_template.jinja").write_text("f")
    assert Tokenizer.from_directory(tmp_path).render_chat(CHATS[0]) == "f"


def test_chat_refuses_in_words() -> None:
    tokenizer = Tokenizer(train_backend(), {"chat_template": TEMPLATE})
    with pytest.raises(ValueError, match="refuses the messages: no tools"):
        tokenizer.render_chat([{"role": "tool", "content": ""}])
    with pytest.raises(ValueError, match="tools are not supported"):
        tokenizer.chat(CHATS[0], tools=[{"type": "function"}])
    with pytest.raises(ValueError, match="a message is a dict with 'role'"):
        tokenizer.chat(["hello"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(train_backend(), {}).chat(CHATS[0])
    with pytest.raises(ValueError, match="refuses the messages"):
        Tokenizer(train_backend(), {"chat_template": "{% if %}"}).chat(CHATS[0])


def test_contents_in_parts_are_joined() -> None:
    tokenizer = Tokenizer(train_backend(), {"chat_template": TEMPLATE})
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]
    messages = [{"role": "user", "content": parts}]
    assert tokenizer.render_chat(messages) == tokenizer.render_chat(CHATS[0])
    assert messages[0]["content"] is parts, "the caller's messages stay as they are"


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list of at least one"),
        (None, "messages must be a list of at least one"),
        ("hello", "messages must be a list of at least one"),
        ({"role": "user", "content": "x"}, "messages must be a list of at least one"),
        ([{"role": "user"}], r"messages\[0\]\['content'\] must be text or a list .* got None"),
        ([*CHATS[0], {"role": "user", "content": None}], r"messages\[1\]\['content'\] must be"),
        ([{"role": "user", "content": 5}], r"\['content'\] must be text or a list .* got 5"),
        ([{"role": "user", "content": []}], r"\['content'\] must be text or a list"),
        ([{"role": "user", "content": ["x"]}], r"\['content'\]\[0\] must be .* got 'x'"),
        ([{"role": "user", "content": [IMAGE]}], "the only kind of part that is supported.*image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"\['content'\]\[0\] must be"),
        ([{"role": 5, "content": "x"}], r"messages\[0\]: a message is a dict with 'role'"),
    ],
)  # fmt: skip
def test_messages_that_are_none_are_refused(messages: Any, message: str) -> None:
    """A template renders None as the text "None" and a list as its repr: silence would be wrong text."""
    with pytest.raises(ValueError, match=message):
        Tokenizer(train_backend(), {"chat_template": TEMPLATE}).render_chat(messages)


@pytest.mark.parametrize(
    "template",
    ["{{ 1 // 0 }}", "{{ messages[0].content + 1 }}", "{{ [] | first + {}.x.y }}", "{{ 'x'.encode('no such code') }}"],
)  # fmt: skip
def test_whatever_a_template_raises_is_a_value_error(template: str) -> None:
    with pytest.raises(ValueError, match="the chat template refuses the messages"):
        Tokenizer(train_backend(), {"chat_template": template}).render_chat(CHATS[0])


def test_text_that_is_none_is_refused() -> None:
    for text in ("half a pair: \ud83d", None, b"bytes"):
        with pytest.raises(ValueError, match="text must be a str without lone surrogates"):
            Tokenizer(train_backend(), {}).encode(text)  # type: ignore[arg-type]


def test_templates_run_in_a_sandbox() -> None:
    """A template comes with a download: it must not reach Python."""
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match="refuses the messages"):
        Tokenizer(train_backend(), {"chat_template": attack}).render_chat(CHATS[0])


def added(records: object) -> str:
    return json.dumps({"added_tokens_decoder": records})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json is damaged"),
        ("tokenizer.json", None, r"tokenizer\.json does not exist"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", "[" * 100_000, r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", "[1]", r"tokenizer_config\.json holds a list, expected"),
        ("tokenizer_config.json", b"\xff", r"tokenizer_config\.json is not UTF-8"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja is not UTF-8"),
        (
            "tokenizer_config.json",
            '{"bos_token": 5}',
            r"config\.json: bos_token must be null, text",
        ),
        (
            "tokenizer_config.json",
            '{"eos_token": {}}',
            r"config\.json: eos_token must be null, text",
        ),
        (
            "tokenizer_config.json",
            '{"chat_template": [{}]}',
            r"config\.json: chat_template must be",
        ),
        ("tokenizer_config.json", '{"chat_template": 5}', r"config\.json: chat_template must be"),
        ("tokenizer_config.json", '{"chat_template": ["x"]}', r"config\.json: chat_template must"),
        ("tokenizer_config.json", added([]), r"config\.json: added_tokens_decoder must be an obj"),
        ("tokenizer_config.json", added({"x": {"content": "<y>"}}), "the key must be a token id"),
        ("tokenizer_config.json", added({"-1": {"content": "<y>"}}), "the key must be a token id"),
        ("tokenizer_config.json", added({"385": {}}), r"decoder\['385'\] must be an object with"),
        ("tokenizer_config.json", added({"385": "<y>"}), "must be an object with content"),
        (
            "tokenizer_config.json",
            added({"385": {"content": "<y>", "special": "yes"}}),
            r"config\.json: added_tokens_decoder\['385'\]: special must be true or false",
        ),
        (
            "tokenizer_config.json",
            added({"1000000": {"content": "<y>"}}),
            "gives '<y>' the id 1000000, but the next free id of tokenizer.json is 385",
        ),
    ],
)
def test_damaged_files_are_named(
    name: str, text: str | bytes | None, message: str, tmp_path: Path
) -> None:
    train_backend().save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_files_that_are_directories_are_named(tmp_path: Path) -> None:
    train_backend().save(str(tmp_path / "tokenizer.json"))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=rf"{name} cannot be read"):
            Tokenizer.from_directory(tmp_path)
        (tmp_path / name).rmdir()


def test_ids_that_are_none_are_refused() -> None:
    tokenizer = Tokenizer(train_backend(), {})
    for token_ids in ([-1], [2**32], ["x"], 5, [None], [1.5]):
        with pytest.raises(ValueError, match="token_ids must be a list of token ids"):
            tokenizer.decode(token_ids)  # type: ignore[arg-type]


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("skip", [False, True])
def test_growing_text_equals_the_whole(skip: bool) -> None:
    """Random ids: most are no UTF-8, special tokens fall into characters, some ids have no token at all."""
    tokenizer = Tokenizer(train_backend(), {"eos_token": "<|endoftext|>"})
    assert isinstance(tokenizer.detokenizer(), ByteDetokenizer)
    generator = random.Random(2)
    for _ in range(300):
        ids = [
            generator.randrange(tokenizer.vocab_size + 5) for _ in range(generator.randrange(40))
        ]
        text = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces_of(tokenizer, ids, skip=skip)) == text, ids


def test_no_piece_holds_half_a_character() -> None:
    tokenizer = Tokenizer(train_backend(), {})
    for text in NASTY:
        pieces = pieces_of(tokenizer, tokenizer.encode(text), skip=False)
        assert "".join(pieces) == text
        assert pieces[-1] == "", "a text that is whole leaves nothing to finish"
        assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
    emoji = tokenizer.encode("👍")
    assert len(emoji) > 1
    assert pieces_of(tokenizer, emoji, skip=False)[-2] == "👍"
    assert pieces_of(tokenizer, emoji[:-1], skip=False)[-1] == "\ufffd"


def sentencepiece_backend() -> tuple[Backend, dict[str, int]]:
    """Llama 2's decoder: spaces as ▁, bytes of unknown characters as <0xE2>, the first space cut."""
    pieces = ["<unk>", "▁", "▁Hello", "▁wor", "ld", "!", *(f"<0x{i:02X}>" for i in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend, vocab


@pytest.mark.parametrize("kind", ["special", "unknown id", "bad bytes"])
def test_a_long_run_without_text_keeps_the_window_short(kind: str) -> None:
    """A window that grows with every token makes a run of n tokens cost n * n."""
    backend, vocab = sentencepiece_backend()
    backend.add_special_tokens([AddedToken("<pad>", special=True, normalized=False)])
    tokenizer = Tokenizer(backend, {})
    run = {
        "special": backend.token_to_id("<pad>"),
        "unknown id": 9999,
        "bad bytes": vocab["<0xFF>"],
    }
    ids = [2, 3, 4, *[run[kind]] * 2000, 3, 4, 5]
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    found, longest = "", 0
    for token_id in ids:
        found += detokenizer.push(token_id)
        longest = max(longest, len(detokenizer._window))
    assert found + detokenizer.finish() == tokenizer.decode(ids)
    assert found.startswith("Hello world")
    assert found.endswith(" world!")
    assert longest <= 20


def test_growing_text_of_a_sentencepiece_model() -> None:
    backend, vocab = sentencepiece_backend()
    tokenizer = Tokenizer(backend, {})
    assert isinstance(tokenizer.detokenizer(), WindowDetokenizer)
    ids = [2, 3, 4, 5, 1]
    for char in "é 👍":
        ids += [vocab[f"<0x{byte:02X}>"] for byte in char.encode()]
    ids += [3, 4]
    found = pieces_of(tokenizer, ids, skip=True)
    assert "".join(found) == tokenizer.decode(ids) == "Hello world! é 👍 world"
    assert "\ufffd" not in "".join(found)
    cut = [*ids[:-2][:5], *ids[:-3][-3:]]  # half a character after plain text
    assert "".join(pieces_of(tokenizer, cut, skip=True)) == tokenizer.decode(cut)
