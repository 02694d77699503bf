"""The settings: what they mean, and what does not fit together."""

import pytest

from nnmpi.errors import UsageError
from nnmpi.synchrony.sync import MODES, Sync

REFUSED: list[tuple[dict[str, object], str]] = [
    ({"mode": "fast"}, "mode 'fast' does not exist; choose from: bsp, asp, ssp, local, gossip"),
    ({"mode": "gossip", "neighbours": "grid"}, "neighbours 'grid' does not exist; choose from: ring, random"),
    ({"mode": "ssp", "staleness": -1}, "staleness is -1; give a whole number of at least 0"),
    ({"mode": "local", "local_steps": 0}, "local_steps is 0; give a whole number of at least 1"),
    ({"mode": "asp", "servers": -2}, "servers is -2; give a whole number of at least 0"),
    ({"backup": -1}, "backup is -1; give a whole number of at least 0"),
    ({"mode": "asp", "staleness": 2}, "staleness 2 is for ssp, not asp; leave it out"),
    ({"mode": "ssp", "local_steps": 2}, "local_steps 2 is for local, not ssp; leave it out"),
    ({"mode": "local", "neighbours": "random"}, "neighbours random is for gossip, not local; leave it out"),
    ({"mode": "ssp", "backup": 1}, "backup 1 is for bsp, not ssp; leave it out"),
    ({"mode": "gossip", "servers": 1}, "servers 1 is for bsp or asp or ssp, not gossip; leave it out"),
    (
        {"mode": "local", "dedicated": True},
        "dedicated is for bsp or asp or ssp, not local; leave it out",
    ),
    (
        {"dedicated": True},
        "dedicated servers with bsp: there are none; give servers 1 or more, too",
    ),
    (
        {"backup": 1, "servers": 2},
        "backup 1 with servers 2: which gradients come too late is decided at one place; give servers 1",
    ),
    *(
        ({"mode": mode, "adapt": True}, f"adapt is for asp or ssp, not {mode}; leave it out")
        for mode in ("bsp", "local", "gossip")
    ),
]

UNFIT: list[tuple[dict[str, object], int, str]] = [
    (
        {"mode": "asp", "servers": 5},
        4,
        "servers 5 on 4 ranks: every server is a rank of its own; give at most 4, or start more ranks",
    ),
    (
        {"mode": "ssp", "servers": 2, "dedicated": True},
        2,
        "with 2 dedicated servers on 2 ranks there is nobody to compute; start more ranks, or let the servers "
        "compute as well",
    ),
    (
        {"mode": "asp", "dedicated": True},
        1,
        "with 1 dedicated server on 1 rank there is nobody to compute; start more ranks, or let the servers "
        "compute as well",
    ),
    (
        {"backup": 3},
        3,
        "backup 3 with 3 workers: at least one gradient of each batch must be waited for; give at most 2",
    ),
    (
        {"backup": 2, "servers": 1, "dedicated": True},
        3,
        "backup 2 with 2 workers: at least one gradient of each batch must be waited for; give at most 1",
    ),
    (
        {"backup": 1},
        1,
        "backup 1 with 1 worker: at least one gradient of each batch must be waited for; start more ranks",
    ),
    ({"mode": "gossip"}, 1, "gossip on one rank has no neighbours to average with; start at least 2 ranks"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], sentence: str) -> None:
    """In one sentence that names the setting."""
    with pytest.raises(UsageError) as caught:
        Sync(**settings)  # type: ignore[arg-type]
    assert str(caught.value) == sentence


@pytest.mark.parametrize(("settings", "ranks", "sentence"), UNFIT)
def test_what_does_not_fit_the_ranks_is_refused(settings: dict[str, object], ranks: int, sentence: str) -> None:
    """When their number is known; one rank more and it fits."""
    sync = Sync(**settings)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        sync.check(ranks)
    assert str(caught.value) == sentence
    sync.check(ranks + 1)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_sensible_defaults(mode: str) -> None:
    """On two ranks and more, and all but gossip on one."""
    for ranks in (2, 3, 8):
        Sync(mode).check(ranks)
    assert Sync(mode).asynchronous == (mode != "bsp")
    assert Sync(mode).uses_servers == (mode in ("asp", "ssp"))
    assert Sync(mode).server_count == (1 if mode in ("asp", "ssp") else 0)


def test_bsp_is_served_if_it_has_servers_or_backup_workers() -> None:
    """Backup workers need one."""
    for sync in (Sync(servers=1), Sync(backup=1)):
        assert (sync.uses_servers, sync.asynchronous, sync.bound, sync.server_count) == (True, True, 0, 1)


def test_bounds() -> None:
    """The largest lead."""
    assert [Sync(mode).bound for mode in MODES] == [0, None, 4, None, None]
    assert Sync("ssp", staleness=0).bound == 0


def test_who_is_server_and_who_is_worker() -> None:
    """Servers are the first ranks; they compute unless they are dedicated."""
    both, dedicated = Sync("asp", servers=2), Sync("asp", servers=2, dedicated=True)
    assert [sync.server_ranks(5) for sync in (both, dedicated)] == [range(2), range(2)]
    assert [sync.worker_ranks(5) for sync in (both, dedicated)] == [range(5), range(2, 5)]
    assert (Sync().server_ranks(5), Sync().worker_ranks(5)) == (range(0), range(5))


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        (Sync(), "bsp, the gradients summed by all-reduce"),
        (Sync(servers=2), "bsp; 2 servers (ranks 0 to 1), which compute too"),
        (
            Sync(backup=1, dedicated=True),
            "bsp, the first 2 of 3 gradients; 1 server (rank 0), which does nothing else",
        ),
        (Sync("ssp"), "ssp, at most 4 steps ahead; 1 server (rank 0), which computes too"),
        (
            Sync("asp", servers=3, dedicated=True, adapt=True),
            "asp, stale gradients count less; 3 servers (ranks 0 to 2), which do nothing else",
        ),
        (Sync("local", local_steps=1), "local, the weights averaged every 1 step"),
        (Sync("gossip"), "gossip, the weights averaged with neighbours on a ring"),
        (Sync("gossip", neighbours="random"), "gossip, the weights averaged with neighbours in random pairs"),
    ],
)
def test_it_says_what_it_is(sync: Sync, words: str) -> None:
    """In the head of a run, here on 4 ranks."""
    assert sync.describe(4) == words
