"""Bodies of the routes that trainers call, in the forms of vLLM's server and of TRL's older one."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rjax.serve.protocol.fields import Refused
from rjax.serve.protocol.requests import (
    FailFastDict,
    FailFastList,
    Ignored,
    Number,
    RequestModel,
)

_NO_PICKLE = Refused("weights come as shared memory, and nothing is unpickled")
_ONE_MACHINE = "weights come from the same machine as shared memory"


class TransferInit(RequestModel):
    """Where the trainer listens."""

    place: ClassVar[str] = "init_info."
    refused: ClassVar[Mapping[str, Refused]] = {
        "nccl_unique_id": Refused(_ONE_MACHINE),
        "handles": _NO_PICKLE,
    }

    master_address: Annotated[str | None, Field(description="the trainer's: this machine")] = None
    master_port: Annotated[int, Field(ge=1, le=65535, description="names the trainer's socket")]
    rank_offset: Ignored = None
    world_size: Ignored = None
    packed: Ignored = None


class InitTransferRequest(RequestModel):
    """Body of POST /init_weight_transfer_engine."""

    init_info: TransferInit


class StartUpdateRequest(RequestModel):
    """Body of POST /start_weight_update: none is an empty object."""

    refused: ClassVar[Mapping[str, Refused]] = {
        "is_checkpoint_format": Refused("weights have the names of a checkpoint", (True,)),
    }

    partial: Annotated[
        bool, Field(description="tensors that do not come keep their values; else all must come")
    ] = False
    mapping: Annotated[
        Literal["tunix", "easydel", "maxtext"] | None,
        Field(description="whose names the tensors have; default: those of Hugging Face"),
    ] = None


class UpdateInfo(RequestModel):
    """The tensors that a trainer is about to send."""

    place: ClassVar[str] = "update_info."
    refused: ClassVar[Mapping[str, Refused]] = {
        "ipc_handles": _NO_PICKLE,
        "ipc_handles_pickled": _NO_PICKLE,
        "is_checkpoint_format": Refused("weights have the names of a checkpoint", (True,)),
    }

    tensor_names: Annotated[FailFastList[str], Field(alias="names")]
    dtype_names: Annotated[FailFastList[str], Field(description='such as "bfloat16"')]
    shapes: FailFastList[FailFastList[int]]
    packed: Ignored = None


class UpdateRequest(RequestModel):
    """Body of POST /update_weights."""

    update_info: UpdateInfo


class FinishUpdateRequest(RequestModel):
    """Body of POST /finish_weight_update: none is an empty object."""

    mode: Annotated[
        Literal["wait", "abort", "keep"],
        Field(
            description="what becomes of running requests: they finish first, end now, or go on "
            "with the KV that they have"
        ),
    ] = "keep"


class TokenGenerateRequest(RequestModel):
    """Body of POST /inference/v1/generate."""

    place: ClassVar[str] = ""
    refused: ClassVar[Mapping[str, Refused]] = {
        "features": Refused("models take text only", ([],)),
        "stream": Refused("use /v1/completions", (False,)),
        "kv_transfer_params": Refused("KV goes to no other server", ({},)),
    }

    token_ids: FailFastList[int]
    sampling_params: FailFastDict[Any] = Field(
        default_factory=dict, description="fields of POST /v1/completions"
    )
    model: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: Annotated[str | None, Field(description="repeated in the answer")] = None
    stream_options: Ignored = None


class OlderGenerateRequest(RequestModel):
    """Body of POST /generate/ of TRL's own server, before it used vLLM's."""

    refused: ClassVar[Mapping[str, Refused]] = {"images": Refused("models take text only", ([],))}

    prompts: FailFastList[str]
    n: int = 1
    repetition_penalty: Number = 1.0
    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: int = -1
    min_p: Number = 0.0
    max_tokens: int = 16
    truncate_prompt_tokens: int | None = None
    guided_decoding_regex: str | None = None
    generation_kwargs: FailFastDict[Any] = Field(
        default_factory=dict, description="fields of POST /v1/completions, before those above"
    )


class OlderInitRequest(RequestModel):
    """Body of POST /init_communicator/ of TRL's own server."""

    port: Annotated[int, Field(ge=1, le=65535, description="names the trainer's socket")]
    host: Ignored = None
    world_size: Ignored = None
    client_device_uuid: Ignored = None


class OlderUpdateRequest(RequestModel):
    """Body of POST /update_named_param/ of TRL's own server."""

    name: str
    dtype: str
    shape: FailFastList[int]


TRAINER_REQUESTS = (
    InitTransferRequest,
    StartUpdateRequest,
    UpdateRequest,
    FinishUpdateRequest,
    TokenGenerateRequest,
    OlderGenerateRequest,
    OlderInitRequest,
    OlderUpdateRequest,
)
