"""The planted faults: one replaced line each, in every package, and the tests that should find
it.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """One fault.

    Attributes:
        name: what it is.
        file: where it is planted.
        before, after: the text that is replaced, which stands there once, and what replaces it.
        tests: for pytest: where it should be found.
        device: how the interpreted device is to run for that (see tests/device/interpreted);
            without, it is not there.
    """

    name: str
    file: str
    before: str
    after: str
    tests: str
    device: str = ""


BACKEND, STORE = (
    "tests/gpu/test_backend.py",
    "test_a_store_waits_for_what_computes_and_what_computes_for_it",
)
OPTIMIZERS = "tests/gpu/test_training.py::test_optimizers_are_the_hosts[sgd-float32]"
RECORDED = "tests/gpu/test_training.py::test_a_recorded_step_is_the_plain_one -k dropout"
FAULTS = (
    # ---- a recorded step: calls, memory, blocks ----
    Fault(
        "plan: a lifetime one call short",
        "nnmpi/backend/program/plan.py",
        "last[allocation] = max(i, end, last.get(allocation, i))",
        "last[allocation] = max(i - 1, end - 1, last.get(allocation, i))",
        "tests/backend/test_program.py tests/backend/test_random_programs.py",
    ),
    Fault(
        "plan: what a call keeps ends with the call",
        "nnmpi/backend/program/plan.py",
        "- 1 if call.keeps else i",
        "- 1 if False else i",
        "tests/backend/test_program.py tests/backend/test_random_programs.py",
    ),
    Fault(
        "plan: what somebody holds gives up its memory",
        "nnmpi/backend/program/plan.py",
        "for allocation in first if allocation.owner is None]",
        "for allocation in first]",
        "tests/backend/test_program.py tests/backend/test_random_programs.py",
    ),
    Fault(
        "tile: a block one row short",
        "nnmpi/backend/program/tile.py",
        "min(start + size, count)",
        "min(start + size, count - 1)",
        "tests/backend/test_program.py tests/backend/test_random_programs.py",
    ),
    Fault(
        "tile: an alias across a tile",
        "nnmpi/backend/program/tile.py",
        "if any(use.meets(other) for other in before):",
        "if False:",
        "tests/backend/test_program.py tests/backend/test_random_programs.py",
    ),
    Fault(
        "tile: an operand of all rows is cut",
        "nnmpi/backend/program/tile.py",
        "if given[:axes] != self.shape[:axes]:  # repeated for each row",
        "if False:",
        "tests/backend/test_program.py tests/backend/test_random_programs.py",
    ),
    Fault(
        "tile: a result that is used later is scratch",
        "nnmpi/backend/program/tile.py",
        "and len(uses) == names[memory]",
        "and uses",
        "tests/backend/test_program.py tests/backend/test_random_programs.py",
    ),
    Fault(
        "record: a write in place has no call",
        "nnmpi/backend/program/record.py",
        "        recorder.append(function, args, kwargs)\n        return given",
        "        return given",
        "tests/backend/test_program.py tests/backend/test_random_programs.py",
    ),
    Fault(
        "record: a value that Python reads spoils nothing",
        "nnmpi/backend/program/record.py",
        "        self.spoiled = self.spoiled or reason",
        "        self.spoiled = self.spoiled",
        "tests/backend/test_program.py tests/backend/test_random_programs.py",
    ),
    Fault(
        "record: zeros are filled once",
        "nnmpi/backend/program/record.py",
        "        if name in _FILLS:",
        "        if name in ():",
        "tests/backend/test_program.py tests/backend/test_random_programs.py",
    ),
    # ---- plans: layouts, and what of a pass is kept ----
    Fault(
        "price: the gradient of a stage is sent for nothing",
        "nnmpi/planner/price.py",
        "return (round(self._entering(layer, rows) / candidate.sp),)",
        "return (round(self._entering(layer, rows)) * (send.kind is Kind.SEND_ACT),)",
        "tests/train/test_planner.py",
    ),
    Fault(
        "price: ranks that share an update do it whole",
        "nnmpi/planner/price.py",
        "* part / shared",
        "* part",
        "tests/train/test_planner.py",
    ),
    Fault(
        "search: the first layout ends it",
        "nnmpi/planner/price.py",
        "while queue and len(best) < count:",
        "while queue and not best:",
        "tests/train/test_planner.py",
    ),
    Fault(
        "memory plan: a kept value is not counted",
        "nnmpi/memory/optimal.py",
        "first = behind + local + cost.saved + values[s + 1]",
        "first = behind + local + cost.saved",
        "tests/memory/test_plan.py",
    ),
    Fault(
        "memory plan: what is computed again counts as a first time",
        "nnmpi/memory/layers.py",
        "._replace(again=True,",
        "._replace(again=False,",
        "tests/memory/test_recompute.py",
    ),
    # ---- collectives, messages, two worlds ----
    Fault(
        "ring: the chunk of another step",
        "nnmpi/comm/algorithms/ring.py",
        "chunk=rank - i, reduce=False",
        "chunk=rank - i - 1, reduce=False",
        "tests/comm/test_prove.py",
    ),
    Fault(
        "prove: a part may count twice",
        "nnmpi/comm/prove.py",
        "if count(total, item) > most]",
        "if count(total, item) > most + 1]",
        "tests/comm/test_prove.py",
    ),
    Fault(
        "prove: what is missing is not seen",
        "nnmpi/comm/prove.py",
        "if expected is not None and parts != expected:",
        "if expected is not None and parts > expected:",
        "tests/comm/test_prove.py",
    ),
    Fault(
        "links: what enters a node waits for nothing",
        "nnmpi/comm/machine.py",
        "ready_s = max(ready_s, free_s[out], free_s[into])",
        "ready_s = max(ready_s, free_s[out])",
        "tests/comm/test_duration.py",
    ),
    Fault(
        "lock step: sums cost nothing",
        "nnmpi/comm/duration.py",
        "return float(seconds + sum(self._machine.add(longest * chunks) for chunks in received))",
        "return float(seconds)",
        "tests/comm/test_duration.py",
    ),
    Fault(
        "shared sum: the rest of an array belongs to nobody",
        "nnmpi/comm/node_sum.py",
        "units = shard.part(-(-array.size // step), size, rank)",
        "units = shard.part(array.size // step, size, rank)",
        "tests/comm/test_shared_sum.py",
    ),
    Fault(
        "buckets: launched before they are complete",
        "nnmpi/comm/gradients.py",
        "while self._launched < len(self.buckets) and not self._missing[self._launched]:",
        "while self._launched < len(self.buckets) and self._missing[self._launched] < 2:",
        "tests/comm/test_gradients.py",
    ),
    Fault(
        "simulated world: shared memory of two requests",
        "nnmpi/comm/simulated/simulated_comm.py",
        "for ranges in (self._written, self._read) if writes else (self._written,):",
        "for ranges in (self._written,) if writes else ():",
        "tests/comm/simulated",
    ),
    Fault(
        "simulated world: a buffer that is changed while it is sent",
        "nnmpi/comm/simulated/simulated_comm.py",
        "if request.checksum is not None and request.checksum != checksum(request.source):",
        "if request.checksum is not None and request.checksum > checksum(request.source) + 1e300:",
        "tests/comm/simulated",
    ),
    Fault(
        "agreement: an error of one rank is lost",
        "nnmpi/comm/agreement.py",
        "self._error, self.stopped = error, True",
        "self.stopped = True",
        "tests/comm/test_agreement.py",
    ),
    Fault(
        "shard: the longer parts come last",
        "nnmpi/base/shard.py",
        "return range(start, start + short + (index < longer))",
        "return range(start, start + short + (index <= longer))",
        "tests/base/test_shard.py",
    ),
    Fault(
        "buckets: a limit is passed",
        "nnmpi/base/shard.py",
        "if i > start and total + size > limit:",
        "if i > start and total > limit:",
        "tests/base/test_shard.py",
    ),
    # ---- schedules ----
    Fault(
        "1F1B: one warm-up too few",
        "nnmpi/schedule/schedules.py",
        "return _in_turns(forwards, backwards, ranks - 1 - rank)",
        "return _in_turns(forwards, backwards, max(ranks - 2 - rank, 0))",
        "tests/schedule",
    ),
    Fault(
        "zero bubble: weights' halves too early",
        "nnmpi/schedule/there_and_back.py",
        "if m < before[index] and (",
        "if m < before[index] and not halves[rank] and (",
        "tests/schedule",
    ),
    Fault(
        "check: doubled work",
        "nnmpi/schedule/check.py",
        "if len(occurrences) > 1:",
        "if len(occurrences) > 2:",
        "tests/schedule",
    ),
    Fault(
        "check: deadlock with rendezvous sends",
        "nnmpi/schedule/check.py",
        "run = ScheduleRun(schedule, {}, rendezvous=True)",
        "run = ScheduleRun(schedule, {}, rendezvous=False)",
        "tests/schedule",
    ),
    Fault(
        "lower: a gradient is not sent",
        "nnmpi/schedule/lower.py",
        "if receive and after:",
        "if receive and after and (op.kind is Kind.F or op.microbatch):",
        "tests/schedule",
    ),
    # ---- the engine ----
    Fault(
        "mean: the gradient is not divided",
        "nnmpi/tensor/reduce.py",
        "xp.broadcast_to(xp.divide(item, count) if self.averages else item, shape)",
        "xp.broadcast_to(item, shape)",
        "tests/tensor",
    ),
    Fault(
        "variance: the correction is left out",
        "nnmpi/tensor/reduce.py",
        "divisor = count - self.correction",
        "divisor = count",
        "tests/tensor",
    ),
    Fault(
        "indexing: elements that are named twice",
        "nnmpi/tensor/shape.py",
        "xp.add.at(spread, self.key, grad)",
        "spread[self.key] = grad",
        "tests/tensor",
    ),
    Fault(
        "clip: no margin",
        "nnmpi/optim/clip.py",
        "return min(1.0, max_norm / (norm + _MARGIN))",
        "return max_norm / (norm + _MARGIN)",
        "tests/optim",
    ),
    Fault(
        "Adam: bias correction",
        "nnmpi/optim/adaptive.py",
        "rate = lr * root / (1 - beta1**self.steps)",
        "rate = lr * root",
        "tests/optim",
    ),
    Fault(
        "AdamW: decay in the gradient",
        "nnmpi/optim/adaptive.py",
        "decay, shrink = (0.0, 1 - lr * block.decay)",
        "decay, shrink = (0.0, 1 - block.decay)",
        "tests/optim",
    ),
    Fault(
        "warm-up: begins at 0",
        "nnmpi/optim/schedule.py",
        "((step + 1) / (self.steps + 1))",
        "(step / (self.steps + 1))",
        "tests/optim",
    ),
    # ---- layouts ----
    Fault(
        "gradient's norm: replicas count, too",
        "nnmpi/compose/exchange.py",
        "group = mesh.world if arrangement.layout.zero or has_experts else mesh.model",
        "group = mesh.world",
        "tests/equivalence/test_rows.py",
    ),
    Fault(
        "the gradient is divided by one target less",
        "nnmpi/compose/passes.py",
        "if each else total, 1)",
        "if each else total - 1, 1)",
        "tests/compose/test_worker.py",
    ),
    Fault(
        "pipeline: gradients of tied parameters are not added",
        "nnmpi/compose/exchange.py",
        "tie.group.all_reduce(total.reshape(-1), check=False)",
        "pass",
        "tests/equivalence/test_rows.py",
    ),
    Fault(
        "batch norm of image rows: the statistics of this rank's rows",
        "nnmpi/parallel/sharded/elementwise.py",
        "ours = all_sum(self.group, array)",
        "ours = array",
        "tests/parallel/sharded/test_layers.py",
    ),
    Fault(
        "Tensor.size: of the last axis alone",
        "nnmpi/tensor/tensor.py",
        "return _Size(prod(self.shape))",
        "return _Size(prod(self.shape[-1:]))",
        "tests/tensor",
    ),
    Fault(
        "SGD: Nesterov's momentum looks back",
        "nnmpi/backend/plain.py",
        "xp.add(scratch, direction, out=scratch)",
        "xp.subtract(scratch, direction, out=scratch)",
        "tests/optim",
    ),
    Fault(
        "BatchNorm: running variance with divisor n",
        "nnmpi/nn/norm.py",
        "factor = count / at_least_one(count - 1)",
        "factor = count / at_least_one(count)",
        "tests/nn",
    ),
    Fault(
        "Dropout: one mask for all steps",
        "nnmpi/nn/activation.py",
        'key_pair("dropout", mode.seed, mode.step, path)',
        'key_pair("dropout", mode.seed, 0, path)',
        "tests/nn",
    ),
    # ---- data ----
    Fault(
        "sampler: the last batch is as long as all",
        "nnmpi/data/loader.py",
        "global_rows = min(self.batch_size, len(self.dataset) - start)",
        "global_rows = self.batch_size",
        "tests/data",
    ),
    Fault(
        "normalize: the mean of the batches' means",
        "nnmpi/data/transform.py",
        'np.square(train.rows(cut, "float64") - mean)',
        'np.square(train.rows(cut, "float64"))',
        "tests/data",
    ),
    Fault(
        "flip: upside down",
        "nnmpi/data/transform.py",
        "result[chosen] = x[chosen, :, ::-1]",
        "result[chosen] = x[chosen, ::-1]",
        "tests/data",
    ),
    # ---- asynchrony ----
    Fault(
        "ssp: one step further ahead than the bound",
        "nnmpi/comm/synchrony/consistency.py",
        "return bound is None or self.lead(worker) <= bound",
        "return bound is None or self.lead(worker) <= bound + 1",
        "tests/comm/synchrony",
    ),
    Fault(
        "server: an update of a part has the whole rate",
        "nnmpi/parallel/server.py",
        "self.optimizer.lr = lr * share",
        "self.optimizer.lr = lr",
        "tests/parallel/server",
    ),
    Fault(
        "server: gradients in the order in which they came",
        "nnmpi/parallel/server.py",
        "key=lambda item: (item[0].batch, item[0].part))",
        "key=lambda item: 0)",
        "tests/parallel/server",
    ),
    Fault(
        "local SGD: a mean of ranks and not of rows",
        "nnmpi/parallel/averaging.py",
        "return self._rows / total if total else",
        "return 1 / self.group.size if total else",
        "tests/parallel/test_averaging.py",
    ),
    # ---- devices, on the tests' double ----
    Fault(
        "device: a gradient's blocks of images replace one another",
        "nnmpi/ops/conv/im2col.py",
        "gemm(self._xp, left, right, self._total, self._begun)",
        "gemm(self._xp, left, right, self._total)",
        "tests/gpu/test_conv.py",
    ),
    Fault(
        "device: a product is not added to what is there",
        "nnmpi/backend/cublas.py",
        "item if add else zero",
        "zero",
        "tests/backend/test_gemm.py",
    ),
    Fault(
        "device: a product runs in the stream of the one before",
        "nnmpi/backend/cublas.py",
        "if stream is not self._stream:",
        "if self._stream is None:",
        "tests/backend/test_cublas.py",
    ),
    Fault(
        "device: ReLU lets a gradient through at 0",
        "nnmpi/backend/cuda/dense.cu",
        "other > 0 ? value",
        "other >= 0 ? value",
        "tests/gpu/test_operations.py::test_relu_stops_gradients_at_0",
        "exact",
    ),
    Fault(
        "device: variances of blocks are added as if their means were one",
        "nnmpi/backend/cuda/norm.cu",
        "* away * away;",
        "* 0;",
        "tests/gpu/test_norm.py::test_a_first_row_unlike_the_rest",
        "exact",
    ),
    # what the double cannot see: who waits for whom, and what the compiler makes of a kernel
    Fault(
        "interpreted: a copy to the host that nobody waits for",
        "nnmpi/comm/buffers.py",
        "return cast(Callable[[], None], stream.record().synchronize)",
        "return lambda: None",
        f"{BACKEND}::test_copies_there_and_back",
        "lazy",
    ),
    Fault(
        "interpreted: an update does not look at its guard",
        "nnmpi/backend/cuda/updates.cu",
        "guard && !(*guard - *guard == 0)",
        "false",
        "tests/gpu/test_training.py::test_numbers_that_are_read_a_step_late_change_nothing[adam-4]",
        "lazy",
    ),
    Fault(
        "interpreted: a batch is used before its copy has arrived",
        "nnmpi/backend/upload.py",
        "cuda.get_current_stream().wait_event(arrived)",
        "pass",
        "tests/gpu/test_batches.py::test_batches_on_a_device_are_the_hosts",
        "lazy",
    ),
    Fault(
        "interpreted: a copy to the device that nobody waits for",
        "nnmpi/comm/buffers.py",
        "[attr-defined]\n            stream.synchronize()",
        "[attr-defined]",
        f"{BACKEND}::test_copies_there_and_back",
        "lazy",
    ),
    Fault(
        "interpreted: what is moved does not wait for what computes",
        "nnmpi/memory/store.py",
        "stream.wait_event(cuda.get_current_stream().record())",
        "pass",
        f"{BACKEND}::{STORE}",
        "race",
    ),
    Fault(
        "interpreted: what computes does not wait for what is moved",
        "nnmpi/memory/store.py",
        "cuda.get_current_stream().wait_event(over)",
        "over",
        f"{BACKEND}::{STORE}",
        "lazy",
    ),
    Fault(
        "graph: a replay leaves the numbers of the first step",
        "nnmpi/backend/cuda/graph.py",
        "self.record(_write, host, function)",
        "pass",
        RECORDED,
    ),
    Fault(
        "graph: its memory is given to others",
        "nnmpi/backend/cuda/graph.py",
        "xp.cuda.MemoryPool(xp.get_default_memory_pool().malloc)",
        "xp.get_default_memory_pool()",
        RECORDED,
    ),
    Fault(
        "interpreted: a step before its capture does not wait for what was before",
        "nnmpi/backend/cuda/graph.py",
        "stream.wait_event(outer.record())",
        "pass",
        RECORDED,
        "race",
    ),
    Fault(
        "interpreted: nobody waits for a step before its capture",
        "nnmpi/backend/cuda/graph.py",
        "xp.cuda.get_current_stream().wait_event(stream.record())",
        "pass",
        RECORDED,
        "lazy",
    ),
    Fault(
        "interpreted: a wrong register in a store of 16 bytes",
        "nnmpi/backend/cuda/common.cuh",
        '"r"(as.words[i + 2])',
        '"r"(as.words[i + 1])',
        OPTIMIZERS,
        "exact",
    ),
    Fault(
        "interpreted: a kernel that goes one element too far",
        "nnmpi/backend/cuda/common.cuh",
        "i < n; i += step",
        "i <= n; i += step",
        OPTIMIZERS,
        "exact",
    ),
    Fault(
        "interpreted: a cast that truncates",
        "nnmpi/backend/cuda/common.cuh",
        "cvt.rn.bf16.f32",
        "cvt.rz.bf16.f32",
        "tests/gpu/test_operations.py::test_results_are_rounded_to_nearest",
        "exact",
    ),
    Fault(
        "data: bytes are not scaled to input",
        "nnmpi/data/dataset.py",
        "x *= self.scale",
        "pass",
        "tests/data/test_dataset.py",
    ),
    # ---- operations and what is compiled ----
    Fault(
        "smoothed labels: too large a gradient at the label",
        "nnmpi/backend/plain.py",
        "hit = xp.multiply(grad, 1 - smoothing)",
        "hit = xp.multiply(grad, 1 + smoothing)",
        "tests/tensor/test_operations.py::test_gradients",
    ),
    Fault(
        "layer normalization: the sum of another product",
        "nnmpi/backend/plain.py",
        "row_dots(xp, grad * normal, weights)",
        "row_dots(xp, grad, weights)",
        "tests/tensor/test_operations.py::test_gradients",
    ),
    Fault(
        "numba's loss: the label's logit after the largest was taken off twice",
        "nnmpi/backend/jit/loops.py",
        "losses[r] = np.float32(math.log(total)) - (chosen - top)",
        "losses[r] = np.float32(math.log(total)) - (chosen - top - top)",
        "tests/ops/test_compiled_dense.py",
    ),
)
