"""The tiny model with tokens that mark reasoning."""

import json
from pathlib import Path

from .live_server import write_model

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>")
TEMPLATE = (
    '{#- <tool_call>{"name": ..., "arguments": ...}</tool_call> -#}'
    "{%- if tools -%}{{- tools[0]['function']['name'] -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|' ~ message['role'] ~ '|>' -}}"
    "{%- if message['reasoning_content'] -%}"
    "{{- '<think>' ~ message['reasoning_content'] ~ '</think>' -}}{%- endif -%}"
    "{{- message['content'] ~ eos_token -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}"
    "{%- if enable_thinking is defined -%}{{- '<think>\\n' -}}"
    "{%- if not enable_thinking -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}{%- endif -%}"
    "{%- endif -%}"
)


def write_reasoning_model(folder: Path, *, special: bool, tags: tuple[str, ...] = ()) -> Path:
    """A model folder whose tokenizer has tokens for the tags of reasoning and calls, and harmony's
    markers as special tokens.

    Its chat template opens the reasoning with ``enable_thinking`` true, closes it at once with
    false, and otherwise leaves it to the model.

    Args:
        folder: to write to.
        special: whether the tags are special tokens; Qwen's are not. If not, the tokenizer has
            none of harmony's markers.
        tags: further ones.
    """
    write_model(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    size = len(tokenizer["model"]["vocab"])
    known = {token["content"]: token for token in tokenizer["added_tokens"]}
    size = max(size, *(token["id"] + 1 for token in known.values()))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for content in dict.fromkeys(TAGS + tags + (HARMONY if special else ())):
        entry = {"id": size, "content": content, **flags, "special": special}
        tokenizer["added_tokens"].append(entry)
        size += 1
    path.write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": -(-size // 64) * 64}))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder
