"""The model's files: tokenizer, chat template, ends and defaults."""

from __future__ import annotations

import asyncio
import json

import pytest
from edge_fakes import TEMPLATE, write_model
from tokenizers import Tokenizer, processors

from sluice_router.text import tokenizer as module
from sluice_router.text.chat_template import ChatTemplate, ChatTemplateError
from sluice_router.text.tokenizer import ModelFilesError, ModelText


@pytest.fixture
def directory(tmp_path):
    write_model(tmp_path)
    return tmp_path


@pytest.fixture
def load(directory):
    made = []

    def _load(**files):
        for name, content in files.items():
            path = directory / f"{name}.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
        made.append(ModelText.load(directory))
        return made[-1]

    yield _load
    for text in made:
        text.close()


def test_reads_ends_defaults_and_length(load):
    defaults = load().defaults
    assert defaults.eos_token_ids == {0, 2}
    assert defaults.sampling == {"temperature": 0.7, "top_k": 20}
    assert defaults.max_model_len_tokens == 512
    assert defaults.vocabulary_tokens == 400


@pytest.mark.parametrize("eos", ["<|endoftext|>", {"content": "<|endoftext|>"}], ids=["text", "token"])
def test_ends_are_those_of_all_files(load, eos):
    defaults = load(
        config={"eos_token_id": 3}, generation_config={"eos_token_id": [4, 5]}, tokenizer_config={"eos_token": eos}
    ).defaults
    assert defaults.eos_token_ids == {0, 3, 4, 5}


def test_a_seed_of_the_models_files_is_nobodys(load):
    assert load(generation_config={"seed": 7}).defaults.sampling.keys() == {"temperature", "top_k"}


def test_most_output_tokens_of_the_model(load):
    assert load().defaults.max_tokens is None
    assert load(generation_config={"max_new_tokens": 33}).defaults.max_tokens == 33


def test_length_of_a_text_model_inside_another(load):
    text = load(config={"text_config": {"max_position_embeddings": 99, "vocab_size": 500}})
    assert text.defaults.max_model_len_tokens == 99
    assert text.defaults.vocabulary_tokens == 500


async def test_bos_comes_from_the_tokenizers_own_post_processor(directory, load):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    text = load()
    plain = text.encode_now("hello", add_special_tokens=False)
    assert text.encode_now("hello", add_special_tokens=True) == [0, *plain]
    for _ in range(2):  # the second time its words are known
        assert list(await text.encode("hello", add_special_tokens=False)) == plain
        assert list(await text.encode("hello", add_special_tokens=True)) == [0, *plain]


def test_truncation_and_padding_of_the_file_are_off(directory, load):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(directory / "tokenizer.json"))
    assert len(load().encode_now("a b c d e f g h i", add_special_tokens=False)) > 8


def test_tokens_that_only_the_configuration_declares_are_added(load):
    declared = {"content": "<|new|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    text = load(tokenizer_config={"added_tokens_decoder": {"400": declared}})
    ids = text.encode_now("<|new|>", add_special_tokens=False)
    assert [text.decode_token(token_id)[0] for token_id in ids] == ["<|new|>"]


async def test_long_texts_are_tokenized_in_the_thread_with_the_same_result(load):
    text = load()
    long = " ".join(f"word{number}" for number in range(module.MAX_INLINE_CHARACTERS))
    running = asyncio.ensure_future(text.encode(long, add_special_tokens=True))
    await asyncio.sleep(0)
    assert not running.done()
    assert list(await running) == text.encode_now(long, add_special_tokens=True)


async def test_a_long_text_of_known_words_needs_no_thread(load):
    text = load()
    long = "the quick brown fox " * (module.MAX_INLINE_CHARACTERS // 10)
    with pytest.raises(StopIteration) as ended:
        text.encode(long, add_special_tokens=True).send(None)
    assert list(ended.value.value) == text.encode_now(long, add_special_tokens=True)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        pytest.param("tokenizer.json", None, "missing", id="no-tokenizer"),
        pytest.param("tokenizer.json", "{}", "not a tokenizer", id="no-tokenizer-inside"),
        pytest.param("config.json", "{", "not JSON", id="broken-json"),
        pytest.param("generation_config.json", "[]", "not a JSON object", id="list"),
    ],
)
def test_broken_files_are_named(directory, name, content, words):
    (directory / name).unlink() if content is None else (directory / name).write_text(content)
    with pytest.raises(ModelFilesError, match=words) as caught:
        ModelText.load(directory)
    assert name in str(caught.value)


def test_template_that_does_not_compile_is_named(directory):
    (directory / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ChatTemplateError, match="line 1"):
        ModelText.load(directory)


def test_file_goes_before_configuration(directory, load):
    (directory / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert load().chat_template.render([]) == "file <|endoftext|>"


def test_named_templates(load):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    template = load(tokenizer_config={"chat_template": named}).chat_template
    assert template.render([]) == "plain"
    assert template.render([], tools=[{"type": "function"}]) == "tools 1"


def test_model_without_template(load):
    assert load(tokenizer_config={"chat_template": None}).chat_template is None


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        pytest.param("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}', id="tojson-keeps-html"),
        pytest.param("{{ [1] | tojson(indent=2) }}", "[\n  1\n]", id="tojson-indent"),
        pytest.param("{{ {'b': 1, 'a': 2} | tojson }}", '{"b": 1, "a": 2}', id="tojson-keeps-the-order"),
        pytest.param("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}', id="tojson-sorts"),
        pytest.param("{{ ['é'] | tojson(ensure_ascii=true) }}", '["\\u00e9"]', id="tojson-ascii"),
        pytest.param("{{ {'a': [1, 2]} | tojson(separators=(',', ':')) }}", '{"a":[1,2]}', id="tojson-separators"),
        pytest.param(
            "{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1", id="break"
        ),
        pytest.param("{% generation %}x{% endgeneration %}", "x", id="generation"),
        pytest.param("{{ strftime_now('%Y') | length }}", "4", id="now"),
        pytest.param("{{ none_such }}", "", id="undefined"),
        pytest.param("{{ flag }}", "on", id="variables"),
        pytest.param("  {% if true %}\nx\n  {% endif %}\n", "x\n", id="blocks-trimmed"),
    ],
)
def test_helpers(source, rendered):
    assert ChatTemplate({"default": source}, {}).render([], variables={"flag": "on"}) == rendered


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{{ raise_exception('no') }}", id="raise"),
        pytest.param("{{ messages[0].content.x.y }}", id="undefined"),
        pytest.param("{{ messages[0].content + 1 }}", id="type"),
        pytest.param("{{ ''.__class__.__mro__ }}", id="sandbox"),
        pytest.param("{{ messages.append(1) }}", id="immutable"),
        pytest.param("{{ 1 // 0 }}", id="arithmetic"),
    ],
)
def test_what_a_template_raises_is_an_error_of_the_request(source):
    with pytest.raises(ChatTemplateError, match="refuses"):
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "x"}])


def test_renders_as_hugging_face(directory):
    import transformers  # noqa: PLC0415  (takes seconds, and only this test needs it)

    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "  hi\n"}]
    ours = ChatTemplate({"default": TEMPLATE}, {}).render(messages)
    assert ours == theirs.apply_chat_template(
        messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True
    )
