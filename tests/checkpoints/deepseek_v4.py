"""A DeepSeek-V4 configuration with its built-in DSpark draft: for planning, not for running.

vLLM 0.32 can't run it on a CPU: the draft is a stub there, and the target needs kernels that only its AVX512-BF16 build
has. Head sizes, compression ratios and `index_topk` are the real ones, because vLLM's kernels have no others.
"""

from pathlib import Path

from tests.checkpoints.folder import write_config
from tests.checkpoints.shapes import MAX_POSITIONS, TARGET_LAYERS, K
from tests.checkpoints.vocabulary import EOS_ID, MASK_ID, PAD_ID, VOCAB_SIZE


def write_config_only(folder: Path) -> None:
    """config.json and a tokenizer; the draft's layers are part of the target's checkpoint."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": TARGET_LAYERS,
        "compress_ratios": [0, 0, 4, 128],
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 32,
        "index_n_heads": 8,
        "index_head_dim": 128,
        "index_topk": 512,
        "sliding_window": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_hash_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": MAX_POSITIONS // 4,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "tie_word_embeddings": False,
        "n_mtp_layers": 2,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": K,
        "dspark_markov_rank": 32,
        "dspark_noise_token_id": MASK_ID,
        "dspark_target_layer_ids": [1, 2, 3],
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "dtype": "bfloat16",
    }
    write_config(folder, config)
