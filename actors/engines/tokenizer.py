"""Turns prompts into token ids with a model's tokenizer and chat template, and finds the model's end tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slimefsdp.errors import ConfigError, ModelError
from slimefsdp.models.hf_folder import check_tokenizer

_ASSISTANT_TEXT = "what the assistant has said"  # stands for a response, so that its end can be found in a chat


def load_tokenizer(model_path: str) -> Any:
    """Loads a folder's tokenizer with transformers' own code; code in the folder is not run.

    Raises:
        ModelError: the folder has no tokenizer files, or transformers cannot load them.
    """
    check_tokenizer(Path(model_path))
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the files can hold anything
        reason = " ".join(str(error).split())[:500]  # one line, as the error of an engine's start shows only one line
        raise ModelError(
            f"transformers cannot make a tokenizer of {model_path}: {type(error).__name__}: {reason}",
            field="model.path",
            hint="give a folder with a tokenizer that needs no code of its own",
        ) from error


def decoder_of(model_path: str) -> Callable[[Any], str] | None:
    """Returns the function that decodes token ids; None means that the model folder has no tokenizer.

    Raises:
        ModelError: transformers cannot load the tokenizer's files.
    """
    try:
        check_tokenizer(Path(model_path))
    except ModelError:
        return None
    decode: Callable[[Any], str] = load_tokenizer(model_path).decode
    return decode


def end_token_ids(model_path: str, tokenizer_eos: int) -> set[int]:
    """Returns the end tokens of the tokenizer and of generation_config.json, which may list several end tokens.

    Args:
        tokenizer_eos: the end token of the tokenizer.

    Raises:
        ModelError: generation_config.json is invalid.
    """
    from transformers import GenerationConfig

    ids = {tokenizer_eos}
    file = Path(model_path) / "generation_config.json"
    if file.exists():
        try:
            listed = GenerationConfig.from_pretrained(model_path, local_files_only=True).eos_token_id
            ids |= set(listed) if isinstance(listed, list) else {listed}
            ids = {token for token in ids if token is not None}
            if not all(type(token) is int for token in ids):
                raise TypeError(f"eos_token_id = {listed!r:.100}")
        except Exception as error:  # the file can hold anything
            raise ModelError(
                f"{file} cannot be used: {type(error).__name__}: {error!s:.300}",
                field="model.path",
                hint="restore the model's own file, or remove it",
            ) from error
    return {token for token in ids if token is not None}


def encode_prompt(tokenizer: Any, prompt: Any, template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
    """Returns the token ids of a prompt, up to where the response begins.

    With a chat template, a text becomes one user message, and the opening of the assistant's turn is included. Without
    a chat template, a text is encoded with the tokenizer's own special tokens.

    Args:
        prompt: a text, a list of chat messages, or `{"messages": [...], "tools": [...]}`.
        template_kwargs: further arguments of the chat template, such as enable_thinking.

    Raises:
        ConfigError: the tokenizer has no chat template for messages; the template refuses the messages, does not write
            the tools or does not read template_kwargs; or the prompt encodes to no token.
    """
    tokens: list[int]
    require_read(tokenizer, template_kwargs)
    if tokenizer.chat_template:
        messages, tools = (prompt["messages"], prompt["tools"]) if isinstance(prompt, Mapping) else (prompt, None)
        require_tools_written(tokenizer, tools)
        # return_dict=False, since transformers would return a dictionary
        options = {**(template_kwargs or {}), "tools": tools}
        tokens = templated(tokenizer, messages, "prompt", tokenize=True, return_dict=False, **options)
    elif isinstance(prompt, str):
        tokens = tokenizer.encode(prompt)
    else:
        raise ConfigError(
            "the prompt is a list of chat messages, but the tokenizer has no chat template",
            field="prompt",
            hint="use a chat model's tokenizer, or write the prompts as text",
        )
    if not tokens:
        raise ConfigError(f"the prompt {prompt!r} encodes to no token", field="prompt", hint="drop it or give it text")
    return tokens


def encode_observation(tokenizer: Any, observation: Any, template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
    """Returns the token ids that follow the text of a response, up to where the next response begins.

    With a chat template, the ids begin with the end of the assistant's turn, and a text becomes one user message.
    Without a chat template, a text is encoded without special tokens.

    Args:
        observation: a text, or a list of chat messages.
        template_kwargs: as in `encode_prompt`.

    Raises:
        ConfigError: as `encode_prompt`.
    """
    require_read(tokenizer, template_kwargs)
    if not tokenizer.chat_template:
        if isinstance(observation, str):
            tokens: list[int] = tokenizer.encode(observation, add_special_tokens=False)
            return tokens
        raise ConfigError(
            "the observation is a list of chat messages, but the tokenizer has no chat template",
            field="observation",
            hint="use a chat model's tokenizer, or have the environment answer in text",
        )
    # The template is applied to a known text instead of the response, so that sampled tokens are never encoded again.
    messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)
    known = _ASSISTANT_TEXT
    while known in repr(messages):
        known += "."
    before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": known}]
    text: str = templated(tokenizer, [*before, *messages], "observation", tokenize=False, **(template_kwargs or {}))
    _, separator, follows = text.rpartition(known)
    if not separator:
        raise ConfigError(
            "the chat template leaves out what the assistant said",
            field="observation",
            hint="correct the chat template of the model folder, or have the environment answer in token ids",
        )
    return list(tokenizer.encode(follows, add_special_tokens=False))


def require_tools_written(tokenizer: Any, tools: object) -> None:
    """Raises a ConfigError if there are tools and the chat template would silently leave them out."""
    if tools and "tools" not in str(tokenizer.chat_template):
        raise ConfigError(
            "the prompt has tools, and the chat template of the tokenizer does not write them",
            field="prompt",
            hint="use a model whose chat template does, or describe the tools in the prompt itself",
        )


def require_read(tokenizer: Any, template_kwargs: Mapping[str, Any] | None) -> None:
    """Raises a ConfigError if the chat template would silently ignore one of these arguments."""
    for name in template_kwargs or {}:
        if name not in str(tokenizer.chat_template):
            raise ConfigError(
                f"data.chat_template_kwargs has {name}, which the chat template of the tokenizer does not read",
                field="data.chat_template_kwargs",
                hint="remove it, or correct its name",
            )


def templated(tokenizer: Any, messages: Any, what: str, **options: Any) -> Any:
    """Applies the chat template to messages, or to a text as the user's only message, and opens the response's turn.

    Args:
        what: a name of the messages, for errors.
        options: further arguments of transformers' `apply_chat_template`; add_generation_prompt=False opens no turn.

    Raises:
        ConfigError: the template refuses the messages.
    """
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    try:
        return tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True, **options})
    except Exception as error:  # a template can raise anything that its sandbox permits
        raise ConfigError(
            f"the chat template failed on the {what} {messages!r:.200}: {type(error).__name__}: {error!s:.300}",
            field=what,
            hint=f"correct the {what}'s messages, or the chat template of the model folder",
        ) from error
