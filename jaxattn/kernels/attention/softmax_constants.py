"""Constants of a softmax in powers of two, shared by all attention kernels."""

import math

LOG2E = math.log2(math.e)
# A row's maximum before its first key, below any score but finite, and the score of a key that is
# not seen: no difference is inf - inf, and exp2(MASKED - EMPTY) is 0.
EMPTY, MASKED = -3e38, -math.inf
