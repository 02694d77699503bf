"""ZeRO: data parallelism that shards optimizer state, gradients and parameters.

    P parameters, N ranks, float32, Adam   parameters   gradients   state    extra     sent per step
    data parallelism                       4P           4P          8P                 8P (N-1)/N
    stage 1                                4P           4P          8P / N             8P (N-1)/N
    stage 2                                4P           4P / N      8P / N   1 unit    8P (N-1)/N
    stage 3                                4P / N       4P / N      8P / N   3 units  12P (N-1)/N

Only the rank that updates a parameter needs the sum of its gradient. So gradients are
reduce-scattered, which costs half of an all-reduce; the other half pays for gathering the new
parameters. Stage 3 gathers parameters unit by unit before each use, in the forward and again in the
backward pass (`-->` gather, `sum` reduce-scatter, `.` empty):

    forward      --> 0 | 0 --> 1 | 1 --> 2 | 2        the next unit is gathered while one computes
    slot A       0       0         2         2
    slot B       .       1         1         .
    backward     2 --> 1 | sum 2 | 1 --> 0 | sum 1 | 0 | sum 0

The results are those of `data`. On 2 ranks of one node stage 3 costs 5 to 6 % of the time. Source:
Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020.
Begin with `cut_units` in `storage`, then its layout.

    storage       sharded flat storage: layout to the byte, gathers and sums
    strategy      ShardedDataParallel: forward and backward, unit by unit
"""
