"""The supported model families."""

from rjax.models.families.bloom import BLOOM
from rjax.models.families.cohere2 import COHERE2
from rjax.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from rjax.models.families.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from rjax.models.families.exaone4 import EXAONE4
from rjax.models.families.family import Family
from rjax.models.families.gemma import GEMMA2, GEMMA3
from rjax.models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from rjax.models.families.glm4 import GLM4
from rjax.models.families.glm4_moe import GLM4_MOE
from rjax.models.families.glm4_moe_lite import GLM4_MOE_LITE
from rjax.models.families.gpt_oss import GPT_OSS
from rjax.models.families.granite import GRANITE
from rjax.models.families.granite_moe import GRANITE_MOE
from rjax.models.families.hunyuan import HUNYUAN_DENSE, HUNYUAN_MOE
from rjax.models.families.llama import LLAMA
from rjax.models.families.minimax_m2 import MINIMAX_M2
from rjax.models.families.ministral3 import MINISTRAL3
from rjax.models.families.mistral import MINISTRAL, MISTRAL
from rjax.models.families.mixtral import MIXTRAL
from rjax.models.families.multimodal import Multimodal
from rjax.models.families.multimodal_models import MULTIMODAL
from rjax.models.families.olmo import OLMO2, OLMO3
from rjax.models.families.olmoe import OLMOE
from rjax.models.families.opt import OPT
from rjax.models.families.phi3 import PHI3
from rjax.models.families.qwen2 import QWEN2
from rjax.models.families.qwen2_moe import QWEN2_MOE
from rjax.models.families.qwen3 import QWEN3
from rjax.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from rjax.models.families.qwen3_moe import QWEN3_MOE
from rjax.models.families.qwen3_next import QWEN3_NEXT
from rjax.models.families.seed_oss import SEED_OSS
from rjax.models.families.smollm3 import SMOLLM3

TEXT_FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        *(BLOOM, COHERE2, DEEPSEEK_V2, DEEPSEEK_V3, ERNIE4_5, ERNIE4_5_MOE),
        *(EXAONE4, GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED),
        *(GLM4, GLM4_MOE, GLM4_MOE_LITE, GPT_OSS),
        *(
            GRANITE,
            GRANITE_MOE,
            HUNYUAN_DENSE,
            HUNYUAN_MOE,
            LLAMA,
            MINIMAX_M2,
            MINISTRAL3,
            MINISTRAL,
            MISTRAL,
            MIXTRAL,
        ),
        *(OLMO2, OLMO3, OLMOE, OPT, PHI3, QWEN2, QWEN2_MOE),
        *(QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT, SEED_OSS, SMOLLM3),
    )
}
"""Architectures that are a text model alone."""

FAMILIES: dict[str, Family | Multimodal] = TEXT_FAMILIES | {
    family.architecture: family for family in MULTIMODAL
}
"""All architectures; of those with towers, the text model is loaded."""
