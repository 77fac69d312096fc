"""The supported model families."""

from models.families.family import Family
from models.families.llama import LLAMA
from models.families.mistral import MINISTRAL, MISTRAL
from models.families.opt import OPT
from models.families.phi3 import PHI3
from models.families.qwen2 import QWEN2
from models.families.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {
    family.architecture: family for family in (LLAMA, MINISTRAL, MISTRAL, OPT, PHI3, QWEN2, QWEN3)
}
