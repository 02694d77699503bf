"""Every name on the left of docs/reference/names.md is answered with what stands on the right, and
every option of other programs by the commands.
"""

import re
from functools import partial

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, data, nn, ops, optim, tensor
from nnmpi.base.command import suggest
from nnmpi.base.words import TABLE
from nnmpi.commands.table import COMMANDS
from nnmpi.train.config import all_options
from tests.harness.refusals import refuses

typed = nnmpi
PACKAGES = {
    "torch": nnmpi, "nn": nn, "F": ops, "optim": optim, "hvd": nnmpi, "transforms": data
}  # fmt: skip
# what is no name that could be looked for
EXPRESSIONS = {
    *("x[0, :, i]", "x == y", "x, y", "for x, y in loader", "self.drop(x)", "print(model)"),
    *("h, (last, c) = self.lstm(x)", "self.decoder.weight = self.encoder.weight"),
    *('group["betas"] = ...', 'group["weight_decay"] = ...', "copy.deepcopy(model)"),
    *("gru(x, h0)", "rnn(x, h0)", "lstm(x, (h0, c0))"),
    *("pickle.dumps(model)", "horovodrun -np 4 -H a:2,b:2 python train.py"),
}
LAYERS = {"LSTM": (3, 4), "LayerNorm": (4,), "Embedding": (3, 4)}


def table():
    """Yield each piece of code on the left, and the plain text on the right."""
    for line in TABLE.read_text().splitlines():
        if line.startswith("| ") and "`" in line:
            left, right = line.strip("| ").split(" | ")
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", right).replace("`", "")
            for code in re.findall(r"`([^`]+)`", left):
                yield code, text


def told(call):
    with pytest.raises((AttributeError, TypeError)) as caught:
        call()
    return str(caught.value)


X = Tensor(np.ones((2, 3), np.float32))
MODEL = nn.Sequential(nn.Linear(3, 2)).initialize(seed=0)
OWNERS = {
    **PACKAGES,
    "x": X,
    "model": MODEL,
    "layers": MODEL,
    "parameter": MODEL[0].weight,
    "pred": X,
    "loss": X,
    "optimizer": optim.SGD(MODEL.storage, lr=0.1),
    "scheduler": optim.Cosine(0.1, 3),
}


def names_in(code):
    return {*re.findall(r"[A-Za-z_]\w*", code)}


def answers_about(code):
    """Return what is said of a piece of code: of its attribute at the owner, of its last name in
    each package, and of its arguments.
    """
    found = []
    code = re.sub(r"^[\w, ]+ = ", "", code)
    owner, *path = re.findall(r"[A-Za-z_]\w*", code.partition("(")[0].partition("=")[0]) or [""]
    at = OWNERS.get(owner)
    for name in path:
        if at is not None and not hasattr(at, name):
            found.append(told(lambda at=at, name=name: getattr(at, name)))
        at = getattr(at, name, None)
    last = path[-1] if path else owner
    for package in (nnmpi, nn, ops, optim, data, tensor):
        if last and not hasattr(package, last) and (not path or owner not in OWNERS):
            found.append(told(lambda package=package: getattr(package, last)))
    for argument in re.findall(r"(\w+)=(?!=)", code):
        if last in LAYERS:
            make = partial(getattr(nn, last), *LAYERS[last], **{argument: 1})
            found.append(told(make))
    is_argument = re.fullmatch(r"\w+(=\w+)?", code) and code.partition("=")[0].islower()
    if is_argument:
        found.append(told(lambda: typed.Tensor.sum(X, **{code.partition("=")[0]: 1})))
    return found


OPTIONS = {code for code, _ in table() if code.startswith("--")}
TAKEN = {f"--{name.replace('_', '-')}" for name in all_options()}


@pytest.mark.parametrize("code", sorted(OPTIONS))
def test_an_option_of_another_program_is_answered(code):
    """With nnmpi's, which exists, or with a sentence; of a command that has it."""
    right = dict(table())[code]
    known = TAKEN | {"--tokens", "--temperature", "--dataset"}
    flags = re.findall(r"--[\w-]+", right)
    assert code not in TAKEN
    assert all(flag in known or f"nnmpi report RUN {flag}" in right for flag in flags)
    commands = re.findall(r"nnmpi (\w+)", right)
    assert {*commands} <= {*COMMANDS}
    answer = suggest(code, sorted(known))
    if ", ".join(flags) == right:
        assert answer == f"; did you mean {' or '.join(flags)}?"
        assert not suggest(code, ["--json"])
    else:
        assert answer == f"; in nnmpi: {right} (docs/reference/names.md)"


@pytest.mark.parametrize("code", sorted({*dict(table())} - EXPRESSIONS - OPTIONS))
def test_a_name_is_answered_with_what_stands_beside_it(code):
    """Of several rows with a name, that of one of them."""
    answers = answers_about(code)
    names = names_in(code)
    rights = [right for other, right in table() if names & names_in(other)]
    for answer in answers:
        assert any(f"; in nnmpi: {right} (docs/reference" in answer for right in rights), answer
    works = any(hasattr(owner, name) for owner in OWNERS.values() for name in names)
    assert answers or works


def test_what_is_no_name_is_in_the_table():
    assert {*dict(table())} >= EXPRESSIONS


@pytest.mark.parametrize(
    "call, right",
    [
        (lambda: typed.Tensor.sum(X, dim=1), "axis"),
        (lambda: typed.Tensor.max(X, 1, keepdim=True), "keepdims"),
        (lambda: typed.Tensor.var(X, unbiased=False), "correction"),
        (lambda: typed.Tensor.flatten(X, start_dim=1), "start"),
        (lambda: typed.ops.softmax(X, dim=1), "axis"),
        (lambda: typed.ops.relu(X, inplace=True), "leave it out"),
        (lambda: typed.tensor.stack([X], dim=0), "axis"),
        (lambda: typed.nn.ReLU(inplace=True), "leave it out"),
        (lambda: typed.nn.ReLU(True), "leave it out"),
        (lambda: typed.nn.LeakyReLU(0.2, True), "leave it out"),
        (lambda: typed.nn.BCELoss(weight=1), "there are no weights of classes; weigh the terms"),
        (lambda: typed.nn.BCEWithLogitsLoss(pos_weight=1), "weigh the terms: ((1 + (w - 1) * y)"),
        (lambda: typed.nn.BatchNorm2d(3, affine=False), "layer.weight.requires_grad = False"),
        (lambda: typed.nn.BatchNorm2d(3, track_running_stats=False), "there is none, since an ev"),
        (lambda: typed.nn.InstanceNorm1d(3, track_running_stats=True), "leave it out: nn.Instance"),
        (lambda: typed.nn.Conv1d(3, 4, 3, padding_mode="same"), "the padding is zeros"),
        (lambda: typed.nn.Conv2d(3, 4, 3, dtype="f8"), 'model.initialize(dtype="float64")'),
        (lambda: typed.nn.MaxPool1d(2, ceil_mode=True), "sizes are rounded down"),
        (lambda: typed.ops.max_pool2d(X, 2, ceil_mode=True), "sizes are rounded down"),
        (lambda: typed.ops.avg_pool2d(X, 2, count_include_pad=True), "there is none: a window's"),
        (lambda: typed.ops.embedding(X, [0], padding_idx=0), "labels of -1 at the padding"),
        (lambda: typed.nn.RNN(3, 4, bidirectional=True), "nn.LSTM alone has bidirectional"),
        (lambda: typed.optim.Adam(MODEL.storage, foreach=True), "leave it out"),
        (lambda: typed.optim.RMSprop(MODEL.storage, centered=True), "there is none; write an opt"),
        (lambda: typed.optim.Adagrad(MODEL.storage, lr_decay=1), "there is none; write an opt"),
        (lambda: typed.nn.MultiheadAttention(8, 2, kdim=4), "there is none: keys and values"),
        (lambda: X.expand, "leave it out: operations broadcast"),
        (lambda: typed.from_numpy, "nnmpi.Tensor(array), which shares its memory"),
        (lambda: typed.ops.pad, "x.pad(widths)"),
        (lambda: typed.nn.Identity(), "nn.Sequential()"),
        (lambda: typed.nn.LSTM(3, 4, batch_first=True), "leave batch_first out"),
        (lambda: typed.data.Loader(data.load("iris")[0], 9, num_workers=2), "workers"),
        (lambda: typed.optim.SGD(MODEL.storage, 0.1, set_to_none=True), "leave it out"),
        (lambda: MODEL.zero_grad(set_to_none=True), "zero_grad()"),
        (lambda: typed.tensor([1.0]), "nnmpi.Tensor, nnmpi.Tensor(values)"),
        (lambda: typed.Tensor.size.fget(X)(0), "x.shape[0]; the number"),
    ],
)
def test_what_is_called_and_is_no_function_of_that_form(call, right):
    assert f"; in nnmpi: {right}" in told(call)


@pytest.mark.parametrize(
    "owner, names",
    [
        (MODEL, "fit compile evaluate predict save add get_weights register_forward_pre_hook"),
        (MODEL, "training_step log from_pretrained push_to_hub get_submodule count_params"),
        (nn, "CELU Mish EmbeddingBag CTCLoss Dense Conv2D BatchNormalization"),
        (nnmpi, "clip equal isclose vmap grad einsum linalg fft Generator atan2 sparse Trainer"),
        (optim, "LAMB LARS Lookahead ExponentialLR apply_updates"),
        (data, "Mixup RandAugment Resize IterableDataset StratifiedKFold DataLoader"),
    ],
)
def test_words_of_other_libraries_users_are_answered(owner, names):
    for name in names.split():
        assert "; in nnmpi: " in told(lambda name=name: getattr(owner, name)), name


def test_an_attribute_is_answered_for_its_owner():
    """A model's `add` is Keras', a tensor's PyTorch's."""
    assert "nnmpi.nn.Sequential(*model, layer)" in told(lambda: MODEL.add)
    assert "x + y" in told(lambda: X.add)


def test_names_are_guessed_only_where_most_letters_agree():
    for name, meant in (("compil", "compile"), ("Wrker", "Worker"), ("simulte", "simulate")):
        assert f"did you mean '{meant}'" in told(lambda name=name: getattr(nnmpi, name))
    for name in ("dota", "sparce", "saving", "comp"):
        assert "did you mean" not in told(lambda name=name: getattr(nnmpi, name))


def recipe(code, place):
    """Return the code of a row's right side, which must stand there."""
    (right,) = {right for other, right in table() if other == code}
    assert place in right
    return place


def test_recipes_have_pytorchs_values_and_gradients_where_a_square_root_is_0():
    x = Tensor(np.array([0.0, 0.0, 0.0]), requires_grad=True)
    s = (x * x).sum()
    code = recipe("x.norm()", "nnmpi.tensor.where(s > 0, s, 1).sqrt() * (s > 0)")
    eval(code, {"nnmpi": nnmpi, "s": s}).backward()
    assert x.grad.tolist() == [0, 0, 0]

    y = Tensor(np.array([2.0, 2.0, 2.0]), requires_grad=True)
    v = y.var(correction=1)
    code = recipe("x.std()", "nnmpi.tensor.where(v > 0, v, 1).sqrt() * (v > 0)")
    eval(code, {"nnmpi": nnmpi, "v": v}).backward()
    assert y.grad.tolist() == [0, 0, 0]

    code = recipe(
        "CosineSimilarity",
        "(x * y).sum(-1) / ((x * x).sum(-1) * (y * y).sum(-1)).clip(1e-16, None).sqrt()",
    )
    rows = {"x": Tensor(np.array([[0.0, 0], [1, 1]])), "y": Tensor(np.array([[1.0, 0], [2, 2]]))}
    np.testing.assert_allclose(eval(code, rows).numpy(), [0, 1])


def test_numpys_functions_are_answered_where_a_gradient_would_be_lost():
    x = Tensor(np.ones(3, np.float32), requires_grad=True)
    for call, right in (
        (lambda: np.sum(x), r"write x\.sum\("),
        (lambda: np.max(x), r"write x\.max\("),
        (lambda: np.abs(x), r"write abs\(x\)"),
        (lambda: np.stack([x, x]), r"write nnmpi\.tensor\.stack"),
        (lambda: np.prod(x), r"in nnmpi: of positive numbers"),
        (lambda: np.ones(3) % x, "in nnmpi: there is none"),
        (lambda: np.kron(x.sum(), np.ones(2)), r"in nnmpi: nnmpi\.tensor\.einsum"),
        (lambda: np.array([x.sum(), x.mean()]), r"loss\.item\(\) for the number"),
        (lambda: np.mean([x.sum()]), r"loss\.item\(\) for the number"),
        (lambda: np.std(x), r"write x\.var\(\)\.sqrt\(\)$"),  # by n, other than PyTorch's
        (lambda: np.repeat(x, 2), r"write x\[np\.repeat"),
        (lambda: np.split(x, 3), r"write x\.split\(size\), with the size of a part"),
        (lambda: np.einsum("i,i", x, x), r"write nnmpi\.tensor\.einsum"),
        (lambda: np.append(x, 1), r"give x\.numpy\(\) for the values$"),  # no list's method
        (lambda: np.copy(x), r"give x\.numpy\(\) for the values$"),
    ):
        refuses(nnmpi.NnmpiError, right, call)
    assert (np.shape(x), np.ndim(x), np.size(x), np.result_type(x)) == ((3,), 1, 3, np.float32)
    assert np.zeros_like(x).shape == (3,) and np.can_cast(x, "float64")  # no values are read
    free = x.detach()
    assert np.sum(free) == 3 and np.argmax(free) == 0 and np.stack([free, free]).shape == (2, 3)


def test_arguments_that_nobody_has_are_pythons_error():
    """With those that there are."""
    assert told(lambda: typed.nn.Linear(3, 4, lost=1)).endswith(
        "keyword argument 'lost'; Linear takes in_features, out_features, bias, init"
    )
    assert told(lambda: typed.nn.MaxPool2d(2, 2, 0, 1)).endswith(
        "4 positional arguments but 5 were given; MaxPool2d takes kernel_size, stride, padding"
    )
    assert told(lambda: typed.nn.Linear(3)).endswith(
        "'out_features'; Linear takes in_features, out_features, bias, init"
    )
    assert told(lambda: typed.nn.Tanh(2)) == "Tanh() takes no arguments"
    assert told(lambda: typed.nn.MSELoss(lost=1)).endswith("keyword argument 'lost'")
    assert told(lambda: typed.Tensor.sum(X, lost=1)).endswith("keyword argument 'lost'")
    assert told(lambda: typed.nn.Lost).endswith("no attribute 'Lost'")
    assert not hasattr(X, "unsqueeze") and X.size * 2 == 12


def test_a_state_is_given_to_with_state():
    """PyTorch's layers take it as their second argument, where an LSTM's lengths are here."""
    x, h = np.ones((2, 5, 3), np.float32), np.zeros((1, 2, 4), np.float32)
    gru, lstm = nn.GRU(3, 4).initialize(), nn.LSTM(3, 4).initialize()
    assert gru(x, None).shape == (2, 5, 4)
    for call in (lambda: gru(x, h), lambda: lstm(x, (h, h)), lambda: lstm.with_state(x, [3, 2, 1])):
        refuses(nnmpi.NnmpiError, "with_state", call)


def test_bytes_are_not_told_to_be_converted():
    """By astype they would be many times what the loader makes of them."""
    refuses(
        nnmpi.NnmpiError,
        r"Loader's batches or dataset.rows\(indices\), which",
        MODEL,
        np.ones((1, 3), np.uint8),
    )


@pytest.mark.parametrize(
    "line, right",
    [
        ("from nnmpi.data import DataLoader", "nnmpi.data.Loader"),
        ("from nnmpi.optim import lr_scheduler", "a function of the step"),
        ("from nnmpi.nn import functional as F", "nnmpi.ops"),
        ("import nnmpi.nn.functional as F", "nnmpi.ops"),
        ("from nnmpi import Wrker", "did you mean 'Worker'"),
    ],
)
def test_an_import_is_answered(line, right):
    """Python's own error of a missing name would leave the sentence out."""
    refuses(ImportError, rf"; (in nnmpi: )?{right}", exec, line)
    exec("from nnmpi.data import images, tables")  # modules of the package
