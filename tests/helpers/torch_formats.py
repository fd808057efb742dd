"""The publishers' quantization in PyTorch: FP8 in blocks of 128 x 128, INT4 and MXFP4 by 32."""

import torch
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

FP8_BLOCK, INT4_GROUP = 128, 32


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [N, K], float32 [ceil(N / 128), ceil(K / 128)]), whose product is the weight."""
    sizes = [-(-size // FP8_BLOCK) for size in weight.shape]
    padded = torch.zeros(sizes[0] * FP8_BLOCK, sizes[1] * FP8_BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(sizes[0], FP8_BLOCK, sizes[1], FP8_BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    numbers = (blocks / scale[:, None, :, None]).view_as(padded)
    return numbers[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn), scale


def from_fp8(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return numbers.float() * wide[: numbers.shape[0], : numbers.shape[1]]


def int4_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int32 [N, K / 8], bfloat16 [N, K / 32]): nibble j of word w is column 8 w + j, plus 8."""
    groups = weight.float().reshape(len(weight), -1, INT4_GROUP)
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    numbers = (groups / scale.float()[..., None]).round().clamp(-8, 7).long() + 8
    nibbles = numbers.reshape(len(weight), -1, 8) << torch.arange(0, 32, 4)
    words = nibbles.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int(), scale


def mxfp4_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [E, N, K / 32, 16], exponents uint8 [E, N, K / 32]) of a weight [E, K, N].

    A byte has two 4-bit codes, the first in its lower half. Exponents are stored plus 127.
    """
    experts, inner, out = weight.shape
    groups = weight.float().swapaxes(1, 2).reshape(experts, out, inner // 32, 32)
    exponent = groups.abs().amax(-1).clamp(min=1e-6).log2().floor() - 2
    distances = groups[..., None] / exponent[..., None, None].exp2() - torch.tensor(FP4_VALUES)
    codes = distances.abs().argmin(-1)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).byte(), (exponent + 127).byte()


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return convert_moe_packed_tensors(blocks, scales)


def from_int4(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    nibbles = (words.long()[..., None] >> torch.arange(0, 32, 4)) & 15
    groups = (nibbles - 8).reshape(len(words), -1, INT4_GROUP)
    return (groups * scale.float()[..., None]).reshape(len(words), -1)
