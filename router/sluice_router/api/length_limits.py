"""How long prompts and outputs may be: within the model's length, and the limit of the API key's owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluice_router.api.openai_requests import FieldError, SamplingFields

# OpenAI's default for completions; chats go up to the model's length.
DEFAULT_COMPLETION_TOKENS = 16
# When not even the model's length is known.
LAST_RESORT_OUTPUT_TOKENS = 16
# Validating and rendering so many takes the event loop about 20 ms.
MAX_MESSAGES = 4096
# Values in a body without its prompt, those in lists and objects included: so many are validated and rendered in 40 ms.
MAX_VALUES = 32_768


def limit_output(
    body: SamplingFields,
    prompt_field: str,
    token_ids: Sequence[int],
    *,
    default_tokens: int | None,
    owner: str,
    owner_limit_tokens: int | None,
    max_model_len_tokens: int | None,
) -> int:
    """Returns the most output tokens of a request.

    Args:
        body: Says how many the client wants.
        prompt_field: Path of the prompt.
        token_ids: The prompt.
        default_tokens: Most output tokens when the client does not say; None: up to the model's length.
        owner: Whose API key it came with; empty where none is asked for.
        owner_limit_tokens: The owner's limit; None: none.
        max_model_len_tokens: Longest prompt + output; None: not known.

    Raises:
        FieldError: The prompt, or prompt and output together, are too long.
    """
    wanted, default = body.output_limit_tokens, default_tokens
    if owner_limit_tokens is not None:
        if wanted is not None and wanted > owner_limit_tokens:
            name = body.output_limit_field
            message = f"{name}: at most {owner_limit_tokens} for {owner}, not {wanted}"
            raise FieldError(name, message, "max_output_tokens")
        default = min(default or owner_limit_tokens, owner_limit_tokens)
    if max_model_len_tokens is None:
        return wanted or default or LAST_RESORT_OUTPUT_TOKENS
    check_num_tokens(prompt_field, token_ids, max_model_len_tokens)
    num_prompt = len(token_ids)
    room = max_model_len_tokens - num_prompt
    if wanted is not None and wanted > room:
        given = f"{num_prompt} tokens of prompt and max_tokens {wanted}, {num_prompt + wanted} in all"
        raise too_long(body.output_limit_field, max_model_len_tokens, given)
    return min(room, wanted or default or room)


def check_prompt_size(fields: dict[str, Any], max_model_len_tokens: int | None) -> None:
    """Checks the size of a body's prompt, which may otherwise be anything.

    Args:
        fields: The body, unchecked.
        max_model_len_tokens: Longest prompt + output; None: not known.

    Raises:
        FieldError: There are too many messages, token ids or other values.
    """
    messages = fields.get("messages")
    if isinstance(messages, list):
        check_num_messages(len(messages))
    check_num_values(fields)
    prompt = fields.get("prompt")
    if not isinstance(prompt, list):
        return
    check_num_tokens("prompt", prompt, max_model_len_tokens)
    for index, item in enumerate(prompt):
        if isinstance(item, list):
            check_num_tokens(f"prompt[{index}]", item, max_model_len_tokens)


def check_num_messages(number: int) -> None:
    """Checks the number of a chat's messages, before any of them is read.

    Raises:
        FieldError: There are too many.
    """
    if number > MAX_MESSAGES:
        raise FieldError("messages", f"messages: at most {MAX_MESSAGES} messages, not {number}")


def check_num_values(fields: dict[str, Any]) -> None:
    """Checks that a body does not hold up the event loop by the mere number of its values, whatever they are.

    Args:
        fields: The body, unchecked; its prompt has limits of its own.

    Raises:
        FieldError: There are too many; names the field that has most of them.
    """
    numbers = {name: _count_values(value) for name, value in fields.items() if name != "prompt"}
    total = len(fields) + sum(numbers.values())
    if total <= MAX_VALUES:
        return
    most = max(numbers, key=lambda name: numbers[name])
    limit = f"at most {MAX_VALUES} values in lists and objects"
    if numbers[most] > MAX_VALUES:
        raise FieldError(most, f"{most}: {limit}, not {numbers[most]} or more")
    raise FieldError("", f"the body may have {limit}, not {total} or more")


def _count_values(value: Any) -> int:
    """Counts what is in a value, until it is too much."""
    number, rest = 0, [value]
    while rest and number <= MAX_VALUES:
        part = rest.pop()
        if isinstance(part, dict):
            number += len(part)
            rest.extend(part.values())
        elif isinstance(part, list):
            number += len(part)
            rest.extend(part)
    return number


def check_num_tokens(field: str, token_ids: Sequence[Any], max_model_len_tokens: int | None) -> None:
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
    return FieldError(field, f"{field}: {limit}; the request has {given}", "context_length_exceeded")
