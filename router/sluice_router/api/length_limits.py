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
