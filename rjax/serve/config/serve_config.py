"""Configuration of the server."""

import dataclasses

from rjax.errors import InvalidConfigError
from rjax.serve.config.http_options import HttpOptions
from rjax.serve.config.limits import ServeLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What a server serves, for whom, and how it answers. The flags that set one field have its
    text as their help.

    Attributes:
        model: name of the model in requests and responses.
        aliases: other names of the model in requests.
        folder: the model's folder as it was given, which requests may name too, as with vLLM; no
            response has it.
        root: the model's own name; None is ``model``.
        created: start time of the server, in seconds since 1970; None takes the time when the
            service is built.
        keys: accepted API keys, each a tenant with its own prefix cache; without any, no request
            needs one.
        enable_weight_updates: let operators pause the engine, put it to sleep and change its
            weights over HTTP, as trainers do; without it those routes do not exist.
        operator_keys: API keys of operators, each a tenant too. Without any, every client of a
            server without keys is an operator.
        priority_across_keys: order the requests of all API keys by priority and arrival; otherwise
            keys get equal parts of the rows, and priority orders the requests of one key.
        limits: limits on requests.
        http: options for reverse proxies and browsers.
        tool_call_parser: how the model writes tool calls; "auto" decides by the markers of its chat
            template.
        reasoning_parser: separate the model's reasoning from the content, by its markup; otherwise
            it stays there.
        strict_fields: refuse requests with unknown fields; otherwise they are ignored, and each
            name is logged once.
        literal_json_schemas: let the model add properties to objects whose schema does not set
            ``additionalProperties``; otherwise such objects are closed.
        return_tokens_as_token_ids: write token_id:N instead of a token's text in logprobs, unless a
            request sets return_tokens_as_token_ids to false.
        bundled: whether the model is the bundled one, which only answers about a table.
        replica_tag: name of this replica among several, in the ids of stored responses.

    Raises:
        InvalidConfigError: operators have keys that no route asks for; or clients have keys and
            operators have none.
    """

    model: str
    aliases: tuple[str, ...] = ()
    folder: str | None = None
    root: str | None = None
    created: int | None = None
    keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    enable_weight_updates: bool = False
    operator_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    priority_across_keys: bool = False
    limits: ServeLimits = dataclasses.field(default_factory=ServeLimits)
    http: HttpOptions = dataclasses.field(default_factory=HttpOptions)
    tool_call_parser: str = "auto"
    reasoning_parser: str | None = None
    strict_fields: bool = False
    literal_json_schemas: bool = False
    return_tokens_as_token_ids: bool = False
    bundled: bool = False
    replica_tag: str = ""

    def __post_init__(self) -> None:
        if self.operator_keys and not self.enable_weight_updates:
            raise InvalidConfigError(
                "--operator-key-file does nothing without --enable-weight-updates; give both"
            )
        if self.enable_weight_updates and self.keys and not self.operator_keys:
            raise InvalidConfigError(
                "--enable-weight-updates lets operators change the weights, and this server has "
                "keys of clients only; give --operator-key-file"
            )

    @property
    def needs_key(self) -> bool:
        """Whether requests need an API key."""
        return bool(self.keys or self.operator_keys)

    @property
    def own_name(self) -> str:
        """The model's own name."""
        return self.model if self.root is None else self.root

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model in requests, the one of responses first."""
        return self.model, *self.aliases
