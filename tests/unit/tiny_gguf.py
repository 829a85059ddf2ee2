"""A Llama model small enough to write in a test, in GGUF as llama.cpp's converter would leave it."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter


def write_tiny_gguf(path: Path) -> None:
    """Write one layer: H 8, two heads of D 4, one KV head. A matrix's rows count up from 0, to show their order."""
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(6)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(4)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"])
    writer.add_token_types([3, 3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, rows, columns in (
        ("token_embd", 6, 8),
        ("blk.0.attn_q", 8, 8),
        ("blk.0.attn_k", 4, 8),
        ("blk.0.attn_v", 4, 8),
        ("blk.0.attn_output", 8, 8),
        ("blk.0.ffn_gate", 16, 8),
        ("blk.0.ffn_up", 16, 8),
        ("blk.0.ffn_down", 8, 16),
    ):
        counting = np.arange(rows, dtype=np.float32)[:, None].repeat(columns, axis=1)
        writer.add_tensor(f"{name}.weight", counting)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
