"""What the numbers of a data set stand for: a Worker trains on, measures and resumes the same."""

import numpy as np
import pytest

import nnmpi
from nnmpi import data, models, optim
from nnmpi.base.errors import DataError
from nnmpi.data.names import agree
from tests.harness.refusals import data_error

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(12, 3)), np.arange(12) % 3
ABC, UVW = ("a", "b", "c"), ("u", "v", "w")


class Table(np.ndarray):
    """An array with columns, as a DataFrame has them."""

    columns = ()


def of(class_names=ABC, columns=UVW, classes=3):
    y = Y % len(class_names) if class_names else Y
    count = len(class_names) or classes
    return data.Dataset("d", X, y, count, class_names=class_names, columns=columns)


def loader(group, dataset):
    return data.Loader(dataset, 6, group, shuffle=False)


def make_worker(group, asynchronous=False):
    model = models.mlp((3,), 3, [8]).initialize(seed=0)
    sgd = optim.SGD(model.storage, lr=0.1)
    if asynchronous:
        return nnmpi.AsynchronousWorker(model, sgd, group, nnmpi.Sync("local"))
    return nnmpi.Worker(model, sgd, group)


def train(worker, group, dataset):
    given = loader(group, dataset)
    worker.run(given, 0, 0, len(given), step=0, lr=lambda step: 0.1)


OTHERS = [
    (of(("b", "c")), r"the classes b, c, .* trained on the classes a, b, c, so number 0"),
    (of(("a", "c", "b")), "so number 1 would stand for another one"),
    (of(columns=("v", "u", "w")), "the columns v, u, w, .* on the columns u, v, w, so number 0"),
    (of(columns=("u", "v", "x")), "so number 2"),
]
ALIKE = [of(), of(("a", "b")), of(()), of(columns=()), of((), ())]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_data_of_other_names_are_refused_and_data_without_are_numbers(ranks, asynchronous):
    def program(group):
        worker = make_worker(group, asynchronous)
        train(worker, group, of())
        for other, sentence in OTHERS:
            data_error(sentence, worker.evaluate, loader(group, other).epoch(0))
            data_error(sentence, train, worker, group, other)
        for other in ALIKE:
            worker.evaluate(loader(group, other).epoch(0))
            train(worker, group, other)
        if not asynchronous:
            worker.evaluate(X, Y)
            worker.step(X, Y)
        worker.evaluate(loader(group, of()).epoch(0))

    nnmpi.simulate(program, ranks)


def test_a_table_that_is_given_to_a_step_has_columns_too():
    def program(group):
        worker = make_worker(group)
        tables = [X.view(Table), X.view(Table)]
        tables[0].columns, tables[1].columns = UVW, ("v", "u", "w")
        worker.step(tables[0], Y)
        for call in (worker.step, worker.evaluate):
            data_error("the table has the columns v, u, w", call, tables[1], Y)
        worker.evaluate(tables[0], Y)

    nnmpi.simulate(program, 1)


@pytest.mark.parametrize("kept", ["worker", "loader"])
def test_a_resumed_training_keeps_the_names(kept, tmp_path):
    def program(group, dataset):
        worker, given = make_worker(group), loader(group, dataset)
        objects = {"loader": given} if kept == "loader" else {}
        nnmpi.resume(tmp_path, worker, **objects)
        for batch in given.epoch(given.place[0]):
            worker.step(batch)
        nnmpi.save(tmp_path, worker, **objects)

    nnmpi.simulate(lambda group: program(group, of()), 2)
    for other, sentence in OTHERS:
        with pytest.raises(DataError, match=sentence):
            nnmpi.simulate(lambda group, d=other: program(group, d), 2)
    nnmpi.simulate(lambda group: program(group, of()), 1)


def test_names_of_a_folder_of_images_and_of_a_tokenizer_count():
    class Folder(list):
        classes = ABC

    class Fewer(Folder):
        classes = ABC[1:]

    def program(group):
        worker = make_worker(group)
        items = [(row.astype("float32"), label) for row, label in zip(X, Y, strict=True)]
        train(worker, group, Folder(items))
        data_error("the classes b, c", worker.evaluate, loader(group, Fewer(items)).epoch(0))

    nnmpi.simulate(program, 1)
    data_error("the tokenizer", agree, {"tokenizer": ["bytes 1"]}, {"tokenizer": ["bytes 2"]}, "t")
