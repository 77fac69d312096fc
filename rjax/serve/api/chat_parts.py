"""The parts of chat outputs: the whole response, or the deltas and chunks of a stream."""

import dataclasses
import secrets
import time
from collections.abc import Iterator
from typing import Any

from rjax.outputs import CompletionOutput, RequestOutput, token_chances
from rjax.sampling import SamplingParams
from rjax.serve.api.chunks import ChatChunks, UsageCounter, json_string, json_text
from rjax.serve.api.completions import continuous_usage, tokens_as_token_ids, usage_wanted
from rjax.serve.api.output_events import DONE, OutputEncoder
from rjax.serve.api.service import Service
from rjax.serve.parsing.reader import OutputReader
from rjax.serve.parsing.tools.base import functions
from rjax.serve.parsing.tools.parser import CallDelta, join_call_deltas
from rjax.serve.parsing.tools.prompt import message_text
from rjax.serve.protocol.logprobs import (
    chat_logprobs,
    lazy_chances,
    lazy_chat_logprobs,
    lazy_prompt_logprobs,
)
from rjax.serve.protocol.requests import ChatCompletionRequest, Tool
from rjax.serve.protocol.responses import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatFinishReason,
    ChatMessage,
    ResponseFunctionCall,
    ResponseToolCall,
    UsageInfo,
)


@dataclasses.dataclass(slots=True)  # frozen ones take three times as long to make
class ChatDelta:
    """New output of one sample, which holds at most one part of it.

    Attributes:
        index: index of the sample.
        begins: it is the sample's first delta, which may have content that the request echoes.
        reasoning, content: new text; empty for other parts.
        call: delta of a tool call.
        logprobs: fields of `ChatLogprobs` for the new tokens, set in one of their deltas.
        token_ids: ids of the new tokens, set in the same delta.
        finish_reason: the sample's finish reason, set in its last delta.
        stop_reason: the stop reason of the sample's `CompletionOutput`.
        prompt_token_ids: token ids of the prompt, set in the request's first delta.
    """

    index: int
    begins: bool = False
    reasoning: str = ""
    content: str = ""
    call: CallDelta | None = None
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None


class ChatParts:
    """Converts engine outputs to a chat response, or to deltas.

    Args:
        body: the request's body.
        service: the app's service.
        params: sampling parameters of the samples.
        tools: functions that the model may call.
        prompt_token_ids: token ids of the prompt.
        start: state of the outputs; see `OutputFormat`.
        answer_logprobs: give logprobs only for the content's tokens; see
            `rjax.serve.api.chat.prepare_chat`.
    """

    def __init__(
        self,
        body: ChatCompletionRequest,
        service: Service,
        params: SamplingParams,
        tools: list[Tool],
        prompt_token_ids: list[int],
        start: str,
        *,
        answer_logprobs: bool,
    ) -> None:
        self._body = body
        self._params = params
        self._as_token_ids = tokens_as_token_ids(body, service)
        self._tokenizer = service.tokenizer
        given = start, functions(tools), service.tokenizer, prompt_token_ids, params
        self._answer_logprobs = answer_logprobs and service.output_format.reasons
        self._readers = [
            OutputReader(service.output_format, *given, every_token=self._answer_logprobs)
            for _ in range(params.n)
        ]
        self.head: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.model,
        }
        self._echoed = message_text(body.messages[-1]) if _echoes(body) else ""
        self._count = UsageCounter()
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def whole(self, output: RequestOutput) -> ChatCompletionResponse:
        """The response, from the last output; its log-probabilities are lazy."""
        self._add(output)
        body = self._body
        return ChatCompletionResponse.model_construct(
            **self.head,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=UsageInfo.model_validate(self.usage()),
            prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
            prompt_logprobs=lazy_prompt_logprobs(output.prompt_logprobs),
        )

    def _choice(self, completion: CompletionOutput) -> ChatCompletionResponseChoice:
        found = self._readers[completion.index].read(completion)
        made = [
            ResponseToolCall(
                id=call.id, function=ResponseFunctionCall(name=call.name, arguments=call.arguments)
            )
            for call in join_call_deltas(found.calls)
        ]
        reason = completion.finish_reason
        assert reason is not None
        content = self._echoed + found.content
        return ChatCompletionResponseChoice.model_construct(
            index=completion.index,
            message=ChatMessage(
                content=content if content.strip() or not (made or found.reasoning) else None,
                reasoning=found.reasoning or None,
                reasoning_content=found.reasoning or None,
                tool_calls=made or None,
            ),
            logprobs=self._logprobs(completion, whole=True),
            finish_reason=self._reason(completion),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._body.return_token_ids else None,
        )

    def deltas(self, output: RequestOutput) -> Iterator[ChatDelta]:
        """The deltas of a stream's next output; `usage` counts the output after the first ones."""
        if len(self._begun) < self._params.n:
            self._add(output, generated=False)
            for index in [completion.index for completion in output.outputs]:
                if index not in self._begun:
                    tokens = None
                    if self._body.return_token_ids and not self._begun:
                        tokens = output.prompt_token_ids
                    self._begun.add(index)
                    yield ChatDelta(
                        index, begins=True, content=self._echoed, prompt_token_ids=tokens
                    )
        self._add(output)
        for completion in output.outputs:
            if completion.index in self._ended:
                continue
            if completion.finish_reason is not None:
                self._ended.add(completion.index)
            yield from self._deltas(completion)

    def _deltas(self, completion: CompletionOutput) -> Iterator[ChatDelta]:
        """The deltas of one sample: reasoning, content, tool calls, then the finish reason."""
        index = completion.index
        found = self._readers[index].read(completion)
        logprobs = self._logprobs(completion)
        tokens = completion.token_ids if self._body.return_token_ids else None
        reports = logprobs is not None or tokens is not None
        # One delta reports the tokens: the first, or that of the content if they are the content's.
        with_content = reports and (self._answer_logprobs or not found.reasoning)
        if found.reasoning:
            report = reports and (not with_content or not found.content)
            yield ChatDelta(
                index,
                reasoning=found.reasoning,
                logprobs=logprobs if report else None,
                token_ids=tokens if report else None,
            )
        if found.content or (reports and completion.token_ids and not found.reasoning):
            yield ChatDelta(
                index,
                content=found.content,
                logprobs=logprobs if with_content else None,
                token_ids=tokens if with_content else None,
            )
        for call in found.calls:
            yield ChatDelta(index, call=call)
        if completion.finish_reason is not None:
            yield ChatDelta(
                index,
                finish_reason=self._reason(completion),
                stop_reason=completion.stop_reason,
            )

    def _add(self, output: RequestOutput, *, generated: bool = True) -> None:
        count = sum([len(c.token_ids) for c in output.outputs]) if generated else 0
        self._count.add(0, len(output.prompt_token_ids), output.num_cached_tokens, count)

    def usage(self) -> dict[str, Any]:
        """The fields of `UsageInfo` so far."""
        return self._count.usage(sum([reader.count_reasoning() for reader in self._readers]))

    def _reason(self, completion: CompletionOutput) -> ChatFinishReason:
        reason = completion.finish_reason
        assert reason is not None
        called = self._readers[completion.index].num_calls > 0
        return "tool_calls" if reason == "stop" and called else reason

    def _logprobs(
        self, completion: CompletionOutput, *, whole: bool = False
    ) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        if self._answer_logprobs:
            entries = self._readers[completion.index].answer_logprobs(completion)
        else:
            entries = (lazy_chances if whole else token_chances)(completion.logprobs)
        return (lazy_chat_logprobs if whole else chat_logprobs)(
            entries,
            self._params.logprobs or 0,
            self._tokenizer.token_text,
            self._tokenizer.token_bytes,
            as_token_ids=self._as_token_ids,
        )


def _echoes(body: ChatCompletionRequest) -> bool:
    return body.echo and body.messages[-1].role == "assistant"


class ChatEncoder(OutputEncoder):
    """The events of a stream of /v1/chat/completions.

    Args:
        parts: converts the request's outputs to deltas.
        body: the request's body.
    """

    def __init__(self, parts: ChatParts, body: ChatCompletionRequest) -> None:
        self._parts = parts
        self._chunks = ChatChunks(**parts.head)
        self._each_usage = continuous_usage(body)
        self._last_usage = usage_wanted(body)

    def encode(self, prompt: int, output: RequestOutput, *, last: bool) -> list[str]:
        """See `OutputEncoder`."""
        events = [self._chunk(delta) for delta in self._parts.deltas(output)]
        if last:
            events.append(self._chunks.usage(self._parts.usage()) if self._last_usage else "")
            events.append(DONE)
        return events

    def _chunk(self, delta: ChatDelta) -> str:
        reported = delta.logprobs is not None or delta.token_ids is not None
        if delta.content and not (delta.begins or reported or self._each_usage):
            return self._chunks.text(delta.index, delta.content)
        reason = delta.finish_reason
        return self._chunks.choice(
            delta.index,
            delta_json(delta),
            logprobs=delta.logprobs,
            finish_reason="null" if reason is None else f'"{reason}"',
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids,
            usage=self._parts.usage() if self._each_usage else None,
            prompt_token_ids=delta.prompt_token_ids,
        )


def delta_json(delta: ChatDelta) -> str:
    """The JSON of a `DeltaMessage`."""
    if delta.begins:
        return f'{{"role":"assistant","content":{json_string(delta.content)}}}'
    if delta.reasoning:
        text = json_string(delta.reasoning)
        return f'{{"reasoning":{text},"reasoning_content":{text}}}'
    if delta.finish_reason is not None:
        return "{}"
    call = delta.call
    if call is None:
        return f'{{"content":{json_string(delta.content)}}}'
    name = ""
    begin = f'{{"tool_calls":[{{"index":{call.index}'
    if call.id is not None:
        begin += f',"id":{json_string(call.id)},"type":"function"'
        name = f'"name":{json_text(call.name)},'
    return f'{begin},"function":{{{name}"arguments":{json_string(call.arguments)}}}}}]}}'
