"""What has another name in PyTorch: arguments are taken by that name, too, and other names are answered.

@also(dim="axis", keepdim="keepdims")
def total(x, axis=None, keepdims=False): ...

total(x, dim=1)      # total(x, axis=1)
x.unsqueeze(0)       # AttributeError: Tensor has no attribute 'unsqueeze'; write x[None], x[:, None] ...
from nnmpi.nn import functional  # ModuleNotFoundError: nnmpi.nn has no part 'functional'; operations stand in ...
nn.ReLU(inplace=True)  # TypeError: ReLU has no argument 'inplace'; leave it out: no operation ...
numpy.max(x)         # x.max(axis=None, out=None): None for an argument of PyTorch's or NumPy's says nothing
"""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from math import inf
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn, TypeVar, cast

from nnmpi.errors import counted

F = TypeVar("F", bound=Callable[..., Any])


def also(**ours: str) -> Callable[[F], F]:
    """Let a function take arguments by other names, too, and answer for those that it has not.

    Args:
        ours: by their name elsewhere, what they are called here.
    """

    def decorate(function: F) -> F:
        parameters = signature(function).parameters
        by_place = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
        most = inf if any(each.kind is each.VAR_POSITIONAL for each in parameters.values()) else len(by_place)

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if kwargs:
                for theirs in ours.keys() & kwargs.keys():
                    if ours[theirs] in kwargs:
                        raise TypeError(f"{function.__qualname__} got {theirs} and {ours[theirs]}, which are one thing")
                    kwargs[ours[theirs]] = kwargs.pop(theirs)
                for theirs in kwargs.keys() - parameters.keys():
                    if theirs not in INSTEAD or kwargs.pop(theirs) is not None:
                        raise refused(theirs, *args)
            if len(args) > most:
                raise refused("", *args)
            return function(*args, **kwargs)

        def refused(theirs: str, *args: Any) -> TypeError:
            """Return the error for an argument that there is not, by its name, or by its place where that is empty."""
            name = type(args[0]).__name__ if function.__name__ == "__init__" else function.__qualname__
            if theirs in INSTEAD:
                return TypeError(f"{name} has no argument {theirs!r}; {INSTEAD[theirs]}")
            places = [each for each in by_place if each != "self"]
            names = [each for each, found in parameters.items() if found.kind is found.KEYWORD_ONLY]
            by_name = f" and {', '.join(names)} by name" if names else ""
            if theirs:
                return TypeError(f"{name} has no argument {theirs!r}; it takes {', '.join(places) or 'none'}{by_name}")
            taken = f"{counted(len(places), 'positional argument')}, {', '.join(places)}{',' * bool(names)}{by_name}"
            return TypeError(f"{name} takes {taken}; leave the others out")

        return cast(F, called)

    return decorate


def _rows(*rows: tuple[str, str]) -> Mapping[str, str]:
    return MappingProxyType({name: answer for names, answer in rows for name in names.split()})


# Names in PyTorch, wherever they are typed (of the package, a module, a tensor, an argument), and what is written here.
INSTEAD = _rows(
    ("zeros ones full empty eye rand randn randint arange linspace from_numpy as_tensor zeros_like ones_like tril triu "
     "new_zeros new_ones new_tensor new_full",
     "make it with NumPy: nnmpi.Tensor(numpy.zeros((2, 3), 'float32'))"),
    ("float32 float64 float16 bfloat16 int64 long int float double half type dtype",
     "dtypes have NumPy's names: x.astype('float32'), model.initialize(dtype='float64')"),
    ("to cuda device pin_memory non_blocking",
     "the backend is chosen once, by initialize(backend=...), and the dtype by initialize(dtype=...)"),
    ("cpu", "x.numpy() and model.state() give arrays in host memory"),
    ("amp autocast", "nnmpi.use_precision and Numerics choose the precision"),
    ("manual_seed", "first values come with model.initialize(seed=0)"),
    ("set_num_threads", "set OMP_NUM_THREADS"),
    ("save", "write arrays: numpy.savez(file, **model.state())"),
    ("is_tensor", "isinstance(x, nnmpi.Tensor)"),
    ("allclose equal isnan isinf eq ne", "compare arrays: numpy.allclose(x.data, y.data), x.data == y.data"),
    ("inference_mode set_grad_enabled", "with nnmpi.no_grad()"),
    ("enable_grad", "with nnmpi.tensor.enable_grad()"),
    ("autograd",
     "Tensor.backward() fills .grad; an operation of your own is a nnmpi.tensor.Function, an object for each call: "
     "Square()(x), with forward(self, x), which keeps arrays in self.saved, and backward(self, grad), a tuple"),
    ("distributed init init_process_group MPI COMM_WORLD get_rank Get_rank get_world_size Get_size world_size",
     "group = nnmpi.start(), then group.rank, group.size and group.all_reduce(array)"),
    ("allreduce Allreduce", "group.all_reduce(array) adds up in place, group.sum_floats([x, y]) numbers"),
    ("bcast Bcast", "group.broadcast(array) replaces the array by rank 0's, group.share(value) returns rank 0's"),
    ("allgather Allgather", "group.gather(value) returns every rank's on every rank"),
    ("fit", "worker = nnmpi.Worker(model, optimizer, group), and worker.step(batch) for each batch of a data.Loader"),
    ("predict", "model(x), within nnmpi.no_grad(); of a run that training has left, nnmpi.load(folder)"),
    ("summary", "print(model)"),
    ("clip", "of a Worker, numerics=nnmpi.Numerics(clip=1.0)"),
    ("module", "what was given is its .model"),
    ("DataParallel DistributedDataParallel parallel", "nnmpi.DataParallel(model, group), or nnmpi.Worker"),
    ("FullyShardedDataParallel", "nnmpi.ShardedDataParallel"),
    ("backends", "set OMP_NUM_THREADS; the backend is chosen once, by initialize(backend=...)"),
    ("functional", "operations stand in nnmpi.ops: ops.relu(x), ops.cross_entropy(logits, labels)"),
    ("utils clip_grad_norm_",
     "nnmpi.data.Loader deals batches; optim.clip_by_global_norm(model.storage.grads, 1.0) clips; "
     "lstm(x, lengths) reads padded sequences"),
    ("DataLoader", "nnmpi.data.Loader"),
    ("TensorDataset", "nnmpi.data.Dataset(name, x, y, classes=10); with classes=0 quantities are predicted"),
    ("random_split", "nnmpi.data.split(dataset, 0.2, seed=0)"),
    ("lr_scheduler", "a schedule is a function of the step: optimizer.lr = optim.Cosine(...)(step)"),
    ("StepLR MultiStepLR CosineAnnealingLR OneCycleLR ExponentialLR LinearLR LambdaLR ReduceLROnPlateau",
     "a schedule is a function of the step: optimizer.lr = optim.StepDecay(0.1, every=1000, factor=0.5)(step)"),
    ("param_groups", "optimizer.lr = 0.1; with model.initialize(group=...), weight_decay={'default': 0.1} is by group"),
    ("state_dict load_state_dict", "the state is optimizer.steps and the arrays of optimizer.slots()"),
    ("amsgrad RMSprop Adagrad Adadelta LBFGS", "there are optim.SGD, optim.Adam and optim.AdamW"),
    ("foreach fused capturable", "leave it out: an update is one pass over flat arrays"),
    ("dampening maximize", "leave it out: momentum is not dampened, and what is minimized can be -x"),
    ("GRU RNN", "there is nn.LSTM"),
    ("LogSoftmax NLLLoss", "nn.CrossEntropyLoss takes what comes before the softmax; ops.log_softmax(x)"),
    ("pos_weight", "ops.binary_cross_entropy(x, y, reduction='none') gives each one's loss, to be weighted and summed"),
    ("weight", "to weigh classes, "
     "losses = ops.cross_entropy(x, y, reduction='none'), (losses * weight[y]).sum() / weight[y].sum()"),
    ("padding_idx", "leave it out; the loss leaves out padding by ignore_index, and an LSTM by lstm(x, lengths)"),
    ("strict", "leave it out: a state has all names of the model, and no others"),
    ("nll_loss", "ops.cross_entropy(x, labels): of a log_softmax, and of what comes before it, the same number"),
    ("dropout1d dropout2d Dropout1d Dropout2d Dropout3d AlphaDropout", "nn.Dropout(p), which drops single elements"),
    ("mse_loss", "ops.mse(x, y, reduction='mean')"),
    ("l1_loss", "ops.mae(x, y, reduction='mean')"),
    ("smooth_l1_loss huber_loss", "ops.huber(x, y, reduction='mean', delta=1.0)"),
    ("binary_cross_entropy_with_logits", "ops.binary_cross_entropy(x, y), which takes what comes before the sigmoid"),
    ("size_average reduce", "reduction is 'mean', 'sum' or 'none'"),
    ("BCELoss", "nn.BCEWithLogitsLoss takes what comes before the sigmoid"),
    ("SmoothL1Loss", "nn.HuberLoss"),
    ("AdaptiveAvgPool2d adaptive_avg_pool2d", "to one pixel: nn.GlobalAvgPool2d(), x.mean((1, 2))"),
    ("ceil_mode", "leave it out: rows and columns that no window covers count for nothing, and nnmpi.tensor.pad(x, "
     "[(0, 0), (0, 1), (0, 1), (0, 0)]) adds a row and a column"),
    ("padding_mode", "leave it out: the border of images is 0"),
    ("bias affine elementwise_affine", "leave it out: the layer has a weight and a bias; one that is not wanted "
     "is kept at 0: layer.bias.data[...] = 0, layer.bias.requires_grad = False (of an LSTM, lstm.layers[0].bias)"),
    ("track_running_stats", "leave it out: outside of nn.training() the running statistics are used"),
    ("SyncBatchNorm BatchNorm3d", "nn.BatchNorm, for any shape, which takes the statistics of the global batch"),
    ("GroupNorm InstanceNorm2d RMSNorm", "there are nn.LayerNorm and nn.BatchNorm"),
    ("normal_ uniform_ constant_ zeros_ ones_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ "
     "kaiming_normal_",
     "parts are made with first values: nn.Linear(4, 3, init=nn.Normal(0.02), bias_init=nn.Constant(0))"),
    ("one_hot", "numpy.eye(classes)[labels]; ops.cross_entropy takes the labels themselves"),
    ("Identity", "an empty nn.Sequential()"),
    ("ModuleDict ParameterList ParameterDict", "parts are attributes, and lists of them: nn.ModuleList"),
    ("MultiheadAttention Transformer TransformerEncoder TransformerEncoderLayer TransformerDecoderLayer",
     "nn.CausalSelfAttention, nn.TransformerBlock, ops.attention"),
    ("relu sigmoid silu gelu softmax log_softmax", "it is an operation: ops.relu(x), ops.softmax(x)"),
    ("cat concat concatenate repeat", "nnmpi.tensor.concatenate([x, y], axis)"),
    ("stack where squeeze", "it is a function: nnmpi.tensor.stack([x, y]), where(condition, x, y), squeeze(x, axis)"),
    ("sum mean max min argmax exp log sqrt tanh reshape transpose permute flatten var",
     "it is a method: x.sum(axis), x.flatten(1)"),
    ("argmin", "(-x).argmax(axis)"),
    ("unbiased", "x.var(axis, correction=1) divides by n - 1"),
    ("out", "leave it out: an operation makes a new tensor"),
    ("any all nonzero", "ask the array: x.numpy().any(), x.numpy().all()"),
    ("matmul mm bmm dot einsum", "x @ y"),
    ("t mT", "x.T, or x.transpose(0, 2, 1)"),
    ("dim indices values", "x.ndim; of max an axis: x.max(1) has the values, x.argmax(1) their places"),
    ("tolist", "x.numpy().tolist()"),
    ("unsqueeze", "write x[None], x[:, None] ..."),
    ("sin cos", "nnmpi.tensor.sin(x)"),
    ("expand expand_as", "nnmpi.tensor.broadcast_to(x, shape)"),
    ("std norm", "x.var(axis).sqrt(), (x * x).sum().sqrt()"),
    ("abs pow square add sub mul div", "abs(x), x ** 2, x + y, x / y"),
    ("clamp", "x.clip(low, high)"),
    ("masked_fill", "nnmpi.tensor.where(mask, value, x)"),
    ("chunk split", "write slices: x[:, :4]"),
    ("gather", "nnmpi.tensor.take_along_axis(x, indices, axis)"),
    ("view_as", "x.reshape(y.shape)"),
    ("clone copy contiguous inplace", "leave it out: no operation changes a tensor in place"),
    ("set_to_none", "leave it out: zero_grad always forgets the gradients"),
    ("start_dim end_dim", "leave it out: nn.Flatten() keeps the first axis"),
    ("multinomial randperm normal bernoulli", "draw with NumPy: numpy.random.default_rng(0).choice(n, p=p)"),
    ("pad", "it is a function: nnmpi.tensor.pad(x, ...)"),
    ("interpolate normalize cumsum prod round logsumexp elu softplus kl_div cosine_similarity unfold",
     "there is none; write it with what there is, or as a nnmpi.tensor.Function with its derivative"),
    ("ConvTranspose2d Conv1d Conv3d Softplus ELU PReLU ReLU6 Hardswish Upsample PixelShuffle Unfold KLDivLoss",
     "there is none; a layer of your own is a nn.Module"),
    ("MNIST FashionMNIST CIFAR10 datasets", "train, test = nnmpi.data.load('cifar10')"),
    ("transforms ToTensor", "images are arrays already; nnmpi.data.Loader(..., transform=) takes "
     "data.Normalize(mean, std), data.Flip(), data.Shift(2), and several in data.Compose"),
    ("Subset", "samples are chosen by arrays: nnmpi.data.Dataset(name, x[places], y[places], classes)"),
    ("topk sort argsort", "sort arrays: numpy.argsort(x.data)"),
    ("attn_mask", "causal=True is the one mask there is; another is added by hand: ops.softmax(scores + mask) @ v"),
    ("dropout_p", "leave it out: nn.CausalSelfAttention(features, heads, dropout=0.1) drops probabilities"),
    ("batch_first", "leave it out: x is (batch, time, features), and h all that comes back, h = lstm(x); "
     "h, state = lstm.with_state(x, state) has the state"),
    ("drop_last", "leave it out: a short last batch counts by its samples"),
    ("sampler collate_fn DistributedSampler",
     "nnmpi.data.Loader deals samples by seed and epoch: rank= and world=, shuffle=, transform="),
    ("add_ sub_ mul_ div_ zero_ fill_ copy_ clamp_",
     "no operation changes a tensor in place; write x = x + 1, or to x.data"),
    ("requires_grad requires_grad_", "Tensor(x, requires_grad=True); parameter.requires_grad = False"),
    ("train", "leave it out; with dropout or batch normalization the loss is computed within "
     "a block: with nn.training(step=optimizer.steps)"),
    ("eval training", "outside of nn.training() models evaluate; leave it out; nn.current().training tells"),
    ("modules named_children apply", "named_modules() yields them with their names"),
    ("register_buffer", "self.name = nn.Buffer(shape, value), whose .data is saved with the state"),
    ("register_parameter", "self.name = nn.Parameter(values)"),
    ("add_module append", "modules are attributes; nn.Sequential(*layers) takes a list that is whole"),
)  # fmt: skip


def missing(where: str, name: str) -> AttributeError:
    """Return the error for a name that is not there, with what is written in its place where that is known.

    Args:
        where: in what it was looked for.
        name: what was looked for.
    """
    instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
    return AttributeError(f"{where} has no attribute {name!r}{instead}")


class Imports:
    """The finder of modules that is asked last: it answers the imports of PyTorch's modules."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise the ModuleNotFoundError that says what is written in the place of one of PyTorch's modules."""
        package, _, part = name.rpartition(".")
        if package.split(".")[0] == "nnmpi" and part in INSTEAD:  # no name=: from ... import would drop one with it
            raise ModuleNotFoundError(f"{package} has no part {part!r}; {INSTEAD[part]}")


def answer(module: ModuleType) -> None:
    """Let a module answer for the names that it has not; see `missing`."""

    def look_up(name: str) -> Any:
        raise missing(f"module {module.__name__!r}", name)

    module.__dict__["__getattr__"] = look_up


class Package(ModuleType):
    """A package that has the name of a function of PyTorch's, and says so to who calls it."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise the TypeError that says what to call."""
        raise TypeError(f"{self.__name__} is a package; nnmpi.Tensor(values) makes a tensor")
