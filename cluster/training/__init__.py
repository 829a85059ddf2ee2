"""Training a DSpark draft for a target: prompts, the target's own answers, block training, evaluation with vLLM."""
