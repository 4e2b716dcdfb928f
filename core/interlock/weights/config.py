"""What a model is: one frozen record, whether it was read from GGUF metadata or a config.json.

Field names are those of Hugging Face configurations. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs

from interlock.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from interlock.weights.resolve import ModelFiles

ARCHITECTURES: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "KimiK3ForConditionalGeneration",
    "KimiLinearForCausalLM",
)
RopeKind = Literal["default", "linear", "llama3", "yarn"]
DTYPE_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@attrs.frozen(kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context a model was trained on.

    ``llama3`` uses the two frequency factors, ``yarn`` the betas and the attention factor; both
    measure against ``original_max_position_embeddings``.
    """

    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@attrs.frozen(kw_only=True)
class ModelConfig:
    """Sizes and options of a decoder-only transformer of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases on q, k and v."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """The dtype in which the weights were stored or trained."""

    def __attrs_post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise WeightsError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise WeightsError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise WeightsError(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        if self.hidden_act not in ("silu", "swish"):
            raise WeightsError(f"hidden_act {self.hidden_act!r} is not supported (only silu)")

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values that one token keeps in the caches of all layers."""
        return 2 * self.num_hidden_layers * self.kv_size * element_bytes

    def state_bytes_per_sequence(self, element_bytes: int = 2, tp: int = 1) -> int:  # noqa: ARG002
        """No layer is recurrent."""
        return 0

    def check_tp(self, tp: int) -> None:
        """Raise ConfigError if the heads cannot be spread over ``tp`` ranks."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and _shares(kv_heads, n)]
        if tp not in fits:
            raise ConfigError(
                f"engine.tp: {heads} attention heads and {kv_heads} key and value heads cannot be "
                f"shared evenly by {tp} ranks; use one of {', '.join(map(str, fits))}"
            )


def _shares(kv_heads: int, ranks: int) -> bool:
    """Whether each rank has whole heads, or one that several ranks hold."""
    return kv_heads % ranks == 0 or ranks % kv_heads == 0


_POSITIVE: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def load_config(files: ModelFiles, extra_models: Mapping[str, type[Any]] | None = None) -> Any:
    """Read the configuration of a model: a `ModelConfig`, a `KimiConfig`, or a plugin's own.

    ``extra_models`` are classes of plugins by architecture. A class with a static
    ``read_config(files)`` reads its own; for others config.json means what it means for Llama.

    Raises `WeightsError` for a missing or malformed field, an architecture or a RoPE variant that
    isn't supported, and sliding-window attention that would take effect.
    """
    if files.kind == "gguf":
        from interlock.weights.config_gguf import from_gguf
        from interlock.weights.gguf_header import read_header

        return from_gguf(read_header(files.path))
    from interlock.weights.config_hf import architecture_of, from_folder

    extra = extra_models or {}
    reader = getattr(extra.get(architecture_of(files.path, tuple(extra))), "read_config", None)
    if reader is not None:
        return reader(files)
    return from_folder(files.path, tuple(extra))


def unsupported_architecture(name: str, where: str) -> WeightsError:
    return WeightsError(
        f"{where}: architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
    )


def refuse_sliding_window(window: int | None, max_positions: int, where: str) -> None:
    """A window at least as wide as the context changes nothing; a narrower one isn't built."""
    if window is not None and 0 < window < max_positions:
        raise WeightsError(
            f"{where}: sliding-window attention ({window} of {max_positions} tokens) is not "
            f"supported; full attention would give other results than the model was trained for"
        )
