"""The model's tokenizer, and what its files say about prompts, ends and default sampling."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from sluice.wire_fields import optional_numbers
from sluice_router.text.chat_template import ChatTemplate
from sluice_router.text.detokenizer import Detokenizer, DetokenizerFactory
from sluice_router.text.tokenizer_cache import KnownWords, can_cut

# About 256 tokens of text; below it the thread costs more than it saves.
MAX_INLINE_CHARACTERS = 1024
# Sampling defaults that a model may set in generation_config.json, as vLLM takes them.
SAMPLING_DEFAULTS = optional_numbers() - {"seed", "num_logprobs"}


class ModelFilesError(Exception):
    """The model's directory lacks a file that serving text needs, or the file is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What the model's files say about sampling.

    Args:
        sampling: Values for absent sampling fields, by vLLM's names.
        max_tokens: Most output tokens unless the request says so; None: up to the model's length.
        eos_token_ids: Tokens that end an output.
        max_model_len_tokens: Longest prompt + output by the model's configuration; None when it does not say.
        vocabulary_tokens: Number of token ids, padding included.
    """

    sampling: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    max_model_len_tokens: int | None = None
    vocabulary_tokens: int = 0


class ModelText:
    """Everything textual about a model: tokenizer, chat template, detokenizers, defaults.

    Args:
        tokenizer: The tokenizer.
        chat_template: The model's template, or None.
        defaults: What the model's files say about sampling.

    Attributes:
        max_token_characters: Most characters that a token stands for.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, defaults: GenerationDefaults) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._known_words = KnownWords(tokenizer) if can_cut(tokenizer) else None
        self._detokenizers = DetokenizerFactory(tokenizer)
        self._tokenizing_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self.chat_template = chat_template
        self.defaults = defaults
        # In a byte-level vocabulary a character stands for a byte, which makes the figure too large, never too small.
        self.max_token_characters = max(map(len, tokenizer.get_vocab()), default=1)

    @classmethod
    def load(cls, directory: Path) -> ModelText:
        """Loads the text side of a model.

        Args:
            directory: Holds ``tokenizer.json``, and as far as the model has them ``tokenizer_config.json``,
                ``chat_template.jinja``, ``generation_config.json`` and ``config.json``.

        Raises:
            ModelFilesError: A file is missing or broken.
            ChatTemplateError: The chat template does not compile.
        """
        tokenizer_config = _read_json(directory / "tokenizer_config.json")
        tokenizer = _read_tokenizer(directory, tokenizer_config)
        defaults = _read_defaults(directory, tokenizer, tokenizer_config)
        return cls(tokenizer, ChatTemplate.load(directory, tokenizer_config), defaults)

    @property
    def uses_table(self) -> bool:
        """Whether detokenizers look tokens up in a table."""
        return self._detokenizers.uses_table

    async def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Tokenizes a prompt; without giving up control when it is short, or its words are known.

        Args:
            text: The prompt.
            add_special_tokens: Whether the tokenizer adds BOS and the like; chat templates write them themselves.
        """
        if self._known_words is not None:
            ids = self._known_words.encode(text, add_special_tokens=add_special_tokens)
            if ids is not None:
                return ids
        if len(text) <= MAX_INLINE_CHARACTERS:
            return array("I", self.encode_now(text, add_special_tokens=add_special_tokens))
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._tokenizing_thread, self._encode_fast, text, add_special_tokens)
        return array("I", found)

    def encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenizes where it is called, by the tokenizer alone; see ``encode``."""
        return self._encode_fast(text, add_special_tokens)

    def make_detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Makes the detokenizer of one request."""
        return self._detokenizers.make(skip_special_tokens=skip_special_tokens)

    def decode_token(self, token_id: int) -> tuple[str, bytes]:
        """Decodes one token alone, for logprobs: its text and its bytes."""
        return self._detokenizers.decode_token(token_id)

    def close(self) -> None:
        """Ends the thread."""
        self._tokenizing_thread.shutdown(wait=False, cancel_futures=True)

    # run_in_executor passes no keywords.
    def _encode_fast(self, text: str, add_special_tokens: bool) -> list[int]:  # noqa: FBT001
        # ``encode`` also makes offsets, and keeps the GIL: 18k tokens stall the event loop for 26 ms.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ModelFilesError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} is not a JSON object")
    return content


def _read_tokenizer(directory: Path, tokenizer_config: Mapping[str, Any]) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelFilesError(f"{path} is missing: the router tokenizes with the model's own fast tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception for every fault
        raise ModelFilesError(f"{path} is not a tokenizer: {error}") from error
    # As Hugging Face: BOS comes from the file's own post-processor; tokens known to the configuration alone are added.
    declared = sorted(tokenizer_config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    tokenizer.add_tokens(
        [
            AddedToken(**_token_arguments(token))
            for _, token in declared
            if tokenizer.token_to_id(token["content"]) is None
        ]
    )
    return tokenizer


def _token_arguments(token: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: token[key]
        for key in ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        if key in token
    }


def _read_defaults(directory: Path, tokenizer: Tokenizer, tokenizer_config: Mapping[str, Any]) -> GenerationDefaults:
    config = _read_json(directory / "config.json")
    config = {**config, **config.get("text_config", {})}
    generation = _read_json(directory / "generation_config.json")
    sampling = {name: generation[name] for name in sorted(SAMPLING_DEFAULTS) if generation.get(name) is not None}
    return GenerationDefaults(
        sampling=sampling,
        max_tokens=generation.get("max_new_tokens"),
        eos_token_ids=_read_eos(config, generation, tokenizer, tokenizer_config),
        max_model_len_tokens=config.get("max_position_embeddings"),
        vocabulary_tokens=max(config.get("vocab_size", 0), tokenizer.get_vocab_size()),
    )


def _read_eos(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Tokenizer, tokenizer_config: Mapping[str, Any]
) -> frozenset[int]:
    ids: set[int] = set()
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    eos = tokenizer_config.get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    token_id = tokenizer.token_to_id(content) if isinstance(content, str) else None
    return frozenset(ids if token_id is None else ids | {token_id})
