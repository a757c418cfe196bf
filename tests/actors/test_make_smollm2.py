"""The folder of SmolLM2: rows of queries and keys, names, shapes, and the splitting of digits; on a tiny GGUF file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_smollm2.py"
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["4 2", "a b", "Ġ ab"]  # the first one never applies, since each digit is a word
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_smollm2", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vocabulary() -> list[str]:
    letters = [*(chr(code) for code in range(33, 127)), "Ġ"]
    return [*SPECIAL, *letters, *(merge.replace(" ", "") for merge in MERGES)]


def llamas_cpp_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's convert_hf_to_gguf.py permutes q_proj and k_proj."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=len(vocabulary()), hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=64, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = LlamaForCausalLM(config)
        for parameter in made.parameters():  # norms too
            torch.nn.init.normal_(parameter, std=0.5)
    return made


@pytest.fixture(scope="module")
def write_gguf(model: LlamaForCausalLM) -> Callable[..., Path]:
    """Writes the model as llama.cpp does, with changes."""

    def write(path: Path, *, architecture: str = "llama", pre: str = "smollm", without: str = "") -> Path:
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_context_length(64)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(2)
        writer.add_feed_forward_length(48)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_freq_base(5000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(vocabulary())
        writer.add_token_types([3 if token in SPECIAL else 1 for token in vocabulary()])
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_chat_template(TEMPLATE)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        for name, weight in model.state_dict().items():
            if name in ("lm_head.weight", without):
                continue
            if "q_proj" in name or "k_proj" in name:
                weight = llamas_cpp_order(weight, HEADS if "q_proj" in name else KV_HEADS)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.numpy().astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="module")
def folder(make: ModuleType, write_gguf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf")
    assert make.write_folder(write_gguf(path / "tiny.gguf"), path / "model") > 0
    return path / "model"


def test_the_model_is_the_one_that_the_file_was_made_of(folder: Path, model: LlamaForCausalLM) -> None:
    written = AutoModelForCausalLM.from_pretrained(folder)
    state = written.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert [name for name, value in model.state_dict().items() if not torch.equal(state[name], value)] == []
    assert written.lm_head.weight is written.model.embed_tokens.weight
    tokens = torch.arange(20)[None]
    assert torch.equal(written(tokens).logits, model(tokens).logits)  # rotary base, eps and head count are right too
    assert (written.config.bos_token_id, written.config.eos_token_id, written.config.pad_token_id) == (1, 2, 2)
    assert written.generation_config.eos_token_id == 2


def test_every_digit_is_a_token_whatever_the_merges_say(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def tokens(text: str) -> list[str]:
        found: list[str] = tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
        return found

    assert tokens("42") == ["4", "2"] and "42" in tokenizer.get_vocab()
    assert tokens("ab ab42") == ["ab", "Ġab", "4", "2"]
    assert tokens("ab<|im_end|>") == ["ab", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("ab 42<|im_end|>"), skip_special_tokens=True) == "ab 42"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == (
        "<|im_start|>ab<|im_end|>"
    )
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[2])
