"""Layers of options: defaults < resumed run < file < command line; and one sentence for each kind
of fault.
"""

import json
import os
import re
from pathlib import Path
from xml.parsers import expat

import numpy as np
import pytest

from nnmpi import Layout
from nnmpi.base.errors import DataError, HelpAsked, UsageError
from nnmpi.base.launcher import Launch
from nnmpi.base.lines import is_users, lines_of
from nnmpi.data import load
from nnmpi.train import __main__ as train
from nnmpi.train import cli
from nnmpi.train.cli import parse, rank_command
from nnmpi.train.config import Config, all_options, flatten
from tests.data.locked import lock
from tests.harness.refusals import usage_error


def test_no_words_give_the_defaults():
    assert parse([]) == Config()


def test_flat_names_reach_their_sections():
    words = "--model mlp --hidden 50 20 --batch-size full --lr=0.5 --no-jit --data-dir d --dp 2"
    config = parse(words.split())
    assert config.model.hidden == (50, 20)
    assert (config.optimization.batch_size, config.optimization.lr) == ("full", 0.5)
    assert (config.run.jit, config.parallel.dp, config.data.data_dir) == ("off", 2, Path("d"))


@pytest.mark.parametrize(
    "words, ranks",
    [
        ("--ranks 3 --epochs 2", 3),
        ("-n auto", 6),
        ("--ranks=auto --pp 2 --tp 2", 4),
        ("-n auto --pp 4 --dp 3", 12),
        ("--batch-size 2 --ranks auto --tp 2", 4),
        ("--ranks auto --batch-size full --tp 8", 8),
        ("-n 1", 0),
    ],
)
def test_ranks_are_started_by_the_launcher(words, ranks, monkeypatch):
    monkeypatch.setattr(cli, "idle_cores", lambda: 6)
    monkeypatch.setattr(cli, "read_launch", lambda _: None)
    start, _, left = " ".join(rank_command(words.split())).partition(" -m nnmpi.train")
    assert (f" -n {ranks} " in start) == (ranks > 0) == ("--" in left or words == "-n auto")
    assert "-n" not in left and "--ranks" not in left and "auto" not in left


def test_started_ranks_are_told_of_sigterm(monkeypatch):
    """By Open MPI's launcher, so that they save: it kills them otherwise."""
    name, seen = "PRTE_MCA_ess_base_forward_signals", []
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    monkeypatch.setattr(cli, "read_launch", lambda _: None)
    monkeypatch.setattr(train, "run_on_ranks", lambda *_: None)
    monkeypatch.setattr(train, "watch_alone", lambda: None)
    monkeypatch.setattr(os, "execv", lambda *_: seen.append(os.environ.get(name)))
    train.launch(["--ranks", "2"])
    assert seen == ["15"]


def test_ranks_are_started_once(tmp_path, monkeypatch):
    """What says otherwise twice is refused; a file, which any number of ranks may read, cannot."""
    file = tmp_path / "run.toml"
    file.write_text("ranks = 2\n")
    monkeypatch.setattr(cli, "read_launch", lambda _: Launch("srun", 4, 0, None))
    for words, text in (
        ("--ranks 2", "--ranks starts the ranks, and srun has started 4; leave one of them out"),
        ("-n 2 --simulate 2", "--ranks starts processes, and --simulate has its ranks in one"),
        ("-n 0", "--ranks is 0; give a whole number, 1 or more"),
        (f"--config {file}", "ranks belongs on the command line, not in a file"),
    ):
        with pytest.raises(UsageError) as caught:
            rank_command(words.split())
        assert text in str(caught.value)


def test_help_lists_every_option_once_with_help():
    with pytest.raises(HelpAsked) as caught:
        parse(["--lr", "wrong", "--config", "absent.toml", "--help", "all"])
    text = str(caught.value)
    for option in all_options().values():
        assert len(re.findall(rf"(?m)^ {{1,3}}{option.flag}[ ,]", text)) == 1, option.name
    assert "mpirun -n 4 nnmpi train, or nnmpi train --ranks 4" in text
    assert "\x1b" not in text


def test_help_is_short_or_on_a_group():
    """Without a word the options of the first week, with an option those of its group."""
    text = {}
    for topic in ("", "all", "pp"):
        with pytest.raises(HelpAsked) as caught:
            parse(["--help", topic])
        text[topic] = str(caught.value)
    lines = {topic: words.count("\n") for topic, words in text.items()}
    assert lines["pp"] < lines[""] < lines["all"] / 2
    assert "--help NAME" in text[""]
    assert "--virtual-stages" in text["pp"] and "--lr " not in text["pp"]


def test_command_line_over_file_over_defaults(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'lr = 0.5\nepochs = 7\nmomentum = 0.9\nhidden = [9]\nmodel = "mlp"\njit = false\n'
    )
    config = parse(["--epochs", "3", "--config", str(file), "--optimizer", "sgd"])
    assert (config.optimization.lr, config.optimization.epochs) == (0.5, 3)
    assert (config.model.hidden, config.run.jit) == ((9,), "off")
    assert config.run.config == file
    assert parse(["--config", str(file), "--momentum", "0", "--jit"]).run.jit == "on"


def test_resumed_options_lie_between_defaults_and_file(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    before = flatten(
        parse(
            [
                "--epochs",
                "5",
                "--lr",
                "0.5",
                "--log-every",
                "9",
                "--out",
                "elsewhere",
                "--seed",
                "4",
            ]
        )
    )
    (run / "config.json").write_text(json.dumps(before))
    file = tmp_path / "more.toml"
    file.write_text("log_every = 8\nlr = 0.25\n")
    config = parse(["--resume", str(run), "--config", str(file), "--lr", "0.125"])
    assert (config.optimization.epochs, config.run.log_every, config.optimization.lr) == (
        5,
        8,
        0.125,
    )
    assert (config.run.seed, config.run.resume, config.run.out) == (4, run, None)


@pytest.mark.parametrize(
    "words, text",
    [
        ("--learning-rate 2", "--learning-rate is not an option; did you mean --lr?"),
        ("--device 2", "--device is not an option; did you mean --backend?"),
        ("--xyz 1", "--xyz is not an option; options begin"),
        ("--help betchsize", "--help betchsize: there is no such option; did you mean batch-size?"),
        ("--epochs 1.5", "--epochs is 1.5; it must be a whole number"),
        ("--lr", "--lr has no value; it must be a number"),
        ("--lr -x", "-x is not an option; options begin with -- and are listed by --help"),
        ("--lr=-x", "--lr is -x; it must be a number"),
        ("--lr=", "--lr is empty; it must be a number"),
        (
            "--hidden 9999999999999999",
            "--hidden is 9999999999999999; give whole numbers, 1 or more, and below 1e+09",
        ),
        ("--lr -1", "--lr is -1.0; give a finite number above 0"),
        (
            "--model resnt",
            (
                "--model is resnt; choose mlp, cnn, resnet, lstm, gpt, llama, or give your own as"
                " FILE.py:NAME"
            ),
        ),
        (
            "--lr-schedule cosin",
            "--lr-schedule is cosin; give constant, cosine, step:10,0.1, restarts:10,2,"
            " plateau:3,0.1 or FILE.py:NAME",
        ),
        ("--split 3,x", '--split is 3,x; it must be "auto" or a list of whole numbers'),
        ("--split 3,0", "--split is 3,0; give whole numbers, 1 or more"),
        ("--pp 0", "--pp is 0; give a whole number, 1 or more"),
        ("--virtual-stages 0", "--virtual-stages is 0; give a whole number, 1 or more"),
        (
            "--memory-limit much",
            "--memory-limit is much; it must be a number of bytes such as 512MiB",
        ),
        (
            "--activation-memory much",
            "--activation-memory is much; it must be a number of bytes such as 512MiB or",
        ),
        (f"--memory-limit {'9' * 400}", "--memory-limit is 9999"),
        ("--memory-limit 0.0GiB", "--memory-limit is 0; give a whole number, 1 or more"),
        ("--activation-memory 0", "--activation-memory is 0; give a whole number, 1 or more"),
        (
            "--eval-every -1steps",
            "--eval-every is -1steps; it must be a number of epochs, or of steps",
        ),
        (
            "--save-every -1",
            "--save-every is -1; it must be a number of epochs, or of steps, such as 100steps",
        ),
        (
            "--sync asp --activation-memory 1k",
            "--activation-memory cannot be combined with --sync asp",
        ),
        (
            "--model lstm --sp 2",
            "--sp 2 shards the positions of sequences, but --model lstm needs them one after",
        ),
        (
            "--model gpt --dataset paradise-lost --experts 2 --text-samples sentences",
            "--experts counts the tokens of a sequence, and --text-samples sentences pads",
        ),
        (
            "--layout auto --expert-parallel",
            "--layout auto chooses --expert-parallel itself; leave",
        ),
        ("--offload-state all", "--offload-state all needs a target; give --offload, too"),
        ("--offload x", "--offload x needs a limit of activations, or optimizer state to offload"),
        ("--reduction fixed --zero 1", "--reduction fixed cannot be combined with --zero 1: "),
        (
            "--expert-parallel --reduction fixed",
            "--expert-parallel cannot be combined with --reduction fixed: ",
        ),
        ("--virtual-stages 3", "--virtual-stages 3 is for --pipeline interleaved; 1f1b has one"),
        ("--zero 4", "--zero is 4; ZeRO has stages 1, 2, 3"),
        (
            "--sync asp --outer-lr 0.5",
            "--outer-lr is for --sync local or slowmo or FILE.py:NAME, not for asp; leave it out",
        ),
        ("--schedule gpipe", "--schedule is not an option; did you mean --lr-schedule or --pipe"),
        ("--batch-size many", '--batch-size is many; it must be a whole number or "full"'),
        ("--no-normalize 3", "--no-normalize takes no value, but 3 follows it"),
        ("--jit yes", "--jit is yes; it must be one of auto, on, off"),
        ("--hidden 3 x", "--hidden is 3 x; it must be a list of whole numbers"),
        ("--eval-every \u0663", "--eval-every is \u0663; it must be"),
        (
            "--model gpt --layers 99999",
            "--layers is 99999; give a whole number, 1 or more, and below",
        ),
        ("--zero 1 --allreduce star", "--zero 1 cannot be combined with --allreduce star: "),
        ("--reduction fixed --allreduce ring", "--reduction fixed cannot be combined with --all"),
        ("--pp 2 --pipeline pipedream --clip 1", "--clip 1.0 cannot be combined with --pipeline"),
        ("--expert-parallel", "--expert-parallel needs a mixture; give --experts"),
        ("--optimizer muon --sync asp", "--optimizer muon updates whole matrices, but the server"),
        ("--model gpt --loss mse", "--loss is not for --model gpt, whose samples"),
        (
            "iris",
            "iris is not an option, and nnmpi train takes no path; options begin with -- and are"
            " listed by --help",
        ),
        ("--hidden \u0663", "--hidden is \u0663; it must be a list of whole numbers"),
        ("--lr 1_0", "--lr is 1_0; it must be a number"),
        ("--lr \u0663", "--lr is \u0663; it must be a number"),
        ("--config absent.toml", "--config absent.toml cannot be read: "),
        ("--config .", "--config . cannot be read: not an ordinary file; give a TOML file"),
        ("--resume absent", "--resume absent: there is no run "),
        (
            f"--resume {'a' * 300}",
            f"--resume {'a' * 300} cannot be read (File name too long); give a readable run",
        ),
    ],
)
def test_each_fault_is_one_sentence(words, text):
    with pytest.raises(UsageError) as caught:
        parse(words.split())
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_an_error_of_options_has_no_line_of_made_code():
    """Python makes a dataclass's __init__, in which the options are checked, from a text."""
    with pytest.raises(UsageError) as caught:
        Layout(tp=2, reduction="fixed")
    assert [line for line in lines_of(caught.value) if "<string>" in line] == []
    assert any("test_parse.py" in line for line in lines_of(caught.value))


def test_a_compiled_modules_text_is_no_users_line():
    """As those modules name it: a path on the machine that compiled them."""
    for file in (
        "/build/Python-3.11.7/Modules/pyexpat.c",
        "numpy/random/_generator.pyx",
        "src/parsers.cpp",
        "/env/lib/python3.11/site-packages/tokenizers/__init__.py",
        "/env/lib/python3.11/site-packages/threadpoolctl.py",
    ):
        assert not is_users(file)
    assert is_users("/home/me/net.py") and is_users("<stdin>") and is_users("train")
    assert is_users("/env/lib/python3.11/site-packages/numpy_like/net.py")

    def start(*_):
        raise ValueError("from within pyexpat")

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    with pytest.raises(ValueError) as caught:
        parser.Parse("<a>")
    assert all("test_parse.py" in line for line in lines_of(caught.value))


def test_an_error_has_no_lines_of_a_library_that_nnmpi_calls(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    with pytest.raises(DataError) as caught:
        load(str(tmp_path / "x.npz"))
    assert all("test_parse.py" in line for line in lines_of(caught.value))


@pytest.mark.parametrize("words", ["--sp 2", "--pp 2 --zero 3", "--tp 2 --expert-parallel"])
def test_experts_meet_every_axis(words):
    config = parse(f"--model gpt --dataset paradise-lost --experts 4 {words}".split())
    assert config.model.experts == 4


def test_a_run_in_a_folder_that_may_not_be_entered_is_one_sentence(tmp_path, monkeypatch):
    lock(tmp_path, monkeypatch)
    usage_error(
        r"^--resume .*/run cannot be read \(Permission denied\); give a readable",
        parse,
        ["--resume", str(tmp_path / "run")],
    )


def test_options_are_not_read_from_what_may_have_no_end(monkeypatch):
    monkeypatch.setattr(
        Path, "read_text", lambda *_: pytest.fail("it would be read until memory ends")
    )
    usage_error(
        "^--config /dev/zero cannot be read: not an ordinary file; give a TOML file$",
        parse,
        ["--config", "/dev/zero"],
    )


@pytest.mark.parametrize("name", ["--out", "--resume", "--config", "--data-dir"])
@pytest.mark.parametrize("form", [["{}", ""], ["{}="]])
def test_an_empty_path_is_not_this_folder(name, form):
    usage_error(
        f"^{name} is empty; give a path, or leave {name} out$",
        lambda: parse(["--epochs", "3", *(item.format(name) for item in form)]),
    )


@pytest.mark.parametrize(
    "content, text",
    [
        ("lrr = 3", "lrr is not an option; did you mean lr?"),
        ("lr = 'x'", "lr is 'x'; it must be a number"),
        ("lr = ", "cannot be read: Invalid value"),
        (f"lr = {'1' * 5000}", "cannot be read: Exceeds the limit"),
        (f"lr = 0x{'f' * 5000}", "cannot be read: Exceeds the limit"),
        (f"lr = {'[' * 5000}", "nested too deeply"),
        (f"{'a.' * 5000}a = 1", "nested too deeply"),
        (f"{'a.' * 10001}a = 1", "more than 10,000 dots"),
        ("out = ''", "out is ''; it must be a path"),
        ("resume = 'x'", "resume belongs on the command line"),
        ("[optimization]\nlr = 1", "optimization is not an option"),
        ("\ufeffbatch-size = 2\nbatch_size = 3", "batch_size is given twice"),
    ],
)
def test_faults_of_a_file_name_the_file(tmp_path, content, text):
    file = tmp_path / "run.toml"
    file.write_text(content)
    with pytest.raises(UsageError) as caught:
        parse(["--config", str(file)])
    assert str(file) in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "--model mlp",
        "--dataset iris",
        "--target price",
        "--seed 3",
        "--batch-size 64",
        "--optimizer sgd",
        "--no-normalize",
    ],
)
def test_a_resumed_run_keeps_what_its_weights_hang_on(tmp_path, words):
    (tmp_path / "config.json").write_text(json.dumps(flatten(Config())))
    usage_error(
        f"which cannot change to {words}; leave it out",
        lambda: parse(["--resume", str(tmp_path), *words.split()]),
    )
    (tmp_path / "config.json").write_text(json.dumps({"normalize": False}))
    usage_error(
        "has --no-normalize, which cannot change to --normalize;",
        parse,
        ["--resume", str(tmp_path), "--normalize"],
    )


def test_a_resumed_run_may_find_its_data_elsewhere(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"dataset": "here/a.csv", "model": "mlp"}))
    assert (
        parse(["--resume", str(tmp_path), "--dataset", "there/a.csv"]).data.dataset == "there/a.csv"
    )
    for other in ("there/b.csv", "iris"):
        usage_error(
            f"--dataset here/a.csv, which cannot change to --dataset {other}",
            parse,
            ["--resume", str(tmp_path), "--dataset", other],
        )


@pytest.mark.parametrize("content", ["{", "", "[]"])
def test_a_damaged_run_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    usage_error(r"config\.json: cannot be read", parse, ["--resume", str(tmp_path)])


def test_a_resumed_run_leaves_what_belonged_to_its_way_of_synchronization(tmp_path):
    """Otherwise it could not go on in another way: its own options would be refused, and nobody has
    given them.
    """
    served = json.dumps({"sync": "ssp", "staleness": 2, "slow": "rank=1,factor=3", "lr": 0.5})
    (tmp_path / "config.json").write_text(served)
    resume = ["--resume", str(tmp_path)]
    assert parse(resume).sync.staleness == 2
    config = parse([*resume, "--sync=local", "--local-steps", "3"])
    assert (config.sync.sync, config.sync.local_steps) == ("local", 3)
    # these belong to any
    assert (config.sync.slow, config.optimization.lr) == ("rank=1,factor=3", 0.5)
    file = tmp_path / "gossip.toml"
    file.write_text('sync = "gossip"\n')
    assert parse([*resume, "--config", str(file)]).sync.sync == "gossip"
    usage_error(
        "--staleness is for --sync ssp, not for asp",
        parse,
        [*resume, "--sync", "asp", "--staleness", "3"],
    )


def test_options_of_an_older_run_are_read(tmp_path):
    """As a run wrote them whose options had no class in common with those of programs."""
    old = {"dp": "auto", "pp": 2, "pipeline": "interleaved", "virtual_stages": 1, "split": [2, 3]}
    old |= {"precision": "float32", "clip": None, "sync": "bsp", "staleness": None, "zero": 0}
    old |= {
        "memory_limit": 2**20,
        "activation_memory": "least",
        "allreduce": "ring",
        "offload": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(old))
    config = parse(["--resume", str(tmp_path)])
    assert {name: value for name, value in flatten(config).items() if name in old} == old
    assert (config.parallel.stages_per_rank, config.parallel.shape) == (2, (1, 2, 1, 1))
    assert parse(["--resume", str(tmp_path), "--pipeline", "1f1b"]).parallel.stages_per_rank == 1


def test_a_former_name_of_a_value_is_that_of_today(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"allreduce": "ps"}))
    assert parse(["--resume", str(tmp_path)]).parallel.allreduce == "star"


def test_a_run_with_an_option_that_left_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"lr": 0.5, "nesterov": False}))
    usage_error(
        r"config\.json has nesterov, an option that nnmpi has removed",
        parse,
        ["--resume", str(tmp_path)],
    )
