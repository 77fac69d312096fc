"""Responses of the routes that trainers call, in the forms of vLLM's server."""

from typing import Any

from pydantic import BaseModel

from rjax.serve.protocol.responses import ChatFinishReason, ChatLogprobs


class MessageResponse(BaseModel):
    """What a route did."""

    message: str


class WorldSizeResponse(BaseModel):
    """Number of receivers of weights."""

    world_size: int


class WeightsVersionResponse(BaseModel):
    """The version of the weights in use: 0 at the start, 1 more with each update."""

    weights_version: int


class ResetResponse(BaseModel):
    """Whether the prefix cache was dropped."""

    success: bool


class TokenChoice(BaseModel):
    """One generated sequence."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None


class TokenGenerateResponse(BaseModel):
    """Response of /inference/v1/generate."""

    request_id: str
    choices: list[TokenChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class OlderGenerateResponse(BaseModel):
    """Response of /generate/: token ids of each prompt, and of all its samples, with the logprob of
    each token."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
