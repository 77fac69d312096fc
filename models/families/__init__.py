"""The model families and what each must say about itself."""

from models.families import llama
from models.families.family import Family

FAMILIES: dict[str, Family] = {family.architecture: family for family in (llama.LLAMA,)}
