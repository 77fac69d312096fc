"""Architectures with towers for images or audio, of which only the text model is loaded."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from rjax.models.config import ModelConfig, TextModel
from rjax.models.config_fields import ConfigFields
from rjax.models.families.family import Family, Shapes
from rjax.models.families.field_table import FieldTable, field_table
from rjax.models.families.llama import read_dtype
from rjax.models.loading.pieces import Weights

_DECODER, _HEAD, _EMBEDDING = "model.", "lm_head", "embed_tokens.weight"
_TEXT, _TIE = "text_config", "tie_word_embeddings"


@dataclasses.dataclass(frozen=True, slots=True)
class TensorLayout:
    """Where a checkpoint has the text model.

    Attributes:
        decoder: start of the names of the decoder's tensors, in place of "model.".
        head: module of the output projection.
    """

    decoder: str
    head: str = _HEAD


NESTED = TensorLayout("model.language_model.")
"""The modules of transformers, and most checkpoints."""
CAUSAL_MODEL = TensorLayout("language_model.model.", "language_model.lm_head")
"""Checkpoints whose text model has the head."""
WITHOUT_HEAD = TensorLayout("language_model.")
"""Checkpoints of the towers and the decoder alone."""
BESIDE_TOWERS = TensorLayout("model.")
"""Checkpoints with the towers outside of the model."""
_MODULES = (NESTED.decoder, CAUSAL_MODEL.decoder)
_PLAIN_MODULES = tuple(f"{_DECODER}{name}" for name in ("layers", "embed_tokens", "norm"))


@dataclasses.dataclass(frozen=True, slots=True)
class Multimodal:
    """An architecture whose text model is that of a family; it has the interface of `Family`.

    ``text_config`` is the config of the text model. ``tie_word_embeddings``, ``dtype`` and
    ``quantization_config`` are those of the outer config, where it has them.

    Attributes:
        architecture: its class name in config.json.
        models: names of well-known models.
        model_type: its ``model_type``.
        texts: families of the text model, the default first; the ``model_type`` of
            ``text_config`` chooses one.
        towers: the modules beside the text model, whose tensors are not read.
        outer: fields of the outer config that do not change what text gives.
        media: what the towers take.
        layouts: where checkpoints have the text model, as transformers writes it first.
        defaults: fields of ``text_config`` that published files lack, beside those that the text
            family has defaults of.
        tied: default of ``tie_word_embeddings``.
        text_ties: ``tie_word_embeddings`` of ``text_config`` counts too.
        flat: without ``text_config``, the outer config has its fields.
    """

    architecture: str
    models: str
    model_type: str
    texts: tuple[Family, ...]
    towers: tuple[str, ...]
    outer: tuple[str, ...]
    media: str = "images"
    layouts: tuple[TensorLayout, ...] = (NESTED,)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tied: bool = False
    text_ties: bool = False
    flat: bool = False
    write_config = None

    @property
    def fields(self) -> FieldTable:
        """How each field of the outer config is used."""
        ignores = {"vision_config", *self.outer}
        return field_table([self.model_type], reads={_TEXT, _TIE}, ignores=ignores)

    def text_of(self, fields: ConfigFields) -> tuple[Family, ConfigFields]:
        """(family of the text model, its fields) of a config.json."""
        text = fields.inner(_TEXT)
        if self.flat and not fields.has(_TEXT):
            text = fields.among(self.texts[0].fields.names - {"architectures", "model_type"})
        kind = text.raw("model_type")
        named = (family for family in self.texts if kind in family.fields.model_types)
        return next(named, self.texts[0]), text.filled(**self.defaults)

    def read(self, fields: ConfigFields, names: Collection[str] | None = None) -> ModelConfig:
        """The ModelConfig of the text model; see `Family.read`."""
        outer = self.fields.check(fields)
        family, text = self.text_of(fields)
        layout = self._layout(names or ())
        return dataclasses.replace(
            family.read(text),
            architecture=self.architecture,
            dtype=read_dtype(outer if outer.has("dtype") or outer.has("torch_dtype") else text),
            tie_embeddings=self._ties(outer, text, names, f"{layout.head}.weight"),
            text_model=TextModel(family.architecture, self.media, layout.decoder, layout.head),
        )

    def _layout(self, names: Collection[str]) -> TensorLayout:
        found = (one for one in self.layouts if f"{one.decoder}{_EMBEDDING}" in names)
        return next(found, self.layouts[0])

    def _ties(
        self, outer: ConfigFields, text: ConfigFields, names: Collection[str] | None, head: str
    ) -> bool:
        """Whether the embedding is also the output projection.

        Where config.json leaves it open, transformers does not tie a head that the checkpoint has.
        Without the names of its tensors, ``text_config`` says whether there is one.
        """
        tied = outer.flag(_TIE, self.tied) or (self.text_ties and text.flag(_TIE, False))
        if outer.has(_TIE):
            return tied
        return text.flag(_TIE, tied) if names is None else tied and head not in names

    def unknown(self, fields: ConfigFields) -> list[str]:
        """Paths of unknown fields of the outer config and of ``text_config``, sorted."""
        family, text = self.text_of(fields)
        outer = set(self.fields.unknown(fields))
        if self.flat and not fields.has(_TEXT):
            return sorted((outer | set(family.unknown(text))) - family.fields.names)
        return sorted(outer | {f"{_TEXT}.{name}" for name in family.unknown(text)})

    def quantization(self, fields: ConfigFields, config: ModelConfig) -> Any:
        """The ``quantization_config``, with the names of modules as the checkpoint has them."""
        _, text = self.text_of(fields)
        name = "quantization_config"
        found = fields.raw(name) if fields.has(name) else text.raw(name)
        assert config.text_model is not None
        return own_names(found, config.text_model)

    def weights(self, config: ModelConfig) -> Weights:
        """The checkpoint pieces of every parameter of the text model."""
        return _renamed(self._text(config).weights(config), config)

    def weights_of(self, config: ModelConfig, shapes: Shapes) -> Weights:
        """The checkpoint pieces of a checkpoint with these tensors."""
        return _renamed(self._text(config).weights_of(config, shapes), config)

    def unused(self, config: ModelConfig) -> tuple[str, ...]:
        """Starts of the names of tensors that are not loaded: those of towers among them."""
        of_text = self._text(config).unused(config)
        return (*self.tower_names, *(renamed_tensor(name, config) for name in of_text))

    @property
    def tower_names(self) -> tuple[str, ...]:
        """Starts of the names of the towers' tensors."""
        return tuple(f"{start}{tower}." for start in ("", _DECODER) for tower in self.towers)

    def _text(self, config: ModelConfig) -> Family:
        assert config.text_model is not None
        name = config.text_model.architecture
        return next(family for family in self.texts if family.architecture == name)


def _renamed(weights: Weights, config: ModelConfig) -> Weights:
    """The pieces of a text model in the layout of a checkpoint."""
    return {
        path: tuple(
            dataclasses.replace(piece, tensor=renamed_tensor(piece.tensor, config))
            for piece in pieces
        )
        for path, pieces in weights.items()
    }


def renamed_tensor(name: str, config: ModelConfig) -> str:
    """The name of a tensor of a text model in the layout of its checkpoint."""
    text = config.text_model
    assert text is not None
    if name.startswith(_DECODER):
        return text.decoder + name.removeprefix(_DECODER)
    if name.startswith(_HEAD):
        return text.head + name.removeprefix(_HEAD)
    return name  # such as those of layers that predict further tokens


def own_names(value: Any, text: TextModel) -> Any:
    """A ``quantization_config`` with the names of modules that the checkpoint's tensors have.

    Tools write names of the modules of transformers ("model.language_model.layers.0"), of an older
    version of it, or of the tensors, as texts or in regular expressions.
    """
    if isinstance(value, dict):
        return {own_names(key, text): own_names(one, text) for key, one in value.items()}
    if isinstance(value, list):
        return [own_names(one, text) for one in value]
    if not isinstance(value, str):
        return value
    for module in _MODULES:
        for old, new in ((module, text.decoder), (_escaped(module), _escaped(text.decoder))):
            if old in value:
                return value.replace(old, new)
    start = value[: len(value) - len(value.removeprefix("re:").removeprefix("^"))]
    name = value.removeprefix(start)
    if name.startswith(_PLAIN_MODULES):
        return start + text.decoder + name.removeprefix(_DECODER)
    if name == CAUSAL_MODEL.head:
        return start + text.head
    return value


def _escaped(name: str) -> str:
    return name.replace(".", r"\.")
