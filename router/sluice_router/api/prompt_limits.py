"""Limits of a prompt that are checked before any work is done for it: neither validated nor tokenized."""

from __future__ import annotations

from typing import Any

from sluice_router.api.openai_requests import FieldError

# Validating and rendering so many takes the event loop about 20 ms.
MAX_MESSAGES = 4096
CODE = "context_length_exceeded"


def check_size(fields: dict[str, Any], max_model_len_tokens: int | None) -> None:
    """Checks the size of a body's prompt, which may otherwise be anything.

    Args:
        fields: The body, unchecked.
        max_model_len_tokens: Longest prompt + output; None: not known.

    Raises:
        FieldError: There are too many messages or token ids.
    """
    messages = fields.get("messages")
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise FieldError("messages", f"messages: at most {MAX_MESSAGES} messages, not {len(messages)}")
    prompt = fields.get("prompt")
    if not isinstance(prompt, list):
        return
    check_num_tokens("prompt", prompt, max_model_len_tokens)
    for index, item in enumerate(prompt):
        if isinstance(item, list):
            check_num_tokens(f"prompt[{index}]", item, max_model_len_tokens)


def check_num_tokens(field: str, token_ids: list[Any], max_model_len_tokens: int | None) -> None:
    """Checks that a prompt leaves room for one output token.

    Args:
        field: Path of the prompt.
        token_ids: The prompt.
        max_model_len_tokens: Longest prompt + output; None: not known.

    Raises:
        FieldError: It does not.
    """
    if max_model_len_tokens is not None and len(token_ids) >= max_model_len_tokens:
        raise too_long(field, max_model_len_tokens, f"{len(token_ids)} tokens of prompt")


def check_num_characters(field: str, prompt: str, max_model_len_tokens: int | None, max_token_characters: int) -> None:
    """Checks that a prompt may fit, whatever its text: tokenizing one that cannot would take seconds.

    Args:
        field: Path of the prompt.
        prompt: Its text.
        max_model_len_tokens: Longest prompt + output; None: not known.
        max_token_characters: Most characters that a token stands for.

    Raises:
        FieldError: It cannot.
    """
    if max_model_len_tokens is None:
        return
    limit = max_model_len_tokens * max_token_characters
    if len(prompt) > limit:
        given = f"{len(prompt)} characters of prompt, and no more than {limit} can fit"
        raise too_long(field, max_model_len_tokens, given)


def too_long(field: str, max_model_len_tokens: int, given: str) -> FieldError:
    """Makes the error for a request that is longer than the model's limit.

    Args:
        field: What is to blame.
        max_model_len_tokens: The limit.
        given: What the request has.
    """
    limit = f"the model's limit is {max_model_len_tokens} tokens for prompt and output"
    return FieldError(field, f"{field}: {limit}; the request has {given}", CODE)
