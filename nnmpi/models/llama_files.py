"""Llama and its kin in Hugging Face's files: what config.json says, and the names of the weights.

    model.embed_tokens.weight                              0.tokens.weight
    model.layers.0.self_attn.{q,k,v,o}_proj.*              1.attention.{q,k,v,proj}.*
    model.layers.0.mlp.{gate,up,down}_proj.*               1.mlp.{gate,up,down}.*
    model.norm.weight                                      L+1.weight
    lm_head.weight                                         L+2.weight, unless the output is tied

Weights of linear layers are (out, in) there. What `models.llama` does not compute is refused by the
name of the setting: other rotations, windows of attention, quantized weights, and any setting that
is not known here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nnmpi.base.errors import DataError, UsageError, shortened
from nnmpi.models.llama import llama
from nnmpi.nn.container import Sequential
from nnmpi.nn.llama import RotaryScaling

TYPES = ("llama", "mistral", "qwen2", "qwen3")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SIZES = {
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
    "features": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
}
BLOCK = {
    "norm1": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.proj": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
OUTPUT = "lm_head.weight"
FIRST_IN_BLOCK = "input_layernorm.weight"  # of which every block has one

# Settings with the only value that `models.llama` computes; None stands for the same.
FIXED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "rope_interleaved": False,
    "use_sliding_window": False,
}


def _settings(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Settings that change no logit: how it was trained, is run, or is written.
IDLE = _settings("""
    _attn_implementation _name_or_path architectures attn_implementation bos_token_id
    chunk_size_feed_forward dtype eos_token_id id2label initializer_range is_encoder_decoder
    is_llama_config label2id max_window_layers model_type output_attentions output_hidden_states
    pad_token_id pretraining_tp problem_type return_dict torch_dtype transformers.js_config
    transformers_version use_cache
""")
READ = _settings("""
    num_key_value_heads head_dim rms_norm_eps tie_word_embeddings attention_bias mlp_bias rope_theta
    rope_scaling rope_parameters sliding_window layer_types
""")


@dataclass(frozen=True)
class LlamaSize:
    """The arguments of `models.llama`."""

    vocabulary: int
    context: int
    features: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    head_features: int
    theta: float = 10_000.0
    scaling: RotaryScaling | None = None
    eps: float = 1e-5
    tied: bool = False
    bias: bool = False
    proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def build(self, dropout: float = 0.0) -> Sequential:
        """Return the model, uninitialized.

        Raises:
            UsageError: for a dropout, which these models have not, and sizes that do not work.
        """
        if dropout:
            raise UsageError("llama has no dropout; leave it out")
        return llama(**{**asdict(self), "scaling": self.scaling})

    def names(self, layers: int) -> Iterator[tuple[str, str, bool]]:
        """Yield each parameter's name here and in the files, and whether it is transposed there.

        Args:
            layers: how many blocks.
        """
        yield "0.tokens.weight", "model.embed_tokens.weight", False
        for i in range(layers):
            for ours, theirs in BLOCK.items():
                is_norm = "norm" in ours
                if not is_norm or self.qk_norm or ours.startswith("norm"):
                    name, other = f"{i + 1}.{ours}", f"model.layers.{i}.{theirs}"
                    yield f"{name}.weight", f"{other}.weight", not is_norm
                    if not is_norm and self._has_bias(ours):
                        yield f"{name}.bias", f"{other}.bias", False
        yield f"{self.layers + 1}.weight", "model.norm.weight", False
        if not self.tied:
            yield f"{self.layers + 2}.weight", OUTPUT, True

    def _has_bias(self, layer: str) -> bool:
        if layer.startswith("mlp"):
            return self.mlp_bias
        return self.proj_bias if layer == "attention.proj" else self.bias

    @property
    def kind(self) -> str:
        """The type of model that transformers reads with these parts.

        Raises:
            UsageError: when there is none.
        """
        if self.qk_norm and self.bias == self.proj_bias and not self.mlp_bias:
            return "qwen3"
        if self.bias and not (self.qk_norm or self.proj_bias or self.mlp_bias):
            return "qwen2"
        if self.bias == self.proj_bias and not self.qk_norm:
            return "llama"
        raise UsageError(
            "transformers has no model with these biases and norms of queries and keys; give llama"
            " bias and proj_bias alike"
        )

    def config(self) -> dict[str, Any]:
        """Return what config.json says of these sizes, as all versions of transformers read it.

        Raises:
            UsageError: see `kind`.
        """
        kind, scaling = self.kind, self.scaling
        turns: dict[str, Any] | None = None
        if scaling is not None:
            turns = {"rope_type": "linear", "factor": scaling.factor}
            if scaling.original is not None:
                turns |= {
                    "rope_type": "llama3",
                    "low_freq_factor": scaling.low,
                    "high_freq_factor": scaling.high,
                    "original_max_position_embeddings": scaling.original,
                }
        return {
            "architectures": [ARCHITECTURES[kind]],
            "model_type": kind,
            **{theirs: getattr(self, ours) for ours, theirs in SIZES.items()},
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_features,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "rope_scaling": turns,
            "tie_word_embeddings": self.tied,
            **({} if kind == "qwen2" else {"attention_bias": self.bias}),
            **({"mlp_bias": self.mlp_bias} if kind == "llama" else {}),
        }


@dataclass(frozen=True)
class LlamaConfigReader:
    """Reads a config.json.

    Attributes:
        file: that errors name.
        values: what it holds.
    """

    file: Path
    values: Mapping[str, Any]

    def size(self) -> LlamaSize:
        """Return the size of the model.

        Raises:
            DataError: for a setting that `models.llama` does not compute, naming it.
        """
        kind = self.values["model_type"]
        sizes = {ours: self._int(theirs) for ours, theirs in SIZES.items()}
        self._check(sizes["context"])
        if kind == "llama" and self.values.get("num_key_value_heads") is None:
            kv_heads = sizes["heads"]
        else:
            kv_heads = self._int("num_key_value_heads")
        if kind != "qwen3" and self.values.get("head_dim") is None:
            if sizes["features"] % sizes["heads"]:
                raise self._error("num_attention_heads", "a divisor of hidden_size")
            width = sizes["features"] // sizes["heads"]
        else:
            width = self._int("head_dim")
        if sizes["heads"] % kv_heads:
            raise self._error("num_key_value_heads", "a divisor of num_attention_heads")
        if width % 2:
            raise self._error("head_dim", "an even number")
        theta, scaling = self._rotary()
        biased = self._bool("attention_bias", kind in ("llama", "qwen3"))
        return LlamaSize(
            **sizes,
            kv_heads=kv_heads,
            head_features=width,
            theta=theta,
            scaling=scaling,
            eps=self._number(self.values, "rms_norm_eps", 1e-6),
            tied=self._bool("tie_word_embeddings"),
            bias=biased or kind == "qwen2",
            proj_bias=biased,
            mlp_bias=self._bool("mlp_bias", kind == "llama"),
            qk_norm=kind == "qwen3",
        )

    def _check(self, context: int) -> None:
        """Refuse what is not known, and what is not computed."""
        known = {*SIZES.values(), *FIXED, *IDLE, *READ}
        for name, value in self.values.items():
            if name not in known and value is not None:
                raise DataError(
                    f"{self.file}: {name} is {shortened(repr(value))}, which nnmpi does not know;"
                    " remove it if it changes no logits"
                )
        for name, only in FIXED.items():
            if self.values.get(name) not in (None, only):
                raise self._error(name, repr(only))
        window = self.values.get("sliding_window")
        binds = window is not None and (type(window) is not int or window < context)
        if self.values["model_type"] == "mistral" and binds:
            raise self._error(
                "sliding_window", f"null, or at least max_position_embeddings {context}"
            )
        kinds = self.values.get("layer_types")
        if kinds is not None and (
            not isinstance(kinds, list) or any(item != "full_attention" for item in kinds)
        ):
            raise self._error("layer_types", "a list of 'full_attention'")

    def _rotary(self) -> tuple[float, RotaryScaling | None]:
        """Return theta and the scaling, by the spelling of transformers 4 or 5."""
        older, newer = self.values.get("rope_scaling"), self.values.get("rope_parameters")
        name = "rope_scaling" if newer is None else "rope_parameters"
        turns = (
            {**self._dict(name), "rope_theta": self.values.get("rope_theta")}
            if (newer is None)
            else self._dict(name)
        )
        if older is not None and newer is not None:
            raise self._error("rope_scaling", "null beside rope_parameters")
        theta = self._number(turns, "rope_theta", 10_000.0)
        kind = turns.get("rope_type", turns.get("type", "default"))
        fields = {"default": (), "linear": ("factor",)}.get(
            kind if isinstance(kind, str) else "",
            ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        )
        if kind not in ("default", "linear", "llama3"):
            raise self._error(name, "of rope_type default, linear or llama3")
        others = turns.keys() - {"rope_theta", "rope_type", "type", *fields}
        if others := {item for item in others if turns[item] is not None}:
            raise self._error(name, f"without {min(others)}")
        if kind == "default":
            return theta, None
        numbers = [self._number(turns, item) for item in fields]
        if kind == "linear":
            return theta, RotaryScaling(numbers[0])
        factor, low, high, original = numbers
        if high <= low or original % 1:
            raise self._error(
                name,
                "with low_freq_factor below high_freq_factor, and a whole"
                " original_max_position_embeddings",
            )
        return theta, RotaryScaling(factor, int(original), low, high)

    def _dict(self, name: str) -> dict[str, Any]:
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._error(name, "an object")
        return value or {}

    def _int(self, name: str) -> int:
        value = self.values.get(name)
        if type(value) is not int or value < 1:
            raise self._error(name, "a whole number, 1 or more")
        return value

    def _number(self, values: Mapping[str, Any], name: str, usual: float | None = None) -> float:
        given = values.get(name)
        value: Any = usual if given is None else given
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise DataError(
                f"{self.file}: {name} is {shortened(repr(value))}; it must be a number above 0"
            )
        return float(value)

    def _bool(self, name: str, allowed: bool = True) -> bool:
        """Return a setting that is off by default."""
        value = self.values.get(name) or False
        if type(value) is not bool or (value and not allowed):
            raise self._error(name, "true or false" if allowed else "false")
        return value

    def _error(self, name: str, expected: str) -> DataError:
        value = shortened(repr(self.values.get(name)))
        return DataError(f"{self.file}: {name} is {value}; nnmpi reads it if it is {expected}")
