"""Unsupported fields that are refused, because ignoring them would mislead the client.

They are fields of OpenAI's API and of the extensions of vLLM and SGLang. All other unknown fields
are ignored (`rjax.serve.protocol.fields`).
"""

from rjax.serve.protocol.fields import Refused

_STRUCTURED = "use structured_outputs"
_ADAPTER = "this server has no adapters"
_NO_CODE = "requests bring no code; use logit_bias, bad_words or structured_outputs"
_OWN_TEMPLATE = (
    "requests bring no chat template; start the server with --chat-template, and set its variables "
    "with chat_template_kwargs"
)

SAMPLING = {
    "guided_json": Refused(f"{_STRUCTURED}.json"),
    "guided_regex": Refused(f"{_STRUCTURED}.regex"),
    "guided_choice": Refused(f"{_STRUCTURED}.choice"),
    "guided_grammar": Refused(f"{_STRUCTURED}.grammar"),
    "structural_tag": Refused(_STRUCTURED),
    "json_schema": Refused(f"{_STRUCTURED}.json"),
    "regex": Refused(f"{_STRUCTURED}.regex"),
    "ebnf": Refused(f"{_STRUCTURED}.grammar"),
    "grammar": Refused(f"{_STRUCTURED}.grammar"),
    "stop_regex": Refused("use stop"),
    "lora": Refused(_ADAPTER),
    "lora_name": Refused(_ADAPTER),
    "lora_path": Refused(_ADAPTER),
    "lora_request": Refused(_ADAPTER),
    "logits_processors": Refused(_NO_CODE, ([],)),
    "custom_logit_processor": Refused(_NO_CODE),
    "logprob_token_ids": Refused("logprobs cover the most likely tokens; use logprobs", ([],)),
    "truncation_side": Refused("truncate_prompt_tokens keeps the last tokens", ("left",)),
    "watermarking": Refused("texts have no watermark", (False,)),
    "repetition_detection": Refused("use max_tokens or a penalty"),
    "vllm_xargs": Refused("they mean something to extensions of vLLM alone", ({},)),
}
COMPLETION = SAMPLING | {
    "suffix": Refused("text is only written after a prompt, not before a suffix", ("",)),
    "prompt_embeds": Refused("give the prompt as text or token ids", ([],)),
    "messages": Refused("use /v1/chat/completions", ([],)),
    "tools": Refused("use /v1/chat/completions", ([],)),
}
CHAT = SAMPLING | {
    "functions": Refused("use tools", ([],)),
    "function_call": Refused("use tool_choice", ("none", "auto")),
    "audio": Refused("answers are text"),
    "web_search_options": Refused("the server reads nothing but the request; use tools"),
    "documents": Refused("put them into a message", ([],)),
    "chat_template": Refused(_OWN_TEMPLATE),
    "best_of": Refused("use n, or best_of of /v1/completions", (1,)),
    "prefix": Refused("named prefixes are found by themselves when the messages begin with one"),
}
_AS_CHAT = "use /v1/chat/completions"
RESPONSES = SAMPLING | {
    "use_beam_search": Refused(_AS_CHAT, (False,)),
    "length_penalty": Refused(_AS_CHAT, (1,)),
    "conversation": Refused("use previous_response_id, or send the whole conversation as input"),
    "prompt": Refused("no prompts are stored here; use instructions and input"),
    "truncation": Refused(
        "inputs that are too long are not cut; leave it out or give disabled", ("disabled",)
    ),
    "context_management": Refused("inputs are not shortened", ([],)),
    "moderation": Refused("nothing is moderated"),
    "messages": Refused("use input", ([],)),
    "max_tokens": Refused("use max_output_tokens"),
    "max_completion_tokens": Refused("use max_output_tokens"),
    "response_format": Refused("use text.format"),
    "functions": Refused("use tools", ([],)),
    "function_call": Refused("use tool_choice", ("none", "auto")),
    "n": Refused("a response is one answer; send several requests", (1,)),
    "best_of": Refused("a response is one answer", (1,)),
    "logprobs": Refused("use include and top_logprobs", (False,)),
    "prompt_logprobs": Refused(_AS_CHAT),
    "truncate_prompt_tokens": Refused(_AS_CHAT),
    "skip_special_tokens": Refused(_AS_CHAT, (True,)),
    "spaces_between_special_tokens": Refused(_AS_CHAT, (True,)),
    "include_stop_str_in_output": Refused(_AS_CHAT, (False,)),
    "return_token_ids": Refused(_AS_CHAT, (False,)),
    "return_tokens_as_token_ids": Refused(_AS_CHAT, (False,)),
    "echo": Refused(_AS_CHAT, (False,)),
    "add_generation_prompt": Refused(_AS_CHAT, (True,)),
    "continue_final_message": Refused(_AS_CHAT, (False,)),
    "add_special_tokens": Refused(_AS_CHAT, (False,)),
    "chat_template": Refused(_OWN_TEMPLATE),
    "audio": Refused("answers are text"),
    "modalities": Refused("answers are text", (["text"],)),
    "prefix": Refused("named prefixes are found by themselves when the messages begin with one"),
}
MESSAGE = {
    "function_call": Refused("use tool_calls"),
    "audio": Refused("messages are text"),
}
_TEXT_ALONE = Refused("this server takes text only, and fetches nothing")
PART = dict.fromkeys(
    ("image_url", "input_audio", "audio_url", "video_url", "file"), _TEXT_ALONE
) | {"refusal": Refused("give it as the message's refusal, or as a text")}
RESPONSE_FORMAT = {
    "schema": Refused("give the type json_schema, and json_schema with name and schema"),
}
STRUCTURED_OUTPUTS = {
    "structural_tag": Refused("use grammar"),
    "whitespace_pattern": Refused("JSON is written with one space after commas and colons"),
    "disable_additional_properties": Refused(
        "say additionalProperties: false in the schema", (False,)
    ),
}
TOKENIZE = {"chat_template": Refused(_OWN_TEMPLATE)}
PREFIX = {
    "ttl": Refused("a prefix stays until it is dropped"),
    "chat_template": Refused(_OWN_TEMPLATE),
    "tools": Refused("give the rendered text as prompt", ([],)),
    "chat_template_kwargs": Refused("give the rendered text as prompt", ({},)),
}
