"""Names that other training programs give to a recipe's keys: what a person may type, and what is meant."""

OTHER_NAMES = {
    "learning_rate": "lr", "max_lr": "lr", "lr_scheduler_type": "schedule", "warmup": "warmup_steps",
    "max_steps": "total_steps", "num_steps": "total_steps", "train_steps": "total_steps", "max_iters": "total_steps",
    "batch_size": "micro_batch_size", "per_device_train_batch_size": "micro_batch_size",
    "grad_accum": "gradient_accumulation_steps", "accumulation": "gradient_accumulation_steps",
    "max_grad_norm": "grad_clip", "clip_grad": "grad_clip", "gradient_clipping": "grad_clip",
    "gradient_checkpointing": "grad_checkpoint", "activation_checkpointing": "grad_checkpoint",
    "logging_steps": "log_interval", "log_every": "log_interval", "eval_steps": "eval_interval",
    "eval_every": "eval_interval", "save_steps": "save_interval", "save_every": "save_interval",
    "router_aux_loss_coef": "aux_loss_alpha", "hidden_size": "d_model", "n_embd": "d_model", "dim": "d_model",
    "num_layers": "n_layers", "num_hidden_layers": "n_layers", "num_heads": "n_heads",
    "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "seq_len": "max_seq_len",
    "seq_length": "max_seq_len", "sequence_length": "max_seq_len", "block_size": "max_seq_len",
    "context_length": "max_seq_len", "max_position_embeddings": "max_seq_len", "sliding_window": "window_size",
    "vocab": "vocab_size", "n_vocab": "vocab_size", "num_experts": "n_experts", "num_local_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token", "top_k": "experts_per_token",
    "intermediate_size": "expert_hidden_size", "precision": "dtype", "dataset": "train_data_path",
    "data_path": "train_data_path",
}  # fmt: skip
