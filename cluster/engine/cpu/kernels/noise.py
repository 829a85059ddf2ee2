"""The random numbers of vLLM's sampling kernels, bit for bit, as vectors.

Draws are counter-based: they depend on the request's seed, the position and the token, never on a state, which is
what lets a seeded request be repeated. Formulas: MurmurHash3's 32-bit finalised mix (public domain, A. Appleby),
Philox 4x32 with 10 rounds (Salmon et al., SC'11), as `vllm/v1/worker/gpu/sample/gumbel.py` and
`triton/language/random.py` use them. NumPy, not torch: its unsigned integers wrap as the kernels' do, and its
`log` is the one that the interpreter uses.
"""

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

# Keeps a draft's noise apart from the noise of the residual that a rejected draft is resampled from.
DRAFT_NOISE_SALT = 1 << 30
_SMALLEST_UNIFORM = np.float32(4.6566127342e-10)


def gumbel_float32(seed: int, position: int, vocab_size: int) -> F32:
    """Gumbel noise for every token of one row, [V]."""
    bits = _murmur3(seed, position, vocab_size, domain=0)
    high, low = (bits >> 16).astype(np.float32), (bits & 0xFFFF).astype(np.float32)
    uniform = high * np.float32(1.52587890625e-05) + (low + np.float32(0.5)) * np.float32(2.3283064365386963e-10)
    return np.asarray(-np.log(-_log_one_minus(uniform)), dtype=np.float32)


def gumbel_float64(seed: int, position: int, vocab_size: int) -> F64:
    """The same in double precision, from 53 random bits, [V]."""
    low = _murmur3(seed, position, vocab_size, domain=0).astype(np.uint64)
    high = _murmur3(seed, position, vocab_size, domain=0x9E3779B9).astype(np.uint64)
    bits = ((high << np.uint64(32)) | low) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(-np.log(-np.log(np.minimum(uniform, 1.0 - 2.0**-53))), dtype=np.float64)


def uniform_float32(seeds: I64, positions: I64) -> F32:
    """One uniform number in (0, 1) for each pair of seed and position, as `tl.rand` draws it."""
    words = [(positions & 0xFFFFFFFF).astype(np.uint64), ((positions >> 32) & 0xFFFFFFFF).astype(np.uint64)]
    words += [np.zeros_like(words[0]), np.zeros_like(words[0])]
    key = [(seeds & 0xFFFFFFFF).astype(np.uint64), ((seeds >> 32) & 0xFFFFFFFF).astype(np.uint64)]
    # 32-bit words in 64-bit lanes: the high half of a product is a shift away, and a mask stands for wrapping.
    low_half = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        first = np.uint64(0xD2511F53) * words[0]
        third = np.uint64(0xCD9E8D57) * words[2]
        words = [
            (third >> np.uint64(32)) ^ words[1] ^ key[0],
            third & low_half,
            (first >> np.uint64(32)) ^ words[3] ^ key[1],
            first & low_half,
        ]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low_half, (key[1] + np.uint64(0xBB67AE85)) & low_half]
    signed = words[0].astype(np.uint32).view(np.int32)
    magnitude = np.where(signed < 0, -signed - np.int32(1), signed)
    scaled: F32 = np.maximum(magnitude.astype(np.float32) * _SMALLEST_UNIFORM, _SMALLEST_UNIFORM)
    return scaled


def _murmur3(seed: int, position: int, vocab_size: int, *, domain: int) -> U32:
    state = np.full(1, domain, dtype=np.uint32)
    for word in (seed, seed >> 32, position):
        state = _mix(state, np.full(1, word & 0xFFFFFFFF, dtype=np.uint32))
    return _finalise(_mix(state, np.arange(vocab_size, dtype=np.uint32)) ^ np.uint32(16))


def _rotate_left(value: U32, shift: int) -> U32:
    return (value << np.uint32(shift)) | (value >> np.uint32(32 - shift))


def _mix(state: U32, key: U32) -> U32:
    key = _rotate_left(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate_left(state ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _finalise(state: U32) -> U32:
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return state ^ (state >> np.uint32(16))


def _log_one_minus(value: F32) -> F32:
    """log(1 - value) by the kernel's own series where value is small: the tail that wins the argmax."""
    polynomial: F32 = np.full(1, 1.0 / 8.0, dtype=np.float32)
    for divisor in (7, 6, 5, 4, 3, 2, 1):
        polynomial = np.float32(1.0 / divisor) + value * polynomial
    direct = np.log(np.maximum(np.float32(1.0) - value, np.float32(5.960464477539063e-08)))
    return np.where(value < np.float32(0.25), -value * polynomial, direct)
