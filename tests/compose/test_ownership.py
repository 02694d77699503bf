"""A model that is made outside of the simulated ranks' function belongs to all of them."""

import pytest

import nnmpi
from nnmpi import data, models, optim
from tests.harness.refusals import usage_error


def make():
    model = models.mlp((4,), 3, [8]).initialize(seed=0)
    return model, optim.SGD(model.storage, lr=0.1)


def worker(group, model, optimizer):
    return nnmpi.Worker(model, optimizer, group)


def parallel(group, model, optimizer):
    return nnmpi.DataParallel(model, group)


def sharded(group, model, optimizer):
    return nnmpi.ShardedDataParallel(model, group, stage=2)


def asynchronous(group, model, optimizer):
    return nnmpi.AsynchronousWorker(model, optimizer, group, nnmpi.Sync("local"))


def another_optimizer(group, model, optimizer):
    return optim.Adam(model.storage, lr=0.1)


WAYS = [worker, parallel, sharded, asynchronous, another_optimizer]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_of_all_ranks_is_refused(way, ranks):
    model, optimizer = make()
    usage_error(
        r"simulated ranks \d and \d were given one model: .*make the model in it",
        nnmpi.simulate,
        lambda group: way(group, model, optimizer),
        ranks,
    )


def test_a_plateau_of_all_ranks_is_refused():
    """It would fall as often as all of them ask."""
    plateau = optim.ReduceOnPlateau(0.1, patience=1)
    usage_error("given one plateau", nnmpi.simulate, lambda group: plateau(1.0), 2)


def test_what_one_rank_has_is_its_own():
    """One rank after another in runs of their own; a rank by itself; ranks that make their own."""
    model, optimizer = make()
    train, _ = data.load("iris")  # nobody changes it

    def alone(group):
        trainer = nnmpi.Worker(model, optimizer, group)
        for batch in data.Loader(train, 30, group).epoch(0):
            trainer.step(batch)
        trainer.release()
        return model.storage.data[0].copy()

    first, second = nnmpi.simulate(alone, 1)[0], nnmpi.simulate(alone, 1)[0]
    assert (first != second).any()

    def own(group):
        mine, its = make()
        trainer = nnmpi.Worker(mine, its, group)
        for batch in data.Loader(train, 30, group).epoch(0):
            trainer.step(batch)
        return mine.storage.data[0].tolist()

    one, two = nnmpi.simulate(own, 2)
    assert one == two
    nnmpi.simulate(lambda group: model(train.x[:2]), 2)  # whom nobody trains, all may read


def test_outside_of_simulated_ranks_nothing_is_owned():
    model, _ = make()
    optim.SGD(model.storage, lr=0.1)
    optim.SGD(model.storage, lr=0.1)
