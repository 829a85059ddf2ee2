"""Torch versions of the Triton kernels that walk the vocabulary.

Under Triton's interpreter such a kernel takes up to 0.6 s at 49,152 tokens. Each public function of `sampling` and
`rejection` stands in for one kernel of vLLM 0.32.0. It takes what it needs of the kernel's parameters, by name:
`logits_ptr` as `logits`, `IS_DRAFTING` as `is_drafting`; `registry` does the binding. Where a kernel splits the
vocabulary over blocks and reduces the blocks' results afterwards, its stand-in writes the whole row's result into
block 0 and neutral values into the others.

Shapes: T rows of logits, V vocabulary, B requests, R request slots (`max_num_reqs`), K drafted tokens.
"""
