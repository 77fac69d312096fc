"""Names that TRL imports for its colocated mode, which is absent."""

from vllm import _Absent


class StructuredOutputsParams(_Absent):
    """Absent."""


class GuidedDecodingParams(_Absent):
    """Absent."""
