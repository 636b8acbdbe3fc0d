"""Fast blocks of target networks: Triton on a GPU, plain PyTorch elsewhere, the same numbers.

Importing any of them also gives `keys.permutation_head` its kernel for GPUs.
"""

from pfedhn.kernels import permutation as permutation
