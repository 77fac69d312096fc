"""What scripts written for vLLM import from its package of this name."""

from rjax.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
