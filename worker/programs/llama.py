"""The causal language model in the words of Hugging Face's Llama: every setting of it has its like there.

    ours                                     theirs
    rotary pairs are neighbours (2i, 2i+1)   pairs are halves apart (i, i + E/2): rows of q and k are sorted
    o and down are stored (in, out)          (out, in): transposed
    layers 1..L                              0..L-1
    a tied line                              one tensor, tie_word_embeddings
    bytes are tokens                         a tokenizer of 256 tokens, without merges

Dropout is for training alone, and keyed; loaded over there, the model does without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

from orchestrator.domain.spec import JobSpec
from worker.checkpoint.foreign import Foreign, ForeignTensor
from worker.data.sources import SEPARATOR

from .config import NUM_BYTES, Settings, read_settings
from .layers import NORM_EPSILON

LLAMA = "LlamaForCausalLM"


def foreign(spec: JobSpec) -> Foreign:
    """Raises Refused."""
    settings = read_settings(spec)
    return Foreign(config=_config(settings, spec), tensors=tuple(_tensors(settings)), files=_tokenizer(spec))


def _config(settings: Settings, spec: JobSpec) -> dict[str, object]:
    return {
        "architectures": [LLAMA],
        "model_type": "llama",
        "vocab_size": settings.vocabulary,
        "hidden_size": settings.width,
        "intermediate_size": settings.ffn,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.train.sequence,
        "rms_norm_eps": NORM_EPSILON,
        # Versions before 5 read the first, later ones the second.
        "rope_theta": settings.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": settings.tied,
        "bos_token_id": None,
        "eos_token_id": SEPARATOR[0],
        "pad_token_id": None,
    }


def _tensors(settings: Settings) -> Iterator[ForeignTensor]:
    width, ffn, q, kv = settings.width, settings.ffn, settings.q_width, settings.kv_width

    def halves(values: torch.Tensor) -> torch.Tensor:
        """Rows of each head: the first of every pair, then the second of every pair."""
        pairs = values.view(-1, settings.head_dim // 2, 2, width)
        return pairs.transpose(1, 2).reshape(values.shape)

    yield ForeignTensor(name="model.embed_tokens.weight", line="embedding", shape=(settings.vocabulary, width))
    for layer in range(1, settings.layers + 1):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer - 1}"
        yield ForeignTensor(name=f"{theirs}.input_layernorm.weight", line=f"{ours}.attention_norm", shape=(width,))
        for name, rows in (("q", q), ("k", kv)):
            yield ForeignTensor(
                name=f"{theirs}.self_attn.{name}_proj.weight", line=f"{ours}.{name}", shape=(rows, width), turn=halves
            )
        yield ForeignTensor(name=f"{theirs}.self_attn.v_proj.weight", line=f"{ours}.v", shape=(kv, width))
        yield ForeignTensor(name=f"{theirs}.self_attn.o_proj.weight", line=f"{ours}.o", shape=(width, q), turn=torch.t)
        yield ForeignTensor(name=f"{theirs}.post_attention_layernorm.weight", line=f"{ours}.ffn_norm", shape=(width,))
        for name in ("gate", "up"):
            yield ForeignTensor(name=f"{theirs}.mlp.{name}_proj.weight", line=f"{ours}.{name}", shape=(ffn, width))
        yield ForeignTensor(name=f"{theirs}.mlp.down_proj.weight", line=f"{ours}.down", shape=(width, ffn), turn=torch.t)
    yield ForeignTensor(name="model.norm.weight", line="final_norm", shape=(width,))
    if not settings.tied:
        yield ForeignTensor(name="lm_head.weight", line="head", shape=(settings.vocabulary, width))


# --- bytes as tokens -----------------------------------------------------------------------------------------------------


def _tokenizer(spec: JobSpec) -> dict[str, bytes]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {letter: byte for byte, letter in enumerate(_letters())}, "merges": []},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.train.sequence,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=1).encode(),
        "tokenizer_config.json": json.dumps(config, indent=1).encode(),
    }


def _letters() -> list[str]:
    """How byte-level tokenizers spell each byte: itself where it can be seen, else a letter from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(NUM_BYTES) if byte not in seen]
    return [chr(byte if byte in seen else NUM_BYTES + unseen.index(byte)) for byte in range(NUM_BYTES)]
