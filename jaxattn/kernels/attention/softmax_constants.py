"""Numbers of a softmax in powers of two, which every attention kernel takes."""

import math

LOG2E = math.log2(math.e)
# A row's maximum before its first key, below any score but finite, and the score of what is not
# seen: no difference is inf - inf, and exp2(MASKED - EMPTY) is 0.
EMPTY, MASKED = -3e38, -math.inf
