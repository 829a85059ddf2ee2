"""The `cpu` entry of Triton's backends: what lets vLLM take its V2 model runner on a CPU.

Triton discovers backends through the entry point group `triton.backends` and imports `<value>.compiler` and
`<value>.driver` of each. vLLM's CPU build asks only whether a backend of this name is there; the kernels
themselves run under Triton's interpreter, so nothing here compiles. Since this entry is what makes vLLM believe in
Triton, it also switches the interpreter on, for `vllm serve` as much as for our own commands. On a GPU host the
entry is inert: it never reports itself active.
"""

from cluster.engine.cpu import profile

profile.activate()
