"""PrefixRefill: fills unloaded prefixes again when a request first uses them."""

import logging
from collections.abc import Container, Iterator, Sequence

from rjax.engine.named_prefixes import REFILL, PinnedPrefixes
from rjax.engine.protocol import NamedPrefix
from rjax.outputs import RequestOutput

_log = logging.getLogger(__name__)


class PrefixRefill:
    """Finds the unloaded prefixes of a prompt. For each, the engine adds a request of its own
    before that of the prompt, which then shares its pages.

    Args:
        pinned: the prefixes.
    """

    def __init__(self, pinned: PinnedPrefixes) -> None:
        self._pinned = pinned

    def of_prompt(
        self, tokens: Sequence[int], salt: str | None, live: Container[str]
    ) -> Iterator[tuple[str, NamedPrefix]]:
        """The unloaded prefixes that a prompt starts with, shorter ones first, each after the id of
        the request that is to fill it.

        Args:
            tokens: the prompt.
            salt: its cache salt.
            live: ids of the live requests; a prefix that one of them fills is left out.
        """
        unloaded = [prefix for prefix in self._pinned.all() if not prefix.pages]
        for prefix in sorted(unloaded, key=lambda prefix: len(prefix.token_ids)):
            size, request_id = len(prefix.token_ids), REFILL + prefix.name
            starts = prefix.cache_salt == salt and tuple(tokens[:size]) == prefix.token_ids
            if starts and request_id not in live:
                yield request_id, prefix

    def without_refills(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs of callers' requests. A prefix that could not be pinned stays unloaded."""
        own = [output for output in outputs if output.request_id.startswith(REFILL)]
        for output in own:
            if output.error is not None:
                name = output.request_id.removeprefix(REFILL)
                _log.warning("the prefix %r was not filled again: %s", name, output.error)
        return (
            [output for output in outputs if not output.request_id.startswith(REFILL)]
            if own
            else outputs
        )
