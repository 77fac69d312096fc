"""Tiny random quantised checkpoints, each written by the library that defines its format.

Usage, in an environment with the libraries that ``quantised/README.md`` lists:

    python tests/golden/make_quantised.py SOURCES [case ...]

SOURCES is a folder with checkouts of ``AutoFP8``, ``DeepGEMM`` and ``DeepSeek-V3``, which no
package registry has. Without case names, the script writes every case.

Writes ``quantised/<case>/``: ``config.json`` and ``model.safetensors`` as the library writes them,
and ``expected.safetensors`` with ``tokens`` [T] int32, ``logits`` [T, V] float32 and every
``row_stride``-th row of each linear's dequantised weight [out, in] in float32, named as in the
unquantised checkpoint. The defining library dequantises the tensors read back from the written
file, with scales widened to float32. transformers' Llama computes the logits in float32 from those
weights, without quantised activations.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton
os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # its loader needs two

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

HERE = Path(__file__).resolve().parent / "quantised"
VOCAB = 96
TOKENS = 21
ROW_STRIDE = 11  # coprime to the 8 values of a packed word and to group and block sizes
GROUP = 32
SOURCES = Path(sys.argv[1]).resolve()
PACKAGES = (
    "torch transformers compressed-tensors llmcompressor autoawq gptqmodel triton safetensors numpy"
)

Tensors = dict[str, torch.Tensor]


def write_float_model(
    folder: Path, layers: int, dtype: torch.dtype, shift: float, seed: int
) -> None:
    """Write a random Llama whose rows and groups of 32 differ in magnitude.

    ``shift`` moves the mean of each group, in standard deviations, so that zero points differ.
    """
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.3 * torch.randn(parameter.shape)
        elif "embed" in name:
            parameter.data = torch.randn(parameter.shape)
        else:
            rows, columns = parameter.shape
            value = torch.randn(rows, columns // GROUP, GROUP)
            value += shift * (2 * torch.rand(rows, columns // GROUP, 1) - 1)
            value *= torch.exp(0.4 * torch.randn(rows, columns // GROUP, 1))
            parameter.data = 0.8 * columns**-0.5 * value.reshape(rows, columns)
    model.to(dtype).save_pretrained(folder)
    words = {str(i): i for i in range(VOCAB)}
    # The libraries refuse a folder without a tokenizer; calibration passes tokens.
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")),
        unk_token="0",
        eos_token="2",
        pad_token="3",
    ).save_pretrained(folder)


def calibration_rows(count: int = 8, length: int = 64) -> torch.Tensor:
    """Random tokens, [count, length]."""
    return torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(7))


def load_module(path: Path):
    """Import one file that belongs to no installed package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Quantisation: each function reads the float model in `source` and writes a folder `target`.


def llm_compressor(scheme: str, calibrate: bool = False, **options) -> Callable:
    """``oneshot`` with a preset scheme of compressed-tensors; int4 groups shrink to 32."""

    def write(source: Path, target: Path) -> None:
        from compressed_tensors.quantization import preset_name_to_scheme
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier

        group = preset_name_to_scheme(scheme, ["Linear"])
        if group.weights.group_size:
            group.weights.group_size = GROUP
        recipe = QuantizationModifier(
            config_groups={"group_0": group}, **{"ignore": ["lm_head"], **options}
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        data = {}
        if calibrate:
            rows = [
                {"input_ids": r, "attention_mask": torch.ones_like(r)} for r in calibration_rows()
            ]
            data = {
                "dataset": torch.utils.data.DataLoader(rows, batch_size=1),
                "processor": transformers.AutoTokenizer.from_pretrained(source),
                "num_calibration_samples": len(rows),
                "pipeline": "basic",
            }
        oneshot(model=model, recipe=recipe, **data)
        model.save_pretrained(target, save_compressed=True)

    return write


def llm_compressor_model_free(scheme: str, ignore: list[str]) -> Callable:
    """``model_free_ptq``, which writes the patterns of ``ignore`` as they are given."""

    def write(source: Path, target: Path) -> None:
        from llmcompressor import model_free_ptq

        model_free_ptq(source, target, scheme=scheme, ignore=ignore, device="cpu")

    return write


def gptqmodel(**options) -> Callable:
    """``GPTQModel.quantize`` with 4 bits and groups of 32."""

    def write(source: Path, target: Path) -> None:
        from gptqmodel import GPTQModel, QuantizeConfig

        config = QuantizeConfig(bits=4, group_size=GROUP, offload_to_disk=False, **options)
        model = GPTQModel.load(str(source), config, device="cpu")
        rows = [
            {"input_ids": r.tolist(), "attention_mask": [1] * len(r)} for r in calibration_rows()
        ]
        model.quantize(rows, batch_size=1)
        model.save(str(target))

    return write


def autoawq(source: Path, target: Path) -> None:
    """AutoAWQ without its search for scales, which needs a GPU: min/max scales and zero points."""
    from awq.models._config import AwqConfig
    from awq.models.llama import LlamaAWQForCausalLM
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.module import get_named_linears

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    config = AwqConfig(q_group_size=GROUP)
    quantizer = AwqQuantizer.__new__(AwqQuantizer)
    quantizer.w_bit, quantizer.group_size = config.w_bit, config.q_group_size
    quantizer.zero_point, quantizer.version = config.zero_point, config.version
    for layer in model.model.layers:
        quantizer._apply_quant(layer, get_named_linears(layer))
    # save_quantized discards these names one by one; transformers 5 has a mapping or None here.
    model._tied_weights_keys = []
    LlamaAWQForCausalLM(model, "llama", True, model.config, config, None).save_quantized(
        str(target)
    )


def autofp8(source: Path, target: Path) -> None:
    """AutoFP8 with static activations: one scale per weight and one per input."""
    from auto_fp8 import AutoFP8ForCausalLM, BaseQuantizeConfig

    config = BaseQuantizeConfig(quant_method="fp8", activation_scheme="static")
    model = AutoFP8ForCausalLM(
        transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto"), config
    )
    model.quantize(calibration_rows())
    model.save_quantized(target)


def deepseek(source: Path, target: Path) -> None:
    """DeepGEMM's block cast; the configuration is the one of the published DeepSeek-V3 files."""
    cast = load_module(SOURCES / "DeepGEMM/deep_gemm/utils/math.py").per_block_cast_to_fp8
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            tensors[name], tensors[name + "_scale_inv"] = cast(tensor, use_ue8m0=False)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# Dequantisation of one linear from its stored tensors (local names), to [out, in]; the last
# argument is the name of the module.


def dequantise_compressed(tensors: Tensors, config: dict, _: str) -> torch.Tensor:
    """The compressor of compressed-tensors for the group's format."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    return compressor.decompress(tensors, scheme)["weight"]


def dequantise_gptq(tensors: Tensors, config: dict, module: str) -> torch.Tensor:
    """GPTQModel's ``TorchLinear``, with its conversion of v1 zero points."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import dynamic_get
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    bits = dynamic_get(config.get("dynamic"), module, "bits", config["bits"])
    words, rows = tensors["qweight"].shape
    linear = TorchLinear(
        bits=bits,
        group_size=config["group_size"],
        sym=config["sym"],
        desc_act=config["desc_act"],
        in_features=words * 32 // bits,
        out_features=rows,
    ).eval()
    for name, tensor in tensors.items():
        linear.register_buffer(name, tensor.clone())
    if config["checkpoint_format"] == "gptq":
        convert_gptq_v1_to_v2_format_module(linear, bits, torch.int32)
    return linear.dequantize_weight().T


def dequantise_awq(tensors: Tensors, config: dict, _: str) -> torch.Tensor:
    """AutoAWQ's ``dequantize_gemm``."""
    from awq.utils.packing_utils import dequantize_gemm

    packed = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    return dequantize_gemm(*packed, config["bits"], config["group_size"]).T


def dequantise_fp8(tensors: Tensors, config: dict, _: str) -> torch.Tensor:
    """DeepSeek-V3's ``weight_dequant``, interpreted by Triton; the product in AutoFP8's GEMM."""
    if "weight_scale_inv" not in tensors:
        scale = tensors["weight_scale"]
        return tensors["weight"].to(scale.dtype) * scale
    kernel = load_module(SOURCES / "DeepSeek-V3/inference/kernel.py")
    return kernel.weight_dequant(tensors["weight"], tensors["weight_scale_inv"])


DEQUANTISE = {
    "compressed-tensors": dequantise_compressed,
    "gptq": dequantise_gptq,
    "awq": dequantise_awq,
    "fp8": dequantise_fp8,
}


def dequantise(tensors: Tensors, config: dict) -> Tensors:
    """The state dict of the unquantised model in float32."""
    function = DEQUANTISE[config["quant_method"]]
    modules: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        module, _, local = name.rpartition(".")
        modules.setdefault(module, {})[local] = tensor
    result = {}
    for module, stored in modules.items():
        if module.endswith("self_attn"):
            continue  # k_scale and v_scale of the KV cache
        if set(stored) == {"weight"}:
            result[module + ".weight"] = stored["weight"].float()
            continue
        widened = {k: v.float() if "scale" in k else v for k, v in stored.items()}
        weight = function(widened, config, module)
        assert weight.dtype == torch.float32
        # The library, with scales as stored, rounds the same product once.
        own = function(stored, config, module)
        assert torch.equal(weight.to(own.dtype), own), module
        result[module + ".weight"] = weight.contiguous()
    return result


def write_expected(folder: Path, seed: int) -> None:
    """Write ``expected.safetensors`` from the files of the checkpoint alone."""
    config = json.loads((folder / "config.json").read_text())
    state = dequantise(load_file(folder / "model.safetensors"), config.pop("quantization_config"))
    llama = transformers.LlamaConfig.from_dict(config | {"dtype": "float32"})
    model = transformers.LlamaForCausalLM._from_config(llama, attn_implementation="eager").eval()
    model.load_state_dict(state)
    torch.manual_seed(seed)
    tokens = torch.randint(VOCAB, (TOKENS,))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    expected = {n + ".weight": state[n + ".weight"][::ROW_STRIDE].clone() for n in linears}
    expected |= {"tokens": tokens.int(), "logits": logits}
    expected["row_stride"] = torch.tensor(ROW_STRIDE, dtype=torch.int32)
    save_file(expected, folder / "expected.safetensors")


IGNORED = "model.layers.0.mlp.down_proj"
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
BF16, F16 = torch.bfloat16, torch.float16

# name: (layers, dtype, shift of the group means in standard deviations, writer)
CASES: dict[str, tuple[int, torch.dtype, float, Callable]] = {
    "ct-w4a16": (2, BF16, 0, llm_compressor("W4A16")),
    "ct-w4a16-asym": (1, BF16, 1.5, llm_compressor("W4A16_ASYM")),
    "ct-fp8-dynamic": (2, BF16, 0, llm_compressor("FP8_DYNAMIC")),
    "ct-fp8-static": (1, BF16, 0, llm_compressor("FP8", calibrate=True)),
    "ct-fp8-block": (1, BF16, 0, llm_compressor("FP8_BLOCK")),
    "ct-fp8-kv": (
        1,
        BF16,
        0,
        llm_compressor("FP8_DYNAMIC", calibrate=True, kv_cache_scheme=KV),
    ),
    "ct-w8a8": (1, BF16, 0, llm_compressor("W8A8")),
    "ct-w8a16": (1, BF16, 0, llm_compressor("W8A16")),
    "ct-ignore": (2, BF16, 0, llm_compressor("W4A16", ignore=["lm_head", f"re:.*{IGNORED}$"])),
    "ct-ignore-re": (
        2,
        BF16,
        0,
        llm_compressor_model_free("FP8_DYNAMIC", ["lm_head", "re:.*embed.*", f"re:.*{IGNORED}$"]),
    ),
    "ct-lm-head": (1, BF16, 0, llm_compressor("W4A16", ignore=[])),
    "awq-gemm": (1, F16, 1, autoawq),
    "gptq-v1-sym": (2, BF16, 0, gptqmodel(sym=True, desc_act=False)),
    "gptq-v1-asym": (1, BF16, 0.6, gptqmodel(sym=False, desc_act=False)),
    "gptq-v1-asym-zero": (1, BF16, 6, gptqmodel(sym=False, desc_act=False)),
    "gptq-v2-asym": (1, BF16, 6, gptqmodel(sym=False, desc_act=False, format="gptq_v2")),
    "gptq-desc-act": (1, BF16, 0, gptqmodel(sym=True, desc_act=True, act_group_aware=False)),
    "gptq-lm-head": (
        1,
        BF16,
        0,
        gptqmodel(
            sym=True,
            desc_act=False,
            lm_head=True,
            dynamic={"lm_head": {"bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}},
        ),
    ),
    # Without an entry in `dynamic`, GPTQModel gives lm_head 8 bits.
    "gptq-lm-head-8bit": (1, BF16, 0, gptqmodel(sym=True, desc_act=False, lm_head=True)),
    "deepseek-fp8": (1, BF16, 0, deepseek),
    "fp8-static": (1, BF16, 0, autofp8),
}


def main() -> None:
    """Write the cases that the command line names, or all."""
    sys.path.insert(0, str(SOURCES / "AutoFP8"))
    for seed, (name, (layers, dtype, shift, write)) in enumerate(CASES.items()):
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            os.chdir(temporary)  # the libraries write logs there
            source, written = Path(temporary, "float"), Path(temporary, name)
            write_float_model(source, layers, dtype, shift, seed)
            write(source, written)
            shutil.rmtree(HERE / name, ignore_errors=True)
            (HERE / name).mkdir(parents=True)
            for file in ("config.json", "model.safetensors"):
                shutil.copyfile(written / file, HERE / name / file)
        write_expected(HERE / name, seed)
    versions = {package: importlib.metadata.version(package) for package in PACKAGES.split()}
    versions["python"] = platform.python_version()
    (HERE / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
